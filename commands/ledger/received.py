"""What a coordinator's ledger shows: what it received and delivered, a line each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import LocalError
from ...security.ledger.messages import lines
from ..console import printer

COLUMNS = ("seq", "time", "what", "silo", "job", "round", "bytes", "silo's record")
KINDS = {"received": "received", "delivered": "delivered", "head.refused": "refused a head"}


def is_coordinators(folder: Path) -> bool:
    """Whether this is a coordinator's ledger: its first record says so."""
    return next((line.record["type"] == "serving" for line in lines(folder)), False)


def check_silos(folder: Path) -> None:
    """LocalError for a coordinator's ledger, of which nothing left a silo."""
    if is_coordinators(folder):
        raise LocalError(
            f"{folder}: is the coordinator's ledger; see it with `staddle ledger show`, and compare"
            " it with a silo's with `staddle ledger reconcile`"
        )


def show(
    folder: Path, job: str | None, round_: int | None, silo: str | None, *, as_json: bool
) -> None:
    """Print what was received and delivered, of one job, round or silo if they are named."""
    found = [
        record
        for record in _records(folder)
        if job in (None, record.get("job"))
        and round_ in (None, record.get("round"))
        and silo in (None, record["silo"])
    ]
    if as_json:
        printer.show_json(found)
        return
    printer.show(printer.PrintedTable(COLUMNS, [_row(record) for record in found]))
    for kind, name in KINDS.items():
        of_kind = [record for record in found if record["type"] == kind]
        size = sum(record.get("message", {}).get("bytes", 0) for record in of_kind)
        if of_kind:
            printer.show(f"{name}: {len(of_kind)}" + (f", {size:,} bytes" if size else ""))


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    return (line.record for line in lines(folder) if line.record["type"] in KINDS)


def _row(record: dict[str, Any]) -> list[str]:
    size = record.get("message", {}).get("bytes")
    return [
        str(record["seq"]),
        record["time"],
        KINDS[record["type"]],
        record["silo"],
        record.get("job", "-"),
        str(record.get("round", "-")),
        "-" if size is None else f"{size:,}",
        str(record.get("ledger_seq", "-")),
    ]
