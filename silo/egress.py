"""The egress gate: the one door through which anything leaves this silo.

What a round gives passes numbered checks, each of which can stop it, and two records that are durable before the bytes
that they describe count for anything (SECURITY.md rule 27):

(1) it is exactly what the signed job declares; (2) every value is finite; (3) the policy allows every tensor, its
readers and the round's bytes; (4) INTENT is durable; (5) the bytes go, hashed as they go; (6) DIGEST is durable;
(7) END makes the message count; (8) OUTCOME.

Where the connection breaks between (4) and (8), the INTENT stays open. After the next greeting, of this process or of
one after it, the gate asks the coordinator how it stands and writes OUTCOME: ``sent`` with the receipt that was lost,
else ``unknown``, which counts as left. What the coordinator has of the bytes need not go again: the next attempt is an
INTENT of its own, over the bytes behind that offset. So every byte on the wire is declared by the intent that it goes
under, twice where it goes twice, and the policy's limit of a round's bytes is of their sum.

Greetings, polls, heartbeats, fetch requests and answers hold names, numbers and codes of a closed list; they are
counted against the caps of one control record a session. No method code runs after check (1): the tensors belong to
the gate from there on, and the digests are of the bytes that went.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .. import log
from ..algorithms.exchange import all_finite
from ..algorithms.job import Job
from ..errors import LocalError, PeerError, RefusedError, StaddleError
from ..proto import federation_pb2 as pb
from ..proto import tensor_pb2 as tensor
from ..proto.channel import FETCH, PROTOCOL_MAX, PROTOCOL_MIN, UPLOAD, checked_address
from ..proto.frames import Frame
from ..proto.stream import Digester, Digests, Inbound, chunks, resumable
from ..proto.wire import Item, check_manifest, delivered_items, given_items, to_wire
from ..security import roster as rosters
from ..security.identity import Keys
from ..security.ledger import Ledger, Unsettled
from ..security.policy import Policy
from ..security.receipt import Receipt
from ..security.records import Applied, Payload, Peer, TensorDigest
from ..security.release import Release
from .client import Client, TurnedAwayError, UnreachableError, handshake_hint
from .payload import Buffer, bytes_by_kind, exactly, readers_of, release_of, unpack

MAX_SESSION_BYTES = 64
MAX_REASON = 500  # characters of one reason in a record: a coordinator chooses what we refuse
MAX_CONTROL_BYTES = 1024  # one control message: ids, digests and numbers fit well below


__all__ = ["DeniedError", "Gate", "TurnedAwayError", "UnreachableError", "checked_address", "open_client"]


def open_client(address: str, keys: Keys, roster: rosters.Roster) -> Client:
    """The channel to the roster's coordinator, whose certificate alone is trusted."""
    coordinator = roster.coordinator
    certificates = (coordinator.certificate.encode(), keys.tls_key, keys.entry.certificate.encode())
    hint = handshake_hint(keys.entry.tls_fingerprint, roster.version, coordinator.id)
    return Client(address, coordinator.id, certificates, hint)


class DeniedError(LocalError):
    """The silo's own policy holds a message back; nothing left."""


@dataclass
class Control:
    """Counts of the session's control messages, against the caps of its record."""

    ref: int
    messages: int = 0
    size: int = 0


@dataclass(frozen=True)
class Settled:
    """What became of an upload whose connection broke, and why if it is not ``sent``."""

    job: str
    round: int
    status: Literal["sent", "unknown"]
    why: str


class Gate:
    """Holds the client; nobody else does."""

    def __init__(self, client: Client, ledger: Ledger, policy: Policy, roster: rosters.Roster) -> None:
        self._client = client
        self._ledger = ledger
        self._policy = policy
        self._roster = roster
        self._control: Control | None = None
        self._session = b""
        self._hold = 0.0
        self._handed: dict[int, int] = {}  # intent whose connection broke → payload bytes handed to the transport
        self._received: dict[tuple[str, int], int] = {}  # (job digest, round) → bytes that wait there for the rest

    @property
    def _coordinator(self) -> Peer:
        entry = self._roster.coordinator
        return Peer(id=entry.id, spki=entry.spki_sha256)

    # Control messages.

    async def hello(self) -> int:
        """Open a session under a fresh control record; the seconds between heartbeats."""
        await self.end_session()
        caps = self._policy.file.control
        name = f"{self._ledger.silo}-{(self._ledger.head.seq + 1) if self._ledger.head else 0}"
        opened = await asyncio.to_thread(
            self._ledger.control_open, name, self._coordinator, caps.max_messages, caps.max_bytes
        )
        self._control = Control(opened.seq)
        request = pb.HelloRequest(
            silo=self._ledger.silo,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            roster_digest=bytes.fromhex(rosters.digest(self._roster)),
        )
        self._count(request)
        reply = await self._client.hello(request)
        if len(reply.session) > MAX_SESSION_BYTES:
            raise PeerError(self._roster.coordinator.id, f"opened a session with a name of {len(reply.session)} bytes")
        self._session, self._hold = reply.session, float(min(reply.hold_seconds, 300))
        return max(1, min(reply.beat_seconds, 300))

    async def poll(self) -> pb.Task:
        """Wait for a task."""
        request = pb.PollRequest(session=self._session)
        self._count(request)
        return await self._client.poll(request, self._hold)

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
        if self._control is not None:
            closing, self._control = self._control, None
            await asyncio.to_thread(self._ledger.control_close, closing.ref, closing.messages, closing.size)

    def _count(
        self,
        message: pb.HelloRequest
        | pb.PollRequest
        | pb.BeatRequest
        | pb.AnswerRequest
        | pb.FetchRequest
        | pb.StandingRequest,
    ) -> None:
        """Count a control message before it leaves; UnreachableError asks for a new session at the cap."""
        size = message.ByteSize()
        control, caps = self._control, self._policy.file.control
        if control is None:
            raise UnreachableError(self._roster.coordinator.id, "no session is open; say hello first")
        if size > MAX_CONTROL_BYTES:
            raise LocalError(f"a control message of {size} bytes, at most {MAX_CONTROL_BYTES} may leave uncounted")
        if control.messages + 1 > caps.max_messages or control.size + size > caps.max_bytes:
            raise UnreachableError(self._roster.coordinator.id, "the session's control record is full; a new one opens")
        control.messages += 1
        control.size += size

    # Deliveries.

    async def fetch(self, job: Job, round_: int) -> dict[str, dict[str, Tensor]]:
        """What the coordinator delivers to us at the start of a round, checked and recorded as ingress."""
        peer = self._roster.coordinator.id
        request = pb.FetchRequest(
            session=self._session, job=job.name, job_digest=bytes.fromhex(job.digest), round=round_
        )
        self._count(request)
        parts = {part.name: part for part in job.down(round_)}

        def check(manifest: tensor.Manifest) -> tuple[Item, ...]:
            if manifest.job != job.name or manifest.job_digest.hex() != job.digest or manifest.round != round_:
                raise RefusedError(peer, "MANIFEST", f"delivery is of {manifest.job[:64]!r} round {manifest.round}")
            if manifest.offset:
                raise RefusedError(peer, "MANIFEST", f"delivery begins at byte {manifest.offset}; send all of it")
            named = list(dict.fromkeys(header.part for header in manifest.tensors))
            unknown = [name for name in named if name not in parts]
            if unknown:
                raise RefusedError(peer, "MANIFEST", f"delivers part {unknown[0][:64]!r}, which is not in the schema")
            items = delivered_items([parts[name] for name in named])
            check_manifest(peer, manifest, items)
            buffer.reserve(manifest.size)
            return items

        buffer = Buffer()
        inbound = Inbound(peer, check, buffer.write)
        largest = sum(item.spec.nbytes for item in delivered_items(list(parts.values())))
        async for frame in self._client.fetch(request, largest):
            inbound.feed(frame)
        _, digests = inbound.finish()
        delivered = unpack(peer, inbound, buffer.bytes)
        if delivered:
            await asyncio.to_thread(self._record_ingress, job, round_, len(buffer.bytes), digests)
        return delivered

    def _record_ingress(self, job: Job, round_: int, size: int, digests: Digests) -> None:
        self._ledger.ingress(
            job=job.name,
            round_number=round_,
            purpose="delivery",
            rpc=FETCH,
            sender=self._coordinator,
            message=Payload(bytes=size, sha256=digests.total.hex()),
        )

    # What a round gives.

    async def give(self, job: Job, round_: int, payload: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Let one round's bundle out; DeniedError, LocalError or PeerError say what held it back, or went wrong."""
        # (1) Exactly what the signed job declares.
        items = given_items(job.up(round_))
        values = exactly(items, payload)
        # (2) Every value is finite.
        for item, value in zip(items, values, strict=True):
            if not all_finite(value):
                raise LocalError(f"tensor {item.part}/{item.spec.name} holds NaN or infinity; it does not leave")
        # (3) The policy allows it.
        size = sum(item.spec.nbytes for item in items)
        offset = self._received.pop((job.digest, round_), 0)
        offset = offset if resumable(offset, size) else 0
        applied = await self._decide(job, round_, [release_of(item) for item in items], offset)
        # (4) INTENT is durable.
        intent = await asyncio.to_thread(self._intend, job, round_, items, (offset, size), applied)
        for kind, left in bytes_by_kind(items, offset).items():
            log.event("leaving", job=job.name, round=round_, kind=kind, bytes=left, intent=intent)
        # (5) to (7): the bytes, the DIGEST record and the END frame.
        sent = _Sent()
        manifest = tensor.Manifest(
            session=self._session,
            job=job.name,
            job_digest=bytes.fromhex(job.digest),
            round=round_,
            size=size,
            tensors=to_wire(items),
            offset=offset,
        )
        status, receipt = "unknown", b""
        try:
            reply = await self._client.upload(self._frames(intent, manifest, items, values, sent), size - offset)
            self._check_receipt(intent, reply)
            status, receipt = "sent", reply.signature
        except TurnedAwayError:
            status = "failed"
            raise
        except (UnreachableError, asyncio.CancelledError):
            status = "open"
            raise
        finally:
            # (8) OUTCOME; of what was on its way when the connection broke, once it is settled.
            if status == "open":
                self._handed[intent] = sent.size
            else:
                await asyncio.to_thread(self._close_intent, intent, status, sent.size, receipt)

    async def _decide(self, job: Job, round_: int, releases: list[Release], offset: int) -> Applied:
        coordinator = self._roster.coordinator.id
        sent = self._ledger.sent(job.digest, round_) - offset  # the policy adds the whole message
        decision = self._policy.decide(job.method_name, releases, coordinator, readers_of(self._roster), sent)
        if not decision.allow:
            await asyncio.to_thread(
                lambda: self._ledger.policy_deny(
                    job=job.name,
                    round_number=round_,
                    purpose="update",
                    policy=self._policy.digest,
                    reasons=decision.reasons,
                )
            )
            raise DeniedError("the policy holds this round back: " + "; ".join(decision.reasons))
        return Applied(file=self._policy.digest, rule=decision.rule, decision="allow")

    def _intend(
        self, job: Job, round_: int, items: tuple[Item, ...], stretch: tuple[int, int], applied: Applied
    ) -> int:
        offset, size = stretch
        return self._ledger.intent(
            job=job.name,
            job_digest=job.digest,
            method=job.method_name,
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
        appended = await asyncio.to_thread(self._ledger.digest, intent, tensors, message)
        yield tensor.Frame(
            end=tensor.End(
                sha256=digests.total,
                tensor_sha256=digests.tensors,
                ledger_seq=appended.seq,
                ledger_leaf=bytes.fromhex(appended.leaf),
            )
        )

    def _check_receipt(self, intent: int, reply: pb.Receipt) -> None:
        """PeerError unless the coordinator signed that it has just this message, from this place of our ledger."""
        message = next((found for found in self._ledger.unsettled if found.seq == intent), None)
        if message is None or message.digest is None or message.place is None:
            raise PeerError(self._roster.coordinator.id, "sent a receipt before the message ended")
        Receipt(
            federation=self._roster.federation,
            roster=rosters.digest(self._roster),
            silo=self._ledger.silo,
            job=message.intent.job_digest,
            round=message.intent.round,
            size=message.digest.message.bytes,
            sha256=message.digest.message.sha256,
            ledger_seq=message.place.seq,
            ledger_leaf=message.place.leaf,
        ).verify(self._roster.coordinator, reply.signature)

    def _close_intent(self, intent: int, status: str, size: int, receipt: bytes) -> None:
        write: Callable[..., object] = self._ledger.outcome
        write(intent, status, size, receipt.hex() or None)

    # What became of uploads whose connection broke.

    async def settle(self) -> list[Settled]:
        """Ask how they stand and write their outcomes, oldest first; the session is open, and no upload runs."""
        return [await self._settle(message) for message in self._ledger.unsettled]

    async def _settle(self, message: Unsettled) -> Settled:
        intent = message.intent
        digest = bytes.fromhex(intent.job_digest)
        request = pb.StandingRequest(session=self._session, job=intent.job, job_digest=digest, round=intent.round)
        self._count(request)
        status: Literal["sent", "unknown"] = "unknown"
        receipt = b""
        try:
            reply = await self._client.standing(request)
            why = f"the coordinator has {reply.received} bytes that wait for the rest"
            self._received[intent.job_digest, intent.round] = reply.received
            if reply.HasField("receipt"):
                self._check_receipt(message.seq, reply.receipt)
                status, receipt, why = "sent", reply.receipt.signature, ""
        except UnreachableError:
            raise
        except TurnedAwayError as error:
            if error.code != "UNKNOWN_JOB":
                raise
            why = str(error)
        except PeerError as error:  # a receipt for something else
            why = str(error)
        # After a restart it is not known how far the bytes came: all that was declared counts.
        handed = self._handed.pop(message.seq, intent.message.bytes)
        size = intent.message.bytes if status == "sent" else handed
        await asyncio.to_thread(self._close_intent, message.seq, status, size, receipt)
        return Settled(intent.job, intent.round, status, why)

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
        try:
            await self.end_session()
        except StaddleError:
            self._control = None
        await self._client.close()


@dataclass
class _Sent:
    """How far an upload came."""

    size: int = 0  # payload bytes handed to the transport
