"""What is counted of a model on records, against counting by hand."""

import numpy as np
import pytest
import torch

from staddle.algorithms.evaluation.counting import LARGEST_SCORE, Counting, pooled


def drawn(classes, n=300, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    logits = rng.normal(size=(n, classes)) * 3
    logits[np.arange(n), labels] += 1.5
    return torch.from_numpy(logits), torch.from_numpy(labels)


def counted(counting, logits, labels, pieces=1):
    marks = counting.no_marks()
    for piece in logits.chunk(pieces):
        for name, mark in counting.marks(piece).items():
            marks[name].append(mark.numpy())
    return counting.count(marks, [piece.numpy() for piece in labels.chunk(pieces)])


@pytest.mark.parametrize("classes", [2, 5])
def test_each_record_is_where_it_belongs(classes):
    counting, (logits, labels) = Counting(classes, confusion=True, bins=10), drawn(classes)
    found = counted(counting, logits, labels, pieces=7)
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
    assert found.most_frequent == slow.sum(1).max()
    assert counting.scored == (1 if classes == 2 else classes)


def test_what_no_job_asks_for_is_not_there_and_tallies_compare_by_value():
    logits, labels = drawn(3)
    plain = counted(Counting(3), logits, labels)
    assert plain.tables == {}
    assert Counting(3).parts() == ()
    assert plain == counted(Counting(3), logits, labels, pieces=4)
    assert plain != counted(Counting(3), logits.flip(0), labels)
    whole = Counting(3, confusion=True, bins=4)
    one, other = counted(whole, logits, labels), counted(whole, logits + 1e-3, labels)
    assert one == other  # the same shift for all classes changes no score
    assert one != plain
    assert one != counted(whole, logits * 3, labels)  # other bins alone
    nothing = counted(whole, logits[:0], labels[:0])
    assert (nothing.records, nothing.confusion.sum(), nothing.scores.shape) == (0, 0, (3, 2, 4))


def test_scores_of_a_sure_or_a_broken_model_are_in_the_outer_bins():
    logits = torch.tensor([[0.0, 200.0], [0.0, -200.0], [float("nan")] * 2, [0.0, float("inf")]])
    places = Counting(2, bins=6).marks(logits)["bins"]
    assert places.tolist() == [[5], [0], [0], [0]]
    many = Counting(3, bins=6).marks(torch.tensor([[0.0, float("-inf"), 0.0]]))["bins"]
    assert many.tolist() == [[3, 0, 3]]  # odds of one to one are the middle


def test_marks_of_silos_at_once_are_those_of_each():
    counting, (logits, _) = Counting(4, bins=9), drawn(4, 60)
    stacked = torch.func.vmap(counting.marks)(logits.view(5, 12, 4))
    alone = counting.marks(logits)
    for name, mark in stacked.items():
        assert torch.equal(mark.flatten(0, 1), alone[name])


def test_parts_have_a_table_per_model_and_contributions_fit_them():
    counting, data = Counting(3, confusion=True, bins=4), drawn(3)
    tally = counted(counting, *data)
    confusion, scores = counting.parts()
    assert (confusion.name, scores.name) == ("confusion", "scores")
    contributions = counting.contributions(tally, tally)
    for part in (confusion, scores):
        assert part.exchange.schema_name == "sum.total"
        assert [spec.name for spec in part.tensors] == ["delivered", "trained"]
        for spec in part.tensors:
            value = contributions[part.name].tensors[spec.name]
            assert (tuple(value.shape), value.dtype) == (spec.shape, torch.int64)


@pytest.mark.parametrize(("classes", "squared"), [(2, 3 + 2 + 2), (5, 3 + 2 + 2 * 5)])
def test_one_record_changes_no_more_than_the_sensitivity(classes, squared):
    """Without one record, all counts of both models together."""
    counting, (logits, labels) = Counting(classes, confusion=True, bins=6), drawn(classes, 40)
    whole = counted(counting, logits, labels)
    largest = 0
    for record in range(40):
        others = torch.arange(40) != record
        less = counted(counting, logits[others], labels[others])
        changes = [whole.records - less.records, *[whole.correct - less.correct] * 2]
        for name in ("confusion", "scores"):
            changes += [*(whole.tables[name] - less.tables[name]).reshape(-1)] * 2
        largest = max(largest, sum(int(change) ** 2 for change in changes))
    assert largest == counting.squared_sensitivity == squared


def test_private_tables_are_bounded_on_both_sides():
    for part in Counting(3, confusion=True, bins=4, noised=True).parts():
        assert {spec.bounds for spec in part.tensors} == {(-(2.0**40), 2.0**40)}
    assert Counting(3, bins=4).parts()[0].tensors[0].bounds == (0.0, 2.0**40)


def test_tallies_pool():
    counting, (logits, labels) = Counting(3, confusion=True, bins=4), drawn(3)
    halves = [counted(counting, logits[own], labels[own]) for own in (slice(100), slice(100, 300))]
    assert pooled(halves) == counted(counting, logits, labels)
    alone = pooled([counted(Counting(3), logits, labels)])
    assert alone.tables == {}
