"""``staddle ledger reconcile``: a silo's ledger beside the coordinator's."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..errors import LocalError
from ..security import ledger_audit
from ..security import roster as rosters
from ..security.head import roster_log_key, stored
from ..security.ledger_audit import ledger_folder
from ..security.note import VerifierKey
from ..security.reconcile import Reconciled
from ..security.reconcile import reconcile as compared
from ..security.roster import Roster
from ..security.segments import CHECKPOINT

MOST = 20  # gaps that are printed


def reconcile(
    silo: Annotated[Path, typer.Option(metavar="DIR", help="The silo's folder, or the folder 'ledger' in it.")],
    coordinator: Annotated[Path, typer.Option(metavar="DIR", help="The coordinator's, or a copy of its ledger.")],
    roster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The roster, for who signed heads and receipts.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Compare what left a silo with what the coordinator received; exit code 1 where the two contradict each other.

    Both ledgers are verified first. Gaps that a crash or a lost connection leaves are no contradiction.
    """
    members = rosters.load(roster) if roster else None
    found = compare(ledger_folder(silo), ledger_folder(coordinator), members)
    if as_json:
        typer.echo(json.dumps({"ok": not found.differences, **asdict(found)}))
    else:
        for difference in found.differences:
            typer.echo(f"DIFFERENCE: {difference}")
        for gap in found.gaps[:MOST]:
            typer.echo(f"gap: {gap}")
        if len(found.gaps) > MOST:
            typer.echo(f"… and {len(found.gaps) - MOST} gaps more (--json has all)")
        checked = "receipts and heads checked" if members else "receipts and heads not checked (give --roster)"
        both = f"{found.uploads} uploads of {found.bytes:,} bytes and {found.deliveries} deliveries"
        said = "NOT RECONCILED" if found.differences else "reconciled"
        typer.echo(f"{said}: {found.silo} and {found.coordinator} both have {both}; {checked}")
    if found.differences:
        raise typer.Exit(1)


def compare(silo: Path, coordinator: Path, roster: Roster | None) -> Reconciled:
    """Two ledgers' folders, each verified; LocalError for one that does not hold."""
    for folder in (silo, coordinator):
        key = _key(folder, roster) if roster else None
        verified = ledger_audit.verify(folder, key=key)
        if not verified.ok:
            raise LocalError(f"{folder}: does not hold: {verified.problems[0]}; run: staddle ledger verify {folder}")
    return compared(silo, coordinator, roster)


def _key(folder: Path, roster: Roster) -> VerifierKey:
    """The key that must have signed a ledger's checkpoint, by the member that this names."""
    note = stored(folder)
    if note is None:
        raise LocalError(f"{folder / CHECKPOINT}: is missing; run: staddle ledger verify {folder}")
    return roster_log_key(note, roster)
