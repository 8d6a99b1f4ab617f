"""The head of the silo's ledger that a model holds."""

from pathlib import Path

from ..errors import LocalError, ProofError
from ..security.ledger import audit
from ..security.log import note as notes
from ..security.log.head import log_key
from ..security.log.tree_head import TreeHead
from .folder import VerifiedFolder


def check_ledger(model: VerifiedFolder, ledger: Path) -> int:
    """LocalError unless a ledger holds and leads from the model's head to what it has now.

    Returns the number of its records.
    """
    signer, origin = model.signer, model.description.origin
    if signer is None or not origin.head:
        raise LocalError(f"{model.path}: holds no head of a ledger; only a silo's model does")
    key = log_key(origin.federation, signer.id, signer.log_key)
    found = audit.verify(ledger, {}, key, {str(model.path): notes.parse(origin.head.encode())})
    if not found.ok:
        raise LocalError(
            f"{ledger}: is not what the ledger of silo {signer.id} can have become since"
            f" {model.path} was made; take that silo's folder; found: {'; '.join(found.problems)}"
        )
    return found.records


def check_head(model: VerifiedFolder) -> TreeHead | None:
    """The head, signed by the log key of who signed the model; None where it holds none.

    LocalError for a head of another ledger, or with another signature.
    """
    origin, signer = model.description.origin, model.signer
    if signer is None or not origin.head:
        return None
    try:
        note = notes.parse(origin.head.encode())
        notes.verify(note, [log_key(origin.federation, signer.id, signer.log_key)])
        return TreeHead.parse(note.text)
    except ProofError as error:
        raise LocalError(f"{model.path}: its ledger head: {error}; ask for it again") from error
