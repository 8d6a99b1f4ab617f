import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused

from staddle.algorithms.partition.by_source import by_column, by_source
from staddle.algorithms.partition.draw import leftover

SOURCES = ["mnist", "usps", "mnist", "svhn"] * 50


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from("abc"), min_size=3, max_size=80),
    st.integers(0, 2**40),
    st.integers(1, 4),
)
def test_silos_hold_one_source_each(drawn, seed, count):
    sources = [*drawn, *"aaaabbbb"]
    parts = by_source(sources, {"b": 1, "a": count}, seed, 1)
    assert list(parts) == ["b-0", *(f"a-{number}" for number in range(count))]
    for name, part in parts.items():
        assert {sources[index] for index in part} == {name[0]}
        assert np.all(np.diff(part) > 0)
    of_a = [part for name, part in parts.items() if name[0] == "a"]
    assert np.ptp([len(part) for part in of_a]) <= 1
    left = leftover(list(parts.values()), len(sources))
    assert {sources[index] for index in left} <= {"c"}
    assert len(left) + sum(map(len, parts.values())) == len(sources)


def test_a_further_source_and_another_seed():
    few, more = by_source(SOURCES, {"mnist": 4}, 1), by_source(SOURCES, {"usps": 2, "mnist": 4}, 1)
    assert all(np.array_equal(few[name], more[name]) for name in few)
    assert not np.array_equal(few["mnist-0"], by_source(SOURCES, {"mnist": 4}, 2)["mnist-0"])


@pytest.mark.parametrize(
    ("silos", "text"),
    [
        ({}, "no source"),
        ({"photo": 1}, r"source 'photo'; known: \['mnist', 'svhn', 'usps'\]"),
        ({"usps": 0}, "0 silos for source 'usps'"),
        ({"usps": 6}, "50 records do not give 6 silos 10 each; take at most 5 silos"),
    ],
)
def test_impossible_sources_are_refused(silos, text):
    with refused(text):
        by_source(SOURCES, silos, 0)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=60))
def test_one_silo_a_value(values):
    parts = by_column(values, 1)
    assert list(parts) == [str(value) for value in sorted(set(values))]  # 10 after 9
    assert all(
        part.tolist() == [i for i, own in enumerate(values) if str(own) == name]
        for name, part in parts.items()
    )


def test_small_values_and_columns_of_no_names_are_refused():
    assert list(by_column(["va", "cleveland"] * 10)) == ["cleveland", "va"]
    with refused(r"1 of 2 values have fewer than 10 records: \{'va': 9\}"):
        by_column(["cleveland"] * 10 + ["va"] * 9)
    for column in ([], [1.5] * 20, ["1", 1] * 10, [None] * 20):
        with refused("column is empty, or not"):
            by_column(column)
