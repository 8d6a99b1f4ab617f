from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from staddle.errors import LocalError, ProofError
from staddle.security.log import note as notes
from staddle.security.log import tree_head as t
from staddle.security.log.merkle import EMPTY_ROOT, Tree, leaf_hash

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes(range(n, n + 32))) for n in (0, 32, 64)]
KEY = KEYS[0]
ORIGIN = "staddle.example/lung/hospital-a/egress"
WITNESS, SECOND = "staddle.example/lung/coordinator", "staddle.example/lung/hospital-b"
TREE = Tree(leaf_hash(bytes([n])) for n in range(9))
AT_4, AT_9 = (t.TreeHead(ORIGIN, size, TREE.root(size)) for size in (4, 9))


def verifier(name, kind, key):
    return notes.VerifierKey(name, kind, key.public_key().public_bytes_raw())


LOG = verifier(ORIGIN, notes.SignatureKind.ED25519, KEY)
WITNESSES = [
    verifier(WITNESS, notes.SignatureKind.COSIGNATURE, KEYS[1]),
    verifier(SECOND, notes.SignatureKind.COSIGNATURE, KEYS[2]),
]

# The example in the docstrings of note.py, checkpoint.py and proof.py: the first four records of
# RFC 6962's vectors.
EXAMPLE = """staddle.example/lung/hospital-a/egress
4
037kGJdt2VdTwcc4Yrk5j6Kiz5tP8P3+izDNlSCWFLc=

— staddle.example/lung/hospital-a/egress NTLrx/l9vRr3UCZ37rojt5iPmfieDf67mR5Fu6XOZksxlfYTTzsVojtXxtMNuVgK9YdTZPWPwmwUFN9CfKAdaw6WSQU=
— staddle.example/lung/coordinator 1LZPYAAAAABrAfhA9Ok2labajXqKzxhYwPtaSabOPLajM0BF6Hdicbh0wXQ75H+cG9sGdWG3f2rU8Rpo7UeBcxlbTu0NeCZ5SaT2AQ==
""".encode()  # noqa: E501


def test_the_example_of_the_docstrings():
    tree = Tree(leaf_hash(bytes.fromhex(record)) for record in ("", "00", "10", "2021"))
    checkpoint = t.TreeHead(t.origin("lung", "hospital-a"), 4, tree.root())
    signed = t.issue(checkpoint, KEY)
    signed = signed.signed_by(notes.cosign(signed.text, WITNESS, KEYS[1], 1795291200))
    assert bytes(signed) == EXAMPLE
    opened = t.verify(notes.parse(EXAMPLE), LOG, WITNESSES, required=1)
    assert opened.checkpoint == checkpoint
    assert opened.witnesses == (notes.VerifiedKey(WITNESSES[0], 1795291200),)
    assert str(LOG) == f"{ORIGIN}+3532ebc7+AQOhB7/zzhC+HXDdGOdLwJln5NYwm6UNXx3chmQSVTG4"
    assert str(WITNESSES[0]) == f"{WITNESS}+d4b64f60+BCmsuuFBvMrwsi4alNNNC8c2HlJtC/4SyJeUvJMilm3X"


LINES = st.text(
    st.characters(exclude_characters="\n", exclude_categories=["Cs"]), min_size=1, max_size=20
)


@given(
    LINES,
    st.integers(1, 2**63 - 1),
    st.binary(min_size=32, max_size=32),
    st.lists(LINES, max_size=3).map(tuple),
)
def test_parsing_undoes_writing(name, size, root, extensions):
    checkpoint = t.TreeHead(name, size, root, extensions)
    assert t.TreeHead.parse(checkpoint.text) == checkpoint


ROOT = "037kGJdt2VdTwcc4Yrk5j6Kiz5tP8P3+izDNlSCWFLc="


@pytest.mark.parametrize(("text", "said"), [
    ("", "has not the lines"), ("\n", "has not the lines"),
    (f"log\n4\n{ROOT}", "has not the lines"), (f"log\n4\n{ROOT}\nmore", "has not the lines"),
    ("log\n4\n", "has not the lines"), (f"\n4\n{ROOT}\n", "empty or broken line"),
    (f"log\n4\n{ROOT}\n\n", "empty or broken line"),
    (f"log\n4\n{ROOT}\n\nmore\n", "empty or broken line"),
    (f"log\n\n{ROOT}\n", "'' is not a decimal number"),
    (f"log\n04\n{ROOT}\n", "'04' is not a decimal number"),
    (f"log\n00\n{ROOT}\n", "'00' is not a decimal number"),
    (f"log\n+4\n{ROOT}\n", "is not a decimal number"),
    (f"log\n-4\n{ROOT}\n", "is not a decimal number"),
    (f"log\n 4\n{ROOT}\n", "is not a decimal number"),
    (f"log\n4 \n{ROOT}\n", "is not a decimal number"),
    (f"log\n4_0\n{ROOT}\n", "is not a decimal number"),
    (f"log\n0x4\n{ROOT}\n", "is not a decimal number"),
    (f"log\n४\n{ROOT}\n", "is not a decimal number"),
    (f"log\n1४\n{ROOT}\n", "is not a decimal number"),
    (f"log\n{2**63}\n{ROOT}\n", "is not a decimal number"),
    (f"log\n{10**40}\n{ROOT}\n", "is not a decimal number"),
    (f"log\n4\n{ROOT[:-1]}\n", "malformed"), (f"log\n4\n {ROOT}\n", "malformed"),
    (f"log\n4\n{ROOT.replace('Lc=', 'Ld=')}\n", "malformed"),
    (f"log\n4\n{ROOT.replace('+', '-')}\n", "malformed"), ("log\n4\n\n", "root has 0 bytes"),
    ("log\n4\nAAAA\n", "root has 3 bytes"), (f"log\n0\n{ROOT}\n", "not that of an empty tree"),
])  # fmt: skip
def test_what_is_not_quite_a_checkpoint_is_refused(text, said):
    with pytest.raises(ProofError, match=said):
        t.TreeHead.parse(text)


def test_an_empty_log_has_a_checkpoint():
    signed = t.issue(t.TreeHead(ORIGIN, 0, EMPTY_ROOT), KEY)
    assert t.verify(signed, LOG).checkpoint.size == 0


def test_a_checkpoint_is_made_of_one_line_each():
    with pytest.raises(ProofError, match="size -1 is not 0"):
        t.TreeHead(ORIGIN, -1, EMPTY_ROOT)
    for name, extensions in (("a\n4", ()), ("", ()), ("a", ("b\nc",)), ("a", ("",))):
        with pytest.raises(ProofError, match="empty or broken line"):
            t.TreeHead(name, 4, AT_4.root, extensions)


def test_1_keys_that_cannot_vouch_are_a_fault_of_ours():
    signed = t.issue(AT_4, KEY)
    with pytest.raises(LocalError, match="a log's key is of kind 1"):
        t.verify(signed, replace(LOG, kind=notes.SignatureKind.COSIGNATURE))
    with pytest.raises(LocalError, match="a log's key is of kind 1"):
        t.verify(signed, LOG, [replace(WITNESSES[0], kind=notes.SignatureKind.ED25519)])
    for witnesses in (
        [WITNESSES[0], replace(WITNESSES[0], name="b")],
        [replace(LOG, kind=notes.SignatureKind.COSIGNATURE)],
    ):
        with pytest.raises(LocalError, match="not all different"):
            t.verify(signed, LOG, witnesses)
    with pytest.raises(LocalError, match="3 witnesses are required and 2 are known"):
        t.verify(signed, LOG, WITNESSES, required=3)


def test_2_the_log_itself_must_have_signed():
    cosigned = notes.Note(AT_4.text, (notes.cosign(AT_4.text, WITNESS, KEYS[1], 5),))
    with pytest.raises(ProofError, match="not signed by its log"):
        t.verify(cosigned, LOG, WITNESSES)
    with pytest.raises(ProofError, match="none of the keys"):
        t.verify(t.issue(AT_4, KEYS[1]), LOG)
    bad = replace(notes.cosign(AT_4.text, WITNESS, KEYS[1], 5), data=bytes(72))
    with pytest.raises(ProofError, match="does not fit the note"):
        t.verify(t.issue(AT_4, KEY).signed_by(bad), LOG, WITNESSES)
    # to us this witness is a stranger
    assert t.verify(t.issue(AT_4, KEY).signed_by(bad), LOG).checkpoint == AT_4
    for field in (
        {"size": 5}, {"root": AT_9.root}, {"extensions": ("x",)}, {"origin": ORIGIN + "2"},
    ):  # fmt: skip
        with pytest.raises(ProofError, match="does not fit the note"):
            t.verify(replace(t.issue(AT_4, KEY), text=replace(AT_4, **field).text), LOG)


def test_3_it_must_be_a_checkpoint_of_this_log():
    with pytest.raises(ProofError, match="checkpoint has not the lines"):
        t.verify(notes.Note("hello\n", (notes.sign("hello\n", ORIGIN, KEY),)), LOG)
    other = replace(AT_4, origin=t.origin("lung", "hospital-b"))
    why = r"is of 'staddle.example/lung/hospital-b/egress', the key is for"
    with pytest.raises(ProofError, match=why):
        t.verify(notes.Note(other.text, (notes.sign(other.text, ORIGIN, KEY),)), LOG)


def test_4_enough_witnesses_must_have_cosigned():
    signed = t.issue(AT_4, KEY)
    assert t.verify(signed, LOG, WITNESSES).witnesses == ()
    with pytest.raises(ProofError, match="cosigned by nobody; 1 of 2 must"):
        t.verify(signed, LOG, WITNESSES, required=1)
    twice = signed.signed_by(*(notes.cosign(AT_4.text, WITNESS, KEYS[1], time) for time in (5, 6)))
    with pytest.raises(ProofError, match=f"cosigned by {WITNESS}; 2 of 2 must"):
        t.verify(twice, LOG, WITNESSES, required=2)
    both = twice.signed_by(notes.cosign(AT_4.text, SECOND, KEYS[2], 7))
    assert [each.time for each in t.verify(both, LOG, WITNESSES, required=2).witnesses] == [5, 7]


def test_growth_is_of_one_log_and_proven():
    proof = TREE.consistency_proof(4, 9)
    t.verify_growth(AT_4, AT_9, proof)
    t.verify_growth(AT_9, AT_9, ())
    with pytest.raises(ProofError, match="cannot extend"):
        t.verify_growth(AT_9, AT_4, proof)
    with pytest.raises(ProofError, match="different logs"):
        t.verify_growth(AT_4, replace(AT_9, origin=t.origin("lung", "hospital-b")), proof)
    with pytest.raises(ProofError, match="leads to"):
        t.verify_growth(AT_4, replace(AT_9, root=AT_4.root), proof)


def test_an_origin_that_is_no_key_name_is_not_signed():
    with pytest.raises(LocalError, match="key name"):
        t.issue(t.TreeHead("two words", 4, TREE.root(4)), KEY)
    with pytest.raises(LocalError, match="would pass for a cosignature"):
        t.issue(t.TreeHead("cosignature/v1", 4, TREE.root(4)), KEY)


@given(st.integers(0, 2**63 - 1))
def test_decimals(number):
    assert t.decimal(str(number)) == number
    with pytest.raises(ValueError, match="is not a decimal number"):
        t.decimal(f"0{number}")
