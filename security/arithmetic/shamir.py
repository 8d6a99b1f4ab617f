"""Shamir's t-of-n secret sharing of 32 bytes, over the field of p = 2^256 + 297, the first prime
above 2^256.

The shares of a secret s are points of f(x) = s + a_1 x + … + a_(t-1) x^(t-1) mod p with uniform
a_i: any t of them give s = f(0), and t - 1 of them fit every secret equally well. x is a holder's
number, 1 and up; a share is f(x), 33 bytes big-endian.

A dealer commits to each share, so that a wrong one names who gave it::

    commitment = SHA-256(framed("staddle/secagg/share/1", ctx, dealer, holder, kind, salt, share))

The salt, 32 random bytes, travels with the share: a share of a short polynomial could else be
guessed from its hash. Python's integers take a time that depends on their values; whoever can time
this process closely is not kept out.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ...errors import LocalError
from ..identity.domains import SECAGG_SHARE, framed

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33
SALT_BYTES = 32

# n -> n bytes: os.urandom in production, a keyed stream in tests
Draw: TypeAlias = Callable[[int], bytes]


def split(secret: bytes, threshold: int, holders: Sequence[int], draw: Draw) -> dict[int, bytes]:
    """Shares of a secret (32 bytes) by holder, of which ``threshold`` give it back."""
    if len(secret) != SECRET_BYTES:
        raise LocalError(f"a secret of {len(secret)} bytes cannot be shared; it has {SECRET_BYTES}")
    points = split_number(int.from_bytes(secret), threshold, holders, draw)
    return {holder: share.to_bytes(SHARE_BYTES) for holder, share in points.items()}


def split_number(
    secret: int, threshold: int, holders: Sequence[int], draw: Draw, prime: int = PRIME
) -> dict[int, int]:
    """The same for a number of any prime field."""
    if not 0 <= secret < prime:
        raise LocalError(f"the secret is not a number of the field, 0 to {prime - 1}")
    if not 1 <= threshold <= len(holders):
        raise LocalError(f"threshold {threshold} is not 1 to {len(holders)}, the number of holders")
    check_holders(holders, prime)
    coefficients = [secret, *(uniform(draw, prime) for _ in range(threshold - 1))]
    points = {}
    for x in holders:
        value = 0
        for coefficient in reversed(coefficients):  # Horner
            value = (value * x + coefficient) % prime
        points[x] = value
    return points


def uniform(draw: Draw, prime: int) -> int:
    """A number of 0 to ``prime`` - 1, each equally likely: draws until one is below it."""
    bits = prime.bit_length()
    while True:
        number = int.from_bytes(draw((bits + 7) // 8)) & ((1 << bits) - 1)
        if number < prime:
            return number


def weights_at_zero(holders: Sequence[int], prime: int = PRIME) -> tuple[int, ...]:
    """Lagrange weights l_i with f(0) = Σ l_i f(x_i) mod p; one set of holders has one set of
    weights.
    """
    check_holders(holders, prime)
    weights = []
    for x in holders:
        above, below = 1, 1
        for other in holders:
            if other != x:
                above, below = above * other % prime, below * (other - x) % prime
        weights.append(above * pow(below, -1, prime) % prime)
    return tuple(weights)


def join_numbers(shares: Sequence[int], weights: Sequence[int], prime: int = PRIME) -> int:
    """f(0) from shares in the order of the holders to whom the weights belong."""
    for share in shares:
        if not 0 <= share < prime:
            raise LocalError(
                f"a share is not a number of the field, 0 to {prime - 1}; check it before joining"
            )
    return sum(share * weight for share, weight in zip(shares, weights, strict=True)) % prime


def join(shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes | None:
    """The secret of 32 bytes; None if the shares give a number of the field that is none, which no
    honest dealer deals.

    ``weights`` are those of exactly the holders in ``shares``. Whether it is the right one, only
    its commitment tells.
    """
    if shares.keys() != weights.keys():
        raise LocalError(
            f"shares of holders {sorted(shares)} cannot be joined by weights of {sorted(weights)}"
        )
    order = sorted(shares)
    number = join_numbers([int.from_bytes(shares[x]) for x in order], [weights[x] for x in order])
    return number.to_bytes(SECRET_BYTES) if number < 1 << 8 * SECRET_BYTES else None


def is_share(data: bytes) -> bool:
    """Whether bytes are the one spelling of a number of the field."""
    return len(data) == SHARE_BYTES and int.from_bytes(data) < PRIME


def commitment(
    ctx: bytes, dealer: str, holder: str, kind: bytes, salt: bytes, share: bytes
) -> bytes:
    """What the dealer publishes of one share, 32 bytes; ``kind`` says of which of its secrets."""
    return hashlib.sha256(
        framed(SECAGG_SHARE, ctx, dealer.encode(), holder.encode(), kind, salt, share)
    ).digest()


def check_holders(holders: Sequence[int], prime: int = PRIME) -> None:
    """LocalError for a holder twice, or for one at which the share would be the secret itself."""
    if len(set(holders)) != len(holders) or not all(0 < x < prime for x in holders):
        raise LocalError(f"holders {list(holders)} are not distinct numbers from 1 on")
