"""How uploads and secure sums end, as the ledger records it. Nothing leaves from here.

An upload that the policy holds back ends in a denial. One that left ends in OUTCOME. Where the
connection breaks, the INTENT stays open: after the next greeting, of this process or of one after
it, the coordinator is asked what became of the upload and OUTCOME is written. It is ``sent`` with
the receipt that was lost, else ``unknown``, which counts as left. The bytes that the coordinator
has need not go again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias

from ...errors import LocalError, PeerError, RefusedError
from ...proto import federation_pb2 as pb
from ...proto.convert.secagg_sent import Attempt
from ...proto.stream import resumable
from ...security.faults import Code
from ...security.identity import roster as rosters
from ...security.ledger.egress_ledger import Ledger, Unsettled
from ...security.ledger.receipt import Receipt
from ...security.ledger.records import MOST_WHY, Deny, Intent, OutcomeRecord, SumEnd, SumOpened
from ...security.secagg.silo_events import Finish, LeaveAttempt
from ..ingress.open_sums import Refusal

Status: TypeAlias = Literal["sent", "failed", "unknown"]
# (job, job digest, round, part)
Ask: TypeAlias = Callable[[str, str, int, str], Awaitable[pb.StandingReply]]


@dataclass(frozen=True)
class SettledUpload:
    """The outcome of an upload whose connection broke, and why if it is not ``sent``.

    ``why`` is for the log. By ``ctx`` a blind round knows which of its uploads it was.
    """

    job: str
    round: int
    status: Status
    why: str
    digest: int | None  # seq of its DIGEST record, if it is ``sent``
    ctx: str = ""  # what a blind upload was bound to, hex


class OtherRosterError(PeerError):
    """The coordinator opened no session, since its roster is another one: ``roster``, unchecked."""

    def __init__(self, coordinator: str, roster: bytes) -> None:
        super().__init__(coordinator, "holds another roster")
        self.roster = roster


class DeniedError(LocalError):
    """The silo's own policy holds a message back; nothing left.

    It is raised once the denial is in the ledger.
    """


class Denials:
    """Records messages that the policy held back, and raises DeniedError."""

    def __init__(self, ledger: Ledger, policy: str) -> None:
        """``policy`` is the digest of the one in force."""
        self._ledger = ledger
        self._policy = policy
        # job digest → round and reasons of its last denial
        self._last: dict[str, tuple[int, tuple[str, ...]]] = {}

    async def deny(
        self, job: str, digest: str, round_: int, reasons: tuple[str, ...], purpose: str = "update"
    ) -> NoReturn:
        """Record why a round is held back, then raise DeniedError.

        Repeating the last denial of a job writes no record.
        """
        denial = (round_, reasons)
        # The coordinator may ask for the same round without end, and the ledger must not grow by
        # that, also where it asks for rounds of several jobs in turn.
        if denial != self._last.get(digest):
            record = Deny(
                job=job, round=round_, purpose=purpose, policy=self._policy, reasons=reasons
            )
            await asyncio.to_thread(self._ledger.append, record)
        self._last[digest] = denial
        raise DeniedError("this silo holds the round back: " + "; ".join(reasons))


class Outcomes:
    """Writes the outcomes of uploads.

    It knows what the ledger does not: how far broken uploads came, and how many of their bytes wait
    at the coordinator.
    """

    def __init__(self, ledger: Ledger, roster: rosters.Roster) -> None:
        self._ledger = ledger
        self._roster = roster
        # intent whose connection broke → message bytes handed to the transport
        self._handed: dict[int, int] = {}
        # job digest, round, ctx → bytes that wait for the rest
        self._received: dict[tuple[str, int, str], int] = {}

    def check_receipt(self, intent: int, reply: pb.Receipt) -> int:
        """The place in our ledger of a message that the coordinator has.

        PeerError unless the coordinator signed that it has the message, from this place.
        """
        # A receipt before the digest is durable would be one for bytes that the ledger may lose.
        message = next((found for found in self._ledger.unsettled if found.seq == intent), None)
        if message is None or message.digest is None or message.place is None:
            raise PeerError(self._roster.coordinator.id, "sent a receipt before the message ended")

        # Made here from what this silo knows: the reply brings a signature alone.
        Receipt(
            federation=self._roster.federation,
            members=rosters.members_digest(self._roster, (self._ledger.silo,)),
            silo=self._ledger.silo,
            job=message.intent.job_digest,
            round=message.intent.round,
            size=message.digest.message.bytes,
            sha256=message.digest.message.sha256,
            ledger_seq=message.place.seq,
            ledger_leaf=message.place.leaf,
            ledger_root=self._ledger.root(message.place.seq + 1).hex(),
        ).verify(self._roster.coordinator, reply.signature)
        return message.place.seq

    async def close(self, intent: int, status: Status, size: int, receipt: bytes = b"") -> None:
        """Write OUTCOME; ``size`` message bytes were handed to the transport.

        Durable when it returns.
        """
        record = OutcomeRecord(
            ref=intent, status=status, bytes_sent=size, receipt=receipt.hex() or None
        )
        await asyncio.to_thread(self._ledger.append, record)

    @property
    def broken(self) -> bool:
        """True while an upload of this process waits to be settled."""
        return not self._handed.keys().isdisjoint(each.seq for each in self._ledger.unsettled)

    def broke(self, intent: int, size: int) -> None:
        """Note that the connection broke, so that OUTCOME has to wait.

        ``size`` message bytes had been handed to the transport.
        """
        self._handed[intent] = size

    def offset(self, job_digest: str, round_: int, size: int, ctx: str = "") -> int:
        """The byte from which an upload of ``size`` bytes resumes, returned once.

        It is 0, or behind the bytes that wait at the coordinator. ``ctx`` is what a blind upload is
        bound to: the words of another attempt or version are other bytes.
        """
        received = self._received.pop((job_digest, round_, ctx), 0)
        return received if resumable(received, size) else 0

    async def settle(self, ask: Ask) -> list[SettledUpload]:
        """Ask what became of broken uploads and write their outcomes, oldest first.

        No upload may run meanwhile.
        """
        return [await self._settle(ask, message) for message in self._ledger.unsettled]

    async def _settle(self, ask: Ask, message: Unsettled) -> SettledUpload:
        intent = message.intent
        status, receipt, why = await self._standing(ask, message)
        # After a restart it is not known how far the bytes came: all that was declared counts.
        handed = self._handed.pop(message.seq, intent.message.bytes)
        # A receipt says that all of it left, whatever was handed to the transport.
        await self.close(
            message.seq, status, intent.message.bytes if status == "sent" else handed, receipt
        )
        place = message.place.seq if message.place and status == "sent" else None
        return SettledUpload(intent.job, intent.round, status, why, place, _ctx(intent))

    async def _standing(self, ask: Ask, message: Unsettled) -> tuple[Status, bytes, str]:
        """The status, the receipt, and why the upload is not ``sent``."""
        intent = message.intent
        try:
            # a hidden message is of one part
            part = intent.tensors[0].part if intent.hidden else ""
            reply = await ask(intent.job, intent.job_digest, intent.round, part)
        except RefusedError as error:
            # The coordinator does not know the job any more: the bytes count as left.
            if error.code != "UNKNOWN_JOB":
                raise
            return "unknown", b"", str(error)
        # The next upload of the same bytes resumes after these.
        self._received[intent.job_digest, intent.round, _ctx(intent)] = reply.received
        if not reply.HasField("receipt"):
            return (
                "unknown",
                b"",
                f"the coordinator has {reply.received} bytes that wait for the rest",
            )
        try:
            self.check_receipt(message.seq, reply.receipt)
        except PeerError as error:  # a receipt for something else
            return "unknown", b"", str(error)
        return "sent", reply.receipt.signature, ""


def _ctx(intent: Intent) -> str:
    """What a blind upload is bound to, hex; empty for a plain one."""
    bound = intent.secagg or intent.hidden
    return bound.ctx if bound else ""


class SumRecords:
    """Records how attempts at secure sums ended; each method returns once its record is durable."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def summed(self, attempt: Attempt, done: Finish) -> None:
        """Record that the sum was opened, over these survivors."""
        record = SumOpened(
            job=attempt.job,
            job_digest=attempt.job_digest.hex(),
            round=attempt.round,
            ctx=attempt.ctx.hex(),
            survivors=tuple(done.survivors),
            sha256=done.sha256.hex(),
        )
        await asyncio.to_thread(self._ledger.append, record)

    async def ended(self, attempt: Attempt, ended: LeaveAttempt) -> None:
        """Record that an attempt ended without a sum, and by whose fault; a long reason is cut."""
        record = SumEnd(
            job=attempt.job,
            job_digest=attempt.job_digest.hex(),
            round=attempt.round,
            ctx=attempt.ctx.hex(),
            code=ended.code,
            blame=ended.blame,
            why=ended.why[:MOST_WHY],
        )
        await asyncio.to_thread(self._ledger.append, record)

    async def refused(self, job: str, job_digest: str, refusal: Refusal) -> None:
        """Record that a sum which came down was rejected, as an attempt that ended."""
        error = refusal.error
        attempt = Attempt(job, bytes.fromhex(job_digest), refusal.round, 0, refusal.ctx)
        await self.ended(attempt, LeaveAttempt(Code(error.code), error.peer, error.why))
