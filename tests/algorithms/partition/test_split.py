import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused

from staddle.algorithms.partition.by_label import classes_each
from staddle.algorithms.partition.draw import dirichlet
from staddle.algorithms.partition.split import RATIOS, apart, merged

# 1,000 official training records, 200 test records
LABELS = np.random.default_rng(5).integers(0, 10, 1200)


def named(parts):
    return {f"silo-{number}": part for number, part in enumerate(parts)}


@settings(max_examples=50)
@given(st.integers(3, 200), st.sampled_from(list(RATIOS)), st.integers(0, 2**40))
def test_a_silos_records_are_on_one_side_each_in_the_ratio(n, ratio, seed):
    part = np.sort(np.random.default_rng(seed).permutation(500)[:n])
    sides = merged({"a": part, "b": part}, ratio, seed)
    own = sides["a"]
    assert np.array_equal(own.all(), part)
    weights = RATIOS[ratio]
    for side, weight in zip((own.train, own.validation, own.test), weights, strict=True):
        assert np.all(np.diff(side) > 0)
        assert abs(len(side) - n * weight / sum(weights)) < 2
        assert (len(side) > 0) == (weight > 0)
    # whoever else there is
    assert np.array_equal(own.test, merged({"a": part}, ratio, seed)["a"].test)
    assert n < 20 or not np.array_equal(own.test, sides["b"].test)
    assert n < 20 or not np.array_equal(own.test, merged({"a": part}, ratio, seed + 1)["a"].test)


def test_the_ratios_in_numbers():
    sizes = {ratio: merged({"a": np.arange(40)}, ratio, 1)["a"] for ratio in RATIOS}
    assert {
        ratio: (len(s.train), len(s.validation), len(s.test)) for ratio, s in sizes.items()
    } == {"50/50": (20, 0, 20), "75/25": (30, 0, 10), "80/20": (32, 0, 8), "8:1:1": (32, 4, 4)}


@settings(max_examples=30)
@given(st.integers(1, 6), st.sampled_from([0.3, 5.0]), st.booleans(), st.integers(0, 2**40))
def test_official_test_records_are_dealt_as_the_training_records(silos, alpha, validation, seed):
    parts = named(dirichlet(LABELS[:1000], silos, alpha, seed, 60))
    sides = apart(parts, LABELS, 1000, seed, validation)
    assert np.array_equal(
        np.sort(np.concatenate([own.all() for own in sides.values()])), np.arange(1200)
    )
    for silo, own in sides.items():
        assert np.array_equal(np.sort(np.concatenate([own.train, own.validation])), parts[silo])
        assert len(own.validation) == (len(parts[silo]) // 9 if validation else 0)
        assert own.test.min() >= 1000
        for label in range(10):
            share = np.mean(np.isin(np.flatnonzero(LABELS[:1000] == label), parts[silo]))
            there = np.count_nonzero(LABELS[1000:] == label)
            assert abs(np.count_nonzero(LABELS[own.test] == label) - share * there) <= 1
    again = apart(parts, LABELS, 1000, seed, validation)
    assert all(np.array_equal(sides[silo].test, again[silo].test) for silo in sides)


def test_a_silo_is_tested_on_the_classes_it_trains_on_and_others_are_left_over():
    parts = named(classes_each(LABELS[:1000], 4, 2, 1))
    sides = apart(parts, LABELS, 1000, 1)
    for own in sides.values():
        assert set(LABELS[own.test]) == set(LABELS[own.train])
    tested = np.concatenate([own.test for own in sides.values()])
    trained = np.unique(LABELS[np.concatenate(list(parts.values()))])
    assert np.array_equal(np.sort(tested), 1000 + np.flatnonzero(np.isin(LABELS[1000:], trained)))
    assert len(tested) < 200


def test_silos_with_few_test_records_of_each_class_have_some_of_several():
    # about even in every class
    parts = named(np.array_split(np.argsort(np.arange(1000) % 97, kind="stable"), 40))
    sides = apart(parts, LABELS, 1000, 1)  # 5 test records a silo, half a record a class
    sizes = [len(own.test) for own in sides.values()]
    assert min(sizes) >= 1
    assert max(sizes) <= 11


@pytest.mark.parametrize(
    ("draw", "text"),
    [
        (lambda: merged({"a": np.arange(2)}, "8:1:1", 0),
            "silo a has 2 records for 3 sides; raise the minimum to 3"),
        (lambda: apart({"a": np.arange(5)}, np.zeros(5, np.int64), 5, 0),
            "5 training records of 5 in all"),
        (lambda: apart({"a": np.arange(5)}, np.zeros(5, np.int64), 4, 0), "beyond 4"),
        (lambda: apart({"a": np.arange(2), "b": np.arange(2, 4)}, np.array([0, 0, 1, 1, 0]), 4, 0),
            r"1 test records leave silos \['b'\] none"),
        (lambda: apart({"a": np.arange(1)}, np.zeros(3, np.int64), 2, 0, validation=True),
            "1 records for 2 sides"),
    ],
)  # fmt: skip
def test_impossible_splits_are_refused_with_numbers(draw, text):
    with refused(text):
        draw()


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 12), min_size=30, max_size=120),
    st.sampled_from(list(RATIOS)),
    st.integers(0, 2**40),
)
def test_records_of_a_group_are_on_one_side_near_the_ratio(numbers, ratio, seed):
    part = np.arange(5, 5 + len(numbers))
    groups = ["before"] * 5 + [f"window-{number}" for number in numbers]
    weights, largest = RATIOS[ratio], max(map(groups.count, set(groups[5:])))
    if len(set(numbers)) < 3:
        return
    own = merged({"a": part}, ratio, seed, groups)["a"]
    assert np.array_equal(own.all(), part)
    sides = [{groups[index] for index in side} for side in (own.train, own.validation, own.test)]
    assert sum(map(len, sides)) == len(set(numbers))
    for names, side, weight in zip(
        sides, (own.train, own.validation, own.test), weights, strict=True
    ):
        assert (len(names) > 0) == (weight > 0)
        assert (
            len(names) <= 1 or abs(len(side) - len(part) * weight / sum(weights)) < 2 * largest + 2
        )


def test_groups_of_one_record_are_split_as_without_groups():
    part = np.arange(0, 90, 2)
    groups = [f"{index:03}" for index in range(90)]
    for ratio in RATIOS:
        plain = merged({"a": part}, ratio, 3)["a"]
        grouped = merged({"a": part}, ratio, 3, groups)["a"]
        assert np.array_equal(plain.train, grouped.train)
        assert np.array_equal(plain.test, grouped.test)
    with refused("silo a has 2 groups of records for 3 sides"):
        merged({"a": part}, "8:1:1", 3, [str(index > 50) for index in range(90)])
