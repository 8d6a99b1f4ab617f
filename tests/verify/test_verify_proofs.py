"""Notes, checkpoints, trees and proofs: the literal vectors of the package's own tests, through
both verifiers.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.lone_verifier import load

from staddle.errors import LocalError, ProofError
from staddle.security.log import consistency, merkle, note, proof
from staddle.security.log import tree_head as checkpoint
from staddle.security.log.note import Note, SignatureKind, VerifierKey, cosign, sign
from staddle.security.log.tree_head import TreeHead, issue

HERE = Path(__file__).parent.parent / "security" / "log"
NOTES, TREES, HEADS, PROOFS = (
    load(HERE / f"test_{name}.py") for name in ("note", "merkle", "tree_head", "proof")
)
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
LOG = VerifierKey(HEADS.ORIGIN, SignatureKind.ED25519, KEY.public_key().public_bytes_raw())


def cases(test):
    """The literal cases of a parametrised test."""
    return test.pytestmark[0].args[1]


def verdict(ask, *faults):
    """What is said, or None for a fault."""
    try:
        return ask()
    except faults:
        return None


@pytest.fixture
def opened(lone):
    """The text of a note that all of these keys signed, by both.

    None if one refuses it, and then both do.
    """

    def ask(data, keys):
        def theirs():
            found = note.parse(data)
            if len(note.verify(found, keys)) < len(keys):
                raise ProofError("not signed by all of them")
            return found.text

        ours = verdict(
            lambda: lone.open_note(data, [lone.Key.parse(str(key)) for key in keys]),
            lone.FaultError,
        )
        assert ours == verdict(theirs, ProofError)
        return ours

    return ask


def test_notes_of_others(opened):
    peter, enoch = VerifierKey.parse(NOTES.PETER_KEY), VerifierKey.parse(NOTES.ENOCH_KEY)
    assert opened(NOTES.SIGNED, [peter, enoch]) == opened(NOTES.SIGNED, [enoch]) == NOTES.TEXT
    assert opened(NOTES.SIGNED, [replace(peter, name="other")]) is None
    arche, remora = VerifierKey.parse(NOTES.ARCHE_KEY), VerifierKey.parse(NOTES.REMORA_KEY)
    assert opened(NOTES.PUBLIC, [arche, remora]).startswith(
        "arche2025h1.staging.ct.transparency.dev\n1432088532\n"
    )
    assert opened(NOTES.PUBLIC.replace(b"1432088532", b"1432088533"), [remora]) is None
    assert opened(HEADS.EXAMPLE, [HEADS.LOG, HEADS.WITNESSES[0]])
    assert opened(HEADS.EXAMPLE, [HEADS.LOG, HEADS.WITNESSES[1]]) is None


@pytest.mark.parametrize(
    "data", [data for data, _ in cases(NOTES.test_what_is_not_quite_a_note_is_refused)]
)
def test_what_is_not_quite_a_note(opened, data):
    assert opened(data, [VerifierKey.parse(NOTES.PETER_KEY)]) is None


@pytest.mark.parametrize(("data", "keys", "signed"), NOTES.GO_OPENS.values(), ids=NOTES.GO_OPENS)
def test_what_go_opens_and_what_not(opened, data, keys, signed):
    named = [key for key in keys if signed is None or key.partition("+")[0] in signed]
    text = opened(data, [VerifierKey.parse(key) for key in named])
    assert text == (None if signed is None else NOTES.TEXT)


@pytest.mark.parametrize("key", NOTES.GO_REFUSES_KEYS)
def test_keys_that_go_refuses(lone, key):
    with pytest.raises(lone.FaultError):
        lone.Key.parse(key)


def test_every_flipped_bit_of_a_note_with_both_kinds_of_signature(opened):
    for at in range(len(HEADS.EXAMPLE)):
        for bit in range(8):
            changed = bytearray(HEADS.EXAMPLE)
            changed[at] ^= 1 << bit
            assert opened(bytes(changed), [HEADS.LOG, HEADS.WITNESSES[0]]) is None


def test_signatures_of_a_known_key_must_all_hold(opened):
    a = VerifierKey("a", SignatureKind.ED25519, KEY.public_key().public_bytes_raw())
    w = replace(a, kind=SignatureKind.COSIGNATURE)
    good, timed = sign("x\n", "a", KEY), cosign("x\n", "a", KEY, 5)
    for data in (b"0", bytes(64), good.data[:-1], good.data + b"\0"):
        for signatures in ((good, replace(good, data=data)), (replace(good, data=data), good)):
            assert opened(bytes(Note("x\n", signatures)), [a]) is None
    later = (6).to_bytes(8, "big") + timed.data[8:]
    for data in (timed.data[:8], timed.data[:71], later, b"\x80" + timed.data[1:]):
        assert opened(bytes(Note("x\n", (replace(timed, data=data),))), [w]) is None
    beyond = (2**63).to_bytes(8, "big") + KEY.sign(f"cosignature/v1\ntime {2**63}\nx\n".encode())
    assert opened(bytes(Note("x\n", (replace(timed, data=beyond),))), [w]) is None
    assert opened(bytes(Note("x\n", (good, timed, good))), [a, w]) == "x\n"
    assert opened(bytes(Note("x\n", (good,) * 64)), [a]) == "x\n"


@pytest.mark.parametrize("key", [NOTES.PETER_KEY, NOTES.REMORA_KEY])
def test_a_key_with_a_wrong_character(lone, key):
    assert str(lone.Key.parse(key)) == key
    parts = {key[a:b] for a in range(len(key)) for b in range(a, len(key) + 1)} - {key}
    changed = {key[:at] + chr(ord(key[at]) + 1) + key[at + 1 :] for at in range(len(key))}
    more = {key + "=", key + "\n", " " + key, key.replace("+", "++", 1), key.replace("+", "é+", 1)}
    for bad in parts | changed | more:
        with pytest.raises(lone.FaultError):
            lone.Key.parse(bad)
        with pytest.raises(LocalError):
            VerifierKey.parse(bad)


@pytest.mark.parametrize(
    "text", [text for text, _ in cases(HEADS.test_what_is_not_quite_a_checkpoint_is_refused)]
)
def test_what_is_not_quite_a_checkpoint(lone, text):
    """Signed by the log all the same: what a note may hold, and a checkpoint not."""
    log = VerifierKey("log", SignatureKind.ED25519, KEY.public_key().public_bytes_raw())
    data = verdict(lambda: bytes(Note(text, (sign(text, "log", KEY),))), LocalError, ProofError)
    data = data or f"{text}\n— log AAAAAAAA\n".encode()
    with pytest.raises(lone.FaultError):
        lone.open_checkpoint(data, lone.Key.parse(str(log)))
    with pytest.raises(ProofError):
        checkpoint.verify(note.parse(data), log)


def test_checkpoints(lone):
    key = lone.Key.parse(str(LOG))
    empty = TreeHead(LOG.name, 0, merkle.EMPTY_ROOT)
    extended = replace(HEADS.AT_4, extensions=("x",))
    for head in (HEADS.AT_4, HEADS.AT_9, empty, extended):
        found = lone.open_checkpoint(bytes(issue(head, KEY)), key)
        assert (found.origin, found.size, found.root) == (head.origin, head.size, head.root)
    other = replace(HEADS.AT_4, origin=LOG.name.replace("-a", "-b"))
    data = bytes(Note(other.text, (sign(other.text, LOG.name, KEY),)))
    told = r"is of 'staddle.example/lung/hospital-b/egress', the key is for"
    with pytest.raises(lone.FaultError, match=told):
        lone.open_checkpoint(data, key)


def test_roots_are_those_of_rfc_6962(lone):
    tree = lone.RightEdgeTree()
    for size, leaf in enumerate(TREES.KNOWN):
        assert tree.root().hex() == TREES.ROOTS[size]
        assert leaf == lone.leaf_hash(bytes.fromhex(TREES.RECORDS[size]))
        tree.append(leaf)
    assert (tree.size, tree.root().hex()) == (8, TREES.ROOTS[8])
    tree = lone.RightEdgeTree()
    for size in range(64):
        assert tree.root() == TREES.naive_root(TREES.LEAVES[:size])
        tree.append(TREES.LEAVES[size])


@pytest.fixture
def included(lone):
    def ask(*arguments):
        ours = verdict(lambda: lone.verify_inclusion(*arguments) is None, lone.FaultError)
        assert ours == verdict(lambda: merkle.verify_inclusion(*arguments) is None, ProofError)
        return ours

    return ask


@pytest.fixture
def grown(lone):
    def ask(*arguments):
        ours = verdict(lambda: lone.verify_consistency(*arguments) is None, lone.FaultError)
        assert ours == verdict(lambda: merkle.verify_consistency(*arguments) is None, ProofError)
        return ours

    return ask


def test_inclusion(included):
    for index, size, hashes in cases(TREES.test_known_inclusion_proofs):
        known = [bytes.fromhex(value) for value in hashes]
        assert included(TREES.KNOWN[index], index, size, bytes.fromhex(TREES.ROOTS[size]), known)
    for index, size in TREES.PAIRS:
        path = TREES.naive_path(index, TREES.LEAVES[:size])
        assert included(TREES.LEAVES[index], index, size, TREES.TREE.root(size), path)
    for index, size in TREES.SMALL:
        path, root = TREES.TREE.inclusion_proof(index, size), TREES.TREE.root(size)
        for bent in TREES.bent(path):
            assert not included(TREES.LEAVES[index], index, size, root, bent)
        for leaf, other, *flipped in TREES.flips([TREES.LEAVES[index], root, *path]):
            assert not included(leaf, index, size, other, flipped)
        for at, of in TREES.SMALL:
            assert included(TREES.LEAVES[index], at, of, TREES.TREE.root(of), path) == (
                (at, of) == (index, size) or None
            )
            included(TREES.LEAVES[index], at, of, root, path)
    assert not included(TREES.LEAVES[0], 1, 1, TREES.LEAVES[0], ())


def test_consistency(grown):
    for old, size, hashes in cases(TREES.test_known_consistency_proofs):
        roots = [bytes.fromhex(TREES.ROOTS[n]) for n in (old, size)]
        assert grown(old, roots[0], size, roots[1], [bytes.fromhex(value) for value in hashes])
    for before, size in TREES.PAIRS:
        old = before + 1
        path = TREES.naive_subproof(old, TREES.LEAVES[:size], True)
        assert grown(old, TREES.TREE.root(old), size, TREES.TREE.root(size), path)
    empty, one, five = (TREES.TREE.root(size) for size in (0, 1, 5))
    good = [(0, empty, 0, empty), (0, empty, 5, five), (5, five, 5, five)]
    bad = [(0, one, 5, five), (0, five, 0, five), (0, empty, 0, five), (5, one, 5, five)]
    bad += [(1, one, 0, empty), (5, five, 1, one)]
    for old, old_root, size, root in (*good, *bad):
        sound = (old, old_root, size, root) in good
        assert bool(grown(old, old_root, size, root, ())) == sound, (old, size)
        assert not grown(old, old_root, size, root, (one,))
    for before, size in TREES.SMALL:
        old = before + 1
        path = TREES.TREE.consistency_proof(old, size)
        first, last = TREES.TREE.root(old), TREES.TREE.root(size)
        for bent in TREES.bent(path):
            assert not grown(old, first, size, last, bent)
        for old_root, root, *flipped in TREES.flips([first, last, *path]):
            assert not grown(old, old_root, size, root, flipped)
        for other, wrong in TREES.SMALL:
            grown(other, first, wrong, last, path)


@pytest.mark.parametrize(("name", "arguments", "sound"), TREES.INCLUSION)
def test_published_inclusion(included, name, arguments, sound):
    assert bool(included(*arguments)) == sound


@pytest.mark.parametrize(("name", "arguments", "sound"), TREES.CONSISTENCY)
def test_published_consistency(grown, name, arguments, sound):
    assert bool(grown(*arguments)) == (sound and name != TREES.STRICTER)


def test_sizes_below_zero_and_what_is_no_hash(included, grown):
    one = TREES.LEAVES[0]
    assert included(one, 0, 1, one, ())
    assert grown(1, one, 1, one, ())
    for index, size in ((-1, 1), (-1, 0), (0, -1), (-2, -1)):
        assert not included(one, index, size, one, ())
        assert not grown(index, one, size, one, ())
    for short in (b"", one[:-1], one + b"\0"):
        assert not included(short, 0, 1, short, ())
        assert not grown(1, short, 1, short, ())
        assert not grown(0, merkle.EMPTY_ROOT, 1, short, ())


RECORD = bytes.fromhex("2021")


@pytest.fixture
def proven(tool, tmp_path):
    """Whether a proof file shows this record, by both."""

    def ask(data, record=RECORD, key=LOG, witnesses=()):
        (tmp_path / "p").write_bytes(data)
        (tmp_path / "r").write_bytes(record)
        options = [option for witness in witnesses for option in ("--witness", witness)]
        options = ["--record", tmp_path / "r", "--key", key, *options]
        status, ask.out = tool("proof", tmp_path / "p", *options)
        known = merkle.leaf_hash(record), key, witnesses, len(witnesses)
        theirs = verdict(lambda: proof.verify(proof.Proof.parse(data), *known), ProofError)
        assert (status == 0) == (theirs is not None), ask.out
        return status == 0

    return ask


def test_a_proof_file(proven):
    assert proven(PROOFS.DATA)
    shown = "this record is number 3 (from 0) of 4 in the ledger"
    assert f"{shown} staddle.example/lung/hospital-a/egress" in proven.out
    assert proven(bytes(replace(PROOFS.PROOF, extra=b"somebody's")))
    assert not proven(PROOFS.DATA, RECORD + b"x")
    assert not proven(PROOFS.DATA, key=replace(LOG, name="other"))
    cosigned = PROOFS.SIGNED.signed_by(cosign(PROOFS.SIGNED.text, "w", PROOFS.COORDINATOR, 5))
    assert proven(bytes(replace(PROOFS.PROOF, checkpoint=cosigned)), witnesses=[PROOFS.WITNESS])
    assert not proven(PROOFS.DATA, witnesses=[PROOFS.WITNESS])


def test_a_record_may_end_with_its_newline(tool, tmp_path):
    (tmp_path / "p").write_bytes(PROOFS.DATA)
    (tmp_path / "r").write_bytes(RECORD + b"\n")
    assert tool("proof", tmp_path / "p", "--record", tmp_path / "r", "--key", LOG)[0] == 0


@pytest.mark.parametrize(
    "text", [text for text, _ in cases(PROOFS.test_what_is_not_quite_a_proof_is_refused)]
)
def test_what_is_not_quite_a_proof(proven, text):
    assert not proven(text.encode())


def test_flipped_bits_of_a_proof_are_found(lone, tmp_path):
    (tmp_path / "r").write_bytes(RECORD)
    words = ["proof", str(tmp_path / "p"), "--record", str(tmp_path / "r"), "--key", str(LOG)]
    arguments = lone.arguments().parse_args(words)
    for at in range(len(PROOFS.DATA)):
        for bit in (at % 8, 7 - at % 8):
            changed = bytearray(PROOFS.DATA)
            changed[at] ^= 1 << bit
            (tmp_path / "p").write_bytes(changed)
            with pytest.raises(lone.FaultError):
                list(lone.run_proof(arguments))
    (tmp_path / "p").write_bytes(PROOFS.DATA)
    assert len(list(lone.run_proof(arguments))) == 3


@pytest.fixture
def growth(tool, tmp_path):
    """Whether a proof file shows that a log grew from one note to another, by both."""

    def ask(old, new, data, key=LOG):
        paths = [tmp_path / name for name in ("old", "new", "proof")]
        for path, content in zip(paths, (old, new, data), strict=True):
            path.write_bytes(content)
        status, ask.out = tool("growth", *paths, "--key", key)

        def theirs():
            found = consistency.Consistency.parse(data)
            after = checkpoint.verify(note.parse(new), key).checkpoint.text
            return consistency.verify(found, note.parse(old), key).text == after

        assert (status == 0) == bool(verdict(theirs, ProofError)), ask.out
        return status == 0

    return ask


def test_growth(growth):
    notes = {
        size: issue(TreeHead(LOG.name, size, HEADS.TREE.root(size)), KEY) for size in range(10)
    }
    for old in range(10):
        for new in range(old, 10):
            data = bytes(consistency.prove(HEADS.TREE, notes[old], notes[new]))
            assert growth(bytes(notes[old]), bytes(notes[new]), data), growth.out
    four, nine = bytes(notes[4]), bytes(notes[9])
    data = bytes(consistency.prove(HEADS.TREE, notes[4], notes[9]))
    assert not growth(nine, four, data)
    assert not growth(four, four, data)
    assert not growth(bytes(notes[3]), nine, data)
    assert not growth(four, bytes(notes[8]), data)
    assert not growth(four, nine, data, replace(LOG, name="other"))
    fork = bytes(issue(TreeHead(LOG.name, 4, HEADS.TREE.root(5)), KEY))
    assert not growth(fork, nine, data)
    head, _, rest = data.partition(b"\n\n")
    lines = head.split(b"\n")
    for changed in (
        *([first, *lines[1:]] for first in (b"old 04", b"old 5", b"Old 4", b"old", b"old 4 ")),
        lines[:-1],
        [*lines, lines[-1]],
        [lines[0], *lines[:0:-1], b""],
        [*lines, b"AAAA"],
        [*lines[:-1], lines[-1].rstrip(b"=")],
        [*lines[:-1], b"\xc3\xa9"],
        [lines[0], *[lines[-1]] * 64],
        lines[1:],
        [b""],
    ):
        assert not growth(four, nine, b"\n".join(changed) + b"\n\n" + rest), changed
    no_break = data.replace(b"\n\n", b"\n", 1)
    for changed in (b"", data[:-1], data + b"\n", no_break, head, b"\n" + data):
        assert not growth(four, nine, changed)
