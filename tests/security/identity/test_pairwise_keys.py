import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given
from hypothesis import strategies as st

from staddle.errors import RefusedError
from staddle.security.faults import Code
from staddle.security.identity import pairwise_keys
from staddle.security.identity.domains import framed

CTX = b"c" * 32
A, B = bytes(range(32)), bytes(range(32, 64))
# the points of curve25519 with which every key gives zero; non-canonical spellings of them too
LOW_ORDER = [
    "00" * 32, "01" + "00" * 31, "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]  # fmt: skip


def test_x25519_as_in_rfc_7748_section_6_1():
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    found = pairwise_keys.public_key(alice).hex()
    assert found == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert pairwise_keys.agree(alice, pairwise_keys.public_key(bob), "bob").hex() == shared


@pytest.mark.parametrize(
    ("scalar", "point", "found"),
    [
        (
            "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
        ),
        (  # the point's highest bit is set, and masked
            "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
            "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
            "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
        ),
    ],
)
def test_x25519_as_in_rfc_7748_section_5_2(scalar, point, found):
    assert pairwise_keys.agree(bytes.fromhex(scalar), bytes.fromhex(point), "bob").hex() == found


def test_x25519_a_thousand_times_as_in_rfc_7748_section_5_2():
    scalar = point = bytes([9, *bytes(31)])
    for turn in range(1000):
        scalar, point = pairwise_keys.agree(scalar, point, "bob"), scalar
        if not turn:
            found = scalar.hex()
            assert found == "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"
    assert scalar.hex() == "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"


@pytest.mark.parametrize(("secret", "salt", "info", "found"), [
    (bytes([0x0B] * 22), bytes(range(13)), bytes(range(0xF0, 0xFA)),
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"),
    (bytes(range(80)), bytes(range(0x60, 0xB0)), bytes(range(0xB0, 0x100)),
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c"),
    (bytes([0x0B] * 22), b"", b"",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"),
])  # fmt: skip
def test_hkdf_as_in_rfc_5869_appendix_a_1_to_3(secret, salt, info, found):
    """The first 32 bytes: those that follow change none of them."""
    assert pairwise_keys.derive(secret, salt, info).hex() == found


def test_the_cipher_is_that_of_rfc_8439_section_2_8_2():
    plain = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the"
        b" future, sunscreen would be it."
    )
    nonce = bytes.fromhex("070000004041424344454647")
    more = bytes.fromhex("50515253c0c1c2c3c4c5c6c7")
    sealed = bytes.fromhex(
        "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da92728b"
        "1a71de0a9e060b2905d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc"
        "3ff4def08e4b7a9de576d26586cec64b61161ae10b594f09e26a7e902ecbd0600691"
    )
    cipher = pairwise_keys.ChaCha20Poly1305(bytes(range(0x80, 0xA0)))
    assert cipher.encrypt(nonce, plain, more) == sealed
    assert cipher.decrypt(nonce, sealed, more) == plain


def test_a_seal_is_that_of_the_docstring():
    more = framed(b"staddle/secagg/seal/1", CTX, b"a", b"b")
    found = pairwise_keys.seal(A, CTX, "a", "b", b"share")
    assert found == ChaCha20Poly1305(A).encrypt(bytes(12), b"share", more)


def test_both_sides_agree_and_nobody_else():
    agreed = pairwise_keys.agree(A, pairwise_keys.public_key(B), "b")
    assert agreed == pairwise_keys.agree(B, pairwise_keys.public_key(A), "a")
    assert agreed != pairwise_keys.agree(bytes(32), pairwise_keys.public_key(A), "a")


@pytest.mark.parametrize("point", [*LOW_ORDER, "00" * 31, "00" * 33, ""])
def test_a_key_that_gives_zero_or_is_none_is_refused(point):
    with pytest.raises(RefusedError) as caught:
        pairwise_keys.agree(A, bytes.fromhex(point), "hospital-b")
    assert (caught.value.peer, caught.value.code) == ("hospital-b", Code.KEYS)


def test_each_use_and_each_field_gives_another_key():
    h = b"h" * 32
    keys = [
        pairwise_keys.seal_key(A, CTX, "a", "b"), pairwise_keys.seal_key(A, CTX, "b", "a"),
        pairwise_keys.seal_key(A, b"d" * 32, "a", "b"), pairwise_keys.seal_key(B, CTX, "a", "b"),
        pairwise_keys.pair_key(A, CTX, "a", "b", 1, h),
        pairwise_keys.pair_key(B, CTX, "a", "b", 1, h),
        pairwise_keys.pair_key(A, b"d" * 32, "a", "b", 1, h),
        pairwise_keys.pair_key(A, CTX, "a", "c", 1, h),
        pairwise_keys.pair_key(A, CTX, "a", "b", 2, h),
        pairwise_keys.pair_key(A, CTX, "a", "b", 1, b"i" * 32),
        pairwise_keys.self_key(A, CTX, "a", 1, h), pairwise_keys.self_key(B, CTX, "a", 1, h),
        pairwise_keys.self_key(A, b"d" * 32, "a", 1, h), pairwise_keys.self_key(A, CTX, "b", 1, h),
        pairwise_keys.self_key(A, CTX, "a", 2, h),
        pairwise_keys.self_key(A, CTX, "a", 1, b"i" * 32),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    found = pairwise_keys.pair_key(A, CTX, "b", "a", 1, h)
    assert found == pairwise_keys.pair_key(A, CTX, "a", "b", 1, h)


def test_keys_are_those_of_the_docstring():
    h = b"h" * 32
    found = pairwise_keys.seal_key(A, CTX, "a", "b").hex()
    assert found == "07d1944e22e4f8f80e4c09bdb1dc00695fae13e0235abcd0892eac87f0ff9a56"
    seen = pairwise_keys.pair_key(A, CTX, "a", "b", 1, h).hex()
    assert seen == "4aca540ce3f13a1311bc0aae493da603577d5fbdb7efa3abda16dc050f3a4a49"
    shown = pairwise_keys.self_key(A, CTX, "a", 1, h).hex()
    assert shown == "e5e0cf9c772a905c0ec58d6b4d8611fc1362ef61d0de7cd9ceb316a8dca08c63"


@given(st.binary(max_size=200))
def test_what_is_sealed_opens(plain):
    sealed = pairwise_keys.seal(A, CTX, "a", "b", plain)
    assert len(sealed) == len(plain) + pairwise_keys.TAG_BYTES
    assert pairwise_keys.unseal(A, CTX, "a", "b", sealed) == plain


@pytest.mark.parametrize(("key", "ctx", "sender", "receiver"), [
    (B, CTX, "a", "b"), (A, b"d" * 32, "a", "b"), (A, CTX, "c", "b"), (A, CTX, "a", "c"),
    (A, CTX, "b", "a"),
])  # fmt: skip
def test_what_is_sealed_opens_nowhere_else(key, ctx, sender, receiver):
    sealed = pairwise_keys.seal(A, CTX, "a", "b", b"share")
    with pytest.raises(RefusedError) as caught:
        pairwise_keys.unseal(key, ctx, sender, receiver, sealed)
    assert (caught.value.peer, caught.value.code) == (sender, Code.SHARES)


def test_a_flipped_bit_does_not_open():
    sealed = pairwise_keys.seal(A, CTX, "a", "b", b"share")
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RefusedError):
            pairwise_keys.unseal(A, CTX, "a", "b", bytes(changed))
    with pytest.raises(RefusedError):
        pairwise_keys.unseal(A, CTX, "a", "b", b"")


@pytest.mark.parametrize("last_bit", [0, 1])
def test_a_key_is_checked_as_the_library_checks_it(last_bit):
    """All coordinates about those of low order, and each written above the prime, too."""
    prime = pairwise_keys.PRIME
    near = {(x + d) % prime for x in pairwise_keys.LOW_ORDER for d in (-2, -1, 0, 1, 2)}
    written = {x for low in near for x in (low, low + prime) if x < 2**255}
    for x in written:
        public = (x + last_bit * 2**255).to_bytes(32, "little")
        refused = 0
        for check in (
            lambda key: pairwise_keys.check_public(key, "b"),
            lambda key: pairwise_keys.agree(A, key, "b"),
        ):
            try:
                check(public)
            except RefusedError as error:
                refused += error.code == Code.KEYS
        assert refused == (2 if x % prime in pairwise_keys.LOW_ORDER else 0), x


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_key_of_another_length_is_none(length):
    with pytest.raises(RefusedError, match="or no key"):
        pairwise_keys.check_public(b"\x09" * length, "b")
