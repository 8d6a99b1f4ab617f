"""Keys of one attempt at a secure sum: agreement of two silos, and sealing of their shares.

A silo draws fresh X25519 keys an attempt and signs them with its protocol key: one to seal shares
with (c), one for each dealer that seals to it (r, security/secagg/receiving_keys.py), one to agree
on masks with (s). From the agreed 32 bytes HKDF-SHA256 (RFC 5869) derives keys of one use each::

    seal key, u to v   HKDF(X25519(c_u, r_vu), salt = ctx, info = framed(SEAL, u, v))
    pair key, u and v  HKDF(X25519(s_u, s_v), salt = ctx, info = framed(PAIR, prg, min(u, v), max(u,
                       v), H(U2)))
    self key, u        HKDF(b_u,              salt = ctx, info = framed(SELF, prg, u, H(U2)))

Shares travel under ChaCha20-Poly1305 with nonce 0: a seal key seals one message, in one direction.
"""

from collections.abc import Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ...errors import RefusedError
from ..faults import Code, check
from .domains import SECAGG_PAIR, SECAGG_SEAL, SECAGG_SELF, framed

KEY_BYTES = 32
PRIME = 2**255 - 19
# Coordinates of all points whose order divides 8, on the curve and on its twist. Private keys are
# multiples of 8 (RFC 7748 section 5), so these give zero with each of them, and no others do.
LOW_ORDER = frozenset(
    {
        0,
        1,
        PRIME - 1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
    }
)
# Always zero: each key seals one message, in one direction.
NONCE = bytes(12)
TAG_BYTES = 16


def private_key(seed: bytes) -> X25519PrivateKey:
    """The X25519 key of a 32-byte seed (RFC 7748 section 5 clamps it)."""
    return X25519PrivateKey.from_private_bytes(seed)


def public_key(seed: bytes) -> bytes:
    """The public half, 32 bytes."""
    return private_key(seed).public_key().public_bytes_raw()


def agree(seed: bytes, public: bytes, peer: str) -> bytes:
    """The 32 bytes that both sides compute.

    RefusedError if the peer's key is none, or gives zero with every key.
    """
    return _exchanged(private_key(seed), public, peer)


def agree_with_each(seed: bytes, publics: Mapping[str, bytes]) -> dict[str, bytes]:
    """Like ``agree``, with each of these peers; our private key is made once."""
    private = private_key(seed)
    return {peer: _exchanged(private, public, peer) for peer, public in publics.items()}


def check_public(public: bytes, peer: str) -> None:
    """RefusedError unless the peer's key is one that ``agree`` takes."""
    # Looked up, not agreed with: a coordinator checks a key for each pair of silos. The last bit
    # counts for nothing, and a coordinate may be written as one above the prime.
    coordinate = int.from_bytes(public, "little") % 2**255 % PRIME
    usable = (len(public), coordinate in LOW_ORDER) == (KEY_BYTES, False)
    check(usable, peer, Code.KEYS, _unusable(public))


def _unusable(public: bytes) -> str:
    return f"its X25519 key {public.hex()[:64]!r} is of low order or no key"


def _exchanged(private: X25519PrivateKey, public: bytes, peer: str) -> bytes:
    try:
        # The library raises ValueError if the result is all zeros (RFC 7748 section 6.1).
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise RefusedError(peer, Code.KEYS, _unusable(public)) from None


def derive(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """HKDF-SHA256, 32 bytes.

    RFC 5869. ``salt`` is a context, or empty; ``info`` is a framed label, so that one secret has a
    key for each use.
    """
    return HKDF(SHA256(), KEY_BYTES, salt, info).derive(secret)


def seal_key(agreed: bytes, ctx: bytes, sender: str, receiver: str) -> bytes:
    """The key of the one message of shares from sender to receiver.

    Each direction has its own key. ``agreed`` is the result of ``agree``.
    """
    return derive(agreed, ctx, framed(SECAGG_SEAL, sender.encode(), receiver.encode()))


def pair_key(agreed: bytes, ctx: bytes, one: str, other: str, prg: int, h_u2: bytes) -> bytes:
    """The key of the mask that two silos share; the same from both sides."""
    # H(U2) is in it: silos that were shown different cohorts make masks that do not cancel, and
    # the canaries fail.
    low, high = sorted((one, other))
    return derive(
        agreed, ctx, framed(SECAGG_PAIR, prg.to_bytes(1), low.encode(), high.encode(), h_u2)
    )


def self_key(seed: bytes, ctx: bytes, silo: str, prg: int, h_u2: bytes) -> bytes:
    """The key of the mask that a silo has to itself, from its self-mask seed b.

    H(U2) goes in as in ``pair_key``, so another set of dealers has another key.
    """
    return derive(seed, ctx, framed(SECAGG_SELF, prg.to_bytes(1), silo.encode(), h_u2))


def seal(key: bytes, ctx: bytes, sender: str, receiver: str, plain: bytes) -> bytes:
    """Ciphertext, 16 bytes longer; never twice with one key.

    ChaCha20-Poly1305 with nonce 0. Context, sender and receiver are authenticated as well.
    """
    return ChaCha20Poly1305(key).encrypt(NONCE, plain, _associated(ctx, sender, receiver))


def unseal(key: bytes, ctx: bytes, sender: str, receiver: str, sealed: bytes) -> bytes:
    """The plain bytes; RefusedError blames the sender, who signed the ciphertext."""
    try:
        return ChaCha20Poly1305(key).decrypt(NONCE, sealed, _associated(ctx, sender, receiver))
    except InvalidTag:
        raise RefusedError(
            sender, Code.SHARES, f"what it sealed for {receiver!r} does not open"
        ) from None


def _associated(ctx: bytes, sender: str, receiver: str) -> bytes:
    # The key is bound to the same fields; here they are authenticated a second time.
    return framed(SECAGG_SEAL, ctx, sender.encode(), receiver.encode())
