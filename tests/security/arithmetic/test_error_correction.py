"""Wrong values of a polynomial, found whoever lies, against what was put in."""

import random

import pytest

from staddle.security.arithmetic.error_correction import wrong_points
from staddle.security.arithmetic.field import PRIME


def values_of(coefficients, points):
    return [sum(c * pow(x, k, PRIME) for k, c in enumerate(coefficients)) % PRIME for x in points]


@pytest.mark.parametrize(
    ("n", "degree"), [(3, 2), (4, 2), (5, 2), (10, 2), (10, 4), (30, 4), (31, 0), (12, 11), (1, 0)]
)
def test_up_to_half_of_what_there_is_too_much_is_found(n, degree):
    rng = random.Random(n * 100 + degree)
    points = rng.sample(range(1, 101), n)
    for errors in range((n - degree - 1) // 2 + 1):
        values = values_of([rng.randrange(PRIME) for _ in range(degree + 1)], points)
        wrong = sorted(rng.sample(range(n), errors))
        for at in wrong:
            values[at] = (values[at] + rng.randrange(1, PRIME)) % PRIME
        assert wrong_points(points, values, degree) == tuple(points[at] for at in wrong)


def test_wrong_values_that_lie_on_a_polynomial_of_their_own_are_found():
    points = list(range(1, 14))
    values, others = values_of([5, 6, 7], points), values_of([8, 9, 1], points)
    values[8:] = others[8:]  # five of thirteen, as many as can be
    assert wrong_points(points, values, 2) == (9, 10, 11, 12, 13)


@pytest.mark.parametrize("errors", [6, 9])
def test_more_are_not_found_and_nobody_is_named(errors):
    rng, points = random.Random(errors), list(range(1, 14))
    values = values_of([5, 6, 7], points)
    for at in range(errors):
        values[at] = rng.randrange(PRIME)
    assert wrong_points(points, values, 2) is None


def test_polynomials_of_zeros_and_too_few_points():
    assert wrong_points([1, 2, 3, 4, 5], [0, 0, 0, 9, 0], 2) == (4,)
    assert wrong_points([1, 2], [3, 4], 2) is None
