"""Proof that a ledger only grew from one checkpoint to another, in one text file.

It is the body of ``add-checkpoint`` in c2sp.org/tlog-witness, so that any witness can take it as it
is: the old size, the hashes of RFC 6962's consistency proof, an empty line, and the new checkpoint
as it was signed::

    old 2
    +sVCA+fMaWzw38tCySodnbr3CtnmIfS9jZhmLwDjwSU=

    staddle.example/lung/hospital-a/egress
    4
    037kGJdt2VdTwcc4Yrk5j6Kiz5tP8P3+izDNlSCWFLc=

    — staddle.example/lung/hospital-a/egress
        NTLrx/l9vRr3UCZ37rojt5iPmfieDf67mR5Fu6XOZksxlfYTTzsVojtXxtMNuVgK9YdT…

Who holds the old checkpoint checks it with the log's public key alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ...errors import LocalError, ProofError
from . import note as notes
from . import tree_head as checkpoints
from .merkle import EMPTY_ROOT, HASH_BYTES, Tree
from .note import MAX_NOTE, Note, VerifierKey, base64_bytes, base64_text, require
from .tree_head import TreeHead, decimal, verify_growth

MAX_HASHES = 63  # of the largest tree, and what a witness takes
MAX_FILE = MAX_NOTE + 4096
_OLD = "old "


@dataclass(frozen=True, slots=True)
class Consistency:
    """A proof file, well-formed and nothing more: ``verify`` says what it proves."""

    old_size: int
    hashes: tuple[bytes, ...]
    checkpoint: Note

    def __bytes__(self) -> bytes:
        lines = [f"{_OLD}{self.old_size}", *map(base64_text, self.hashes), "", ""]
        return "\n".join(lines).encode() + bytes(self.checkpoint)

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read a proof file; ``bytes`` of the result are ``data``.

        ProofError names the line that is wrong.
        """
        # The file may come from anybody, so its size bounds the work before it is decoded.
        size = len(data)
        require(size <= MAX_FILE, f"consistency proof has {size} bytes, more than {MAX_FILE}")
        # The first blank line ends the proof; the note after it has another.
        head, _, note = data.partition(b"\n\n")
        # Bytes that are not ASCII are replaced, and fail below as a size or as base64.
        first, *lines = head.decode("ascii", errors="replace").split("\n")
        try:
            if not first.startswith(_OLD):
                raise ValueError(f"its first line is {first[:64]!r}, not {_OLD!r} and a size")
            old_size = decimal(first.removeprefix(_OLD))
            hashes = tuple(map(base64_bytes, lines))
        except ValueError as error:
            raise ProofError(f"consistency proof: {error}; is this the right file?") from None
        require(
            are_hashes(hashes),
            f"consistency proof has a hash that is not {HASH_BYTES} bytes long, or over"
            f" {MAX_HASHES}",
        )
        return cls(old_size, hashes, notes.parse(note))


def are_hashes(values: Sequence[bytes]) -> bool:
    """True if these can be the hashes of a proof: not too many for any tree, 32 bytes each."""
    return len(values) <= MAX_HASHES and {HASH_BYTES}.issuperset(map(len, values))


def prove(tree: Tree, old: Note, new: Note) -> Consistency:
    """Proof between two checkpoints of our own log; LocalError unless both are of this ledger.

    Whoever holds ``old`` sees by it that none of those records was changed. LocalError also if
    ``old`` has more records than ``new``.
    """
    sizes = []
    for name, note in (("old", old), ("new", new)):
        head = TreeHead.parse(note.text)
        if head.size > len(tree) or tree.root(head.size) != head.root:
            raise LocalError(
                f"the {name} checkpoint, of {head.size} records, is not of this ledger, which has"
                f" {len(tree)}; compare the ledger with its backups"
            )
        sizes.append(head.size)
    if sizes[0] > sizes[1]:
        raise LocalError(
            f"the old checkpoint has {sizes[0]} records, the new one {sizes[1]}; name them in order"
        )
    return Consistency(sizes[0], tree.consistency_proof(*sizes), new)


def verify(proof: Consistency, old: Note, log: VerifierKey) -> TreeHead:
    """The new checkpoint; ProofError unless the log signed both and the new one begins with all
    that the old has.
    """
    return verify_from(checkpoints.verify(old, log).checkpoint, proof, log)


def verify_from(held: TreeHead | None, proof: Consistency, log: VerifierKey) -> TreeHead:
    """Like ``verify``, for a caller that has checked the old head before, or holds none.

    None stands for a head of no records. ProofError if sizes, signature or hashes do not fit.
    """
    after = checkpoints.verify(proof.checkpoint, log).checkpoint
    before = held or TreeHead(after.origin, 0, EMPTY_ROOT)

    # The size in the file is not signed: only that of the old checkpoint counts.
    require(
        proof.old_size == before.size,
        f"consistency proof is from {proof.old_size} records, the old checkpoint has {before.size}",
    )
    verify_growth(before, after, proof.hashes)
    return after
