"""Records of several inputs: real processes, real TLS; plain, blind with adapters, private."""

import pytest
from federation.keyed import TIMING
from support.wards import INPUTS, WARD, wards

from staddle.algorithms.engines.simulation import simulate
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.sum import Quantised

SILOS = ("north", "east", "south", "west")
BLIND = {"secure_aggregation": "required", "weight_most": 2000, "tags": False}
ADAPTED = {**WARD, "lora": {"rank": 2, "targets": ["mix"]}}
PRIVATE = {
    "epsilon": 50.0,
    "delta": 1e-5,
    "sample_rate": 0.5,
    "sigma": "1.2",
    "histogram_sigma": 1.0,
}


@pytest.mark.timeout(240)
def test_a_federation_is_its_simulation(start, document):
    running = start(*SILOS)
    running.data = {silo: wards(160 + 7 * i, i) for i, silo in enumerate(SILOS)}
    own = {"rounds": 2, "min_cohort": 3}
    jobs = [
        running.job({**document(name, SILOS, **own), "model": WARD, **table})
        for name, table in (
            ("plain", {}),
            ("blind", {"security": BLIND, "model": ADAPTED}),
            ("private", {"privacy": PRIVATE}),
        )
    ]
    running.start_coordinator(**TIMING)
    running.start_silos()
    running.completed()
    running.stop()

    for job in jobs[:2]:
        exchanges = Quantised(JobPlan(job).bounds) if job.name == "blind" else None
        running.check_models(job, simulate(job, running.shards(SILOS), exchanges=exchanges))
    running.check_ledgers()


def test_a_silo_without_one_of_them_declines(start, document):
    running = start(*SILOS[:2])
    running.data = {silo: wards(60, i) for i, silo in enumerate(SILOS[:2])}
    model = {**WARD, "inputs": {**INPUTS, "labs": {"shape": [4]}}}
    job = running.job({**document("other", SILOS[:2], min_cohort=2), "model": model})
    running.start_coordinator()
    running.start_silos()
    running.withdrawn(job, *SILOS[:2])
    running.stop()
    (told,) = running.events(SILOS[0], "job.declined")
    assert told["code"] == "DATA"
    assert "a record here has image [1, 8, 8], labs [3], note [5], and the" in told["why"]
