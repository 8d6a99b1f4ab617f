"""The keys that shares are sealed to: one per dealer, so that a silo can show what one sealed.

A silo draws one seed an attempt and derives an X25519 key for each other member of the cohort::

    private key of holder v for dealer u  HKDF(seed of v, salt = ctx, info = framed(RECEIVING, v,
                                          u))
    leaf                                  framed(u, public key)

It signs the Merkle root (security/log/merkle.py) over one leaf a dealer, in the order of the
cohort, as a part of its ``KeyBundle``. The coordinator checks all keys, and passes each dealer the
one that is for it, with its proof. A dealer u seals to v with its own key c_u: X25519(c_u, r_vu).
So the private key r_vu opens what u sealed to v and nothing else, and v can give it away as
evidence (evidence.py) without showing the shares of any other dealer, or its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import ProofError, RefusedError
from ..faults import COORDINATOR, Code, check
from ..identity.domains import SECAGG_RECEIVING, framed
from ..identity.pairwise_keys import KEY_BYTES, check_public, derive, public_key
from ..identity.selection import all_but
from ..log.merkle import Hashes, Tree, leaf_hash, verify_inclusion


@dataclass(frozen=True, slots=True)
class ReceivingKey:
    """The X25519 public key, 32 bytes, to which ``dealer`` seals for the key's owner."""

    dealer: str
    public: bytes

    def leaf(self) -> bytes:
        """Its leaf under the root that the silo signs."""
        return leaf_hash(framed(self.dealer.encode(), self.public))


@dataclass(frozen=True, slots=True)
class KeyDelivery:
    """A receiving key of ``silo`` for one dealer, with its proof under the root in its bundle."""

    silo: str
    key: ReceivingKey
    proof: Hashes


def receiving_seed(seed: bytes, ctx: bytes, silo: str, dealer: str) -> bytes:
    """The private key, 32 bytes, of ``silo`` for what ``dealer`` seals to it.

    There is one per dealer, so a silo can show it as evidence without revealing the others.
    """
    return derive(seed, ctx, framed(SECAGG_RECEIVING, silo.encode(), dealer.encode()))


def receiving_keys(
    seed: bytes, ctx: bytes, silo: str, cohort: Sequence[str]
) -> tuple[ReceivingKey, ...]:
    """The public keys of ``silo``, one for each other member of the cohort, in its order."""
    # For the whole cohort, since keys are made before U1 is known.
    return tuple(
        ReceivingKey(dealer, public_key(receiving_seed(seed, ctx, silo, dealer)))
        for dealer in all_but(cohort, silo)
    )


def key_root(keys: Sequence[ReceivingKey]) -> bytes:
    """The Merkle root over them."""
    return _tree(keys).root()


def _tree(keys: Sequence[ReceivingKey]) -> Tree:
    return Tree(key.leaf() for key in keys)


def check_keys(silo: str, root: bytes, keys: Sequence[ReceivingKey], cohort: Sequence[str]) -> None:
    """At the coordinator: RefusedError unless these are usable keys under the root.

    There must be one per other member of the cohort, in its order, none of low order. The silo is
    to blame, with code KEYS.
    """
    dealers = all_but(cohort, silo)
    whole = tuple(key.dealer for key in keys) == dealers
    check(
        whole,
        silo,
        Code.KEYS,
        f"gave {len(keys)} receiving keys, not one for each of the {len(dealers)} others",
    )

    # A point of low order would make a share that everybody opens.
    for key in keys:
        check_public(key.public, silo)
    check(
        key_root(keys) == root,
        silo,
        Code.KEYS,
        "its receiving keys do not lead to the root that it signed",
    )


def deliver_keys(silo: str, keys: Sequence[ReceivingKey]) -> dict[str, KeyDelivery]:
    """At the coordinator: by dealer, the key of a silo that this dealer gets, with its proof."""
    proofs = _tree(keys).inclusion_proofs()
    return {
        key.dealer: KeyDelivery(silo, key, proof) for key, proof in zip(keys, proofs, strict=True)
    }


def check_key_delivery(
    delivery: KeyDelivery, root: bytes, cohort: Sequence[str], dealer: str
) -> None:
    """At a dealer: RefusedError, for the coordinator, unless the silo signed this usable key.

    ``root`` comes from the silo's bundle, whose signature the dealer has checked before.
    """
    # A key that the silo did not sign would be the coordinator's, which could open what is dealt.
    # Leaves are in the order of the cohort without the owner of the keys.
    dealers = all_but(cohort, delivery.silo)
    for_us = delivery.key.dealer == dealer and len(delivery.key.public) == KEY_BYTES
    check(
        for_us,
        COORDINATOR,
        Code.KEYS,
        f"brings {dealer!r} a receiving key for {delivery.key.dealer!r}",
    )
    try:
        verify_inclusion(
            delivery.key.leaf(), dealers.index(dealer), len(dealers), root, delivery.proof
        )
    except ProofError as error:
        why = (
            f"brings {dealer!r} a receiving key that is not what {delivery.silo!r} signed: {error}"
        )
        raise RefusedError(COORDINATOR, Code.KEYS, why) from None
