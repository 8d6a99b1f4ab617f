"""Thirty-two secret bytes for several recipients, sealed to each by its own X25519 key.

That is its key of the roster, for what makes the key of a job (group_key.py), and its newest prekey
for the rest of the job (prekeys.py).

The sender draws an ephemeral X25519 key E for this secret alone; for each recipient, whose key is
R::

    key     HKDF(X25519(e, R), salt = ctx, info = framed(label, sender, recipient, E, R))
    sealed  ChaCha20-Poly1305(key, nonce 0, secret, AAD = framed(label, ctx, sender, recipient))  48
            bytes

Nonce 0 is safe: as E is fresh, a key seals one message, in one direction. What the sender signs
holds a commitment to the secret, 32 uniform bytes and so without salt, and a Merkle root
(security/log/merkle.py) over one leaf a recipient. So each recipient needs its own letter alone,
and all have the same secret, or know who is to blame::

    commitment   SHA-256(framed(SEALED_SECRET, label, ctx, sender, secret))
    leaf         framed(recipient, generation, sealed)

The generation says which prekey R is; it is 0 of a key of the roster. Whoever comes to know R's
private key opens what was sealed to it: there is no forward secrecy while that is kept.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from ...errors import ProofError, RefusedError, check_local
from ..faults import COORDINATOR, Code, check
from ..identity.domains import SEALED_SECRET, framed
from ..identity.pairwise_keys import (
    KEY_BYTES,
    NONCE,
    TAG_BYTES,
    agree,
    agree_with_each,
    derive,
    public_key,
)
from ..log.merkle import HASH_BYTES, Hashes, Tree, leaf_hash, verify_inclusion

SECRET_BYTES = 32
SEALED_BYTES = SECRET_BYTES + TAG_BYTES
FIRST: Mapping[str, int] = MappingProxyType({})  # generations: the first of all


@dataclass(frozen=True, slots=True)
class Sealing:
    """The sender's signed summary of a sealed secret: E, commitment and root, 32 bytes each."""

    sender: str
    ephemeral: bytes
    commitment: bytes
    root: bytes

    def encoded(self) -> bytes:
        """All of it, to be signed."""
        return framed(self.sender.encode(), self.ephemeral, self.commitment, self.root)

    def check(self) -> None:
        """RefusedError, for the sender, unless its fields have their sizes.

        The caller checks the signature, which covers all fields (``encoded``).
        """
        sized = (
            len(self.ephemeral) == KEY_BYTES
            and len(self.commitment) == len(self.root) == HASH_BYTES
        )
        check(
            sized,
            self.sender,
            Code.SHARES,
            "what it signed over its sealed secret has the wrong size",
        )


@dataclass(frozen=True, slots=True)
class SealedSecret:
    """The secret for one recipient, 48 bytes, and the generation of the prekey it is sealed to."""

    recipient: str
    sealed: bytes
    generation: int = 0

    def leaf(self) -> bytes:
        """Its leaf under the root."""
        return leaf_hash(framed(self.recipient.encode(), self.generation.to_bytes(8), self.sealed))


@dataclass(frozen=True, slots=True)
class Letter:
    """A piece on its way to its recipient, with proof that the sender signed it.

    Checking the proof takes the signed root, and the recipient's index among all recipients in
    order of ids.
    """

    sealed: SealedSecret
    proof: Hashes


def seal_to_all(
    ctx: bytes,
    domain: bytes,
    sender: str,
    secret: bytes,
    ephemeral: bytes,
    recipients: Mapping[str, bytes],
    generations: Mapping[str, int] = FIRST,
) -> tuple[Sealing, tuple[SealedSecret, ...]]:
    """Seal a secret to the X25519 keys of ``recipients``, by id.

    ``ephemeral`` is a fresh seed of 32 bytes.

    ``generations`` are of those keys that are later prekeys than a silo's first. The pieces stand
    in the order of the ids.
    """
    size = len(secret)
    check_local(
        size == SECRET_BYTES, f"a secret of {size} bytes cannot be sealed; it has {SECRET_BYTES}"
    )
    # The sender keeps the secret, so it seals no piece to itself.
    others = bool(recipients) and sender not in recipients
    check_local(others, f"{sender!r} seals to other silos, not to {sorted(recipients)}")

    # The key depends on the recipient and on its public key, so a letter that the coordinator
    # brings to somebody else, or passes off as sealed to another key, does not open.
    made, ours = [], public_key(ephemeral)
    agreed = agree_with_each(ephemeral, {each: recipients[each] for each in sorted(recipients)})
    for recipient, shared in agreed.items():
        info = _info(domain, sender, recipient, ours, recipients[recipient])
        sealed = ChaCha20Poly1305(derive(shared, ctx, info)).encrypt(
            NONCE, secret, _associated(domain, ctx, sender, recipient)
        )
        made.append(SealedSecret(recipient, sealed, generations.get(recipient, 0)))

    # One signed root over all letters: each recipient checks its own without receiving the others.
    root = _tree(made).root()
    commitment = _commitment(domain, ctx, sender, secret)
    return Sealing(sender, ours, commitment, root), tuple(made)


def open_letter(
    ctx: bytes, domain: bytes, sealing: Sealing, letter: Letter, among: Sequence[str], seed: bytes
) -> bytes:
    """The secret; ``among`` are all recipients, ``seed`` is the recipient's raw private key.

    The sealing's signature is checked before. The steps run in order; RefusedError says who is to
    blame.
    """
    sender, recipient = sealing.sender, letter.sealed.recipient
    # (1) The sender signed this piece, for this recipient: else the coordinator brought another
    # one.
    check_letter(sealing.root, letter, sender, recipient, among)

    # (2) It opens.
    info = _info(domain, sender, recipient, sealing.ephemeral, public_key(seed))
    key = derive(agree(seed, sealing.ephemeral, sender), ctx, info)
    try:
        secret = ChaCha20Poly1305(key).decrypt(
            NONCE, letter.sealed.sealed, _associated(domain, ctx, sender, recipient)
        )
    except InvalidTag:
        raise RefusedError(
            sender, Code.SHARES, f"what it sealed for {recipient!r} does not open"
        ) from None

    # (3) It is the secret that the sender committed to, and so what all others have.
    fits = is_secret(ctx, domain, sealing, secret)
    check(
        fits, sender, Code.SHARES, f"what it sealed for {recipient!r} does not fit its commitment"
    )
    return secret


def check_letter(
    root: bytes, letter: Letter, sender: str, recipient: str, among: Sequence[str]
) -> None:
    """RefusedError, for the coordinator, unless the signed root covers this letter.

    ``among`` are all recipients of the secret. It takes no private key, since it opens nothing.
    """
    for_it = letter.sealed.recipient == recipient
    check(
        for_it,
        COORDINATOR,
        Code.SHARES,
        f"brings {recipient!r} a letter for {letter.sealed.recipient!r}",
    )

    # The proof is for a place in the order of the ids, which both sides know.
    order = sorted(among)
    check(
        recipient in order,
        COORDINATOR,
        Code.SHARES,
        f"brings a letter for {recipient!r}, whom nothing is sealed to",
    )
    try:
        verify_inclusion(
            letter.sealed.leaf(), order.index(recipient), len(order), root, letter.proof
        )
    except ProofError as error:
        why = f"brings {recipient!r} a letter that is not what {sender!r} signed: {error}"
        raise RefusedError(COORDINATOR, Code.SHARES, why) from None


def is_secret(ctx: bytes, domain: bytes, sealing: Sealing, secret: bytes) -> bool:
    """True if this is the secret that the sender committed to."""
    return (
        len(secret) == SECRET_BYTES
        and _commitment(domain, ctx, sealing.sender, secret) == sealing.commitment
    )


def check_sealed(sealing: Sealing, pieces: Sequence[SealedSecret], among: Sequence[str]) -> None:
    """At the coordinator: RefusedError unless these are all pieces under the root, one each."""
    # The coordinator checks what it can before it passes letters on: later each recipient would
    # find the fault alone, and blame the coordinator for it.
    sealing.check()
    whole = [piece.recipient for piece in pieces] == sorted(among)
    check(
        whole,
        sealing.sender,
        Code.SHARES,
        f"sealed {len(pieces)} pieces, not one for each of the others, by id",
    )
    for piece in pieces:
        sized = len(piece.sealed) == SEALED_BYTES
        check(
            sized,
            sealing.sender,
            Code.SHARES,
            f"its piece for {piece.recipient!r} has {len(piece.sealed)} bytes",
        )
    root = _tree(pieces).root()
    check(
        root == sealing.root,
        sealing.sender,
        Code.SHARES,
        "its pieces do not lead to the root that it signed",
    )


def letters(pieces: Sequence[SealedSecret]) -> dict[str, Letter]:
    """At the coordinator: the letter for each recipient, by id."""
    proofs = _tree(pieces).inclusion_proofs()
    return {
        piece.recipient: Letter(piece, proof) for piece, proof in zip(pieces, proofs, strict=True)
    }


class Letters:
    """At the coordinator: the letters of one sender, hashed once for all recipients."""

    def __init__(self, pieces: Sequence[SealedSecret]) -> None:
        self._pieces = pieces
        self._places = {piece.recipient: place for place, piece in enumerate(pieces)}
        self._tree = _tree(pieces)
        # Now, so that threads may share it: later nothing in it changes.
        self._tree.root()

    def to(self, recipient: str) -> Letter:
        """One recipient's letter; LocalError where nothing is sealed to it."""
        known = recipient in self._places
        check_local(known, f"nothing is sealed to {recipient!r}, only to {', '.join(self._places)}")
        place = self._places[recipient]
        return Letter(self._pieces[place], self._tree.inclusion_proof(place))


def letter_for(recipient: str, pieces: Sequence[SealedSecret]) -> Letter:
    """``Letters.to``, where one letter of a sender is wanted."""
    return Letters(pieces).to(recipient)


def _tree(pieces: Sequence[SealedSecret]) -> Tree:
    return Tree(piece.leaf() for piece in pieces)


def _info(domain: bytes, sender: str, recipient: str, ephemeral: bytes, public: bytes) -> bytes:
    return framed(domain, sender.encode(), recipient.encode(), ephemeral, public)


def _associated(domain: bytes, ctx: bytes, sender: str, recipient: str) -> bytes:
    return framed(domain, ctx, sender.encode(), recipient.encode())


def _commitment(domain: bytes, ctx: bytes, sender: str, secret: bytes) -> bytes:
    return hashlib.sha256(framed(SEALED_SECRET, domain, ctx, sender.encode(), secret)).digest()
