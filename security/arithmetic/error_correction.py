"""The wrong ones among values of a polynomial, by Berlekamp and Welch, over field.py's field.

There are values y at n points x, more than the degree d needs. At most e = (n - d - 1) // 2 of them
are not those of one polynomial P. There are a monic E of degree e, whose zeros are the wrong
points, and Q = P E with::

    Q(x) = y E(x)    at all points: n linear equations in the d + 1 + 2 e other coefficients of both

Every solution has Q / E = P (L. Welch and E. Berlekamp, "Error correction for algebraic block
codes", US patent 4,633,470, 1986). The work is one elimination of n³ steps, whoever lies.
"""

from collections.abc import Sequence

from .field import PRIME
from .polynomials import value

Row = list[int]


def wrong_points(
    points: Sequence[int], values: Sequence[int], degree: int
) -> tuple[int, ...] | None:
    """The points whose values do not lie on the polynomial that all but ``e`` of them fit.

    None if there is no such polynomial. The points are distinct.
    """
    # There are d + 1 + 2 e unknowns and one equation per point, so each error that is to be found
    # takes two points more.
    errors = (len(points) - degree - 1) // 2
    if errors < 0:
        return None
    pairs = list(zip(points, values, strict=True))
    solved = _solved([_equation(x, y, degree + errors, errors) for x, y in pairs])
    if solved is None:
        return None

    # Q has the first coefficients, E the others and, being monic, a 1 that is not solved for.
    cut = degree + errors + 1
    polynomial = _quotient(solved[:cut], [*solved[cut:], 1])
    if polynomial is None:
        return None

    # The zeros of E may be right points too: only the values tell which points are wrong.
    wrong = tuple(x for x, y in pairs if value(polynomial, x, PRIME) != y)
    # With more than e wrong values the polynomial may be another one, and would name honest silos.
    return wrong if len(wrong) <= errors else None


def _equation(x: int, y: int, degree: int, errors: int) -> Row:
    """Σ q_k x^k - y Σ_{k < e} e_k x^k = y x^e, the right side last."""
    powers = [1]
    for _ in range(degree):
        powers.append(powers[-1] * x % PRIME)
    locator = [-y * power % PRIME for power in powers[:errors]]
    return [*powers, *locator, y * powers[errors] % PRIME]


def _solved(rows: list[Row]) -> Row | None:
    """A solution, free unknowns 0; None where there is none."""
    width = len(rows[0]) - 1
    pivots = Row()  # row n is the only one that has a number in column pivots[n]
    for column in range(width):
        if _cleared(rows, len(pivots), column):
            pivots.append(column)

    # Rows without a pivot have zeros on the left, so a number on the right contradicts them.
    if any(row[-1] for row in rows[len(pivots) :]):
        return None
    # With at most e wrong values every solution has the same quotient, so unknowns without a pivot
    # may stay 0.
    solution = [0] * width
    for row, column in zip(rows, pivots, strict=False):
        solution[column] = row[-1]
    return solution


def _cleared(rows: list[Row], done: int, column: int) -> bool:
    """Make row ``done`` the only one with a number in this column; False where none is left."""
    found = next((at for at in range(done, len(rows)) if rows[at][column]), None)
    if found is None:
        return False
    rows[done], rows[found] = rows[found], rows[done]
    inverse = pow(rows[done][column], -1, PRIME)
    pivot = rows[done] = [number * inverse % PRIME for number in rows[done]]
    for at, row in enumerate(rows):
        factor = row[column]
        if factor and at != done:
            pairs = zip(row, pivot, strict=True)
            rows[at] = [(number - factor * own) % PRIME for number, own in pairs]
    return True


def _quotient(dividend: Row, divisor: Row) -> Row | None:
    """The quotient by a monic divisor, coefficients from the lowest; None with a remainder."""
    left, size = list(dividend), len(divisor) - 1
    found = [0] * max(len(left) - size, 1)
    for at in range(len(left) - 1, size - 1, -1):
        factor = found[at - size] = left[at]
        for power, number in enumerate(divisor, at - size):
            left[power] = (left[power] - factor * number) % PRIME
    return None if any(left) else found
