"""Blind rounds of some silos, over whole batches: real processes, private weights, one of them
killed.
"""

import pytest

from staddle.algorithms.engines.simulation import simulate
from staddle.security.blind.plan import simulated

SILOS = tuple(f"silo-{number}" for number in range(9))
SECURITY = {"secure_aggregation": "required", "weight_most": 2000, "colluders": 0}
ROUNDS = 4


@pytest.fixture
def world(start, document):
    """Nine silos in three batches, two of which are in a round; the coordinator is there."""

    def begin(**security):
        running = start(*SILOS)
        security = {**SECURITY, **security}
        changes = {
            "rounds": ROUNDS,
            "min_cohort": 3,
            "participation": 0.67,
            "security": security,
            "seed": 5,
        }
        running.job(document("some", SILOS, "fedavg", **changes))
        coordinator = running.start_coordinator()
        for silo in SILOS:
            running.write_silo(silo)
        return running, coordinator, running.jobs[0]

    return begin


@pytest.mark.timeout(300)
def test_rounds_over_batches_give_what_the_simulation_gives(world):
    running, coordinator, job = world()
    for silo in SILOS:
        running.start_silo(silo)
    assert coordinator.wait_for("job.ended", 200)["outcome"] == "completed"
    running.stop()
    running.check_models(job, simulate(job, running.shards(), exchanges=simulated(job)))
    running.check_ledgers()


@pytest.mark.timeout(300)
def test_rounds_go_on_without_the_batch_of_a_silo_that_was_killed(world):
    running, coordinator, job = world(tags=False)  # whose key would take another word of it
    running.start_silo(SILOS[0])
    coordinator.wait_for("job.accepted", 60)
    running.daemons[SILOS[0]].kill()
    for silo in SILOS[1:]:
        running.start_silo(silo)
    members = [coordinator.wait_for("round.closed", 120)["members"] for _ in range(ROUNDS)]
    ended = coordinator.wait_for("job.ended", 120)
    assert ended["outcome"] == "completed", ended
    drawn = [
        [batch for batch in job.batches if set(batch) <= set(job.cohort(number))]
        for number in range(ROUNDS)
    ]
    (broken,) = [batch for batch in job.batches if SILOS[0] in batch]
    assert all(len(batches) == 2 for batches in drawn)
    assert any(broken in batches for batches in drawn)
    assert [set(each) for each in members] == [
        {silo for batch in batches if batch != broken for silo in batch} for batches in drawn
    ]
