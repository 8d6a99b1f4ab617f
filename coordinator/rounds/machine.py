"""A job at the coordinator as a pure state machine: ``advance(state, event) -> (state, effects)``.

Names and digests only: no tensor, no clock, no file. Time is an event (RoundDeadline). Replaying
the events gives the state.

::

    stage      leaves when                                    goes to
    queued     its turn has come (Began)                      admitting, or where it was stopped:
                                                              drawing, round
    admitting  every silo answered and enough accepted        drawing
               (min_cohort; of a keyed job all of them)
    admitting  the deadline                                   drawing if enough accepted,
                                                              else finishing
    admitting  the same, of a job that pends and was          queued: its rounds wait for their
               overtaken (Overtaken)                          turn
    admitting  an operator withdraws it (Withdrawn); also     finishing
               queued or stopped, before its first round
    drawing    the cohort is drawn                            round, or finishing if it is too small
    round      every member uploaded, failed or was lost;     folding (min_cohort uploaded),
               or a quorum uploaded; or the deadline          else finishing
    round      of a blind job: its sum is open                folding
    round      of a blind job: too many attempts              finishing
    folding    the fold is done                               drawing, or finishing after the last
    folding    the fold failed                                finishing
    folding    the disk changed uploads (Damaged)             round: their silos upload again, once;
                                                              else finishing
    finishing  every admitted silo confirmed or was lost,     ended; a silo that comes back later
               or the deadline                                is still answered
    stopped    an operator resumes it (Resumed)               queued
    any        what it needs is damaged (Broken)              finishing (failed), also from there
    any        of a keyed job: its key no longer fits         finishing (failed), unless it is there
               (Unkeyed)                                      already

A silo that declined is offered the job once more when it greets again (Greeted): its people may
have changed their policy. A silo that waits for a person (WAITING) counts as one without an answer.

A job pends while it is not admitted and all its silos have answered, but for those that are silent:
they are away, or had time enough. Another may then begin before it (``aside``). Silos still answer
it, and it is the first in the queue once those that it waits for accept, or its deadline is over.

OperatorStopped leads to stopped from queued, admitting, drawing and round, and from folding
once the fold is done; uploads of the open round stay. A silo that did not answer in time may still
do so: it is drawn from then on. A silo that is known to be lost when a round opens is not awaited
in it (``Drawn``).

In a blind job (``blind``) a round is one secure sum, which coordinator/blind/secure_sum.py makes.
A silo that fails drops out of an attempt at it, and may take part in the next unless its privacy
budget is spent. A silo that is shown to have broken the rules (GUILTY) is ``excluded`` from all
later attempts and rounds.

Silos of one batch are asked together (``batches``). The next attempt is made without the batch of a
silo that was lost while enough others are left, and else with all of the cohort again. A silo for
which it is ``proven`` that it broke the rules leaves its batch, which stays while ``least`` of its
silos are left; they are shown the evidence (security/secagg/evidence.py). A sum that decodes to no
valid values (``spoiled``: a silo uploaded what nobody may) is repeated without each batch in turn.
A batch whose own sum is spoiled is ``excluded`` as a whole, since nobody can tell which of its
silos it was. All silos of a keyed job (``keyed``) have a part in its key once they accepted, so the
job does not begin without one of them.

Events that come too late (an upload for a closed round) change nothing. The tasks of silos follow
from the state: tasks.py.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil
from typing import Any, Literal, TypeAlias, get_args

from ...algorithms.job import batches as grouping
from ...algorithms.job.batches import Batches
from ...security.identity.selection import among, with_codes, without
from .events import (
    BATCH,
    BUDGET,
    GUILTY,
    PROVEN,
    WAITING,
    Answered,
    Began,
    Broken,
    Damaged,
    Done,
    DrawCohort,
    Drawn,
    Drop,
    Effect,
    Event,
    Fold,
    Folded,
    FoldFailed,
    Gather,
    Greeted,
    Halt,
    LogEvent,
    OperatorStopped,
    Overtaken,
    Resumed,
    RoundDeadline,
    SiloFailed,
    SiloLost,
    Stage,
    StartRoundTimer,
    SumFailed,
    Summed,
    Unkeyed,
    UploadStored,
    Withdrawn,
    in_words,
)

# Attempts at the sum of a blind round; those that an operator stopped do not count. A host may be
# away for twenty minutes (secure_sum_runner.py pauses), and a process may die in a loop.
MOST_ATTEMPTS = 30
# Of them, those that failed for more than absent silos: what a silo refuses, it refuses again.
MOST_REFUSED = 3
# Other attempts: nearly all failed only because silos were restarted.
MOST_RESTARTED = 100
RESTARTED = "STOPPED"  # why a silo drops out whose process started again
FINAL = (BUDGET, *GUILTY)  # why a silo is out of every attempt at a round
AWAY = ("lost", "deadline", RESTARTED)  # why a silo drops out that may well take part in the next


@dataclass(frozen=True)
class JobState:
    """The state of a job, from which all of its next steps follow.

    Immutable; rounds and attempts count from 0. The database stores it as JSON, at each step but
    plain uploads, so it must stay small.
    """

    job: str
    silos: tuple[str, ...]  # job order
    rounds: int
    min_cohort: int
    quorum: float = 1.0  # share of a cohort whose contributions close a round
    stage: Stage = "queued"
    round: int = 0
    # silo → "accepted", or the code of its refusal
    answers: Mapping[str, str] = field(default_factory=dict)
    # silos that declined, and are asked once more
    asked: frozenset[str] = frozenset()
    cohort: tuple[str, ...] = ()
    # silo → digest of its upload in this round; "" in a sum
    given: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)  # silo → why it drops out of this round
    # silos that gave in this round, and were asked again: the disk changed it
    again: frozenset[str] = frozenset()
    # silo → what it was shown to have done
    excluded: Mapping[str, str] = field(default_factory=dict)
    # silo → one more than the last round it gave to
    counted: Mapping[str, int] = field(default_factory=dict)
    done: frozenset[str] = frozenset()
    aside: bool = False  # another job began while this one pended
    opened: bool = False  # admission is over
    stopping: bool = False  # as soon as the fold is done
    outcome: Literal["running", "completed", "failed"] = "running"
    reason: str = ""
    blind: bool = False  # each round is one secure sum
    keyed: bool = False  # its silos share a key, which each of them gives to
    batches: Batches = ()  # of a blind job: silos that are in a sum together or not at all
    fewest: int = 0  # silos of such a sum, at the least
    # silos of what is left of a batch without those that are proven to have broken the rules
    least: int = 1
    # They are asked again if too few would be left, and in each new round.
    lost: frozenset[str] = frozenset()  # silos without which the next attempt is made
    # silos of the sums of this round that are none of values, in turn
    spoiled: tuple[tuple[str, ...], ...] = ()
    # silos of this round's sums that some may have signed, and are not open
    signed: frozenset[str] = frozenset()
    attempt: int = 0  # at the sum of this round: the running one, or the next
    fruitless: int = 0  # attempts at it that ended without a sum
    refused: int = 0  # those of them that will hardly end otherwise

    @cached_property
    def admitted(self) -> tuple[str, ...]:
        """Silos that accepted, in job order."""
        return among(self.silos, with_codes(self.answers, ("accepted",)))

    @property
    def declined(self) -> frozenset[str]:
        """Silos that have not accepted, by their last answer."""
        return frozenset(self.answers).difference(self.admitted)

    @property
    def unanswered(self) -> tuple[str, ...]:
        """Silos that have not answered the offer, or wait for a person, in job order."""
        waiting = with_codes(self.answers, (WAITING,))
        return without(self.silos, self.answers.keys() - waiting.keys())

    @property
    def needed(self) -> int:
        """How many silos have to accept."""
        # Each silo has a part in the key that they share, which nobody else can take.
        least = self.fewest if self.batches else self.min_cohort
        return len(self.silos) if self.keyed else least

    @property
    def lacking(self) -> bool:
        """True while too few silos have accepted for a round."""
        # A batch is summed whole or not at all.
        counted = _whole(self, self.admitted) if self.batches else self.admitted
        return len(counted) < self.needed

    @property
    def blocked(self) -> str:
        """Why no silo that is still awaited can make it begin; empty where that is not so."""
        hoped = {**self.answers, **dict.fromkeys(self.unanswered, "accepted")}
        stuck = self.stage == "admitting" and replace(self, answers=hoped).lacking
        return stuck * (
            f"cannot begin yet: {self.needed} of {len(self.silos)} silos must accept; have those"
            " that declined accept it, or withdraw it"
        )

    def pends(self, silent: Collection[str] = ()) -> bool:
        """True while it takes other answers to begin, and nobody else's is awaited.

        ``silent`` as in ``Overtaken``.
        """
        awaited = filter(self.may_answer, without(self.silos, silent))
        return self.stage == "admitting" and not any(awaited)

    @property
    def runs(self) -> bool:
        """True while it has its turn, and a place at each of its silos (queue.py)."""
        aside = self.aside and self.stage == "admitting"
        return self.stage not in ("queued", "stopped", "ended") and not aside

    @property
    def waits(self) -> bool:
        """True while it is in the queue."""
        return self.stage == "queued"

    @property
    def admits(self) -> bool:
        """True while it has its turn and takes answers, which it needs to open its first round."""
        return self.stage == "admitting" and not self.aside

    @cached_property
    def open(self) -> tuple[str, ...]:
        """Members of the cohort that have neither uploaded nor failed."""
        return without(self.cohort, {*self.given, *self.failed})

    @cached_property
    def unconfirmed(self) -> tuple[str, ...]:
        """Silos that take part in the job and have not confirmed its end, in job order."""
        return without(self.admitted, self.done)

    @property
    def members(self) -> tuple[str, ...]:
        """Silos whose uploads the open round folds, in job order."""
        return among(self.cohort, self.given)

    @property
    def complete(self) -> bool:
        """True once the open round has all the contributions that it waits for.

        It never waits for fewer than ``min_cohort``, however small the quorum.
        """
        enough = max(self.min_cohort, ceil(self.quorum * len(self.cohort)))
        return not self.open or len(self.given) >= enough

    @property
    def guilty(self) -> dict[str, str]:
        """Silos that are out of the job.

        Silo → code. Includes silos that were found guilty in this round.
        """
        return {**self.excluded, **with_codes(self.failed, GUILTY)}

    @property
    def exhausted(self) -> dict[str, str]:
        """Silos that are out of every attempt at this round.

        Silo → code. Silos that are merely away are not included.
        """
        return with_codes(self.failed, FINAL)

    @property
    def proven(self) -> frozenset[str]:
        """Silos that evidence shows to be guilty: their batches may be summed without them."""
        return frozenset(with_codes(self.guilty, (PROVEN,)))

    @property
    def expired(self) -> bool:
        """True once no row goes down any more: the job has ended, or failed.

        A silo that comes late still receives what was summed.
        """
        return self.stage == "ended" or (self.stage == "finishing" and self.outcome == "failed")

    def may_answer(self, silo: str) -> bool:
        """True while this silo may still answer the offer.

        It may answer late, and is then drawn from the next round on. It accepts once, and declines
        once per greeting.
        """
        waiting = self.stage in ("admitting", "drawing", "round", "folding")
        return waiting and silo in without(self.silos, self.answers.keys() - self.asked)

    def is_open_to(self, silo: str) -> bool:
        """True while this silo's acceptance is awaited, or would count once it is asked again."""
        waits = self.stage in ("queued", *RUNNING)
        return waits and silo in without(self.silos, self.admitted)

    def failing(self, silos: Iterable[str], code: str) -> "JobState":
        """The state in which these silos drop out of the round.

        ``code`` says why, and replaces an earlier one.
        """
        return replace(self, failed={**self.failed, **dict.fromkeys(silos, code)})


Step: TypeAlias = tuple[JobState, tuple[Effect, ...]]
Follow: TypeAlias = Callable[[JobState], Step]


def advance(state: JobState, event: Event) -> Step:
    """The next state and what has to be done; events that do not fit the state change nothing.

    Pure. Every event may come in every stage.
    """
    stages, follow = _STEPS[type(event)]
    # An upload, a deadline or an attempt of a round that is over comes too late.
    stale = getattr(event, "round", state.round) != state.round
    if stale or state.stage not in stages:
        return state, ()
    return follow(state, event)


# An operator, the roster, the disk.


def _began(state: JobState, _: Began) -> Step:
    """Offer the job, or resume it where it was stopped."""
    # It was stopped in a round, whose uploads are still there.
    if state.cohort:
        return _reopened(replace(state, stage="round"))
    # It was stopped between rounds, or enough silos accepted it while another job ran.
    if state.opened or state.aside:
        return _open_round(state)
    offered = LogEvent("job.offered", {"silos": state.silos, "rounds": state.rounds})
    # It may have been declined before it was stopped.
    return _then(
        replace(state, stage="admitting", asked=state.declined),
        (offered, StartRoundTimer("admitting", 0)),
        _admit_if_complete,
    )


def _reopened(state: JobState) -> Step:
    """The round that was open when the job was stopped."""
    opened = LogEvent("round.opened", {"round": state.round, "cohort": state.cohort})
    if not state.blind:
        return _then(state, (opened, _await_uploads(state)), _close_if_complete)
    # Its sum may have been opened meanwhile: survivors had signed it before the stop.
    if state.given:
        return _then(state, (opened,), _close)
    return state, (opened, _await_uploads(state))


def _stopped(state: JobState, event: OperatorStopped) -> Step:
    # Its silos read it while it is stopped.
    return _halted(replace(state, reason=f"stopped by {event.by}"))


def _halted(state: JobState) -> Step:
    # A fold runs in a thread that cannot be stopped, so the job stops once it is done.
    if state.stage == "folding":
        return replace(state, stopping=True), ()
    effects: list[Effect] = [LogEvent("job.stopped", {"round": state.round, "why": state.reason})]
    # The sum stops as well, unless its survivors may have signed: then it is finished.
    if state.blind and state.stage == "round":
        effects.append(Halt(state.round))
    return replace(state, stage="stopped"), tuple(effects)


def _resumed(state: JobState, _: Resumed) -> Step:
    # Not stopped yet: withdraw a stop that waits for the end of a fold.
    if state.stage != "stopped":
        return replace(state, stopping=False, reason=""), ()
    # Silos that were away when the job was stopped may be back; whoever is guilty stays out.
    state = replace(state, stage="queued", aside=False, failed=state.guilty, lost=frozenset())
    state = replace(state, reason="")  # of the stop
    return state, (LogEvent("job.resumed", {"round": state.round}),)


def _broken(state: JobState, event: Broken) -> Step:
    return _when(state.outcome != "failed", state, partial(_fail, reason=event.reason))


def _unkeyed(state: JobState, event: Unkeyed) -> Step:
    return _when(state.keyed, state, partial(_fail, reason=event.reason))


def _withdrawn(state: JobState, _: Withdrawn) -> Step:
    return _when(not state.opened, state, partial(_fail, reason="withdrawn by an operator"))


# Admission.


def _greeted(state: JobState, event: Greeted) -> Step:
    again = state.declined.intersection({event.silo})
    return replace(state, asked=state.asked.union(again)), ()


def _overtaken(state: JobState, event: Overtaken) -> Step:
    if not state.pends(event.silent) or state.aside:
        return state, ()
    lacks = without(state.silos, state.admitted)
    return replace(state, aside=True), (LogEvent("job.pends", {"silos": lacks}),)


def _answered(state: JobState, event: Answered) -> Step:
    silo, code = event.silo, event.code
    # An acceptance counts for good.
    if not state.may_answer(silo):
        return state, ()
    answer = code or "accepted"
    fields = {"silo": silo} if code is None else {"silo": silo, "code": code}
    said = LogEvent(_SAID.get(answer, "job.declined"), fields)
    told = state.answers.get(silo) == answer
    answers = {**state.answers, silo: answer}
    state = replace(state, answers=answers, asked=state.asked - {silo})
    return _then(state, () if told else (said,), _admit_if_complete)


_SAID = {"accepted": "job.accepted", WAITING: "job.waits"}


def _admit_if_complete(state: JobState) -> Step:
    # Without enough silos it pends until its deadline: policies may change.
    ready = state.stage == "admitting" and not state.unanswered and not state.lacking
    return _when(ready, state, _admit)


def _admit(state: JobState) -> Step:
    admitted = state.admitted
    others = without(state.silos, admitted)
    refused = ", ".join(f"{silo}: {state.answers.get(silo, 'no answer')}" for silo in others)
    # A round of fewer silos would not be folded.
    if len(admitted) < state.min_cohort:
        why = f"{len(admitted)} silos accepted, min_cohort is {state.min_cohort} ({refused})"
        return _fail(state, why)
    # Each silo has a part in the key that they share, which nobody else can take.
    if state.keyed and refused:
        why = (
            f"{len(admitted)} of {len(state.silos)} silos accepted, and the key that its"
            f" silos share takes all of them ({refused})"
        )
        return _fail(state, why)
    # Another job runs: this one is the first in the queue.
    if state.aside:
        return replace(state, stage="queued"), ()
    return _open_round(state)


# A round opens.


def _open_round(state: JobState) -> Step:
    state = replace(state, stage="drawing", opened=True, aside=False)
    return state, (DrawCohort(state.round),)


def _await_uploads(state: JobState) -> Effect:
    """Wait for the secure sum of an open round, or for single uploads until the deadline."""
    return _gather(state) if state.blind else StartRoundTimer("round", state.round)


def _drawn(state: JobState, event: Drawn) -> Step:
    # Excluded silos stay out of all later rounds.
    excluded = {silo: state.excluded[silo] for silo in among(state.excluded, event.cohort)}
    left = without(event.cohort, excluded)
    whole = _whole(state, left)
    # A silo whose batch is not whole stays out of the round: a sum without some of its batch would
    # differ from the batch's other sums by single silos.
    if state.batches:
        cohort, failed = whole, {}
        least, rule = state.fewest, f"{len(whole)} of them in whole batches, and it takes"
    else:
        cohort, failed = event.cohort, excluded
        least, rule = state.min_cohort, "min_cohort is"
    # The cohort follows from the job, so it cannot be drawn again.
    if len(whole) < least:
        drawn = f"round {state.round}: only {len(left)} of the drawn silos are admitted"
        missing = "".join(f"; {silo}: {in_words(code)}" for silo, code in excluded.items())
        return _fail(state, f"{drawn}, {rule} {least}{missing}")
    state = replace(state, stage="round", cohort=cohort, given={}, failed=failed)
    opened = LogEvent("round.opened", {"round": state.round, "cohort": cohort})
    state, dropped = _without_away(state, among(state.open, event.lost))
    return state, (opened, *dropped, _await_uploads(state))


def _without_away(state: JobState, away: Sequence[str]) -> tuple[JobState, tuple[LogEvent, ...]]:
    """A round that opens does not wait for silos that are away, unless too few are left.

    Then they are asked like all others: some may be back before the next beat, and else they are
    lost as they are in any round.
    """
    left = state.failing(away, "lost")
    if state.batches:
        # Their whole batches are left out: a batch is summed whole or not at all.
        left = replace(left, lost=frozenset(away))
        enough = len(_asked(left)) >= state.fewest
    else:
        enough = len(left.open) >= state.min_cohort
    return (left, _dropped(state, away, "lost")) if enough else (state, ())


def _dropped(state: JobState, silos: Sequence[str], code: str) -> tuple[LogEvent, ...]:
    return tuple(
        LogEvent("silo.dropped", {"silo": silo, "round": state.round, "code": code})
        for silo in silos
    )


# Uploads.


def _stored(state: JobState, event: UploadStored) -> Step:
    silo = event.silo
    # In a blind job no upload counts alone: the sum does (Summed).
    if state.blind or silo not in state.open:
        return state, ()
    state = replace(state, given={**state.given, silo: event.digest})
    accepted = LogEvent("upload.accepted", {"silo": silo, "round": event.round})
    return _then(state, (accepted,), _close_if_complete)


def _failed(state: JobState, event: SiloFailed) -> Step:
    silo, code = event.silo, event.code
    # A failure counts only while the silo is awaited.
    awaited = state.open if state.stage == "round" else ()
    # Evidence that a silo broke the rules counts at any time, also after it has dropped out.
    counts = state.cohort if code in GUILTY else awaited
    if silo not in counts:
        return state, ()
    # If it is out of the round already, only the new code is noted.
    dropped_before = state.stage != "round" or silo in state.failed
    state = state.failing((silo,), code)
    if dropped_before:
        return state, ()
    dropped = _dropped(state, (silo,), code)
    if state.blind:
        return state, (*dropped, Drop(silo, code))
    return _then(state, dropped, _close_if_complete)


def _lost(state: JobState, event: SiloLost) -> Step:
    silo = event.silo
    if state.stage == "round":
        return _failed(state, SiloFailed(silo, state.round, "lost"))
    # The end of a job waits only for silos that accepted it.
    if silo not in state.admitted:
        return state, ()
    return _end_if_complete(state.failing((silo,), "lost"))


def _deadline(state: JobState, event: RoundDeadline) -> Step:
    return _when(event.stage == state.stage, state, _AT_DEADLINE[state.stage])


def _without_late(state: JobState) -> Step:
    # A sum has deadlines of its own (blind/secure_sum.py).
    if state.blind:
        return state, ()
    late = state.open
    return _then(state.failing(late, "deadline"), _dropped(state, late, "deadline"), _close)


# The sum of a blind round.


def _summed(state: JobState, event: Summed) -> Step:
    """The sum is open, maybe while the job was stopped: survivors had signed it before."""
    if not _gathers(state):
        return state, ()
    state = replace(state, given=dict.fromkeys(event.members, ""))
    return _when(state.stage == "round", state, _close)


def _gathers(state: JobState) -> bool:
    return state.blind and bool(state.cohort)


def _unsummed(state: JobState, event: SumFailed) -> Step:
    """An attempt ended without a sum, maybe while the job was stopped."""
    stale = event.attempt != state.attempt or bool(state.given)
    if stale or not _gathers(state):
        return state, ()
    state = replace(state, signed=state.signed.union(event.signed))
    # With one batch there is nothing to leave out.
    if event.spoiled and len(state.batches) > 1 and not event.final:
        return _spoiled(state, event)
    # A stopped job makes no attempt, but remembers which silos were lost.
    if state.stage == "round":
        return _again(state, event)
    return _without_lost(state), ()


def _again(state: JobState, event: SumFailed) -> Step:
    """The next attempt at the sum of an open round, while another one may succeed."""
    reported = LogEvent(
        "sum.failed", {"round": event.round, "attempt": event.attempt, "why": event.reason}
    )
    # An attempt that showed who is guilty is not counted: there are only so many silos.
    if state.guilty.keys() > state.excluded.keys() and not event.final:
        state = _without_lost(replace(state, excluded=state.guilty))
        return state, (reported, _gather(state))

    others = set(state.failed.values()).difference(FINAL)
    away = bool(others) and others <= set(AWAY)
    restarted = others == {RESTARTED}
    # Silos whose processes were restarted are back already: nobody is waited for.
    if not restarted:
        state = replace(state, fruitless=state.fruitless + 1)
    # What a silo refuses, it refuses again; who was away may be back.
    if not away:
        state = replace(state, refused=state.refused + 1)
    # Attempts are limited, so that one silo cannot block all others for ever.
    if event.final or _too_many(state):
        why = f"round {event.round}: {event.reason}"
        return _then(state, (reported,), partial(_fail, reason=why))
    state = _without_lost(state)
    return state, (reported, _gather(state, 0 if restarted else state.fruitless))


def _too_many(state: JobState) -> bool:
    """Whether the attempts at the sum of this round are used up."""
    # All attempts that are not fruitless count towards ``MOST_RESTARTED``.
    restarted = state.attempt + 1 - state.fruitless
    return (
        state.fruitless == MOST_ATTEMPTS
        or state.refused == MOST_REFUSED
        or restarted >= MOST_RESTARTED
    )


def _spoiled(state: JobState, event: SumFailed) -> Step:
    """The sum over these silos is none of values: make it again without the next of its batches."""
    number = {"round": event.round, "attempt": event.attempt}
    effects: list[Effect] = [LogEvent("sum.spoiled", {**number, "silos": event.spoiled})]
    suspects = set(event.spoiled)
    # Only a sum of a single batch shows which batch spoiled it.
    alone = next((batch for batch in _left(state) if set(batch) == suspects), ())
    # One of its own silos did it. A sound sum of another batch clears nobody: a liar may pause.
    if alone:
        state = replace(state, excluded={**state.excluded, **dict.fromkeys(alone, BATCH)})
        effects.append(LogEvent("batch.excluded", {"round": event.round, "silos": alone}))
    state = replace(
        state,
        attempt=state.attempt + 1,
        failed=state.exhausted,
        spoiled=(*state.spoiled, event.spoiled),
    )

    # Every batch was left out in vain, or too few are left.
    if len(_asked(state)) < state.fewest:
        silos = ", ".join(state.spoiled[0])
        why = (
            f"round {event.round}: {event.reason}; no batch of {silos} could be found without which"
            " there is a sum"
        )
        return _then(state, tuple(effects), partial(_fail, reason=why))
    if state.stage == "round":
        effects.append(_gather(state))
    return state, tuple(effects)


def _left_out(state: JobState) -> tuple[str, ...]:
    """The batch without which the next attempt is made since sums of this round were spoiled.

    Empty for none. Each round begins with another one, so that it is not always the same that pays.
    All that were in the first such sum, once each of its batches was left out in vain.
    """
    if not state.spoiled:
        return ()
    # After the first spoiled sum, each one was made without a different batch.
    first, turn = state.spoiled[0], len(state.spoiled) - 1
    batches = [batch for batch in _left(state) if set(batch) <= set(first)]
    if turn >= len(batches):
        return first
    return batches[(state.round + turn) % len(batches)]


def _left(state: JobState) -> Batches:
    """The batches that may be summed, without silos that are proven to have broken the rules."""
    return grouping.without(state.batches, state.proven, state.least)


def _without_lost(state: JobState) -> JobState:
    """The next attempt: without batches that lost a silo, or with all if too few are left."""
    # Lost silos add up over the attempts of a round, until too few batches would be left.
    lost = state.lost.union(state.failed)
    state = replace(state, attempt=state.attempt + 1, failed=state.exhausted, lost=lost)
    enough = len(_asked(state)) >= state.fewest
    return state if enough else replace(state, lost=frozenset())


def _asked(state: JobState) -> tuple[str, ...]:
    """Silos of the next attempt."""
    if not state.batches:
        return state.cohort
    out = state.proven.union(state.lost, _left_out(state))
    return _whole(state, without(state.cohort, out))


def _whole(state: JobState, silos: Sequence[str]) -> tuple[str, ...]:
    """The silos that may be in a sum, since their whole batches are among ``silos``."""
    return grouping.unbroken(state.batches, silos, state.proven, state.least)


def _gather(state: JobState, waited_for: int = 0) -> Gather:
    return Gather(state.round, _asked(state), state.attempt, waited_for)


# A round closes, and is folded.


def _close_if_complete(state: JobState) -> Step:
    return _when(state.complete, state, _close)


def _close(state: JobState) -> Step:
    # In job order, not by arrival, so that folding again gives the same bytes.
    members = state.members
    if len(members) < state.min_cohort:
        lost = ", ".join(f"{s}: {in_words(code)}" for s, code in state.failed.items())
        why = (
            f"round {state.round}: {len(members)} silos uploaded, min_cohort is {state.min_cohort}"
            f" ({lost})"
        )
        return _fail(state, why)
    return replace(state, stage="folding"), (Fold(state.round, members),)


def _folded(state: JobState, event: Folded) -> Step:
    members, after = state.members, event.round + 1
    closed = LogEvent("round.closed", {"round": event.round, "members": members})
    # Whoever may have signed a sum trains on from there: from the same state as before, two sums
    # would show the difference of two sets of silos (security rule 34).
    trained = state.signed.union(members, *state.spoiled)
    state = replace(state, counted={**state.counted, **dict.fromkeys(sorted(trained), after)})
    # The last round's results go down when silos finish the job.
    if after == state.rounds:
        return _then(replace(state, round=after), (closed,), _complete)
    # Uploads and failures of the closed round do not count in the next.
    state = replace(_emptied(state), round=after)
    return _then(state, (closed,), _stop if state.stopping else _open_round)


def _stop(state: JobState) -> Step:
    return _halted(replace(state, stopping=False, stage="drawing"))


def _unfolded(state: JobState, event: FoldFailed) -> Step:
    return _fail(state, event.reason)


def _damaged(state: JobState, event: Damaged) -> Step:
    """The round is open again for silos whose uploads the disk changed, once for each of them."""
    changed = set(event.silos)
    # A disk that fails twice would have the silo upload without end.
    if state.again.intersection(changed):
        why = f"{event.reason} a second time; have the job signed again under a new name"
        return _fail(state, why)
    if not state.given.keys() >= changed:
        return state, ()
    logged = LogEvent(
        "upload.damaged", {"round": event.round, "silos": event.silos, "why": event.reason}
    )
    # Undamaged uploads stay.
    given = {silo: state.given[silo] for silo in without(state.given, changed)}
    state = replace(state, stage="round", given=given, again=state.again.union(changed))
    if not state.stopping:
        return state, (logged, StartRoundTimer("round", event.round))
    # An operator stopped the job while it was folded: it stops in the round that is open again.
    halted, effects = _halted(replace(state, stopping=False))
    return halted, (logged, *effects)


# The end of the job.


def _complete(state: JobState) -> Step:
    return _finish(state, "completed", "")


def _fail(state: JobState, reason: str) -> Step:
    return _finish(state, "failed", reason)


def _finish(state: JobState, outcome: Literal["completed", "failed"], reason: str) -> Step:
    # Admitted silos learn of the end, and fetch the last results of a job that is completed.
    state = replace(_emptied(state), stage="finishing", outcome=outcome, reason=reason)
    logged = LogEvent("job.finishing", {"outcome": outcome, "reason": reason, "round": state.round})
    # No silo takes part, so none has to hear of the end first.
    if not state.admitted:
        return _then(state, (logged,), _end)
    return state, (logged, StartRoundTimer("finishing", state.round))


def _emptied(state: JobState) -> JobState:
    """Without what was of a round that is over."""
    state = replace(
        state, cohort=(), given={}, failed={}, excluded=state.guilty, lost=frozenset(), spoiled=()
    )
    return replace(state, attempt=0, fruitless=0, refused=0, again=frozenset(), signed=frozenset())


def _done(state: JobState, event: Done) -> Step:
    # Also after the end: a silo that confirms late gets no further task for it.
    if event.silo not in state.admitted:
        return state, ()
    return _end_if_complete(replace(state, done=state.done | {event.silo}))


def _end_if_complete(state: JobState) -> Step:
    # Lost silos do not delay the end; they hear of it when they come back.
    awaited = without(state.unconfirmed, state.failed)
    return _when(state.stage == "finishing" and not awaited, state, _end)


def _end(state: JobState) -> Step:
    logged = LogEvent("job.ended", {"outcome": state.outcome, "reason": state.reason})
    return replace(state, stage="ended"), (logged,)


def _when(holds: bool, state: JobState, follow: Follow) -> Step:
    return follow(state) if holds else (state, ())


def _then(state: JobState, effects: tuple[Effect, ...], follow: Follow) -> Step:
    state, more = follow(state)
    return state, (*effects, *more)


ANY: tuple[Stage, ...] = get_args(Stage)
RUNNING: tuple[Stage, ...] = ("admitting", "drawing", "round", "folding")
# An attempt ends by itself, whatever an operator does.
SUMMING: tuple[Stage, ...] = ("round", "stopped", "queued")
_AT_DEADLINE: Mapping[Stage, Follow] = {
    "admitting": _admit,
    "round": _without_late,
    "finishing": _end,
}
# Which events count in which stages, for the round that the job stands in; and what follows.
_STEPS: dict[type[Event], tuple[Sequence[Stage], Callable[[JobState, Any], Step]]] = {
    Began: (("queued",), _began),
    OperatorStopped: (("queued", *RUNNING), _stopped),
    Resumed: (("stopped", "folding"), _resumed),
    Broken: (("queued", "stopped", *RUNNING, "finishing"), _broken),
    Unkeyed: (("queued", "stopped", *RUNNING), _unkeyed),
    Withdrawn: (("queued", "stopped", "admitting"), _withdrawn),
    Greeted: (("queued", "stopped", *RUNNING), _greeted),
    Overtaken: (("admitting",), _overtaken),
    Answered: (RUNNING, _answered),
    Drawn: (("drawing",), _drawn),
    UploadStored: (("round",), _stored),
    SiloFailed: (ANY, _failed),
    SiloLost: (("round", "finishing"), _lost),
    RoundDeadline: (tuple(_AT_DEADLINE), _deadline),
    Summed: (SUMMING, _summed),
    SumFailed: (SUMMING, _unsummed),
    Folded: (("folding",), _folded),
    FoldFailed: (("folding",), _unfolded),
    Damaged: (("folding",), _damaged),
    Done: (("finishing", "ended"), _done),
}


def resumed(state: JobState) -> tuple[Effect, ...]:
    """Effects to run again for a state that was read from disk.

    A stage gets its whole time once more.

    None for a job that is queued, stopped or ended.
    """
    effect = _AGAIN.get(state.stage)
    return () if effect is None else (effect(state),)


_AGAIN: Mapping[Stage, Callable[[JobState], Effect]] = {
    "admitting": lambda state: StartRoundTimer("admitting", state.round),
    "drawing": lambda state: DrawCohort(state.round),
    "round": _await_uploads,
    "folding": lambda state: Fold(state.round, state.members),
    "finishing": lambda state: StartRoundTimer("finishing", state.round),
}
