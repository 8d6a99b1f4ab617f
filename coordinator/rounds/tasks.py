"""Tasks of silos, and silos that a stage waits for: functions of a job's state alone.

A task that was lost on the way is simply sent again.
"""

from dataclasses import dataclass
from typing import TypeAlias

from .machine import JobState
from .selection import without


@dataclass(frozen=True)
class OfferTask:
    """Decide on the job.

    The signed job goes with it, so the silo can check all of it.
    """


@dataclass(frozen=True)
class RoundTask:
    """Take part in a round, from the state after the last round that counted.

    ``counted`` is one more than the last round to which the silo contributed. The silo holds it
    against its own state: a state older than that was put back from a copy.
    """

    round: int
    cohort: tuple[str, ...]
    counted: int


@dataclass(frozen=True)
class FinishTask:
    """Fetch the last results and confirm.

    ``round`` is the job's length where it completed, else the round in which it failed.
    """

    round: int
    completed: bool
    counted: int


SiloTask: TypeAlias = OfferTask | RoundTask | FinishTask


def task_for(state: JobState, silo: str) -> SiloTask | None:
    """The present task of this silo; None where it has none in this job.

    The same for the same state, however often it is asked. A silo has at most one task per job.
    """
    counted = state.counted.get(silo, 0)
    if state.may_answer(silo):
        return OfferTask()
    if state.stage == "round" and silo in state.open:
        return RoundTask(state.round, state.cohort, counted)
    if state.stage in ("finishing", "ended") and silo in state.unconfirmed:
        return FinishTask(state.round, state.outcome == "completed", counted)
    return None


def concerned(before: JobState, after: JobState) -> tuple[str, ...]:
    """Silos that another task waits for than before; in a blind job all of them.

    They are woken once a state is stored; all others keep waiting.
    """
    # While the stage stays, tasks are only done: silos answer, upload, fail or confirm.
    if _moved(before) == _moved(after):
        return ()
    # Messages of its sum are no part of the state, so whoever waits looks again.
    if after.blind:
        return after.silos
    tasks = {silo: task_for(after, silo) for silo in after.silos}
    return tuple(
        silo for silo, task in tasks.items() if task is not None and task != task_for(before, silo)
    )


def _moved(state: JobState) -> tuple[str, int, int, str]:
    return state.stage, state.round, state.attempt, state.outcome


def awaited(state: JobState) -> tuple[str, ...]:
    """Silos without which the stage does not end before its deadline.

    Silos that are silent for too long are dropped from these alone.
    """
    if state.stage == "round":
        return state.open
    # A silo that failed is not waited for a second time.
    if state.stage == "finishing":
        return without(state.unconfirmed, state.failed)
    return ()
