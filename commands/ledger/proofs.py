"""``staddle ledger prove``, ``export`` and their like: a silo's proofs, and their checks."""

from pathlib import Path
from typing import Annotated

import typer

from ...errors import LocalError, ProofError, reason
from ...files.documents import read_bytes, write_new
from ...security.ledger import export as ledger_export
from ...security.ledger.audit import ledger_folder
from ...security.log import consistency as growth
from ...security.log import note as notes
from ...security.log import proof as proofs
from ...security.log.head import roster_log_key
from ...security.log.merkle import leaf_hash
from ...security.log.note import Note, VerifierKey
from ...security.log.proof import Proof
from ...security.log.tree_head import TreeHead
from ..terminal import printer
from . import roster_files
from .roster_files import Founders, Rosters, Threshold
from .show import LedgerPath

Out = Annotated[
    Path | None, typer.Option("--out", help="The file to make; without it, standard output.")
]
Key = Annotated[
    str | None, typer.Option("--key", metavar="VKEY", help="The log's key: name+id+base64.")
]
RosterFile = Annotated[
    Path | None, typer.Option("--roster", help="The roster that has the silo's log key.")
]


def prove(
    seq: Annotated[int, typer.Argument(min=0, help="Number of the record.")],
    path: LedgerPath,
    out: Out = None,
) -> None:
    """Prove that a record stands in the ledger, under the tree head in the folder.

    Writes a tlog-proof file.
    """
    # Reading verifies every record, so a broken ledger gives no proof.
    tree, note = ledger_export.tree_and_checkpoint(ledger_folder(path))
    size = TreeHead.parse(note.text).size
    # A proof needs a signed head, and the newest records may be under none yet.
    if seq >= size:
        raise LocalError(
            f"record {seq} is not under the checkpoint, which has {size} records; wait for the"
            " next one"
        )
    # A C2SP format, which other tools can check.
    _write(bytes(proofs.prove(tree, seq, note)), out)


def verify_proof(
    proof: Annotated[Path, typer.Argument(metavar="FILE", help="The tlog-proof file.")],
    record: Annotated[
        str, typer.Option(metavar="LINE_OR_FILE", help="The record's line, or a file with it.")
    ],
    key: Key = None,
    roster: RosterFile = None,
    founder: Founders = None,
    threshold: Threshold = None,
) -> None:
    """Check that a record stands in a silo's ledger, as its log key signed it."""
    found = Proof.parse(_read(proof))
    log = _log(found.checkpoint, key, roster_files.read_one(roster, founder, threshold))
    # A record is a JSON object; paths rarely begin with a brace.
    line = record.encode() if record.lstrip().startswith("{") else read_bytes(Path(record))
    # Leaves are hashed without the line break.
    opened = proofs.verify(found, leaf_hash(line.removesuffix(b"\n")), log)
    under = f"under its checkpoint of {opened.checkpoint.size}"
    printer.show(f"proven: this is record {found.index} of {log.name}, {under}")


def consistency(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="The earlier tree head.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The later tree head.")],
    path: LedgerPath,
    out: Out = None,
) -> None:
    """Prove that the ledger only grew between two tree heads.

    Writes the proof in the form that a tlog-witness takes.
    """
    tree, _ = ledger_export.tree_and_checkpoint(ledger_folder(path))
    _write(bytes(growth.prove(tree, read_note(old), read_note(new))), out)


def verify_consistency(
    proof: Annotated[Path, typer.Argument(metavar="FILE", help="The consistency proof.")],
    old: Annotated[Path, typer.Option(help="The earlier tree head, which you hold.")],
    key: Key = None,
    roster: RosterFile = None,
    founder: Founders = None,
    threshold: Threshold = None,
) -> None:
    """Check that a ledger only grew since a tree head that you hold."""
    # The proof comes first: it names the silo whose key is needed.
    found = growth.Consistency.parse(_read(proof))
    log = _log(found.checkpoint, key, roster_files.read_one(roster, founder, threshold))
    # Against the head that the user noted, not one that the proof brings along.
    after = growth.verify(found, read_note(old), log)
    printer.show(f"proven: {log.name} only grew, from {found.old_size} records to {after.size}")


def export(
    path: LedgerPath,
    redact: Annotated[
        bool,
        typer.Option(
            "--redact", help="Number, type and leaf hash only, for who may not see the records."
        ),
    ] = False,
    job: Annotated[str | None, typer.Option(help="Only records of this job.")] = None,
    out: Out = None,
) -> None:
    """Write records with their proofs, for 'staddle ledger verify-export' on another machine."""
    # Complete before the first byte is written: an error leaves no partial export.
    _write(b"".join(ledger_export.export(ledger_folder(path), redact=redact, job=job)), out)


def verify_export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The exported file.")],
    key: Key = None,
    roster: RosterFile = None,
    founder: Founders = None,
    threshold: Threshold = None,
) -> None:
    """Check every record of an export against the tree head that the silo signed."""
    data = _read(file)
    checkpoint = ledger_export.checkpoint_of(data)
    log = _log(checkpoint, key, roster_files.read_one(roster, founder, threshold))
    found = ledger_export.verify(data, log)
    what = "leaf hashes" if found.redacted else "records"
    # Nothing shows that an export of one job has all of that job's records.
    which = f"of job {found.job!r}" if found.job is not None else "which are all"
    printer.show(
        f"proven: {len(found.seqs)} {what}, {which}, of {log.name}, under {found.checkpoint.size}"
        " signed records"
    )


def read_note(path: Path) -> Note:
    """A signed note from a file; its signature is not checked.

    ProofError if it is not a signed note, LocalError if it cannot be read; both name the file.
    """
    try:
        return notes.parse(read_bytes(path))
    except ProofError as error:
        raise ProofError(f"{path}: {error}") from error


def _log(note: Note, key: str | None, rosters: Rosters) -> VerifierKey:
    roster = rosters.newest
    if key is None and roster is not None:
        return roster_log_key(note, roster)
    # With two keys it would be unclear which one counted.
    if key is not None and roster is None:
        return VerifierKey.parse(key)
    raise LocalError("give the log's key, with either --key VKEY or --roster ROSTER")


def _read(path: Path) -> bytes:
    """A file of any size: an export may be as large as its ledger."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}") from error


def _write(data: bytes, out: Path | None) -> None:
    if out is None:
        printer.show_file(data)
    else:
        # Existing files are not overwritten.
        write_new(out, data)
