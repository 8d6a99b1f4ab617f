"""Measures from counts against scikit-learn's on the records themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn import metrics as sk

from staddle.algorithms.tasks import measures
from staddle.algorithms.tasks.class_counting import ClassCounting
from staddle.algorithms.tasks.counting import flattened

TWO = ClassCounting(2)


def silo(classes, seed, n=120, sure=2.0):
    """Logits [n, C] and labels [n] of a silo whose classes are uneven."""
    rng = np.random.default_rng(seed)
    labels = np.minimum(rng.geometric(0.5, n) - 1, classes - 1)
    logits = rng.normal(size=(n, classes)) * sure
    logits[np.arange(n), labels] += 1.0
    return torch.from_numpy(logits), torch.from_numpy(labels)


def tally(counting, logits, labels):
    marks = {name: [mark.numpy()] for name, mark in counting.marks(logits, labels).items()}
    return counting.count(marks, [labels.numpy()])


def of_one(measure, scores):
    """A measure of one class's histogram; None where it has none."""
    rows = measure(scores[None])
    return measures.Bounded(*map(float, rows[0])) if len(rows) else None


@pytest.fixture(params=[2, 4], ids=["two", "four"])
def pooled(request):
    """The tallies of three silos, summed, and all their records."""
    counting = ClassCounting(request.param, confusion=True, bins=64)
    silos = [silo(request.param, seed) for seed in range(3)]
    tallies = [tally(counting, *own) for own in silos]
    logits, labels = (torch.cat(column) for column in zip(*silos, strict=True))
    chances = torch.softmax(logits, 1).numpy()
    sums = {name: sum(t.asked[name] for t in tallies) for name in ("confusion", "scores")}
    return counting, sums, sum(t.by_class for t in tallies), labels.numpy(), chances


def test_measures_by_class_are_those_of_the_pooled_records(pooled):
    _, sums, by_class, labels, chances = pooled
    called = chances.argmax(1)
    assert (sums["confusion"] == sk.confusion_matrix(labels, called)).all()
    assert measures.balanced_accuracy(by_class) == pytest.approx(
        sk.balanced_accuracy_score(labels, called)
    )
    said = sk.classification_report(labels, called, output_dict=True, zero_division=0)
    for number, one in enumerate(measures.of_classes(by_class)):
        row = said[str(number)]
        assert one.records == row["support"]
        assert one.sensitivity == pytest.approx(row["recall"])
        assert one.precision == pytest.approx(row["precision"])
        assert one.f1 == pytest.approx(row["f1-score"])
        others = labels != number
        assert one.specificity == pytest.approx((called[others] != number).mean())


def test_areas_are_within_their_bounds_and_the_width_of_a_bin(pooled):
    counting, sums, _, labels, chances = pooled
    first = counting.classes - counting.scored
    for number, scores in enumerate(sums["scores"], first):
        own, score = labels == number, chances[:, number]
        for measure, exact in (
            (measures.auroc, sk.roc_auc_score(own, score)),
            (measures.auprc, sk.average_precision_score(own, score)),
        ):
            found = of_one(measure, scores)
            assert found.least <= exact <= found.most
            assert found.least <= found.value <= found.most
            assert abs(found.value - exact) < 1 / counting.bins


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 30)), min_size=2, max_size=40),
    st.randoms(use_true_random=False),
)
def test_bounds_hold_for_any_order_within_bins_and_are_reached(records, random):
    """Scores within a bin in any order, the best, and the worst."""
    own = np.array([positive for positive, _ in records])
    bins = np.array([place // 10 for _, place in records])
    table = np.zeros((2, 4), np.int64)
    np.add.at(table, (own.astype(int), bins), 1)
    areas = {measures.auroc: sk.roc_auc_score, measures.auprc: sk.average_precision_score}
    orders = {
        "any": [random.random() for _ in records],
        "best": own * 0.5,
        "worst": ~own * 0.5,
    }
    for measure, exact in areas.items():
        found = of_one(measure, table)
        if not own.any() or (own.all() and measure is measures.auroc):
            assert found is None
            continue
        reached = {name: exact(own, bins + np.array(order) * 0.9) for name, order in orders.items()}
        assert found.least - 1e-12 <= reached["any"] <= found.most + 1e-12
        if measure is measures.auroc:
            assert reached["worst"] == pytest.approx(found.least)
            assert reached["best"] == pytest.approx(found.most)
        # Ties are one threshold.
        assert exact(own, bins) == pytest.approx(found.value)


def test_average_precision_is_bounded_by_the_orders_of_one_bin():
    """Two of the class and three others in one bin, above one of each: worked out by hand."""
    scores = np.array([[1, 3], [1, 2]])
    found = of_one(measures.auprc, scores)
    assert found.most == pytest.approx((1 / 1 + 2 / 2 + 3 / 6) / 3)
    assert found.least == pytest.approx((1 / 4 + 2 / 5 + 3 / 7) / 3)
    assert found.value == pytest.approx((2 * 2 / 5 + 3 / 7) / 3)


def test_calibration_is_that_of_the_pooled_records(pooled):
    counting, sums, _, labels, chances = pooled
    first = counting.classes - counting.scored
    for number, scores in enumerate(sums["scores"], first):
        own, score = labels == number, chances[:, number]
        curve, error = measures.calibration(scores), 0.0
        assert sum(one.records for one in curve) == len(labels)
        for one in curve:
            within = (score >= one.least - 1e-9) & (score < one.most + 1e-9)
            assert within.sum() == one.records
            assert own[within].mean() == pytest.approx(one.observed)
            error += abs(own[within].mean() - score[within].mean()) * one.records / len(labels)
        found = of_one(measures.calibration_error, scores)
        assert found.least <= error <= found.most
        assert found.most - found.least < 1 / 16  # 64 bins: a probability of 0.06 in the middle


def test_a_share_between_the_edges_of_its_bin_may_be_no_error():
    """Probabilities of a half to one, three in four observed."""
    found = of_one(measures.calibration_error, np.array([[0, 2], [0, 6]]))
    assert (found.value, found.least, found.most) == (0, 0, 0.25)
    low = of_one(measures.calibration_error, np.array([[0, 6], [0, 2]]))
    assert (low.value, low.least, low.most) == (0.5, 0.25, 0.75)


def test_a_model_that_calls_all_patients_ill_shows_what_it_is():
    """93 of 100 ill: accuracy 93 %."""
    sums = {
        "tested": 100,
        "correct.delivered": 93,
        "correct.trained": 93,
        "confusion.delivered": [[0, 7], [0, 93]],
        "confusion.trained": [[0, 7], [0, 93]],
    }
    found = TWO.of_sums(sums)["trained"]
    assert (found["accuracy"], found["balanced_accuracy"], found["majority"]) == (0.93, 0.5, 0.93)
    healthy, ill = found["classes"]
    assert (healthy["sensitivity"], healthy["specificity"], healthy["precision"]) == (0, 1, None)
    assert (ill["sensitivity"], ill["specificity"], healthy["f1"]) == (1, 0, 0)
    numbers = flattened(TWO.of_sums(sums))
    assert numbers["balanced_accuracy.trained"] == 0.5
    assert "classes.trained" not in numbers


def test_sums_without_records_say_nothing_and_noisy_ones_raise_nothing():
    assert TWO.of_sums({}) == {}
    assert TWO.of_sums({"tested": 0, "correct.trained": 0, "correct.delivered": 0}) == {}
    noisy = {"tested": 3, "correct.delivered": 3, "correct.trained": 0}
    zeros = {f"confusion.{model}": [[0, 0], [0, 0]] for model in ("delivered", "trained")}
    scores = {f"scores.{model}": [[[0, 2], [0, 0]]] for model in ("delivered", "trained")}
    found = TWO.of_sums({**noisy, **zeros, **scores})
    assert "balanced_accuracy" not in found["trained"]
    assert "auroc" not in found["trained"]
    assert found["trained"]["calibration_error"]["most"] <= 1


def test_means_over_classes_are_of_those_that_have_one():
    one, other = np.array([[2, 0], [0, 2]]), np.array([[4, 0], [0, 0]])
    found = measures.of_scores(np.stack([one, other]))
    assert found["auroc"] == {"value": 1.0, "least": 1.0, "most": 1.0}
    assert found["auprc"]["value"] == 1.0


def test_noise_of_many_cells_adds_up_to_little():
    """Eight silos of 380 records, ten classes, a perfect model: cells set to zero one by one would
    make it 13 %."""
    rng, scale, total = np.random.default_rng(0), 20 * 5**0.5, np.zeros((10, 10), np.int64)
    for _ in range(8):
        noise = np.round(rng.normal(size=(10, 10)) * scale).astype(np.int64)
        total += np.eye(10, dtype=np.int64) * 38 + noise
    sums = {"tested": 3040, "correct.trained": 3040, "correct.delivered": 3040}
    found = ClassCounting(10).of_sums({**sums, "confusion.trained": total.tolist()})["trained"]
    assert found["balanced_accuracy"] > 0.6
    assert 0.05 < found["majority"] < 0.4


def test_sums_of_counts_that_no_silos_have_stay_within_64_bits():
    table = [[2**62, 0, 0], [0, 2**62, 0], [0, 0, -1]]
    found = ClassCounting(3).of_sums({"tested": 1, "confusion.trained": table})["trained"]
    assert found["majority"] == 0.5


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_sums_raise_an_error_or_say_what_is_no_share(data):
    """As noise, a hostile silo or another release may leave them."""
    number = st.integers(-(2**62), 2**62) | st.integers(-3, 3)
    cells = lambda *shape: data.draw(hnp.arrays(np.int64, shape, elements=number)).tolist()
    sums = {"tested": data.draw(number)}
    for model in ("delivered", "trained"):
        sums[f"correct.{model}"] = data.draw(number)
        sums[f"confusion.{model}"] = cells(3, 3)
        sums[f"scores.{model}"] = cells(3, 2, 4)
    found = flattened(ClassCounting(3).of_sums(sums))
    assert all(0 <= value <= 1 for value in found.values())
    if sums["tested"] > 0:
        assert "accuracy.trained" in found
