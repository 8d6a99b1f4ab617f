"""What the coordinator's metrics show as it is now.

Prometheus asks from a thread of its own, while the daemon changes its lists: each is copied once.
"""

import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from ..algorithms.tasks.counting import flattened
from ..metrics.exporter import Gauge
from ..security.identity.certificate import end_timestamp
from ..security.identity.keys import Role
from .daemon import Daemon
from .jobs.job_run import JobRun
from .rounds.events import Stage
from .rounds.machine import JobState
from .rounds.tasks import awaited
from .rpc.limits import CallLimits

IDLE = ("queued", "stopped", "ended")  # stages in which nobody is awaited


def gauges(daemon: Daemon, limits: CallLimits) -> Iterator[Gauge]:
    """What the metrics show now."""
    runs = list(daemon.runs)
    states = [run.state for run in runs]
    stages = Counter(state.stage for state in states)
    yield Gauge(
        "jobs", "Jobs by stage.", ("stage",), {(stage,): stages[stage] for stage in get_args(Stage)}
    )
    rounds = {
        (state.job,): state.round for state in states if state.stage not in ("queued", "ended")
    }
    yield Gauge("job_round", "The open round of a job that runs, counted from 0.", ("job",), rounds)
    # Series of jobs that do not run would only grow old.
    yield from _stages(daemon, [run for run in runs if run.state.stage not in IDLE])
    yield from _silos(daemon, limits)
    yield Gauge(
        "job_measure",
        "What the sums of a job's last closed round say: accuracy, loss and the like, by model.",
        ("job", "measure", "model"),
        dict(_measures(runs)),
    )
    free = shutil.disk_usage(daemon.config.directory).free
    yield Gauge("disk_free_bytes", "Free bytes where the state lies.", (), {(): free})
    entries = daemon.roster.entries
    yield Gauge(
        "certificate_end_timestamp_seconds",
        "When a member's certificate ends.",
        ("member",),
        {(entry.id,): end_timestamp(entry.certificate) for entry in entries},
    )


def _silos(daemon: Daemon, limits: CallLimits) -> Iterator[Gauge]:
    """Who is there, and what calls run."""
    silos = [entry.id for entry in daemon.roster.having(Role.SILO)]
    calls = list(limits.running.items())
    # A poll may wait longer than six beats, and its silo is there all the time.
    calling = {silo for (silo, _), _ in calls}
    near = daemon.connected() | calling
    connected = {(silo,): silo in near for silo in silos}
    yield Gauge("silo_connected", "Heard of within six beats.", ("silo",), connected)
    yield Gauge(
        "silo_silent_seconds",
        "Time since a silo was heard of, or since the coordinator began; 0 while it calls.",
        ("silo",),
        {(silo,): daemon.silent_seconds(silo) * (silo not in calling) for silo in silos},
    )
    running: Counter[str] = Counter()
    for (_, rpc), count in calls:
        running[rpc.rpartition("/")[2]] += count
    counts = {(rpc,): count for rpc, count in running.items()}
    yield Gauge("open_calls", "Calls that run.", ("method",), counts)


def _stages(daemon: Daemon, runs: Iterable[JobRun]) -> Iterator[Gauge]:
    """How long jobs have been in their stages, and for whom they wait."""
    passed: dict[tuple[str], float] = {}
    limits: dict[tuple[str], float] = {}
    behind: dict[tuple[str, str], float] = {}
    waited: dict[tuple[str, str], float] = {}
    for run in runs:
        state = run.state
        passed[state.job,] = time.monotonic() - run.since
        limits[state.job,] = daemon.stage_limit(run, state.stage)
        missing = _missing(state)
        # Silos that are not awaited have a 0, so that an alarm ends.
        for silo in state.silos:
            behind[state.job, silo] = max(0, state.round - state.counted.get(silo, 0))
            waited[state.job, silo] = passed[state.job,] * (silo in missing)
    yield Gauge(
        "job_stage_seconds",
        "Time that a running job has spent in its stage: admission, one round, its end.",
        ("job",),
        passed,
    )
    yield Gauge("job_stage_limit_seconds", "When that stage is closed.", ("job",), limits)
    yield Gauge(
        "silo_rounds_behind",
        "Rounds that closed since the last one to which the silo contributed.",
        ("job", "silo"),
        behind,
    )
    yield Gauge(
        "silo_awaited_seconds",
        "Time that the present stage has waited for the silo; 0 where it does not.",
        ("job", "silo"),
        waited,
    )


def _missing(state: JobState) -> tuple[str, ...]:
    """Silos for which the stage waits; in an admission those that have not answered."""
    return state.unanswered if state.stage == "admitting" else awaited(state)


def _measures(runs: Iterable[JobRun]) -> Iterator[tuple[tuple[str, str, str], float]]:
    """What sums of last rounds say; nothing of jobs whose silos keep their counts."""
    for run in runs:
        said: Mapping[str, float] = flattened(run.job.counting.of_sums(run.last_sums))
        for name, value in said.items():
            measure, _, model = name.partition(".")
            yield (run.job.name, measure, model), value
