"""Noise of several silos: the sum against an exact convolution, and shares against fractions."""

from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staddle.errors import LocalError
from staddle.security.dp.rdp import CLOSE
from staddle.security.dp.shared_noise import LEAST_SHARE, closeness, share_variance

REACH = 60


def pmf(variance):
    at = np.arange(-REACH, REACH + 1)
    weight = np.exp(-(at**2) / (2 * variance))
    return weight / weight.sum()


@pytest.mark.parametrize("variance", [1, 2])
@pytest.mark.parametrize("shares", [2, 3, 6])
def test_a_sum_of_shares_is_as_close_as_is_claimed(variance, shares):
    total = reduce(np.convolve, [pmf(variance)] * shares)
    middle = total.size // 2
    at = slice(middle - 12, middle + 13)
    one = pmf(variance * shares)[REACH - 12 : REACH + 13]
    found = np.abs(np.log(total[at] / one)).max()
    assert found <= closeness(shares, variance, 1)
    # for more shares the bound is loose
    assert shares > 2 or found > 0.39 * closeness(shares, variance, 1)


def test_closeness_grows_with_shares_and_numbers_and_falls_with_variance():
    assert closeness(1, 1, 100) < 1e-299
    assert closeness(3, 1, 1000) == pytest.approx(1000 * closeness(3, 1, 1))
    assert all(one < other for one, other in pairwise(closeness(n, 1, 1) for n in range(1, 20)))
    assert closeness(3, 2, 1) < closeness(3, 1, 1)
    assert 0 < closeness(1000, 1 << 80, 10**9) < 1e-299


def test_every_share_is_wide_enough_for_what_is_charged():
    assert closeness(20_000, LEAST_SHARE, 1 << 64) < CLOSE
    assert closeness(2, 5, 1 << 32) > CLOSE


@given(
    sigma=st.decimals("0.001", "100000", places=3),
    units=st.integers(1, 1 << 45),
    honest=st.integers(1, 10_000),
)
def test_honest_shares_are_the_least_that_have_the_noise_together(sigma, units, honest):
    found = share_variance(str(sigma), units, honest)
    thousandths = int(sigma * 1000) * units
    needed = thousandths**2
    assert found * honest * 10**6 >= needed
    assert found == LEAST_SHARE or (found - 1) * honest * 10**6 < needed
    assert found >= LEAST_SHARE


def test_no_float_comes_between():
    assert share_variance("1.1", 1 << 38, 3) == -(-121 * (1 << 76) // 300)
    assert share_variance("1e-3", 10**6, 1) == 10**6
    assert share_variance("0.001", 1, 5) == LEAST_SHARE


@pytest.mark.parametrize(("sigma", "units", "honest"), [("0", 1, 1), ("1", 0, 1), ("1", 1, 0)])
def test_shares_of_nothing_are_refused(sigma, units, honest):
    with pytest.raises(LocalError, match="honest silos; give numbers above 0"):
        share_variance(sigma, units, honest)


def test_closeness_of_no_noise_is_refused():
    with pytest.raises(LocalError, match="variance 0; give at least 1"):
        closeness(2, 0, 1)
