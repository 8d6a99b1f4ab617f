import base64
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import assume, given
from hypothesis import strategies as st
from support.ledgers import first, open_log

from staddle.errors import LocalError, ProofError
from staddle.security.log.merkle import Tree, leaf_hash
from staddle.security.log.note import MAX_NOTE, Note, Signature, SignatureKind, VerifierKey, cosign
from staddle.security.log.proof import HEADER, MAX_PROOF, Proof, prove, verify
from staddle.security.log.segments import Reading
from staddle.security.log.tree_head import TreeHead, issue, origin

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
COORDINATOR = Ed25519PrivateKey.from_private_bytes(bytes(range(32, 64)))
ORIGIN = origin("lung", "hospital-a")
LOG = VerifierKey(ORIGIN, SignatureKind.ED25519, KEY.public_key().public_bytes_raw())
WITNESS = VerifierKey("w", SignatureKind.COSIGNATURE, COORDINATOR.public_key().public_bytes_raw())

LEAVES = [leaf_hash(bytes.fromhex(record)) for record in ("", "00", "10", "2021")]
TREE = Tree(LEAVES)
SIGNED = issue(TreeHead(ORIGIN, 4, TREE.root()), KEY)
PROOF = prove(TREE, 3, SIGNED)
DATA = bytes(PROOF)

EXAMPLE = f"""c2sp.org/tlog-proof@v1
index 3
ApjRIpBtz8EIkstTpzmS/FufST6kybrbJ7eRtBJ6f+c=
+sVCA+fMaWzw38tCySodnbr3CtnmIfS9jZhmLwDjwSU=

{bytes(SIGNED).decode()}"""

HASHES = st.lists(st.binary(min_size=32, max_size=32), max_size=4).map(tuple)
NOTES = st.builds(
    Note, st.sampled_from(["a\n", "\n", "a\n\nb\n\n"]), st.just((Signature("a", b"1234", b"5"),))
)
PROOFS = st.builds(Proof, st.integers(0, 2**63 - 1), HASHES, NOTES, st.binary(max_size=40))


def test_the_example_of_the_docstring():
    assert DATA.decode() == EXAMPLE
    assert Proof.parse(DATA) == PROOF
    assert verify(PROOF, LEAVES[3], LOG).checkpoint == TreeHead(ORIGIN, 4, TREE.root())


@given(PROOFS)
def test_parsing_undoes_writing(proof):
    assert Proof.parse(bytes(proof)) == proof


def test_every_record_of_a_ledger_is_proven_and_none_in_place_of_another(tmp_path):
    with open_log(tmp_path) as log:
        for n in range(11):
            log.append({"type": "note", "n": n})
    records = first(tmp_path).read_bytes().splitlines()
    tree = Tree(line.hash for line in Reading(tmp_path))
    for size in (7, 11):
        signed = issue(TreeHead(ORIGIN, size, tree.root(size)), KEY)
        for index in range(size):
            proof = Proof.parse(bytes(prove(tree, index, signed)))
            for other, record in enumerate(records):
                if other == index:
                    verify(proof, leaf_hash(record), LOG)
                else:
                    with pytest.raises(ProofError, match="leads to"):
                        verify(proof, leaf_hash(record), LOG)


def test_1_the_log_and_enough_witnesses_must_have_signed_the_checkpoint():
    with pytest.raises(ProofError, match="none of the keys"):
        verify(PROOF, LEAVES[3], replace(LOG, name="staddle.example/lung/hospital-b/egress"))
    with pytest.raises(ProofError, match="cosigned by nobody; 1 of 1 must"):
        verify(PROOF, LEAVES[3], LOG, [WITNESS], required=1)
    cosigned = replace(PROOF, checkpoint=SIGNED.signed_by(cosign(SIGNED.text, "w", COORDINATOR, 5)))
    opened = verify(Proof.parse(bytes(cosigned)), LEAVES[3], LOG, [WITNESS], required=1)
    assert opened.witnesses[0].time == 5


def test_2_the_record_must_be_in_the_tree():
    for bad in (
        replace(PROOF, index=2), replace(PROOF, index=4), replace(PROOF, hashes=PROOF.hashes[:1]),
    ):  # fmt: skip
        with pytest.raises(ProofError):
            verify(bad, LEAVES[3], LOG)
    with pytest.raises(ProofError, match="leads to"):
        verify(PROOF, LEAVES[2], LOG)


def test_a_proof_is_made_for_a_checkpoint_of_this_ledger_only():
    other = Tree([*LEAVES[:3], LEAVES[0]])
    with pytest.raises(LocalError, match="is not of this ledger, which has 4"):
        prove(other, 3, SIGNED)
    with pytest.raises(LocalError, match="is not of this ledger, which has 3"):
        prove(Tree(LEAVES[:3]), 2, SIGNED)
    with pytest.raises(LocalError, match="no leaf 4"):
        prove(Tree([*LEAVES, LEAVES[0]]), 4, SIGNED)


def line(number, text):
    """The example with another line of this number."""
    lines = EXAMPLE.split("\n")
    lines[number] = text
    return "\n".join(lines)


@pytest.mark.parametrize(("text", "said"), [
    ("", "does not begin with the line"), ("\n" + EXAMPLE, "does not begin with the line"),
    (line(0, "c2sp.org/tlog-proof@v2"), "does not begin with the line"),
    (line(0, HEADER + " "), "does not begin with the line"),
    (line(0, HEADER + "\r"), "does not begin with the line"),
    (HEADER + "\n", "has no line 'index '"), (HEADER + "\n\n", "has no line 'index '"),
    (line(1, "Index 3"), "has no line 'index '"), (line(1, "index\t3"), "has no line 'index '"),
    (line(1, "extra AA==\nextra AA==\nindex 3"), "has no line 'index '"),
    (line(1, "index 3\nextra AA=="), "hash 1 is not base64"),
    (line(1, "extra \nindex 3"), "its extra line is empty"),
    (line(1, "extra A\nindex 3"), "extra data is not base64"),
    (line(1, "index 03"), "index '03' is not a decimal"),
    (line(1, "index "), "index '' is not a decimal"),
    (line(1, "index -1"), "index '-1' is not a decimal"),
    (line(1, "index 3 "), "index '3 ' is not a decimal"),
    (line(1, f"index {2**63}"), "is not a decimal"),
    (line(2, "ApjRIpBtz8EIkstTpzmS/FufST6kybrbJ7eRtBJ6f+c"), "hash 1 is not base64"),
    (line(3, " +sVCA+fMaWzw38tCySodnbr3CtnmIfS9jZhmLwDjwSU="), "hash 2 is not base64"),
    (line(3, "+sVCA+fMaWzw38tCySodnbr3CtnmIfS9jZhmLwDjwS0="), "leads to"),
    (line(3, "+sVCA+fMaWzw38tCySodnbr3CtnmIfS9jZhmLwDjwSV="), "hash 2 is not base64"),
    (line(3, "AAAA"), "not 32 bytes long"), (line(3, "\n"), "does not fit the note"),
    (line(2, "\n".join([ROW := base64.b64encode(bytes(32)).decode()] * 63)), "more than 63"),
    (line(2, "\n".join([ROW] * 62)), "too long"), (line(2, "é"), "byte 31 is not ASCII"),
    (EXAMPLE.replace("\n\nstaddle", "\nstaddle"), "hash 3 is not base64"),
    (EXAMPLE + "\n", "has 0 signatures"), (EXAMPLE[:-1], "note is not a text"),
    (EXAMPLE.partition("\n\n")[0] + "\n\n", "note is not a text"),
])  # fmt: skip
def test_what_is_not_quite_a_proof_is_refused(text, said):
    with pytest.raises(ProofError, match=said):
        verify(Proof.parse(text.encode()), LEAVES[3], LOG)


def test_an_extra_line_has_room_but_not_for_everything():
    room = MAX_PROOF - MAX_NOTE - 8192
    proof = replace(PROOF, extra=bytes(room * 3 // 4))
    assert Proof.parse(bytes(proof)) == proof
    assert verify(proof, LEAVES[3], LOG).checkpoint.size == 4
    with pytest.raises(ProofError, match=f"more than {MAX_PROOF}"):
        Proof.parse(bytes(replace(PROOF, extra=bytes(MAX_PROOF))))


def test_every_flipped_bit_is_found():
    for at in range(len(DATA)):
        for bit in range(8):
            changed = bytearray(DATA)
            changed[at] ^= 1 << bit
            with pytest.raises(ProofError):
                verify(Proof.parse(bytes(changed)), LEAVES[3], LOG)


@given(st.integers(0, len(DATA)), st.integers(0, len(DATA)), st.binary(max_size=6))
def test_a_mutated_proof_is_refused_or_proves_the_same(start, length, instead):
    data = DATA[:start] + instead + DATA[start + length :]
    assume(data != DATA)
    try:
        proof = Proof.parse(data)
        opened = verify(proof, LEAVES[3], LOG)
    except ProofError:
        return
    assert bytes(proof) == data
    assert opened.checkpoint.text == SIGNED.text
    assert (proof.index, proof.hashes) == (PROOF.index, PROOF.hashes)
