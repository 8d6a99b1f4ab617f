r"""Records of a ledger for somebody else, each with its proof: canonical JSON, one document a line.

The first line has the checkpoint, as it was signed; each line after it one record, or of a redacted
export its type and leaf hash alone, and the hashes that prove it under that checkpoint, in base64.
Here broken::

    {"checkpoint":"staddle.example/lung/hospital-a/egress\n4\n037k…","job":null,"redacted":false,"v":1}
    {"leaf":"9a0b…","proof":["ApjRIpBtz8EIkstTpzmS/FufST6kybrbJ7eRtBJ6f+c=",…],
     "record":{"mono_us":83123,…,"type":"start","v":1},"seq":0,"type":"start"}

A leaf hash tells nothing of its record, whose nonce nobody can guess. Without a job all records
that the checkpoint covers are there; with one, those that name it, what became of its messages, and
the policies that were in force between the first of these and the last: that none was left out,
only an export without a job shows. What a data set's privacy budget came to is of all jobs
together, and no part of one's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ...errors import LocalError, ProofError
from ...files.documents import ModelT, Strict, canonical_json, parse_canonical
from ..identity.keys import Hex32
from ..log import note as notes
from ..log import proof as proofs
from ..log import tree_head as checkpoints
from ..log.chain import VerifiedLine, leaf_hash
from ..log.head import stored
from ..log.merkle import Tree
from ..log.note import Note, VerifierKey, base64_bytes, base64_text, require
from ..log.proof import Proof
from ..log.segments import CHECKPOINT
from ..log.tree_head import TreeHead
from .messages import lines
from .records import Count


def tree_and_checkpoint(folder: Path) -> tuple[Tree, Note]:
    """All leaves of a ledger, verified as they are read, and its checkpoint as it is stored.

    LocalError for a ledger that breaks its rules or has no checkpoint. The tree may be larger than
    that of the checkpoint, since records may follow it.
    """
    note = _stored(folder)
    return Tree(line.hash for line in lines(folder)), note


def export(folder: Path, *, redact: bool, job: str | None = None) -> Iterator[bytes]:
    """The lines of an export; LocalError for a ledger that does not hold or is not that of its
    checkpoint.
    """
    # The checkpoint is read before the records, which only grow: so all that it covers is there.
    note = _stored(folder)
    tree, chosen = Tree(), _Chosen(job)
    for line in lines(folder):
        tree.append(line.hash)
        chosen.take(line)
    # Records that were written since the checkpoint cannot be proven by it.
    size = TreeHead.parse(note.text).size
    head = {"v": 1, "checkpoint": bytes(note).decode(), "job": job, "redacted": redact}
    yield canonical_json(head) + b"\n"
    for line in chosen.lines:
        if line.seq >= size:  # nobody signed it yet
            break
        proof = proofs.prove(tree, line.seq, note)
        document: dict[str, Any] = {
            "seq": line.seq,
            "type": line.record["type"],
            "leaf": line.leaf,
            "proof": list(map(base64_text, proof.hashes)),
        }
        if not redact:
            document["record"] = line.record
        yield canonical_json(document) + b"\n"


class _Chosen:
    """The lines of one job, and each policy that was in force for it; of all without a job."""

    def __init__(self, job: str | None) -> None:
        self.lines: list[VerifiedLine] = []
        self._job = job
        self._intents: set[int] = set()  # by seq: what follows up on them is of the job
        self._policies: list[VerifiedLine] = []  # that no record of the job has followed yet

    def take(self, line: VerifiedLine) -> None:
        record = line.record
        if self._is_ours(record):
            self.lines += [*self._policies, line]
            self._policies = []
            if record["type"] == "egress.intent":
                self._intents.add(line.seq)
        elif record["type"] == "policy.change":
            # Before the job's first record the newest policy alone was in force.
            earlier = self._policies if self.lines else []
            self._policies = [*earlier, line]

    def _is_ours(self, record: Mapping[str, Any]) -> bool:
        if self._job is None or record.get("job") == self._job:
            return True
        # Digests and outcomes name no job, only their intent.
        return record.get("ref") in self._intents


def _stored(folder: Path) -> Note:
    note = stored(folder)
    # Without a head that the silo signed nothing in an export could be proven.
    if note is None:
        raise LocalError(f"{folder / CHECKPOINT}: is missing; run: staddle ledger verify {folder}")
    return note


@dataclass(frozen=True, slots=True)
class Exported:
    """The proven content of an export.

    ``seqs`` are its records, in order. If ``job`` is None, they are all that the checkpoint covers.
    """

    checkpoint: TreeHead
    job: str | None
    redacted: bool
    seqs: tuple[int, ...]


class _Head(Strict):
    v: Literal[1]
    checkpoint: str
    job: str | None
    redacted: Annotated[bool, Field(strict=True)]


class _Redacted(Strict):
    seq: Count
    type: str
    leaf: Hex32
    proof: tuple[str, ...]


class _Whole(_Redacted):
    record: dict[str, Any]


def checkpoint_of(data: bytes) -> Note:
    """The checkpoint that an export brings, whoever signed it."""
    return notes.parse(_parsed(data.partition(b"\n")[0], _Head, 1).checkpoint.encode())


def verify(data: bytes, log: VerifierKey) -> Exported:
    """Check every record of an export against the checkpoint in it.

    ProofError names the line that is wrong.
    """
    first, *rest = data.removesuffix(b"\n").split(b"\n")
    # (1) The log signed the checkpoint.
    head, note = _parsed(first, _Head, 1), checkpoint_of(data)
    checkpoint = checkpoints.verify(note, log).checkpoint

    # (2) Each record is the one of its leaf hash, and this is under the checkpoint in its place.
    seqs: list[int] = []
    for number, line in enumerate(rest, 2):
        found = _parsed(line, _Redacted if head.redacted else _Whole, number)
        if isinstance(found, _Whole):
            record = found.record
            same = leaf_hash(canonical_json(record)) == found.leaf
            require(same, f"export: line {number}: the record has another leaf hash than it says")
            # Readers may go by the line's seq and type, so these must be the record's.
            same = (record.get("seq"), record.get("type")) == (found.seq, found.type)
            require(same, f"export: line {number}: the record is another than it says")
        proofs.verify(
            Proof(found.seq, _hashes(found.proof, number), note), bytes.fromhex(found.leaf), log
        )
        seqs.append(found.seq)

    # (3) All are there, or those of a job once each and in order.
    require(
        head.job is not None or seqs == list(range(checkpoint.size)),
        f"export has {len(seqs)} records, not each of the {checkpoint.size} of its checkpoint once",
    )
    require(seqs == sorted(set(seqs)), "export has a record twice, or not in order")
    return Exported(checkpoint, head.job, head.redacted, tuple(seqs))


def _hashes(proof: tuple[str, ...], number: int) -> tuple[bytes, ...]:
    try:
        return tuple(map(base64_bytes, proof))
    except ValueError as error:
        raise ProofError(f"export: line {number}: proof is not base64: {error}") from None


def _parsed(line: bytes, model: type[ModelT], number: int) -> ModelT:
    try:
        return parse_canonical(line, model, f"line {number}")
    except LocalError as error:
        raise ProofError(f"export: {error}; is this the right file?") from None
