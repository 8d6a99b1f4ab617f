import numpy as np
import pytest
from support.refusals import refused

from staddle.algorithms.numerics.streams import permutation, raw, stream, uniform


def test_a_stream_is_pinned_for_ever():
    expected = [11114097228117383608, 6308778396664137798]
    assert raw(stream(7, "clinic-a", 3, "train/0"), 2).tolist() == expected


@pytest.mark.parametrize(
    "other",
    [(8, "a", 3, "x"), (7, "b", 3, "x"), (7, "a", 4, "x"), (7, "a", 3, "y"), (7, "a3", 0, "x")],
)
def test_every_argument_names_another_stream(other):
    assert raw(stream(7, "a", 3, "x"), 4).tolist() != raw(stream(*other), 4).tolist()


def test_the_encoding_does_not_run_fields_together():
    assert (
        raw(stream(1, "a", 2, '",2,"x'), 4).tolist() != raw(stream(1, 'a",2,"', 2, "x"), 4).tolist()
    )


def test_a_seed_beyond_canonical_json_is_refused():
    with refused("beyond 2"):
        stream(2**53, "", 0, "x")


def test_uniform_has_the_moments_of_its_interval():
    values = uniform(stream(0, "", 0, "moments"), (200, 500), -2.0, 4.0)
    assert values.shape == (200, 500)
    assert values.min() >= -2
    assert values.max() < 4
    # 5 standard errors of 6/sqrt(12)/sqrt(1e5)
    assert values.mean() == pytest.approx(1.0, abs=0.03)
    assert values.var() == pytest.approx(3.0, abs=0.05)


def test_permutation_is_one_and_every_place_is_equally_likely():
    rng = stream(0, "", 0, "places")
    counts = np.zeros((5, 5))
    for _ in range(4000):
        order = permutation(rng, 5)
        assert sorted(order.tolist()) == [0, 1, 2, 3, 4]
        counts[np.arange(5), order] += 1
    assert np.abs(counts - 800).max() < 5 * (4000 * 0.2 * 0.8) ** 0.5
