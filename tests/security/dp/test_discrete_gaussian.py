"""The exact sampler: its distribution, and every comparison that float64 may not decide."""

import tracemalloc
from decimal import Decimal, localcontext
from fractions import Fraction
from math import factorial, isqrt

import numpy as np
import pytest
from scipy import stats

from staddle.errors import LocalError
from staddle.security.dp import discrete_gaussian as so
from staddle.security.dp.noise import Randomness

MANY = 200_000
# below one block's width, and with blocks of 2 and of 8 integers
SMALL = [1, Fraction(1089, 100), 400, 1600, 200**2]
LARGE = [1 << 40, 9 << 78, so.LARGEST_VARIANCE]


def fixed(byte=7):
    return Randomness(lambda size: bytes([byte]) * size)


def chi_square(made, variance):
    """p-value of the exact probabilities; numbers that are expected below 20 times are joined."""
    reach = isqrt(int(variance)) * 8 + 8
    at = np.arange(-reach, reach + 1)
    weight = np.exp(-(at**2) / (2 * float(variance)))
    expected = made.size * weight / weight.sum()
    edge = np.abs(at[expected >= 20]).max()
    clipped = np.clip(made, -edge, edge)
    inner = np.abs(at) <= edge
    expected[at == edge] += expected[at > edge].sum()
    expected[at == -edge] += expected[at < -edge].sum()
    found = np.bincount(clipped + edge, minlength=2 * edge + 1)
    return stats.chisquare(found, expected[inner]).pvalue


@pytest.mark.parametrize("variance", SMALL)
def test_numbers_have_their_exact_probabilities(variance):
    """With this key; another one fails in a thousandth of cases."""
    assert chi_square(fixed().discrete_gaussian(MANY, variance), variance) > 1e-3


@pytest.fixture
def undecided(monkeypatch):
    """Nothing is decided by a table or by float64."""
    monkeypatch.setattr(so, "CELL_BITS", 1)
    monkeypatch.setattr(so, "MARGIN", 2.0)


@pytest.mark.parametrize("variance", [Fraction(1089, 100), 1600])
@pytest.mark.usefixtures("undecided")
def test_the_exact_path_alone_has_the_same_distribution(variance):
    made = fixed().discrete_gaussian(8000, variance)
    assert (so._blocks(Fraction(variance), 1).by_cell < 0).all()
    assert chi_square(made, variance) > 1e-3


@pytest.mark.parametrize("variance", [*SMALL, *LARGE])
def test_integers_decide_as_float64_does(monkeypatch, variance):
    """On the same words, and 64 bits tell."""
    made = fixed().discrete_gaussian(3000, variance)
    monkeypatch.setattr(so, "MARGIN", 2.0)
    assert fixed().discrete_gaussian(3000, variance).tolist() == made.tolist()


@pytest.mark.parametrize("variance", LARGE)
def test_wide_noise_is_normal_to_its_last_bit(variance):
    """With this key; another one fails in a thousandth of cases each."""
    made = fixed().discrete_gaussian(MANY, variance)
    assert made.dtype == np.int64
    z = made / float(variance) ** 0.5
    assert abs(z.mean()) < 4 / MANY**0.5
    assert abs(z.var() - 1) < 4 * (2 / MANY) ** 0.5
    assert abs(stats.kurtosis(z)) < 4 * (24 / MANY) ** 0.5
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert abs(np.mean(z[1:] * z[:-1])) < 4 / MANY**0.5
    for bits in (made & 15, made >> 8 & 15, np.abs(made) & 15):
        assert stats.chisquare(np.bincount(bits)).pvalue > 1e-3


def test_golden_values():
    """No rounding decides, so each machine makes the same numbers of a key."""
    assert fixed().discrete_gaussian(12, 1).tolist() == [-1, -1, 0, -3, 1, 1, 0, 0, 1, 0, 0, -1]
    assert fixed().discrete_gaussian(6, Fraction(1089, 100)).tolist() == [-5, -3, -1, 1, -9, 3]
    assert fixed().discrete_gaussian(4, 1 << 40).tolist() == [-1797168, -1082352, -522206, 526987]
    assert fixed().discrete_gaussian(3, so.LARGEST_VARIANCE).tolist() == [
        -61013656497200,
        -37255389873136,
        -15642217740254,
    ]


@pytest.mark.parametrize("variance", [0, -1, Fraction(-1, 3), so.LARGEST_VARIANCE + 1])
def test_a_variance_out_of_range_is_refused(variance):
    with pytest.raises(LocalError, match="above 0, at most 2"):
        fixed().discrete_gaussian(1, variance)


def test_as_many_as_asked_for_and_other_numbers_each_time():
    random = fixed()
    assert [random.discrete_gaussian(count, 400).size for count in (0, 1, 70_000)] == [0, 1, 70_000]
    one, other = (random.discrete_gaussian(100, 1 << 80) for _ in range(2))
    assert not np.isin(one, other).any()


def test_it_works_in_pieces():
    random, count = fixed(), 2_000_000
    random.discrete_gaussian(1, 1 << 40)
    tracemalloc.start()
    try:
        random.discrete_gaussian(count, 1 << 40)
        assert tracemalloc.get_traced_memory()[1] < 8 * count + (12 << 20)
    finally:
        tracemalloc.stop()


# Comparisons. U is told bit by bit, around the real number that it is compared with.


def told(*words):
    """A source of these words alone."""
    left = list(words)
    return lambda count: np.array([left.pop(0) for _ in range(count)], "<u8")


def words_of(number, count):
    return [number >> 64 * place & (1 << 64) - 1 for place in reversed(range(count))]


@pytest.mark.parametrize(("block", "step"), [(0, Fraction(1, 2)), (40, Fraction(1, 1800))])
@pytest.mark.parametrize("after", [1, 2])
def test_a_block_ends_where_its_boundary_lies(block, step, after):
    """By the bit 20 + 64 · after; each is needed."""
    bits = 20 + 64 * after
    lower, upper = so._boundaries(step, bits)
    assert upper[block] - lower[block] <= 1
    for number, expected in ((lower[block] - 1, block), (upper[block] + 1, block + 1)):
        words = words_of(number, after)
        assert so._exact_block(told(*words), step, number >> 64 * after, 20) == expected
        # one word less does not tell
        with pytest.raises(IndexError):
            so._exact_block(told(*words[:-1]), step, number >> 64 * after, 20)


@pytest.mark.parametrize("exponent", [Fraction(1, 3), Fraction(1, 10**9), Fraction(7, 5)])
def test_a_probability_is_met_to_the_last_bit(exponent):
    lower = so._scaled_exp(exponent, 192)
    for number, below in ((lower - 1, True), (lower + 3, False)):
        first, *more = words_of(number, 3)
        assert so._exactly_below(told(*more), exponent, first) is below
        # one word less does not tell
        with pytest.raises(IndexError):
            so._exactly_below(told(more[0]), exponent, first)
    # between the bounds nothing tells yet
    for number in (lower, lower + 2):
        first, *more = words_of(number, 3)
        with pytest.raises(IndexError):
            so._exactly_below(told(*more), exponent, first)


def test_what_is_certain_is_accepted():
    assert so._exactly_below(told(), Fraction(0), (1 << 64) - 1)


def exponential(exponent):
    """exp(-exponent) from below and above: partial sums of a series of alternating signs."""
    terms = [(-exponent) ** n / factorial(n) for n in range(171)]
    return sum(terms[:-1]), sum(terms)


@pytest.mark.parametrize("exponent", [Fraction(0), Fraction(1, 7), Fraction(5, 2), Fraction(11)])
@pytest.mark.parametrize("bits", [20, 64, 300])
def test_bounds_of_an_exponential_hold(exponent, bits):
    found = so._scaled_exp(exponent, bits)
    one, other = sorted(exponential(exponent))
    assert found <= one * 2**bits
    assert other * 2**bits <= found + 3
    assert so._scaled_exp(Fraction(10**9), bits) == 0


@pytest.mark.parametrize("step", [Fraction(1, 2), Fraction(1, 512), Fraction(1, 2047)])
def test_bounds_of_the_boundaries_hold(monkeypatch, step):
    """Against sums of 1,000 weights in decimals of 50 digits; 2 spare bits, so that all matters."""
    monkeypatch.setattr(so, "_WORD", 2)
    lower, upper = so._boundaries.__wrapped__(step, 62)
    with localcontext(prec=50):
        weights = [(-Decimal(j * j) * step.numerator / step.denominator).exp() for j in range(1000)]
        total, reached = sum(weights), Decimal(0)
        for weight, low, high in zip(weights, lower, upper, strict=False):
            reached += weight
            assert low <= reached / total * 2**62 < high + 1
    assert upper[-2] < 2**62 - 1 <= upper[-1]


def test_numpys_exponential_is_far_closer_than_the_margin():
    at = -np.concatenate([np.linspace(0, 1, 1500), np.linspace(0, 40, 500)])
    found = np.exp(at)
    worst = max(abs(Decimal(x).exp() - Decimal(y)) for x, y in zip(at, found, strict=True))
    assert worst < Decimal(2) ** -50
