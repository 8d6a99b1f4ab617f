import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staddle.algorithms.partition import dirichlet
from staddle.errors import LocalError


@settings(max_examples=60, deadline=None)
@given(
    st.integers(20, 300),
    st.integers(1, 10),
    st.integers(1, 8),
    st.sampled_from([1e-3, 0.05, 0.3, 1.0, 100.0, 1e6]),
    st.integers(0, 2**40),
)
def test_every_record_exactly_once_and_no_silo_below_the_minimum(n, classes, silos, alpha, seed):
    labels = np.random.default_rng(seed).integers(0, classes, n)
    minimum = n // silos // 2
    shards = dirichlet(labels, silos, alpha, seed, minimum)
    assert len(shards) == silos
    assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(n))
    assert min(len(shard) for shard in shards) >= minimum
    assert all(np.all(np.diff(shard) > 0) for shard in shards)
    again = dirichlet(labels, silos, alpha, seed, minimum)
    assert all(np.array_equal(a, b) for a, b in zip(shards, again, strict=True))


def test_an_exactly_even_minimum_ends():
    shards = dirichlet(np.zeros(40, dtype=np.int64), 4, 0.01, 3, minimum=10)
    assert [len(shard) for shard in shards] == [10, 10, 10, 10]


def test_a_small_alpha_is_uneven_and_a_large_one_even():
    labels = np.arange(4000) % 10
    counts = lambda alpha: np.stack(  # noqa: E731
        [np.bincount(labels[shard], minlength=10) for shard in dirichlet(labels, 5, alpha, 1)]
    )
    assert (counts(1000.0) / 80).min() > 0.7
    assert (counts(0.1) == 0).mean() > 0.2
    assert not np.array_equal(
        counts(0.1), np.stack([np.bincount(labels[s], minlength=10) for s in dirichlet(labels, 5, 0.1, 2)])
    )


def test_impossible_partitions_are_refused():
    with pytest.raises(LocalError, match="at most 3 silos"):
        dirichlet(np.zeros(39, dtype=np.int64), 4, 1.0, 0)
    for alpha in (0.0, -1.0, float("nan"), float("inf"), 1e-9):
        with pytest.raises(LocalError, match="alpha"):
            dirichlet(np.zeros(400, dtype=np.int64), 4, alpha, 0)
