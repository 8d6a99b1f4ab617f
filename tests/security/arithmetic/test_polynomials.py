from hypothesis import given
from hypothesis import strategies as st

from staddle.security.arithmetic.polynomials import lagrange, value

PRIME = 101
numbers = st.integers(0, PRIME - 1)


@given(st.lists(numbers, max_size=6), numbers)
def test_a_value_is_the_sum_of_its_powers(coefficients, x):
    expected = sum(number * x**power for power, number in enumerate(coefficients)) % PRIME
    assert value(coefficients, x, PRIME) == expected


@given(st.lists(numbers, min_size=1, max_size=6), st.data())
def test_weights_restore_every_polynomial_of_a_degree_below_their_number(coefficients, data):
    size = len(coefficients)
    points = data.draw(st.lists(numbers, min_size=size, max_size=size, unique=True))
    at = data.draw(numbers)
    values = [value(coefficients, x, PRIME) for x in points]
    weights = lagrange(points, at, PRIME)
    joined = sum(weight * y for weight, y in zip(weights, values, strict=True)) % PRIME
    assert joined == value(coefficients, at, PRIME)
