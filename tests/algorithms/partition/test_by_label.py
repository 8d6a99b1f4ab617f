import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused

from staddle.algorithms.partition.by_label import classes_each, group_mixtures, label_groups, shards
from staddle.algorithms.partition.draw import leftover

DIGITS = np.arange(2000) % 10
PPFL = ((0, 6), (5, 8), (2, 3, 9), (1, 4, 7))


def same(first, second):
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def whole(parts, records, left=()):
    """Each record once, in ascending order within a silo; the others are those left over."""
    assert np.array_equal(
        np.sort(np.concatenate([*parts, np.array(left, np.int64)])), np.arange(records)
    )
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    assert np.array_equal(leftover(parts, records), np.sort(left))


@settings(max_examples=50)
@given(
    st.integers(1, 300),
    st.integers(1, 10),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(0, 2**40),
)
def test_shards_are_equal_and_hold_neighbours_of_the_sorted_records(n, classes, silos, each, seed):
    labels = np.random.default_rng(seed).integers(0, classes, n)
    if silos * each > n:
        with refused(f"at most {n // each} silos"):
            shards(labels, silos, each, seed, 0)
        return
    parts = shards(labels, silos, each, seed, 0)
    whole(parts, n)
    assert max(map(len, parts)) - min(map(len, parts)) <= each
    cuts = silos * each - 1
    assert sum(len(np.unique(labels[part])) for part in parts) <= len(np.unique(labels)) + cuts
    assert same(parts, shards(labels, silos, each, seed, 0))


def test_shards_differ_by_seed_and_hold_few_classes():
    parts = shards(DIGITS, 50, 2, 1)
    assert {len(part) for part in parts} == {40}
    assert max(len(np.unique(DIGITS[part])) for part in parts) == 2
    assert not same(parts, shards(DIGITS, 50, 2, 2))
    # dealt at random, not in their order
    assert len({tuple(np.unique(DIGITS[part])) for part in parts}) > 10


@settings(max_examples=50)
@given(st.integers(1, 10), st.integers(1, 12), st.data(), st.integers(0, 2**40))
def test_each_silo_holds_so_many_classes_and_each_class_is_held_equally_often(
    classes, silos, data, seed
):
    each = data.draw(st.integers(1, classes))
    # not from 0
    labels = np.random.default_rng(seed).permutation(np.arange(classes * 40) % classes) + 3
    parts = classes_each(labels, silos, each, seed, 0)
    held = np.array([np.bincount(labels[part], minlength=classes + 3)[3:] for part in parts])
    assert ((held > 0).sum(1) == each).all()
    assert np.ptp((held > 0).sum(0)) <= 1
    free = np.flatnonzero((held > 0).sum(0) == 0)
    assert len(free) == max(classes - silos * each, 0)
    whole(parts, len(labels), np.flatnonzero(np.isin(labels - 3, free)))
    assert same(parts, classes_each(labels, silos, each, seed, 0))


def test_the_classes_of_a_silo_are_drawn():
    held = {
        tuple(np.unique(DIGITS[classes_each(DIGITS, 10, 2, seed)[0]]).tolist())
        for seed in range(10)
    }
    assert len(held) > 5


def test_two_holders_of_a_class_share_it_unevenly_within_the_bounds():
    parts = classes_each(DIGITS, 10, 2, 1)
    held = np.array([np.bincount(DIGITS[part], minlength=10) for part in parts])
    shares = np.sort(held, 0)[-1] / 200
    assert shares.max() <= 0.6 + 1 / 200  # 0.6 / (0.4 + 0.6), and rounding
    assert shares.max() > 0.52
    assert len(np.unique(held[held > 0])) > 5


def test_label_groups_are_kept_and_silos_spread_over_them():
    parts = label_groups(DIGITS, 10, PPFL, 1)
    whole(parts, 2000)
    sets = [tuple(np.unique(DIGITS[part]).tolist()) for part in parts]
    assert [sets.count(group) for group in PPFL] == [3, 3, 2, 2]
    assert not same(parts, label_groups(DIGITS, 10, PPFL, 2))


def test_the_odd_records_of_labels_do_not_all_go_to_the_first_silos():
    labels = np.arange(2060) % 20  # 103 a label
    parts = label_groups(labels, 4, [range(20)], 1)
    assert min(map(len, parts)) > 503  # in order, the last silo would have 25 of each label


def test_a_label_of_several_groups_is_shared_and_one_of_none_left_over():
    parts = label_groups(DIGITS, 4, [range(5), range(5), range(2, 7), range(5, 9)], 1)
    whole(parts, 2000, np.flatnonzero(DIGITS == 9))
    held = np.array([np.bincount(DIGITS[part], minlength=10) for part in parts])
    assert held[:, 0].tolist() == [100, 100, 0, 0]
    assert sorted(held[:3, 3].tolist()) == [66, 67, 67]
    assert held[:, 5].tolist() == [0, 0, 100, 100]


@settings(max_examples=30)
@given(st.integers(1, 12), st.sampled_from([1e-3, 0.2, 1.0, 1e4]), st.integers(0, 2**40))
def test_mixtures_of_groups(silos, alpha, seed):
    parts = group_mixtures(DIGITS, silos, PPFL[:3], alpha, seed)
    whole(parts, 2000, np.flatnonzero(np.isin(DIGITS, PPFL[3])))
    assert min(map(len, parts)) >= 10


def test_mixtures_spread_groups_and_not_labels():
    parts = group_mixtures(DIGITS, 5, PPFL, 0.5, 3)
    held = np.array([np.bincount(DIGITS[part], minlength=10) for part in parts])
    for group in PPFL:
        # of 200 a label: the labels of a group go together
        assert np.ptp(held[:, group], 1).max() < 50
    assert np.ptp(held[:, [group[0] for group in PPFL]], 1).max() > 100


@pytest.mark.parametrize(
    ("draw", "text"),
    [
        (lambda: shards(DIGITS, 10, 0, 0), "each = 0"),
        (lambda: shards(DIGITS, 0, 2, 0), "silos = 0"),
        (lambda: shards(np.zeros(23, np.int64), 2, 5, 0, 11),
            "of 2 gets 10 records, the minimum is 11"),
        (lambda: shards(np.zeros(23, np.int64), 4, 3, 0, 6), "at most 3 silos"),
        (lambda: classes_each(DIGITS, 10, 11, 0), "each = 11 of 10 classes; give 1 to 10"),
        (lambda: classes_each(DIGITS, 10, 2, 0, 199), "records, the minimum is 199"),
        (lambda: classes_each(DIGITS, 10, 2, 0, 201), "at most 9 silos"),
        (lambda: label_groups(DIGITS, 3, PPFL, 0), "at least 4 silos"),
        (lambda: label_groups(DIGITS, 4, [], 0), "no group"),
        (lambda: label_groups(DIGITS, 4, [[]], 0), "no label"),
        (lambda: label_groups(DIGITS, 4, [[1], [10, 2]], 0),
            r"unknown labels \[10\]; the records have 0 to 9"),
        (lambda: label_groups(DIGITS, 5, [[0], [1]], 0, 67),
            "silo 2 of 5 gets 66 records, the minimum is 67"),
        (lambda: group_mixtures(DIGITS, 4, [[0, 1], [1, 2]], 1.0, 0),
            r"group \[1, 2\] is in an earlier group"),
        (lambda: group_mixtures(DIGITS, 4, [[0, 1]], 0.0, 0), "alpha = 0.0"),
        (lambda: group_mixtures(DIGITS, 4, [[0]], 1.0, 0, 51),
            "200 records do not give 4 silos 51 each"),
    ],
)  # fmt: skip
def test_impossible_partitions_are_refused_with_numbers(draw, text):
    with refused(text):
        draw()
