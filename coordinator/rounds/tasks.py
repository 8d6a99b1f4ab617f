"""Tasks of silos, and silos that a stage waits for: functions of a job's state alone.

A task that was lost on the way is simply sent again.
"""

from dataclasses import dataclass
from typing import TypeAlias

from ...security.identity.selection import without
from .machine import JobState


@dataclass(frozen=True)
class OfferTask:
    """Decide on the job.

    The signed job goes with it.
    """


@dataclass(frozen=True)
class RoundTask:
    """Take part in a round, from the state after the last round that counted.

    ``counted`` is one more than the last round of the silo that counted. The silo compares it with
    its own state, and so detects an old copy.
    """

    round: int
    cohort: tuple[str, ...]
    counted: int


@dataclass(frozen=True)
class FinishTask:
    """Fetch the last results and confirm.

    ``round`` is the job's length if it completed, else the round in which it failed; ``reason``
    says then why, as operators read it.
    """

    round: int
    completed: bool
    counted: int
    reason: str = ""


SiloTask: TypeAlias = OfferTask | RoundTask | FinishTask


def task_for(state: JobState, silo: str) -> SiloTask | None:
    """The present task of this silo; None where it has none in this job.

    It follows from the state, so asking again gives the same task.
    """
    counted = state.counted.get(silo, 0)
    if state.may_answer(silo):
        return OfferTask()
    if state.stage == "round" and silo in state.open:
        return RoundTask(state.round, state.cohort, counted)
    if state.stage in ("finishing", "ended") and silo in state.unconfirmed:
        return FinishTask(state.round, state.outcome == "completed", counted, state.reason)
    return None


def stop_for(state: JobState, silo: str) -> str:
    """Why a job stands still in which this silo takes part; empty for one that does not."""
    concerns = state.stage == "stopped" and silo in state.admitted
    return state.reason if concerns else ""


def concerned(before: JobState, after: JobState) -> tuple[str, ...]:
    """Silos that another task waits for than before; in a blind job all of them.

    The daemon wakes them once the new state is stored.
    """
    # While the stage stays, tasks are only done: silos answer, upload, fail or confirm. Only who
    # declined may be offered the job again.
    if _moved(before) == _moved(after):
        return ()
    # Messages of its sum are no part of the state, so whoever waits looks again.
    if after.blind:
        return after.silos
    tasks = {silo: task_for(after, silo) for silo in after.silos}
    return tuple(
        silo for silo, task in tasks.items() if task is not None and task != task_for(before, silo)
    )


def _moved(state: JobState) -> tuple[str, int, int, str, frozenset[str]]:
    return state.stage, state.round, state.attempt, state.outcome, state.asked


def awaited(state: JobState) -> tuple[str, ...]:
    """Silos without which the stage does not end before its deadline.

    Only these are dropped when they are silent for too long.
    """
    if state.stage == "round":
        return state.open
    # Lost silos are awaited no longer.
    if state.stage == "finishing":
        return without(state.unconfirmed, state.failed)
    return ()
