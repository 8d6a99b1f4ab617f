"""What the ledger records beside uploads: messages of secure sums and of key agreements, and how
each attempt ended.
"""

import asyncio
from hashlib import sha256

from ...proto import secure_pb2 as pb
from ...proto.channel import CONTRIBUTE, PADDED, SECURE
from ...proto.convert.secagg_sent import Attempt
from ...security.faults import Code
from ...security.ledger.egress_ledger import Ledger
from ...security.ledger.records import Payload, Peer
from ...security.secagg.silo_events import Finish, LeaveAttempt
from ..ingress.open_sums import Refusal


class SecureRecords:
    """Writes into one silo's ledger; every method returns once its record is durable."""

    def __init__(self, ledger: Ledger, recipient: Peer) -> None:
        self._ledger = ledger
        self._recipient = recipient

    async def leaving(self, attempt: Attempt, given: pb.SecureUpload) -> None:
        """A protocol message is about to leave; it counts as left, whatever becomes of it."""
        message = given.SerializeToString(deterministic=True)
        await asyncio.to_thread(
            self._ledger.protocol_message,
            job=attempt.job,
            job_digest=attempt.job_digest.hex(),
            round_number=attempt.round,
            ctx=attempt.ctx.hex(),
            kind=given.WhichOneof("body"),
            rpc=SECURE,
            recipient=self._recipient,
            message=_payload(message),
        )

    async def contributing(self, ctx: bytes, given: pb.Contributed) -> None:
        """What this silo gives to the key of a job is about to leave, before round 0.

        ``ctx`` is of its epoch.
        """
        await asyncio.to_thread(
            self._ledger.protocol_message,
            job=given.job,
            job_digest=given.job_digest.hex(),
            round_number=0,
            ctx=ctx.hex(),
            kind="contribution",
            rpc=CONTRIBUTE,
            recipient=self._recipient,
            message=_payload(given.SerializeToString(deterministic=True)),
        )

    async def padded(self, ctx: bytes, given: pb.PaddedWordUpload) -> None:
        """The word on a padded upload is about to leave; ``ctx`` is that of its version."""
        await asyncio.to_thread(
            self._ledger.protocol_message,
            job=given.job,
            job_digest=given.job_digest.hex(),
            round_number=given.upload.round,
            ctx=ctx.hex(),
            kind="padded",
            rpc=PADDED,
            recipient=self._recipient,
            message=_payload(given.SerializeToString(deterministic=True)),
        )

    async def ended(self, attempt: Attempt, ended: LeaveAttempt) -> None:
        """An attempt ended without a sum, by whose fault and why."""
        await asyncio.to_thread(
            self._ledger.secagg_end,
            job=attempt.job,
            job_digest=attempt.job_digest.hex(),
            round_number=attempt.round,
            ctx=attempt.ctx.hex(),
            code=ended.code.value,
            blame=ended.blame,
            why=ended.why,
        )

    async def refused(self, job: str, job_digest: str, refusal: Refusal) -> None:
        """A sum that came down was not taken: recorded as one that ended, by whose fault
        and why.
        """
        error = refusal.error
        attempt = Attempt(job, bytes.fromhex(job_digest), refusal.round, 0, refusal.ctx)
        await self.ended(attempt, LeaveAttempt(Code(error.code), error.peer, error.why))

    async def summed(self, attempt: Attempt, done: Finish) -> None:
        """The sum was opened, over these survivors."""
        await asyncio.to_thread(
            self._ledger.secagg_sum,
            job=attempt.job,
            job_digest=attempt.job_digest.hex(),
            round_number=attempt.round,
            ctx=attempt.ctx.hex(),
            survivors=done.survivors,
            sha256=done.sha256.hex(),
        )


def _payload(message: bytes) -> Payload:
    return Payload(bytes=len(message), sha256=sha256(message).hexdigest())
