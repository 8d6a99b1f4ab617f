"""Rounds that did not count: the federation goes on as if the silo had been away.

Real silo processes.
"""

import asyncio
import re
from collections.abc import Mapping

import pytest

from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.job.job import Job
from staddle.commands.federation import local_federation
from staddle.coordinator import config as configs
from staddle.coordinator import daemon as daemons
from staddle.coordinator import server
from staddle.errors import RefusedError

SILOS = ("north", "east", "south", "west", "middle")
# round, silo
LOST = {
    (1, "north"),
    (2, "north"),
    (2, "east"),
    (3, "south"),
    (5, "east"),
    (5, "south"),
    (6, "south"),
}
METHODS: Mapping[str, Mapping[str, object]] = {
    "fedper": {},
    "pfedsim": {"rho": 0.4},
    "fedsimsup": {"tau_theta": 1, "supervisor": "cnn"},
    "fedssa": {"t_stable": 3, "stale_inclusive": True},
    "ppfl": {"models": 2, "lam": 0.0},
    "scaffold": {},  # whose silos keep what they compute with their contributions
}


@pytest.mark.timeout(300)
async def test_lost_uploads_leave_no_trace(start, document, monkeypatch):
    """The coordinator turns some uploads away at their end.

    The models are those of a simulation without them.
    """
    running = start(*SILOS)
    for method, options in METHODS.items():
        fields = {"rounds": 6, "participation": 0.8, "min_cohort": 2, "options": dict(options)}
        running.job(document(f"lost-{method}", SILOS, method, **fields))
    timing = {"admission_seconds": 60, "beat_seconds": 1, "hold_seconds": 5}
    local_federation.write_coordinator(
        running.federation, [job.name for job in running.jobs], timing
    )
    real_accept, real_cohort, turned_away = daemons.JobRun.accept, Job.cohort, set()

    async def accept(run, silo, round_, *rest):
        if (round_, silo) in LOST:
            turned_away.add((run.job.name, round_, silo))
            raise RefusedError(silo, "NOT_FINITE", "the test loses this one")
        return await real_accept(run, silo, round_, *rest)

    monkeypatch.setattr(daemons.JobRun, "accept", accept)
    # Whether a silo takes a delivery far from its last model for one that may be made to leak
    # depends on who is drawn, and so on every key of a job's document.
    real_text = local_federation.policy_text
    unchecked = lambda jobs: re.sub("(?m)^max_step = .*$", "", real_text(jobs))
    monkeypatch.setattr(local_federation, "policy_text", unchecked)
    config = configs.load(running.federation.coordinator_config)
    async with server.running(config) as address:
        running.address = address
        running.start_silos()
        for job in running.jobs:
            for silo in SILOS:
                ended = await asyncio.to_thread(running.daemons[silo].wait_for, "job.finished", 120)
                assert (ended["job"], ended["completed"]) == (job.name, True)
    running.stop()
    drawn = {
        (job.name, r, s) for job in running.jobs for r in range(job.length) for s in job.cohort(r)
    }
    assert turned_away == {(job, r, s) for job, r, s in drawn if (r, s) in LOST}
    assert len(turned_away) > len(METHODS)
    monkeypatch.setattr(
        Job, "cohort", lambda job, r: tuple(s for s in real_cohort(job, r) if (r, s) not in LOST)
    )
    shards = running.shards(SILOS)
    for job in running.jobs:
        running.check_models(job, simulate(job, shards))
