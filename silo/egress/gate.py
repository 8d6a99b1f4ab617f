"""The egress gate: the one door through which anything leaves this silo.

What a round gives passes numbered checks, each of which can stop it, and two records that are
durable before the bytes that they describe count for anything (SECURITY.md rule 27):

(1) it is exactly what the signed document declares, and from here on the gate's own copy; (2) every
value is finite and within its bounds; (3) weights and metrics count no more records than there are,
unless the job is private and they are noisy; (4) the policy allows every tensor, its readers, what
it was computed from, each part's norm, the round's bytes and its attempts; (5) all that leaves of a
private job was paid for out of the data set's budget, by this very job;
(6) INTENT is durable; (7) the bytes go, hashed as they go; (8) DIGEST is durable; (9) END makes the
message count;
(10) OUTCOME.

Where the connection breaks between (6) and (10), the INTENT stays open until the coordinator was
asked (outcomes.py). The next attempt is an INTENT of its own, over the bytes that the coordinator
does not have. So every byte on the wire is declared by the intent that it goes under, twice where
it goes twice. The policy's limit of a round's bytes is of their sum; that of its attempts ends what
could go on for ever in pieces of a few bytes.

A round leaves plain, or blind: as the masked words of a secure sum (messages.py), and each part of
a Mix or a Gram in a message of its own, padded or rotated (hidden_messages.py), all by the same
checks. The protocol messages of these, and what this silo gives to the key of a job, are recorded
one by one before they leave (protocol_records.py). All others are control messages, counted against
the caps of one record a session (control.py). No method code runs after check (1), and the digests
are of the bytes that went. What the declared numbers say, the gate does not know: a method can
write anything into the tensors that it may give (docs/wire.md).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn

from google.protobuf.message import Message
from torch import Tensor

from ... import log
from ...algorithms.exchange.parts import Gram, Item, Mix, Part, value_fault
from ...algorithms.job.job import Job
from ...errors import LocalError, PeerError, RefusedError, StaddleError
from ...proto import federation_pb2 as pb
from ...proto import secure_pb2
from ...proto import tensor_pb2 as tensor
from ...proto.channel import PROTOCOL_MAX, PROTOCOL_MIN, UPLOAD, checked_address
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
from ...proto.frames import Frame
from ...proto.stream import Digester, Digests
from ...security.arithmetic.fixedpoint import unscaled
from ...security.blind.directed_mix import is_row
from ...security.blind.group_key import KeyContribution, Relayed
from ...security.blind.plan import RoundPlan
from ...security.blind.sealing import SealedSecret
from ...security.identity import roster as rosters
from ...security.identity.keys import Keys
from ...security.ledger import records
from ...security.ledger.egress_ledger import Ledger
from ...security.policy.policy import Policy
from ...security.policy.release import Paid, nothing_paid, own_part, unpaid
from ...security.secagg.silo_events import Streamed
from ...security.secagg.spec import brought_fault
from ..admission.signed_sets import SignedSets
from ..ingress import delivery
from ..ingress.directed_rows import AnyRows
from ..ingress.open_sums import IncomingSums
from ..parts.contributions import Contributions, tainted
from ..parts.declared import Declared
from ..parts.releases import bytes_by_kind, readers_of
from ..parts.tensors import exactly, miscounted, norms
from .client import Client, TurnedAwayError, UnreachableError, handshake_hint
from .control import SessionCounts
from .hidden_messages import PaddedPart, Padding, Rotating, Sent, rotated
from .messages import Masking, Outgoing, masked, plain
from .outcomes import Outcomes, SettledUpload, Status
from .protocol_records import SecureRecords
from .witness import Witness

MAX_SESSION_BYTES = 64
# witness tasks a session for each member of the roster that are dealt with at once
MOST_WITNESSED = 4
PROTOCOL = "protocol"  # the kind, in the log, of a secure sum's messages
MAX_REASON = 500  # characters of one reason in a record: a coordinator chooses what we refuse

__all__ = [
    "DeniedError",
    "Gate",
    "TurnedAwayError",
    "UnreachableError",
    "checked_address",
    "open_client",
]


def open_client(address: str, keys: Keys, roster: rosters.Roster) -> Client:
    """The channel to the roster's coordinator, whose certificate alone is trusted."""
    coordinator = roster.coordinator
    certificates = (coordinator.certificate.encode(), keys.tls_key, keys.entry.certificate.encode())
    hint = handshake_hint(keys.entry.tls_fingerprint, roster.version, coordinator.id)
    return Client(address, coordinator.id, certificates, hint, len(roster.entries))


class DeniedError(LocalError):
    """The silo's own policy holds a message back; nothing left."""


class Gate:
    """Holds the client; nobody else does."""

    def __init__(
        self,
        client: Client,
        ledger: Ledger,
        policy: Policy,
        roster: rosters.Roster,
        witness: Witness,
        paid: Paid = nothing_paid,
    ) -> None:
        """``paid`` knows the reservations of the privacy budget of this silo's data set."""
        self._client = client
        self._witness = witness
        self._ledger = ledger
        self._policy = policy
        self._roster = roster
        self._paid = paid
        self._session = b""
        self._attended = 0  # witness tasks of this session
        # job digest, round and reasons of the last denial
        self._denied: tuple[str, int, tuple[str, ...]] | None = None
        self._hold = 0.0
        self._control = SessionCounts(ledger, policy.file.control, self._coordinator)
        self._outcomes = Outcomes(ledger, roster)
        self.secure_records = SecureRecords(ledger, self._coordinator)
        self.signed_sets = SignedSets(ledger, roster, policy)

    @property
    def _coordinator(self) -> records.Peer:
        entry = self._roster.coordinator
        return records.Peer(id=entry.id, spki=entry.spki_sha256)

    # Control messages.

    async def hello(self) -> int:
        """Open a session under a fresh control record; the seconds between heartbeats.

        LocalError where the coordinator holds a head of our ledger that this one does not lead to:
        nothing may leave.
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
            raise PeerError(
                self._roster.coordinator.id,
                f"opened a session with a name of {len(reply.session)} bytes",
            )
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
            # a coordinator does not set our pace
            if self._attended > MOST_WITNESSED * len(self._roster.entries):
                return pb.Task(nothing=pb.Nothing())

    async def _attend(self, witness: pb.Witness) -> None:
        for said in witness.told[: len(self._roster.entries)]:
            await self._witness.attested(said)
        await self._answer_challenges(witness.asked)

    async def _answer_challenges(self, challenges: Sequence[pb.Challenge]) -> None:
        for asked in challenges[: len(self._roster.entries)]:
            attestation = await asyncio.to_thread(self._witness.attest, asked, self._session)
            self._count(attestation)
            await self._client.attest(attestation)

    @property
    def witnessed(self) -> bool:
        """Whether another silo says, in this session, what it holds of our ledger: an older copy of
        it is known.
        """
        return self._witness.answered

    @property
    def witnesses(self) -> frozenset[str]:
        """The silos whose word counts for that."""
        return self._witness.independent

    async def beat(self, job: str, round_: int) -> bool:
        """Say that we are alive; whether our work is still wanted."""
        request = pb.BeatRequest(session=self._session, job=job, round=round_)
        self._count(request)
        reply = await self._client.beat(request)
        await self._answer_challenges(reply.asked)
        return reply.wanted

    async def answer(
        self, job: str, digest: str, round_: int, kind: str, code: str = "UNSPECIFIED"
    ) -> None:
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
        """Count a control message before it leaves.

        UnreachableError asks for a new session at the cap.
        """
        if why := self._control.count(message):
            raise UnreachableError(self._roster.coordinator.id, why)

    # Deliveries.

    async def fetch(
        self, plan: RoundPlan, rows: AnyRows | None = None, sums: IncomingSums | None = None
    ) -> delivery.ReceivedDelivery:
        """What the coordinator delivers to us at the start of a round, checked and recorded as
        ingress.

        ``rows`` opens those of a Mix, ``sums`` checks open sums; without the one or the other there
        may be none. A sum that is refused is recorded as one that ended, with who is to blame.
        """
        job, digest = plan.job, bytes.fromhex(plan.job.digest)
        request = pb.FetchRequest(
            session=self._session, job=job.name, job_digest=digest, round=plan.round
        )
        self._count(request)
        frames = self._client.fetch(request, delivery.largest(plan))
        try:
            return await delivery.take(self._ledger, self._coordinator, plan, frames, rows, sums)
        except RefusedError:
            if sums is not None and sums.refused is not None:
                await self.secure_records.refused(job.name, job.digest, sums.refused)
            raise

    # What a round gives.

    def left(self, job: Job, round_: int) -> bool:
        """Whether something of a round left, or may have, restarts included."""
        return self._ledger.sent(job.digest, round_) > 0

    async def give(
        self, declared: Declared, round_: int, bundle: Contributions, cohort: Sequence[str]
    ) -> None:
        """Let one round's bundle out.

        DeniedError, LocalError or PeerError say what held it back, or went wrong.

        ``cohort`` are the ids of the round's silos, sorted.
        """
        if declared.bounds is not None:
            raise LocalError(
                f"job {declared.job!r} wants secure aggregation; nothing of it leaves in the clear"
            )
        items, values = await self._checked(declared, round_, bundle)
        outgoing = plain(items, values, readers_of(self._roster))
        await self._send(declared, round_, bundle, outgoing, self._norms(items, values), cohort)

    async def upload_masked(
        self, declared: Declared, round_: int, bundle: Contributions, masking: Masking
    ) -> Streamed:
        """Let one round's bundle out as the masked words of a secure sum.

        What was streamed, for its header.
        """
        spec = masking.spec
        for group in (each for each in spec.groups if is_row(each) and each.reader in spec.cohort):
            if fault := brought_fault(spec, group, spec.min_cohort):
                raise LocalError(f"a row {group.name!r} that {fault}; nothing leaves")
        parts, own = declared.groups(round_, masking.readers)
        compared, as_declared = declared.compared(round_)
        items, values = await self._checked(declared, round_, bundle, (*parts, *compared))
        # (3b) The sum is over what the signed document declares, and so is what is compared beside
        # it.
        if spec.compared != as_declared:
            raise LocalError(
                f"compares {spec.compared}, the signed job declares {as_declared}; nothing leaves"
            )
        if (asked := tuple(map(unscaled, masking.spec.groups))) != own:
            raise LocalError(
                f"a secure sum of groups {asked}, the signed job declares {own}; nothing leaves"
            )
        outgoing = await asyncio.to_thread(masked, parts, items, values, masking)
        cohort = masking.spec.cohort
        digests = await self._send(
            declared, round_, bundle, outgoing, self._norms(items, values), cohort
        )
        return Streamed(outgoing.size, digests.tensors[0], outgoing.tags(), outgoing.kept)

    async def upload_padded(
        self,
        declared: Declared,
        round_: int,
        bundle: Contributions,
        padding: Padding,
        cohort: Sequence[str],
    ) -> Sent:
        """Let one part of a round's bundle out as the padded words of a Mix.

        What left, to be signed.
        """
        part = _hidden(declared, round_, padding.line.group.name, Mix)
        items, values = await self._checked(declared, round_, bundle, (part,))
        # (3b) The line is what the signed document declares, and the version is this silo's, of
        # this round.
        line, version = padding.line, padding.version
        bound = (line.job, line.job_digest, line.group, version.silo, version.round)
        own = (
            declared.job,
            declared.digest,
            declared.padded_group(part),
            self._ledger.silo,
            round_,
        )
        if bound != own:
            raise LocalError(
                f"a padded upload bound to {bound}, the signed job declares {own}; nothing leaves"
            )
        made = await asyncio.to_thread(PaddedPart, part, values, padding)
        return made.sent(
            await self._send(
                declared, round_, bundle, made.outgoing, self._norms(items, values), cohort
            )
        )

    async def upload_rotated(
        self,
        declared: Declared,
        round_: int,
        bundle: Contributions,
        rotating: Rotating,
        cohort: Sequence[str],
    ) -> None:
        """Let one part of a round's bundle out as the rotated vectors of a Gram."""
        part = _hidden(declared, round_, rotating.use.group, Gram)
        items, values = await self._checked(declared, round_, bundle, (part,))
        # (3b) The rotation is one for this part of this job and round.
        if (bound := (rotating.use.job, rotating.use.round)) != (own := (declared.digest, round_)):
            raise LocalError(
                f"vectors rotated for {bound}, the signed job declares {own}; nothing leaves"
            )
        outgoing = await asyncio.to_thread(rotated, part, values, rotating)
        await self._send(declared, round_, bundle, outgoing, self._norms(items, values), cohort)

    async def _checked(
        self,
        declared: Declared,
        round_: int,
        bundle: Contributions,
        parts: Sequence[Part] | None = None,
    ) -> tuple[tuple[Item, ...], list[Tensor]]:
        """What is declared of these parts, all of the round's if there are none, and its values."""
        # (1) Exactly what the signed document declares; nobody else holds these copies.
        items, payload = declared.items(round_), bundle.tensors
        if parts is not None:
            own = {part.name for part in parts}
            others = {item.part for item in items} - own  # they leave in messages of their own
            items = tuple(item for item in items if item.part in own)
            payload = {name: tensors for name, tensors in payload.items() if name not in others}
        values = await asyncio.to_thread(exactly, items, payload)
        # (2) Every value is finite and within its bounds.
        for item, value in zip(items, values, strict=True):
            if why := value_fault(item.spec, value):
                raise LocalError(f"tensor {item.part}/{item.spec.name} {why}; it does not leave")
        # (3) What counts records counts records that there are.
        if why := miscounted(items, values, declared.records):
            raise LocalError(f"{why}; the message does not leave")
        return items, values

    def _norms(
        self, items: tuple[Item, ...], values: list[Tensor]
    ) -> Callable[[], dict[str, float] | None]:
        return lambda: norms(items, values) if self._policy.bounds_norms else None

    async def _send(
        self,
        declared: Declared,
        round_: int,
        bundle: Contributions,
        outgoing: Outgoing,
        norms_of: Callable[[], dict[str, float] | None],
        cohort: Sequence[str],
    ) -> Digests:
        if declared.private:  # what leaves of any other job is private, whatever is said of it
            outgoing = replace(outgoing, releases=tainted(outgoing.releases, bundle))
        # (4) The policy allows it.
        offset = self._outcomes.offset(
            declared.digest, round_, outgoing.size, outgoing.context.hex()
        )
        applied = await self._decide(
            declared, round_, outgoing, offset, await asyncio.to_thread(norms_of)
        )
        # (5) Of a private job all was paid for, by this job.
        if declared.private and (
            reasons := tuple(unpaid(outgoing.releases, declared.digest, self._paid))
        ):
            await self._deny(declared.job, declared.digest, round_, reasons)
        # (6) INTENT is durable.
        intent = await asyncio.to_thread(
            self._intend, declared, round_, outgoing, offset, applied, cohort
        )
        for kind, left in bytes_by_kind(outgoing.releases, offset).items():
            log.event(
                "leaving", job=declared.job, round=round_, kind=kind, bytes=left, intent=intent
            )
        # (7) to (9): the bytes, the DIGEST record and the END frame.
        sent = _Sent()
        manifest = tensor.Manifest(
            session=self._session,
            job=declared.job,
            job_digest=bytes.fromhex(declared.digest),
            round=round_,
            size=outgoing.size,
            tensors=outgoing.headers,
            offset=offset,
            context=outgoing.context,
            part=outgoing.part,
        )
        status: Status | Literal["open"] = "unknown"
        receipt = b""
        try:
            frames = self._frames(intent, manifest, outgoing, sent)
            reply = await self._client.upload(frames, outgoing.size - offset)
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
            # (10) OUTCOME; of what was on its way when the connection broke, once it is settled.
            if status == "open":
                self._outcomes.broke(intent, sent.size)
            else:
                await self._outcomes.close(intent, status, sent.size, receipt)
        return sent.digests

    async def _decide(
        self,
        declared: Declared,
        round_: int,
        outgoing: Outgoing,
        offset: int,
        norms: Mapping[str, float] | None,
    ) -> records.Applied:
        decision = self._policy.decide(
            declared.method,
            outgoing.releases,
            self._roster.coordinator.id,
            outgoing.readers,
            # the policy adds the whole message
            sent=self._ledger.sent(declared.digest, round_) - offset,
            attempts=self._ledger.attempts(declared.digest, round_, own_part(outgoing.releases)),
            norms=norms,
        )
        if not decision.allow:
            await self._deny(declared.job, declared.digest, round_, decision.reasons)
        return records.Applied(file=self._policy.digest, rule=decision.rule, decision="allow")

    async def hold_back(self, job: Job, round_: int, purpose: str, reason: str) -> NoReturn:
        """Record that the policy has something against a round, then DeniedError."""
        await self._deny(job.name, job.digest, round_, (reason,), purpose)

    async def _deny(
        self, job: str, digest: str, round_: int, reasons: tuple[str, ...], purpose: str = "update"
    ) -> NoReturn:
        denied = (digest, round_, reasons)
        if denied != self._denied:  # asked again and again, the same answer is recorded once
            record = records.Deny(
                job=job, round=round_, purpose=purpose, policy=self._policy.digest, reasons=reasons
            )
            await asyncio.to_thread(self._ledger.append, record)
        self._denied = denied
        raise DeniedError("this silo holds the round back: " + "; ".join(reasons))

    def _intend(
        self,
        declared: Declared,
        round_: int,
        outgoing: Outgoing,
        offset: int,
        applied: records.Applied,
        cohort: Sequence[str],
    ) -> int:
        releases, readers = outgoing.releases, outgoing.readers
        record = records.Intent(
            silo=self._ledger.silo,
            job=declared.job,
            job_digest=declared.digest,
            method=declared.method,
            round=round_,
            attempt=outgoing.attempt,
            purpose="update",
            rpc=UPLOAD,
            recipient=self._coordinator,
            readers=tuple(readers),
            form=outgoing.form,
            policy=applied,
            tensors=tuple(records.Tensor.of(release, readers) for release in releases),
            message=records.Size(bytes=outgoing.size - offset),
            offset=offset,
            cohort=tuple(cohort),
            secagg=outgoing.secagg,
            hidden=outgoing.hidden,
            dp=records.Paid.of(self._policy.dataset, releases),
        )
        return self._ledger.append(record).seq

    async def _frames(
        self, intent: int, manifest: tensor.Manifest, outgoing: Outgoing, sent: "_Sent"
    ) -> AsyncIterator[Frame]:
        yield tensor.Frame(manifest=manifest)
        digester = Digester(outgoing.sizes)
        at = 0
        for chunk in outgoing.chunks():
            digester.update(chunk.payload)
            at += len(chunk.payload)
            if at <= manifest.offset:  # it is there already
                await asyncio.sleep(0)
                continue
            sent.size += len(chunk.payload)
            yield chunk
        sent.digests = digests = digester.digests()
        record = records.Digest(
            ref=intent,
            tensors=tuple(outgoing.hashes(digests)),
            message=records.Payload(bytes=at, sha256=digests.total.hex()),
        )
        sealed = await asyncio.to_thread(self._ledger.seal, record)
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

    # The messages of a secure sum.

    async def secure_next(self, job: Job, round_: int, had: int) -> SecaggDelivery | None:
        """Wait for the next message of the round's secure sums.

        None where none came within the hold time.
        """
        asked = poll_to_wire(
            SecaggPoll(self._session, job.name, bytes.fromhex(job.digest), round_, had)
        )
        self._count(asked)
        return secagg_delivery_from_wire(await self._client.secure_next(asked, self._hold))

    async def secure(self, attempt: Attempt, body: UploadBody) -> None:
        """Give a message of a secure sum, recorded before it leaves.

        DeniedError over the policy's bytes of a round.
        """
        given = secagg_upload_to_wire(SecaggUpload(self._session, attempt, body))
        job, digest, round_, size = (
            attempt.job,
            attempt.job_digest.hex(),
            attempt.round,
            given.ByteSize(),
        )
        total, most = (
            self._ledger.sent(digest, round_) + size,
            self._policy.file.limits.max_bytes_per_round,
        )
        if total > most:
            reason = (
                f"{total} bytes this round are over max_bytes_per_round = {most}; raise it if they"
                " may leave"
            )
            await self._deny(job, digest, round_, (reason,))
        await self.secure_records.leaving(attempt, given)
        log.event("leaving", job=job, round=round_, kind=PROTOCOL, bytes=size)
        await self._client.secure(given)

    def entered(self, job: Job) -> bool:
        """Whether this silo gave keys into a secure sum of this job, as its ledger has it."""
        return self._ledger.entered(job.digest)

    def has_left(self, declared: Declared, round_: int, part: str) -> bool:
        """Whether anything of a padded or rotated part has left in a round, as the ledger has it.

        All of it counts.
        """
        return self._ledger.attempts(declared.digest, round_, part) > 0

    # The key of a job's silos.

    async def contribute(
        self, job: Job, ctx: bytes, contribution: KeyContribution, pieces: tuple[SealedSecret, ...]
    ) -> None:
        """Give what this silo has for the key of a job, recorded before it leaves.

        ``ctx`` is of its epoch.
        """
        given = Contributed(
            self._session, job.name, bytes.fromhex(job.digest), contribution, pieces
        )
        message = contributed_to_wire(given)
        await self.secure_records.contributing(ctx, message)
        await self._client.contribute(message)

    def contributed(self, job: Job) -> bool:
        """Whether this silo gave anything for the key of this job, as its ledger has it."""
        return self._ledger.contributed(job.digest)

    async def group_key(self, job: Job) -> tuple[Relayed, ...]:
        """What the job's other silos gave to its key, as the coordinator brings it.

        Nothing while some are missing.
        """
        asked = group_key.poll_to_wire(KeyPoll(self._session, job.name, bytes.fromhex(job.digest)))
        self._count(asked)
        return group_key.secagg_delivery_from_wire(
            await self._client.group_key(asked), len(job.silos)
        )

    # The word on a padded upload.

    async def padded(self, ctx: bytes, message: secure_pb2.PaddedWordUpload) -> None:
        """Give the signed word on an upload that the coordinator has, recorded before it leaves.

        Ctx is its version's.

        ``message`` lacks the session, as it is kept on disk.
        """
        given = secure_pb2.PaddedWordUpload()
        given.CopyFrom(message)
        given.session = self._session
        await self.secure_records.padded(ctx, given)
        await self._client.padded(given)

    # What became of uploads whose connection broke.

    async def settle(self) -> list[SettledUpload]:
        """Ask how they stand and write their outcomes, oldest first.

        The session is open, and no upload runs.
        """
        settled = await self._outcomes.settle(self._standing)
        for upload in settled:
            if upload.digest is not None:  # accepted after the greeting said which head is held
                self._witness.accepted(upload.digest)
        return settled

    async def _standing(self, job: str, digest: str, round_: int, part: str) -> pb.StandingReply:
        request = pb.StandingRequest(
            session=self._session,
            job=job,
            job_digest=bytes.fromhex(digest),
            round=round_,
            part=part,
        )
        self._count(request)
        return await self._client.standing(request)

    # Decisions on jobs.

    async def record_decision(
        self, job: str, digest: str, signer: str, reasons: tuple[str, ...] | None
    ) -> None:
        """Record that we take part (None) or do not, before the answer leaves."""
        decision: records.JobAccept | records.JobDecline
        if reasons is None:
            decision = records.JobAccept(job=job, job_digest=digest, signer=signer)
        else:
            short = tuple(reason[:MAX_REASON] for reason in reasons)
            decision = records.JobDecline(job=job, job_digest=digest, signer=signer, reasons=short)
        await asyncio.to_thread(self._ledger.append, decision)

    async def close(self) -> None:
        """End the session and the channel.

        A ledger that failed is no reason to keep the channel.
        """
        with contextlib.suppress(StaddleError):
            await self._witness.flush()
            await self.end_session()
        await self._client.close()


def _hidden(declared: Declared, round_: int, name: str, exchange: type[Mix | Gram]) -> Part:
    """The part that is to leave hidden.

    LocalError unless the signed document has it so in this round.
    """
    for part in declared.hidden(round_):
        if part.name == name and isinstance(part.exchange, exchange):
            return part
    raise LocalError(
        f"part {name!r} does not cross by a {exchange.__name__} in round {round_}; nothing leaves"
    )


@dataclass
class _Sent:
    """How far an upload came."""

    size: int = 0  # payload bytes handed to the transport
    # of the whole payload, once all of it was made
    digests: Digests = field(default_factory=lambda: Digests(()))
