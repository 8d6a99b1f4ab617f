"""Jobs of other tasks than classification: real processes, real TLS; plain, blind and private.

Models and sums are those of a simulation, and the coordinator and the silos say what they mean.
"""

import json

import pytest
from federation.keyed import TIMING
from support.other_tasks import document, records
from support.refusals import refused
from typer.testing import CliRunner

from staddle.algorithms.engines.simulation import simulate
from staddle.commands.main import app
from staddle.coordinator.storage.results import read
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.sum import Quantised

SILOS = ("north", "east", "south", "west")
BLIND = {"secure_aggregation": "required", "weight_most": 2000, "tags": False}
PRIVATE = {
    "epsilon": 50.0,
    "delta": 1e-5,
    "sample_rate": 0.5,
    "sigma": "1.2",
    "histogram_sigma": 1.0,
    "metrics_sigma": 1.0,
}
WORDS = {
    "regression": "MAE",
    "multilabel": "label accuracy",
    "survival": "C-index",
    "segmentation": "Dice score",
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", WORDS)
def test_a_federation_is_its_simulation(start, kind):
    running = start(*SILOS)
    running.data = {silo: records(kind, 80 + 7 * i, 20 + i) for i, silo in enumerate(SILOS)}
    own = {"rounds": 2, "silos": list(SILOS), "min_cohort": 3}
    plain = running.job(document(kind, **own, name="plain"))
    blind = running.job(document(kind, **own, name="blind", security=BLIND))
    own |= {"name": "private", "privacy": PRIVATE, "metrics": {}}
    private = running.job(document(kind, **own, training={"epochs": 2, "lr": 0.1}))
    running.start_coordinator(**TIMING)
    running.start_silos()
    running.completed()
    running.stop()

    shards = running.shards(SILOS)
    for job in (plain, blind):
        exchanges = Quantised(JobPlan(job).bounds) if job is blind else None
        expected = simulate(job, shards, exchanges=exchanges)
        running.check_models(job, expected)
        running.check_reports(job, expected)
        kept = read(running.kept, job.name).rounds
        for closed, metrics in zip(kept, expected.metrics, strict=True):
            assert closed["metrics"] == {name: value.tolist() for name, value in metrics.items()}
            assert f"{job.counting.score.key}.trained" in closed["measures"]
    check_said(running, kind)
    check_noise(running, private, read(running.kept, "private").rounds)
    running.check_ledgers()


def check_said(running, kind):
    """Both kinds of ``staddle status``."""
    files = running.federation
    told = {}
    for config in (files.coordinator_config, files.silo_config("north")):
        result = CliRunner().invoke(app, ["status", "--config", str(config)])
        assert result.exit_code == 0, result.output
        told[config.name] = " ".join(result.output.split())
    for text in told.values():
        assert WORDS[kind] in text
    report = json.loads((running.job_folder(running.jobs[0], "north") / "report.json").read_text())
    assert report["final"]["trained"]["measures"]
    assert "classes" not in report


def check_noise(running, job, kept):
    """Sums that are said to be noisy, by the coordinator and in each silo's ledger."""
    assert len(kept) == job.rounds
    for closed in kept:
        assert closed["noisy"]
        assert closed["metrics"].keys() == {spec.name for spec in job.counting.parts()[-1].tensors}
    for silo in SILOS:
        intents = [
            each for each in running.records(silo, "egress.intent") if each["job"] == job.name
        ]
        taints = [
            tensor["taint"]
            for intent in intents
            for tensor in intent["tensors"]
            if tensor["part"] == "metrics"
        ]
        assert len(taints) == job.rounds * len(job.counting.parts()[-1].tensors)
        assert set(taints) == {"noised"}


def test_records_of_another_task_are_refused(start, document):
    """A silo whose file has classes, and a job that learns a number."""
    running = start("north", "east")
    job = document("other", ("north", "east"))
    job["model"] = {"name": "mlp", "input": [1, 8, 8]}
    job["task"] = {"kind": "regression", "range": [0.0, 9.0]}
    signed = running.job(job)
    running.start_coordinator()
    running.start_silos()
    running.withdrawn(signed, "north", "east")
    running.stop()
    told = running.events("north", "job.declined")
    assert told[0]["code"] == "DATA"
    assert "y is int64 [N], the job's task takes float32 [N]" in told[0]["why"]


def test_a_method_that_needs_classes_is_refused_where_it_is_signed(start):
    running = start("north", "east")
    with refused("method 'fedproto' averages features class by class, and the task is regression"):
        running.job(
            document(
                "regression", silos=["north", "east"], min_cohort=2, method={"name": "fedproto"}
            )
        )
