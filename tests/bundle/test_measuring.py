"""Figures, intervals and thresholds, against hand-worked numbers and a slow bootstrap."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.jobs import make_data, make_job
from support.other_tasks import document, records

from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.method import initial_state
from staddle.algorithms.tasks.metrics_table import MetricsTable
from staddle.bundle import measuring
from staddle.bundle.measuring import (
    best_cut,
    counting_of,
    figures_of,
    independent,
    judged,
    measured,
    thresholds,
    wilson,
)
from staddle.bundle.predictor import Predictor
from staddle.errors import CancelledError


@pytest.mark.parametrize(
    ("share", "records", "low", "high"),
    [
        (0.5, 10, 0.2366, 0.7634),  # by hand from Eq. 4
        (0.0, 10, 0.0, 0.2775),
        (1.0, 10, 0.7225, 1.0),
        (0.9, 100, 0.8256, 0.9448),
    ],
)
def test_wilsons_interval(share, records, low, high):
    assert wilson(share, records) == pytest.approx((low, high), abs=5e-5)


def test_wilsons_interval_ends_at_zero_and_one():
    for count in range(1, 200):
        assert wilson(0.0, count)[0] == 0.0
        assert wilson(1.0, count)[1] == 1.0


def test_the_best_threshold_is_the_middle_of_the_gap():
    values = np.array([0.1, 0.2, 0.6, 0.9])
    assert best_cut(values, np.array([False, False, True, True])) == pytest.approx(0.4)
    # Both 0.15 and 0.75 give 1/2; 0.75 is as near to 0.5 as 0.25 would be.
    assert best_cut(values, np.array([False, True, False, True])) in (
        pytest.approx(0.75),
        pytest.approx(0.15),
    )


def test_the_best_threshold_is_that_of_a_slow_search():
    rng = np.random.default_rng(5)
    for _ in range(50):
        values, truths = rng.integers(0, 20, 30) / 20, rng.random(30) < 0.4
        if not 0 < truths.sum() < 30:
            continue
        index = {
            cut: (values[truths] >= cut).mean() + (values[~truths] < cut).mean()
            for cut in np.linspace(0, 1, 401)
        }
        found = best_cut(values, truths)
        own = (values[truths] >= found).mean() + (values[~truths] < found).mean()
        assert own == pytest.approx(max(index.values()))


def counted(outputs, y, groups=None):
    job = make_job()
    counting = counting_of(job.task, 3, MetricsTable(), len(y))
    marks = {name: mark.numpy() for name, mark in counting.marks(outputs, y).items()}
    return figures_of(counting, marks, y.numpy(), groups)


def test_figures_have_intervals_and_shares_have_wilsons():
    y = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    called = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 0])
    found = counted(torch.nn.functional.one_hot(called, 3).double() * 4, y)
    assert found.said["accuracy"] == 0.7
    assert found.intervals["accuracy"] == pytest.approx(wilson(0.7, 10))
    assert found.said["classes"][0]["sensitivity"] == 0.75
    assert found.intervals["classes.0.sensitivity"] == pytest.approx(wilson(0.75, 4))
    assert found.intervals["classes.0.specificity"] == pytest.approx(wilson(5 / 6, 6))
    assert found.intervals["classes.0.precision"] == pytest.approx(wilson(0.75, 4))
    assert found.baseline == 0.4
    low, high = found.intervals["balanced_accuracy"]
    assert low < found.said["balanced_accuracy"] < high
    low, high = found.intervals["auroc"]
    assert 0 <= low <= found.said["auroc"]["value"] <= high <= 1


def test_the_calibration_error_has_no_interval():
    """Resamples of well calibrated records are calibrated worse than these."""
    rng = np.random.default_rng(4)
    given = torch.from_numpy(rng.uniform(0.05, 0.95, 100))
    y = torch.from_numpy(rng.random(100)) < given
    outputs = torch.stack([torch.zeros(100), given.logit(), torch.full((100,), -9.0)], 1)
    found = counted(outputs.double(), y.long())
    assert "calibration_error" in found.said
    assert "auroc" in found.intervals
    assert not [path for path in found.intervals if "calibration" in path]


def test_records_of_one_group_say_less():
    """Ten copies of each of ten records are hardly more than ten records."""
    y = torch.arange(10).remainder(2).repeat_interleave(10)
    called = torch.tensor([0, 1, 0, 1, 0, 1, 0, 0, 1, 1]).repeat_interleave(10)
    outputs = torch.nn.functional.one_hot(called, 3).double() * 4
    alone = counted(outputs, y).intervals
    groups = [f"patient {place}" for place in range(10) for _ in range(10)]
    together = counted(outputs, y, groups).intervals

    def width(found, name):
        return found[name][1] - found[name][0]

    for name in ("accuracy", "balanced_accuracy", "auroc"):
        assert width(together, name) > 1.8 * width(alone, name), name


def test_a_bootstrap_of_a_mean_is_that_of_its_standard_error():
    """MAE of a regression: the normal interval of a mean of 200 errors."""
    job = Job.from_file(JobFile.model_validate(document("regression")), "job.toml")
    counting = counting_of(job.task, 1, MetricsTable(), 200)
    rng = np.random.default_rng(2)
    y = torch.from_numpy(rng.uniform(5, 35, 200).astype(np.float32))
    errors = torch.from_numpy(rng.uniform(0, 4, 200))
    center, scale = job.task.affine
    outputs = ((y.double() + errors - center) / scale)[:, None]
    marks = {name: mark.numpy() for name, mark in counting.marks(outputs, y).items()}
    found = figures_of(counting, marks, y.numpy())
    half = 1.96 * float(errors.std()) / 200**0.5
    low, high = found.intervals["mae"]
    assert found.said["mae"] == pytest.approx(float(errors.mean()), abs=1e-3)
    assert (low, high) == pytest.approx(
        (float(errors.mean()) - half, float(errors.mean()) + half), abs=0.12 * half
    )


@pytest.fixture
def few(monkeypatch):
    """As if the records were too many for a bootstrap."""
    monkeypatch.setattr(measuring, "MOST_CELLS", measuring.FEWEST_RESAMPLES)


def test_too_many_records_for_a_bootstrap_have_shares_with_intervals(few):
    y = torch.arange(40).remainder(2)
    outputs = torch.nn.functional.one_hot((torch.arange(40) < 30).long() * y, 3).double()
    found = counted(outputs, y)
    assert found.intervals["accuracy"] == wilson(found.said["accuracy"], 40)
    assert "auroc" not in found.intervals
    # Of ten patients each might say the same four times.
    groups = [f"patient {place // 4}" for place in range(40)]
    grouped = counted(outputs, y, groups).intervals["accuracy"]
    assert grouped == wilson(found.said["accuracy"], 10)


def test_records_of_one_group_that_all_agree_are_one(few):
    assert wilson(1.0, 0.5) == wilson(1.0, 1)
    assert independent(None) == 1.0
    assert independent(["a", "a", "b", "b"]) == 0.5


def test_each_record_is_drawn_as_often_as_its_group():
    """A figure of resamples of groups of unlike sizes, against a slow bootstrap."""
    rng = np.random.default_rng(3)
    sizes = rng.integers(1, 9, 30)
    groups = np.repeat([f"p{place}" for place in range(30)], sizes)
    right = rng.random(len(groups)) < np.repeat(rng.random(30), sizes)
    # Groups lie apart.
    order = rng.permutation(len(groups))
    groups, right = groups[order], right[order]
    y = torch.ones(len(groups), dtype=torch.int64)
    outputs = torch.nn.functional.one_hot(torch.from_numpy(right).long(), 3).double()
    low, high = counted(outputs, y, groups.tolist()).intervals["accuracy"]
    members = [right[groups == f"p{place}"] for place in range(30)]
    slow = [
        np.concatenate([members[place] for place in rng.integers(0, 30, 30)]).mean()
        for _ in range(4000)
    ]
    wanted = np.percentile(slow, [2.5, 97.5])
    assert (low, high) == pytest.approx(wanted, abs=0.025)


def test_a_figure_that_is_the_same_in_every_resample_has_no_interval():
    y = torch.arange(40).remainder(3)
    found = counted(torch.nn.functional.one_hot(y, 3).double() * 4, y)
    assert found.said["balanced_accuracy"] == 1.0
    assert "balanced_accuracy" not in found.intervals
    assert found.intervals["accuracy"] == wilson(1.0, 40)


def test_a_record_at_its_threshold_is_called():
    values, truths = np.array([[0.5], [0.4]]), np.array([[True], [False]])
    own = judged("ill", 0.5, 3, measuring.CutOffInputs(values, truths), 0)
    assert (own.sensitivity, own.specificity) == (1.0, 1.0)
    assert (own.chosen_on, own.measured_on) == (3, 2)


def test_scores_that_would_take_gigabytes_are_not_counted():
    job, most = make_job(), measuring.MOST_SCORES
    assert counting_of(job.task, 4, MetricsTable(), most // 4).bins == measuring.SCORE_BINS
    assert counting_of(job.task, 4, MetricsTable(), most // 4 + 1).bins == 0


def test_a_stop_reaches_the_bootstrap_and_the_thresholds():
    job = make_job(model={"classes": 2})
    found = Predictor.of(job, "a", initial_state(job.method(), "a"))
    data, asked = make_data(40, classes=2), []

    def stop():
        asked.append(True)
        return len(asked) > 30

    counting = counting_of(job.task, 2, MetricsTable(), 40)
    with pytest.raises(CancelledError):
        measured(found, data, counting, stop)
    assert len(asked) == 31
    with pytest.raises(CancelledError):
        thresholds(found, data, b"key", ("well", "ill"), stop)


class TestThresholds:
    def predictor(self, **model):
        job = make_job(model={"classes": 2, **model})
        return Predictor.of(job, "a", initial_state(job.method(), "a"))

    def test_they_are_chosen_on_one_half_and_measured_on_the_other(self):
        found = self.predictor()
        data = make_data(60, classes=2)
        (own,) = thresholds(found, data, b"key", ("well", "ill"))
        assert own.of == "ill"
        assert own.chosen_on + own.measured_on == 60
        assert min(own.chosen_on, own.measured_on) > 15
        low, high = own.sensitivity_interval
        assert low <= own.sensitivity <= high
        # As wide as if each patient had one record.
        grouped = replace(data, groups=tuple(str(place // 4) for place in range(60)))
        (wide,) = thresholds(found, grouped, b"key", ("well", "ill"))
        has = int((grouped.y == 1).sum())
        assert wide.sensitivity_interval != wilson(wide.sensitivity, has)
        low, high = wide.sensitivity_interval
        assert high - low > 0.4
        # Another key draws other halves.
        (other,) = thresholds(found, data, b"another", ("well", "ill"))
        assert (other.value, other.chosen_on) != (own.value, own.chosen_on)

    def test_there_are_none_for_more_classes_or_too_few_records(self):
        job = make_job()
        three = Predictor.of(job, "a", initial_state(job.method(), "a"))
        assert thresholds(three, make_data(60), b"key", ("a", "b", "c")) == ()
        assert thresholds(self.predictor(), make_data(1, classes=2), b"key", ("a", "b")) == ()

    def test_there_is_none_where_records_are_of_one_kind(self):
        data = make_data(60, classes=1)
        assert thresholds(self.predictor(), data, b"key", ("well", "ill")) == ()

    def test_there_is_none_where_one_kind_is_rare(self):
        """Of sixty records four are ill: whatever catches them may be the best threshold."""
        data, other = make_data(60, classes=2), make_data(60, classes=2)
        data.y[:] = 0
        data.y[:4] = 1
        assert thresholds(self.predictor(), data, b"key", ("well", "ill")) == ()
        other.y[:] = 0
        other.y[::2] = 1
        assert len(thresholds(self.predictor(), other, b"key", ("well", "ill"))) == 1

    def test_each_label_has_its_own(self):
        job = Job.from_file(JobFile.model_validate(document("multilabel")), "job.toml")
        found = Predictor.of(job, "a", initial_state(job.method(), "a"))
        own = thresholds(found, records("multilabel", 80, 1), b"key", ("x", "y", "z"))
        assert [each.of for each in own] == ["x", "y", "z"]


@pytest.mark.parametrize("kind", ["regression", "multilabel", "survival", "segmentation"])
def test_every_task_is_measured_with_all_it_has(kind):
    job = Job.from_file(JobFile.model_validate(document(kind, metrics={})), "job.toml")
    found = Predictor.of(job, "a", initial_state(job.method(), "a"))
    counting = counting_of(job.task, job.model.width, job.metrics, 40)
    own = measured(found, records(kind, 40, 3), counting)
    keys = {
        "regression": {"mae", "rmse", "r2"},
        "multilabel": {"auroc", "auprc", "classes"},
        "survival": {"concordance"},
        "segmentation": {"dice"},
    }
    assert keys[kind] <= own.said.keys()
    assert own.intervals
