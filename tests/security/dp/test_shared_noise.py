"""Noise of several silos: the sum against an exact convolution."""

from functools import reduce
from itertools import pairwise

import numpy as np
import pytest

from staddle.algorithms.job.privacy_table import LEAST_SHARE
from staddle.errors import LocalError
from staddle.security.dp.rdp import CLOSE
from staddle.security.dp.shared_noise import closeness

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


def test_closeness_of_no_noise_is_refused():
    with pytest.raises(LocalError, match="variance 0; give at least 1"):
        closeness(2, 0, 1)
