"""One record moves a sum by its clip at most, however the others are chosen.

Floating point does not hold that.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch
from support.refusals import refused

from staddle.algorithms.job.privacy_table import PrivacyTable
from staddle.algorithms.training.clipped_sum import BITS, MOST_ROWS, ClippedSum

STEP = Fraction(1, 2**BITS)  # of a sum whose clip is 1 and whose noise is no larger than that


class Still:
    """No noise."""

    def normal(self, count):
        return np.zeros(count)


class Seeded:
    """Noise of a seed."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def normal(self, count):
        return self.random.normal(size=count)


def chosen(ones, small, mantissa):
    """Records of clip 1 that add up to a power of two, and ones that are below half of what a float
    has above it.

    The first record takes the sum above it: there the small ones change nothing. Without it each
    takes off as much as a float has below it, twice what it is.
    """
    half = 2.0 ** (np.log2(ones) - mantissa - 1) / 2
    return np.array([1.0] + [1.0] * ones + [-half * (1 + 2.0**-20)] * small)


def in_turn(values, dtype):
    """Their sum in floating point, one after the other."""
    return float(np.add.accumulate(values.astype(dtype))[-1])


def summed(shares, rows, clip=1.0, sigma=0.0, random=None):
    """Sums of several tensors, each [B, …], so many records at a time."""
    total = ClippedSum([share.shape[1:] for share in shares], clip, sigma)
    for start in range(0, len(shares[0]), rows):
        total.add([share[start : start + rows] for share in shares])
    return total.noisy(random or Still())


def test_in_float32_one_record_moves_a_sum_by_eight_clips():
    """Casacuberta et al. 2022: what the bound is for, in 23,553 records."""
    records = chosen(2**14, 7 * 1024, 23)
    assert len(records) == 23_553
    assert np.abs(records).max() <= 1
    assert in_turn(records, np.float32) - in_turn(records[1:], np.float32) == 8.0


def test_in_float64_it_still_moves_it_by_more_than_one():
    records = chosen(2**14, 7 * 1024, 52)
    moved = Fraction(in_turn(records, np.float64)) - Fraction(in_turn(records[1:], np.float64))
    assert moved == 1 + 7 * Fraction(1, 2**29)


@pytest.mark.parametrize("rows", [1, 16, 5000])
@pytest.mark.parametrize("mantissa", [23, 52])
def test_the_same_records_move_the_sum_in_integers_by_one_clip(rows, mantissa):
    records = torch.from_numpy(
        chosen(2**10, 7 * 64, mantissa) if rows == 1 else chosen(2**14, 7 * 1024, mantissa)
    )
    if mantissa == 23:
        records = records.float()
    (whole,), (less,) = summed([records[:, None]], rows), summed([records[1:, None]], rows)
    moved = Fraction(float(whole)) - Fraction(float(less))
    assert 1 - 2 * Fraction(1, 2**20) < moved <= 1


@pytest.mark.parametrize("clip", [1.0, 0.3, 1e6])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_what_a_record_gives_is_never_longer_than_the_clip(clip, size):
    """Exactly, in all tensors together, and hardly shorter."""
    random = torch.Generator().manual_seed(int(abs(np.log10(size))) + 7)
    shares = [torch.randn(20, *shape, generator=random) * size for shape in ((3, 5), (700,), ())]
    shares[1][4] = 0.1 * size  # numbers of which float32 adds up the squares wrong
    for record in range(20):
        own = [share[record : record + 1] for share in shares]
        norm = float(torch.cat([each.double().reshape(-1) for each in own]).norm())
        sums = summed(own, 1, clip)
        steps = [
            Fraction(float(v)) / Fraction(clip) / STEP for each in sums for v in each.reshape(-1)
        ]
        exact = [round(step) for step in steps]
        assert max(abs(step - whole) for step, whole in zip(steps, exact, strict=True)) < 1e-3, (
            "integers"
        )
        assert sum(whole**2 for whole in exact) <= 2 ** (2 * BITS)
        assert sum(whole**2 for whole in exact) ** 0.5 >= 2**BITS * min(
            1 - 1e-5, norm / clip * (1 - 1e-5) - 1e-9
        )


def test_the_sum_is_the_same_to_the_last_bit_in_any_order_and_any_number_at_a_time():
    random = torch.Generator().manual_seed(3)
    shares = [torch.randn(50, 40, generator=random), torch.randn(50, 2, 3, generator=random)]
    expected = summed(shares, 50)
    for rows in (1, 7, 49):
        order = torch.randperm(50, generator=random)
        found = summed([share[order] for share in shares], rows)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    norms = torch.cat([share.flatten(1) for share in shares], 1).double().norm(dim=1).clamp(min=1)
    by_hand = (shares[0].double() / norms[:, None]).sum(0)
    assert (expected[0] - by_hand).abs().max() < 1e-4
    assert expected[1].shape == (2, 3)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_record_with_what_is_no_number_adds_nothing(value):
    shares = [torch.ones(3, 4), torch.ones(3, 2)]
    shares[1][1, 0] = value
    others = [share[[0, 2]] for share in shares]
    assert all(map(torch.equal, summed(shares, 3), summed(others, 3)))


def test_the_largest_numbers_of_float32_are_cut_and_not_dropped():
    (found,) = summed([torch.full((1, 4), torch.finfo(torch.float32).max)], 1)
    assert found.tolist() == pytest.approx([0.5] * 4, rel=1e-5)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 700.0, 100_000.0])
def test_noise_is_of_the_size_that_is_said_and_falls_on_every_step(sigma):
    """An odd share beside even noise would be seen whatever σ is: Mironov 2012."""
    (found,) = summed([torch.zeros(1, 40_000)], 1, 2.0, sigma, Seeded(1))
    assert float(found.std()) == pytest.approx(2.0 * sigma, rel=0.02)
    steps = found * (2.0**BITS / max(sigma, 1.0) / 2.0)
    assert (steps - steps.round()).abs().max() < 1e-2
    for divisor in (2, 3, 16):
        share = (steps.round().long() % divisor).bincount(minlength=divisor) / len(steps)
        assert (share - 1 / divisor).abs().max() < 0.01


def test_noise_is_that_of_the_sum_rounded():
    """round(noise) + k = round(noise + k): what leaves is computed of the sum with noise, and of
    nothing else.
    """
    share = torch.tensor([[0.25, -0.5, 0.125]])
    (found,) = summed([share], 1, sigma=1.5, random=Seeded(4))
    steps = Fraction(2**BITS) / Fraction(3, 2)
    cut = [int(Fraction(v) * steps) for v in share[0].tolist()]
    noisy = [
        Fraction(z) * 2**BITS + k for z, k in zip(Seeded(4).normal(3).tolist(), cut, strict=True)
    ]
    assert found.tolist() == pytest.approx(
        [float(round(each) / steps) for each in noisy], rel=1e-12
    )


def test_no_more_records_at_a_time_than_float64_adds_up_exactly():
    with refused(r"32769 records to add up at a time, 32,768 at most"):
        summed([torch.zeros(MOST_ROWS + 1, 1)], MOST_ROWS + 1)
    table = {"epsilon": 1, "delta": 1e-5, "sample_rate": 0.1}
    assert PrivacyTable(**table, physical_batch=MOST_ROWS).physical_batch == MOST_ROWS
    for wrong in (1, 15, MOST_ROWS + 1):
        with pytest.raises(ValueError, match="physical_batch"):
            PrivacyTable(**table, physical_batch=wrong)
