"""What is counted of a model on records, against counting by hand."""

import numpy as np
import pytest
import torch
from support.counted import tallied

from staddle.algorithms.tasks.class_counting import ClassCounting
from staddle.algorithms.tasks.measures import LARGEST_SCORE
from staddle.algorithms.tasks.table_counting import RIGHT

NOTHING = torch.zeros(0, dtype=torch.int64)  # marks of classes are of the logits alone


def drawn(classes, n=300, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    logits = rng.normal(size=(n, classes)) * 3
    logits[np.arange(n), labels] += 1.5
    return torch.from_numpy(logits), torch.from_numpy(labels)


@pytest.mark.parametrize("classes", [2, 5])
def test_each_record_is_where_it_belongs(classes):
    counting, (logits, labels) = ClassCounting(classes, confusion=True, bins=10), drawn(classes)
    found = tallied(counting, logits, labels, pieces=7)
    slow = np.zeros((classes, classes), np.int64)
    first = classes - counting.scored
    scores = np.zeros((counting.scored, 2, 10), np.int64)
    for row, label in zip(logits, labels, strict=True):
        slow[label, row.argmax()] += 1
        chances = torch.softmax(row, 0)
        for place, one in enumerate(range(first, classes)):
            score = float(torch.log(chances[one] / (1 - chances[one])))
            width = 2 * LARGEST_SCORE / 10
            at = min(max(int((score + LARGEST_SCORE) // width), 0), 9)
            scores[place, int(label == one), at] += 1
    assert (found.confusion == slow).all()
    assert (found.scores == scores).all()
    assert (found.by_class == [slow.diagonal(), slow.sum(1), slow.sum(0)]).all()
    assert (found.records, found.correct) == (300, slow.trace())
    assert found.baseline == slow.sum(1).max() / 300
    assert counting.scored == (1 if classes == 2 else classes)


def test_what_no_job_asks_for_is_not_there_and_tallies_compare_by_value():
    logits, labels = drawn(3)
    plain = tallied(ClassCounting(3), logits, labels)
    assert plain.asked == {}
    assert ClassCounting(3).parts() == (RIGHT,)
    assert plain == tallied(ClassCounting(3), logits, labels, pieces=4)
    assert plain != tallied(ClassCounting(3), logits.flip(0), labels)
    whole = ClassCounting(3, confusion=True, bins=4)
    one, other = tallied(whole, logits, labels), tallied(whole, logits + 1e-3, labels)
    assert one == other  # the same shift for all classes changes no score
    assert one != plain
    assert one != tallied(whole, logits * 3, labels)  # other bins alone
    nothing = tallied(whole, logits[:0], labels[:0])
    assert (nothing.records, nothing.confusion.sum(), nothing.scores.shape) == (0, 0, (3, 2, 4))


def test_scores_of_a_sure_or_a_broken_model_are_in_the_outer_bins():
    logits = torch.tensor([[0.0, 200.0], [0.0, -200.0], [float("nan")] * 2, [0.0, float("inf")]])
    places = ClassCounting(2, bins=6).marks(logits, NOTHING)["bins"]
    assert places.tolist() == [[5], [0], [0], [0]]
    many = ClassCounting(3, bins=6).marks(torch.tensor([[0.0, float("-inf"), 0.0]]), NOTHING)[
        "bins"
    ]
    assert many.tolist() == [[3, 0, 3]]  # odds of one to one are the middle


def test_marks_of_silos_at_once_are_those_of_each():
    counting, (logits, labels) = ClassCounting(4, bins=9), drawn(4, 60)
    stacked = torch.func.vmap(counting.marks)(logits.view(5, 12, 4), labels.view(5, 12))
    alone = counting.marks(logits, labels)
    for name, mark in stacked.items():
        assert torch.equal(mark.flatten(0, 1), alone[name])


def test_parts_have_a_table_per_model_and_contributions_fit_them():
    counting, data = ClassCounting(3, confusion=True, bins=4), drawn(3)
    tally = tallied(counting, *data)
    other = tallied(counting, data[0].flip(0), data[1])
    confusion, scores, right = counting.parts()
    assert (confusion.name, scores.name, right) == ("confusion", "scores", RIGHT)
    contributions = counting.contributions(tally, other)
    assert contributions.keys() == {"confusion", "scores", "metrics"}
    for part in (confusion, scores):
        assert part.exchange.schema_name == "sum.total"
        assert [spec.name for spec in part.tensors] == ["delivered", "trained"]
        for spec in part.tensors:
            value = contributions[part.name].tensors[spec.name]
            assert (tuple(value.shape), value.dtype) == (spec.shape, torch.int64)
            own = {"delivered": tally, "trained": other}[spec.name]
            assert value.tolist() == own.tables[part.name]
    counts = {name: value.item() for name, value in contributions["metrics"].tensors.items()}
    correct = {"correct.delivered": tally.correct, "correct.trained": other.correct}
    assert counts == {**correct, "tested": 300}
    assert all(value.dtype == torch.int64 for value in contributions["metrics"].tensors.values())


@pytest.mark.parametrize(("classes", "squared"), [(2, 3 + 2 + 2), (5, 3 + 2 + 2 * 5)])
def test_one_record_changes_no_more_than_the_sensitivity(classes, squared):
    """Without one record, all counts of both models together."""
    counting, (logits, labels) = ClassCounting(classes, confusion=True, bins=6), drawn(classes, 40)
    whole = tallied(counting, logits, labels)
    largest = 0
    for record in range(40):
        others = torch.arange(40) != record
        less = tallied(counting, logits[others], labels[others])
        changes = [whole.records - less.records, *[whole.correct - less.correct] * 2]
        for name in ("confusion", "scores"):
            changes += [*(whole.asked[name] - less.asked[name]).reshape(-1)] * 2
        largest = max(largest, sum(int(change) ** 2 for change in changes))
    assert largest == counting.squared_sensitivity == squared


def test_private_tables_are_bounded_on_both_sides():
    for part in ClassCounting(3, confusion=True, bins=4, noised=True).parts()[:-1]:
        assert {spec.bounds for spec in part.tensors} == {(-(2.0**40), 2.0**40)}
    assert ClassCounting(3, bins=4).parts()[0].tensors[0].bounds == (0.0, 2.0**40)


def test_tallies_pool():
    counting, (logits, labels) = ClassCounting(3, confusion=True, bins=4), drawn(3)
    halves = [tallied(counting, logits[own], labels[own]) for own in (slice(100), slice(100, 300))]
    assert counting.pooled(halves) == tallied(counting, logits, labels)
    plain = ClassCounting(3)
    alone = plain.pooled([tallied(plain, logits, labels)])
    assert alone.asked == {}
    assert alone.tables.keys() == {"by_class"}
