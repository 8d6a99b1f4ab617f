"""The jobs in a coordinator's folder, read next to a running coordinator or without one."""

from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..algorithms.job.evaluated import evaluated
from ..algorithms.tasks.counting import ScoreForm
from ..errors import LocalError
from ..files.documents import Disk, disk
from ..security.identity.selection import among, without
from ..security.log.lock import held
from . import live_status
from .config import CoordinatorConfig
from .live_status import LiveStatus
from .rounds.machine import JobState
from .storage.database import Database, relayed
from .storage.replay_log import Spooled, loaded
from .storage.store import read_counts


@dataclass(frozen=True)
class LastRound:
    """The last round of a job that was folded; ``round`` counts from 0."""

    round: int
    members: tuple[str, ...]
    metrics: dict[str, Any]  # sums over the members: numbers, and nested lists of them
    noisy: bool = False  # the job is private
    measures: dict[str, Any] = field(default_factory=dict)  # by model, what the sums say
    score: ScoreForm | None = None  # None for the task of an installed package


@dataclass(frozen=True)
class CoordinatorJobStatus:
    """One job; silos by what the stage waits for: answers, contributions or confirmations."""

    job: str
    stage: str
    closed: int  # rounds that were folded; the number of the open one
    rounds: int
    outcome: str
    reason: str
    cohort: tuple[str, ...]
    uploaded: tuple[str, ...]
    missing: tuple[str, ...]
    dropped: dict[str, str]  # silo → code
    last: LastRound | None
    attempt: int | None = None  # at the sum of a blind round, from 0
    relayed: tuple[str, ...] = ()  # parts that it passes on and cannot open
    blind: bool = False  # each round is one secure sum


@dataclass(frozen=True)
class CoordinatorStatus:
    """The folder, whether a coordinator runs there, its disk and its jobs.

    Jobs are read in one transaction; a running coordinator may have moved on since. ``live`` is
    empty where none runs.
    """

    directory: Path
    running: bool
    disk: Disk
    jobs: tuple[CoordinatorJobStatus, ...]
    live: LiveStatus = field(default_factory=LiveStatus)


def read(config: CoordinatorConfig) -> CoordinatorStatus:
    """Read the folder; LocalError where there is none yet.

    A running coordinator is not disturbed.
    """
    path = config.directory / "coordinator.sqlite"
    if not path.is_file():
        raise LocalError(
            f"{path}: no such file; the coordinator makes it when it is run for the first time"
        )
    with closing(Database(path, read_only=True)) as database:
        # States only: a method's tensors may be large, and are not needed.
        folder = config.directory / "jobs"
        jobs = tuple(_job(state, database, folder / state.job) for state in database.states())
    running = held(config.directory)
    # What a killed process left is old.
    live = live_status.read(config.directory) if running else LiveStatus()
    return CoordinatorStatus(config.directory, running, disk(config.directory), jobs, live)


def _last(database: Database, job: str, folder: Path) -> LastRound | None:
    rounds = database.rounds(job)
    if not rounds:
        return None
    number, members, metrics = rounds[-1][0], rounds[-1][1], dict[str, Any](rounds[-1][2])
    # One damaged file does not hide the other jobs.
    with suppress(LocalError):
        for name, table in read_counts(folder, number).items():
            metrics[name] = table.tolist()
    evaluation = database.evaluation(job)
    found, noisy = LastRound(number, tuple(members), metrics), evaluation["noised"]
    known = None
    # A job of another release has its sums alone.
    with suppress(LocalError):
        known = evaluated(evaluation)
    if known is None:
        return replace(found, noisy=noisy)
    counting = known.counting
    return replace(found, noisy=noisy, measures=counting.of_sums(metrics), score=counting.score)


def _job(state: JobState, database: Database, folder: Path) -> CoordinatorJobStatus:
    uploaded, missing, dropped = _who(state, database)
    last = _last(database, state.job, folder)
    return CoordinatorJobStatus(
        job=state.job,
        stage=state.stage,
        closed=last.round + 1 if last else 0,
        rounds=state.rounds,
        outcome=state.outcome,
        reason=state.reason,
        cohort=state.cohort,
        uploaded=uploaded,
        missing=missing,
        dropped=dropped,
        last=last,
        attempt=state.attempt if state.blind and state.stage == "round" else None,
        relayed=relayed(database.files(state.job)),
        blind=state.blind,
    )


def _who(
    state: JobState, database: Database
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
    """Who did what the stage waits for, who has yet to, who does not and with which code."""
    match state.stage:
        case "admitting":
            missing = state.unanswered
            refused = without(state.answers, {*state.admitted, *missing})
            return state.admitted, missing, {silo: state.answers[silo] for silo in refused}
        case "finishing" | "ended":
            # A lost silo may have come back and confirmed.
            lost = without(state.failed, state.done)
            confirmed = among(state.admitted, state.done)
            missing = without(state.unconfirmed, lost)
            return confirmed, missing, {silo: state.failed[silo] for silo in lost}
        case _:
            # Masked words count only with their sum: the state does not have them yet.
            given = {*state.given, *_masked(state, database)}
            dropped = {**state.excluded, **state.failed}
            return among(state.cohort, given), without(state.open, given), dropped


def _masked(state: JobState, database: Database) -> set[str]:
    """Silos whose masked words have arrived, in the active attempt at a blind round's sum."""
    rows = database.secure_rows(state.job, state.round) if state.blind else ()
    spooled = [row for row in rows if (row.kind, row.attempt) == ("spooled", state.attempt)]
    return {entry.silo for entry in map(loaded, spooled) if isinstance(entry, Spooled)}
