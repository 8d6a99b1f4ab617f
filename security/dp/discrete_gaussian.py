"""An exact sampler of the discrete Gaussian: integers x with probability ∝ exp(-x² / 2v).

The distribution is that of Canonne, Kamath, Steinke, "The discrete Gaussian for differential
privacy", 2020. The sampler is Karney's ("Sampling exactly from the normal distribution", 2016,
algorithm D) with narrower blocks: from two words of 64 bits it makes a candidate, and it keeps 97 %
of them if v is large, where algorithms 1 to 3 of the former keep half. Block j has the integers
from jw to jw + w - 1; w is a power of two, at most √v / 16 if that is 1 or more::

    1. j with probability ∝ exp(-(jw)² / 2v), j = 0, 1, 2, …
    2. x = jw + i, with i uniform below w, and a sign: other bits
    3. accept with probability exp(-(x² - (jw)²) / 2v), but never -0

So each x and each -x comes with probability ∝ exp(-x² / 2v), if the bits are uniform. Steps 1 and 3
compare a uniform real U with a real T. They draw as many bits of U as it takes to tell which is
larger, so no rounding decides anything:

- Step 1 knows the first bits of U, and two integers between which 2^bits T lies for each boundary T
  of a block. A table of 2^20 cells has the block of each cell that no boundary crosses. One number
  in about 5,000 falls into another cell.
- Step 3 knows U to 2^-53 and T to 2^-45. The exponent has lost three roundings of float64, which
  moves T by less than 2^-52, and numpy's exp is off by a few units in the last place (a test
  compares it with decimals). A distance above MARGIN = 2^-40 decides.
- In all other cases 64 more bits of U and closer bounds on T are compared, until they tell. That
  takes Python's integers, and exponentials of ``decimal``, which are rounded correctly. Each time
  one case in 2^50 or fewer stays open.

Numbers fit int64 unless |x| > 2^18 √v, which has a probability below exp(-2^35).
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import check_local

Integers = npt.NDArray[np.int64]
BitSource = Callable[[int], npt.NDArray[Any]]  # so many words of 64 random bits

LARGEST_VARIANCE = 1 << 90
CELL_BITS = 20  # of U, by which the table tells the block
MARGIN = 2.0**-40  # between U and T, above which float64 decides
_PIECE = 1 << 15  # candidates that are made at a time: their arrays stay in a core's cache
_WORD = 64
_LOOSE = 3  # between the bounds of an exponential


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of one variance."""

    shift: int  # each has 2^shift integers
    step: Fraction  # block j has weight exp(-j² step)
    by_cell: npt.NDArray[np.int16]  # which block U is in, by its first bits; -1 if they do not tell


def draw(words: BitSource, count: int, variance: Fraction | int) -> Integers:
    """``count`` independent numbers of the discrete Gaussian with v = ``variance``.

    int64 [count]. Their variance is v, less about 8π² v² exp(-2π² v). LocalError for a v that is
    not above 0, or is above LARGEST_VARIANCE.
    """
    check_local(
        0 < variance <= LARGEST_VARIANCE,
        f"a discrete Gaussian of variance {variance}; give one above 0, at most 2^90",
    )
    exact = Fraction(variance)
    blocks = _blocks(exact, CELL_BITS)
    made = np.empty(count, np.int64)
    at = 0
    while at < count:
        left = count - at
        # A few more than are left, since some are rejected. Those beyond the count are dropped.
        found = _accepted(words, min(_PIECE, left + left // 16 + 8), exact, blocks)[:left]
        made[at : at + found.size] = found
        at += found.size
    return made


def _accepted(words: BitSource, size: int, variance: Fraction, blocks: _Blocks) -> Integers:
    """Those of ``size`` candidates that are accepted, in order."""
    first, second = words(size), words(size)

    # The first word has 20 bits for the block at the top, 43 for the offset, which takes at most
    # 41, and one for the sign.
    cells = (first >> np.uint64(_WORD - CELL_BITS)).view(np.int64)
    block = blocks.by_cell[cells].astype(np.int64)
    for at in np.flatnonzero(block < 0).tolist():
        block[at] = _exact_block(words, blocks.step, int(cells[at]), CELL_BITS)
    within = np.uint64((1 << blocks.shift) - 1)
    offset = ((first >> np.uint64(1)) & within).view(np.int64)
    negative = (first & np.uint64(1)).astype(bool)

    # x² - (jw)² = i (jw + x); float64 holds both factors exactly.
    start = block << blocks.shift
    absolute = start + offset
    exponent = offset.astype(np.float64) * (start + absolute).astype(np.float64)
    exponent *= float(-1 / (2 * variance))
    probability = np.exp(exponent)
    uniform = (second >> np.uint64(11)).view(np.int64) * 2.0**-53
    accepted = uniform < probability
    for at in np.flatnonzero(np.abs(uniform - probability) <= MARGIN).tolist():
        product = int(offset[at]) * int(start[at] + absolute[at])
        accepted[at] = _exactly_below(words, product / (2 * variance), int(second[at]))

    # Zero would come twice, since it has both signs.
    accepted &= ~(negative & (absolute == 0))
    return np.where(negative, -absolute, absolute)[accepted]


@lru_cache(maxsize=4)
def _blocks(variance: Fraction, bits: int) -> _Blocks:
    # √v / w is at least 16 where w is above 1, and always below 32: step > 1/2048.
    shift = max(isqrt(int(variance)).bit_length() - 5, 0)
    step = (1 << 2 * shift) / (2 * variance)
    by_cell = np.full(1 << bits, -1, np.int16)
    after = 0
    for block, (lower, upper) in enumerate(zip(*_boundaries(step, bits), strict=True)):
        by_cell[after:lower] = block
        after = upper + 1
    by_cell.setflags(write=False)
    return _Blocks(shift, step, by_cell)


def _exact_block(words: BitSource, step: Fraction, known: int, bits: int) -> int:
    """The block that U is in, whose first ``bits`` bits are ``known``."""
    while True:
        known, bits = known << _WORD | int(words(1)[0]), bits + _WORD
        lower, upper = _boundaries(step, bits)
        # U 2^bits lies in [known, known + 1): above all boundaries before this one …
        block = bisect_left(upper, known)
        # … and below this one.
        if known < lower[block]:
            return block


def _exactly_below(words: BitSource, exponent: Fraction, known: int) -> bool:
    """Whether U, whose first 64 bits are ``known``, is below exp(-exponent)."""
    if not exponent:
        return True  # U is below 1, and no number of bits would tell
    bits = _WORD
    while True:
        lower = _scaled_exp(exponent, bits)
        if known < lower:
            return True
        if known >= lower + _LOOSE:
            return False
        known, bits = known << _WORD | int(words(1)[0]), bits + _WORD


@lru_cache(maxsize=16)
def _boundaries(step: Fraction, bits: int) -> tuple[list[int], list[int]]:
    """Integers below and above 2^bits times the end of each block, up to the last that matters.

    Block j ends at the sum of the weights of blocks 0 to j, divided by that of all.
    """
    sums: list[int] = []
    total, weight = 0, 1
    while weight:
        # 64 bits more, so that the bounds are equal for nearly all.
        weight = _scaled_exp(len(sums) ** 2 * step, bits + _WORD)
        total += weight
        sums.append(total)

    # Each weight lacks at most _LOOSE. Weights fall by more than a quarter from block to block
    # where they are below 2^-62, because step > 1/2048; so what follows adds less than 9.
    lack = _LOOSE * len(sums) + 9
    lower = [(each << bits) // (total + lack) for each in sums]
    upper = [((each + lack) << bits) // total for each in sums]
    # No U of so many bits is above this one.
    end = bisect_left(upper, (1 << bits) - 1) + 1
    return lower[:end], upper[:end]


def _scaled_exp(exponent: Fraction, bits: int) -> int:
    """An integer n with n <= 2^bits exp(-exponent) <= n + 3."""
    scale = 1 << bits
    # Division, exp and product each round once, by half a unit in the last digit. Together they
    # err by less than 0.1, with the exponent's error at its largest, (exponent + 2) exp(-exponent).
    context = Context(prec=len(str(scale)) + 3)
    negated = context.divide(Decimal(-exponent.numerator), Decimal(exponent.denominator))
    value = context.multiply(context.exp(negated), Decimal(scale))
    return max(int(value) - 1, 0)
