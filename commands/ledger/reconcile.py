"""``staddle ledger reconcile``: a silo's ledger next to the coordinator's."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ...errors import LocalError, ProofError
from ...files import checked_file
from ...security.identity.roster import Roster
from ...security.ledger import audit
from ...security.ledger.audit import ledger_folder
from ...security.ledger.reconcile import Reconciled
from ...security.ledger.reconcile import reconcile as compared
from ...security.log import note as notes
from ...security.log import tree_head as checkpoints
from ...security.log.head import roster_log_key, stored
from ...security.log.note import Note, VerifierKey
from ...security.log.segments import CHECKPOINT
from ...security.log.tree_head import TreeHead
from ...silo.egress.witness import HEADS, MemberHeads
from ..terminal import printer
from . import roster_files
from .roster_files import Founders, Rosters, Threshold

MOST = 20  # gaps that are printed


def reconcile(
    silo: Annotated[
        Path, typer.Option(metavar="DIR", help="The silo's folder, or the folder 'ledger' in it.")
    ],
    coordinator: Annotated[
        Path, typer.Option(metavar="DIR", help="The coordinator's, or a copy of its ledger.")
    ],
    roster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The roster, for who signed heads and receipts."),
    ] = None,
    founder: Founders = None,
    threshold: Threshold = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Compare what left a silo with what the coordinator received.

    Exit code 1 where the two contradict each other.

    Both ledgers are verified first. Gaps that a crash or a lost connection leaves are no
    contradiction.
    """
    rosters = roster_files.read_one(roster, founder, threshold)
    found = compare(ledger_folder(silo), ledger_folder(coordinator), rosters.newest)
    if as_json:
        printer.show_json({"ok": not found.differences, **asdict(found)})
    else:
        _print(found, rosters)

    # scripts and cron see a contradiction by the exit code
    if found.differences:
        raise typer.Exit(1)


def _print(found: Reconciled, rosters: Rosters) -> None:
    for difference in found.differences:
        printer.show(f"DIFFERENCE: {difference}")
    for gap in found.gaps[:MOST]:
        printer.show(f"gap: {gap}")
    more = len(found.gaps) - MOST
    if more > 0:
        printer.show(f"… and {more} gaps more (--json has all)")

    # the last line says how much was checked, so that nobody takes it for more
    checked = "receipts and heads not checked (give --roster)"
    if rosters.newest:
        checked = "receipts and heads checked"
    # A receipt can be checked only under the roster that it names.
    if found.unchecked:
        checked += f"; {found.unchecked} receipts are under other rosters, not checked"
    both = f"{found.uploads} uploads of {found.bytes:,} bytes and {found.deliveries} deliveries"
    printer.show(*rosters.vouchers)
    verdict = "NOT RECONCILED" if found.differences else "reconciled"
    printer.show(f"{verdict}: {found.silo} and {found.coordinator} both have {both}; {checked}")


def compare(silo: Path, coordinator: Path, roster: Roster | None) -> Reconciled:
    """Two ledgers' folders, each verified; LocalError for one that does not hold.

    The heads of the coordinator's ledger that the silo holds (``heads.json``, next to its own) are
    compared as well.

    Without ``roster``, signatures are not checked. Nothing is written; daemons may be running.
    """
    # Heads first: the ledgers may grow meanwhile, and must contain every head that is held.
    held = _held(silo.parent / HEADS, coordinator, roster)

    # what two ledgers say of one another means nothing unless each holds by itself
    for folder in (silo, coordinator):
        # Without a roster, chain, rules and tree can still be checked.
        key = None
        if roster:
            key = _key(folder, roster)
        verified = audit.verify(folder, key=key)
        if not verified.ok:
            raise LocalError(
                f"{folder}: does not hold: {verified.problems[0]}; run: staddle ledger verify"
                f" {folder}"
            )

    # any silo's ledger holds too: this has to be the one that signed the receipts
    if roster:
        name = _owner(coordinator)
        if name != roster.coordinator.id:
            raise LocalError(
                f"{coordinator}: is the ledger of {name!r}; the coordinator is"
                f" {roster.coordinator.id!r}"
            )
    return compared(silo, coordinator, roster, held)


def _held(path: Path, coordinator: Path, roster: Roster | None) -> list[TreeHead]:
    """Heads of the coordinator's ledger that the silo keeps, under its present key."""
    # The file is missing next to a copy of the ledger alone.
    if not path.exists():
        return []
    kept = checked_file.read_json(path, MemberHeads)
    # The file has heads of other members, too; this ledger's own head names its owner.
    now = _checkpoint(coordinator)
    name, found = _owner(coordinator), []

    # a fork is a head that contradicts the one before: a coordinator that showed two histories
    texts = filter(None, (kept.heads.get(name), kept.forks.get(name)))
    for text in texts:
        try:
            note = notes.parse(text.encode())
            # a key that was rotated since is not in this roster
            if note.signatures[0].key_id != now.signatures[0].key_id:
                continue
            # The coordinator is not to blame for a head that it did not sign.
            if roster:
                checkpoints.verify(note, roster_log_key(now, roster))
            found.append(TreeHead.parse(note.text))
        except ProofError as error:
            raise LocalError(
                f"{path}: what it has of {name!r} does not hold: {error}; move it away"
            ) from error
    return found


def _key(folder: Path, roster: Roster) -> VerifierKey:
    """The key that must have signed a ledger's checkpoint, by the member that this names."""
    return roster_log_key(_checkpoint(folder), roster)


def _owner(folder: Path) -> str:
    return checkpoints.owner(TreeHead.parse(_checkpoint(folder).text).origin)[1]


def _checkpoint(folder: Path) -> Note:
    note = stored(folder)
    if note is None:
        raise LocalError(f"{folder / CHECKPOINT}: is missing; run: staddle ledger verify {folder}")
    return note
