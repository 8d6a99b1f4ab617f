import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staddle.errors import LocalError, ProofError
from staddle.security.log.merkle import (
    EMPTY_ROOT,
    Tree,
    leaf_hash,
    node_hash,
    verify_consistency,
    verify_inclusion,
)

# Records, roots and proofs of the reference implementation of certificate transparency.
RECORDS = [
    "", "00", "10", "2021", "3031", "40414243", "5051525354555657",
    "606162636465666768696a6b6c6d6e6f",
]  # fmt: skip
KNOWN = [leaf_hash(bytes.fromhex(record)) for record in RECORDS]
ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
N01 = ROOTS[2]
N23 = "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e"
N45 = "0ebc5d3437fbe2db"
N45 += "158b9f126a1d118e308181031d0a949f8dededebc558ef6a"
N67 = "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0"
N47 = "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4"
L0, L1 = ROOTS[1], "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7"
L4 = "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b"

LEAVES = [leaf_hash(bytes([n])) for n in range(64)]
TREE = Tree(LEAVES)
PAIRS = [(index, size) for size in range(1, 65) for index in range(size)]
SMALL = [(index, size) for index, size in PAIRS if size <= 8]


# RFC 6962 section 2.1 word for word: slow, recursive, and sharing nothing with the code under test
# but the node hash.
def split(size):
    k = 1
    while 2 * k < size:
        k *= 2
    return k


def naive_root(leaves):
    if len(leaves) < 2:
        return leaves[0] if leaves else EMPTY_ROOT
    k = split(len(leaves))
    return node_hash(naive_root(leaves[:k]), naive_root(leaves[k:]))


def naive_path(m, leaves):
    if len(leaves) == 1:
        return []
    k = split(len(leaves))
    if m < k:
        return [*naive_path(m, leaves[:k]), naive_root(leaves[k:])]
    return [*naive_path(m - k, leaves[k:]), naive_root(leaves[:k])]


def naive_sides(m, size):
    if size == 1:
        return ""
    k = split(size)
    return naive_sides(m, k) + "R" if m < k else naive_sides(m - k, size - k) + "L"


def naive_subproof(m, leaves, whole):
    if m == len(leaves):
        return [] if whole else [naive_root(leaves)]
    k = split(len(leaves))
    if m <= k:
        return [*naive_subproof(m, leaves[:k], whole), naive_root(leaves[k:])]
    return [*naive_subproof(m - k, leaves[k:], False), naive_root(leaves[:k])]


def flips(values):
    """The list with each single bit of each entry flipped, one at a time."""
    for at, value in enumerate(values):
        for bit in range(8 * len(value)):
            flipped = (int.from_bytes(value) ^ (1 << bit)).to_bytes(len(value))
            yield [*values[:at], flipped, *values[at + 1 :]]


def bent(proof):
    """A proof truncated, with a hash too many, with two swapped, and with a hash that is none."""
    stranger = leaf_hash(b"stranger")
    yield from (proof[:at] + proof[at + 1 :] for at in range(len(proof)))
    yield from (
        (*proof[:at], extra, *proof[at:])
        for at in range(len(proof) + 1)
        for extra in (stranger, *proof)
    )
    yield from (
        (*proof[:a], proof[b], *proof[a + 1 : b], proof[a], *proof[b + 1 :])
        for b in range(len(proof))
        for a in range(b)
    )
    yield from ((*proof[:at], proof[at][:-1], *proof[at + 1 :]) for at in range(len(proof)))
    yield from ((*proof[:at], proof[at] + b"\x00", *proof[at + 1 :]) for at in range(len(proof)))


# The 196 inclusion and consistency vectors of transparency-dev/merkle (testdata/, Apache-2.0, as of
# commit 417fb0c3): a sound proof of each tree, and what must not pass for one. They are made anew
# here, with those sizes and fillers; PUBLISHED is over what the files themselves say, spelt as
# below, so none is missing and none says anything else.
PUBLISHED = "97efd42a331a89d9b47584c441699114c23960473dcabbac147d5947ad655ef6"
STRANGER = bytes.fromhex("abacaba0" + 21 * "00" + "60061e00123456")
DATA = leaf_hash(b"data")
CARE_1, CARE_2 = b"don't care 1", b"don't care 2"


def flipped(proof, mask):
    """By place in the proof: the proof with a bit of that hash's first byte flipped."""
    for at, value in enumerate(proof):
        yield at, [*proof[:at], bytes([value[0] ^ mask]) + value[1:], *proof[at + 1 :]]


def inclusion_vectors():
    """Name, (leaf, index, size, root, proof), and whether that proves anything."""
    for index, size in ((0, 1), (0, 8), (5, 8), (2, 3), (1, 5)):
        leaf, root, proof = KNOWN[index], naive_root(KNOWN[:size]), naive_path(index, KNOWN[:size])
        of = f"{index} in {size}"
        yield f"{of}, sound", (leaf, index, size, root, proof), True
        for wrong in ((index - 1) % 2**64, index + 1, index ^ 2):
            yield f"{of}, index {wrong}", (leaf, wrong, size, root, proof), False
        for wrong in (size // 2, size * 2):
            yield f"{of}, size {wrong}", (leaf, index, wrong, root, proof), False
        yield f"{of}, wrong leaf", (b"WrongLeaf", index, size, root, proof), False
        for name, wrong in (("empty tree's", EMPTY_ROOT), ("stranger's", STRANGER)):
            yield f"{of}, {name} root", (leaf, index, size, wrong, proof), False
        for name, extra in (("nothing", b""), ("root", root)):
            yield f"{of}, {name} before", (leaf, index, size, root, [extra, *proof]), False
            yield f"{of}, {name} behind", (leaf, index, size, root, [*proof, extra]), False
        for at, bent_proof in flipped(proof, 0x08):
            yield f"{of}, bit of hash {at}", (leaf, index, size, root, bent_proof), False
        if proof:
            yield f"{of}, cut", (leaf, index, size, root, proof[:-1]), False
        if len(proof) > 1:
            within = [proof[0], STRANGER, *proof[1:]]
            yield f"{of}, stranger within", (leaf, index, size, root, within), False
    for index, size in ((0, 0), (0, 1), (1, 0), (2, 1)):
        for leaf, root in ((b"", EMPTY_ROOT), (STRANGER, b""), (STRANGER, EMPTY_ROOT)):
            name = f"{index} in {size}, leaf {leaf.hex()[:8]}, root {root.hex()[:8]}"
            yield name, (leaf, index, size, root, []), False
    for leaf in (b"", DATA):
        for root in (b"", DATA):
            name = f"single, leaf {leaf.hex()[:8]}, root {root.hex()[:8]}"
            yield name, (leaf, 0, 1, root, []), leaf == root == DATA


def consistency_vectors():
    """Name, (old size, old root, size, root, proof), and whether that proves anything."""
    yield "1 to 1, sound", (1, naive_root(KNOWN[:1]), 1, naive_root(KNOWN[:1]), []), True
    for old, size in ((1, 8), (6, 8), (2, 5), (6, 7)):
        old_root, root = naive_root(KNOWN[:old]), naive_root(KNOWN[:size])
        proof = naive_subproof(old, KNOWN[:size], True)
        of = f"{old} to {size}"
        yield f"{of}, sound", (old, old_root, size, root, proof), True
        for wrong in (old - 1, old + 1, old ^ 2):
            yield f"{of}, old size {wrong}", (wrong, old_root, size, root, proof), False
        for wrong in (size // 2, size * 2):
            yield f"{of}, size {wrong}", (old, old_root, wrong, root, proof), False
        yield f"{of}, wrong old root", (old, b"WrongRoot", size, root, proof), False
        yield f"{of}, wrong root", (old, old_root, size, b"WrongRoot", proof), False
        yield f"{of}, swapped", (old, root, size, old_root, proof), False
        yield f"{of}, no proof", (old, old_root, size, root, []), False
        yield f"{of}, cut", (old, old_root, size, root, proof[:-1]), False
        for name, extra in (("nothing", b""), ("old root", old_root), ("root", root)):
            yield f"{of}, {name} before", (old, old_root, size, root, [extra, *proof]), False
            yield f"{of}, {name} behind", (old, old_root, size, root, [*proof, extra]), False
        yield f"{of}, first twice", (old, old_root, size, root, [proof[0], *proof]), False
        for at, bent_proof in flipped(proof, 0x10):
            yield f"{of}, bit of hash {at}", (old, old_root, size, root, bent_proof), False
    for old, size, old_root, root, proof in (
        (0, 0, CARE_1, CARE_1, []), (0, 0, CARE_1, CARE_2, []), (0, 0, EMPTY_ROOT, CARE_2, []),
        (0, 0, EMPTY_ROOT, EMPTY_ROOT, [EMPTY_ROOT]), (0, 1, CARE_1, CARE_2, []),
        (0, 1, EMPTY_ROOT, CARE_2, []), (0, 1, EMPTY_ROOT, EMPTY_ROOT, [EMPTY_ROOT]),
        (1, 0, CARE_1, CARE_2, []), (1, 1, CARE_1, CARE_2, []), (1, 1, CARE_2, CARE_2, []),
        (1, 1, EMPTY_ROOT, CARE_2, []), (1, 1, EMPTY_ROOT, EMPTY_ROOT, [EMPTY_ROOT]),
        (1, 2, CARE_1, CARE_2, []), (2, 1, CARE_1, CARE_2, []),
    ):  # fmt: skip
        roots = f"roots {old_root.hex()[-8:]} and {root.hex()[-8:]}"
        name = f"{old} to {size}, {roots}, proof of {len(proof)}"
        sound = (old, size, old_root) == (1, 1, root) and not proof
        yield name, (old, old_root, size, root, proof), sound


INCLUSION, CONSISTENCY = list(inclusion_vectors()), list(consistency_vectors())
# Published as sound, since the two roots are the same. They are no SHA-256 hashes, and so refused
# here.
STRICTER = "1 to 1, roots 72652032 and 72652032, proof of 0"


def spelt(arguments, sound):
    """A vector in one line: decimal numbers, hex hashes, those of a proof one after another."""
    words = [str(each) if isinstance(each, int) else each.hex() for each in arguments[:-1]]
    return " ".join(
        [*words, ",".join(each.hex() for each in arguments[-1]), "sound" if sound else "refused"]
    )


def test_these_are_the_published_vectors():
    lines = [spelt(arguments, sound) for _, arguments, sound in [*INCLUSION, *CONSISTENCY]]
    assert (len(INCLUSION), len(CONSISTENCY)) == (98, 98)
    assert hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest() == PUBLISHED
    assert [sound for name, _, sound in CONSISTENCY if name == STRICTER] == [True]


@pytest.mark.parametrize(
    ("arguments", "sound"), [pytest.param(*rest, id=name) for name, *rest in INCLUSION]
)
def test_published_inclusion(arguments, sound):
    if sound:
        verify_inclusion(*arguments)
    else:
        with pytest.raises(ProofError):
            verify_inclusion(*arguments)


@pytest.mark.parametrize(
    ("arguments", "sound"),
    [pytest.param(each, sound and name != STRICTER, id=name) for name, each, sound in CONSISTENCY],
)
def test_published_consistency(arguments, sound):
    if sound:
        verify_consistency(*arguments)
    else:
        with pytest.raises(ProofError):
            verify_consistency(*arguments)


def test_roots_of_rfc_6962():
    tree = Tree()
    assert tree.root().hex() == ROOTS[0]
    for size, leaf in enumerate(KNOWN, 1):
        tree.append(leaf)
        assert (len(tree), tree.root().hex()) == (size, ROOTS[size])
    assert [tree.root(size).hex() for size in range(9)] == ROOTS


@pytest.mark.parametrize(("index", "size", "proof"), [
    (0, 1, []), (0, 8, [L1, N23, N47]), (5, 8, [L4, N67, ROOTS[4]]), (2, 3, [N01]),
    (1, 5, [L0, N23, L4]),
])  # fmt: skip
def test_known_inclusion_proofs(index, size, proof):
    assert [value.hex() for value in Tree(KNOWN).inclusion_proof(index, size)] == proof
    verify_inclusion(
        KNOWN[index], index, size, bytes.fromhex(ROOTS[size]),
        [bytes.fromhex(value) for value in proof],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("old", "size", "proof"),
    [(1, 1, []), (1, 8, [L1, N23, N47]), (6, 8, [N45, N67, ROOTS[4]]), (2, 5, [N23, L4])],
)
def test_known_consistency_proofs(old, size, proof):
    assert [value.hex() for value in Tree(KNOWN).consistency_proof(old, size)] == proof
    roots = [bytes.fromhex(ROOTS[n]) for n in (old, size)]
    verify_consistency(old, roots[0], size, roots[1], [bytes.fromhex(value) for value in proof])


def test_every_root_and_inclusion_proof_up_to_64_is_that_of_the_naive_tree():
    for index, size in PAIRS:
        proof = TREE.inclusion_proof(index, size)
        assert list(proof) == naive_path(index, LEAVES[:size])
        verify_inclusion(LEAVES[index], index, size, naive_root(LEAVES[:size]), proof)


def test_all_inclusion_proofs_of_a_tree_at_once():
    for size in range(65):
        proofs = Tree(LEAVES[:size]).inclusion_proofs()
        assert [list(proof) for proof in proofs] == [
            naive_path(index, LEAVES[:size]) for index in range(size)
        ]


def test_every_consistency_proof_up_to_64_is_that_of_the_naive_tree():
    for before, size in PAIRS:
        old = before + 1
        proof = TREE.consistency_proof(old, size)
        assert list(proof) == naive_subproof(old, LEAVES[:size], True)
        verify_consistency(old, naive_root(LEAVES[:old]), size, naive_root(LEAVES[:size]), proof)
    for size in range(65):
        assert TREE.consistency_proof(0, size) == ()
        verify_consistency(0, EMPTY_ROOT, size, TREE.root(size), ())


@given(st.integers(1, 3000), st.data())
def test_larger_trees(size, data):
    tree = Tree(leaf_hash(n.to_bytes(2)) for n in range(size))
    index, old = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size))
    verify_inclusion(
        leaf_hash(index.to_bytes(2)), index, size, tree.root(), tree.inclusion_proof(index)
    )
    verify_consistency(old, tree.root(old), size, tree.root(), tree.consistency_proof(old))


def test_1_inclusion_needs_an_index_inside_the_tree():
    for index, size in ((1, 1), (-1, 1), (0, 0), (8, 8), (0, -1)):
        with pytest.raises(ProofError, match=f"leaf {index} is not in a tree of {size}"):
            verify_inclusion(LEAVES[0], index, size, TREE.root(1), ())


def test_2_inclusion_refuses_a_bent_proof():
    for index, size in SMALL:
        for proof in bent(TREE.inclusion_proof(index, size)):
            with pytest.raises(ProofError):
                verify_inclusion(LEAVES[index], index, size, TREE.root(size), proof)


def test_3_inclusion_refuses_every_flipped_bit():
    for index, size in SMALL:
        start = [LEAVES[index], TREE.root(size), *TREE.inclusion_proof(index, size)]
        for leaf, root, *proof in flips(start):
            with pytest.raises(ProofError, match="leads to"):
                verify_inclusion(leaf, index, size, root, proof)


def test_inclusion_refuses_every_other_index_and_size():
    accepted = set()
    for index, size in [(i, n) for i, n in PAIRS if n <= 14]:
        proof, root = TREE.inclusion_proof(index, size), TREE.root(size)
        for other, wrong in [(i, n) for i, n in PAIRS if n <= 20 and (i, n) != (index, size)]:
            with pytest.raises(ProofError):  # under the root of the size that it claims
                verify_inclusion(LEAVES[index], other, wrong, TREE.root(wrong), proof)
            try:
                verify_inclusion(LEAVES[index], other, wrong, root, proof)
            except ProofError:
                continue
            accepted.add((index, size, other, wrong))
    # A root says nothing of the size beside it: whoever signs the two together vouches for both.
    # The way up must fit.
    assert accepted
    assert all(naive_sides(i, n) == naive_sides(other, wrong) for i, n, other, wrong in accepted)
    assert all(i == other for i, n, other, wrong in accepted if n == wrong)


def test_1_consistency_needs_sizes_in_order():
    for old, size in ((2, 1), (-1, 1), (1, 0)):
        with pytest.raises(ProofError, match=f"a tree of {size} leaves cannot extend one of {old}"):
            verify_consistency(old, TREE.root(1), size, TREE.root(1), ())


def test_2_an_empty_tree_has_one_root_and_one_size_has_one_root():
    with pytest.raises(ProofError, match="not that of an empty tree"):
        verify_consistency(0, TREE.root(3), 3, TREE.root(3), ())
    with pytest.raises(ProofError, match="not that of an empty tree"):
        verify_consistency(0, TREE.root(3), 0, TREE.root(3), ())
    with pytest.raises(ProofError, match="the log was forked"):
        verify_consistency(3, TREE.root(3), 3, TREE.root(4), ())
    for old in (0, 3):
        with pytest.raises(ProofError, match="too long"):
            verify_consistency(old, TREE.root(old), 3, TREE.root(3), (LEAVES[0],))


def test_3_consistency_needs_a_start():
    with pytest.raises(ProofError, match="from 3 to 4 is too short: 0 hashes"):
        verify_consistency(3, TREE.root(3), 4, TREE.root(4), ())


def test_4_consistency_refuses_a_bent_proof():
    for before, size in SMALL:
        old = before + 1
        for proof in bent(TREE.consistency_proof(old, size)):
            with pytest.raises(ProofError):
                verify_consistency(old, TREE.root(old), size, TREE.root(size), proof)


def test_5_consistency_refuses_every_flipped_bit():
    for before, size in SMALL:
        old = before + 1
        start = [TREE.root(old), TREE.root(size), *TREE.consistency_proof(old, size)]
        for old_root, root, *proof in flips(start):
            with pytest.raises(ProofError, match=r"leads to|the log was forked"):
                verify_consistency(old, old_root, size, root, proof)


def test_consistency_refuses_every_other_pair_of_sizes():
    pairs = [(old + 1, size) for old, size in PAIRS if old + 1 < size <= 16]
    for old, size in pairs:
        proof = TREE.consistency_proof(old, size)
        for other, wrong in pairs:
            if (other, wrong) != (old, size):
                with pytest.raises(ProofError):
                    verify_consistency(other, TREE.root(other), wrong, TREE.root(wrong), proof)


def test_a_changed_removed_or_moved_record_is_inconsistent():
    for size in range(2, 20):
        for at in range(size):
            changed = Tree([*LEAVES[:at], leaf_hash(b"changed"), *LEAVES[at + 1 : size]])
            removed = Tree([*LEAVES[:at], *LEAVES[at + 1 : size + 1]])
            for other in (changed, removed):
                for old in range(at + 1, size):
                    proof = other.consistency_proof(old)
                    with pytest.raises(ProofError):
                        verify_consistency(old, TREE.root(old), size, other.root(), proof)


def test_wrong_lengths_are_named():
    with pytest.raises(ProofError, match="a hash has 32 bytes, this one 31"):
        verify_inclusion(LEAVES[0][1:], 0, 1, LEAVES[0][1:], ())
    with pytest.raises(ProofError, match="a hash has 32 bytes, this one 0"):
        verify_consistency(1, b"", 2, TREE.root(2), (LEAVES[1],))
    with pytest.raises(LocalError, match="this one 3; hash the record first"):
        Tree([b"abc"])


@pytest.mark.parametrize(("ask", "said"), [
    (lambda: TREE.root(65), "has 64 leaves, not 65"),
    (lambda: TREE.root(-1), "has 64 leaves, not -1"),
    (lambda: TREE.inclusion_proof(3, 3), "no leaf 3 in a tree of 3"),
    (lambda: TREE.inclusion_proof(-1), "no leaf -1"),
    (lambda: TREE.inclusion_proof(0, 65), "has 64 leaves, not 65"),
    (lambda: TREE.consistency_proof(4, 3), "never had 4"),
    (lambda: TREE.consistency_proof(-1, 3), "never had -1"),
])  # fmt: skip
def test_a_tree_says_what_it_cannot_prove(ask, said):
    with pytest.raises(LocalError, match=said):
        ask()
