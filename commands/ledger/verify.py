"""``staddle ledger verify``: whether a ledger holds."""

import re
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import LocalError
from ...security.identity import roster as rosters
from ...security.identity.roster import Roster
from ...security.ledger import audit, messages, receipt_checks
from ...security.ledger.audit import AuditResult
from ...security.log.head import roster_log_key, stored
from ...security.log.lock import held
from ...security.log.note import Note, VerifierKey
from ...security.log.segments import CHECKPOINT
from ...security.log.tree_head import TreeHead, owner
from ..console import printer
from . import roster_files
from .proofs import read_note
from .roster_files import Founders, RosterFiles, Threshold
from .show import Json, LedgerPath


def verify(
    path: LedgerPath,
    roster: RosterFiles = None,
    founder: Founders = None,
    threshold: Threshold = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(help="A tree head of this ledger that you hold; may be repeated."),
    ] = None,
    known: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SEQ:LEAF", help="A leaf hash that another party holds; may be repeated."
        ),
    ] = None,
    silo: Annotated[
        str | None, typer.Option(metavar="SILO", help="Whose ledger it has to be.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every record of a ledger; exit code 1 if it does not hold.

    Without options: the chain of hashes, the order of the records, and the tree head in the folder,
    which must cover all records unless an agent is running. With --roster also who signed the head,
    the coordinator's receipts and the roster itself; with --founder who vouches for the roster.
    Whoever has the silo's log key could still cut off or rewrite records: pass what the
    coordinator, another silo or you noted earlier with --checkpoint or --known.
    """
    given = roster_files.read(roster, founder, threshold)
    folder = audit.ledger_folder(path)
    noted = {str(file): read_note(file) for file in checkpoint or []}
    own = stored(folder)
    key = _key(given.newest, own, noted)
    found = audit.verify(folder, dict(_known(text) for text in known or []), key, noted)
    receipts = None
    if given.each and found.ok:
        receipts = receipt_checks.check(islice(messages.lines(folder), found.records), given.each)
        found = replace(found, problems=tuple(receipts.problems))
    federation, whose = (
        owner(TreeHead.parse(own.text).origin) if own and found.checkpoint is not None else ("", "")
    )
    unsigned, running = found.records - (found.checkpoint or 0), held(folder)
    found = replace(
        found, problems=(*found.problems, *_ownership(whose, silo), *_loose(unsigned, running))
    )
    if as_json:
        said = {"federation": federation, "silo": whose, "unsigned": unsigned, "running": running}
        document: dict[str, Any] = {"ok": found.ok, **asdict(found), **said}
        if given.each:
            document["rosters"] = {
                each.version: rosters.signers(each, given.founders) for each in given.each
            }
        if receipts:
            counts = {
                "good": len(receipts.good),
                "without": receipts.without,
                "unchecked": receipts.unchecked,
            }
            document["receipts"] = counts
        printer.show_json(document)
    else:
        _tell(found)
        if whose:
            by = f"by {key}" if key and found.signed else "by whom was not checked (give --roster)"
            printer.show(f"ledger of {whose}, federation {federation}")
            printer.show(f"{found.checkpoint} of {found.records} records signed, {by}")
        for told in (given.told, receipts.told if receipts else ""):
            if told:
                printer.show(told)
        head = f"{found.records - 1}:{found.head}" if found.head else "none"
        printer.show(
            f"{'verified' if found.ok else 'NOT VERIFIED'}: {found.records} records, head {head}"
        )
    if not found.ok:
        raise typer.Exit(1)


def _ownership(found: str, expected: str | None) -> tuple[str, ...]:
    if expected is None or found == expected:
        return ()
    return (
        (
            f"it is the ledger of silo {found or 'nobody'}, not of {expected}; name the folder of"
            f" {expected}"
        ),
    )


def _loose(unsigned: int, running: bool) -> tuple[str, ...]:
    """What is wrong with records that nobody signed.

    Nothing while their agent runs, which signs every 64.
    """
    if unsigned <= 0 or running:
        return ()
    why = (
        f"the last {unsigned} records are signed by nobody, and no agent runs that would sign them;"
        " after a crash "
    )
    return (
        why + "start it: it does, if its log key wrote them. Of a copy, take it again after that",
    )


def _tell(found: AuditResult) -> None:
    for problem in found.problems:
        printer.show(f"problem: {problem}")
    for name, refs in (("digest", found.undigested), ("outcome", found.open_intents)):
        if refs:
            listed = ", ".join(str(ref) for ref in refs)
            printer.show(f"{len(refs)} messages without {name}, counted as left: seq {listed}")
    if found.open_control is not None:
        printer.show(f"control session of seq {found.open_control} is open, counted with its cap")
    if found.torn_bytes:
        printer.show(
            f"{found.torn_bytes} bytes of an unfinished last line, of which nothing had left"
        )


def _key(roster: Roster | None, own: Note | None, held: dict[str, Note]) -> VerifierKey | None:
    if roster is None:
        if held:
            raise LocalError(
                "--checkpoint needs --roster ROSTER: a checkpoint says nothing until its signer is"
                " known"
            )
        return None
    note = own or next(iter(held.values()), None)
    if note is None:
        raise LocalError(
            f"no {CHECKPOINT} in this folder and none given, so no silo to look up; give"
            " --checkpoint"
        )
    return roster_log_key(note, roster)


def _known(text: str) -> tuple[int, str]:
    match = re.fullmatch(r"(\d{1,15}):([0-9a-f]{64})", text)
    if match is None:
        raise LocalError(f"--known {text!r} is not SEQ:LEAF, such as 412:9a0b… with 64 hex digits")
    return int(match[1]), match[2]
