r"""Records of a ledger for somebody else, each with its proof: canonical JSON, one document a line.

The first line has the checkpoint, as it was signed; each line after it one record, or of a redacted export its type and
leaf hash alone, and the hashes that prove it under that checkpoint, in base64. Here broken::

    {"checkpoint":"staddle.example/lung/hospital-a/egress\n4\n037k…","job":null,"redacted":false,"v":1}
    {"leaf":"9a0b…","proof":["ApjRIpBtz8EIkstTpzmS/FufST6kybrbJ7eRtBJ6f+c=",…],
     "record":{"mono_ns":83123,…,"type":"start","v":1},"seq":0,"type":"start"}

A leaf hash tells nothing of its record, whose nonce nobody can guess. Without a job all records that the checkpoint
covers are there; with one, those that name it, and what became of its messages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LocalError, ProofError
from ..files import canonical_json, parse_json
from . import checkpoint as checkpoints
from . import note as notes
from . import proof as proofs
from .chain import Line, leaf_hash
from .checkpoint import Checkpoint
from .head import stored
from .ledger_view import lines
from .merkle import Tree
from .note import Note, VerifierKey, base64_bytes, base64_text
from .proof import Proof
from .segments import CHECKPOINT


def tree_and_checkpoint(folder: Path) -> tuple[Tree, Note]:
    """All leaves of a ledger, verified as they are read, and its checkpoint as it is stored."""
    note = _stored(folder)
    return Tree(line.hash for line in lines(folder)), note


def export(folder: Path, *, redact: bool, job: str | None = None) -> Iterator[bytes]:
    """The lines of an export; LocalError for a ledger that does not hold or is not that of its checkpoint."""
    note = _stored(folder)
    tree = Tree()
    kept: list[Line] = []
    ours: set[int] = set()  # seq of the job's intents
    for line in lines(folder):
        tree.append(line.hash)
        record = line.record
        if job is None or record.get("job") == job or record.get("ref") in ours:
            kept.append(line)
            if record["type"] == "egress.intent":
                ours.add(line.seq)
    size = Checkpoint.parse(note.text).size
    head = {"v": 1, "checkpoint": bytes(note).decode(), "job": job, "redacted": redact}
    yield canonical_json(head) + b"\n"
    for line in kept:
        if line.seq < size:
            proof = proofs.prove(tree, line.seq, note)
            document: dict[str, Any] = {
                "seq": line.seq,
                "type": line.record["type"],
                "leaf": line.leaf,
                "proof": [base64_text(value) for value in proof.hashes],
            }
            yield canonical_json(document if redact else {**document, "record": line.record}) + b"\n"


def _stored(folder: Path) -> Note:
    note = stored(folder)
    if note is None:
        raise LocalError(f"{folder / CHECKPOINT}: is missing; run: staddle ledger verify {folder}")
    return note


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export holds that is proven."""

    checkpoint: Checkpoint
    job: str | None
    redacted: bool
    seqs: tuple[int, ...]


def checkpoint_of(data: bytes) -> Note:
    """The checkpoint that an export brings, whoever signed it."""
    try:
        return notes.parse(_object(data.partition(b"\n")[0], 1)["checkpoint"].encode())
    except (KeyError, AttributeError):
        raise ProofError("export: line 1 has no checkpoint; is this the right file?") from None


def verify(data: bytes, log: VerifierKey) -> Exported:
    """Check every record of an export against the checkpoint in it; ProofError names the line that is wrong."""
    note = checkpoint_of(data)
    first, *rest = data.removesuffix(b"\n").split(b"\n")
    head = _object(first, 1)
    seqs: list[int] = []
    for number, line in enumerate(rest, 2):
        try:
            document = _object(line, number)
            leaf = bytes.fromhex(document["leaf"])
            hashes = tuple(base64_bytes(text) for text in document["proof"])
            proof = Proof(document["seq"], hashes, note)
            record = document.get("record")
            if not head["redacted"] and leaf_hash(canonical_json(record)) != document["leaf"]:
                raise ProofError(f"export: line {number}: the record has another leaf hash than it says")
            if record is not None and (record["seq"], record["type"]) != (document["seq"], document["type"]):
                raise ProofError(f"export: line {number}: the record is another than it says")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProofError(f"export: line {number} is malformed: {type(error).__name__}") from None
        proofs.verify(proof, leaf, log)
        seqs.append(proof.index)
    checkpoint = checkpoints.verify(note, log).checkpoint
    if head["job"] is None and seqs != list(range(checkpoint.size)):
        raise ProofError(
            f"export has {len(seqs)} records, and not each of the {checkpoint.size} of its checkpoint once"
        )
    return Exported(checkpoint, head["job"], head["redacted"], tuple(seqs))


def _object(line: bytes, number: int) -> dict[str, Any]:
    try:
        document = parse_json(line, f"line {number}")
        canonical = canonical_json(document)
    except LocalError as error:
        raise ProofError(f"export: {error}") from None
    if not isinstance(document, dict) or canonical != line:
        raise ProofError(f"export: line {number} is no canonical JSON object; is this the right file?")
    return document
