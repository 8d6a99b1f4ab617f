"""A job at the coordinator as a pure state machine: ``advance(state, event) -> (state, effects)``.

Names and digests only: no tensor, no clock, no file. Time is an event (Deadline). Replaying the
events gives the state.

::

    stage      leaves when                                          goes to
    queued     its turn has come (Began)                            admitting, or where it was
               stopped: drawing, round
    admitting  every silo answered, or the deadline                 drawing (≥ min_cohort accepted;
               of a keyed job
                                                                    all of them), else finishing
    drawing    the cohort is drawn                                  round, or finishing (failed) if
               it is too small
    round      every member of the cohort gave, failed or was lost, folding (≥ min_cohort gave),
               else finishing
               or a quorum gave, or the deadline
    round      of a blind job: its sum is open                      folding;  finishing after too
               many attempts
    folding    the fold is done                                     drawing, or finishing after the
               last one
    folding    the fold failed                                      finishing
    folding    the disk changed what silos gave (Damaged)           round: these give again, once;
               else finishing
    finishing  every admitted silo confirmed or was lost, or the    ended
               deadline; who comes back later is still told
    stopped    an operator resumes it (Resumed)                     queued
    any        what it needs is damaged (Broken)                    finishing (failed), also from
               there
    any        of a keyed job: its key fits no more (Unkeyed)       finishing (failed), unless it is
               there already

An operator's Stopped leads to stopped from queued, admitting, drawing and round, from folding when
the fold is done; what was given in the open round stays given. A silo that did not answer in time
may still do so: it is drawn from then on. A silo that is known to be lost when a round opens is not
awaited in it (``Drawn``). In a blind job (``blind``) a round is one secure sum, which
coordinator/blind/secure_sum.py makes: nobody gives alone; a silo that fails drops out of an attempt
at it, and may take part in the next, unless its privacy budget is spent. Who is shown to have
broken the rules (codes.GUILTY) is ``excluded`` from all attempts and rounds that follow. Silos of
one batch are asked together (``batches``): the next attempt is made without the batch of a silo
that was lost, while enough others are left, and else with all of the cohort again. A silo that is
``proven`` to have broken the rules leaves its batch alone, while ``least`` of it are left; the
others are shown the evidence (security/secagg/evidence.py). A sum that is none of values
(``spoiled``: a silo gave what nobody may) is made again without each batch in turn. A batch whose
own sum is spoiled is ``excluded`` as a whole, since nobody can tell which of its silos it was. All
silos of a keyed job (``keyed``) have given to its key when they accepted, so without one of them it
does not begin.

Events that come too late (an upload for a closed round) change nothing. What the silos should do
meanwhile follows from the state: tasks.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Literal, TypeAlias

from ...algorithms.job.batches import Batches, unbroken, without
from .events import (
    BATCH,
    BUDGET,
    GUILTY,
    PROVEN,
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
    Halt,
    LogEvent,
    OperatorStopped,
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
    in_words,
)

# Attempts at the sum of a blind round; those that an operator stopped do not count.
# a host may be away for twenty minutes (secure_sum_runner.py pauses), a process die in a loop
MOST_ATTEMPTS = 30
# of them, that failed for more than silos which were away: what a silo refuses, it refuses again
MOST_REFUSED = 3
MOST_RESTARTED = 100  # other attempts: nearly all failed since silos began anew alone
RESTARTED = "STOPPED"  # why a silo drops out whose process began anew
AWAY = ("lost", "deadline", RESTARTED)  # why a silo drops out that may well take part in the next


@dataclass(frozen=True)
class JobState:
    """All that decides what happens next in a job."""

    job: str
    silos: tuple[str, ...]  # job order
    rounds: int
    min_cohort: int
    quorum: float = 1.0  # share of a cohort whose contributions close a round
    stage: Stage = "queued"
    round: int = 0
    # silo → "accepted", or the code of its refusal
    answers: Mapping[str, str] = field(default_factory=dict)
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
    lost: frozenset[str] = frozenset()  # silos without which the next attempt is made
    # silos of the sums of this round that are none of values, in turn
    spoiled: tuple[tuple[str, ...], ...] = ()
    # silos of this round's sums that some may have signed, and are not open
    signed: frozenset[str] = frozenset()
    attempt: int = 0  # at the sum of this round: the one that goes on, or the next
    fruitless: int = 0  # attempts at it that ended without a sum
    refused: int = 0  # those of them that will hardly end otherwise

    @cached_property
    def admitted(self) -> tuple[str, ...]:
        """Silos that accepted, in job order."""
        return tuple(s for s in self.silos if self.answers.get(s) == "accepted")

    @cached_property
    def open(self) -> tuple[str, ...]:
        """Members of the cohort that have neither given nor failed."""
        return tuple(s for s in self.cohort if s not in self.given and s not in self.failed)

    @property
    def complete(self) -> bool:
        """Whether the open round has all the contributions that it waits for."""
        enough = max(self.min_cohort, ceil(self.quorum * len(self.cohort)))
        return not self.open or len(self.given) >= enough

    @property
    def proven(self) -> frozenset[str]:
        """Silos that evidence shows to have broken the rules: their batches may be summed without
        them.
        """
        return frozenset(silo for silo, code in _guilty(self).items() if code == PROVEN)

    @property
    def expired(self) -> bool:
        """Whether no row goes down any more: the job has ended, or failed.

        Who comes late gets what was summed.
        """
        return self.stage == "ended" or (self.stage == "finishing" and self.outcome == "failed")

    def may_answer(self, silo: str) -> bool:
        """Whether this silo may still answer the offer."""
        waiting = self.stage in ("admitting", "drawing", "round", "folding")
        return waiting and silo in self.silos and silo not in self.answers


Step: TypeAlias = tuple[JobState, tuple[Effect, ...]]
Follow: TypeAlias = Callable[[JobState], Step]


def advance(state: JobState, event: Event) -> Step:
    """The next state and what has to be done; events that do not fit the state change nothing."""
    match event:
        case Began() if state.stage == "queued":
            return _begin(state)
        case Answered(silo, code) if state.may_answer(silo):
            state = replace(state, answers={**state.answers, silo: code or "accepted"})
            told = (
                LogEvent("job.accepted", {"silo": silo}) if code is None else _declined(silo, code)
            )
            return _then(state, (told,), _admit_if_complete)
        case OperatorStopped() | Resumed() | Unkeyed() | Broken():
            return _operated(state, event)
        case Drawn(round_, cohort, lost) if state.stage == "drawing" and round_ == state.round:
            return _start_round(state, cohort, lost)
        case UploadStored() | SiloFailed() if _expected(state, event):
            return _heard(state, event)
        case Summed(round_) | SumFailed(round_) if (
            state.blind and round_ == state.round and state.cohort
        ):
            return _gathered(state, event)
        case SiloLost(silo) if state.stage == "round":
            return advance(state, SiloFailed(silo, state.round, "lost"))
        case SiloLost(silo) if state.stage == "finishing" and silo in state.admitted:
            return _then(
                replace(state, failed={**state.failed, silo: "lost"}), (), _end_if_complete
            )
        case Folded(round_) if state.stage == "folding" and round_ == state.round:
            members = tuple(s for s in state.cohort if s in state.given)
            told = LogEvent("round.closed", {"round": round_, "members": members})
            # whoever may have signed a sum goes on from there
            trained = state.signed.union(members, *state.spoiled)
            state = replace(
                state, counted={**state.counted, **dict.fromkeys(sorted(trained), round_ + 1)}
            )
            if round_ + 1 == state.rounds:
                return _then(replace(state, round=state.rounds), (told,), _complete)
            state = replace(_emptied(state), round=round_ + 1)
            return _then(state, (told,), _stop if state.stopping else _open_round)
        case FoldFailed(round_) | Damaged(round_) if (
            state.stage == "folding" and round_ == state.round
        ):
            return _unfolded(state, event)
        case Done(silo) if state.stage in ("finishing", "ended") and silo in state.admitted:
            return _then(replace(state, done=state.done | {silo}), (), _end_if_complete)
        case RoundDeadline(stage, round_) if stage == state.stage and round_ == state.round:
            return _deadline(state)
        case _:
            return state, ()


def _operated(state: JobState, event: OperatorStopped | Resumed | Unkeyed | Broken) -> Step:
    """What operators ask, what follows from their bringing another roster, and what their
    disk did.
    """
    match event:
        case OperatorStopped() if state.stage in ("queued", "admitting", "drawing", "round"):
            halted: tuple[Effect, ...] = (
                (Halt(state.round),) if state.blind and state.stage == "round" else ()
            )
            return replace(state, stage="stopped"), (
                LogEvent("job.stopped", {"round": state.round}),
                *halted,
            )
        case OperatorStopped() if state.stage == "folding":
            return replace(state, stopping=True), ()
        case Resumed() if state.stage == "stopped":
            state = replace(state, stage="queued", failed=_guilty(state), lost=frozenset())
            return state, (LogEvent("job.resumed", {"round": state.round}),)
        case Resumed():
            return replace(state, stopping=False), ()
        case Broken(reason) if state.stage != "ended" and state.outcome != "failed":
            return _finish(state, "failed", reason)
        case Unkeyed(reason) if state.keyed and state.stage not in ("finishing", "ended"):
            return _finish(state, "failed", reason)
        case _:
            return state, ()


def _heard(state: JobState, event: UploadStored | SiloFailed) -> Step:
    """A member of the cohort gave, or cannot give."""
    match event:
        case UploadStored() if state.blind:
            return state, ()
        case UploadStored(silo, round_, digest):
            state = replace(state, given={**state.given, silo: digest})
            return _then(
                state,
                (LogEvent("upload.accepted", {"silo": silo, "round": round_}),),
                _close_if_complete,
            )
        # it had dropped out before
        case SiloFailed(silo, _, code) if state.stage != "round" or silo in state.failed:
            return replace(state, failed={**state.failed, silo: code}), ()
        case SiloFailed(silo, round_, code):
            state = replace(state, failed={**state.failed, silo: code})
            told = LogEvent("silo.dropped", {"silo": silo, "round": round_, "code": code})
            return (
                (state, (told, Drop(silo, code)))
                if state.blind
                else _then(state, (told,), _close_if_complete)
            )


def _gathered(state: JobState, event: Summed | SumFailed) -> Step:
    """What came of an attempt; one that was stopped meanwhile may have come to its end."""
    if isinstance(event, SumFailed) and event.attempt == state.attempt and not state.given:
        state = replace(state, signed=state.signed.union(event.signed))
    match event:
        case Summed(_, members) if state.stage in ("round", "stopped", "queued"):
            state = replace(state, given=dict.fromkeys(members, ""))
            return _then(state, (), _close if state.stage == "round" else None)
        case SumFailed(_, attempt) if attempt != state.attempt or state.given:
            return state, ()
        case SumFailed() if event.spoiled and len(state.batches) > 1 and not event.final:
            return _spoiled(state, event)
        case SumFailed(round_, attempt, reason, final) if state.stage == "round":
            told = LogEvent("sum.failed", {"round": round_, "attempt": attempt, "why": reason})
            guilty, exhausted = _guilty(state), _exhausted(state)
            # not counted: there are only so many silos
            if guilty.keys() > state.excluded.keys() and not final:
                state = _without_lost(replace(state, excluded=guilty))
                return state, (told, _gather(state))
            others = [code for silo, code in state.failed.items() if silo not in exhausted]
            away = bool(others) and all(code in AWAY for code in others)
            # nobody is waited for
            back = bool(others) and all(code == RESTARTED for code in others)
            state = replace(
                state, fruitless=state.fruitless + (not back), refused=state.refused + (not away)
            )
            restarted = state.attempt + 1 - state.fruitless
            many = (
                state.fruitless == MOST_ATTEMPTS
                or state.refused == MOST_REFUSED
                or restarted >= MOST_RESTARTED
            )
            if final or many:
                return _then(
                    state,
                    (told,),
                    lambda state: _finish(state, "failed", f"round {round_}: {reason}"),
                )
            state = _without_lost(state)
            return state, (told, _gather(state, 0 if back else state.fruitless))
        case SumFailed() if state.stage in ("stopped", "queued"):
            return _without_lost(state), ()
        case _:
            return state, ()


def _spoiled(state: JobState, event: SumFailed) -> Step:
    """The sum over these silos is none of values: make it again without the next of its batches."""
    told = [
        LogEvent(
            "sum.spoiled", {"round": event.round, "attempt": event.attempt, "silos": event.spoiled}
        )
    ]
    alone = next((batch for batch in _left(state) if set(batch) == set(event.spoiled)), ())
    # one of its own silos did it; that another sum is sound says nothing, since a liar may stop to
    # lie
    if alone:
        state = replace(state, excluded={**state.excluded, **dict.fromkeys(alone, BATCH)})
        told.append(LogEvent("batch.excluded", {"round": event.round, "silos": alone}))
    state = replace(
        state,
        attempt=state.attempt + 1,
        failed=_exhausted(state),
        spoiled=(*state.spoiled, event.spoiled),
    )
    if len(_asked(state)) < state.fewest:
        silos = ", ".join(state.spoiled[0])
        why = (
            f"round {event.round}: {event.reason}; no batch of {silos} could be found without which"
            " there is a sum"
        )
        return _then(state, tuple(told), lambda state: _finish(state, "failed", why))
    return state, (*told, _gather(state)) if state.stage == "round" else tuple(told)


def _left_out(state: JobState) -> tuple[str, ...]:
    """The batch without which the next attempt is made since sums of this round were spoiled.

    Empty for none.

    Each round begins with another one, so that it is not always the same that pays. All that were
    in the first such sum, once each of its batches was left out in vain.
    """
    if not state.spoiled:
        return ()
    first, turn = state.spoiled[0], len(state.spoiled) - 1
    batches = [batch for batch in _left(state) if set(batch) <= set(first)]
    return batches[(state.round + turn) % len(batches)] if turn < len(batches) else first


def _left(state: JobState) -> Batches:
    """The batches that may be summed, without silos that are proven to have broken the rules."""
    return without(state.batches, state.proven, state.least)


def _exhausted(state: JobState) -> dict[str, str]:
    """Silos that are out of every attempt at this round."""
    return {silo: code for silo, code in state.failed.items() if code == BUDGET or code in GUILTY}


def _guilty(state: JobState) -> dict[str, str]:
    """Silos that are out of the job."""
    return {
        **state.excluded,
        **{silo: code for silo, code in state.failed.items() if code in GUILTY},
    }


def _without_lost(state: JobState) -> JobState:
    """The next attempt: without the batches of silos that were lost in one, or with all again if
    too few are left.
    """
    lost = state.lost.union(state.failed)
    state = replace(state, attempt=state.attempt + 1, failed=_exhausted(state), lost=lost)
    return state if len(_asked(state)) >= state.fewest else replace(state, lost=frozenset())


def _asked(state: JobState) -> tuple[str, ...]:
    """Silos of the next attempt."""
    if not state.batches:
        return state.cohort
    out = state.proven.union(state.lost, _left_out(state))
    return _whole(state, [silo for silo in state.cohort if silo not in out])


def _whole(state: JobState, silos: Sequence[str]) -> tuple[str, ...]:
    """Those of them who may be in a sum, their batches being among them."""
    return unbroken(state.batches, silos, state.proven, state.least)


def _gather(state: JobState, waited_for: int = 0) -> Gather:
    return Gather(state.round, _asked(state), state.attempt, waited_for)


def _begin(state: JobState) -> Step:
    """Offer the job, or go on where it was stopped."""
    if state.cohort:
        state = replace(state, stage="round")
        told = LogEvent("round.opened", {"round": state.round, "cohort": state.cohort})
        if state.blind:
            return _then(state, (told,), _close) if state.given else (state, (told, _gather(state)))
        return _then(state, (told, StartRoundTimer("round", state.round)), _close_if_complete)
    if state.opened:
        return _open_round(state)
    told = LogEvent("job.offered", {"silos": state.silos, "rounds": state.rounds})
    return _then(
        replace(state, stage="admitting"),
        (told, StartRoundTimer("admitting", 0)),
        _admit_if_complete,
    )


def _stop(state: JobState) -> Step:
    return advance(replace(state, stopping=False, stage="drawing"), OperatorStopped())


def _start_round(state: JobState, cohort: tuple[str, ...], lost: tuple[str, ...]) -> Step:
    out = {silo: code for silo, code in state.excluded.items() if silo in cohort}
    left = [silo for silo in cohort if silo not in out]
    whole, least = _whole(state, left), state.fewest if state.batches else state.min_cohort
    if len(whole) < least:
        of = (
            f"{len(whole)} of them in whole batches, and it takes"
            if state.batches
            else "min_cohort is"
        )
        why = f"round {state.round}: only {len(left)} of the drawn silos are admitted, {of} {least}"
        why += "".join(f"; {silo}: {in_words(code)}" for silo, code in out.items())
        return _finish(state, "failed", why)
    if state.batches:
        cohort, out = whole, {}
    state = replace(state, stage="round", cohort=cohort, given={}, failed=out)
    told = LogEvent("round.opened", {"round": state.round, "cohort": cohort})
    state, dropped = _without_away(state, [silo for silo in state.open if silo in lost])
    return state, (
        told,
        *dropped,
        _gather(state) if state.blind else StartRoundTimer("round", state.round),
    )


def _without_away(state: JobState, away: Sequence[str]) -> tuple[JobState, tuple[LogEvent, ...]]:
    """A round that opens does not wait for silos that are known to be away, unless too few are left
    without them.

    Then they are asked like all others: some may be back before the next beat, and else they are
    lost as they are in any round.
    """
    without = replace(state, failed={**state.failed, **dict.fromkeys(away, "lost")})
    if state.batches:
        without = replace(without, lost=frozenset(away))
    left, least = (
        (_asked(without), state.fewest) if state.batches else (without.open, state.min_cohort)
    )
    if len(left) < least:
        return state, ()
    return without, tuple(
        LogEvent("silo.dropped", {"silo": s, "round": state.round, "code": "lost"}) for s in away
    )


def _declined(silo: str, code: str) -> LogEvent:
    return LogEvent("job.declined", {"silo": silo, "code": code})


def _expected(state: JobState, event: UploadStored | SiloFailed) -> bool:
    """Whether it is of an open member of the cohort.

    That one broke the rules is heard at any time.
    """
    if isinstance(event, SiloFailed) and event.code in GUILTY and event.silo in state.cohort:
        return event.round == state.round
    return state.stage == "round" and event.round == state.round and event.silo in state.open


def _then(state: JobState, effects: tuple[Effect, ...], follow: Follow | None) -> Step:
    if follow is None:
        return state, effects
    state, more = follow(state)
    return state, (*effects, *more)


def _admit_if_complete(state: JobState) -> Step:
    answered = state.stage == "admitting" and len(state.answers) == len(state.silos)
    return _admit(state) if answered else (state, ())


def _admit(state: JobState) -> Step:
    refused = ", ".join(
        f"{s}: {state.answers.get(s, 'no answer')}" for s in state.silos if s not in state.admitted
    )
    if len(state.admitted) < state.min_cohort:
        why = f"{len(state.admitted)} silos accepted, min_cohort is {state.min_cohort} ({refused})"
        return _finish(state, "failed", why)
    if state.keyed and refused:
        why = (
            f"{len(state.admitted)} of {len(state.silos)} silos accepted, and the key that its"
            f" silos share takes all of them ({refused})"
        )
        return _finish(state, "failed", why)
    return _open_round(state)


def _open_round(state: JobState) -> Step:
    return replace(state, stage="drawing", opened=True), (DrawCohort(state.round),)


def _close_if_complete(state: JobState) -> Step:
    return _close(state) if state.complete else (state, ())


def _close(state: JobState) -> Step:
    members = tuple(s for s in state.cohort if s in state.given)
    if len(members) < state.min_cohort:
        lost = ", ".join(f"{s}: {in_words(code)}" for s, code in state.failed.items())
        why = (
            f"round {state.round}: {len(members)} silos gave, min_cohort is {state.min_cohort}"
            f" ({lost})"
        )
        return _finish(state, "failed", why)
    return replace(state, stage="folding"), (Fold(state.round, members),)


def _unfolded(state: JobState, event: FoldFailed | Damaged) -> Step:
    """The round is open again for silos whose uploads the disk changed.

    Not for one whose second is changed, too.
    """
    if isinstance(event, FoldFailed):
        return _finish(state, "failed", event.reason)
    if state.again.intersection(event.silos):
        return _finish(
            state,
            "failed",
            f"{event.reason} a second time; have the job signed again under a new name",
        )
    if not state.given.keys() >= set(event.silos):
        return state, ()
    told = LogEvent(
        "upload.damaged", {"round": event.round, "silos": event.silos, "why": event.reason}
    )
    given = {silo: digest for silo, digest in state.given.items() if silo not in event.silos}
    state = replace(state, stage="round", given=given, again=state.again.union(event.silos))
    if state.stopping:
        return _then(
            replace(state, stopping=False), (told,), lambda state: advance(state, OperatorStopped())
        )
    return state, (told, StartRoundTimer("round", event.round))


def _complete(state: JobState) -> Step:
    return _finish(state, "completed", "")


def _finish(state: JobState, outcome: Literal["completed", "failed"], reason: str) -> Step:
    state = replace(_emptied(state), stage="finishing", outcome=outcome, reason=reason)
    told = LogEvent("job.finishing", {"outcome": outcome, "reason": reason, "round": state.round})
    if not state.admitted:
        return _then(state, (told,), _end)
    return state, (told, StartRoundTimer("finishing", state.round))


def _emptied(state: JobState) -> JobState:
    """Without what was of a round that is over."""
    state = replace(
        state, cohort=(), given={}, failed={}, excluded=_guilty(state), lost=frozenset(), spoiled=()
    )
    return replace(state, attempt=0, fruitless=0, refused=0, again=frozenset(), signed=frozenset())


def _end_if_complete(state: JobState) -> Step:
    complete = (
        state.stage == "finishing" and set(state.admitted) <= state.done | state.failed.keys()
    )
    return _end(state) if complete else (state, ())


def _end(state: JobState) -> Step:
    told = LogEvent("job.ended", {"outcome": state.outcome, "reason": state.reason})
    return replace(state, stage="ended"), (told,)


def _deadline(state: JobState) -> Step:
    if state.stage == "admitting":
        return _admit(state)
    if state.stage == "round" and not state.blind:
        late = state.open
        state = replace(state, failed={**state.failed, **dict.fromkeys(late, "deadline")})
        told = tuple(
            LogEvent("silo.dropped", {"silo": s, "round": state.round, "code": "deadline"})
            for s in late
        )
        return _then(state, told, _close)
    if state.stage == "finishing":
        return _end(state)
    return state, ()


def resumed(state: JobState) -> tuple[Effect, ...]:
    """What has to be done again for a state that was read from disk.

    A stage gets its whole time once more.
    """
    match state.stage:
        case "drawing":
            return (DrawCohort(state.round),)
        case "folding":
            return (Fold(state.round, tuple(s for s in state.cohort if s in state.given)),)
        case "round" if state.blind:
            return (_gather(state),)
        case "admitting" | "round" | "finishing":
            return (StartRoundTimer(state.stage, state.round),)
        case _:
            return ()
