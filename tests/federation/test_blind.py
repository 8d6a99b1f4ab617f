"""Blind rounds with real processes and real TLS: the sums that the coordinator opens are those of
the pure core.
"""

import json

import pytest

from staddle.algorithms.engines.simulation import simulate
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.sum import Quantised

SILOS = ("north", "east", "south", "west")
SECURITY = {"secure_aggregation": "required", "weight_most": 2000}
JOBS = (
    ("local", "cnn-digits", {}),
    ("fedavg", "cnn-digits", {}),
    ("fedper", "cnn-digits", {}),
    ("fedssa", "cnn-digits", {"t_stable": 3}),
    ("fedaims", "convnet-digits", {"sampling": "balanced"}),
    ("ppfl", "cnn-digits", {"models": 2}),
)


def blind(document, name, method="fedavg", **changes):
    changes = {"rounds": 3, "min_cohort": 3, "security": SECURITY, **changes}
    return document(name, SILOS, method, **changes)


def check_reports(running, job, expected):
    """Models and reports of all silos are those of the simulation."""
    running.check_models(job, expected)
    for silo in SILOS:
        report = json.loads((running.job_folder(job, silo) / "report.json").read_text())
        last = expected.history[silo][-1]
        assert report["final"]["correct_trained"] == last.correct_trained


def check_ledger(running, silo, rounds):
    """All that left as tensors is masked, and each round was summed over all silos."""
    intents = running.records(silo, "egress.intent")
    assert {record["form"] for record in intents} == {"masked"}
    assert all(record["secagg"]["members"] == sorted(SILOS) for record in intents)
    assert [each["tensors"] for each in running.records(silo, "egress.digest")] == [[]] * rounds
    survivors = [record["survivors"] for record in running.records(silo, "secagg.sum")]
    assert survivors == [sorted(SILOS)] * rounds


def check_withheld(running, job, silo, train, _):
    """The silo's own log says once in a counted job, and never in another, what it withholds."""
    told = [event for event in running.events(silo, "job.withheld") if event["job"] == job.name]
    assert len(told) == job.counted
    for each in told:
        assert each["fewest_holders"] == job.fewest_holders
        assert set(each["classes_withheld"]) <= set(train.y.tolist())


@pytest.mark.timeout(300)
def test_blind_jobs_give_the_sums_of_the_quantised_simulation(start, document):
    running = start(*SILOS)
    for method, model, options in JOBS:
        running.job(blind(document, f"blind-{method}", method, model=model, options=options))
    running.start_coordinator()
    running.start_silos()
    running.completed()
    running.stop()
    shards = running.shards(SILOS)
    for job in running.jobs:
        expected = simulate(job, shards, exchanges=Quantised(JobPlan(job).bounds))
        check_reports(running, job, expected)
        for silo in SILOS:
            check_withheld(running, job, silo, *shards[silo])
    running.check_ledgers()
    for silo in SILOS:
        check_ledger(running, silo, sum(job.length for job in running.jobs))
