"""The first half of a secure sum: each silo's fresh keys, and the shares of its two secrets.

A silo draws five seeds of 32 bytes an attempt: of the key that it seals shares with, of the key
that it agrees on masks with, of the mask that it has to itself, of all that it draws while dealing,
and of the keys that others seal to (receiving_keys.py); and a sixth for vectors that are compared
by shares (gram_pieces.py). It deals shares of the second and third, because the coordinator needs
the one if the silo is lost and the other if it is not. Its signature is over a Merkle root
(security/log/merkle.py) of one leaf a holder, so that all see one word of the dealer, and each
holder its own portion alone.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...errors import ProofError, RefusedError
from ..arithmetic.masks import Keystream
from ..arithmetic.shamir import SALT_BYTES, SHARE_BYTES, Draw, commitment, is_share, split
from ..faults import COORDINATOR, Code, check
from ..identity.domains import SECAGG_DEALING, SECAGG_KEYS, SECAGG_SEED, framed
from ..identity.pairwise_keys import (
    KEY_BYTES,
    TAG_BYTES,
    agree,
    agree_with_each,
    check_public,
    public_key,
    seal,
    seal_key,
    unseal,
)
from ..identity.signers import Sign, Signers
from ..log.merkle import HASH_BYTES, Hashes, Tree, leaf_hash, verify_inclusion
from .receiving_keys import KeyDelivery

# kinds of shares: of the self-mask seed, and of the seed of the pairwise masks' key
SELF, PAIR = b"self", b"pair"
SEALED_BYTES = 2 * (SHARE_BYTES + SALT_BYTES) + TAG_BYTES


@dataclass(frozen=True, slots=True)
class Seeds:
    """A silo's secrets of one attempt, 32 bytes each; printing them shows nothing."""

    seal: bytes = field(repr=False)
    mask: bytes = field(repr=False)
    own: bytes = field(repr=False)
    dealing: bytes = field(repr=False)
    receiving: bytes = field(repr=False)
    comparing: bytes = field(default=b"", repr=False)

    def drawing(self) -> Draw:
        """Coefficients and salts, from the stream of ``dealing`` (arithmetic/masks.py).

        A replay draws the same ones.
        """
        stream = Keystream(self.dealing, 0)

        def draw(n: int) -> bytes:
            made = bytearray(n)
            stream.fill(memoryview(made))
            return bytes(made)

        return draw


@dataclass(frozen=True, slots=True)
class KeyBundle:
    """A silo's public keys of one attempt, 32 bytes each.

    ``seal`` seals shares, ``mask`` makes masks.

    ``receiving`` is the Merkle root over the keys to which others seal.
    """

    silo: str
    seal: bytes
    mask: bytes
    receiving: bytes
    signature: bytes = b""

    def signed_bytes(self, ctx: bytes) -> bytes:
        """The bytes that the silo signs, behind KEYS."""
        return framed(ctx, self.silo.encode(), self.seal, self.mask, self.receiving)

    def encoded(self, ctx: bytes) -> bytes:
        """All of it, for H(U1)."""
        return framed(self.signed_bytes(ctx), self.signature)

    def check(self, ctx: bytes, signers: Signers) -> None:
        """RefusedError unless these are keys, and the silo signed them for this attempt."""
        signed = signers.by_silo(self.silo, SECAGG_KEYS, self.signed_bytes(ctx), self.signature)
        check(signed, self.silo, Code.KEYS, "the signature over its keys does not fit this attempt")
        # Every agreement with a key of low order is zero: everybody would know the masks, and the
        # keys under which shares are sealed.
        for key in (self.seal, self.mask):
            check_public(key, self.silo)


def make_bundle(
    ctx: bytes, silo: str, seal_seed: bytes, mask_seed: bytes, receiving: bytes, sign: Sign
) -> KeyBundle:
    """The signed bundle of two 32-byte seeds and the root over the keys to which others seal."""
    bundle = KeyBundle(silo, public_key(seal_seed), public_key(mask_seed), receiving)
    return replace(bundle, signature=sign(SECAGG_KEYS, bundle.signed_bytes(ctx)))


def distinct_keys(bundles: Sequence[KeyBundle]) -> KeyBundle | None:
    """The first bundle with a key that another place has already; None if all are distinct."""
    # The seed of a mask key is revealed if its silo is lost; were it that of the seal key too, all
    # that it sealed would open.
    seen: set[bytes] = set()
    for bundle in bundles:
        if bundle.seal == bundle.mask or seen & {bundle.seal, bundle.mask}:
            return bundle
        seen |= {bundle.seal, bundle.mask}
    return None


@dataclass(frozen=True, slots=True)
class HeldShare:
    """A share of one dealer and its salt, as its holder keeps and reveals it.

    Printing it shows no secret.
    """

    share: bytes = field(repr=False)
    salt: bytes = field(repr=False)

    def fits(self, ctx: bytes, dealer: str, holder: str, kind: bytes, committed: bytes) -> bool:
        """True if it is the share that the dealer committed to."""
        # A dealer may commit to bytes that are not a share.
        sized = is_share(self.share) and len(self.salt) == SALT_BYTES
        return sized and commitment(ctx, dealer, holder, kind, self.salt, self.share) == committed


@dataclass(frozen=True, slots=True)
class HeldShares:
    """Both shares of one dealer that a silo holds, of which it reveals at most one."""

    own: HeldShare  # of the self-mask seed
    pair: HeldShare  # of the mask key's seed

    def of(self, kind: bytes) -> HeldShare:
        """The share of this kind."""
        return self.own if kind == SELF else self.pair


@dataclass(frozen=True, slots=True)
class Portion:
    """One holder's part of a dealing: sealed shares and salts, 146 bytes, and their commitments.

    ``key`` is the holder's receiving key to which they are sealed. The dealer signs it with the
    rest, so that whoever shows the private key shows what the dealer sealed (evidence.py). A
    dealer's portion to itself holds commitments only.
    """

    holder: str
    key: bytes
    sealed: bytes
    own: bytes
    pair: bytes

    def leaf(self) -> bytes:
        """Its leaf under the dealing's root."""
        return leaf_hash(framed(self.holder.encode(), self.key, self.sealed, self.own, self.pair))

    def committed(self, kind: bytes) -> bytes:
        """The commitment to the share of this kind."""
        return self.own if kind == SELF else self.pair


@dataclass(frozen=True, slots=True)
class Dealing:
    """A dealer's signed word on all of its portions, in the order of U1.

    ``seed`` is the commitment to its self-mask seed (``seed_commitment``), ``root`` the Merkle root
    with one leaf per portion, and ``h_u1`` the digest of the keys that it saw. All have 32 bytes.
    """

    dealer: str
    h_u1: bytes
    seed: bytes
    root: bytes
    signature: bytes = b""

    def signed_bytes(self, ctx: bytes) -> bytes:
        """The bytes that the dealer signs, behind DEALING."""
        return framed(ctx, self.dealer.encode(), self.h_u1, self.seed, self.root)

    def encoded(self, ctx: bytes) -> bytes:
        """All of it, for H(U2)."""
        return framed(self.signed_bytes(ctx), self.signature)

    def check(self, ctx: bytes, h_u1: bytes, signers: Signers) -> None:
        """RefusedError unless the dealer signed this for the same U1 as ours."""
        signed = signers.by_silo(
            self.dealer, SECAGG_DEALING, self.signed_bytes(ctx), self.signature
        )
        check(
            signed,
            self.dealer,
            Code.SHARES,
            "the signature over what it deals does not fit this attempt",
        )
        check(
            self.h_u1 == h_u1,
            self.dealer,
            Code.SHARES,
            "dealt among another set of silos than ours",
        )


def deal(
    ctx: bytes,
    h_u1: bytes,
    keys: Sequence[KeyDelivery],
    dealer: str,
    seeds: Seeds,
    threshold: int,
    holders: Mapping[str, int],
    sign: Sign,
) -> tuple[Dealing, tuple[Portion, ...], HeldShares]:
    """Split both seeds among U1; what is sent, and what the dealer keeps for itself.

    ``keys`` are those to which it seals, one of each other member of U1; the caller checked them.
    """
    public = {delivery.silo: delivery.key.public for delivery in keys}
    # Shares and salts are drawn from one stream, so members come in one order: the same seeds then
    # make the same bytes.
    members, draw = sorted([dealer, *public]), seeds.drawing()
    numbers = [holders[silo] for silo in members]
    own, pair = (split(seed, threshold, numbers, draw) for seed in (seeds.own, seeds.mask))

    others = {silo: public[silo] for silo in members if silo != dealer}
    agreed = agree_with_each(seeds.seal, others)

    # Whoever reveals another share than it was dealt is named by its commitment.
    portions = []
    for silo in members:
        number = holders[silo]
        held = HeldShares(
            HeldShare(own[number], draw(SALT_BYTES)), HeldShare(pair[number], draw(SALT_BYTES))
        )
        commitments = [
            commitment(ctx, dealer, silo, kind, held.of(kind).salt, held.of(kind).share)
            for kind in (SELF, PAIR)
        ]
        # The dealer's own share stays in memory. Its portion has commitments only, and keeps the
        # leaves of all members at their places.
        if silo == dealer:
            kept, sealed = held, b""
        else:
            plain = held.own.share + held.own.salt + held.pair.share + held.pair.salt
            key = seal_key(agreed[silo], ctx, dealer, silo)
            sealed = seal(key, ctx, dealer, silo, plain)
        portions.append(Portion(silo, public.get(silo, b""), sealed, *commitments))

    root = _tree(portions).root()
    unsigned = Dealing(dealer, h_u1, seed_commitment(ctx, dealer, seeds.own), root)
    signature = sign(SECAGG_DEALING, unsigned.signed_bytes(ctx))
    return Dealing(dealer, h_u1, unsigned.seed, root, signature), tuple(portions), kept


def _tree(portions: Sequence[Portion]) -> Tree:
    return Tree(portion.leaf() for portion in portions)


def check_portions(dealing: Dealing, portions: Sequence[Portion], members: Sequence[str]) -> None:
    """RefusedError, for the dealer, unless these are all that the dealing covers, one per member.

    It runs at the coordinator for each dealing, and wherever evidence against a dealer is checked.
    """
    check(
        [portion.holder for portion in portions] == list(members),
        dealing.dealer,
        Code.SHARES,
        f"dealt to {len(portions)} holders that are not the {len(members)} of U1",
    )

    # A dealer keeps its own share unsealed.
    for portion in portions:
        sealed = (0, 0) if portion.holder == dealing.dealer else (KEY_BYTES, SEALED_BYTES)
        fields = (portion.key, portion.sealed, portion.own, portion.pair)
        check(
            tuple(map(len, fields)) == (*sealed, HASH_BYTES, HASH_BYTES),
            dealing.dealer,
            Code.SHARES,
            f"its portion for {portion.holder!r} has the wrong size",
        )

    # Holders see one portion each, so the dealer signs one root over all of them.
    root = _tree(portions).root()
    check(
        root == dealing.root,
        dealing.dealer,
        Code.SHARES,
        "its portions do not lead to the root that it signed",
    )


@dataclass(frozen=True, slots=True)
class PortionDelivery:
    """One dealer's portion for one holder, with its proof under the dealing's root.

    All holders check theirs against the same signed root. So whatever a dealer did to one of them
    is signed, and can be shown to all.
    """

    dealing: Dealing
    portion: Portion
    proof: Hashes


def deliver(dealing: Dealing, portions: Sequence[Portion]) -> tuple[PortionDelivery, ...]:
    """The delivery for each holder, in the order of U1.

    By its inclusion proof, a holder checks its portion without those of the others.
    """
    proofs = _tree(portions).inclusion_proofs()
    return tuple(
        PortionDelivery(dealing, portion, proof)
        for portion, proof in zip(portions, proofs, strict=True)
    )


def check_delivery(
    delivery: PortionDelivery, members: Sequence[str], holder: str, key: bytes
) -> None:
    """RefusedError, for the coordinator, unless the dealer signed this portion for ``holder``.

    ``key`` is the receiving key that the holder sent for this dealer, empty for its own dealing.
    """
    portion, dealing = delivery.portion, delivery.dealing

    # Another holder's portion does not open either, but then the dealer would be blamed for it.
    check(
        portion.holder == holder,
        COORDINATOR,
        Code.SHARES,
        f"brought {holder!r} a portion for {portion.holder!r}",
    )

    # The dealer signs the key that it was brought: a swapped key is the coordinator's fault.
    why = (
        f"brought {holder!r} a portion of {dealing.dealer!r} that is sealed to a key which it never"
        " gave"
    )
    check(portion.key == key, COORDINATOR, Code.SHARES, why)

    # From here on a portion that does not open is the dealer's fault, and the proof shows it.
    try:
        verify_inclusion(
            portion.leaf(), members.index(holder), len(members), dealing.root, delivery.proof
        )
    except ProofError as error:
        why = (
            f"brought a portion for {holder!r} that is not what {dealing.dealer!r} signed: {error}"
        )
        raise RefusedError(COORDINATOR, Code.SHARES, why) from None


def open_portion(portion: Portion, ctx: bytes, dealer: KeyBundle, receiving: bytes) -> HeldShares:
    """Open what a silo dealt; ``receiving`` is the holder's private key for it.

    RefusedError names the dealer.
    """
    # Whatever fails here is the dealer's fault: ``check_delivery`` ruled out the coordinator.
    holder = portion.holder
    # (1) It opens.
    key = seal_key(agree(receiving, dealer.seal, dealer.silo), ctx, dealer.silo, holder)
    plain = unseal(key, ctx, dealer.silo, holder, portion.sealed)

    # (2) Both shares fit their commitments.
    half = SHARE_BYTES + SALT_BYTES
    shares = [HeldShare(p[:SHARE_BYTES], p[SHARE_BYTES:]) for p in (plain[:half], plain[half:])]
    held = HeldShares(*shares)
    for kind in (SELF, PAIR):
        fits = held.of(kind).fits(ctx, dealer.silo, holder, kind, portion.committed(kind))
        check(
            fits,
            dealer.silo,
            Code.SHARES,
            f"its share for {holder!r} does not fit the commitment to it",
        )
    return held


def seed_commitment(ctx: bytes, dealer: str, seed: bytes) -> bytes:
    """The commitment that a dealer publishes to its self-mask seed, 32 bytes.

    The seed is 32 uniform bytes, so the commitment needs no salt.
    """
    return hashlib.sha256(framed(SECAGG_SEED, ctx, dealer.encode(), seed)).digest()
