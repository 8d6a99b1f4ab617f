"""Protocol messages: those of secure sums, of key agreements, and signed words on padded uploads.

They carry public keys, sealed or revealed shares, tags and signatures; no tensor of a round. Each
is in the ledger before it leaves, and counts as left whatever becomes of it: after a crash between
the two the ledger says too much, never too little. Questions for the next message are control
messages (session.py).
"""

import asyncio
from hashlib import sha256

from google.protobuf.message import Message

from ... import log
from ...algorithms.job.job import Job
from ...proto import secure_pb2 as pb
from ...proto.channel import CONTRIBUTE, PADDED, SECURE
from ...proto.convert import group_key
from ...proto.convert.group_key import Contributed, KeyPoll, contributed_to_wire
from ...proto.convert.secagg_received import SecaggDelivery, secagg_delivery_from_wire
from ...proto.convert.secagg_sent import (
    Attempt,
    SecaggPoll,
    SecaggUpload,
    UploadBody,
    poll_to_wire,
    secagg_upload_to_wire,
)
from ...security.blind.group_key import KeyContribution, Relayed
from ...security.blind.sealing import SealedSecret
from ...security.ledger.egress_ledger import Ledger
from ...security.ledger.records import MessageDigest, ProtocolMessage
from ...security.policy.policy import SiloPolicy
from .outcomes import Denials
from .session import CoordinatorSession

PROTOCOL = "protocol"  # the kind, in the log, of a secure sum's messages


class ProtocolMessages:
    """Sends one silo's protocol messages, and asks for the other silos'.

    Each message is in the ledger before it leaves; polls are only counted.
    """

    def __init__(
        self, session: CoordinatorSession, ledger: Ledger, policy: SiloPolicy, denials: Denials
    ) -> None:
        self._session = session
        self._ledger = ledger
        self._policy = policy
        self._denials = denials

    # Secure sums.

    async def secure(self, attempt: Attempt, body: UploadBody) -> None:
        """Upload a message of a secure sum.

        DeniedError over the policy's bytes of a round.
        """
        message = secagg_upload_to_wire(SecaggUpload(self._session.token, attempt, body))
        job, digest, round_ = attempt.job, attempt.job_digest.hex(), attempt.round

        # The coordinator begins attempts, and each costs messages: without a limit on their sum it
        # could draw any number of bytes out of a silo in one round.
        size = message.ByteSize()
        total = self._ledger.sent(digest, round_) + size
        most = self._policy.file.limits.max_bytes_per_round
        if total > most:
            reason = (
                f"{total} bytes this round are over max_bytes_per_round = {most}; raise it if they"
                " may leave"
            )
            await self._denials.deny(job, digest, round_, (reason,))

        record = ProtocolMessage(
            job=job,
            job_digest=digest,
            round=round_,
            ctx=attempt.ctx.hex(),
            kind=message.WhichOneof("body"),
            rpc=SECURE,
            recipient=self._session.coordinator,
            message=_on_the_wire(message),
        )
        await asyncio.to_thread(self._ledger.append, record)
        log.event("leaving", job=job, round=round_, kind=PROTOCOL, bytes=size)
        await self._session.client.secure(message)

    async def secure_next(self, job: Job, round_: int, had: int) -> SecaggDelivery | None:
        """Wait for the next message of the round's secure sums.

        None where none came within the hold time.
        """
        question = poll_to_wire(
            SecaggPoll(self._session.token, job.name, bytes.fromhex(job.digest), round_, had)
        )
        self._session.count(question)
        message = await self._session.client.secure_next(question, self._session.hold)
        return secagg_delivery_from_wire(message)

    def entered(self, job: Job) -> bool:
        """Whether this silo uploaded keys into a secure sum of this job, or was about to."""
        return self._ledger.entered(job.digest)

    # The key of a job's silos.

    async def contribute(
        self, job: Job, ctx: bytes, contribution: KeyContribution, pieces: tuple[SealedSecret, ...]
    ) -> None:
        """Upload this silo's contribution to the key of a job; ``ctx`` is of its epoch."""
        message = contributed_to_wire(
            Contributed(
                self._session.token, job.name, bytes.fromhex(job.digest), contribution, pieces
            )
        )
        record = ProtocolMessage(
            job=job.name,
            job_digest=job.digest,
            round=0,  # it leaves before the first round
            ctx=ctx.hex(),
            kind="contribution",
            rpc=CONTRIBUTE,
            recipient=self._session.coordinator,
            message=_on_the_wire(message),
        )

        # The record is durable before the message leaves, as of every message with content.
        await asyncio.to_thread(self._ledger.append, record)
        await self._session.client.contribute(message)

    def contributed(self, job: Job) -> bool:
        """Whether this silo uploaded anything for the key of this job, as its ledger has it."""
        return self._ledger.contributed(job.digest)

    async def group_key(self, job: Job) -> tuple[Relayed, ...]:
        """Fetch what the job's other silos uploaded for its key; empty while some are missing."""
        question = group_key.poll_to_wire(
            KeyPoll(self._session.token, job.name, bytes.fromhex(job.digest))
        )
        self._session.count(question)
        message = await self._session.client.group_key(question)
        return group_key.secagg_delivery_from_wire(message, len(job.silos))

    # Padded uploads.

    async def padded(self, ctx: bytes, message: pb.PaddedWordUpload) -> None:
        """Upload the signed word on a padded upload that the coordinator has.

        ``ctx`` is that of the upload's version. ``message`` lacks the session, as it is kept on
        disk: the same word may leave again in a later session.
        """
        word = pb.PaddedWordUpload()
        word.CopyFrom(message)
        word.session = self._session.token
        record = ProtocolMessage(
            job=word.job,
            job_digest=word.job_digest.hex(),
            round=word.upload.round,
            ctx=ctx.hex(),
            kind="padded",
            rpc=PADDED,
            recipient=self._session.coordinator,
            message=_on_the_wire(word),
        )
        await asyncio.to_thread(self._ledger.append, record)
        await self._session.client.padded(word)


def _on_the_wire(message: Message) -> MessageDigest:
    data = message.SerializeToString(deterministic=True)
    return MessageDigest(bytes=len(data), sha256=sha256(data).hexdigest())
