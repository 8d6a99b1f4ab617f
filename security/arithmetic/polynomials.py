"""Polynomials over a prime field: their values, and Lagrange's weights for one."""

from collections.abc import Sequence


def value(coefficients: Sequence[int], x: int, prime: int) -> int:
    """The polynomial at x, modulo ``prime``, by Horner's rule.

    ``coefficients`` begin with the constant term.
    """
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * x + coefficient) % prime
    return total


def lagrange(points: Sequence[int], at: int, prime: int) -> list[int]:
    """Weights l_i with f(at) = Σ l_i f(x_i), for every f of a degree below the number of points.

    The points are distinct modulo ``prime``.
    """
    weights = []
    for x in points:
        # Both products come first, so that each point takes one inverse and not one per factor.
        above, below = 1, 1
        for other in points:
            if other != x:
                above, below = above * (at - other) % prime, below * (x - other) % prime
        weights.append(above * pow(below, -1, prime) % prime)
    return weights
