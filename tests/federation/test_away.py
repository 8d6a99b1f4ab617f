"""A silo dies once its masked words may have left, and stays away while that round and a later one
close without it.
"""

import pytest
from federation.conftest import shards
from federation.keyed import TIMING

SILOS = tuple(f"silo-{number}" for number in range(8))
DEAD, ROUNDS, AWAY = SILOS[0], 60, 2


@pytest.mark.timeout(240)
def test_it_and_its_batch_are_summed_again(start, document):
    """Before: ABANDON in every later round, with the coordinator blamed, and its batch in no sum
    any more.
    """
    running = start(*SILOS)
    # else a step looks like a trap's to some
    running.data = shards(SILOS, 10.0, 100)
    security = {"secure_aggregation": "required", "weight_most": 2000}
    changes = {"rounds": ROUNDS, "min_cohort": 3, "round_timeout": 120, "security": security}
    job = running.job(document("job", SILOS, "fedavg", **changes))
    (batch,) = (batch for batch in job.batches if DEAD in batch)
    assert len(job.batches) == 2
    running.configure({**TIMING, "beat_seconds": 1})
    coordinator = running.start_daemon("coordinator")
    for silo in SILOS:
        running.start_daemon(silo, "once:egress.intent job 0 masked" if silo == DEAD else "never")
    for number in range(AWAY):
        closed = coordinator.wait_for("round.closed", 120)
        assert (closed["round"], set(closed["members"])) == (number, set(SILOS) - set(batch))
    running.start_silo(DEAD)
    while set(closed["members"]) != set(SILOS):
        closed = coordinator.wait_for("round.closed", 120)
    running.stop()
    assert {each["blame"] for each in running.records(DEAD, "secagg.end")} <= {""}
