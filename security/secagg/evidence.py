"""Evidence that a dealer of a secure sum broke the rules, for anyone who has the roster's keys.

A silo whose portion does not open, or does not fit its commitments, makes a ``Complaint``: the
private key, of one use, with which it was to open what this one dealer sealed (receiving_keys.py).
Whoever has what both of them signed opens the portion with it. If it opens and fits, the silo that
complains broke the rules, else the dealer did.

What a complaint shows. It opens one portion and nothing else: keys for other dealers are derived
apart, and what the silo sealed itself is under another key. If the complaint holds, that portion is
rubbish. If it does not, the liar gave away its own share of an honest dealer, as it could have told
the coordinator at any time: it is one of the colluders, and fewer than t shares say nothing
(security/arithmetic/shamir.py). Where a complaint holds, the coordinator ends the attempt: no
survivors were signed in it, nobody reveals a share, and no sum is opened.

Other ways were compared. To give away one private key for all dealers shows the coordinator an
honest silo's share of every dealer, as if it colluded. A dealer that discloses the ephemeral secret
of its sealing proves nothing where it sealed random bytes. To show the agreed secret alone, with a
proof that it is the right one (Chaum and Pedersen, CRYPTO 1992), takes points to be added, which
the kept library does not offer for X25519. To have the accused dealer open the portion itself
(Gennaro et al., EUROCRYPT 1999) takes one more step, in which a dealer that sealed rubbish goes
free.

A dealer may also deal shares that open and fit, and do not lie on one polynomial, or lead to
another secret than it committed to. Nobody sees that before shares are revealed. Then t of them,
which fit what the dealer signed and do not join to its secret, are evidence: any t shares of an
honest dealer do. Commitments to the polynomial (Feldman, FOCS 1987) would show most of it earlier.
They too take points to be added, and t of them cross from each dealer to each holder.

A ``Misdealing`` proves either of the two to anyone: with the specification of the attempt come what
the dealer signed in it, and either t shares that do not join, or a private key that does not open
what the dealer sealed to it. That the holder complained is no part of the proof. An honest dealer
signs in each portion the key that it sealed to (dealing.py) and seals to no other, so its portions
open with the private half, whoever shows it. It enters an attempt once (memory.py), so all that it
signs in one fits together. A coordinator and a silo that collude can make up keys, bundles and
portions as they like: none of that is signed by the dealer.

Silos accept sums without a dealer that is proven to have misdealt in their job, while enough others
are left (algorithms/job/batches.py, ``Terms.excused``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

from ...errors import LocalError, RefusedError
from ...files.documents import parse_canonical
from ..arithmetic.shamir import join, weights_at_zero
from ..faults import COORDINATOR, Code, check
from ..identity.domains import SECAGG_COMPLAINT, SECAGG_DEALING, framed
from ..identity.pairwise_keys import KEY_BYTES, public_key
from ..identity.signers import Sign, Signers
from .dealing import (
    PAIR,
    Dealing,
    HeldShare,
    KeyBundle,
    Portion,
    check_portions,
    open_portion,
    seed_commitment,
)
from .spec import RoundSpec, context_of, listed


@dataclass(frozen=True, slots=True)
class Complaint:
    """A silo's word that ``dealer`` sealed rubbish to it.

    ``key`` is its private key for that dealer, 32 bytes.
    """

    silo: str
    dealer: str
    key: bytes = field(repr=False)
    signature: bytes = b""

    def signed_bytes(self, ctx: bytes, h_u2: bytes) -> bytes:
        """The bytes that the silo signs, behind COMPLAINT."""
        return framed(ctx, self.silo.encode(), h_u2, self.dealer.encode(), self.key)

    def check(
        self, ctx: bytes, h_u2: bytes, dealer: KeyBundle, portion: Portion, signers: Signers
    ) -> None:
        """RefusedError, for the complainant, unless the portion does not open or does not fit.

        All that is not signed here was checked before: the portion is sealed to the key that the
        silo published.
        """
        # (1) The silo signed it, over the dealings that all were told.
        signed = signers.by_silo(
            self.silo, SECAGG_COMPLAINT, self.signed_bytes(ctx, h_u2), self.signature
        )
        check(
            signed,
            self.silo,
            Code.COMPLAINT,
            "the signature over its complaint does not fit this attempt",
        )

        # (2) The key is the one that it published for this dealer: by another key no portion opens,
        # and any dealer could be accused.
        own = _is_private_half(self.key, portion)
        check(
            own,
            self.silo,
            Code.COMPLAINT,
            f"complains of {self.dealer!r} with a key that it never published",
        )

        # (3) What was dealt does not open by it, or does not fit.
        why = f"complains of {self.dealer!r}, and what was dealt to it opens and fits"
        check(not _opens(portion, ctx, dealer, self.key), self.silo, Code.COMPLAINT, why)


def make_complaint(
    ctx: bytes, silo: str, h_u2: bytes, dealer: str, key: bytes, sign: Sign
) -> Complaint:
    """Signed once a dealer's portion did not open."""
    complaint = Complaint(silo, dealer, key)
    return replace(complaint, signature=sign(SECAGG_COMPLAINT, complaint.signed_bytes(ctx, h_u2)))


@dataclass(frozen=True, slots=True)
class ShownShare:
    """A share that its holder revealed.

    The commitment to it is in the dealer's signed portions.
    """

    holder: str
    held: HeldShare


@dataclass(frozen=True, slots=True)
class Unjoined:
    """t revealed shares of one kind, by holder, that fit their commitments and do not join."""

    kind: bytes
    shares: tuple[ShownShare, ...]


@dataclass(frozen=True, slots=True)
class Unopened:
    """A holder's private key, 32 bytes, with which its portion does not open or does not fit."""

    holder: str
    key: bytes = field(repr=False)


Fault: TypeAlias = Unjoined | Unopened


@dataclass(frozen=True, slots=True)
class Misdealing:
    """A dealer's signed messages of one attempt, and what is wrong with them.

    ``document`` is the attempt's specification.
    """

    document: bytes
    bundle: KeyBundle
    dealing: Dealing
    portions: tuple[Portion, ...]
    fault: Fault

    @property
    def dealer(self) -> str:
        """Who dealt them."""
        return self.dealing.dealer

    @property
    def spec(self) -> RoundSpec:
        """The specification; LocalError where the document is none."""
        return parse_canonical(
            self.document, RoundSpec, "the specification in evidence against a dealer"
        )

    def is_of(self, ctx: str) -> bool:
        """True if it is of the attempt with this context, hex."""
        return context_of(self.document).hex() == ctx

    def proves(self, spec: RoundSpec, signers: Signers) -> bool:
        """True if it shows to anyone that the dealer broke the rules in this attempt.

        Only the dealer's key, in ``signers``, is trusted. It does not matter who brings the
        evidence, or who signed the specification.
        """
        try:
            self._check(spec, signers)
        except RefusedError:
            return False
        return True

    def _check(self, spec: RoundSpec, signers: Signers) -> None:
        """RefusedError unless it does; the steps run in order."""
        self._check_dealt(spec, signers)
        match self.fault:
            case Unjoined(kind, shares):
                self._check_shares(spec, kind, shares)
            case Unopened(holder, key):
                self._check_sealed(spec, holder, key)

    def _check_dealt(self, spec: RoundSpec, signers: Signers) -> None:
        ctx, dealer = spec.context(), self.dealer
        # Evidence of another attempt proves nothing here.
        check(
            self.document == spec.signed_bytes(), dealer, Code.MISDEALT, "it is of another attempt"
        )

        # (1) The dealer signed its keys and all that it dealt, in this attempt, among members of
        # its cohort.
        check(
            self.bundle.silo == dealer, dealer, Code.MISDEALT, "keys and dealing are of two silos"
        )
        # With the dealer's keys of another attempt, its honest shares would seem not to join.
        self.bundle.check(ctx, signers)
        signed = signers.by_silo(
            dealer, SECAGG_DEALING, self.dealing.signed_bytes(ctx), self.dealing.signature
        )
        check(signed, dealer, Code.MISDEALT, "its dealing is not signed for this attempt")
        members = [portion.holder for portion in self.portions]
        check(
            listed(members, spec.cohort),
            dealer,
            Code.MISDEALT,
            "it dealt to others than the cohort, each once, in order",
        )
        check_portions(self.dealing, self.portions, members)

    def _check_shares(self, spec: RoundSpec, kind: bytes, shares: Sequence[ShownShare]) -> None:
        ctx, dealer = spec.context(), self.dealer

        # (2) There is one share of each of t holders, and each is the one that was dealt to it:
        # holders could make up shares that join to nothing.
        # The evidence has all portions, since the signed root covers all of them.
        portions = {portion.holder: portion for portion in self.portions}
        holders = [each.holder for each in shares]
        enough = (
            len(set(holders)) == len(holders) == spec.threshold and set(holders) <= portions.keys()
        )
        check(
            enough,
            dealer,
            Code.MISDEALT,
            f"shares of {len(holders)} holders, not of {spec.threshold}, each once",
        )
        for each in shares:
            fits = each.held.fits(
                ctx, dealer, each.holder, kind, portions[each.holder].committed(kind)
            )
            check(
                fits,
                dealer,
                Code.MISDEALT,
                f"the share of {each.holder!r} is not the one that was dealt to it",
            )

        # (3) They do not join to what the dealer committed to.
        joined = joins(
            spec, self.bundle, self.dealing, kind, {each.holder: each.held for each in shares}
        )
        check(joined is None, dealer, Code.MISDEALT, "its shares join")

    def _check_sealed(self, spec: RoundSpec, holder: str, key: bytes) -> None:
        # (2) The key is the private half of the one that the dealer sealed this holder's portion
        # to.
        portion = next(
            (each for each in self.portions if each.holder == holder != self.dealer), None
        )
        shown = portion is not None and _is_private_half(key, portion)
        check(
            shown,
            self.dealer,
            Code.MISDEALT,
            f"the key is not the one to which it sealed a portion for {holder!r}",
        )

        # (3) The portion does not open by it, or does not fit.
        opens = portion is None or _opens(portion, spec.context(), self.bundle, key)
        check(not opens, self.dealer, Code.MISDEALT, f"what it sealed to {holder!r} opens and fits")


def proven(
    proofs: Sequence[Misdealing], federation: str, job_digest: str, signers: Signers
) -> frozenset[str]:
    """The dealers that these proofs show to have misdealt in secure sums of this job.

    RefusedError, for the coordinator, for one that proves nothing; ``signers`` are those of all of
    the job's silos. Who signed the specification does not count: an honest dealer deals only in an
    attempt that it was asked into.
    """
    # Each is checked whole: by one that proves nothing, an honest silo would be left out of sums.
    for proof in proofs:
        try:
            spec = proof.spec
        except LocalError as error:
            raise RefusedError(COORDINATOR, Code.MISDEALT, str(error)) from None
        # A dealer that misdealt in another job is not left out of this one.
        ours = (spec.federation, spec.job_digest) == (federation, job_digest)
        check(
            ours,
            COORDINATOR,
            Code.MISDEALT,
            f"brings evidence against {proof.dealer!r} of another job",
        )
        why = f"brings evidence against {proof.dealer!r} that proves nothing"
        check(proof.proves(spec, signers), COORDINATOR, Code.MISDEALT, why)
    return frozenset(proof.dealer for proof in proofs)


def _is_private_half(key: bytes, portion: Portion) -> bool:
    """True if this is the private key, 32 bytes, of the one that a portion is sealed to."""
    return len(key) == KEY_BYTES and public_key(key) == portion.key


def _opens(portion: Portion, ctx: bytes, dealer: KeyBundle, key: bytes) -> bool:
    """True if a portion opens by the holder's private key, and fits its commitments."""
    try:
        open_portion(portion, ctx, dealer, key)
    except RefusedError:
        return False
    return True


def joins(
    spec: RoundSpec,
    bundle: KeyBundle,
    dealing: Dealing,
    kind: bytes,
    shares: Mapping[str, HeldShare],
) -> bytes | None:
    """The secret that a dealer committed to, if t shares by holder join to it.

    None if they do not.
    """
    numbers = {spec.holder(holder): held.share for holder, held in shares.items()}
    secret = join(numbers, dict(zip(numbers, _weights(tuple(numbers)), strict=True)))
    if secret is None or not is_secret(spec.context(), bundle, dealing, kind, secret):
        return None
    return secret


@lru_cache(maxsize=16)
def _weights(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Those of one set of holders serve all dealers, and take long among many silos."""
    return weights_at_zero(numbers)


def is_secret(ctx: bytes, bundle: KeyBundle, dealing: Dealing, kind: bytes, secret: bytes) -> bool:
    """True if joined shares are what the dealer committed to before.

    The mask key's seed must lead to the mask key in the dealer's bundle, the self-mask seed to the
    commitment in its dealing.
    """
    if kind == PAIR:
        return public_key(secret) == bundle.mask
    return seed_commitment(ctx, dealing.dealer, secret) == dealing.seed
