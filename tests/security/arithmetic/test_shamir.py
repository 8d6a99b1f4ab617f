from collections import Counter
from fractions import Fraction
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.secure_sums import Drawn

from staddle.errors import LocalError
from staddle.security.arithmetic import shamir

SECRET = bytes(range(32))


def slow_join(points, prime):
    """Lagrange at 0 over the rationals' own formula, reduced at the end; it shares no code."""
    total = Fraction(0)
    for x, y in points.items():
        term = Fraction(y)
        for other in points:
            if other != x:
                term *= Fraction(-other, x - other)
        total += term
    return total.numerator * pow(total.denominator, -1, prime) % prime


def is_prime(n):
    """Miller-Rabin to forty bases."""
    d, r = n - 1, 0
    while d % 2 == 0:
        d, r = d // 2, r + 1
    for a in range(2, 42):
        x = pow(a, d, n)
        if x in (1, n - 1):
            continue
        for _ in range(r - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def joined(shares):
    order = sorted(shares)
    return shamir.join(shares, dict(zip(order, shamir.weights_at_zero(order), strict=True)))


def test_the_field_is_that_of_the_first_prime_above_two_to_256():
    assert is_prime(shamir.PRIME)
    assert not any(is_prime(2**256 + offset) for offset in range(1, 297))


@pytest.mark.parametrize(("n", "t"), [(n, t) for n in range(1, 7) for t in range(1, n + 1)])
def test_every_subset_of_t_gives_the_secret_and_of_fewer_does_not(n, t):
    shares = shamir.split(SECRET, t, range(1, n + 1), Drawn(f"{n}/{t}"))
    for size in range(1, n + 1):
        for chosen in combinations(shares, size):
            some = {x: shares[x] for x in chosen}
            assert (joined(some) == SECRET) == (size >= t)


@given(st.data())
def test_agrees_with_the_slow_oracle(data):
    holders = data.draw(st.lists(st.integers(1, 1000), min_size=1, max_size=9, unique=True))
    t = data.draw(st.integers(1, len(holders)))
    secret = data.draw(st.binary(min_size=32, max_size=32))
    shares = shamir.split(secret, t, holders, Drawn(data.draw(st.integers())))
    chosen = {x: shares[x] for x in data.draw(st.permutations(holders))[:t]}
    assert joined(chosen) == secret
    found = slow_join({x: int.from_bytes(s) for x, s in chosen.items()}, shamir.PRIME)
    assert found == int.from_bytes(secret)


@pytest.mark.parametrize(("prime", "t"), [(5, 2), (5, 3), (7, 3)])
def test_fewer_shares_than_t_tell_nothing(prime, t):
    """Over all polynomials of a tiny field, t - 1 holders see the same counts for each secret."""

    class Listed:
        def __init__(self, numbers):
            self.numbers = list(numbers)

        def __call__(self, n):
            assert n == 1
            return bytes([self.numbers.pop(0)])

    holders = range(1, prime)
    for seen in combinations(holders, t - 1):
        views = []
        for secret in range(prime):
            count = Counter()
            for coefficients in product(range(prime), repeat=t - 1):
                shares = shamir.split_number(secret, t, holders, Listed(coefficients), prime)
                count[tuple(shares[x] for x in seen)] += 1
            views.append(count)
        assert all(view == views[0] for view in views)
        assert set(views[0].values()) == {1}


def test_uniform_draws_again_rather_than_fold():
    draws = iter([b"\xff", b"\xfd", b"\x06"])  # masked to three bits: 7, 5, 6; the field is 0 to 4
    with pytest.raises(StopIteration):
        shamir.uniform(lambda _: next(draws), 5)
    counts = Counter(shamir.uniform(lambda _, b=b: bytes([b]), 5) for b in range(256) if b % 8 < 5)
    assert set(counts.values()) == {32}


def test_bytes_of_one_sharing_are_known():
    shares = shamir.split(SECRET, 2, [1, 2, 3], Drawn("golden"))
    slope = (int.from_bytes(shares[1]) - int.from_bytes(SECRET)) % shamir.PRIME
    found = [int.from_bytes(shares[x]) for x in (2, 3)]
    assert found == [(int.from_bytes(SECRET) + x * slope) % shamir.PRIME for x in (2, 3)]
    assert shares[1].hex() == "0049c1cdce49ac6ea836c2a086a530fabd692a17bcfcadcc4d00ae0776747c825e"


def test_a_number_that_is_no_secret_joins_to_none():
    shares = shamir.split_number(2**256 + 5, 2, [1, 2, 3], Drawn(0))
    assert joined({x: s.to_bytes(33) for x, s in shares.items() if x < 3}) is None


@pytest.mark.parametrize(("secret", "t", "holders", "why"), [
    (SECRET[:31], 1, [1], "31 bytes"), (SECRET, 0, [1, 2], "threshold 0"),
    (SECRET, 3, [1, 2], "threshold 3"), (SECRET, 1, [0, 1], "distinct numbers from 1"),
    (SECRET, 1, [2, 2], "distinct numbers from 1"),
])  # fmt: skip
def test_what_cannot_be_shared(secret, t, holders, why):
    with pytest.raises(LocalError, match=why):
        shamir.split(secret, t, holders, Drawn(0))


def test_what_cannot_be_joined():
    with pytest.raises(LocalError, match="not a number of the field"):
        shamir.join_numbers([shamir.PRIME], [1])
    with pytest.raises(LocalError, match="cannot be joined"):
        shamir.join({1: bytes(33)}, {2: 1})


def test_one_spelling_of_a_share():
    assert shamir.is_share((shamir.PRIME - 1).to_bytes(33))
    assert not shamir.is_share(shamir.PRIME.to_bytes(33))
    assert not shamir.is_share(bytes(32))
    assert not shamir.is_share(bytes(34))


def test_a_commitment_binds_each_of_its_fields():
    fields = (b"c" * 32, "a", "b", b"self", b"s" * 32, b"v" * 33)
    changed = (b"d" * 32, "b", "a", b"key", b"t" * 32, b"w" * 33)
    found = {shamir.commitment(*fields)}
    for i, other in enumerate(changed):
        found.add(shamir.commitment(*fields[:i], other, *fields[i + 1 :]))
    assert len(found) == 7
