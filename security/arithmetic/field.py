"""Vectors over the prime field of p = 2^61 - 1: matrix products, uniform numbers, polynomials.

All of it is exact.

A number of the field is a uint64 below p. A matrix product takes both sides apart into four digits
of 16 bits, as float64: each product of digits is an integer below 2^32, so a sum of at most 2^19
products of the four pairs of digits with one shift is an integer below 2^53. float64 holds it as it
is, in whatever order BLAS adds. Since 2^61 ≡ 1 mod p, the shifts are rotations of 61 bits.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...errors import check_local
from .fixedpoint import Reals, Words
from .polynomials import lagrange

PRIME = 2**61 - 1
NUMBER_BYTES = 8
LONGEST = 1 << 19  # terms of one sum of products
_P = np.uint64(PRIME)
_BITS = np.uint64(61)
_DIGIT = 16  # bits of a digit
_DIGITS = 4  # of a number of the field

Integers = npt.NDArray[np.int64]


class Source(Protocol):
    """A stream of uniform bytes: ``masks.Keystream``."""

    def fill(self, into: memoryview) -> None:
        """Overwrite bytes with the next ones of the stream."""
        ...


def uniform(source: Source, shape: Sequence[int]) -> Words:
    """Uniform numbers of the field: 61 bits of each word of the stream.

    A p, which is no number of the field, is drawn again from the next words.

    uint64 of this shape. The order of the draws is fixed, so a stream always gives the same
    numbers for the same shape.
    """
    made = np.empty(shape, "<u8")
    source.fill(made.data.cast("B"))
    # p is 2^61 - 1: the low 61 bits are uniform from 0 to p, and only p itself is one too many.
    made &= _P

    # Taken as 0 instead, 0 would come twice as often, and shares would tell a little of vectors.
    again = made == _P
    while again.any():
        fresh = np.empty(int(again.sum()), "<u8")
        source.fill(fresh.data.cast("B"))
        made[again] = fresh & _P
        again = made == _P
    return made


def from_signed(values: Integers) -> Words:
    """The numbers of the field that stand for integers between -p/2 and p/2.

    uint64, of the shape of the int64 ``values``. Integers outside of that range are not detected.
    """
    return np.where(values < 0, values + PRIME, values).astype("<u8")


def to_signed(numbers: Words) -> Integers:
    """The integers between -p/2 and p/2 that numbers of the field stand for.

    int64. A sum or product of integers comes back exactly if its magnitude is below p/2.
    """
    values = numbers.astype(np.int64)
    return np.where(values > PRIME // 2, values - PRIME, values)


def is_field(numbers: Words) -> bool:
    """True if every word is below p."""
    return bool((numbers < _P).all())


def add(left: Words, right: Words) -> Words:
    """Sums mod p, element by element.

    Both are uint64 below p, of shapes that numpy broadcasts.
    """
    return _reduced(left + right)


def product(left: Words, right: Words) -> Words:
    """Matrix [m, k] times matrix [k, n] mod p, [m, n].

    LocalError for k over 2^19, where float64 would round.
    """
    terms = left.shape[-1]
    check_local(
        terms <= LONGEST,
        f"a product over {terms} numbers, at most {LONGEST} stay exact; compare fewer",
    )
    ones, others = _digits(left), _digits(right)
    total = np.zeros((left.shape[0], right.shape[1]), np.uint64)

    # Horner, in powers of 2^16: a rotation by 16 bits is a product by 2^16, as 2^61 ≡ 1.
    for shift in range(2 * _DIGITS - 2, -1, -1):
        lowest, highest = max(0, shift - _DIGITS + 1), min(shift, _DIGITS - 1)
        products = (ones[at] @ others[shift - at] for at in range(lowest, highest + 1))
        # At most four products, each of 2^19 terms below 2^32: their sum is below 2^53, so float64
        # rounds nothing.
        summed = sum(products, np.zeros(total.shape))
        rotated = ((total << np.uint64(_DIGIT)) & _P) | (total >> (_BITS - np.uint64(_DIGIT)))
        total = _reduced(rotated + summed.astype(np.uint64))
    return total


def powers(points: Sequence[int], first: int, last: int) -> Words:
    """x^first to x^last of each point x, [points, last - first + 1].

    Times the coefficients of a polynomial they are its values.
    """
    exponents = range(first, last + 1)
    table = [[pow(x, power, PRIME) for power in exponents] for x in points]
    # ``reshape`` is for the case of no points: the table is empty then, and has no columns.
    return np.array(table, "<u8").reshape(len(points), len(exponents))


def interpolation(known: Sequence[int], wanted: Sequence[int]) -> Words:
    """Lagrange weights [wanted, known]: values at ``wanted`` from those at ``known``.

    LocalError for a point that comes twice.
    """
    check_local(len(set(known)) == len(known), f"points {list(known)} are not distinct")
    rows = [lagrange(known, at, PRIME) for at in wanted]
    return np.array(rows, "<u8").reshape(len(wanted), len(known))


def _reduced(values: Words) -> Words:
    """Values below 2^63 mod p."""
    # 2^61 ≡ 1, so the bits above are added to those below; what is left is below p + 4.
    folded = (values & _P) + (values >> _BITS)
    return np.where(folded >= _P, folded - _P, folded)


def _digits(numbers: Words) -> list[Reals]:
    """The digits of numbers, the lowest first, as float64 of the same shape."""
    mask = np.uint64((1 << _DIGIT) - 1)
    shifts = [np.uint64(_DIGIT * at) for at in range(_DIGITS)]
    return [((numbers >> shift) & mask).astype(np.float64) for shift in shifts]
