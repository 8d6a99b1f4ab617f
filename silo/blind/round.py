"""A blind round at this silo: the secure sum next to the training, up to the opened sum.

Its state machine is security/secagg/silo.py; here its effects are run, one after another, each
once. An effect that met a lost connection is run again after the next greeting, by the same object:
it lives as long as the process, and the secrets of an attempt with it. A process that restarts
is a dropout in the attempt that it was in (rule 18).

The setup, steps 0 and 1, run while the silo trains; the upload waits for the contributions, and
until the parts that leave one by one were accepted (hidden_uploads.py).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ... import log
from ...algorithms.job.job import Job
from ...errors import RefusedError
from ...proto.convert.secagg_received import SecaggDelivery, SignedSpec
from ...proto.convert.secagg_sent import Attempt, Over, UploadBody
from ...security.arithmetic.masks import Term
from ...security.faults import COORDINATOR, Code, check
from ...security.secagg.memory import Memory, MemoryStore
from ...security.secagg.messages import Header, silos_of
from ...security.secagg.silo import Participant, SiloAttempt, abandon_remembered, advance, begin
from ...security.secagg.silo_events import (
    AbandonAsked,
    AttemptStopped,
    Effect,
    Event,
    Finish,
    LeaveAttempt,
    Remember,
    SendAbandon,
    SendComplaint,
    SendHeader,
    SendKeys,
    SendReveal,
    SendShares,
    SendSurvival,
    Streamed,
    SurvivorsReceived,
    UploadWords,
)
from ...security.secagg.spec import Frame, RoundSpec
from ..admission.signed_sets import SignedSets
from ..egress.messages import Masking, streamed_of
from ..egress.outcomes import DeniedError, SumRecords
from ..egress.session import TurnedAwayError
from ..parts.contributions import Contributions
from ..parts.declared import Declared

Pads = Callable[[RoundSpec], Mapping[int, Term]]
# after an answer without a message that came at once: a coordinator must not make us spin
PAUSE_SECONDS = 0.5
MOST_IDLE = 300  # messages of one round that lead to nothing, at our full pace
# messages that enter another attempt, end one or abandon one, at our full pace: silos die, and the
# next attempt must not wait
MOST_AGAIN = 8
LEADING_ON = SendShares | SendComplaint | UploadWords | SendSurvival | SendReveal | Finish
REFUSED = "SECURE"  # the ErrorCode of a message that the coordinator does not take
# and that of an upload that comes too late, for the attempt or for its round
CLOSED = "ROUND_CLOSED"


class SumMessages(Protocol):
    """The protocol messages that a blind round needs."""

    async def secure_next(self, job: Job, round_: int, had: int) -> SecaggDelivery | None:
        """Wait for the next message; None where none came.

        ``had`` is how many messages of the round were taken before.
        """
        ...

    async def secure(self, attempt: Attempt, body: UploadBody) -> None:
        """Upload a message."""
        ...


class RoundGate(Protocol):
    """What a blind round needs of the gate."""

    sum_records: SumRecords
    signed_sets: SignedSets

    @property
    def protocol(self) -> SumMessages:
        """The messages of its secure sum."""
        ...

    async def upload_masked(
        self, declared: Declared, round_: int, contributions: Contributions, masking: Masking
    ) -> Streamed:
        """Upload the masked words."""
        ...


class Before(Protocol):
    """The uploads that leave before the masked one."""

    async def upload_all(self, contributions: Contributions) -> None:
        """Upload until the coordinator has all of them; none is uploaded twice."""
        ...


def no_pads(_: RoundSpec) -> Mapping[int, Term]:
    """The pads of a sum that the coordinator may read whole: none."""
    return {}


@dataclass(frozen=True)
class Doing:
    """An effect, and the attempt that it belongs to.

    It stays in the queue until it is done, so an interrupted one runs again.
    """

    attempt: Attempt
    effect: Effect | Over


class BlindRound:
    """The sums of one round; ``training`` makes this silo's contributions to it.

    It outlives lost connections, and so do the secrets of an attempt, which only it holds.
    ``summed`` is set once the sum is open.
    """

    def __init__(
        self,
        gate: RoundGate,
        participant: Participant,
        frame: Frame,
        memory_store: MemoryStore,
        job: Job,
        declared: Declared,
        training: "asyncio.Task[Contributions]",
        before: Before | None = None,
        key: bytes = b"",
        pads: Pads = no_pads,
        start: int = 0,
    ) -> None:
        """``before`` uploads the parts that leave one by one; None where there are none.

        ``start`` is the number of rounds behind the state that this silo trains from
        (security/secagg/memory.py).

        ``key`` is what the silos of a keyed job share: uploads are tagged by it. ``pads``, by group
        of an attempt, hide what the coordinator is not to read of its sum.
        """
        self.job = job
        self.round = frame.round
        self.summed = False
        self._gate = gate
        self._participant = participant
        self._frame = frame
        self._memory_store = memory_store
        self._declared = declared
        self._training = training
        self._before = before
        self._key = key
        self._pads = pads
        self._start = start
        # ``_had`` counts the messages received; the other two are for the rate limit (``_paced``).
        self._had = self._again = self._idle = 0
        self._state: SiloAttempt | None = None
        self._todo: deque[Doing] = deque()
        # ctx of the attempt whose upload the coordinator has, as it said after a lost connection
        self._uploaded = b""

    async def run(self) -> None:
        """Run until the sum is open; whatever else ends the round is raised.

        After a lost connection it may be run again.
        """
        # First finish what a lost connection interrupted.
        await self._do_all()
        while not self.summed:
            await self._next()
            await self._do_all()

    async def _do_all(self) -> None:
        while self._todo:
            await self._do(self._todo[0])
            self._todo.popleft()  # behind it: an interrupted effect is done again

    async def _next(self) -> None:
        """Take the coordinator's next message, if it has one."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        try:
            delivery = await self._gate.protocol.secure_next(self.job, self.round, self._had)
            if delivery is not None:
                await self._take(delivery)
        # A subclass of RefusedError, but no message misled us: the coordinator refused our call.
        except TurnedAwayError:
            raise
        except RefusedError as error:
            await self._misled(error)
            raise

        # rate limit: a coordinator must not be able to make us spin
        if delivery is None:
            leads_on = loop.time() - asked >= PAUSE_SECONDS
        else:
            self._had += 1
            leads_on = self._paced()
        if not leads_on:
            await asyncio.sleep(PAUSE_SECONDS)

    async def close(self) -> None:
        """Let the training go, if it still runs."""
        self._training.cancel()
        await asyncio.wait({self._training})
        if not self._training.cancelled():
            # nobody waits for it any more; asking keeps asyncio from complaining
            self._training.exception()

    def _paced(self) -> bool:
        """Whether the last message leads on.

        A coordinator must neither make us spin, nor set how fast our ledger grows.
        """
        effects = [doing.effect for doing in self._todo]
        if not effects:  # after an interruption, all that the round has had is delivered again
            self._idle += 1
            return self._idle <= MOST_IDLE
        if any(isinstance(effect, LEADING_ON) for effect in effects):
            return True
        self._again += 1
        return self._again <= MOST_AGAIN

    def accepted(self, ctx: bytes) -> None:
        """Note that the coordinator has the upload bound to this, whose connection broke.

        The upload is then made again for its header, and does not leave.
        """
        self._uploaded = ctx

    def _attempt(self, state: SiloAttempt) -> Attempt:
        return Attempt(
            self.job.name, bytes.fromhex(self.job.digest), self.round, state.spec.attempt, state.ctx
        )

    # Messages.

    async def _take(self, delivery: SecaggDelivery) -> None:
        attempt, body = delivery.attempt, delivery.body
        named = (attempt.job, attempt.job_digest.hex(), attempt.round)
        check(
            named == (self.job.name, self.job.digest, self.round),
            COORDINATOR,
            Code.ORDER,
            f"tells of round {attempt.round} of job {attempt.job!r} in another",
        )

        # a message of an earlier attempt may come late, and must not reach the state of this one
        state = self._state
        current = state is not None and attempt.ctx == state.ctx
        match body:
            case SignedSpec():
                await self._begin(attempt, body)
            case Over(code) if current:
                self._advance(AttemptStopped(f"the coordinator ended the attempt: {code}"))
            # For the attempt of an earlier process: the memory says whether it was signed.
            case AbandonAsked() if not current:
                await self._abandon_remembered(attempt)
            case SurvivorsReceived(headers) if current and (why := self._objection(state, headers)):
                self._advance(AttemptStopped(why, Code.POLICY))
            case _ if current and not isinstance(body, Over):
                self._advance(body)
            case _:  # of an attempt that this process is not in
                log.event(
                    "secagg.ignored", job=self.job.name, round=self.round, attempt=attempt.attempt
                )

    async def _begin(self, attempt: Attempt, spec: SignedSpec) -> None:
        """Enter an attempt, or say that we do not."""
        # A process that starts again has lost the secrets of its attempt, and must not answer in it
        # a second time (security rule 18).
        memory = await asyncio.to_thread(self._memory_store.load, self._frame.instance())
        if self._state is None:
            if memory.ctx == attempt.ctx.hex():
                self._leave_forgotten(attempt)
                return
            if memory.round == attempt.round and memory.attempt > attempt.attempt:
                return  # after an interruption, all attempts are delivered from the first on

        # A specification under which this silo sums nothing ends the attempt for it, in the ledger
        # too: its operator reads there who is to blame.
        try:
            state, effects = self._entered(spec, memory)
        except RefusedError as error:
            self._state = None
            self._todo.append(Doing(attempt, LeaveAttempt(Code(error.code), error.peer, error.why)))
            return

        shown = {}
        excused = state.participant.terms.excused
        if excused:  # proven to have misdealt: sums may lack them
            shown["proven"] = ",".join(sorted(excused))
        log.event(
            "secagg.entered",
            job=self.job.name,
            round=self.round,
            attempt=attempt.attempt,
            cohort=",".join(state.spec.cohort),
            **shown,
        )
        self._take_step(state, effects)

    def _leave_forgotten(self, attempt: Attempt) -> None:
        why = (
            "this silo entered the attempt before its process started again or its round failed;"
            " the secrets are gone"
        )
        # First recorded, then sent, so that the coordinator does not wait for us.
        self._todo += [
            Doing(attempt, LeaveAttempt(Code.STOPPED, "", why)),
            Doing(attempt, Over(Code.STOPPED)),
        ]

    def _entered(self, spec: SignedSpec, memory: Memory) -> tuple[SiloAttempt, tuple[Effect, ...]]:
        """Enter an attempt; RefusedError for a specification by which this silo sums nothing."""
        # else `begin` asks for evidence
        if (self.round, self._start) != (memory.signed_round, memory.start):
            memory = memory.starting(self._start)
        excused = self._gate.signed_sets.proven(self.job, spec.proofs)
        participant = replace(
            self._participant, terms=replace(self._participant.terms, excused=excused)
        )
        evidence = next((proof for proof in spec.proofs if proof.is_of(memory.signed_ctx)), None)
        brought = spec.document, spec.signature, memory, spec.notes, evidence, spec.shown
        return begin(participant, self._frame, *brought)

    async def _abandon_remembered(self, attempt: Attempt) -> None:
        memory = await asyncio.to_thread(self._memory_store.load, self._frame.instance())
        try:
            memory, note = abandon_remembered(self._participant, memory, attempt.ctx)
        except RefusedError as error:
            log.problem("secagg.not_abandoned", job=self.job.name, round=self.round, why=error.why)
            return
        # Remembered before the note leaves: this silo must never sign the attempt's survivors.
        self._todo += [Doing(attempt, Remember(memory)), Doing(attempt, SendAbandon(note))]

    def _objection(self, state: SiloAttempt | None, headers: Sequence[Header]) -> str:
        """The reason against a sum over these, next to all that this silo signed before.

        Empty for none. There is none against a part of a batch, over which no sum may be: the
        coordinator is to blame for that (_advance).
        """
        survivors = silos_of(headers)
        if state is None or state.participant.terms.whole(state.spec, survivors) != tuple(
            survivors
        ):
            return ""
        return self._gate.signed_sets.objection(
            self.job, survivors, state.participant.terms.excused
        )

    def _advance(self, event: Event) -> None:
        if self._state is not None:
            self._take_step(*advance(self._state, event))

    def _take_step(self, state: SiloAttempt, effects: tuple[Effect, ...]) -> None:
        self._state = state
        self._todo += [Doing(self._attempt(state), effect) for effect in effects]

    # Effects.

    async def _do(self, doing: Doing) -> None:
        attempt, effect = doing.attempt, doing.effect
        match effect:
            case Remember(memory):
                # the ledger first: who removes it later is found by the file
                if memory.signed_ctx == attempt.ctx.hex():
                    await self._note_signed(attempt)
                await asyncio.to_thread(self._memory_store.save, self._frame.instance(), memory)
            case UploadWords():
                try:
                    await self._upload(attempt, effect)
                except DeniedError as error:
                    self._advance(AttemptStopped(str(error), Code.POLICY))
            case Finish():
                await self._gate.sum_records.summed(attempt, effect)
                log.event(
                    "secagg.summed",
                    job=self.job.name,
                    round=self.round,
                    survivors=",".join(effect.survivors),
                )
                self.summed = True
            case LeaveAttempt(code):
                await self._end(attempt, effect)
                # After STOPPED the coordinator knows, or ``_leave_forgotten`` tells it next.
                if code is not Code.STOPPED:
                    await self._send(attempt, Over(code))
            case (
                SendKeys()
                | SendShares()
                | SendComplaint()
                | SendHeader()
                | SendSurvival()
                | SendReveal()
            ):
                await self._send(attempt, effect)
            case SendAbandon() | Over():
                await self._send(attempt, effect)

    async def _note_signed(self, attempt: Attempt) -> None:
        if self._state is not None:
            survivors = silos_of(self._state.headers)
            await self._gate.signed_sets.sign(
                self.job, attempt, survivors, self._state.participant.terms.excused
            )

    async def _misled(self, error: RefusedError) -> None:
        """End the round for us, and with it the attempt, after an invalid message."""
        state = self._state
        # An attempt that is over has its record already.
        if state is not None and state.stage not in ("done", "ended"):
            # The ledger only has codes of the protocol.
            code = Code(error.code) if error.code in Code.__members__ else Code.ORDER
            await self._end(self._attempt(state), LeaveAttempt(code, error.peer, error.why))

    async def _end(self, attempt: Attempt, ended: LeaveAttempt) -> None:
        log.problem(
            "secagg.ended",
            job=self.job.name,
            round=self.round,
            attempt=attempt.attempt,
            code=ended.code.value,
            blame=ended.blame,
            why=ended.why,
        )
        await self._gate.sum_records.ended(attempt, ended)

    async def _send(self, attempt: Attempt, body: UploadBody) -> None:
        """Upload a message; where it is refused, the attempt is over for us.

        It continues after a message that comes too late for its round: t silos open a sum, and a
        slow one asks what came of it.
        """
        try:
            await self._gate.protocol.secure(attempt, body)
        except RefusedError as error:
            # The others may have opened the sum without us: the next message says.
            if error.code == CLOSED:
                log.event(
                    "secagg.late", job=self.job.name, round=self.round, attempt=attempt.attempt
                )
                return
            if error.code != REFUSED:
                raise

            # An attempt that this silo has left meanwhile needs no second end.
            if (
                self._state is not None
                and self._state.ctx == attempt.ctx
                and not isinstance(body, Over)
            ):
                self._advance(
                    AttemptStopped(
                        f"the coordinator refused our {type(body).__name__}: {error.why}"
                    )
                )

    async def _upload(self, attempt: Attempt, upload: UploadWords) -> None:
        state = self._state
        if state is None or state.ctx != attempt.ctx or state.stage != "uploading":
            return  # it ended meanwhile

        # shielded: the training outlives an attempt, and the next one sums the same contributions
        contributions = await asyncio.shield(self._training)
        if self._before is not None:
            await self._before.upload_all(contributions)
        # The set U2: silos that dealt shares.
        members = tuple(dealing.dealer for dealing in state.dealings)
        pads = self._pads(state.spec)
        records = self._declared.records.train if self._declared.records else None
        masking = Masking(
            state.spec, state.silo, upload.terms, members, records, self._key, pads, upload.hiding
        )

        # the coordinator has this upload already: what it was is made again, and does not leave
        if self._uploaded == attempt.ctx:
            streamed = await asyncio.to_thread(
                streamed_of, self._declared, self.round, contributions, masking
            )
        else:
            try:
                streamed = await self._gate.upload_masked(
                    self._declared, self.round, contributions, masking
                )
            except RefusedError as error:
                # The attempt is over for us; its training serves the next one.
                if error.code not in (REFUSED, CLOSED):
                    raise
                self._advance(AttemptStopped(f"the coordinator refused our upload: {error.why}"))
                return
        self._advance(streamed)
