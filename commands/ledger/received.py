"""What a coordinator's ledger shows: what it received and delivered, one line per message."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import LocalError
from ...security.ledger.messages import lines
from ..terminal import printer

COLUMNS = ("seq", "time", "what", "silo", "job", "round", "bytes", "silo's record")
KINDS = {"received": "received", "delivered": "delivered", "head.refused": "refused a head"}


def is_coordinators(folder: Path) -> bool:
    """True for a coordinator's ledger: its first record says so.

    LocalError if the ledger is broken there.
    """
    for line in lines(folder):
        return bool(line.record["type"] == "serving")
    return False  # no record yet, as in a new silo's


def check_silos(folder: Path) -> None:
    """Raise LocalError for a coordinator's ledger, from which nothing left a silo."""
    if is_coordinators(folder):
        raise LocalError(
            f"{folder}: is the coordinator's ledger; see it with `staddle ledger show`, and compare"
            " it with a silo's with `staddle ledger reconcile`"
        )


def show(
    folder: Path, job: str | None, round_: int | None, silo: str | None, *, as_json: bool
) -> None:
    """Print what was received and delivered, for one job, round or silo if they are named.

    Rows are in the order of the ledger. ``silo`` uploaded, or received a delivery.
    """
    # None selects all.
    wanted = {"job": job, "round": round_, "silo": silo}
    found = [record for record in _records(folder) if _matches(record, wanted)]
    if as_json:
        printer.show_json(found)
        return
    printer.show(printer.PrintedTable(COLUMNS, list(map(_row, found))))

    sizes: dict[str, list[int]] = {}
    for record in found:
        message = record.get("message", {})  # a refused head has none
        sizes.setdefault(record["type"], []).append(message.get("bytes", 0))
    for kind, name in KINDS.items():
        # No line for a kind without records.
        if kind not in sizes:
            continue
        said = f"{name}: {len(sizes[kind])}"
        total = sum(sizes[kind])
        if total:
            said += f", {total:,} bytes"
        printer.show(said)


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    for line in lines(folder):
        if line.record["type"] in KINDS:
            yield line.record


def _matches(record: dict[str, Any], wanted: Mapping[str, Any]) -> bool:
    # A refused head has no job and no round, so naming one leaves it out.
    return all(value in (None, record.get(key)) for key, value in wanted.items())


def _row(record: dict[str, Any]) -> list[str]:
    size = "-"
    message = record.get("message", {})
    if "bytes" in message:
        size = f"{message['bytes']:,}"
    return [
        str(record["seq"]),
        record["time"],
        KINDS[record["type"]],
        record["silo"],
        record.get("job", "-"),
        str(record.get("round", "-")),
        size,
        str(record.get("ledger_seq", "-")),
    ]
