"""Regression: losses by hand, errors and R² as scikit-learn has them, and what is refused."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from support.counted import tallied
from support.other_tasks import document, records
from support.refusals import refused

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.tasks.counting import flattened
from staddle.algorithms.tasks.metrics_table import MetricsTable
from staddle.algorithms.tasks.regression import Regression
from staddle.algorithms.tasks.task import histogram
from staddle.algorithms.tasks.value_counting import UNIT, ValueCounting
from staddle.algorithms.training.record_checks import check_records, check_testing, range_advice

TASK = Regression(range=(10.0, 50.0), unit="days")
Y = torch.tensor([10.0, 30.0, 50.0, 20.0])


def counted(task, outputs, y, pieces=1):
    counting = task.counting(1, MetricsTable(targets=True), noised=False)
    return counting, tallied(counting, outputs, y, pieces)


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        ({}, [1.0, 0.25, 0.0, 0.25]),  # outputs 0, 0.5, 1, 0 against -1, 0, 1, -0.5
        ({"loss": "mae"}, [1.0, 0.5, 0.0, 0.5]),
        ({"loss": "huber", "delta": 0.5}, [0.375, 0.125, 0.0, 0.125]),
        ({"loss": "huber"}, [0.5, 0.125, 0.0, 0.125]),
        ({"center": 0.0, "scale": 1.0}, [100.0, 29.5**2, 49.0**2, 400.0]),
    ],
)
def test_losses_are_in_the_models_scale(table, wanted):
    task = Regression(range=(10.0, 50.0), **table)
    outputs = torch.tensor([[0.0], [0.5], [1.0], [0.0]])
    assert task.losses(outputs, Y).tolist() == pytest.approx(wanted)
    stacked = torch.func.vmap(task.losses)(outputs.view(2, 2, 1), Y.view(2, 2))
    assert torch.equal(stacked.view(-1), task.losses(outputs, Y))


def test_errors_are_those_of_the_pooled_records():
    rng = np.random.default_rng(3)
    y = rng.uniform(10, 50, 400).astype(np.float32)
    predicted = np.clip(y + rng.normal(size=400) * 4, 10, 50)
    outputs = torch.from_numpy(((predicted - 30) / 20).astype(np.float32))[:, None]
    counting, whole = counted(TASK, outputs, torch.from_numpy(y))
    halves = [
        counted(TASK, outputs[own], torch.from_numpy(y[own]), pieces=3)[1]
        for own in (slice(150), slice(150, 400))
    ]
    together = counting.pooled(halves)
    assert (together.sums == whole.sums).all()
    assert (together == whole, together.records) == (True, 400)
    assert together.baseline < whole.baseline  # a median for each of the two
    said = whole.said()
    assert said["mae"] == pytest.approx(sk.mean_absolute_error(y, predicted), abs=1e-4)
    assert said["rmse"] == pytest.approx(sk.root_mean_squared_error(y, predicted), abs=1e-3)
    assert said["r2"] == pytest.approx(sk.r2_score(y, predicted), abs=1e-4)
    assert whole.baseline == pytest.approx(np.abs(y - np.median(y)).mean())
    assert (whole.score, whole.balanced) == (said["mae"], None)


def test_what_crosses_says_the_same():
    outputs = torch.tensor([[-1.0], [0.5], [0.0], [-0.5]])
    counting, tally = counted(TASK, outputs, Y)
    parts = {part.name: part for part in counting.parts()}
    assert [spec.name for spec in parts["targets"].tensors] == ["target", "target_squared"]
    given = counting.contributions(tally, tally)
    sums = {"tested": 4}
    for name, part in given.items():
        prefix = "" if name == "metrics" else f"{name}."
        sums |= {prefix + key: int(value) for key, value in part.tensors.items()}
    # errors are 0, 10, 20 and 0 of a range of 40
    assert sums["absolute.trained"] == UNIT * 3 // 4
    assert sums["squared.delivered"] == UNIT * 5 // 16
    assert sums["targets.target"] == UNIT * 7 // 4
    found = counting.of_sums(sums)
    assert found["trained"] == tally.said() == found["delivered"]
    assert flattened(found)["mae.trained"] == 7.5
    # without targets no R², and without test records nothing
    assert counting.of_sums({key: sums[key] for key in sums if "target" not in key})[
        "trained"
    ].keys() == {"mae", "rmse"}
    assert counting.of_sums({"tested": 0}) == {}


def test_a_record_changes_sums_by_a_unit_at_most():
    outputs = torch.tensor([[float("nan")], [1e30], [float("-inf")], [-0.5]])
    counting, tally = counted(TASK, outputs, torch.tensor([10.0, 30.0, -1e9, 60.0]))
    assert tally.sums[0] == 3 * UNIT + UNIT
    assert tally.sums[2] == UNIT * 3 // 2  # beyond the range it is its end
    assert counting.squared_sensitivity == 1 + 4 + 2
    assert {counting.unit("metrics", "tested"), counting.unit("targets", "target")} == {1, UNIT}
    assert TASK.counting(1, MetricsTable(), noised=True).squared_sensitivity == 5


def test_noise_gives_no_measure_that_cannot_be():
    counting = TASK.counting(1, MetricsTable(targets=True), noised=True)
    sums = {"tested": 3, "absolute.trained": 9 * UNIT, "squared.trained": -5, "targets.target": -4}
    said = counting.of_sums({**sums, "targets.target_squared": 2 * UNIT})["trained"]
    assert said == {"mae": 40.0, "rmse": 0.0, "r2": 1.0}
    assert "r2" not in counting.of_sums({**sums, "targets.target_squared": 0})["trained"]
    noisy = counting.parts()[0].tensors[0]
    assert noisy.least == -(2.0**40)


@pytest.mark.parametrize(
    ("y", "why"),
    [
        (
            torch.zeros(3, dtype=torch.int64),
            r"y is int64 \[N\], the job's task takes float32 \[N\]",
        ),
        (torch.zeros(3, 2), r"y is float32 \[N, 2\], the job's task takes float32 \[N\]"),
        (torch.tensor([1.0, float("nan"), 2.0]), "the target of record 1 is NaN or beyond float32"),
    ],
)
def test_what_is_no_number_per_record_is_told(y, why):
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(TASK.records_fault(y, 1))


def test_too_many_targets_outside_the_range_are_told_without_a_value():
    y = torch.full((40,), 20.0)
    data = y
    assert TASK.range_fault(data) == ""
    y[:2] = 51.5
    assert TASK.range_fault(data) == ""
    y[:3] = 51.5
    fault = TASK.range_fault(data)
    assert fault.startswith("3 of 40 targets are outside 10 to 50 days")
    assert "51" not in fault


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"range": (5, 5)}, "give the least number first"),
        ({"range": (0, 1), "delta": 1.0}, "delta does nothing without"),
        ({"range": (0, float("inf"))}, "finite"),
        ({"range": (0, 1), "scale": 0.0}, "greater than 0"),
    ],
)
def test_tables_that_cannot_be_are_told(table, why):
    with pytest.raises(ValueError, match=why):
        Regression(**table)
    assert "one output, the model 2" in TASK.fault(2)
    assert TASK.fault(1) == ""


def test_partitions_by_label_deal_tenths_of_the_targets():
    y = torch.tensor([5.0, 1, 9, 3, 7, 2, 8, 4, 6, 0]).repeat_interleave(2)
    groups = TASK.strata(y)
    assert groups.bincount().tolist() == [2] * 10
    assert (groups[y.argsort(stable=True)].diff() >= 0).all()
    assert histogram(TASK, y, 1).tolist() == [20]


@pytest.mark.parametrize("private", [False, True])
def test_a_plain_silo_declines_another_unit_and_a_private_one_tells_its_own_people(private):
    privacy = {"epsilon": 1, "delta": 1e-5, "sample_rate": 0.5} if private else None
    whole = document("regression", privacy=privacy)
    job = Job.from_file(JobFile.model_validate(whole), "test")
    data = records("regression", 40, 1)
    data.y[:20] = 1000.0
    (told,) = range_advice(job, data)
    assert told.startswith("target: 20 of 40 records are outside the range that the job declares")
    if private:
        check_records(job, data, "here")
        return
    with refused("here: 20 of 40 targets are outside 0 to 40 days, the range that the job decl"):
        check_records(job, data, "here")


def test_a_number_of_many_digits_and_a_score_without_a_unit():
    form = Regression(range=(0, 1e6)).score
    assert form.text(12345.6) == "12,346"
    assert form.measured_in == "in the target's own unit"
    assert form.cell(1.23456, 0.12345) == "1.235 ± 0.12"
    assert TASK.score.text(4.0) == "4 days"


def test_values_are_shares_whatever_a_model_says():
    outputs = torch.tensor([[float("nan")], [1e30], [-7.0], [0.0]])
    values = TASK.values(outputs, Y)
    for value in values.values():
        assert value.tolist()[:3] == [1, 1, 1]
        assert 0 < value[3] < 1


def test_a_single_record_decides_nothing():
    y = torch.full((10,), 20.0)
    y[0] = 99.0
    assert TASK.range_fault(y) == ""
    y[1] = 99.0
    assert TASK.range_fault(y).startswith("2 of 10 targets are outside")


def test_targets_that_are_all_one_have_no_spread_and_an_answer_without_error():
    for one in (8.0, 3.3, 7.5):  # which units of 2^-20 hold, or do not
        _, tally = counted(Regression(range=(0.0, 10.0)), torch.zeros(7, 1), torch.full((7,), one))
        assert "r2" not in tally.said()
        assert tally.baseline == 0
    _, tally = counted(TASK, torch.zeros(3, 1), torch.tensor([10.0, 10.0, 1e6]))
    assert tally.baseline == pytest.approx(40 / 3)  # beyond the range it is its end


def test_a_blind_job_sums_over_all_its_silos_in_every_round():
    """Errors of a constant model tell the targets; how many are right tells less."""
    silos = [f"silo-{number}" for number in range(12)]
    fields = {"silos": silos, "security": {"secure_aggregation": "required"}, "metrics": {}}
    job = Job.from_file(JobFile.model_validate(document("regression", **fields)), "test")
    assert job.batches == (tuple(silos),)
    labels = Job.from_file(JobFile.model_validate(document("multilabel", **fields)), "test")
    assert len(labels.batches) > 1
    some = document("regression", participation=0.5, **fields)
    with refused("participation"):
        Job.from_file(JobFile.model_validate(some), "test").document()


def test_more_test_records_than_sums_can_hold_are_told_before_training():
    job = Job.from_file(JobFile.model_validate(document("regression")), "test")
    many = 2**20
    check_testing(job, Dataset(torch.zeros(many, 1), torch.zeros(many)), "here")
    many += 1
    with refused("here: 1,048,577 test records, too many for the sums of a regression; lower"):
        check_testing(job, Dataset(torch.zeros(many, 1), torch.zeros(many)), "here")


@pytest.mark.parametrize("names", [("absolute",), ("squared", "absolute", "more")])
def test_values_are_counted_by_their_names(names):
    """Not by their order, which a task of another package may change."""

    class Other(Regression):
        def values(self, outputs, y):
            return dict(reversed(super().values(outputs, y).items()))

    class Wrong(Regression):
        value_names = property(lambda _: names)

    outputs, y = torch.tensor([[0.5], [-0.25]]), torch.tensor([3.0, 8.0])
    fields = {"range": (0.0, 10.0)}
    own, other = (ValueCounting(task(**fields)) for task in (Regression, Other))
    assert torch.equal(own.marks(outputs, y)["units"], other.marks(outputs, y)["units"])
    with refused("the task gives each record absolute, squared, target, .* and names "):
        ValueCounting(Wrong(**fields)).marks(outputs, y)
