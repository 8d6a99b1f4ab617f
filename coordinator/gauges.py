"""What the coordinator's metrics show as it is now."""

import shutil
from collections import Counter
from collections.abc import Iterator
from typing import get_args

from ..metrics import Gauge
from ..security.identity.keys import Role
from .daemon import Daemon
from .rounds.events import Stage
from .rpc.limits import Limits


def gauges(daemon: Daemon, limits: Limits) -> Iterator[Gauge]:
    """Read from another thread than the daemon's: copies first."""
    states = [run.state for run in list(daemon.runs)]
    stages = Counter(state.stage for state in states)
    yield Gauge("jobs", "Jobs by stage.", ("stage",), {(stage,): stages[stage] for stage in get_args(Stage)})
    rounds = {(state.job,): state.round for state in states if state.stage not in ("queued", "ended")}
    yield Gauge("job_round", "The open round of a job that runs, counted from 0.", ("job",), rounds)
    silos = [entry.id for entry in daemon.roster.entries if entry.role is Role.SILO]
    calls = list(limits.running.items())
    near = daemon.connected() | {silo for (silo, _), _ in calls}  # a poll may wait longer than six beats
    yield Gauge("silo_connected", "Heard of within six beats.", ("silo",), {(silo,): silo in near for silo in silos})
    running: Counter[str] = Counter()
    for (_, rpc), count in calls:
        running[rpc.rpartition("/")[2]] += count
    yield Gauge("open_calls", "Calls that run.", ("method",), {(rpc,): count for rpc, count in running.items()})
    free = shutil.disk_usage(daemon.config.directory).free
    yield Gauge("disk_free_bytes", "Free bytes where the state lies.", (), {(): free})
