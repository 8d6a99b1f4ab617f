"""Matrices over the field of 2^61 - 1, beside Python's integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.secure_sums import Drawn

from staddle.errors import LocalError
from staddle.security.arithmetic import field
from staddle.security.arithmetic.field import PRIME
from staddle.security.arithmetic.masks import Keystream

ENDS = (0, 1, 2**16 - 1, 2**16, 2**32, 2**60, PRIME - 2, PRIME - 1)


class Bytes:
    """A stream that gives these words, one after another."""

    def __init__(self, *words):
        self.left = b"".join(word.to_bytes(8, "little") for word in words)

    def fill(self, into):
        into[:] = self.left[: len(into)]
        self.left = self.left[len(into) :]


def numbers(seed, *shape):
    return field.uniform(Keystream(Drawn(seed)(32), 0), shape)


def slowly(left, right):
    """The product, number by number."""
    return [
        [
            sum(int(a) * int(b) for a, b in zip(row, column, strict=True)) % PRIME
            for column in right.T
        ]
        for row in left
    ]


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 6), st.integers(0, 2**31))
def test_a_product_is_that_of_whole_numbers(rows, inner, columns, seed):
    left, right = numbers(seed, rows, inner), numbers(seed + 1, inner, columns)
    found = field.product(left, right)
    assert found.dtype == np.uint64
    assert found.tolist() == slowly(left, right)


def test_a_product_of_the_largest_numbers_over_the_widest_vectors_is_exact():
    ends = np.full((1, 1 << 16), PRIME - 1, "<u8")
    assert field.product(ends, ends.T).tolist() == [[(1 << 16) * (PRIME - 1) ** 2 % PRIME]]
    mixed = np.array([[*ENDS]], "<u8")
    assert field.product(mixed, mixed.T).tolist() == slowly(mixed, mixed.T)


def test_a_product_over_more_numbers_than_stay_exact_is_refused():
    wide = np.zeros((1, field.LONGEST + 1), "<u8")
    why = r"a product over 524289 numbers, at most 524288 stay exact"
    with pytest.raises(LocalError, match=why):
        field.product(wide, wide.T)


def test_sums_wrap_at_the_prime():
    ends = np.array(ENDS, "<u8")
    for other in ENDS:
        found = field.add(ends, np.full(len(ENDS), other, "<u8")).tolist()
        assert found == [(end + other) % PRIME for end in ENDS]


def test_signed_numbers_come_back():
    values = np.array([0, 1, -1, 2**59, -(2**59), PRIME // 2, -(PRIME // 2)])
    found = field.from_signed(values)
    assert found.tolist() == [value % PRIME for value in values.tolist()]
    assert field.to_signed(found).tolist() == values.tolist()


def test_uniform_numbers_are_words_without_their_upper_bits_and_never_the_prime():
    words = Bytes(2**64 - 1, 5, PRIME, 2**63 + 7, PRIME, 2**61 + 9, 11)
    # a p, with or without upper bits, is drawn again
    assert field.uniform(words, (4,)).tolist() == [11, 5, 9, 7]
    drawn = numbers(3, 200, 100)
    assert field.is_field(drawn)
    assert abs(float(drawn.astype(np.float64).mean()) / PRIME - 0.5) < 0.01  # of a fixed seed
    assert not field.is_field(np.array([PRIME], "<u8"))


@pytest.mark.parametrize("degree", [0, 1, 4])
def test_a_polynomial_is_found_again_from_as_many_values_as_it_has_coefficients(degree):
    points, coefficients = range(3, 4 + degree), numbers(degree, degree + 1, 5)
    values = field.product(field.powers(points, 0, degree), coefficients)
    for at, point in enumerate(points):
        by_hand = [
            sum(int(c) * point**power for power, c in enumerate(column)) % PRIME
            for column in coefficients.T
        ]
        assert values[at].tolist() == by_hand
    found = field.product(field.interpolation(points, [0, 77]), values)
    assert np.array_equal(found[0], coefficients[0])
    assert np.array_equal(found[1:], field.product(field.powers([77], 0, degree), coefficients))


def test_a_point_that_comes_twice_is_refused():
    with pytest.raises(LocalError, match=r"points \[1, 2, 1\] are not distinct"):
        field.interpolation([1, 2, 1], [0])
