"""Proof that one record stands in a ledger, in one text file: c2sp.org/tlog-proof, suffix
``.tlog-proof``.

The index of the record, the siblings from its leaf to the root, an empty line, and the checkpoint
as it was signed::

    c2sp.org/tlog-proof@v1
    index 3
    ApjRIpBtz8EIkstTpzmS/FufST6kybrbJ7eRtBJ6f+c=
    +sVCA+fMaWzw38tCySodnbr3CtnmIfS9jZhmLwDjwSU=

    staddle.example/lung/hospital-a/egress
    4
    037kGJdt2VdTwcc4Yrk5j6Kiz5tP8P3+izDNlSCWFLc=

    — staddle.example/lung/hospital-a/egress
        NTLrx/l9vRr3UCZ37rojt5iPmfieDf67mR5Fu6XOZksxlfYTTzsVojtXxtMNuVgK9YdT…

It needs no network and no trust in who hands it over: only the record, or its leaf hash, and the
log's public key. A line ``extra`` and base64 may stand before the index. Nobody signs it; we write
none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ...errors import LocalError, ProofError
from . import note as notes
from . import tree_head as checkpoints
from .consistency import MAX_HASHES, are_hashes
from .merkle import HASH_BYTES, Tree, verify_inclusion
from .note import MAX_NOTE, Note, VerifierKey, base64_bytes, base64_text, require
from .tree_head import TreeHead, WitnessedHead, decimal

HEADER = "c2sp.org/tlog-proof@v1"
MAX_PROOF = MAX_NOTE + 64 * 1024  # bytes: hashes take 3 KiB, the rest is for somebody's extra line
_EXTRA, _INDEX = "extra ", "index "


@dataclass(frozen=True, slots=True)
class Proof:
    """A proof file, well-formed and nothing more: ``verify`` says what it proves."""

    index: int
    hashes: tuple[bytes, ...]
    checkpoint: Note
    extra: bytes = b""

    def __bytes__(self) -> bytes:
        extra = [_EXTRA + base64_text(self.extra)] if self.extra else []
        hashes = map(base64_text, self.hashes)
        return "\n".join(
            [HEADER, *extra, f"{_INDEX}{self.index}", *hashes, "", ""]
        ).encode() + bytes(self.checkpoint)

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read a proof file; ``bytes`` of the result are ``data``.

        ProofError names the line that is wrong.
        """
        # (1) It is not too long to look at, and the part above the checkpoint is text.
        require(len(data) <= MAX_PROOF, f"proof has {len(data)} bytes, more than {MAX_PROOF}")
        head, _, note = data.partition(b"\n\n")
        try:
            lines = head.decode("ascii").split("\n")
        except UnicodeDecodeError as error:
            raise ProofError(f"proof: byte {error.start} is not ASCII") from None

        # (2) Header, extra data if any, index, hashes.
        headed = lines.pop(0) == HEADER
        require(headed, f"proof does not begin with the line {HEADER}; is this the right file?")
        extra, first = b"", _first(lines)
        if first.startswith(_EXTRA):
            extra = _decoded(first.removeprefix(_EXTRA), "extra data")
            require(bool(extra), "proof: its extra line is empty")
            first = _first(lines)
        require(
            first.startswith(_INDEX),
            f"proof has no line {_INDEX!r} with the number of the record where it should stand",
        )
        try:
            # ``decimal`` takes one spelling only, so that ``bytes`` of the result are ``data``.
            index = decimal(first.removeprefix(_INDEX))
        except ValueError as error:
            raise ProofError(f"proof: index {error}") from None
        hashes = tuple(_decoded(line, f"hash {number}") for number, line in enumerate(lines, 1))
        require(
            are_hashes(hashes),
            f"proof has hashes that are not {HASH_BYTES} bytes long, or more than {MAX_HASHES}"
            " of them",
        )

        # (3) The rest is a note.
        return cls(index, hashes, notes.parse(note), extra)


def _first(lines: list[str]) -> str:
    """Take the next line; empty at the end."""
    return lines.pop(0) if lines else ""


def _decoded(text: str, what: str) -> bytes:
    try:
        return base64_bytes(text)
    except ValueError:
        raise ProofError(f"proof: {what} is not base64: {text[:64]!r}") from None


def prove(tree: Tree, index: int, signed: Note) -> Proof:
    """Proof of record ``index`` under a checkpoint of our own log, of this size or an
    earlier one.
    """
    checkpoint = TreeHead.parse(signed.text)
    if checkpoint.size > len(tree) or tree.root(checkpoint.size) != checkpoint.root:
        raise LocalError(
            f"the checkpoint of {checkpoint.size} records is not of this ledger, which has"
            f" {len(tree)}; compare the ledger with its backups"
        )
    return Proof(index, tree.inclusion_proof(index, checkpoint.size), signed)


def verify(
    proof: Proof,
    leaf: bytes,
    log: VerifierKey,
    witnesses: Sequence[VerifierKey] = (),
    required: int = 0,
) -> WitnessedHead:
    """Check that the record with this leaf hash stands at ``proof.index`` of the log.

    The checkpoint that says so.

    ProofError as of ``tree_head.verify``, or if the record is another or stands elsewhere.
    """
    # (1) The log signed the checkpoint. The index needs no signature: the hashes lead from another
    # place to another root.
    opened = checkpoints.verify(proof.checkpoint, log, witnesses, required)

    # (2) The record is in the tree of that checkpoint.
    head = opened.checkpoint
    verify_inclusion(leaf, proof.index, head.size, head.root, proof.hashes)
    return opened
