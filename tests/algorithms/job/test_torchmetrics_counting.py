"""Metrics of torchmetrics: states cross, and their sums say what all records together do."""

import inspect
import json
import sys
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.counted import tallied
from support.jobs import make_data
from support.other_tasks import document, shards
from support.refusals import refused

from staddle.algorithms.engines.engine import Records
from staddle.algorithms.engines.simulation import Simulation, simulate
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.job import torchmetrics_counting
from staddle.algorithms.job.evaluated import evaluated, evaluation_of
from staddle.algorithms.job.foreign_code import unlisted
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.job.torchmetrics_counting import counted
from staddle.algorithms.tasks.classification import Classification
from staddle.algorithms.tasks.counting import MODELS, flattened
from staddle.algorithms.tasks.metrics_table import MetricsTable
from staddle.algorithms.tasks.multilabel import Multilabel
from staddle.files import packages
from staddle.files.documents import canonical_json, parse_json
from staddle.security.blind.plan import simulated
from staddle.simulator.run.export import measures
from staddle.simulator.run.history import Seen

KAPPA = {"name": "MulticlassCohenKappa", "options": {"weights": "quadratic"}}
HALF = {"name": "MulticlassFBetaScore", "options": {"beta": 0.5}, "title": "half"}
CURVE = {"name": "MulticlassAUROC", "options": {"thresholds": 20}}
THREE = [KAPPA, HALF, CURVE]
TASKS = {
    "classes": (Classification(), 3, "num_classes"),
    "two": (Classification(), 2, "num_classes"),
    "labels": (Multilabel(), 3, "num_labels"),
}
# Arguments that some classes need.
NEEDED = {
    "beta": 0.5,
    "thresholds": 7,
    "min_precision": 0.5,
    "min_recall": 0.5,
    "min_sensitivity": 0.5,
    "min_specificity": 0.5,
}
REFUSED = ("CalibrationError", "HingeLoss", "CoverageError", "RankingAveragePrecision")
REFUSED = (*REFUSED, "RankingLoss", "Fairness", "GroupStatRates")
PRIVATE = {"epsilon": 50.0, "delta": 1e-5, "sample_rate": 0.5, "sigma": "1.2"}


def make(make_job, *metrics, **fields):
    return make_job("fedavg", metrics={"torchmetrics": list(metrics)}, **fields)


def classes():
    return torchmetrics_counting._classes()


def own_options(name):
    takes = inspect.signature(getattr(classes(), name).__init__).parameters
    return {key: value for key, value in NEEDED.items() if key in takes}


def drawn(task, outputs, records, seed):
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(records, outputs, generator=rng)
    shape = (records,) if task.has_classes else (records, outputs)
    return logits, torch.randint(outputs if task.has_classes else 2, shape, generator=rng)


def by_library(task, name, options, known, logits, y):
    """What torchmetrics itself says of all records."""
    metric = getattr(classes(), name)(**options, **known)
    scores = task.probabilities(logits)
    metric.update(scores[:, 1] if name.startswith("Binary") else scores, y)
    return metric.compute()


@pytest.mark.parametrize("kind", TASKS)
def test_sums_of_the_silos_states_are_the_metric_of_all_records(kind):
    """Every class of torchmetrics that goes with a task, but those that are refused."""
    task, outputs, argument = TASKS[kind]
    names = [name for name in vars(classes()) if name.startswith(task.families(outputs))]
    names = [name for name in names if not name.endswith(REFUSED)]
    assert len(names) > 20
    silos = [drawn(task, outputs, records, records) for records in (31, 5, 12)]
    whole = [torch.cat(side) for side in zip(*silos, strict=True)]
    for name in names:
        options = own_options(name)
        table = MetricsTable(torchmetrics=[{"name": name, "options": options}])
        counting = counted(task, outputs, table, noised=False)
        tallies = [tallied(counting, *silo, pieces=2) for silo in silos]
        given = [counting.contributions(tally, tally) for tally in tallies]
        sums = {"tested": 48}
        for model in MODELS:
            values = [each["torchmetrics"].tensors[model] for each in given]
            sums[f"torchmetrics.{model}"] = torch.stack(values).sum(0).tolist()
        known = {} if name.startswith("Binary") else {argument: outputs}
        expected = by_library(task, name, options, known, *whole)
        found = counting.of_sums(sums)["trained"][f"torchmetrics.{name}"]
        assert found == torchmetrics_counting._plain(expected), name
        pooled = counting.pooled(tallies)
        assert pooled == tallied(counting, *whole)
        assert pooled.said()[f"torchmetrics.{name}"] == found
        # Counted record by record, with the bound that noise takes: none is left out.
        bounded = counted(task, outputs, table, noised=True)
        assert bounded.bounded, name
        assert tallied(bounded, *whole) == pooled
        values = {
            (part, tensor): value
            for part, own in counting.contributions(pooled, pooled).items()
            for tensor, value in own.tensors.items()
        }
        assert counting.fault(values, 48) == ""


@pytest.mark.parametrize("kind", TASKS)
def test_one_record_changes_no_more_than_the_sensitivity(kind):
    task, outputs, _ = TASKS[kind]
    family = task.families(outputs)[-1]
    for name in ("CohenKappa", "ConfusionMatrix", "F1Score", "AUROC", "ExactMatch"):
        if not hasattr(classes(), f"{family}{name}"):
            continue
        metric = {"name": f"{family}{name}", "options": own_options(f"{family}{name}")}
        counting = counted(task, outputs, MetricsTable(torchmetrics=[metric]), noised=True)
        logits, y = drawn(task, outputs, 9, 4)
        logits[:3] = torch.tensor([float("nan"), float("inf"), 1e38])[:, None]
        # A record of which all is right.
        y[-1] = logits[-1].argmax() if task.has_classes else (logits[-1] > 0).long()
        whole, largest = tallied(counting, logits, y).states, 0
        for record in range(9):
            others = torch.arange(9) != record
            change = whole - tallied(counting, logits[others], y[others]).states
            assert abs(change).max() <= counting.unit("torchmetrics", "trained") == 1
            largest = max(largest, int(np.square(change).sum()))
        own = counting.squared_sensitivity - counting.own.squared_sensitivity
        assert 0 < 2 * largest == own, name


def test_one_record_adds_no_more_to_a_number_than_a_sum_has_room_for():
    """Also where it counts once per class, and no bound is known for noise."""
    micro = {"name": "MulticlassF1Score", "options": {"average": "micro"}}
    counting = counted(Classification(), 4, MetricsTable(torchmetrics=[micro, KAPPA]), noised=False)
    logits = torch.eye(4)[:1]
    most = max(tallied(counting, logits, torch.tensor([label])).states.max() for label in range(4))
    assert 1 < most <= counting.unit("torchmetrics", "trained") == 4


def test_a_record_that_changes_more_than_its_bound_is_left_out(monkeypatch):
    task, table = Classification(), MetricsTable(torchmetrics=[KAPPA])
    counting = counted(task, 3, table, noised=True)
    logits, y = drawn(task, 3, 10, 1)
    found = classes().MulticlassCohenKappa
    before = found.update

    def twice(self, preds, target):
        before(self, preds, target)
        self.confmat = self.confmat * (1 + (target == 2).any())

    monkeypatch.setattr(found, "update", twice)
    states = tallied(counting, logits, y).states
    assert states.sum() == int((y != 2).sum()) < 10
    plain = counted(task, 3, table, noised=False)
    assert tallied(plain, logits, y).states.sum() == 20


def test_a_record_without_a_finite_output_leaves_the_others_as_they_are():
    """torchmetrics takes a whole call for logits if one number lies beyond 0 and 1."""
    label = {"name": "MultilabelConfusionMatrix"}
    counting = counted(Multilabel(), 3, MetricsTable(torchmetrics=[label]), noised=False)
    logits, y = drawn(Multilabel(), 3, 10, 1)
    whole = tallied(counting, logits[1:], y[1:]).states
    logits[0] = float("nan")
    assert np.abs(tallied(counting, logits, y).states - whole).sum() == 3


def test_the_job_names_the_package_and_its_document_is_read_back(make_job):
    job = make(make_job, *THREE)
    found = job.document()
    (package,) = found["packages"]
    assert (package["name"], package["version"]) == (
        "torchmetrics",
        sys.modules["torchmetrics"].__version__,
    )
    assert found["metrics"]["torchmetrics"][1] == {
        "name": "MulticlassFBetaScore",
        "options": {"beta": {"decimal": "0.5"}},
        "title": "half",
    }
    (phase, _) = found["schema"]
    part = phase["up"][-2]
    assert (part["name"], part["kind"], part["exchange"]) == (
        "torchmetrics",
        "METRIC",
        "sum.total",
    )
    assert [tensor["shape"] for tensor in part["tensors"]] == [[9 + 12 + 20 * 3 * 4]] * 2
    wire = parse_json(canonical_json(found), "wire")
    again = Job.from_document(wire, "wire", ["torchmetrics"])
    assert again == job
    assert again.counting == job.counting == evaluated(evaluation_of(wire)).counting
    assert unlisted(wire, ()) == ("torchmetrics",)
    with refused("runs code of the installed package torchmetrics, which may not run here"):
        Job.from_document(wire, "wire", ())
    with refused("key packages, .*, differs"):
        Job.from_document({**wire, "packages": []}, "wire", None)
    assert "torchmetrics" not in make_job("fedavg").document()["metrics"]


@pytest.mark.parametrize(
    ("metric", "why"),
    [
        ({"name": "MulticlassAUROC"}, "AUROC keeps 'preds' of every record, .* thresholds = 100"),
        ({"name": "MulticlassCalibrationError"}, "keeps 'confidences' of .*; leave it out; metric"),
        ({"name": "MulticlassHingeLoss"}, "adds up fractions in 'measures', and only counts"),
        ({"name": "CohenKappa"}, "'CohenKappa' is no metric .* such as MulticlassCohenKappa"),
        ({"name": "MeanSquaredError"}, "is no metric of torchmetrics.classification .* 3 outputs"),
        ({"name": "BinaryF1Score"}, "'BinaryF1Score' is no metric of .* MulticlassF1Score"),
        ({"name": "MultilabelF1Score"}, "is no metric of .* MulticlassF1Score"),
        ({**KAPPA, "options": {"weights": "cubic"}}, "Kappa fails: .*; correct its options, or"),
        ({**KAPPA, "options": {"num_classes": 3}}, "Kappa fails: .*'num_classes'; correct its op"),
        ({**KAPPA, "options": {"weights": None}}, "weights: give true, false, a number"),
        ({**CURVE, "options": {"thresholds": 10**9}}, "metrics.torchmetrics takes 12,000,000,000"),
        ({"name": "MulticlassF1Score", "options": {"multidim_average": "samplewise"}},
            "keeps 'tp' of every record"),
    ],
)  # fmt: skip
def test_what_cannot_cross_as_counts_is_refused(make_job, metric, why):
    with pytest.raises(ValidationError, match=why):
        make(make_job, metric)


@pytest.mark.parametrize(("name", "average"), [("ROC", "micro"), ("LogAUC", "weighted")])
def test_options_that_fail_with_a_record_or_with_sums_are_refused(make_job, name, average):
    options = {"thresholds": 7, "average": average}
    with pytest.raises(ValidationError, match=f"Multiclass{name} fails: .*correct its options"):
        make(make_job, {"name": f"Multiclass{name}", "options": options})


def test_thresholds_of_its_own_are_a_curve_at_these():
    options = {"thresholds": [0.1, 0.5, 0.9]}
    table = MetricsTable(torchmetrics=[{"name": "MulticlassROC", "options": options}])
    (metric,) = counted(Classification(), 3, table, noised=False).metrics
    assert metric.shapes == (("confmat", (3, 3, 2, 2)),)


def test_metrics_that_go_with_no_task_or_with_one_another_are_refused(make_job):
    with pytest.raises(ValidationError, match="Kappa twice; give one of them a title"):
        make(make_job, KAPPA, KAPPA)
    groups = {"name": "BinaryFairness", "options": {"num_groups": 2}}
    with pytest.raises(ValidationError, match="takes preds, target, groups, and evaluation has"):
        make(make_job, groups, model={"classes": 2})
    whole = document("regression", metrics={"torchmetrics": [KAPPA]})
    with pytest.raises(ValidationError, match="torchmetrics does nothing where the task is reg"):
        JobFile.model_validate(whole)
    read = {**evaluation_of(make(make_job, KAPPA).document()), "task": whole["task"]}
    with refused("the job does not say what is evaluated: .*is no metric of"):
        evaluated(read)


def test_noise_takes_a_metric_whose_bound_is_known(make_job):
    model = {"name": "mlp", "input": [1, 8, 8]}
    private = {"privacy": {**PRIVATE, "metrics_sigma": 1.0}, "model": model}
    plain = make_job("fedavg", **private).counting.squared_sensitivity
    for metric, own in ((KAPPA, 1), (HALF, 3), (CURVE, 60)):
        counting = make(make_job, metric, **private).counting
        assert counting.squared_sensitivity == plain + 2 * own
    micro = {"name": "MulticlassF1Score", "options": {"average": "micro"}}
    with pytest.raises(
        ValidationError, match=r"MulticlassF1Score of .*: nobody knows how much one"
    ):
        make(make_job, KAPPA, micro, **private)
    kept = {**private, "privacy": PRIVATE}
    counting = make(make_job, micro, **kept).counting
    logits, y = drawn(Classification(), 3, 20, 1)
    tally = tallied(counting, logits, y)
    assert tally.said()["torchmetrics.MulticlassF1Score"] == pytest.approx(tally.score)


def test_counts_that_the_test_records_do_not_make_are_a_fault(make_job):
    metrics = {"torchmetrics": THREE, "confusion": True}
    counting = make_job("fedavg", metrics=metrics).counting
    logits, y = drawn(Classification(), 3, 20, 1)
    tally = tallied(counting, logits, y)
    values = {
        (part, name): value.clone()
        for part, own in counting.contributions(tally, tally).items()
        for name, value in own.tensors.items()
    }
    assert counting.fault(values, 20) == ""
    values["torchmetrics", "trained"][0] += 1
    assert counting.fault(values, 20) == (
        "torchmetrics/trained has 1281 counts, 20 test records make at most 1280"
    )
    values["torchmetrics", "trained"][0] -= 1
    values["metrics", "correct.trained"] += 1
    assert "on its diagonal, and metrics 8 that are right" in counting.fault(values, 20)


def test_sums_with_noise_raise_no_error(make_job):
    counting = make(make_job, *THREE, {"name": "MulticlassMatthewsCorrCoef"}).counting
    rng = np.random.default_rng(0)
    for scale in (0, 1, 30):
        noise = rng.normal(size=9 + 12 + 240 + 9) * scale
        table = noise.round().astype(int).tolist()
        said = counting.of_sums({"tested": 7, **{f"torchmetrics.{m}": table for m in MODELS}})
        json.dumps(said, allow_nan=False)
    # As if noise had left nothing of the negative ones.
    table, above = ([side * n for n in range(9 + 12 + 240 + 9)] for side in (-1, 0))
    found, none = (
        counting.of_sums({"tested": 7, "torchmetrics.trained": each})["trained"]
        for each in (table, above)
    )
    assert found == none
    for table in ([1, 2], [[1]]):
        assert (
            "accuracy" in counting.of_sums({"tested": 7, "torchmetrics.trained": table})["trained"]
        )
    assert counting.of_sums({"tested": 0}) == {}
    assert tallied(counting, torch.empty(0, 3), torch.empty(0, dtype=torch.int64)).said() == {}


def test_plain_blind_and_stacked_simulations_have_the_same_sums(make_job):
    job = make(make_job, *THREE, silos=list("abcd"), min_cohort=3)
    data = {s: (make_data(24, i), make_data(12 + i, 90 + i)) for i, s in enumerate("abcd")}
    plain = simulate(job, data)
    blind = make(
        make_job,
        *THREE,
        silos=list("abcd"),
        min_cohort=3,
        security={"secure_aggregation": "required", "clip_exponent": 6},
    )
    summed = simulate(blind, data, exchanges=simulated(blind))
    stacked = Simulation(job, Stacked(job, {s: Records(*sides) for s, sides in data.items()}))
    first = stacked.step().metrics
    name = "torchmetrics.delivered"
    # Of the initial model, which is the same.
    assert torch.equal(plain.metrics[0][name], summed.metrics[0][name])
    assert torch.equal(plain.metrics[0][name], first[name])
    tallies = [own[0].delivered for own in plain.history.values()]
    said = job.counting.of_sums({k: v.tolist() for k, v in plain.metrics[0].items()})
    assert said["delivered"] == {"accuracy": job.counting.pooled(tallies).score} | {
        key: value
        for key, value in job.counting.pooled(tallies).said().items()
        if key.startswith("torchmetrics")
    }
    assert {"torchmetrics.half.trained", "torchmetrics.MulticlassAUROC.delivered"} <= set(
        flattened(said)
    )
    seen = {s: Seen(own[-1].delivered, own[-1].trained) for s, own in plain.history.items()}
    kept = measures(seen, job.counting)
    assert isinstance(kept["trained"]["all"]["torchmetrics.MulticlassCohenKappa"], float)
    assert len(kept["trained"]["silos"]) == 4


def test_blind_states_are_summed_as_other_tables_by_class(make_job):
    """Over all silos, and not at all where holders of a class are counted."""
    blind = {"secure_aggregation": "required", "colluders": 0}
    fields = {"silos": list("abcdefgh"), "min_cohort": 3, "security": blind}
    assert make(make_job, KAPPA, **fields).batches == (tuple("abcdefgh"),)
    with refused("part 'torchmetrics' .*write participation = 1.0"):
        make(make_job, KAPPA, **fields, participation=0.5).document()
    counted = {**fields, "security": {**blind, "min_holders": 4}}
    with refused("part 'torchmetrics' has the test records of every class, also of one that fewer"):
        make_job("fedproto", **counted, metrics={"torchmetrics": [KAPPA]}).document()


def test_labels_have_metrics_of_their_own():
    metric = {"name": "MultilabelMatthewsCorrCoef"}
    whole = document("multilabel", metrics={"torchmetrics": [metric]})
    job = Job.from_file(JobFile.model_validate(whole), "test")
    found = simulate(job, shards("multilabel"))
    last = [own[-1].trained for own in found.history.values()]
    value = job.counting.pooled(last).said()["torchmetrics.MultilabelMatthewsCorrCoef"]
    assert 0 < value <= 1


def test_readers_without_torchmetrics_have_the_sums_alone(make_job, monkeypatch):
    evaluation = evaluation_of(make(make_job, KAPPA).document())
    monkeypatch.setattr(torchmetrics_counting, "find_spec", lambda _: None)
    assert evaluated(evaluation) is None
    torchmetrics_counting._classes.cache_clear()

    def gone(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packages, "distribution", gone)
    with refused(r"no installed package has it; pip install 'staddle\[torchmetrics\]'"):
        counted(Classification(), 3, MetricsTable(torchmetrics=[KAPPA]), noised=False)


@pytest.mark.parametrize("most", [1, 100, 2**23])
def test_records_in_several_calls_are_counted_as_at_once(monkeypatch, most):
    asked = MetricsTable.model_validate({"torchmetrics": THREE})
    metrics = counted(Classification(), 3, asked, noised=False).metrics
    scores = torch.rand(40, 3, generator=torch.Generator().manual_seed(0)).numpy()
    truth = np.arange(40) % 3
    expected = [one.summed(scores, truth, 0) for one in metrics]
    monkeypatch.setattr(torchmetrics_counting, "MOST_AT_ONCE", most)
    for one, whole in zip(metrics, expected, strict=True):
        assert np.array_equal(one.summed(scores, truth, 0), whole)
