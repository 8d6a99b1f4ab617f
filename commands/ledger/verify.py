"""``staddle ledger verify``: whether a ledger holds."""

import re
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import LocalError
from ...security.identity.roster import Roster, signers
from ...security.ledger import audit, messages, receipt_checks
from ...security.ledger.audit import AuditResult
from ...security.ledger.receipt_checks import Receipts
from ...security.log.head import roster_log_key, stored
from ...security.log.lock import held
from ...security.log.note import Note, VerifierKey
from ...security.log.segments import CHECKPOINT
from ...security.log.tree_head import TreeHead, owner
from ..terminal import printer
from . import roster_files
from .proofs import read_note
from .roster_files import Founders, RosterFiles, Rosters, Threshold
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
    which must cover all records unless an agent is running. With --founder also who signed the
    head, the coordinator's receipts, and the rosters, which the ledger keeps; with --roster those
    of files.
    Whoever has the silo's log key could still cut off or rewrite records: pass what the
    coordinator, another silo or you noted earlier with --checkpoint or --known.
    """
    # A wrong roster is reported before the ledger, which may be large, is read.
    folder = audit.ledger_folder(path)
    rosters = roster_files.read(roster, founder, threshold, folder)

    # whoever has the silo's log key can rewrite all that lies in the folder: only what others hold
    # shows that
    noted = {str(file): read_note(file) for file in checkpoint or []}
    # A record's leaf hash never changes, however the ledger grows.
    leaves = dict(map(_known, known or []))
    own = stored(folder)
    # The newest roster has the log key in use; each receipt is checked under its own roster.
    key = _key(rosters.newest, own, noted)
    found = audit.verify(folder, leaves, key, noted)

    # A receipt is bound to a record, so receipts are checked only where the records hold, and only
    # those that were checked: the agent may append more meanwhile.
    receipts = None
    if rosters.each and found.ok:
        lines = islice(messages.lines(folder), found.records)
        receipts = receipt_checks.check(lines, rosters.each)
        found = replace(found, problems=tuple(receipts.problems))

    checked = _Checked(found, rosters, receipts, key, running=held(folder))
    # Federation and silo are read from the tree head.
    if own and found.checkpoint is not None:
        federation, whose = owner(TreeHead.parse(own.text).origin)
        checked = replace(checked, federation=federation, silo=whose)

    # a ledger that holds may be another silo's, or end in records that nobody has signed
    problems = (*found.problems, *_ownership(checked.silo, silo), *_loose(checked))
    checked = replace(checked, found=replace(found, problems=problems))
    if as_json:
        printer.show_json(_document(checked))
    else:
        _print(checked)
    # Scripts read the exit code.
    if problems:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Checked:
    """Everything that was found out about one ledger."""

    found: AuditResult
    rosters: Rosters
    receipts: Receipts | None  # None where none were checked
    key: VerifierKey | None  # that must have signed the tree head
    federation: str = ""  # as the tree head names it
    silo: str = ""
    running: bool = False  # an agent at work signs the newest records soon

    @property
    def unsigned(self) -> int:
        """Records behind the tree head."""
        return self.found.records - (self.found.checkpoint or 0)


def _document(checked: _Checked) -> dict[str, Any]:
    document: dict[str, Any] = {
        "ok": checked.found.ok,
        **asdict(checked.found),
        "federation": checked.federation,
        "silo": checked.silo,
        "unsigned": checked.unsigned,
        "running": checked.running,
    }
    rosters = checked.rosters
    # Version → founders who signed it.
    if rosters.each:
        document["rosters"] = {
            each.version: signers(each, rosters.founders) for each in rosters.each
        }
    receipts = checked.receipts
    if receipts:
        document["receipts"] = {
            "good": len(receipts.good),
            "without": receipts.without,
            "unchecked": receipts.unchecked,
        }
    return document


def _print(checked: _Checked) -> None:
    found = checked.found
    _print_problems(found)
    if checked.silo:
        by = "by whom was not checked (give --founder)"
        # Without a key the head's signature was not checked.
        has_signer = checked.key is not None and found.signed
        if has_signer:
            by = f"by {checked.key}"
        printer.show(f"ledger of {checked.silo}, federation {checked.federation}")
        printer.show(f"{found.checkpoint} of {found.records} records signed, {by}")
    printer.show(*checked.rosters.vouchers)
    if checked.receipts:
        printer.show(checked.receipts.summary)

    # SEQ:LEAF, as --known takes it: whoever keeps this line can hold the ledger to it
    head = "none"
    if found.head:
        head = f"{found.records - 1}:{found.head}"
    # A ledger of somebody else's making holds, too.
    verdicts = {(True, True): "verified", (True, False): "chain verified"}
    verdict = verdicts.get((found.ok, checked.key is not None), "NOT VERIFIED")
    printer.show(f"{verdict}: {found.records} records, head {head}")


def _ownership(found: str, expected: str | None) -> tuple[str, ...]:
    if expected is None or found == expected:
        return ()
    # A ledger without a tree head names nobody.
    actual = found or "nobody"
    return (f"it is the ledger of silo {actual}, not of {expected}; name the folder of {expected}",)


def _loose(checked: _Checked) -> tuple[str, ...]:
    """What is wrong with records that nobody signed.

    Nothing while their agent runs, which signs every 64.
    """
    if checked.unsigned <= 0 or checked.running:
        return ()
    problem = (
        f"the last {checked.unsigned} records are signed by nobody, and no agent is running to sign"
        " them. After a crash start the agent: it signs the records that its own log key wrote. If"
        " this is a copy, copy the ledger again afterwards"
    )
    return (problem,)


def _print_problems(found: AuditResult) -> None:
    for problem in found.problems:
        printer.show(f"problem: {problem}")

    # after a crash: whatever may have left counts as left
    for name, refs in (("digest", found.undigested), ("outcome", found.open_intents)):
        if refs:
            listed = ", ".join(map(str, refs))
            printer.show(f"{len(refs)} messages without {name}, counted as left: seq {listed}")
    # Without its closing record, a session may have sent up to its cap.
    if found.open_control is not None:
        printer.show(
            f"the session of seq {found.open_control} has no end yet (does the agent run?): its"
            " polls and heartbeats count with their cap, [control] of the policy"
        )
    if found.torn_bytes:
        printer.show(
            f"{found.torn_bytes} bytes of an unfinished last line, of which nothing had left"
        )


def _key(roster: Roster | None, own: Note | None, held: dict[str, Note]) -> VerifierKey | None:
    if roster is None:
        # A head whose signer is not checked could be anybody's.
        if held:
            raise LocalError(
                "--checkpoint needs --roster ROSTER: a checkpoint says nothing until its signer is"
                " known"
            )
        return None

    # the head names the silo, whose log key the roster has
    notes = [own] if own else list(held.values())
    if not notes:
        raise LocalError(
            f"no {CHECKPOINT} in this folder and none given, so no silo to look up; give"
            " --checkpoint"
        )
    return roster_log_key(notes[0], roster)


def _known(text: str) -> tuple[int, str]:
    # SEQ:LEAF is also how logs and commands print it.
    match = re.fullmatch(r"(\d{1,15}):([0-9a-f]{64})", text)
    if match is None:
        raise LocalError(f"--known {text!r} is not SEQ:LEAF, such as 412:9a0b… with 64 hex digits")
    return int(match[1]), match[2]
