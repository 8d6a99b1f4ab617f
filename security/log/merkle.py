r"""The Merkle tree over a ledger's records, and proofs about it: RFC 6962 section 2.1, RFC 9162
section 2.1.

Five records, a to e; the subtree on the left of a node is always complete::

          root
         /    \
        N      e        leaf:      SHA-256(0x00 || record)
      /   \             node N:    SHA-256(0x01 || left || right)
     N     N            no leaves: SHA-256("")
    / \   / \
    a b   c d

A proof is a tuple of hashes, 32 bytes each; a leaf here is a leaf's hash. The verifiers know
nothing of trees: they take sizes and roots that somebody signed, and raise ProofError with the
reason.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from ...errors import LocalError, ProofError, check_local
from ..identity.domains import LEAF, NODE
from .note import require

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()

Hashes = tuple[bytes, ...]


def leaf_hash(record: bytes) -> bytes:
    """Hash of a record's bytes, as the tree holds it."""
    return hashlib.sha256(LEAF + record).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash of two subtrees.

    RFC 6962 section 2.1: a first byte of 0x01 keeps a node from passing for a leaf.
    """
    return hashlib.sha256(NODE + left + right).digest()


class Tree:
    """A growing tree that proves statements about each size it has had.

    Not safe to share between threads.

    It keeps the hash of every complete subtree, 64 bytes a leaf, computed when something is asked;
    a proof about n leaves then costs O(log² n).
    """

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        # [k]: hashes of the complete subtrees of 2^k leaves, in order
        self._levels: list[bytearray] = [bytearray()]
        self._hashed = 0  # leaves of which all complete subtrees are there
        for leaf in leaves:
            self.append(leaf)

    def __len__(self) -> int:
        return len(self._levels[0]) // HASH_BYTES

    def append(self, leaf: bytes) -> None:
        """Add a leaf's hash at the end.

        LocalError for anything but 32 bytes. Nodes are hashed only when a root or proof is asked
        for.
        """
        if len(leaf) != HASH_BYTES:
            raise LocalError(
                f"a leaf hash has {HASH_BYTES} bytes, this one {len(leaf)}; hash the record first"
            )
        self._levels[0].extend(leaf)

    def root(self, size: int | None = None) -> bytes:
        """Root of the first ``size`` leaves, by default of all.

        32 bytes; for no leaves, SHA-256 of the empty string. LocalError for a size that the tree
        never had.
        """
        size = self._size(size)
        return self._node((size - 1).bit_length(), 0, size) if size else EMPTY_ROOT

    def inclusion_proof(self, index: int, size: int | None = None) -> Hashes:
        """RFC 6962 section 2.1.1: that leaf ``index`` is in the tree of ``size`` leaves.

        Siblings from the leaf up, 32 bytes each. LocalError for a missing leaf or size.
        """
        size = self._size(size)
        inside = 0 <= index < size
        check_local(inside, f"no leaf {index} in a tree of {size}; name one of 0 to {size - 1}")
        return self._path(0, index, size)

    def inclusion_proofs(self) -> tuple[Hashes, ...]:
        """``inclusion_proof`` of every leaf in the tree of all leaves, in their order."""
        size = self._size(None)
        # A node is a sibling in the proofs of all leaves below the node next to it: read once.
        rows = [
            [self._node(level, index, size) for index in range((size - 1 >> level) + 1)]
            for level in range((size - 1).bit_length())
        ]
        return tuple(
            tuple(
                row[index >> level ^ 1]
                for level, row in enumerate(rows)
                if index >> level ^ 1 < len(row)
            )
            for index in range(size)
        )

    def consistency_proof(self, old: int, size: int | None = None) -> Hashes:
        """RFC 6962 section 2.1.2: that the tree of ``size`` leaves begins with that of ``old``."""
        size = self._size(size)
        earlier = 0 <= old <= size
        check_local(earlier, f"a tree of {size} leaves never had {old}; name an earlier size")
        if old in (0, size):
            return ()

        # The largest complete subtree at the right end of the old tree; the verifier knows it if it
        # is the old root.
        level = (old & -old).bit_length() - 1
        index = (old >> level) - 1
        known = () if index == 0 else (self._node(level, index, size),)
        return known + self._path(level, index, size)

    def _size(self, size: int | None) -> int:
        self._grow()
        if size is None:
            return len(self)
        if not 0 <= size <= len(self):
            raise LocalError(
                f"the tree has {len(self)} leaves, not {size}; wait for more, or name a size that"
                " it had"
            )
        return size

    def _grow(self) -> None:
        """Hash the complete subtrees that are new."""
        # Nothing is hashed twice, as a head is signed after each upload.
        if self._hashed == len(self):
            return
        self._hashed = len(self)
        pair, sha256 = 2 * HASH_BYTES, hashlib.sha256
        for level in range(self._hashed.bit_length() - 1):
            if level + 1 == len(self._levels):
                self._levels.append(bytearray())
            above = self._levels[level + 1]
            # The level above has one hash per pair that is done, so new ones begin behind those.
            new = bytes(self._levels[level][2 * len(above) :])
            for at in range(0, len(new) - len(new) % pair, pair):
                above.extend(sha256(NODE + new[at : at + pair]).digest())

    def _path(self, level: int, index: int, size: int) -> Hashes:
        """Siblings on the way from a node up to the root of ``size`` leaves.

        A node without one moves up as it is.
        """
        path = []
        # Ends at the root's level, where the last node has index 0.
        last = (size - 1) >> level  # index of the last node of this level
        while last:
            if index ^ 1 <= last:
                path.append(self._node(level, index ^ 1, size))
            level, index, last = level + 1, index >> 1, last >> 1
        return tuple(path)

    def _node(self, level: int, index: int, size: int) -> bytes:
        """Hash of the leaves from index · 2^level on, 2^level of them or as many as the tree of
        ``size`` has.
        """
        if (index + 1) << level <= size:
            return bytes(self._levels[level][index * HASH_BYTES : (index + 1) * HASH_BYTES])
        # An incomplete subtree at the right edge changes with the size, so its hash is not kept.
        left = self._node(level - 1, 2 * index, size)
        if (2 * index + 1) << (level - 1) >= size:
            return left
        return node_hash(left, self._node(level - 1, 2 * index + 1, size))


def verify_inclusion(
    leaf: bytes, index: int, size: int, root: bytes, proof: Sequence[bytes]
) -> None:
    """RFC 9162 section 2.1.3.2; ProofError unless ``proof`` shows that leaf ``index`` of ``size``
    is under ``root``.
    """
    what = f"inclusion proof of leaf {index} in {size}"
    # (1) The leaf can be in the tree, and all hashes are hashes.
    require(0 <= index < size, f"leaf {index} is not in a tree of {size}")
    _check_hashes(leaf, root, *proof)

    # (2) The way up from the leaf has as many siblings as the proof: with more or fewer the same
    # hashes would lead to a leaf of a tree of another size.
    computed = leaf
    for on_left, sibling in _siblings(index, size - 1, proof, what):
        computed = _parent(computed, sibling, on_left=on_left)

    # (3) It ends at the root.
    _check_end(what, computed, root, "root")


def verify_consistency(
    old_size: int, old_root: bytes, size: int, root: bytes, proof: Sequence[bytes]
) -> None:
    """RFC 9162 section 2.1.4.2; ProofError unless ``proof`` shows that the tree under ``root``
    extends the old one.

    An old size of 0 or of ``size`` takes an empty proof.
    """
    what = f"consistency proof from {old_size} to {size}"
    # (1) The trees can follow one another, and all hashes are hashes.
    follows = 0 <= old_size <= size
    require(follows, f"a tree of {size} leaves cannot extend one of {old_size}")
    _check_hashes(old_root, root, *proof)

    # (2) An empty tree has one root, and so has each size.
    _check_roots(old_size, old_root, size, root)
    if old_size in (0, size):
        require(not proof, f"{what} is too long: {len(proof)} hashes, none are needed")
        return

    # (3) The way starts at the last complete subtree of the old tree: the old root itself, or the
    # proof's first hash.
    level = (old_size & -old_size).bit_length() - 1
    at, last = (old_size >> level) - 1, (size - 1) >> level
    start, path = old_root, proof
    if at:
        require(bool(proof), f"{what} is too short: 0 hashes")
        start, path = proof[0], proof[1:]

    # (4) The way up has as many siblings as the proof; those on the left are in the old tree as
    # well.
    old_computed = computed = start
    for on_left, sibling in _siblings(at, last, path, what):
        if on_left:
            old_computed = node_hash(sibling, old_computed)
        computed = _parent(computed, sibling, on_left=on_left)

    # (5) It ends at both roots.
    _check_end(what, old_computed, old_root, "old root")
    _check_end(what, computed, root, "root")


def _check_roots(old_size: int, old_root: bytes, size: int, root: bytes) -> None:
    if old_size == 0 and old_root != EMPTY_ROOT:
        raise ProofError(f"root {old_root.hex()} is not that of an empty tree")
    if old_size == size and old_root != root:
        raise ProofError(
            f"two roots of one size, {size}: {old_root.hex()} and {root.hex()}; the log was forked"
        )


def _parent(node: bytes, sibling: bytes, *, on_left: bool) -> bytes:
    return node_hash(sibling, node) if on_left else node_hash(node, sibling)


def _check_end(what: str, computed: bytes, root: bytes, name: str) -> None:
    ends = computed == root
    require(ends, f"{what} leads to {computed.hex()}, the {name} is {root.hex()}")


def _siblings(at: int, last: int, path: Sequence[bytes], what: str) -> Iterator[tuple[bool, bytes]]:
    """Each sibling from node ``at`` up, and whether it is on the left.

    ``last`` is the last node of the same level.
    """
    for sibling in path:
        require(last > 0, f"{what} is too long: its last hashes lead nowhere")
        # The last node of a level may lack a sibling; it moves up until it has one, on its left.
        on_left = bool(at & 1) or at == last
        yield on_left, sibling
        while on_left and not at & 1 and at:  # levels on which the node has no sibling
            at, last = at >> 1, last >> 1
        at, last = at >> 1, last >> 1
    require(not last, f"{what} is too short: {len(path)} hashes")


def _check_hashes(*hashes: bytes) -> None:
    for value in hashes:
        # Node hashes have no length fields: of inputs with other lengths, the same bytes could be
        # split in two ways.
        if len(value) != HASH_BYTES:
            raise ProofError(
                f"a hash has {HASH_BYTES} bytes, this one {len(value)}: {value.hex()[:64]}"
            )
