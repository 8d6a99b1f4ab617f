"""Batches of blind jobs: who is summed together, and what sums over many rounds then tell of one
silo.
"""

import numpy as np
import pytest

from staddle.algorithms.job.batches import drawn_batches, smallest_round, split, unbroken, without

TEN = tuple("abcdefghij")
ROUNDS = 60


@pytest.mark.parametrize(
    ("participation", "silos", "least", "fewest", "found"),
    [
        (0.5, 10, 3, 4, (2, 1)),  # a half exactly, by the fewest batches
        (0.7, 10, 3, 4, (3, 2)),
        (0.9, 10, 3, 4, (3, 2)),
        (0.1, 10, 3, 4, (2, 1)),  # one of three batches may have three silos, too few
        (0.1, 12, 3, 4, (3, 1)),
        (0.1, 100, 5, 5, (10, 1)),
        (0.75, 8, 3, 4, (2, 1)),
        (0.5, 6, 3, 4, (1, 1)),  # its batches are too few silos for a round
        (0.5, 6, 3, 3, (2, 1)),
        (0.5, 5, 3, 3, (1, 1)),
    ],
)
def test_the_nearest_share_is_drawn_of_the_fewest_batches(
    participation, silos, least, fewest, found
):
    assert drawn_batches(participation, silos, least, fewest) == found


@pytest.mark.parametrize(
    ("silos", "number", "taken", "fewest"),
    [(10, 3, 1, 3), (10, 3, 2, 6), (11, 3, 2, 7), (8, 2, 1, 4)],
)
def test_the_smallest_round_has_the_smallest_batches(silos, number, taken, fewest):
    assert smallest_round(silos, number, taken) == fewest
    sizes = sorted(map(len, split([f"s{at}" for at in range(silos)], number)))
    assert sum(sizes[:taken]) == fewest


@pytest.mark.parametrize("number", [1, 2, 3])
def test_each_silo_is_in_one_batch_whatever_the_order_of_the_job(number):
    batches = split(TEN, number)
    assert sorted(silo for batch in batches for silo in batch) == list(TEN)
    assert max(map(len, batches)) - min(map(len, batches)) <= 1
    turned = split(TEN[::-1], number)
    assert [set(batch) for batch in turned] == [set(batch) for batch in batches]
    assert all(list(batch) == sorted(batch, reverse=True) for batch in turned)


def test_other_silos_have_other_batches():
    assert {frozenset(batch) for batch in split(TEN, 2)} != {frozenset(TEN[:5]), frozenset(TEN[5:])}
    assert {frozenset(batch) for batch in split(TEN, 2)} != {
        frozenset(batch) for batch in split((*TEN[:9], "k"), 2)
    }


def test_silos_of_a_broken_batch_are_left_out():
    batches = (("a", "b", "c"), ("d", "e", "f"))
    assert unbroken(batches, "fedcb") == ("f", "e", "d")
    assert unbroken(batches, "abcdef") == tuple("abcdef")
    assert unbroken(batches, "abde") == ()
    assert unbroken(batches, "abcx") == tuple("abc")
    assert unbroken((), "ab") == ("a", "b")


def test_a_batch_may_lack_proven_rule_breakers_while_enough_are_there():
    batches = (("a", "b", "c", "d"), ("e", "f", "g", "h"))
    assert unbroken(batches, "abcefgh") == tuple("efgh")
    assert unbroken(batches, "abcefgh", {"d"}, 3) == tuple("abcefgh")
    assert unbroken(batches, "abcdefgh", {"d"}, 3) == tuple("abcdefgh")  # in a sum of before it is
    assert unbroken(batches, "abefgh", {"d"}, 2) == tuple("efgh")  # c is missing, too
    assert unbroken(batches, "abefgh", {"c", "d"}, 2) == tuple("abefgh")
    assert unbroken(batches, "abefgh", {"c", "d"}, 3) == tuple("efgh")
    assert unbroken(batches, "d", {"d"}) == ()
    assert without(batches, {"d"}, 3) == (("a", "b", "c"), ("e", "f", "g", "h"))
    assert without(batches, {"c", "d"}, 3) == (("e", "f", "g", "h"),)
    assert without((("a",), ("b",)), {"b"}, 3) == (("a",),)


def solved(cohorts, updates):
    """What least squares make of a silo's update, over the sums of these cohorts: correlation with
    the true one.
    """
    rows = np.array([[silo in cohort for silo in TEN] for cohort in cohorts], dtype=float)
    sums = np.einsum("rs,rsd->rd", rows, updates)
    found, *_ = np.linalg.lstsq(rows, sums, rcond=None)
    true = updates.mean(0)
    return [
        float(np.corrcoef(found[at] - found.mean(0), true[at] - true.mean(0))[0, 1])
        for at in range(len(TEN))
    ]


def updates_of_rounds():
    """Of a silo alike from round to round: what is its own beside noise of the same size."""
    rng = np.random.default_rng(5)
    return rng.standard_normal((1, len(TEN), 400)) + rng.standard_normal((ROUNDS, len(TEN), 400))


def test_sixty_rounds_over_batches_tell_of_no_silo_what_its_batch_does_not(make_job):
    """So et al., AAAI 2023: sums over drawn silos give each update, sums over batches give those of
    the batches.
    """
    fields = {"silos": list(TEN), "rounds": ROUNDS, "participation": 0.5, "min_cohort": 3}
    clear = make_job("fedper", **fields)
    blind = make_job("fedper", **fields, security={"secure_aggregation": "required"})
    updates = updates_of_rounds()
    assert min(solved(clear.cohorts(), updates)) > 0.8
    cohorts = list(blind.cohorts())
    assert set(cohorts) == set(blind.batches)
    # All silos of a batch look alike: what is found of one is a fifth of what is found of all.
    rows = np.array([[silo in cohort for silo in TEN] for cohort in cohorts], dtype=float)
    assert np.linalg.matrix_rank(rows) == len(blind.batches)
    assert max(solved(cohorts, updates)) < 0.6
