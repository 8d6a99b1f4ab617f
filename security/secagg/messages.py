"""The messages of a secure sum in order: who makes each, what it signs, how it is checked.

===============  ====================  =============================================================
message          from, to              signed, behind its label: framed(ctx, silo, ...)
===============  ====================  =============================================================
``KeyBundle``    silo, to all          its two X25519 keys of this attempt, the Merkle root over its
                                       receiving keys
``KeyDelivery``  silo, to one dealer   nothing itself: ``KeyBundle.receiving`` covers it; travels
                                       with its proof
``Dealing``      silo, to all          H(U1), the commitment to its self-mask seed, the Merkle root
                                       over what it deals
``Portion``      silo, to one holder   nothing itself: ``Dealing.root`` covers it; travels as
                                       ``Delivery`` with its proof
``Complaint``    silo, to coordinator  H(U2), the private key that opens what one dealer sealed to
                                       it (evidence.py)
``Header``       silo, to all          H(U2), the length, SHA-256 and tags of its upload
``Survival``     silo, to all          H(U1), H(U2), H(U3): the one set of survivors that it will
                                       help to unmask
``Reveal``       silo, to coordinator  H(U3), one share of each member of U2, shares of inner
                                       products (gram_pieces.py)
``Abandon``      silo, to all          that it never signs or unmasks this attempt
===============  ====================  =============================================================

H(U) is the SHA-256 of the signed messages themselves, in the order of the silos' ids: bundles (U1),
dealings (U2), headers (U3). So whoever signs a later set has agreed on all that came before. The
first four are in dealing.py and receiving_keys.py.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..faults import Code, check
from ..identity.domains import (
    SECAGG_ABANDON,
    SECAGG_REVEAL,
    SECAGG_SET,
    SECAGG_SURVIVORS,
    SECAGG_UPLOAD,
    framed,
)
from ..identity.signers import Sign, Signers
from ..log.merkle import HASH_BYTES
from .dealing import PAIR, SELF, HeldShare, HeldShares, Portion
from .gram_pieces import message_bytes
from .linear_tags import decoded
from .spec import RoundSpec


@dataclass(frozen=True, slots=True)
class Header:
    """A silo's signed word on its masked upload; ``tags`` are its linear tags, padded, or empty.

    ``length``, in bytes, and ``sha256`` are of the whole upload: words, then sealed shares of
    compared vectors. ``h_u2`` is H(U2), of the silos with which it is masked.
    """

    silo: str
    h_u2: bytes
    length: int
    sha256: bytes
    tags: bytes = b""
    signature: bytes = b""

    def signed_bytes(self, ctx: bytes) -> bytes:
        """The bytes that the silo signs, behind UPLOAD."""
        return framed(
            ctx, self.silo.encode(), self.h_u2, self.length.to_bytes(8), self.sha256, self.tags
        )

    def encoded(self, ctx: bytes) -> bytes:
        """All of it, for H(U3)."""
        return framed(self.signed_bytes(ctx), self.signature)

    def check(self, ctx: bytes, h_u2: bytes, spec: RoundSpec, signers: Signers) -> None:
        """RefusedError unless the silo signed an upload of the right length and tags for our U2.

        The code is UPLOAD, and the silo is to blame. At another silo the coordinator is, since it
        could have seen the same (``faults.passed_on``).
        """
        # Every upload has one length, which follows from the specification alone.
        due, groups = message_bytes(spec), len(spec.groups) if spec.tagged else 0
        right = self.length == due and len(self.sha256) == HASH_BYTES
        check(right, self.silo, Code.UPLOAD, f"its upload has {self.length} bytes, not {due}")
        # ``groups`` is 0 in a sum without tags, so any bytes of tags are refused.
        tags = decoded(self.tags, groups)
        check(
            tags is not None,
            self.silo,
            Code.UPLOAD,
            f"its tags, {len(self.tags)} bytes, are not {groups} numbers",
        )
        signed = signers.by_silo(self.silo, SECAGG_UPLOAD, self.signed_bytes(ctx), self.signature)
        check(
            signed,
            self.silo,
            Code.UPLOAD,
            "the signature over its upload does not fit this attempt",
        )
        check(
            self.h_u2 == h_u2, self.silo, Code.UPLOAD, "masked for another set of silos than ours"
        )


def make_header(
    ctx: bytes, silo: str, h_u2: bytes, length: int, sha256: bytes, tags: bytes, sign: Sign
) -> Header:
    """The signed header of an upload that has been streamed."""
    header = Header(silo, h_u2, length, sha256, tags)
    return Header(silo, h_u2, length, sha256, tags, sign(SECAGG_UPLOAD, header.signed_bytes(ctx)))


@dataclass(frozen=True, slots=True)
class Survival:
    """A survivor's signature over the sets; whose they are, the receiver knows itself.

    The sets are not sent along, so only a signature over the receiver's own sets verifies.
    """

    silo: str
    signature: bytes

    def check(self, ctx: bytes, sets: "Sets", signers: Signers) -> None:
        """RefusedError unless the silo signed exactly these sets."""
        check(
            self.holds(ctx, sets, signers), self.silo, Code.NOTES, "signed no such set of survivors"
        )

    def holds(self, ctx: bytes, sets: "Sets", signers: Signers) -> bool:
        """True if the silo signed exactly these sets."""
        return signers.by_silo(
            self.silo, SECAGG_SURVIVORS, sets.signed_bytes(ctx, self.silo), self.signature
        )


def make_survival(ctx: bytes, silo: str, sets: "Sets", sign: Sign) -> Survival:
    """Signed at most once an attempt."""
    return Survival(silo, sign(SECAGG_SURVIVORS, sets.signed_bytes(ctx, silo)))


@dataclass(frozen=True, slots=True)
class Sets:
    """H(U1), H(U2), H(U3), 32 bytes each."""

    h_u1: bytes
    h_u2: bytes
    h_u3: bytes

    def signed_bytes(self, ctx: bytes, silo: str) -> bytes:
        """The bytes that a survivor signs, behind SURVIVORS."""
        # All three digests, so that signers of the same survivors saw the same keys and dealings.
        return framed(ctx, silo.encode(), self.h_u1, self.h_u2, self.h_u3)


def silos_of(headers: Sequence[Header]) -> list[str]:
    """The silos whose headers these are, in their order."""
    return [header.silo for header in headers]


@dataclass(frozen=True, slots=True)
class SurvivorsShown:
    """An attempt's survivors, for a silo that was away: U3 by silo, and signatures over it."""

    ctx: bytes
    h_u1: bytes
    h_u2: bytes
    headers: tuple[Header, ...]
    survivals: tuple[Survival, ...]

    def signers(self, members: Collection[str], signers: Signers) -> frozenset[str]:
        """The ``members`` that are survivors and signed exactly these."""
        h_u3 = set_digest(b"U3", self.ctx, [header.encoded(self.ctx) for header in self.headers])
        sets, survivors = Sets(self.h_u1, self.h_u2, h_u3), set(silos_of(self.headers))
        # Only members of the attempt's U1 had a part in it; other signatures do not count.
        return frozenset(
            each.silo
            for each in self.survivals
            if each.silo in survivors.intersection(members) and each.holds(self.ctx, sets, signers)
        )


@dataclass(frozen=True, slots=True)
class Revealed:
    """One share of one dealer."""

    dealer: str
    kind: bytes
    held: HeldShare


@dataclass(frozen=True, slots=True)
class Reveal:
    """A survivor's shares to take the masks off: one per member of U2, in order of their ids.

    ``products`` are its shares of the inner products of all survivors, where vectors are compared
    by shares.
    """

    silo: str
    shares: tuple[Revealed, ...]
    signature: bytes = b""
    products: bytes = field(default=b"", repr=False)

    def signed_bytes(self, ctx: bytes, h_u3: bytes) -> bytes:
        """The bytes that the survivor signs, behind REVEAL."""
        pieces = [
            p for r in self.shares for p in (r.dealer.encode(), r.kind, r.held.share, r.held.salt)
        ]
        return framed(
            ctx, self.silo.encode(), h_u3, *pieces, *([self.products] if self.products else [])
        )

    def check(
        self,
        ctx: bytes,
        h_u3: bytes,
        kinds: Mapping[str, bytes],
        portions: Mapping[str, Portion],
        signers: Signers,
    ) -> None:
        """RefusedError unless these are the shares of ``kinds``, committed to in ``portions``."""
        signed = signers.by_silo(
            self.silo, SECAGG_REVEAL, self.signed_bytes(ctx, h_u3), self.signature
        )
        check(signed, self.silo, Code.REVEAL, "the signature over what it reveals does not fit")

        # Both shares of one silo would bare its values: whoever reveals another kind than the
        # survivors imply is refused, and its share is not kept.
        found = [(revealed.dealer, revealed.kind) for revealed in self.shares]
        check(
            found == sorted(kinds.items()),
            self.silo,
            Code.REVEAL,
            "revealed other shares than the survivors imply",
        )

        # A wrong share would turn the secret into noise; its commitment names who revealed it.
        for each in self.shares:
            committed = portions[each.dealer].committed(each.kind)
            fits = each.held.fits(ctx, each.dealer, self.silo, each.kind, committed)
            check(
                fits,
                self.silo,
                Code.REVEAL,
                f"its share of {each.dealer!r} is not the one that it was dealt",
            )


def make_reveal(
    ctx: bytes,
    silo: str,
    h_u3: bytes,
    kinds: Mapping[str, bytes],
    held: Mapping[str, HeldShares],
    sign: Sign,
    products: bytes = b"",
) -> Reveal:
    """The shares that ``kinds`` asks for.

    The silo worked it out itself, nobody names shares to it.
    """
    shares = tuple(
        Revealed(dealer, kind, held[dealer].of(kind)) for dealer, kind in sorted(kinds.items())
    )
    reveal = Reveal(silo, shares, products=products)
    return replace(reveal, signature=sign(SECAGG_REVEAL, reveal.signed_bytes(ctx, h_u3)))


def kinds_to_reveal(dealers: Sequence[str], survivors: Sequence[str]) -> dict[str, bytes]:
    """The kind of share of each member of U2 that opens the sum: SELF of a survivor, else PAIR."""
    # A survivor's self mask is in the sum and has to be removed. A lost silo's own mask is not;
    # what remains are the survivors' halves of the masks that they share with it.
    alive = set(survivors)
    return {dealer: SELF if dealer in alive else PAIR for dealer in dealers}


@dataclass(frozen=True, slots=True)
class Abandon:
    """A silo's word that it never signs survivors of this attempt and never unmasks it.

    After n - t + c + 1 of the n members of U1 have signed one, nobody can collect t signatures over
    survivors of the attempt. Then another attempt over the same values may follow.
    """

    silo: str
    signature: bytes

    def holds(self, ctx: bytes, signers: Signers) -> bool:
        """True if the silo signed it for that attempt."""
        return signers.by_silo(
            self.silo, SECAGG_ABANDON, framed(ctx, self.silo.encode()), self.signature
        )


def make_abandon(ctx: bytes, silo: str, sign: Sign) -> Abandon:
    """To be made durable before it is sent."""
    return Abandon(silo, sign(SECAGG_ABANDON, framed(ctx, silo.encode())))


def set_digest(name: bytes, ctx: bytes, encoded: Sequence[bytes]) -> bytes:
    """H(U) of the encoded messages of a set, in the order of their silos' ids; 32 bytes.

    ``name`` is b"U1", b"U2" or b"U3". The messages are encoded with their signatures, so two silos
    with the same digest saw the same signed messages.
    """
    # The name keeps the set of one step from passing for that of another.
    return hashlib.sha256(framed(SECAGG_SET, name, ctx, *encoded)).digest()
