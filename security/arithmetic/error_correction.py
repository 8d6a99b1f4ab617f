"""Which values of a polynomial are wrong, of more than its degree takes: Berlekamp and Welch, over
field.py's field.

Values y at n points x, of which at most e = (n - d - 1) // 2 are not those of one polynomial P of
degree d. There are a monic E of degree e, whose zeros are the wrong points, and Q = P E with::

    Q(x) = y E(x)    at all points: n linear equations in the d + 1 + 2 e other coefficients of both

Every solution has Q / E = P (L. Welch and E. Berlekamp, "Error correction for algebraic block
codes", US patent 4,633,470, 1986). The work is that of one elimination, whoever lies: n³ steps.
"""

from collections.abc import Sequence

from .field import PRIME

Row = list[int]


def wrong_points(
    points: Sequence[int], values: Sequence[int], degree: int
) -> tuple[int, ...] | None:
    """The points, distinct, whose values are not those of the one polynomial that all but ``e``
    fit; None for none.
    """
    errors = (len(points) - degree - 1) // 2
    if errors < 0:
        return None
    rows = [_equation(x, y, degree + errors, errors) for x, y in zip(points, values, strict=True)]
    solved = _solved(rows)
    if solved is None:
        return None
    cut = degree + errors + 1
    polynomial = _quotient(solved[:cut], [*solved[cut:], 1])
    if polynomial is None:
        return None
    wrong = tuple(x for x, y in zip(points, values, strict=True) if _value(polynomial, x) != y)
    return wrong if len(wrong) <= errors else None


def _equation(x: int, y: int, degree: int, errors: int) -> Row:
    """Σ q_k x^k - y Σ_{k < e} e_k x^k = y x^e, the right side last."""
    powers = [1]
    for _ in range(degree):
        powers.append(powers[-1] * x % PRIME)
    return [*powers, *(-y * power % PRIME for power in powers[:errors]), y * powers[errors] % PRIME]


def _solved(rows: list[Row]) -> Row | None:
    """A solution, free unknowns 0; None where there is none."""
    width, done, places = len(rows[0]) - 1, 0, Row()
    for column in range(width):
        found = next((at for at in range(done, len(rows)) if rows[at][column]), None)
        if found is None:
            continue
        rows[done], rows[found] = rows[found], rows[done]
        inverse = pow(rows[done][column], -1, PRIME)
        pivot = rows[done] = [number * inverse % PRIME for number in rows[done]]
        for at, row in enumerate(rows):
            if at != done and (factor := row[column]):
                rows[at] = [
                    (number - factor * own) % PRIME for number, own in zip(row, pivot, strict=True)
                ]
        places.append(column)
        done += 1
    if any(row[-1] for row in rows[done:]):
        return None
    solution = [0] * width
    for row, column in zip(rows, places, strict=False):
        solution[column] = row[-1]
    return solution


def _quotient(dividend: Row, divisor: Row) -> Row | None:
    """By a monic divisor, coefficients from the lowest; None where something is left."""
    left, size = list(dividend), len(divisor) - 1
    found = [0] * max(len(left) - size, 1)
    for at in range(len(left) - 1, size - 1, -1):
        factor = found[at - size] = left[at]
        for place, number in enumerate(divisor, at - size):
            left[place] = (left[place] - factor * number) % PRIME
    return None if any(left) else found


def _value(polynomial: Row, x: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % PRIME
    return value
