"""Shares of compared vectors on their way: each dealer seals them behind its masked upload.

The machines of a secure sum carry ``Gram`` by secret sharing (shared_gram.py) along. A round
compares one part::

    upload     masked words ‖ a sealed share for each other member of the cohort, in order; zeros
               for one not in U2
    survivors  the coordinator passes each survivor the shares that the others sealed to it, with
               the headers of U3
    reveal     a survivor gives its shares of the masks, and of all inner products over U3

So the silos whose vectors are compared are the survivors that t silos signed, a share is bound to
the attempt by its key, and who is lost drops out of the comparison as out of the sum. From the keys
of the attempt, c of the dealer and r of the holder (security/identity/pairwise_keys.py), with e the
holder's number::

    key         HKDF(X25519(c, r), salt = ctx, info = framed("staddle/gram/seal/1", dealer, holder))
    sealed      ChaCha20-Poly1305(key, nonce 0, share, AAD = framed(label, ctx, dealer, holder))

Nonce 0 is safe: a silo seals once an attempt to each, and after a lost connection the same bytes.
Both private keys are in memory alone, and dropped with the attempt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from ...errors import LocalError, RefusedError
from ..arithmetic.field import NUMBER_BYTES, Integers
from ..arithmetic.fixedpoint import Words
from ..arithmetic.masks import Keystream
from ..faults import COORDINATOR, COORDINATOR_OR_SILO, Code, check
from ..identity.domains import GRAM_SEAL, framed
from ..identity.pairwise_keys import NONCE, TAG_BYTES, derive
from ..identity.selection import all_but
from .masked_sum import upload_bytes
from .shared_gram import (
    Compared,
    GramShare,
    deal,
    dumped,
    loaded,
    multiply,
    products_dumped,
    products_loaded,
)
from .spec import RoundSpec


@dataclass(frozen=True, slots=True)
class GramKeys:
    """The secrets that hide a silo's compared vectors: a fresh seed, and a key per member of U2."""

    seed: bytes = field(repr=False)
    keys: Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True, slots=True)
class SealedShare:
    """One dealer's share for the silo that it is passed on to."""

    dealer: str
    sealed: bytes


def compared(spec: RoundSpec) -> Compared:
    """The comparison of a round; LocalError where it compares nothing by shares."""
    if spec.compared is None:
        raise LocalError(
            f"round {spec.round} of job {spec.job!r} compares nothing by shares; this is a bug in"
            " Staddle"
        )
    return spec.compared


def share_key(agreed: bytes, ctx: bytes, dealer: str, holder: str) -> bytes:
    """The key of the one share that a dealer seals to a holder.

    ``agreed`` is what their keys of the attempt give.
    """
    return derive(agreed, ctx, framed(GRAM_SEAL, dealer.encode(), holder.encode()))


def sealed_bytes(spec: RoundSpec) -> int:
    """Length of one sealed share."""
    # For the whole cohort, so that all uploads have one length, whoever was lost.
    return NUMBER_BYTES * compared(spec).numbers(len(spec.cohort)) + TAG_BYTES


def message_bytes(spec: RoundSpec) -> int:
    """Length of every upload: its masked words, and the sealed shares behind them.

    In bytes. It depends only on the specification, so a length reveals nothing about a silo.
    """
    # One less than the cohort: the dealer keeps its own share.
    behind = (len(spec.cohort) - 1) * sealed_bytes(spec) if spec.compared else 0
    return upload_bytes(spec) + behind


def place_of(spec: RoundSpec, dealer: str, holder: str) -> int:
    """Where in a dealer's upload the share for a holder begins.

    An offset in bytes. ``holder`` is another member of the cohort than ``dealer``.
    """
    # Counted over the cohort, not over U2, so that places do not depend on who was lost.
    place = all_but(spec.cohort, dealer).index(holder)
    return upload_bytes(spec) + place * sealed_bytes(spec)


def deal_sealed(
    spec: RoundSpec, dealer: str, quantised: Integers, hiding: GramKeys
) -> tuple[list[bytes], bytes]:
    """The sealed shares behind a dealer's masked words, by holder, and the share that it keeps.

    The same bytes for the same vectors and keys.
    """
    own, cohort, ctx = compared(spec), len(spec.cohort), spec.context()
    # The seed is used for nothing else, so its stream may begin at 0.
    shares = deal(own, quantised, cohort, spec.colluders, Keystream(hiding.seed, 0))
    pieces = []
    for holder, share in zip(spec.cohort, shares, strict=True):
        if holder == dealer:
            kept = dumped(share)
            continue

        key = hiding.keys.get(holder)
        if key:
            aad = _associated(ctx, dealer, holder)
            pieces.append(ChaCha20Poly1305(key).encrypt(NONCE, dumped(share), aad))
        else:
            # Zeros for a silo that was lost before it dealt: every upload has one length.
            pieces.append(bytes(sealed_bytes(spec)))
    return pieces, kept


def open_share(spec: RoundSpec, key: bytes, dealer: str, holder: str, sealed: bytes) -> GramShare:
    """The share that a dealer sealed to a holder; RefusedError for anything else.

    Who altered bytes that do not open cannot be told: nobody signed them one by one.
    """
    try:
        plain = ChaCha20Poly1305(key).decrypt(
            NONCE, sealed, _associated(spec.context(), dealer, holder)
        )
    except InvalidTag:
        why = f"the share of the compared vectors of {dealer!r} for {holder!r} does not open"
        raise RefusedError(COORDINATOR_OR_SILO, Code.SHARES, why) from None

    # It opened under a key of the two alone, so what is in it is the dealer's own.
    share = loaded(compared(spec), len(spec.cohort), plain)
    if share is None:
        why = f"sealed {len(plain)} bytes to {holder!r} that are not a share of what is compared"
        raise RefusedError(dealer, Code.SHARES, why)
    return share


def check_dealers(shares: Sequence[SealedShare], others: Sequence[str]) -> None:
    """RefusedError, for the coordinator, unless each of ``others``, in order, has one share.

    ``others`` is empty in a round that compares nothing, so that any share is refused.
    """
    named = [share.dealer for share in shares]
    why = f"brings shares of compared vectors of {named}, not of the other survivors {list(others)}"
    check(named == list(others), COORDINATOR, Code.SHARES, why)


def revealed(spec: RoundSpec, shares: Mapping[str, GramShare]) -> bytes:
    """A holder's shares of all survivors' inner products, from its shares by dealer."""
    return products_dumped(
        # By number in the cohort, so that all holders have the pairs in the same order.
        multiply({spec.holder(dealer): share for dealer, share in shares.items()})
    )


def read_revealed(spec: RoundSpec, silo: str, survivors: int, data: bytes) -> Words | None:
    """Shares of inner products as a survivor revealed them, None where nothing is compared.

    RefusedError blames it.
    """
    if spec.compared is None:
        check(
            not data,
            silo,
            Code.REVEAL,
            "reveals inner products in a round that compares nothing by shares",
        )
        return None
    # Only form and number are checked; wrong products show when they are opened.
    products = products_loaded(spec.compared, survivors, data)
    if products is None:
        why = (
            f"reveals inner products of {len(data)} bytes that are not those of {survivors}"
            " survivors"
        )
        raise RefusedError(silo, Code.REVEAL, why)
    return products


def _associated(ctx: bytes, dealer: str, holder: str) -> bytes:
    return framed(GRAM_SEAL, ctx, dealer.encode(), holder.encode())
