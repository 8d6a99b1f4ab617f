"""The session with the coordinator: who we speak to, and the control messages that hold no tensor.

Control messages are greetings (with our version and the time), polls, heartbeats, fetch requests,
answers, questions about an upload, attestations of other silos' ledgers, and a new certificate:
names, numbers, digests, signatures, public keys and codes of closed lists. Each is counted before
it leaves, against the policy's caps in the record that the session begins with; totals end it.

Only this module, gate.py and protocol.py use the client; ``tests/test_structure.py`` checks that.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial

from google.protobuf.message import Message

from ...algorithms.job.job import Job
from ...errors import LocalError, PeerError, RefusedError, StaddleError, UnreachableError
from ...proto import federation_pb2 as pb
from ...proto import membership_pb2
from ...proto.channel import PROTOCOL_MAX, PROTOCOL_MIN, software
from ...security.blind.plan import RoundPlan
from ...security.identity import roster as rosters
from ...security.identity.certificate import utc_now
from ...security.identity.keys import Keys, tls_pairs
from ...security.identity.renewal import Renewal
from ...security.ledger.egress_ledger import Ledger
from ...security.ledger.records import ControlClose, ControlOpen, JobAccept, JobDecline, Peer
from ...security.policy.file import ControlCaps as Caps
from ..connectivity import handshake_hint
from ..ingress import delivery
from ..ingress.directed_rows import AnyRows
from ..ingress.open_sums import IncomingSums
from .client import Client, TurnedAwayError
from .outcomes import OtherRosterError, SumRecords
from .witness import Witness

MAX_CONTROL_BYTES = 1024  # one control message; the longest, a new certificate, has up to 952
MAX_SESSION_BYTES = 64
MAX_WAIT_SECONDS = 300  # between heartbeats, and in one poll
# witness tasks a session for each member of the roster that are dealt with at once
MOST_WITNESSED = 4
MAX_REASON = 500  # characters of one reason in a record: a coordinator chooses what we refuse

__all__ = [
    "MAX_CONTROL_BYTES",
    "MAX_REASON",
    "CoordinatorSession",
    "SessionCounts",
    "TurnedAwayError",
    "UnreachableError",
    "open_client",
]


def open_client(address: str, keys: Keys, roster: rosters.Roster, proxy: str = "") -> Client:
    """The channel to the roster's coordinator, whose certificate alone is trusted.

    It connects with the first call.
    """
    coordinator, pairs = roster.coordinator, partial(tls_pairs, keys)
    hint = partial(handshake_hint, keys.entry, coordinator, roster.version)
    return Client(address, coordinator, pairs, hint, len(roster.entries), proxy)


class SessionCounts:
    """Counts of the open session's control messages, and the record that holds their caps.

    The record is durable before the greeting; the totals follow at the end of the session.
    """

    def __init__(self, ledger: Ledger, caps: Caps, recipient: Peer) -> None:
        self._ledger = ledger
        self._caps = caps
        self._recipient = recipient
        self._ref: int | None = None
        self.messages = 0
        self.size = 0  # bytes

    async def open(self) -> bytes:
        """Close the record of the session before, and open one.

        Returns its leaf hash, which nobody can guess before: it covers a nonce made with our key.
        """
        # One record per session and not per message: a year has millions of polls (rule 32).
        self.close()
        head = self._ledger.head
        place = head.seq + 1 if head else 0
        record = ControlOpen(
            session=f"{self._ledger.silo}-{place}",
            recipient=self._recipient,
            max_messages=self._caps.max_messages,
            max_bytes=self._caps.max_bytes,
        )
        opened = await asyncio.to_thread(self._ledger.append, record)
        self._ref, self.messages, self.size = opened.seq, 0, 0
        return bytes.fromhex(opened.leaf)

    def count(self, message: Message) -> str:
        """Count a message that is about to leave.

        Returns why a new session is needed first, empty where the message may leave. LocalError
        for a message that is too long to leave without a record of its own.
        """
        # Counted before it leaves, so that the totals in the ledger are never too low.
        size = message.ByteSize()
        if self._ref is None:
            return "no session is open; say hello first"
        # A longer one could carry more than names, numbers and codes, without a record.
        if size > MAX_CONTROL_BYTES:
            raise LocalError(
                f"a control message of {size} bytes, at most {MAX_CONTROL_BYTES} may leave"
                " uncounted"
            )
        if self.messages + 1 > self._caps.max_messages or self.size + size > self._caps.max_bytes:
            return "the session's control record is full; a new one opens"
        self.messages += 1
        self.size += size
        return ""

    def close(self) -> None:
        """Write the totals of an open session, in this thread: whoever is cancelled writes them."""
        if self._ref is not None:
            # Cleared first, so that a ledger that fails is not written again.
            ref, self._ref = self._ref, None
            self._ledger.append(ControlClose(ref=ref, messages=self.messages, bytes=self.size))


class CoordinatorSession:
    """One session after another with the roster's coordinator.

    ``client`` sends. ``token`` is the coordinator's name for the open session, empty before the
    first one. ``hold`` is how long it may hold a poll, in seconds.
    """

    def __init__(
        self,
        client: Client,
        ledger: Ledger,
        roster: rosters.Roster,
        witness: Witness,
        caps: Caps,
    ) -> None:
        self.client = client
        self.witness = witness
        self.coordinator = Peer(id=roster.coordinator.id, spki=roster.coordinator.spki_sha256)
        self.token = b""
        self.hold = 0.0
        self.jobs = 1  # that it may have in hand
        self._fetching = asyncio.Lock()  # one delivery has the line at a time
        self._ledger = ledger
        self._roster = roster
        self._counts = SessionCounts(ledger, caps, self.coordinator)
        self._sum_records = SumRecords(ledger)
        self._attended = 0  # witness tasks of this session

    def count(self, message: Message) -> None:
        """Count a control message before it leaves.

        UnreachableError asks for a new session at the cap.
        """
        if why := self._counts.count(message):
            raise UnreachableError(self.coordinator.id, why)

    async def hello(self, jobs: int = 1) -> int:
        """Open a session under a fresh control record; returns the seconds between heartbeats.

        It is for so many ``jobs`` at a time. LocalError where the coordinator holds a head of our
        ledger that this one does not lead to: nothing may leave.
        """
        # The leaf hash is the challenge to the witnesses: nobody can have an answer to it from
        # before, so an old copy of this ledger cannot be passed off with old signatures.
        challenge = await self._counts.open()
        self.witness.begin(challenge)
        request = pb.HelloRequest(
            silo=self._ledger.silo,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            roster_digest=bytes.fromhex(rosters.digest(self._roster)),
            challenge=challenge,
            software=software(),
            clock=int(utc_now().timestamp()),
            jobs=jobs,
        )
        self.count(request)
        reply = await self.client.hello(request)
        if reply.roster:
            raise OtherRosterError(self.coordinator.id, reply.roster)

        # Every later message repeats this name: a long one would eat up the caps on our messages.
        if len(reply.session) > MAX_SESSION_BYTES:
            raise PeerError(
                self.coordinator.id, f"opened a session with a name of {len(reply.session)} bytes"
            )
        await self.witness.greeted(reply.held, reply.generation)
        self._attended = 0

        # Bounded, so that a coordinator can neither make us spin nor silence us for ever.
        self.token = reply.session
        self.hold = float(min(reply.hold_seconds, MAX_WAIT_SECONDS))
        self.jobs = max(1, min(reply.jobs, jobs))
        return max(1, min(reply.beat_seconds, MAX_WAIT_SECONDS))

    async def end(self) -> None:
        """Write the totals of the session's control messages."""
        self._counts.close()

    async def close(self) -> None:
        """End the session and the channel.

        A ledger that failed is no reason to keep the channel.
        """
        with contextlib.suppress(StaddleError):
            await self.witness.flush()
            await self.end()
        await self.client.close()

    # Tasks.

    async def poll(self, in_hand: Sequence[pb.InHand] = ()) -> pb.Task:
        """Wait for another task; what silos say about each other's ledgers is dealt with here."""
        request = pb.PollRequest(session=self.token, in_hand=in_hand)
        while True:
            self.count(request)
            task = await self.client.poll(request, self.hold)
            if task.WhichOneof("body") != "witness":
                # Only rounds bring heads; for any other task the list is empty.
                await self.witness.relayed(task.round.heads)
                return task
            await self._attend(task.witness)
            self._attended += 1
            # Rate limit: a coordinator must not be able to make us spin.
            if self._attended > MOST_WITNESSED * len(self._roster.entries):
                return pb.Task(nothing=pb.Nothing())

    async def beat(self, job: str, round_: int) -> bool:
        """Say that we are alive; returns whether our work is still wanted."""
        request = pb.BeatRequest(session=self.token, job=job, round=round_)
        self.count(request)
        reply = await self.client.beat(request)
        # A silo at work does not poll, so other silos' questions come with heartbeats.
        await self._attest(reply.asked)
        return reply.wanted

    async def answer(
        self, job: str, digest: str, round_: int, kind: str, code: str = "UNSPECIFIED"
    ) -> None:
        """Answer a task: a kind and a code, both of closed lists."""
        request = pb.AnswerRequest(
            session=self.token,
            job=job,
            job_digest=bytes.fromhex(digest),
            round=round_,
            kind=f"ANSWER_KIND_{kind}",
            code=f"ERROR_CODE_{code}",
        )
        self.count(request)
        await self.client.answer(request)

    async def record_decision(self, decision: JobAccept | JobDecline) -> None:
        """Record that we take part or do not, before the answer leaves.

        Durable when it returns; long reasons are cut.
        """
        if isinstance(decision, JobDecline):
            short = tuple(reason[:MAX_REASON] for reason in decision.reasons)
            decision = decision.model_copy(update={"reasons": short})
        await asyncio.to_thread(self._ledger.append, decision)

    async def renew(self, renewal: Renewal) -> None:
        """Hand in a new certificate of ours, which counts once a roster has it."""
        signature = bytes.fromhex(renewal.signature)
        request = membership_pb2.RenewRequest(certificate=renewal.certificate, signature=signature)
        self.count(request)
        await self.client.renew(request)

    # Uploads and deliveries.

    async def standing(self, job: str, digest: str, round_: int, part: str) -> pb.StandingReply:
        """Ask what became of an upload.

        ``part`` is empty for an upload of the whole round.
        """
        request = pb.StandingRequest(
            session=self.token,
            job=job,
            job_digest=bytes.fromhex(digest),
            round=round_,
            part=part,
        )
        self.count(request)
        return await self.client.standing(request)

    async def fetch(
        self, plan: RoundPlan, rows: AnyRows | None = None, sums: IncomingSums | None = None
    ) -> delivery.ReceivedDelivery:
        """Download the delivery of a round, checked and recorded as ingress.

        ``rows`` opens those of a Mix, ``sums`` checks open sums; without the one or the other there
        may be none. A sum that is rejected is recorded as one that ended, with who is to blame.
        """
        async with self._fetching:
            # Made and counted now: another lane may have opened a session while this one waited.
            request = pb.FetchRequest(
                session=self.token,
                job=plan.job.name,
                job_digest=bytes.fromhex(plan.job.digest),
                round=plan.round,
            )
            self.count(request)
            frames = self.client.fetch(request, delivery.largest(plan))
            try:
                return await delivery.take(self._ledger, self.coordinator, plan, frames, rows, sums)
            except RefusedError:
                if sums is not None and sums.refused is not None:
                    await self._sum_records.refused(plan.job.name, plan.job.digest, sums.refused)
                raise

    def weights(self, job: Job, size: int, offset: int) -> AsyncIterator[bytes]:
        """Download a job's file of weights of ``size`` bytes from a byte on, piece by piece."""
        request = pb.WeightsRequest(
            session=self.token,
            job=job.name,
            job_digest=bytes.fromhex(job.digest),
            offset=offset,
        )
        self.count(request)
        return self.client.weights(request, size)

    # What silos say of each other's ledgers.

    @property
    def witnessed(self) -> bool:
        """Whether another silo has said in this session what it holds of our ledger.

        An older copy of it would be known then.
        """
        return self.witness.answered

    @property
    def witnesses(self) -> frozenset[str]:
        """The silos whose word counts for ``witnessed``."""
        return self.witness.independent

    async def _attend(self, witness: pb.Witness) -> None:
        # At most one per member counts.
        for said in witness.attestations[: len(self._roster.entries)]:
            await self.witness.attested(said)
        await self._attest(witness.asked)

    async def _attest(self, challenges: Sequence[pb.Challenge]) -> None:
        """Sign what we hold of other silos' ledgers, once for each member at most."""
        for challenge in challenges[: len(self._roster.entries)]:
            attestation = await asyncio.to_thread(self.witness.attest, challenge, self.token)
            self.count(attestation)
            await self.client.attest(attestation)
