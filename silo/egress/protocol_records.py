"""What the ledger records beside uploads: messages of secure sums and of key agreements, and how
each attempt ended.
"""

import asyncio
from hashlib import sha256

from google.protobuf.message import Message

from ...proto import secure_pb2 as pb
from ...proto.channel import CONTRIBUTE, PADDED, SECURE
from ...proto.convert.secagg_sent import Attempt
from ...security.faults import Code
from ...security.ledger.egress_ledger import Ledger
from ...security.ledger.records import MOST_WHY, Payload, Peer, ProtocolMessage, SumEnd, SumOpened
from ...security.secagg.silo_events import Finish, LeaveAttempt
from ..ingress.open_sums import Refusal


class SecureRecords:
    """Writes into one silo's ledger; every method returns once its record is durable."""

    def __init__(self, ledger: Ledger, recipient: Peer) -> None:
        self._ledger = ledger
        self._recipient = recipient

    async def leaving(self, attempt: Attempt, upload: pb.SecureUpload) -> None:
        """A protocol message is about to leave; it counts as left, whatever becomes of it."""
        record = ProtocolMessage(
            job=attempt.job,
            job_digest=attempt.job_digest.hex(),
            round=attempt.round,
            ctx=attempt.ctx.hex(),
            kind=upload.WhichOneof("body"),
            rpc=SECURE,
            recipient=self._recipient,
            message=_on_the_wire(upload),
        )
        await self._append(record)

    async def contributing(self, ctx: bytes, contributed: pb.Contributed) -> None:
        """A contribution of this silo to the key of a job is about to leave, before round 0.

        ``ctx`` is of its epoch.
        """
        record = ProtocolMessage(
            job=contributed.job,
            job_digest=contributed.job_digest.hex(),
            round=0,
            ctx=ctx.hex(),
            kind="contribution",
            rpc=CONTRIBUTE,
            recipient=self._recipient,
            message=_on_the_wire(contributed),
        )
        await self._append(record)

    async def padded(self, ctx: bytes, word: pb.PaddedWordUpload) -> None:
        """The word on a padded upload is about to leave; ``ctx`` is that of its version."""
        record = ProtocolMessage(
            job=word.job,
            job_digest=word.job_digest.hex(),
            round=word.upload.round,
            ctx=ctx.hex(),
            kind="padded",
            rpc=PADDED,
            recipient=self._recipient,
            message=_on_the_wire(word),
        )
        await self._append(record)

    async def ended(self, attempt: Attempt, ended: LeaveAttempt) -> None:
        """An attempt ended without a sum, by whose fault and why; a long reason is cut."""
        record = SumEnd(
            job=attempt.job,
            job_digest=attempt.job_digest.hex(),
            round=attempt.round,
            ctx=attempt.ctx.hex(),
            code=ended.code,
            blame=ended.blame,
            why=ended.why[:MOST_WHY],
        )
        await self._append(record)

    async def refused(self, job: str, job_digest: str, refusal: Refusal) -> None:
        """A sum that came down was refused: recorded as an attempt that ended."""
        error = refusal.error
        attempt = Attempt(job, bytes.fromhex(job_digest), refusal.round, 0, refusal.ctx)
        await self.ended(attempt, LeaveAttempt(Code(error.code), error.peer, error.why))

    async def summed(self, attempt: Attempt, done: Finish) -> None:
        """The sum was opened, over these survivors."""
        record = SumOpened(
            job=attempt.job,
            job_digest=attempt.job_digest.hex(),
            round=attempt.round,
            ctx=attempt.ctx.hex(),
            survivors=tuple(done.survivors),
            sha256=done.sha256.hex(),
        )
        await self._append(record)

    async def _append(self, record: ProtocolMessage | SumEnd | SumOpened) -> None:
        await asyncio.to_thread(self._ledger.append, record)


def _on_the_wire(message: Message) -> Payload:
    data = message.SerializeToString(deterministic=True)
    return Payload(bytes=len(data), sha256=sha256(data).hexdigest())
