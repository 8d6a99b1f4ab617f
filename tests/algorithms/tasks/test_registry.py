"""Tasks of the table and of installed packages, in a job and its document."""

import sys

import pytest
import torch
from support.other_tasks import document, shards
from support.refusals import refused

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.engine import Records
from staddle.algorithms.engines.simulation import Simulation, simulate
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.job.evaluated import evaluated, evaluation_of, form_of
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.record_checks import check_records
from staddle.algorithms.training.silo_round import local_round
from staddle.errors import LocalError
from staddle.files import packages
from staddle.files.documents import canonical_json, parse_json
from staddle.simulator.run.history import of_round

QUANTILE = {"kind": "quantile", "range": [0.0, 40.0], "unit": "days", "level": 0.8}


def make(**fields):
    return Job.from_file(JobFile.model_validate(document("regression", **fields)), "test")


def read(document, allowed=()):
    wire = parse_json(canonical_json(document), "wire")
    return Job.from_document(wire, "wire", allowed)


def test_a_job_that_names_no_task_classifies():
    whole = document("regression", model={"name": "mlp", "input": [1, 1, 6], "classes": 2})
    for key in ("task", "metrics"):
        del whole[key]
    job = Job.from_file(JobFile.model_validate(whole), "test")
    assert job.document()["task"] == {
        "kind": "classification",
        "loss": "cross-entropy",
        "gamma": None,
        "label_smoothing": "0.0",
        "class_weights": None,
    }
    assert read(job.document()) == job


@pytest.mark.parametrize("kind", ["regression", "multilabel", "survival"])
def test_documents_are_read_back_without_a_look_at_what_is_installed(kind, monkeypatch):
    """That look takes as long as all the rest."""
    job = Job.from_file(JobFile.model_validate(document(kind)), "test")
    monkeypatch.setattr(packages, "entry_points", None)
    assert read(job.document()) == job
    known = evaluated(evaluation_of(job.document()))
    assert known.counting == job.counting
    monkeypatch.undo()
    other = {**job.document(), "task": {**job.document()["task"], "kind": "regresion"}}
    with refused("no such kind|runs code of|unknown task"):
        read(other)


def test_another_loss_is_another_digest():
    task = {"kind": "regression", "range": [0.0, 40.0], "unit": "days"}
    one, other = make(task=task).document(), make(task={**task, "loss": "mae"}).document()
    assert one["method_digest"] != other["method_digest"]


def test_a_task_of_a_package_is_in_the_document_with_its_digest(monkeypatch):
    job = make(task=QUANTILE)
    found = job.document()
    (package,) = found["packages"]
    assert (package["name"], package["version"]) == ("other-tasks", "0.1")
    assert read(found, ["other-tasks"]) == job
    monkeypatch.delitem(sys.modules, "other_tasks", raising=False)
    with refused("runs code of the installed package other-tasks, which may not run here"):
        read(found)
    # Readers of sums do not import it; whoever runs a simulation does.
    assert evaluated(evaluation_of(found)) is None
    assert "other_tasks" not in sys.modules
    assert form_of(found).key == "mae"


def test_a_task_of_a_package_learns_counts_and_runs_in_both_engines():
    job, data = make(task=QUANTILE, rounds=8), shards("regression")
    found = simulate(job, data)
    covered = [own[-1].delivered.said()["coverage"] for own in found.history.values()]
    assert 0.55 < sum(covered) / 4 < 1
    median = simulate(make(rounds=8), data)
    assert found.metrics[-1]["covered.trained"] > 0
    assert "covered.trained" not in median.metrics[-1]
    stacked = Simulation(job, Stacked(job, {s: Records(*sides) for s, sides in data.items()}))
    first = stacked.step().metrics
    assert first.keys() == found.metrics[0].keys()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("number", "is no subclass of Task; correct the entry point"),
        ("gone", "cannot be imported: module .other_tasks. has no attribute"),
        ("regresion", "did you mean 'regression'"),
        (3, "no such kind"),
    ],
)
def test_what_is_no_task_is_told(kind, why):
    with pytest.raises(ValueError, match=why):
        JobFile.model_validate(document("regression", task={**QUANTILE, "kind": kind}))


def test_names_of_the_table_are_taken():
    job = make()
    assert type(job.task).__module__ == "staddle.algorithms.tasks.regression"
    assert job.packages == ()


def test_labels_are_checked_whatever_a_package_says():
    model = {"name": "mlp", "input": [1, 1, 6], "classes": 2}
    job = make(task={"kind": "careless"}, model=model, metrics={})
    x = torch.zeros(3, 1, 1, 6)
    check_records(job, Dataset(x, torch.tensor([0, 1, 1])), "here")
    for label in (-1, 2):
        with refused(f"here: label {label} in 1 of 3 records"):
            check_records(job, Dataset(x, torch.tensor([0, 1, label])), "here")


def test_code_of_a_package_that_fails_is_an_error_of_its_own():
    failing = {"kind": "failing", "range": [0.0, 1.0]}
    with pytest.raises(LocalError, match="task 'failing' fails: nothing to count; correct it"):
        JobFile.model_validate(document("regression", task={**failing, "where": "counting"}))
    job = make(task={**failing, "where": "records"})
    with refused("task 'failing' fails: 'y'; correct it, or choose another"):
        check_records(job, shards("regression")["a"][0], "here")


def test_a_private_job_keeps_a_packages_sums_at_home():
    privacy = {"epsilon": 1, "delta": 1e-5, "sample_rate": 0.5}
    make(task=QUANTILE, privacy=privacy)
    with pytest.raises(ValueError, match="metrics_sigma with the task 'quantile' of an installed"):
        make(task=QUANTILE, privacy={**privacy, "metrics_sigma": 1.0})


def test_a_score_that_is_no_number_is_not_kept():
    job = make(task={"kind": "failing", "range": [0.0, 40.0], "where": ""}, rounds=1)
    reports = {silo: own[0] for silo, own in simulate(job, shards("regression")).history.items()}
    with refused("selected/before after round 1: silo 'a' has a score that is NaN"):
        of_round(1, reports)


def test_a_scripts_loss_trains_a_model(make_job, make_shards):
    ends = []
    for task in ({"kind": "classification", "label_smoothing": 0.1}, {"kind": "scripted"}):
        job = make_job("fedavg", task=task)
        train, test = make_shards(job)["a"]
        state = initial_state(job.method(), "a")
        outcome = local_round(job.method(), job, state, 0, {}, train, test, "a")
        ends.append(outcome.state.parts["classifier"]["weight"])
    # The same loss as Staddle's own, but for the order of its operations.
    assert torch.allclose(*ends, atol=1e-5)
    assert not torch.equal(ends[0], torch.zeros_like(ends[0]))
