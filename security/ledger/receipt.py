"""The receipt that the coordinator signs for an upload: these bytes reached me, from this place of
your ledger.

The signature (label RECEIPT) is over canonical JSON, here broken::

    {"federation":"lung","job":"5c1f…","ledger_leaf":"9a0b…","ledger_root":"4b2f…","ledger_seq":412,
     "roster":"9f86…","round":17,"sha256":"e3b0…","silo":"hospital-a","size":248200}

``ledger_root`` is the root of the silo's ledger up to that place, for which the coordinator holds a
checkpoint that the silo signed, and a proof that it extends the one before (rule 30). The receipt
proves that the coordinator received bytes with this digest; it says nothing about what the tensors
mean.
"""

from dataclasses import asdict, dataclass

from ...errors import PeerError
from ...files.documents import canonical_json
from ..identity.domains import RECEIPT
from ..identity.keys import Keys, RosterEntry


@dataclass(frozen=True)
class Receipt:
    """The fields of a receipt; digests are hex."""

    federation: str
    members: str  # digest of the coordinator and this silo: ``rosters.members_digest``
    silo: str  # that uploaded, and whose ledger it is
    job: str  # digest
    round: int
    size: int  # bytes
    sha256: str
    ledger_seq: int
    ledger_leaf: str
    # The root makes a receipt fix all records up to this one, not this one alone.
    ledger_root: str  # of the first ledger_seq + 1 records

    def sign(self, keys: Keys) -> bytes:
        """The coordinator's signature, 64 bytes: Ed25519 by its protocol key, label RECEIPT."""
        return keys.sign(RECEIPT, canonical_json(asdict(self)))

    def verify(self, coordinator: RosterEntry, signature: bytes) -> None:
        """PeerError unless the coordinator signed exactly these fields.

        The silo fills the fields from what it sent, so a receipt for other bytes, or for another
        record, does not fit.
        """
        if not coordinator.has_signed(RECEIPT, canonical_json(asdict(self)), signature):
            raise PeerError(
                coordinator.id,
                f"its receipt for round {self.round} does not fit what we sent (ledger record"
                f" {self.ledger_seq}); keep the ledger and ask its operator",
            )
