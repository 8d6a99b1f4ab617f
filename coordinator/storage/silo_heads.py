"""The heads of the silos' ledgers that the coordinator holds: each silo's at its last upload.

Each upload ends with a head that the silo signed, a proof that it grew from the one held here, and
a proof that the upload's DIGEST record is its last. An upload under any other head is refused
(LEDGER): the silo's ledger was rolled back, rewritten or forked. A new ledger begins with a new log
key in the roster, and with nothing held.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ... import log
from ...errors import ProofError, RefusedError
from ...proto import tensor_pb2 as tensor
from ...security.identity.roster import Roster
from ...security.identity.selection import among, without
from ...security.ledger.records import HeadRefused
from ...security.log import consistency
from ...security.log import note as notes
from ...security.log.head import log_key
from ...security.log.merkle import verify_inclusion
from ...security.log.note import Note
from ...security.log.tree_head import TreeHead
from .database import StoredHead

MAX_HEAD_BYTES = 4096  # of a checkpoint: an origin, two numbers and one signature


@dataclass(frozen=True)
class Head:
    """A checked head: the note as the silo signed it, and its parsed text."""

    note: Note
    checkpoint: TreeHead


class SiloHeads:
    """The heads of all silos.

    Only ``hold`` changes them, after the database has.
    """

    def __init__(
        self,
        roster: Roster,
        stored: dict[str, StoredHead],
        refused: Callable[[HeadRefused], object],
    ) -> None:
        """``refused`` keeps the evidence."""
        self._roster = roster
        self._held = dict(stored)
        self._refused = refused

    def note(self, silo: str) -> bytes:
        """The checkpoint that is held of a silo's ledger; empty where none is.

        The silo gets it in the reply to Hello, and compares it with its ledger.
        """
        held = self._held.get(silo)
        return held.note if held else b""

    def others(self, silo: str, silos: tuple[str, ...]) -> list[bytes]:
        """The checkpoints of the other ones of these silos, as far as they are held.

        In the order of ``silos``, as they were signed. With them this silo can witness a rollback
        (security rule 30).
        """
        others = without(among(silos, self._held), (silo,))
        return [self._held[other].note for other in others]

    def check(self, silo: str, end: tensor.End) -> Head:
        """The head at the end of an upload.

        RefusedError LEDGER unless it extends what is held, up to its record.
        """
        key = log_key(self._roster.federation, silo, self._roster[silo].log_key)
        try:
            proof = _read(end)
        except ProofError as error:
            raise RefusedError(
                silo, "LEDGER", f"the head of its ledger cannot be read: {error}"
            ) from error

        # The founders signed for another log key: a ledger under it is new, and not rolled back.
        held = self._held.get(silo)
        new_key = held is not None and held.log_key != key.public.hex() and proof.old_size == 0
        before = None if held is None or new_key else TreeHead.parse(notes.parse(held.note).text)
        try:
            after = _grown(before, proof, end, key)
        except ProofError as error:
            why = f"the head of its ledger does not extend the one held here: {error}"
            # Two heads that the silo signed and that exclude one another are evidence of a fork.
            if before is not None and _signed(proof, key):
                self._refused(HeadRefused.of(silo, proof.checkpoint, why))
            raise RefusedError(silo, "LEDGER", why) from error
        if new_key:
            log.problem(
                "ledger.began_anew",
                silo=silo,
                why="under another log key; the old head is in our own ledger",
            )
        return Head(proof.checkpoint, after)

    def stored(self, silo: str, head: Head) -> StoredHead:
        """The database row of a head, under the log key of the present roster."""
        return StoredHead(self._roster[silo].log_key, bytes(head.note))

    def hold(self, silo: str, stored: StoredHead) -> None:
        """Take over a head that the database has committed; the next upload has to extend it."""
        self._held[silo] = stored


def _read(end: tensor.End) -> consistency.Consistency:
    proof = consistency.Consistency.parse(end.head)
    # A longer one would not fit into a record of our own ledger, which keeps it.
    if (size := len(bytes(proof.checkpoint))) > MAX_HEAD_BYTES:
        raise ProofError(f"checkpoint has {size} bytes, more than {MAX_HEAD_BYTES}")
    return proof


def _grown(
    before: TreeHead | None,
    proof: consistency.Consistency,
    end: tensor.End,
    key: notes.VerifierKey,
) -> TreeHead:
    """The head after ``before``, whose last record is that of the upload; ProofError if not."""
    # First its growth from the head that is held, then its newest record.
    after = consistency.verify_from(before, proof, key)
    verify_inclusion(end.ledger_leaf, end.ledger_seq, after.size, after.root, end.inclusion)

    # The note stands in receipts and ledgers as the silo signed it, so nothing else may be in it.
    bare = len(proof.checkpoint.signatures) == 1 and not after.extensions
    if not bare or after.size != end.ledger_seq + 1:
        raise ProofError(
            f"checkpoint of {after.size} records for a record {end.ledger_seq}, or not bare"
        )
    # An equal head passes as growth, but this upload must have added a record.
    if before is not None and after.size == before.size:
        raise ProofError("its ledger did not grow, so it holds no record of this upload")
    return after


def _signed(proof: consistency.Consistency, key: notes.VerifierKey) -> bool:
    """Whether the silo signed this head: else it is evidence of nothing."""
    try:
        notes.verify(proof.checkpoint, [key])
    except ProofError:
        return False
    return True
