"""The arrays of peers were written down from their own code, at the commits that the module names,
with these labels and seeds.
"""

import numpy as np
import pytest
from support.refusals import refused

from staddle.algorithms.partition import conventions
from staddle.algorithms.partition.conventions import fl_bench, hsu, pfllib, ppfl

LABELS = np.arange(40) ** 2 % 11 % 3
GAP = np.arange(40) ** 2 % 11 % 4  # no record is of class 2
EVEN = np.repeat(np.arange(10), 600)


def listed(parts):
    return [part.tolist() for part in parts]


def held(parts, labels):
    """Records by silo and class."""
    return np.stack([np.bincount(labels[part], minlength=10) for part in parts])


def test_pfllib_draws_the_arrays_of_its_code():
    # The second draw: the first left a silo below 6, as N / 2n is.
    assert listed(pfllib(LABELS, 3, 0.3, 1)) == [
        [4, 7, 15, 18, 26, 29, 31, 37],
        [1, 2, 3, 5, 9, 10, 12, 13, 20, 21, 22, 23, 24, 27, 32, 34, 35, 39],
        [0, 6, 8, 11, 14, 16, 17, 19, 25, 28, 30, 33, 36, 38],
    ]
    assert min(map(len, pfllib(LABELS, 3, 0.3, 1, 0))) < 6


def test_fl_bench_draws_the_arrays_of_its_code():
    assert listed(fl_bench(GAP, 3, 0.3, 1, 8)) == [
        [4, 14, 15, 18, 20, 21, 25, 26, 30, 37],
        [0, 1, 2, 7, 8, 9, 12, 13, 22, 23, 24, 29, 34],
        [3, 5, 6, 10, 11, 16, 17, 19, 27, 28, 31, 32, 33, 35, 36, 38, 39],
    ]
    assert min(map(len, fl_bench(EVEN, 60, 0.3, 1))) >= 10


def test_numbers_of_a_draw_do_not_depend_on_the_release_of_numpy():
    """These are of numpy 2.4. Since 2.5 it also draws for no records and for shares of 0."""
    rng = np.random.RandomState(7)
    found = [
        conventions._multinomial(rng, count, np.array(shares)).tolist()
        for count, shares in (
            (0, [0.2, 0.3, 0.5]), (9, [0.0, 0.4, 0.6]), (500, [0.7, 0.3, 0.0]), (1, [0.9, 0.1]),
        )
    ]  # fmt: skip
    assert found == [[0, 0, 0], [0, 2, 7], [342, 158, 0], [1, 0]]
    assert rng.random_sample() == 0.49988250082555996
    # Where all is positive, numpy's own is the same.
    ours, theirs = np.random.RandomState(3), np.random.RandomState(3)
    for count in (1, 4, 30, 4000):
        shares = ours.dirichlet([0.5] * 6)
        theirs.dirichlet([0.5] * 6)
        assert np.array_equal(
            conventions._multinomial(ours, count, shares), theirs.multinomial(count, shares)
        )


def test_ppfl_draws_the_arrays_of_its_code():
    assert listed(ppfl(GAP, 3, 0.3, 2, clusters=3))[1:] == [
        [0, 2, 5, 6, 9, 11, 15, 18, 21, 24, 27, 28, 29, 30, 31, 38],
        [22],
    ]
    assert listed(ppfl(LABELS, 3, 0.3, 6, clusters=2)) == [
        [0, 1, 2, 5, 9, 10, 12, 13, 15, 18, 20, 21, 23, 25, 28, 31, 32, 34, 35],
        [4, 11, 14, 16, 27, 37],
        [3, 6, 7, 8, 17, 19, 22, 24, 26, 29, 30, 33, 36, 38, 39],
    ]
    assert list(map(len, ppfl(LABELS, 3, 0.3, 3, clusters=2))) == [0, 0, 40]
    assert min(map(len, ppfl(LABELS, 3, 0.3, 3, 2, clusters=2))) >= 2
    # Classes of one cluster are shared alike; left out, each class is its own.
    shares = held(ppfl(EVEN, 5, 0.5, 1, clusters=1), EVEN) / 600
    assert np.ptp(shares, axis=1).max() < 0.15
    assert np.ptp(held(ppfl(EVEN, 5, 0.5, 1), EVEN) / 600, axis=1).max() > 0.3


def test_hsu_gives_all_silos_equally_many_records_of_their_own_classes():
    parts = hsu(EVEN, 7, 1.0, 3)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(6000))
    assert list(map(len, parts)) == [858, 857, 857, 857, 857, 857, 857]
    assert listed(hsu(EVEN, 7, 1.0, 3)) == listed(parts) != listed(hsu(EVEN, 7, 1.0, 4))


@pytest.mark.parametrize("alpha", [0.5, 20.0])
def test_hsu_scales_its_concentration_by_the_shares_of_classes(alpha):
    """The variance of q_c ~ Dir(α p) is p_c (1 − p_c) / (α + 1), while no class has run out."""
    labels = np.repeat([0, 1, 2], [2000, 6000, 12_000])
    first = [held(hsu(labels, 10, alpha, seed), labels)[:2, :3] / 2000 for seed in range(100)]
    shares, p = np.concatenate(first), np.array([0.1, 0.3, 0.6])
    assert shares.mean(0) == pytest.approx(p, abs=0.11)
    assert shares.var(0) == pytest.approx(p * (1 - p) / (alpha + 1), rel=0.4)


def test_hsu_where_all_classes_of_a_silo_have_run_out():
    labels = np.repeat(np.arange(20), 5)
    parts = hsu(labels, 4, 0.001, 1, 25)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(100))


@pytest.mark.parametrize("draw", [pfllib, fl_bench, ppfl])
def test_shares_that_underflow_are_refused(draw):
    """Peers divide 0 by 0 there."""
    with refused("alpha = 0.001 is too small for the generator of this convention"):
        for seed in range(40):
            draw(LABELS, 3, 0.001, seed, 0)


def test_drawing_ends_where_peers_go_on_for_ever(monkeypatch):
    monkeypatch.setattr(conventions, "MOST_DRAWS", 3)
    for draw in (pfllib, fl_bench, ppfl):
        with refused("in each of 3 draws some silo got fewer than 13 records; lower the minimum"):
            draw(LABELS, 3, 0.1, 0, 13)
        with refused("40 records do not give 3 silos 14 each"):
            draw(LABELS, 3, 0.3, 0, 14)
        with refused("alpha = 0.0"):
            draw(LABELS, 3, 0.0, 0)
        with refused("seed = 4294967296; the code that this convention follows takes at most"):
            draw(LABELS, 3, 0.3, 2**32)
    with refused("40 records do not give 3 silos 14 each"):
        hsu(LABELS, 3, 0.3, 0, 14)
    with refused("clusters = 4 of 3 classes; give 1 to 3"):
        ppfl(LABELS, 3, 0.3, 0, clusters=4)
