r"""One silo's signed word on the head that it holds of another one's ledger (rule 30).

A silo asks with a challenge that is new for each session, the leaf hash of its ``control.open``
record; the coordinator passes it on. It can keep answers back; it can neither invent one nor show
an old one again. The signature (label HEAD) is over canonical JSON, here broken::

    {"by":"hospital-b","challenge":"7f3a…","federation":"lung","head":"staddle.example/lung/hospital-a/egress\n413…",
     "roster":"9f86…","silo":"hospital-a"}
"""

from dataclasses import asdict, dataclass

from ...errors import PeerError
from ...files.documents import canonical_json
from ..identity.domains import HEAD
from ..identity.keys import Keys, RosterEntry

CHALLENGE_BYTES = 32


@dataclass(frozen=True)
class Attestation:
    """``by`` holds ``head``, a checkpoint of the ledger of ``silo``.

    Digests and challenge are hex.
    """

    # All fields are signed, so no answer holds for another silo, roster or session.
    federation: str
    roster: str  # digest
    by: str
    silo: str
    # New in each session, so that an answer of an earlier session proves nothing.
    challenge: str
    head: str  # as it was signed; empty: none

    def sign(self, keys: Keys) -> bytes:
        """The signature of ``by``, 64 bytes.

        Ed25519 by its protocol key over label HEAD and canonical JSON of all fields.
        """
        return keys.sign(HEAD, canonical_json(asdict(self)))

    def verify(self, by: RosterEntry, signature: bytes) -> None:
        """PeerError unless ``by`` signed exactly these fields.

        ``by`` is the roster's entry of the silo named in ``self.by``. The caller compares
        challenge and head with its own.
        """
        if not by.has_signed(HEAD, canonical_json(asdict(self)), signature):
            raise PeerError(
                by.id, f"did not sign what it is said to hold of the ledger of {self.silo!r}"
            )
