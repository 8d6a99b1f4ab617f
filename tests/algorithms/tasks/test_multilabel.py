"""Several labels: losses by hand, counts and measures against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from support.counted import tallied

from staddle.algorithms.tasks.metrics_table import MetricsTable
from staddle.algorithms.tasks.multilabel import Multilabel

ALL = MetricsTable(confusion=True, score_bins=32)


def drawn(n=200, labels=3, seed=0):
    rng = np.random.default_rng(seed)
    y = (rng.random((n, labels)) < [0.5, 0.2, 0.05]).astype(np.int64)
    logits = rng.normal(size=(n, labels)) * 2 + 2 * y - 1
    return torch.from_numpy(logits.astype(np.float32)), torch.from_numpy(y)


def counted(logits, y, metrics=ALL, pieces=3):
    counting = Multilabel().counting(3, metrics, noised=False)
    return counting, tallied(counting, logits, y, pieces)


def test_the_loss_is_the_mean_over_the_labels():
    logits, y = drawn(20)
    logs = torch.nn.functional.logsigmoid
    wanted = -(y * logs(logits) + (1 - y) * logs(-logits)).mean(1)
    torch.testing.assert_close(Multilabel().losses(logits, y), wanted)
    weights = torch.tensor([1.0, 4.0, 9.0])
    wanted = -(weights * y * logs(logits) + (1 - y) * logs(-logits)).mean(1)
    weighted = Multilabel(positive_weights=(1.0, 4.0, 9.0))
    torch.testing.assert_close(weighted.losses(logits, y), wanted)
    assert "2 numbers, and the model 3 outputs" in Multilabel(positive_weights=(1.0, 2.0)).fault(3)


def test_measures_are_scikit_learns():
    logits, y = drawn()
    counting, tally = counted(logits, y)
    called = (logits >= 0).long().numpy()
    truth = y.numpy()
    assert (tally.confusion == sk.multilabel_confusion_matrix(truth, called)).all()
    assert tally.score == (called == truth).mean()
    balanced = [sk.balanced_accuracy_score(*own) for own in zip(truth.T, called.T, strict=True)]
    assert tally.balanced == pytest.approx(np.mean(balanced))
    frequent = np.maximum(truth.mean(0), 1 - truth.mean(0)).mean()
    assert tally.baseline == pytest.approx(frequent)
    said = tally.said()
    report = sk.classification_report(truth, called, output_dict=True, zero_division=0)
    for number, own in enumerate(said["classes"]):
        row = report[str(number)]
        assert own["sensitivity"] == pytest.approx(row["recall"])
        assert own["precision"] == pytest.approx(row["precision"])
        assert own["records"] == row["support"]
    area = said["auroc"]
    assert area["least"] <= sk.roc_auc_score(truth, logits.numpy()) <= area["most"]
    halves = [counted(logits[own], y[own])[1] for own in (slice(80), slice(80, 200))]
    assert counting.pooled(halves) == tally
    assert tally != halves[0]


def test_what_crosses_says_the_same():
    counting, tally = counted(*drawn())
    given = counting.contributions(tally, tally)
    assert [*given] == ["confusion", "scores", "metrics"]
    sums = {"tested": 200, "correct.trained": tally.correct, "correct.delivered": 0}
    for model in ("delivered", "trained"):
        sums[f"confusion.{model}"] = given["confusion"].tensors[model].tolist()
        sums[f"scores.{model}"] = given["scores"].tensors[model].tolist()
    found = counting.of_sums(sums)
    assert found["trained"] == tally.said()
    assert found["delivered"]["accuracy"] == 0
    values = {(p, t): v for p, part in given.items() for t, v in part.tensors.items()}
    assert counting.fault(values, 200) == ""
    assert counting.unit("metrics", "correct.trained") == 3
    assert counting.squared_sensitivity == 3 + 2 * 3 * 2


@pytest.mark.parametrize(
    ("place", "change", "why"),
    [
        (("confusion", "trained"), (0, 0, 0), "does not count each of 200 test records once"),
        (("metrics", "correct.trained"), (), "on its diagonal, and metrics"),
    ],
)
def test_counts_that_contradict_one_another_are_told(place, change, why):
    counting, tally = counted(*drawn())
    given = counting.contributions(tally, tally)
    values = {(p, t): v.clone() for p, part in given.items() for t, v in part.tensors.items()}
    values[place][change] += 1
    assert why in counting.fault(values, 200)


def test_tables_that_hide_labels_are_told():
    counting, tally = counted(*drawn())
    given = counting.contributions(tally, tally)
    values = {(p, t): v.clone() for p, part in given.items() for t, v in part.tensors.items()}
    # One record moves from without the label to with it, in one table alone.
    table = values["scores", "trained"]
    place = int(table[0, 0].nonzero()[0])
    table[0, 0, place] -= 1
    table[0, 1, place] += 1
    assert "test records of class 0, another table" in counting.fault(values, 200)


def test_noise_that_empties_a_label_says_nothing_of_it():
    counting = Multilabel().counting(3, ALL, noised=True)
    table = [[[5, 1], [0, 4]], [[-3, 0], [0, -1]], [[9, 0], [1, 0]]]
    found = counting.of_sums({"tested": 10, "correct.trained": 99, "confusion.trained": table})
    said = found["trained"]
    assert said["accuracy"] == 1.0
    assert [own["records"] for own in said["classes"]] == [4, 0, 1]
    assert said["classes"][1]["sensitivity"] is None
    assert said["balanced_accuracy"] == pytest.approx((1 - 1 / 12 + 0.5) / 2)
    assert counting.of_sums({"tested": 0}) == {}


def test_records_without_such_labels_are_told():
    task = Multilabel()
    y = torch.tensor([[0, 1], [1, 1], [0, 2]])
    assert "record 2 has a label that is neither 0 nor 1" in task.records_fault(y, 2)
    assert "[N, 3]: 0 or 1 per label" in task.records_fault(y, 3)
    assert task.records_fault(y.clamp(max=1), 2) == ""
    assert task.strata(y.clamp(max=1)).tolist() == [2, 1, 2]
    assert task.strata(torch.tensor([[0, 0]])).tolist() == [0]
