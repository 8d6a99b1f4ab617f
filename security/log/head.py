"""The signed head of a ledger: who signs it, and whether records agree with heads that were signed
earlier.

``<ledger>/checkpoint`` is a checkpoint (tree_head.py) of all records, or of all but the last few:
the log signs one of no records before it takes the first, then one every 64 records and whenever it
is asked to. So records without a checkpoint, and fewer records than the checkpoint has, are never
what a crash leaves: somebody put them there, or put an old copy back. Records behind the
checkpoint, which a crash does leave, show by their nonces that the log key wrote them (chain.py);
who has it not can cut them off at most.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ...errors import LocalError, ProofError
from ...files.documents import read_bytes
from ..identity.domains import LEDGER_RECORD, framed
from ..identity.keys import ENTRY_FILE, load_entry
from ..identity.pairwise_keys import derive
from ..identity.roster import Roster
from . import note as notes
from . import tree_head as checkpoints
from .merkle import Tree
from .note import Note, SignatureKind, VerifierKey
from .segments import CHECKPOINT
from .tree_head import TreeHead

EVERY = 64  # records from one checkpoint to the next


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs the heads of one ledger; printing it shows no secret."""

    origin: str
    key: Ed25519PrivateKey = field(repr=False)

    @classmethod
    def of(cls, federation: str, silo: str, key: Ed25519PrivateKey) -> "Signer":
        """The signer of a silo's egress ledger; ``key`` is its log key."""
        return cls(checkpoints.origin(federation, silo), key)

    @property
    def public(self) -> VerifierKey:
        """The key that others check the signatures with."""
        return VerifierKey(
            self.origin, SignatureKind.ED25519, self.key.public_key().public_bytes_raw()
        )

    def record_key(self) -> bytes:
        """Key of the nonces of records (chain.py): who lacks the log key can write none."""
        # The origin goes in: a silo's ledger and its budgets share the log key, but not this one.
        return derive(
            self.key.private_bytes_raw(), b"", framed(LEDGER_RECORD, self.origin.encode())
        )

    def sign(self, size: int, root: bytes) -> Note:
        """The signed head of our own log: ``size`` records, and the root over them.

        Nothing checks it here: the caller's log must extend every head that it signed before
        (``tree_head.issue``).
        """
        return checkpoints.issue(TreeHead(self.origin, size, root), self.key)


def log_key(federation: str, silo: str, public: str) -> VerifierKey:
    """Key of a silo's egress ledger, from the ``log_key`` of its roster entry."""
    return VerifierKey(
        checkpoints.origin(federation, silo), SignatureKind.ED25519, bytes.fromhex(public)
    )


def roster_log_key(note: Note, roster: Roster) -> VerifierKey:
    """The key that a checkpoint of one of the roster's silos must be signed with, by the origin
    that it claims.
    """
    # The note may claim any origin: with the key that the claim selects, ``verify`` fails unless
    # that silo signed it.
    federation, silo = checkpoints.owner(TreeHead.parse(note.text).origin)
    if federation != roster.federation:
        raise ProofError(
            f"checkpoint is of federation {federation!r}, the roster of {roster.federation!r}"
        )
    return log_key(federation, silo, roster[silo].log_key)


def own_log_key(federation: str, keys: Path) -> VerifierKey:
    """Like ``log_key``, from a silo's own folder of keys; only its public entry is read."""
    entry = load_entry(keys / ENTRY_FILE)
    return log_key(federation, entry.id, entry.log_key)


def stored(folder: Path) -> Note | None:
    """The checkpoint of a ledger's folder, whoever signed it; None where there is none.

    LocalError for a file that is not a note. ``stored_by`` checks who signed it.
    """
    path = folder / CHECKPOINT
    # A log signs one before its first record, so None means a new folder or a fault.
    if not path.exists():
        return None
    try:
        return notes.parse(read_bytes(path))
    except ProofError as error:
        raise LocalError(
            f"{path}: {error}; restore it from the newest copy of the folder"
        ) from error


def stored_by(folder: Path, key: VerifierKey) -> TreeHead | None:
    """The checkpoint of a folder.

    LocalError unless this key signed it, and nothing but origin, size and root.
    """
    note = stored(folder)
    if note is None:
        return None
    path = folder / CHECKPOINT
    try:
        found = checkpoints.verify(note, key).checkpoint
    except ProofError as error:
        raise LocalError(
            f"{path}: {error}; use the keys that it was signed with, or restore it"
        ) from error

    # Our logs write neither, so somebody added them.
    if found.extensions or len(note.signatures) != 1:
        raise LocalError(
            f"{path}: holds more than a log writes there; restore it from the newest copy of the"
            " folder"
        )
    return found


@dataclass(frozen=True, slots=True)
class HeldHead:
    """A checkpoint that the log signed once, and who holds it: ``the coordinator``, ``the folder
    itself``.
    """

    holder: str
    checkpoint: TreeHead


class Agreement:
    """Compares a ledger with heads that were signed earlier, while its records are read one after
    another.
    """

    def __init__(self, held: Sequence[HeldHead]) -> None:
        self.tree = Tree()
        self._held = held

    def append(self, leaf: bytes) -> None:
        """Take in the leaf hash of the next record."""
        self.tree.append(leaf)

    def problems(self) -> Iterable[str]:
        """One reason per head that the ledger does not agree with; call it after all records."""
        for each in self._held:
            if problem := disagreement(self.tree, each):
                yield problem


def disagreement(tree: Tree, held: HeldHead) -> str:
    """Why a ledger with these leaves did not grow from the one that a checkpoint was signed for.

    Empty if it did.
    """
    # Roots of two sizes cannot be compared: ours at the size of theirs is.
    size, count = held.checkpoint.size, len(tree)
    if size > count:
        return (
            f"records were cut off: there are {count}, and {held.holder} holds a signed checkpoint"
            f" of {size}"
        )
    if tree.root(size) != held.checkpoint.root:
        return (
            f"records were rewritten: {held.holder} holds a signed checkpoint of {size}, to which"
            f" the first {size} of these {count} records do not lead"
        )
    return ""
