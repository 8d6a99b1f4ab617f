import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused

from staddle.algorithms.partition.draw import dirichlet


@settings(max_examples=60)
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
    counts = lambda alpha: np.stack(
        [np.bincount(labels[shard], minlength=10) for shard in dirichlet(labels, 5, alpha, 1)]
    )
    assert (counts(1000.0) / 80).min() > 0.7
    assert (counts(0.1) == 0).mean() > 0.2
    assert not np.array_equal(
        counts(0.1),
        np.stack([np.bincount(labels[s], minlength=10) for s in dirichlet(labels, 5, 0.1, 2)]),
    )


def test_impossible_partitions_are_refused():
    with refused("at most 3 silos"):
        dirichlet(np.zeros(39, dtype=np.int64), 4, 1.0, 0)
    for alpha in (0.0, -1.0, float("nan"), float("inf"), 1e-9):
        with refused("alpha"):
            dirichlet(np.zeros(400, dtype=np.int64), 4, alpha, 0)


def test_balanced_a_silo_with_an_even_share_gets_none_of_the_classes_that_follow():
    labels = np.repeat(np.arange(10), 600)
    parts = dirichlet(labels, 10, 0.1, 3, 0, balanced=True)
    assert sorted(np.concatenate(parts).tolist()) == list(range(6000))
    # [silos, classes]
    counts = np.stack([np.bincount(labels[part], minlength=10) for part in parts])
    before = np.cumsum(counts, axis=1) - counts
    assert (counts[before >= 600] == 0).all()
    assert (before >= 600).any()
    plain = np.stack(
        [np.bincount(labels[part], minlength=10) for part in dirichlet(labels, 10, 0.1, 3, 0)]
    )
    # the first class is drawn alike: nobody has a share yet
    assert (counts[:, 0] == plain[:, 0]).all()
    assert counts.sum(1).std() < plain.sum(1).std()


def test_balanced_sizes_are_those_that_pfedsim_reports():
    """Its Table 4: CIFAR-10 over 100 clients has a standard deviation of sizes of 487 at alpha 0.1,
    and 170 at 0.5.
    """
    labels = np.repeat(np.arange(10), 6000)
    for alpha, published in ((0.1, 487), (0.5, 170)):
        sizes = [
            [len(part) for part in dirichlet(labels, 100, alpha, seed, balanced=True)]
            for seed in range(3)
        ]
        plain = [[len(part) for part in dirichlet(labels, 100, alpha, seed)] for seed in range(3)]
        assert np.mean([np.std(one) for one in sizes]) == pytest.approx(published, rel=0.15)
        assert np.mean([np.std(one) for one in plain]) > 1.15 * published


def test_balanced_with_shares_of_nothing():
    """At alpha 0.001 one silo draws all of a class, and those that are below an even share draw
    exactly 0.
    """
    labels = np.repeat(np.arange(20), 5)
    parts = dirichlet(labels, 4, 0.001, 1, 0, balanced=True)
    assert sorted(np.concatenate(parts).tolist()) == list(range(100))
    assert max(len(part) for part in parts) < 25 + 5
