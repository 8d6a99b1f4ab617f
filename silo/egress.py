"""The egress gate: the one door through which anything leaves this silo.

What a round gives passes numbered checks, each of which can stop it, and two records that are durable before the bytes
that they describe count for anything (SECURITY.md rule 27):

(1) it is exactly what the signed document declares, and from here on the gate's own copy; (2) every value is finite and
within its bounds; (3) weights and metrics count no more records than there are; (4) the policy allows every tensor, its
readers, each part's norm, the round's bytes and its attempts; (5) INTENT is durable; (6) the bytes go, hashed as they
go; (7) DIGEST is durable; (8) END makes the message count; (9) OUTCOME.

Where the connection breaks between (5) and (9), the INTENT stays open until the coordinator was asked (outcomes.py).
The next attempt is an INTENT of its own, over the bytes that the coordinator does not have. So every byte on the wire
is declared by the intent that it goes under, twice where it goes twice. The policy's limit of a round's bytes is of
their sum; that of its attempts ends what could go on for ever in pieces of a few bytes.

All other messages are control messages, counted against the caps of one record a session (control.py). No method code
runs after check (1), and the digests are of the bytes that went. What the declared numbers say, the gate does not know:
a method can write anything into the tensors that it may give (docs/wire.md).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from google.protobuf.message import Message
from torch import Tensor

from .. import log
from ..algorithms.exchange import value_fault
from ..algorithms.job import Job
from ..errors import LocalError, PeerError, StaddleError
from ..proto import federation_pb2 as pb
from ..proto import tensor_pb2 as tensor
from ..proto.channel import PROTOCOL_MAX, PROTOCOL_MIN, UPLOAD, checked_address
from ..proto.frames import Frame
from ..proto.stream import Digester, chunks
from ..proto.wire import Item, to_wire
from ..security import roster as rosters
from ..security.identity import Keys
from ..security.ledger import Ledger
from ..security.policy import Policy
from ..security.records import Applied, Payload, Peer, TensorDigest
from . import delivery
from .client import Client, TurnedAwayError, UnreachableError, handshake_hint
from .control import Control
from .declared import Declared
from .outcomes import Outcomes, Settled, Status
from .payload import (
    bytes_by_kind,
    exactly,
    miscounted,
    norms,
    readers_of,
    release_of,
)
from .witness import Witness

MAX_SESSION_BYTES = 64
MOST_WITNESSED = 4  # witness tasks a session for each member of the roster that are dealt with at once
MAX_REASON = 500  # characters of one reason in a record: a coordinator chooses what we refuse

__all__ = ["DeniedError", "Gate", "TurnedAwayError", "UnreachableError", "checked_address", "open_client"]


def open_client(address: str, keys: Keys, roster: rosters.Roster) -> Client:
    """The channel to the roster's coordinator, whose certificate alone is trusted."""
    coordinator = roster.coordinator
    certificates = (coordinator.certificate.encode(), keys.tls_key, keys.entry.certificate.encode())
    hint = handshake_hint(keys.entry.tls_fingerprint, roster.version, coordinator.id)
    return Client(address, coordinator.id, certificates, hint)


class DeniedError(LocalError):
    """The silo's own policy holds a message back; nothing left."""


class Gate:
    """Holds the client; nobody else does."""

    def __init__(
        self, client: Client, ledger: Ledger, policy: Policy, roster: rosters.Roster, witness: Witness
    ) -> None:
        self._client = client
        self._witness = witness
        self._ledger = ledger
        self._policy = policy
        self._roster = roster
        self._session = b""
        self._attended = 0  # witness tasks of this session
        self._denied: tuple[str, int, tuple[str, ...]] | None = None  # job digest, round and reasons of the last denial
        self._hold = 0.0
        self._control = Control(ledger, policy.file.control, self._coordinator)
        self._outcomes = Outcomes(ledger, roster)

    @property
    def _coordinator(self) -> Peer:
        entry = self._roster.coordinator
        return Peer(id=entry.id, spki=entry.spki_sha256)

    # Control messages.

    async def hello(self) -> int:
        """Open a session under a fresh control record; the seconds between heartbeats.

        LocalError where the coordinator holds a head of our ledger that this one does not lead to: nothing may leave.
        """
        challenge = await self._control.open()
        self._witness.begin(challenge)
        request = pb.HelloRequest(
            silo=self._ledger.silo,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            roster_digest=bytes.fromhex(rosters.digest(self._roster)),
            challenge=challenge,
        )
        self._count(request)
        reply = await self._client.hello(request)
        if len(reply.session) > MAX_SESSION_BYTES:
            raise PeerError(self._roster.coordinator.id, f"opened a session with a name of {len(reply.session)} bytes")
        await self._witness.greeted(reply.held)
        self._attended = 0
        self._session, self._hold = reply.session, float(min(reply.hold_seconds, 300))
        return max(1, min(reply.beat_seconds, 300))

    async def poll(self) -> pb.Task:
        """Wait for a task; what silos ask and say about each other's ledgers is dealt with here."""
        request = pb.PollRequest(session=self._session)
        while True:
            self._count(request)
            task = await self._client.poll(request, self._hold)
            if task.WhichOneof("body") != "witness":
                await self._witness.relayed(task.round.heads)
                return task
            await self._attend(task.witness)
            self._attended += 1
            if self._attended > MOST_WITNESSED * len(self._roster.entries):  # a coordinator does not set our pace
                return pb.Task(nothing=pb.Nothing())

    async def _attend(self, witness: pb.Witness) -> None:
        for said in witness.told[: len(self._roster.entries)]:
            await self._witness.attested(said)
        for asked in witness.asked[: len(self._roster.entries)]:
            attestation = await asyncio.to_thread(self._witness.attest, asked, self._session)
            self._count(attestation)
            await self._client.attest(attestation)

    async def beat(self, job: str, round_: int) -> bool:
        """Say that we are alive; whether our work is still wanted."""
        request = pb.BeatRequest(session=self._session, job=job, round=round_)
        self._count(request)
        return (await self._client.beat(request)).wanted

    async def answer(self, job: str, digest: str, round_: int, kind: str, code: str = "UNSPECIFIED") -> None:
        """Answer a task: a kind and a code, both of closed lists."""
        request = pb.AnswerRequest(
            session=self._session,
            job=job,
            job_digest=bytes.fromhex(digest),
            round=round_,
            kind=f"ANSWER_KIND_{kind}",
            code=f"ERROR_CODE_{code}",
        )
        self._count(request)
        await self._client.answer(request)

    async def end_session(self) -> None:
        """Write the totals of the session's control messages."""
        await self._control.close()

    def _count(self, message: Message) -> None:
        """Count a control message before it leaves; UnreachableError asks for a new session at the cap."""
        if why := self._control.count(message):
            raise UnreachableError(self._roster.coordinator.id, why)

    # Deliveries.

    async def fetch(self, job: Job, round_: int) -> dict[str, dict[str, Tensor]]:
        """What the coordinator delivers to us at the start of a round, checked and recorded as ingress."""
        request = pb.FetchRequest(
            session=self._session, job=job.name, job_digest=bytes.fromhex(job.digest), round=round_
        )
        self._count(request)
        frames = self._client.fetch(request, delivery.largest(job, round_))
        return await delivery.take(self._ledger, self._coordinator, job, round_, frames)

    # What a round gives.

    async def give(
        self, declared: Declared, round_: int, payload: Mapping[str, Mapping[str, Tensor]], cohort: Sequence[str]
    ) -> None:
        """Let one round's bundle out; DeniedError, LocalError or PeerError say what held it back, or went wrong.

        ``cohort`` are the ids of the round's silos, sorted.
        """
        # (1) Exactly what the signed document declares; nobody else holds these copies.
        items = declared.items(round_)
        values = await asyncio.to_thread(exactly, items, payload)
        # (2) Every value is finite and within its bounds.
        for item, value in zip(items, values, strict=True):
            if why := value_fault(item.spec, value):
                raise LocalError(f"tensor {item.part}/{item.spec.name} {why}; it does not leave")
        # (3) What counts records counts records that there are.
        if why := miscounted(items, values, declared.records):
            raise LocalError(f"{why}; the message does not leave")
        # (4) The policy allows it.
        size = sum(item.spec.nbytes for item in items)
        offset = self._outcomes.offset(declared.digest, round_, size)
        applied = await self._decide(declared, round_, items, values, offset)
        # (5) INTENT is durable.
        intent = await asyncio.to_thread(self._intend, declared, round_, items, (offset, size), applied, cohort)
        for kind, left in bytes_by_kind(items, offset).items():
            log.event("leaving", job=declared.job, round=round_, kind=kind, bytes=left, intent=intent)
        # (6) to (8): the bytes, the DIGEST record and the END frame.
        sent = _Sent()
        manifest = tensor.Manifest(
            session=self._session,
            job=declared.job,
            job_digest=bytes.fromhex(declared.digest),
            round=round_,
            size=size,
            tensors=to_wire(items),
            offset=offset,
        )
        status: Status | Literal["open"] = "unknown"
        receipt = b""
        try:
            reply = await self._client.upload(self._frames(intent, manifest, items, values, sent), size - offset)
            seq = self._outcomes.check_receipt(intent, reply)
            status, receipt = "sent", reply.signature
            self._witness.accepted(seq)
            await self._witness.coordinator_head(reply.head)
        except TurnedAwayError:
            status = "failed"
            raise
        except (UnreachableError, asyncio.CancelledError):
            status = "open"
            raise
        finally:
            # (9) OUTCOME; of what was on its way when the connection broke, once it is settled.
            if status == "open":
                self._outcomes.broke(intent, sent.size)
            else:
                await self._outcomes.close(intent, status, sent.size, receipt)

    async def _decide(
        self, declared: Declared, round_: int, items: tuple[Item, ...], values: list[Tensor], offset: int
    ) -> Applied:
        decision = self._policy.decide(
            declared.method,
            [release_of(item) for item in items],
            self._roster.coordinator.id,
            readers_of(self._roster),
            sent=self._ledger.sent(declared.digest, round_) - offset,  # the policy adds the whole message
            attempts=self._ledger.attempts(declared.digest, round_),
            norms=await asyncio.to_thread(norms, items, values) if self._policy.bounds_norms else None,
        )
        if not decision.allow:
            denied = (declared.digest, round_, decision.reasons)
            if denied != self._denied:  # asked again and again, the same answer is recorded once
                await asyncio.to_thread(
                    lambda: self._ledger.policy_deny(
                        job=declared.job,
                        round_number=round_,
                        purpose="update",
                        policy=self._policy.digest,
                        reasons=decision.reasons,
                    )
                )
            self._denied = denied
            raise DeniedError("the policy holds this round back: " + "; ".join(decision.reasons))
        return Applied(file=self._policy.digest, rule=decision.rule, decision="allow")

    def _intend(
        self,
        declared: Declared,
        round_: int,
        items: tuple[Item, ...],
        stretch: tuple[int, int],
        applied: Applied,
        cohort: Sequence[str],
    ) -> int:
        offset, size = stretch
        return self._ledger.intent(
            job=declared.job,
            job_digest=declared.digest,
            method=declared.method,
            round_number=round_,
            attempt=0,
            purpose="update",
            rpc=UPLOAD,
            recipient=self._coordinator,
            readers=readers_of(self._roster),
            form="plain",
            policy=applied,
            releases=[release_of(item) for item in items],
            message_bytes=size - offset,
            offset=offset,
            cohort=cohort,
        ).seq

    async def _frames(
        self, intent: int, manifest: tensor.Manifest, items: tuple[Item, ...], values: list[Tensor], sent: "_Sent"
    ) -> AsyncIterator[Frame]:
        yield tensor.Frame(manifest=manifest)
        digester = Digester([item.spec.nbytes for item in items])
        at = 0
        for chunk in chunks(values):
            digester.update(chunk.payload)
            at += len(chunk.payload)
            if at <= manifest.offset:  # it is there already
                await asyncio.sleep(0)
                continue
            sent.size += len(chunk.payload)
            yield chunk
        digests = digester.digests()
        message = Payload(bytes=at, sha256=digests.total.hex())
        tensors = [
            TensorDigest(part=item.part, name=item.spec.name, sha256=value.hex())
            for item, value in zip(items, digests.tensors, strict=True)
        ]
        sealed = await asyncio.to_thread(self._ledger.digest, intent, tensors, message)
        head, inclusion = self._witness.proof(sealed)
        yield tensor.Frame(
            end=tensor.End(
                sha256=digests.total,
                tensor_sha256=digests.tensors,
                ledger_seq=sealed.place.seq,
                ledger_leaf=bytes.fromhex(sealed.place.leaf),
                head=head,
                inclusion=inclusion,
                holds=self._witness.holds,
            )
        )

    # What became of uploads whose connection broke.

    async def settle(self) -> list[Settled]:
        """Ask how they stand and write their outcomes, oldest first; the session is open, and no upload runs."""
        settled = await self._outcomes.settle(self._standing)
        for upload in settled:
            if upload.digest is not None:  # accepted after the greeting said which head is held
                self._witness.accepted(upload.digest)
        return settled

    async def _standing(self, job: str, digest: str, round_: int) -> pb.StandingReply:
        request = pb.StandingRequest(session=self._session, job=job, job_digest=bytes.fromhex(digest), round=round_)
        self._count(request)
        return await self._client.standing(request)

    # Decisions on jobs.

    async def record_decision(self, job: str, digest: str, signer: str, reasons: tuple[str, ...] | None) -> None:
        """Record that we take part (None) or do not, before the answer leaves."""
        if reasons is None:
            await asyncio.to_thread(self._ledger.job_accept, job, digest, signer)
        else:
            short = tuple(reason[:MAX_REASON] for reason in reasons)
            await asyncio.to_thread(self._ledger.job_decline, job, digest, signer, short)

    async def close(self) -> None:
        """End the session and the channel; a ledger that failed is no reason to keep the channel."""
        with contextlib.suppress(StaddleError):
            await self._witness.flush()
            await self.end_session()
        await self._client.close()


@dataclass
class _Sent:
    """How far an upload came."""

    size: int = 0  # payload bytes handed to the transport
