"""Shamir's t-of-n secret sharing of 32 bytes.

The field is that of p = 2^256 + 297, the first prime above 2^256.
The shares of a secret s are points of f(x) = s + a_1 x + … + a_(t-1) x^(t-1) mod p with uniform
a_i: any t of them give s = f(0), and t - 1 of them fit every secret equally well. x is a holder's
number, 1 and up; a share is f(x), 33 bytes big-endian.

A dealer commits to each share, so that a wrong one names who revealed it::

    commitment = SHA-256(framed("staddle/secagg/share/1", ctx, dealer, holder, kind, salt, share))

The salt, 32 random bytes, travels with the share: a share of a short polynomial could otherwise be
guessed from its hash. Python's integers take a time that depends on their values: there is no
protection against an attacker who can time this process closely.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ...errors import check_local
from ..identity.domains import SECAGG_SHARE, framed
from .polynomials import lagrange, value

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33
SALT_BYTES = 32

# n -> n bytes: os.urandom in production, a keyed stream in tests
Draw: TypeAlias = Callable[[int], bytes]


def split(secret: bytes, threshold: int, holders: Sequence[int], draw: Draw) -> dict[int, bytes]:
    """Shares of a secret (32 bytes) by holder; any ``threshold`` of them restore it.

    Holders are distinct numbers from 1 on, and a share has 33 bytes. LocalError for other holders,
    a secret of another length, or a threshold that is not from 1 to the number of holders.
    """
    size = len(secret)
    check_local(
        size == SECRET_BYTES, f"a secret of {size} bytes cannot be shared; it has {SECRET_BYTES}"
    )
    points = split_number(int.from_bytes(secret), threshold, holders, draw)
    return {holder: share.to_bytes(SHARE_BYTES) for holder, share in points.items()}


def split_number(
    secret: int, threshold: int, holders: Sequence[int], draw: Draw, prime: int = PRIME
) -> dict[int, int]:
    """Like ``split``, for a number of any prime field."""
    number = 0 <= secret < prime
    check_local(number, f"the secret is not a number of the field, 0 to {prime - 1}")
    most = len(holders)
    check_local(
        1 <= threshold <= most, f"threshold {threshold} is not 1 to {most}, the number of holders"
    )
    check_holders(holders, prime)
    # Degree t - 1: t shares determine the polynomial, and t - 1 shares fit every secret.
    coefficients = [secret, *(uniform(draw, prime) for _ in range(threshold - 1))]
    return {x: value(coefficients, x, prime) for x in holders}


def uniform(draw: Draw, prime: int) -> int:
    """A number of 0 to ``prime`` - 1, each equally likely: draws until one is below it."""
    # A number reduced mod p would favour small ones, and with them what shares tell of a secret.
    # Cut to as many bits as p has, at least half of the draws are below p.
    bits = prime.bit_length()
    mask = (1 << bits) - 1
    number = prime
    while number >= prime:
        number = int.from_bytes(draw((bits + 7) // 8)) & mask
    return number


def weights_at_zero(holders: Sequence[int], prime: int = PRIME) -> tuple[int, ...]:
    """Lagrange weights l_i with f(0) = Σ l_i f(x_i) mod p, the same for all secrets.

    LocalError for holders that are not distinct numbers from 1 on. Time grows with the square of
    their number, so callers keep the weights of a set.
    """
    check_holders(holders, prime)
    return tuple(lagrange(holders, 0, prime))


def join_numbers(shares: Sequence[int], weights: Sequence[int], prime: int = PRIME) -> int:
    """f(0) from shares in the order of the holders to whom the weights belong.

    LocalError for a share that is not a number of the field. Check a peer's share before, by
    ``is_share``, so that the peer is blamed.
    """
    check_local(
        all(0 <= share < prime for share in shares),
        f"a share is not a number of the field, 0 to {prime - 1}; check it before joining",
    )
    return sum(share * weight for share, weight in zip(shares, weights, strict=True)) % prime


def join(shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes | None:
    """The secret of 32 bytes; None if the shares join to a number that is 2^256 or more.

    No honest dealer deals such a number. ``weights`` are those of exactly the holders in
    ``shares``. Only the dealer's commitment tells whether the secret is the right one.
    """
    check_local(
        shares.keys() == weights.keys(),
        f"shares of holders {sorted(shares)} cannot be joined by weights of {sorted(weights)}",
    )
    numbers = [int.from_bytes(share) for share in shares.values()]
    number = join_numbers(numbers, [weights[holder] for holder in shares])

    # p is above 2^256, so shares that do not fit together may lead to a number of 33 bytes.
    return number.to_bytes(SECRET_BYTES) if number < 1 << 8 * SECRET_BYTES else None


def is_share(data: bytes) -> bool:
    """True if bytes are the one spelling of a number of the field."""
    return len(data) == SHARE_BYTES and int.from_bytes(data) < PRIME


def commitment(
    ctx: bytes, dealer: str, holder: str, kind: bytes, salt: bytes, share: bytes
) -> bytes:
    """The dealer's commitment to one share, 32 bytes; ``kind`` names the secret that is shared.

    The salt hides the share. Context, dealer, holder and kind keep one commitment from being used
    as another's.
    """
    return hashlib.sha256(
        framed(SECAGG_SHARE, ctx, dealer.encode(), holder.encode(), kind, salt, share)
    ).digest()


def check_holders(holders: Sequence[int], prime: int = PRIME) -> None:
    """LocalError for a repeated holder, or one whose share would be the secret: f(0)."""
    distinct = len(set(holders)) == len(holders)
    check_local(
        distinct and all(0 < x < prime for x in holders),
        f"holders {list(holders)} are not distinct numbers from 1 on",
    )
