import base64
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import assume, example, given
from hypothesis import strategies as st

from staddle.errors import LocalError, ProofError
from staddle.security.log.note import (
    MAX_NOTE,
    MAX_SIGNATURES,
    Note,
    Signature,
    SignatureKind,
    VerifiedKey,
    VerifierKey,
    cosign,
    parse,
    sign,
    verify,
)

# From the tests of Go's sumdb/note: two seeds, their keys, and one text that both signed.
TEXT = (
    "If you think cryptography is the answer to your problem,\nthen you don't know what your"
    " problem is.\n"
)
PETER_SEED = base64.b64decode("AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz")[1:]
PETER_KEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
PETER_LINE = (
    "— PeterNeumann"
    " x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM="
)
ENOCH_KEY = "EnochRoot+af0cfe78+ATtqJ7zOtqQtYqOo0CpvDXNlMhV3HeJDpjrASKGLWdop"
ENOCH_LINE = (
    "— EnochRoot"
    " rwz+eBzmZa0SO3NbfRGzPCpDckykFXSdeX+MNtCOXm2/5n2tiOHp+vAF1aGrQ5ovTG01oOTGwnWLox33WWd1RvMc+QQ="
)
SIGNED = f"{TEXT}\n{PETER_LINE}\n{ENOCH_LINE}\n".encode()

# The notes of those tests (BSD-3-Clause, The Go Authors, 2019; x/mod 0.7.0), the keys that are
# trusted, and who signed; None for a note that is refused. One verdict of Go's is not ours: a key
# that is trusted twice is one key here.
PETER, ENOCH = f"{PETER_LINE}\n".encode(), f"{ENOCH_LINE}\n".encode()
BOTH = {PETER_KEY: "PeterNeumann", ENOCH_KEY: "EnochRoot"}
LONGER = {line: line[:60] + b"ABCD" + line[60:] for line in (PETER, ENOCH)}
ONE = [PETER_KEY]
GO_OPENS = {
    "one of two is trusted": (b"\n" + PETER + ENOCH, ONE, ["PeterNeumann"]),
    "both are trusted": (b"\n" + PETER + ENOCH, [*BOTH], ["PeterNeumann", "EnochRoot"]),
    "a trusted key did not sign": (b"\n" + PETER, [*BOTH], ["PeterNeumann"]),
    "each twice, one longer": (
        b"\n" + 2 * PETER + 2 * ENOCH + LONGER[ENOCH], ONE, ["PeterNeumann"]
    ),
    "101 times": (b"\n" + 101 * PETER, ONE, None),
    "a signature is longer": (b"\n" + LONGER[PETER], ONE, None),
    "no signature": (b"", ONE, None),
    "no signature behind the blank line": (b"\n", ONE, None),
    "no last newline": (b"\n" + PETER[:-1], ONE, None),
    "a name of two words": (b"\n" + PETER.replace(b"PeterNeumann", b"Bad Name")[:-1], ONE, None),
    "a line too many": (b"\n" + PETER + b"Unexpected line.\n", ONE, None),
    "another name": (b"\n" + PETER.replace(b"PeterNeumann", b"CarmenSandiego"), ONE, None),
    "another key id": (b"\n" + PETER.replace(b"x08g", b"xxxx"), ONE, None),
}  # fmt: skip
GO_OPENS = {name: (TEXT.encode() + after, *rest) for name, (after, *rest) in GO_OPENS.items()} | {
    f"begins with {byte.hex()}": (byte + TEXT.encode() + b"\n" + PETER, ONE, None)
    for byte in (b"\x01", b"\xff")
}
# too long a key, and an unknown kind of one, each with the key id of what it holds
GO_REFUSES_KEYS = [
    "PeterNeumann+cc469956+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TWBADKEY==",
    "PeterNeumann+173116ae+ZRpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
]

# A checkpoint of a public log of certificates, signed by its keys (one of a kind unknown here) and
# by witnesses.
ARCHE = "— arche2025h1.staging.ct.transparency.dev"
PUBLIC = f"""arche2025h1.staging.ct.transparency.dev
1432088532
U7WM79jrzyhGZ5/GUBTpM7NzwdyfFx61t3RovgcC4Ro=

{ARCHE} zTM8sQAAAZ5W0WdjBAMARjBEAiBjW5IQf9pvsYLfQFX6hoGREPMHbdQ3urbllzalApkptQIgIpwtEroeW2BXaHAI4kJXFbon5Ch9MNL5zRNZ55lvGt0=
{ARCHE} ui8GwCF1+kWqZrxGdhj4aX3gcw7XUlXQQabg/27lefwhUkzbC3NygNI75MdhL1bfTW9g8Ei59RA23oHP7Ry1k3ZFWwQ=
— remora.n621.de 2net5wAAAABqEiEgPlfF3V06o0Y+fHM+J5J9s27wgxxcOVSpZ/2g/KSiXCg9DEZI+aVCIobWX9sXTynk5XeU/zZ0WBxtqB0DrAWfBw==
""".encode()  # noqa: E501
ARCHE_KEY = (
    "arche2025h1.staging.ct.transparency.dev+ba2f06c0+AU0vHmlGCS/PdN8b2OaGmKprLI8HKM+dJ472xgFYh15f"
)
REMORA_KEY = "remora.n621.de+da77ade7+BOvN63jn/bLvkieywe8R6UYAtVtNbZpXh34x7onlmtw2"

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(32, 64)))

LETTERS = st.characters(min_codepoint=0x20, exclude_categories=["Cs"]) | st.just("\n")
TEXTS = st.text(LETTERS, max_size=60).map(lambda text: text + "\n")
NAMES = st.text(
    st.characters(min_codepoint=0x21, exclude_categories=["Cs", "Zs", "Zl", "Zp"]),
    min_size=1,
    max_size=12,
)
NAMES = NAMES.filter(lambda name: "+" not in name and not any(letter.isspace() for letter in name))
SIGNATURES = st.builds(
    Signature, NAMES, st.binary(min_size=4, max_size=4), st.binary(min_size=1, max_size=80)
)
NOTES = st.builds(Note, TEXTS, st.lists(SIGNATURES, min_size=1, max_size=4).map(tuple))


def verifier(name, kind, key):
    return VerifierKey(name, kind, key.public_key().public_bytes_raw())


def key_of(text):
    return VerifierKey.parse(text)


def test_keys_and_signatures_are_those_of_go():
    peter_key, enoch_key = map(Ed25519PrivateKey.from_private_bytes, (PETER_SEED, bytes(32)))
    assert str(verifier("PeterNeumann", SignatureKind.ED25519, peter_key)) == PETER_KEY
    assert str(verifier("EnochRoot", SignatureKind.ED25519, enoch_key)) == ENOCH_KEY
    note = Note(TEXT, (sign(TEXT, "PeterNeumann", peter_key),))
    note = note.signed_by(sign(TEXT, "EnochRoot", enoch_key))
    assert bytes(note) == SIGNED
    assert parse(SIGNED) == note
    peter, enoch = key_of(PETER_KEY), key_of(ENOCH_KEY)
    assert verify(note, [enoch, peter]) == (VerifiedKey(peter, None), VerifiedKey(enoch, None))
    assert verify(note, [enoch]) == (VerifiedKey(enoch, None),)


@pytest.mark.parametrize(("data", "keys", "signed"), GO_OPENS.values(), ids=GO_OPENS)
def test_what_go_opens_and_what_not(data, keys, signed):
    trusted = [key_of(key) for key in keys]
    if signed is None:
        with pytest.raises(ProofError):
            verify(parse(data), trusted)
    else:
        note = parse(data)
        assert note.text == TEXT
        assert [each.key.name for each in verify(note, trusted)] == signed


def test_a_note_that_nobody_trusted_signed_says_so():
    for trusted in ([], [replace(key_of(PETER_KEY), name="CarmenSandiego")]):
        with pytest.raises(ProofError, match="none of the keys"):
            verify(parse(SIGNED), trusted)


@pytest.mark.parametrize("key", GO_REFUSES_KEYS)
def test_keys_that_go_refuses(key):
    with pytest.raises(LocalError):
        key_of(key)


def test_the_note_of_the_specification():
    line = (
        "— example.com/foo"
        " Uw2QOkn8srV1yJGh2VYRlL1Tnagv1YEq6TfXppzi2ONncAlTgK7Ztg1ERYNZXsYjOBH3mFXmRKuwHjG1Yu72Ineya"
        "QM="
    )
    key = key_of("example.com/foo+530d903a+AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k")
    found = verify(parse(f"This is an example message.\n\n{line}\n".encode()), [key])
    assert found == (VerifiedKey(key, None),)


def test_a_public_log_and_its_witness():
    note = parse(PUBLIC)
    arche, remora = key_of(ARCHE_KEY), key_of(REMORA_KEY)
    assert bytes(note) == PUBLIC
    found = verify(note, [remora, arche])
    assert found == (VerifiedKey(arche, None), VerifiedKey(remora, 0x6A122120))
    grown = replace(note, text=note.text.replace("1432088532", "1432088533"))
    for key in (arche, remora):
        with pytest.raises(ProofError, match="does not fit the note"):
            verify(grown, [key])


def test_cosignatures_cover_time_and_text():
    note = Note(TEXT, (cosign(TEXT, "w", KEY, 1795291200),))
    key = verifier("w", SignatureKind.COSIGNATURE, KEY)
    assert verify(note, [key]) == (VerifiedKey(key, 1795291200),)
    (signature,) = note.signatures
    assert signature.data[:8] == (1795291200).to_bytes(8)
    KEY.public_key().verify(
        signature.data[8:], b"cosignature/v1\ntime 1795291200\n" + TEXT.encode()
    )
    cut = [Note(TEXT, (replace(signature, data=signature.data[:end]),)) for end in (1, 8, 9, 71)]
    later = replace(signature, data=(1795291201).to_bytes(8) + signature.data[8:])
    for bad in (*cut, Note(TEXT, (later,)), replace(note, text="another\n")):
        with pytest.raises(ProofError, match="does not fit the note"):
            verify(bad, [key])
    beyond = (2**63).to_bytes(8) + KEY.sign(f"cosignature/v1\ntime {2**63}\n{TEXT}".encode())
    with pytest.raises(ProofError, match="does not fit the note"):
        verify(Note(TEXT, (replace(signature, data=beyond),)), [key])


def test_one_kind_of_signature_never_passes_for_the_other():
    plain = verifier("w", SignatureKind.ED25519, KEY)
    timed = verifier("w", SignatureKind.COSIGNATURE, KEY)
    assert plain.key_id != timed.key_id
    with pytest.raises(ProofError, match="none of the keys"):
        verify(Note(TEXT, (sign(TEXT, "w", KEY),)), [timed])
    with pytest.raises(ProofError, match="does not fit"):
        verify(Note(TEXT, (replace(sign(TEXT, "w", KEY), key_id=timed.key_id),)), [timed])
    with pytest.raises(ProofError, match="does not fit"):
        verify(Note(TEXT, (replace(cosign(TEXT, "w", KEY, 5), key_id=plain.key_id),)), [plain])
    with pytest.raises(LocalError, match="would pass for a cosignature"):
        sign("cosignature/v1\ntime 5\nx\n", "w", KEY)


def test_unknown_keys_are_ignored_even_if_they_share_a_name_or_an_id():
    key = verifier("a", SignatureKind.ED25519, KEY)
    good = sign(TEXT, "a", KEY)
    garbage = bytes(64)
    strangers = (
        Signature("b", b"1234", garbage),
        Signature("a", b"1234", garbage),
        Signature("b", key.key_id, garbage),
    )
    assert verify(Note(TEXT, (*strangers, good)), [key]) == (VerifiedKey(key, None),)
    with pytest.raises(ProofError, match=r"none of the keys that are trusted here \(a\+"):
        verify(Note(TEXT, strangers), [key])
    with pytest.raises(ProofError, match=r"\(nobody\)"):
        verify(Note(TEXT, (good,)), [])


def test_a_bad_signature_of_a_known_key_rejects_the_note():
    a, b = verifier("a", SignatureKind.ED25519, KEY), verifier("b", SignatureKind.ED25519, OTHER)
    good, also = sign(TEXT, "a", KEY), sign(TEXT, "b", OTHER)
    assert len(verify(Note(TEXT, (good, good, also)), [a, b])) == 2
    for data in (b"0", bytes(64), good.data[:-1], good.data + b"\0", also.data):
        bad = replace(good, data=data)
        for signatures in ((bad, also), (also, bad), (good, bad), (bad, good)):
            with pytest.raises(ProofError, match=r"signature of a\+.* does not fit the note"):
                verify(Note(TEXT, signatures), [a, b])
        assert verify(Note(TEXT, (bad, also)), [b]) == (VerifiedKey(b, None),)


def test_two_trusted_keys_of_one_name_and_id_are_a_fault_of_ours(monkeypatch):
    monkeypatch.setattr(VerifierKey, "key_id", b"same")  # a collision of 32 bits
    a, b = verifier("a", SignatureKind.ED25519, KEY), verifier("a", SignatureKind.ED25519, OTHER)
    note = Note(TEXT, (sign(TEXT, "a", KEY),))
    assert verify(note, [a, a]) == (VerifiedKey(a, None),)
    with pytest.raises(LocalError, match=r"two keys are a\+73616d65"):
        verify(note, [a, b])


LINE = f"{PETER_LINE}\n".encode()
BODY = TEXT.encode()


@pytest.mark.parametrize(("data", "said"), [
    (b"", "is not a text, a blank line"), (BODY, "is not a text, a blank line"),
    (BODY + LINE, "is not a text, a blank line"),
    (BODY + b"\n" + LINE[:-1], "is not a text, a blank line"),
    (b"\n" + LINE, "is not a text, a blank line"),
    (BODY[:-1] + b"\n" + LINE, "is not a text, a blank line"), (BODY + b"\n", "has 0 signatures"),
    (BODY + b"\n" + LINE + b"\n", "has 0 signatures"),
    (BODY + b"\n" + LINE + b"more\n", "is not a signature line"),
    (BODY + b"\n" + LINE.replace("—".encode(), b"-"), "is not a signature line"),
    (BODY + b"\n" + LINE.replace("— ".encode(), "—".encode()), "is not a signature line"),
    (BODY + b"\n " + LINE, "is not a signature line"),
    (BODY + b"\n" + LINE.replace(b" x08", b"  x08"), "is not base64"),
    (BODY + b"\n" + LINE.replace(b" x08", b" =x08"), "is not base64"),
    (BODY + b"\n" + LINE.replace(b"nAM=\n", b"nAM= \n"), "is not base64"),
    (BODY + b"\n" + LINE.replace(b"nAM=\n", b"nAM\n"), "is not base64"),
    (BODY + b"\n" + LINE.replace(b"nAM=\n", b"nAN=\n"), "is not base64"),
    (BODY + b"\n" + LINE.replace(b"x08go/", b"x08go_"), "is not base64"),
    (BODY + b"\n" + LINE.replace(b"x08", "x0८".encode()), "is not base64"),
    (BODY + b"\n" + "— PeterNeumann x08gow==\n".encode(), "is not a key id of 4 bytes"),
    (BODY + b"\n" + "— PeterNeumann \n".encode(), "is not a key id of 4 bytes"),
    (BODY + b"\n" + LINE.replace(b" Peter", b"  Peter"), "signature of '' is not base64"),
    (BODY + b"\n" + LINE.replace(b"PeterNeumann", b""), "name '' of a signature"),
    (BODY + b"\n" + LINE.replace(b"PeterNeumann", b"Peter+Neumann"),
        r"name 'Peter\+Neumann' of a signature"),
    (BODY + b"\n" + LINE.replace(b"PeterNeumann", "Peter\u00a0Neumann".encode()), "of a signature"),
    (BODY + b"\n" + LINE.replace(b"PeterNeumann", "Peter\u2028Neumann".encode()), "of a signature"),
    (BODY + b"\n" + LINE.replace(b"PeterNeumann", b"Peter\tNeumann"), "of a signature"),
    (BODY.replace(b"\n", b"\r\n") + b"\n" + LINE, r"control character '\\r'"),
    (BODY.replace(b" ", b"\0", 1) + b"\n" + LINE, r"control character '\\x00'"),
    (BODY.replace(b" ", b"\x1b", 1) + b"\n" + LINE, r"control character '\\x1b'"),
    (b"\xff" + BODY + b"\n" + LINE, "not UTF-8: invalid start byte at byte 0"),
    (b"\xed\xa0\x80" + BODY + b"\n" + LINE, "not UTF-8"),
    (BODY + b"\n" + LINE * (MAX_SIGNATURES + 1), "has 65 signatures, not 1 to 64"),
    (b"a" * MAX_NOTE + b"\n\n" + LINE, "more than 262144"),
    (b"\xff" * (MAX_NOTE + 1), "more than 262144"),
])  # fmt: skip
def test_what_is_not_quite_a_note_is_refused(data, said):
    with pytest.raises(ProofError, match=said):
        parse(data)


def test_limits_leave_room_for_16_post_quantum_signatures():
    note = Note(TEXT, tuple(Signature(f"w{n}", b"1234", bytes(4900)) for n in range(16)))
    assert parse(bytes(note)) == note
    assert len(parse(BODY + b"\n" + LINE * MAX_SIGNATURES).signatures) == MAX_SIGNATURES
    with pytest.raises(ProofError, match="more than 262144"):
        Note("a" * MAX_NOTE + "\n", (Signature("a", b"1234", b"5"),))
    for key_id in (b"123", b"12345"):
        with pytest.raises(ProofError, match="key id"):
            Note("a\n", (Signature("a", key_id, b"56"),))


@given(NOTES)
@example(Note("\n", (Signature("a", b"1234", b"5"),)))
@example(Note("a\n\n\n", (Signature("—", b"1234", b"5"),)))
@example(Note(SIGNED.decode(), (Signature("a", b"1234", b"5"),)))
def test_parsing_undoes_writing(note):
    assert parse(bytes(note)) == note


MUTATIONS = st.lists(
    st.tuples(st.sampled_from(["change", "insert", "delete", "double"]), st.integers(0, 10**6),
        st.integers(0, 255)),
    min_size=1, max_size=3,
)  # fmt: skip


def mutated(data, mutations):
    changed = bytearray(data)
    for what, where, byte in mutations:
        at = where % (len(changed) + 1)
        match what:
            case "change":
                changed[at : at + 1] = bytes([byte])
            case "insert":
                changed[at:at] = bytes([byte])
            case "delete":
                del changed[at : at + 1]
            case "double":
                changed[at:at] = changed[at : at + 40]
    return bytes(changed)


@given(MUTATIONS)
def test_a_mutated_note_is_refused_or_says_what_was_signed(mutations):
    data = mutated(SIGNED, mutations)
    assume(data != SIGNED)
    try:
        note = parse(data)
        verified = verify(note, [key_of(PETER_KEY), key_of(ENOCH_KEY)])
    except ProofError:
        return
    assert bytes(note) == data
    assert note.text == TEXT
    assert verified


def test_every_flipped_bit_is_found():
    data = f"{TEXT}\n{PETER_LINE}\n".encode()
    for at in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            with pytest.raises(ProofError):
                verify(parse(bytes(changed)), [key_of(PETER_KEY)])


@pytest.mark.parametrize("key", [PETER_KEY, REMORA_KEY])
def test_a_key_with_a_wrong_character_is_refused(key):
    assert str(key_of(key)) == key
    parts = {key[a:b] for a in range(len(key)) for b in range(a, len(key) + 1)} - {key}
    changed = {key[:at] + chr(ord(key[at]) + 1) + key[at + 1 :] for at in range(len(key))}
    for bad in parts | changed | {key + "=", key + "\n", " " + key, key.replace("+", "++", 1)}:
        with pytest.raises(LocalError):
            key_of(bad)


def test_keys_of_another_kind_or_length_are_refused():
    for kind, public in (
        (0x06, bytes(32)), (0x02, bytes(32)), (0x01, bytes(31)), (0x01, bytes(33)), (0x04, b""),
    ):  # fmt: skip
        encoded = base64.b64encode(bytes([kind]) + public).decode()
        with pytest.raises(LocalError, match=r"kind 1 or 4|an Ed25519 key has 32"):
            key_of(f"a+00000000+{encoded}")
    for name in ("", "a b", "a+b", "a\u2003b", "a\nb", "a\x01b"):
        with pytest.raises(LocalError, match="key name"):
            VerifierKey(name, SignatureKind.ED25519, bytes(32))


@pytest.mark.parametrize("text", ["", "no newline", "a\tb\n", "\ud800\n"])
def test_what_cannot_stand_in_a_note_is_not_signed(text):
    with pytest.raises(LocalError, match="its text"):
        sign(text, "a", KEY)
    with pytest.raises(LocalError, match="its text"):
        cosign(text, "a", KEY, 0)


def test_a_time_before_1970_is_not_signed():
    for time in (-1, 2**63):
        with pytest.raises(LocalError, match="is not 0 to"):
            cosign(TEXT, "a", KEY, time)
