"""The coordinator keeps of each upload: a receipt, the silo's ledger head, a record of its own.

In this order: the record in the coordinator's ledger is durable, then the submission and the head
are in the database, then the receipt leaves with the head of the coordinator's ledger. A crash
between the first two leaves a record of an upload that the silo sends again: `staddle ledger
reconcile` says so.
"""

from dataclasses import dataclass

from ... import log
from ...algorithms.job.job import Job
from ...errors import RefusedError
from ...proto import federation_pb2 as pb
from ...proto import tensor_pb2 as tensor
from ...proto.stream import Digests
from ...security.identity import roster as rosters
from ...security.identity.keys import Keys
from ...security.ledger.ingress_ledger import ReceivingLedger
from ...security.ledger.receipt import Receipt
from ...security.ledger.records import DeliveredRecord, MessageDigest, Received
from .database import Database, StoredHead, Submission
from .silo_heads import Head, SiloHeads

# Of one round to one silo, while this process lives: each is a record of our ledger.
MOST_DELIVERIES = 100


@dataclass
class Taken:
    """An upload on its way into the state of its job."""

    submission: Submission
    job: Job
    head: Head
    holds: int  # records of our ledger whose head the silo holds
    ours: bytes = b""  # proof for it that our ledger, which has this upload, grew from there

    @property
    def receipt(self) -> pb.Receipt:
        """The receipt, as the silo receives it.

        From ``head`` the silo sees that the coordinator's ledger only grew.
        """
        given = self.submission
        return pb.Receipt(
            round=given.round,
            size=given.size,
            sha256=bytes.fromhex(given.sha256),
            signature=given.receipt,
            head=self.ours,
        )


class Receiving:
    """Heads and receipts of all silos.

    Use it only from the event loop. Its memory never runs ahead of the database.
    """

    def __init__(
        self, roster: rosters.Roster, keys: Keys, database: Database, ledger: ReceivingLedger
    ) -> None:
        self.heads = SiloHeads(roster, database.heads(), ledger.append)
        self.ledger = ledger
        self.roster_digest = rosters.digest(roster)  # once: it is over all entries
        self._roster = roster
        self._keys = keys
        self._database = database
        # (silo, job) → round, how often it was delivered
        self._deliveries: dict[tuple[str, str], tuple[int, int]] = {}

    def take(
        self,
        job: Job,
        silo: str,
        round_: int,
        file: str,
        size: int,
        end: tensor.End,
        digests: Digests,
        head: Head,
        part: str = "",
    ) -> Taken:
        """Sign the receipt of an upload whose head was checked.

        Nothing is kept before ``record``.
        """
        sha256, leaf = digests.total.hex(), end.ledger_leaf.hex()
        receipt = Receipt(
            federation=self._roster.federation,
            members=rosters.members_digest(self._roster, (silo,)),
            silo=silo,
            job=job.digest,
            round=round_,
            size=size,
            sha256=sha256,
            ledger_seq=end.ledger_seq,
            ledger_leaf=leaf,
            ledger_root=head.checkpoint.root.hex(),
        )
        # Signed now, since the row keeps it: a silo whose answer was lost gets the same receipt.
        signature = receipt.sign(self._keys)
        given = Submission(round_, silo, file, size, sha256, end.ledger_seq, leaf, signature, part)
        return Taken(given, job, head, end.holds)

    def record(self, taken: Taken, *, again: bool = False) -> None:
        """Write it: our ledger first, then the rows of the transaction that is open.

        ``again``: the silo may have given for this round before, in an earlier attempt at its sum,
        or an older version.
        """
        given, job = taken.submission, taken.job
        # Our ledger first: a crash may leave a record without a receipt, but no receipt without its
        # record.
        sealed = self.ledger.seal(
            Received(
                silo=given.silo,
                job=job.name,
                job_digest=job.digest,
                round=given.round,
                message=MessageDigest(bytes=given.size, sha256=given.sha256),
                ledger_seq=given.ledger_seq,
                ledger_leaf=given.ledger_leaf,
                checkpoint=bytes(taken.head.note).decode(),
                receipt=given.receipt.hex(),
            )
        )
        # Growth since the head that the silo holds shows that our ledger was not rewritten.
        taken.ours = self.ledger.growth(taken.holds, sealed.checkpoint)
        self._database.add_submission(job.name, given, again=again)
        self._database.save_head(given.silo, self.heads.stored(given.silo, taken.head))
        own = StoredHead(self._keys.entry.log_key, bytes(sealed.checkpoint))
        # Else nobody would notice that an older copy of our ledger was put back.
        self._database.save_head(self._keys.entry.id, own)

    def committed(self, taken: Taken) -> None:
        """Turn to what the database has committed.

        The silo's next upload has to extend the new head.
        """
        given = taken.submission
        self.heads.hold(given.silo, self.heads.stored(given.silo, taken.head))
        # For `staddle ledger verify --known SEQ:LEAF`: a silo that cuts its ledger is found out.
        known = f"{given.ledger_seq}:{given.ledger_leaf}"
        log.event(
            "receipt",
            job=taken.job.name,
            round=given.round,
            silo=given.silo,
            bytes=given.size,
            known=known,
        )

    def check_delivery(self, job: Job, silo: str, round_: int) -> None:
        """RefusedError LIMIT for a silo that fetches the same round without end."""
        # Each delivery is a record of our ledger, which only grows.
        if self._times(job, silo, round_) >= MOST_DELIVERIES:
            why = (
                f"job {job.name!r}: round {round_} was delivered to it {MOST_DELIVERIES} times;"
                " give or fail it"
            )
            raise RefusedError(silo, "LIMIT", why)

    def _times(self, job: Job, silo: str, round_: int) -> int:
        last, times = self._deliveries.get((silo, job.name), (round_, 0))
        return times if last == round_ else 0

    def delivered(self, job: Job, silo: str, round_: int, size: int, digests: Digests) -> None:
        """A delivery was sent to its end.

        Durable when it returns.
        """
        self._deliveries[silo, job.name] = (round_, self._times(job, silo, round_) + 1)
        record = DeliveredRecord(
            silo=silo,
            job=job.name,
            job_digest=job.digest,
            round=round_,
            message=MessageDigest(bytes=size, sha256=digests.total.hex()),
        )
        self.ledger.append(record)
