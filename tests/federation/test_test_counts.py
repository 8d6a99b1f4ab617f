"""Tables of test counts in a blind job: real processes, real TLS, and sums that say what all of a
round's test records say.
"""

import json

import pytest
from federation.keyed import TIMING

from staddle.algorithms.engines.simulation import simulate
from staddle.coordinator.storage.results import read
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.sum import Quantised

SILOS = ("north", "east", "south", "west")
METRICS = [
    {"name": "MulticlassCohenKappa"},
    {"name": "MulticlassAUROC", "options": {"thresholds": 10}, "title": "curve"},
]
PRIVATE = {"epsilon": 50.0, "delta": 1e-5, "sample_rate": 0.5, "sigma": "1.2"}
SECURITY = {"secure_aggregation": "required", "weight_most": 2000, "tags": False}


@pytest.mark.timeout(120)
def test_blind_sums_of_tables_are_those_of_a_simulation(start, document):
    running = start(*SILOS)
    tables = {"confusion": True, "score_bins": 8}
    fields = {"rounds": 2, "min_cohort": 3, "security": SECURITY, "metrics": tables}
    job = running.job(document("blind", SILOS, "fedavg", **fields))
    running.start_coordinator(**TIMING)
    running.start_silos()
    running.completed()
    running.stop()

    exchanges = Quantised(JobPlan(job).bounds)
    expected = simulate(job, running.shards(SILOS), exchanges=exchanges)
    running.check_models(job, expected)
    kept = read(running.kept, "blind").rounds
    for closed, metrics in zip(kept, expected.metrics, strict=True):
        assert closed["metrics"] == {name: value.tolist() for name, value in metrics.items()}
        assert "auroc.trained" in closed["measures"]
    for silo in SILOS:
        left = running.records(silo, "egress.intent")
        parts = {tensor["part"] for intent in left for tensor in intent["tensors"]}
        assert {"confusion", "scores", "metrics"} <= parts
        report = json.loads((running.job_folder(job, silo) / "report.json").read_text())
        assert report["final"]["trained"]["confusion"] == (
            expected.history[silo][-1].trained.confusion.tolist()
        )


@pytest.mark.timeout(180)
def test_metrics_of_torchmetrics_are_those_of_all_silos_records(start, document):
    """Plain, blind and private; the coordinator and the silos say what the states are worth."""
    running = start(*SILOS)
    own = {"rounds": 2, "min_cohort": 3, "metrics": {"torchmetrics": METRICS}}
    noise = {**PRIVATE, "histogram_sigma": 1.0, "metrics_sigma": 1.0}
    jobs = [
        running.job(document(name, SILOS, "fedavg", **own, **more))
        for name, more in (
            ("plain", {}),
            ("blind", {"security": SECURITY}),
            ("private", {"privacy": noise}),
        )
    ]
    running.start_coordinator(**TIMING)
    running.start_silos()
    running.completed()
    running.stop()

    for job in jobs[:2]:
        exchanges = Quantised(JobPlan(job).bounds) if job.name == "blind" else None
        expected = simulate(job, running.shards(SILOS), exchanges=exchanges)
        kept = read(running.kept, job.name).rounds
        for closed, metrics in zip(kept, expected.metrics, strict=True):
            assert closed["metrics"] == {name: value.tolist() for name, value in metrics.items()}
        last = [expected.history[silo][-2].trained for silo in SILOS]
        said = job.counting.pooled(last).said()
        for name in ("MulticlassCohenKappa", "curve"):
            key = f"torchmetrics.{name}"
            assert kept[-1]["measures"][f"{key}.trained"] == said[key]
        report = json.loads((running.job_folder(job, "north") / "report.json").read_text())
        end = expected.history["north"][-1].trained
        assert report["final"]["trained"]["measures"] == end.said()
    for closed in read(running.kept, "private").rounds:
        assert closed["noisy"]
        assert isinstance(closed["measures"]["torchmetrics.MulticlassCohenKappa.trained"], float)
    running.check_ledgers()
