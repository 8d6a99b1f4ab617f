"""Classes of positions: the loss and the Dice scores by hand and against scikit-learn."""

import math
import re

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from support.counted import tallied

from staddle.algorithms.tasks.metrics_table import MetricsTable
from staddle.algorithms.tasks.segmentation import DiceScores, Segmentation


def drawn(n=9, classes=3, sides=(5, 4), seed=0):
    """Logits that agree with the truth about half of the time."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n, *sides), generator=draw).to(torch.uint8)
    logits = torch.randn(n, classes, *sides, generator=draw)
    return logits + torch.nn.functional.one_hot(y.long(), classes).movedim(-1, 1), y


def counted(logits, y, pieces=3):
    counting = Segmentation().counting(logits.shape[1], MetricsTable(), noised=False)
    return counting, tallied(counting, logits, y, pieces)


def called(*rows):
    """Logits by which positions are called these classes."""
    hot = torch.nn.functional.one_hot(torch.tensor(rows), 3).float()
    return hot.movedim(-1, 1)[:, :, None]


@pytest.mark.parametrize("sides", [(5, 4), (3, 2, 4)])
def test_the_loss_is_cross_entropy_and_one_minus_the_soft_dice(sides):
    logits, y = drawn(sides=sides)
    entropies = torch.nn.functional.cross_entropy(logits, y.long(), reduction="none").flatten(1)
    plain = Segmentation(loss="cross-entropy")
    torch.testing.assert_close(plain.losses(logits, y), entropies.mean(1))
    weights = torch.tensor([1.0, 4.0, 9.0])
    weighted = (entropies * weights[y.long()].flatten(1)).mean(1)
    own = Segmentation(loss="cross-entropy", class_weights=(1.0, 4.0, 9.0))
    torch.testing.assert_close(own.losses(logits, y), weighted)
    both = Segmentation(class_weights=(1.0, 4.0, 9.0)).losses(logits, y)
    torch.testing.assert_close(
        both, weighted + Segmentation().losses(logits, y) - entropies.mean(1)
    )
    shares = logits.softmax(1)
    for record in range(len(y)):
        dice = [
            (2 * shares[record, one][y[record] == one].sum() + 1)
            / (shares[record, one].sum() + (y[record] == one).sum() + 1)
            for one in (1, 2)
        ]
        wanted = entropies[record].mean() + 1 - sum(dice) / 2
        torch.testing.assert_close(Segmentation().losses(logits, y)[record], wanted)


def test_a_position_that_the_model_excludes_leaves_finite_losses_and_gradients():
    logits, y = drawn(2)
    logits = (1e4 * logits).requires_grad_()
    losses = Segmentation().losses(logits, y)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logits.grad.isfinite().all()


def test_scores_are_means_over_records_in_which_a_class_is_true_or_called():
    """By hand: class 2 is in the second record alone, and called in the third by mistake."""
    y = torch.tensor([[[0, 1, 1, 0]], [[1, 2, 2, 2]], [[0, 0, 0, 0]]], dtype=torch.uint8)
    counting, tally = counted(called([0, 1, 0, 0], [1, 2, 2, 0], [0, 0, 2, 0]), y)
    said = tally.said()
    assert said["dice_class_1"] == pytest.approx((2 / 3 + 1) / 2)
    assert said["dice_class_2"] == pytest.approx((4 / 5 + 0) / 2)
    assert tally.score == said["dice"] == pytest.approx((5 / 6 + 2 / 5) / 2)
    # All positions class 1: 2 · 2 / 6, 2 · 1 / 5 and 0; class 2 is missed, and 0.
    assert tally.baseline == pytest.approx((4 / 6 + 2 / 5) / 3 / 2)
    assert counting.score.constant == "one class everywhere"


def test_nothing_to_find_and_nothing_found_is_right():
    y = torch.zeros(2, 1, 4, dtype=torch.uint8)
    _, tally = counted(called([0, 0, 0, 0], [0, 0, 0, 0]), y)
    assert (tally.said(), tally.baseline) == ({"dice": 1.0}, 1.0)
    _, tally = counted(called([0, 0, 0, 0], [0, 0, 0, 1]), y)
    assert tally.said() == {"dice": 0.0, "dice_class_1": 0.0}


def test_scores_are_scikit_learns_f1_of_each_record():
    logits, y = drawn(30)
    says = logits.argmax(1).numpy()
    wanted = []
    for one in (1, 2):
        scores = [
            sk.f1_score((own == one).ravel(), (mine == one).ravel(), zero_division=math.nan)
            for own, mine in zip(y.numpy(), says, strict=True)
        ]
        wanted.append(np.nanmean(scores))
    counting, tally = counted(logits, y)
    assert tally.score == pytest.approx(np.mean(wanted), abs=1e-5)
    halves = [counted(logits[own], y[own])[1] for own in (slice(12), slice(12, 30))]
    assert counting.pooled(halves).said() == tally.said()
    given = counting.contributions(tally, halves[0])
    sums = {name: int(value) for name, value in given["metrics"].tensors.items()}
    found = counting.of_sums(sums | {"tested": 30})
    assert found["delivered"] == tally.said()


def test_the_baseline_is_that_of_the_best_constant_answer():
    _, y = drawn(12, seed=4)
    y[5:][y[5:] == 2] = 0  # the others lack a class
    shape = (12, 3, *y.shape[1:])
    scores = []
    for one in range(3):
        logits = torch.zeros(shape)
        logits[:, one] = 1
        scores.append(counted(logits, y)[1].score)
    assert DiceScores(3).baseline(y.numpy()) == pytest.approx(max(scores), abs=1e-5)


def test_noise_gives_a_class_without_records_hardly_any_weight():
    means = {"dice1": 0.6, "judged1": 0.8, "dice2": 0.02, "judged2": 0.001}
    assert DiceScores(3).measures(means)["dice"] == pytest.approx((0.75 + 1) / 2)
    noised = DiceScores(3, noised=True).measures(means)
    assert noised["dice"] == pytest.approx((0.6 + 0.001) / 0.801)
    assert noised["dice_class_2"] == 1
    sums = {"tested": 100, "dice1.trained": 0, "judged1.trained": -5, "judged2.trained": -1}
    counting = Segmentation().counting(3, MetricsTable(), noised=True)
    assert counting.of_sums(sums)["trained"] == {"dice": 1.0}


@pytest.mark.parametrize(
    ("y", "why"),
    [
        (torch.zeros(4, dtype=torch.int64), r"y is int64 \[N\], the job's task takes uint8 \[N,"),
        (torch.zeros(4, 3, 3), r"y is float32 \[N, 3, 3\], the job's task takes"),
        (torch.zeros(4, 3, dtype=torch.uint8), r"y is uint8 \[N, 3\], the job's task takes"),
        (
            torch.tensor([[[0, 1]], [[3, 1]]], dtype=torch.uint8),
            "record 1 has a class outside 0 to 2 somewhere, which the job's model does not know",
        ),
        (
            torch.tensor([[[0, 1]], [[1, 1]], [[-1, 1]]]),
            "record 2 has a class outside 0 to 2 somewhere, which",
        ),
    ],
)
def test_records_that_are_no_maps_of_classes(y, why):
    assert re.match(why, Segmentation().records_fault(y, 3))


def test_good_records_and_jobs():
    _, y = drawn()
    assert Segmentation().records_fault(y, 3) == ""
    assert Segmentation().records_fault(y[:0], 3) == ""
    assert Segmentation().records_fault(y.long(), 3) == ""
    assert Segmentation().records_fault(y + 253, 256) == ""
    assert Segmentation().fault(256) == ""
    assert "at most 256 classes, the model 257" in Segmentation().fault(257)
    weights = Segmentation(class_weights=(1.0, 2.0))
    assert "2 numbers, and the model 3 outputs" in weights.fault(3)


def test_a_partition_goes_by_the_largest_class_of_a_record():
    y = torch.tensor([[[0, 0, 0, 0]], [[0, 1, 2, 2]], [[0, 0, 0, 1]]], dtype=torch.uint8)
    assert Segmentation().strata(y).tolist() == [0, 2, 1]
    assert Segmentation().strata(y[:1]).tolist() == [0]
    assert Segmentation().strata(y[:0]).tolist() == []
