"""``staddle ledger``: what left a silo, and whether its ledger holds."""

import datetime as dt
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import LocalError
from ..files import read_bytes, write_atomic
from ..security import ledger_audit
from ..security import roster as rosters
from ..security.ledger_audit import Message

REPORT = Path("ledger-report.html")

app = typer.Typer(no_args_is_help=True, help="Check a silo's ledger, and read in it what left.")

LedgerPath = Annotated[
    Path, typer.Argument(metavar="DIR_OR_FILE", help="A silo's folder, or its ledger file egress.jsonl.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@app.command("verify")
def verify(
    path: LedgerPath,
    known: Annotated[
        list[str] | None,
        typer.Option(metavar="SEQ:LEAF", help="A leaf hash that another party holds; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every record of a ledger; exit code 1 if it does not hold.

    Checked are the chain of hashes and the order of the records. This file alone does not show that records were cut
    off its end: for that, give with --known the seq and leaf of a receipt or of a head that was noted earlier.
    """
    found = ledger_audit.verify(ledger_audit.ledger_file(path), dict(_known(text) for text in known or []))
    if as_json:
        typer.echo(json.dumps({"ok": found.ok, **asdict(found)}))
    else:
        for problem in found.problems:
            typer.echo(f"problem: {problem}")
        for name, refs in (("digest", found.undigested), ("outcome", found.open_intents)):
            if refs:
                listed = ", ".join(str(ref) for ref in refs)
                typer.echo(f"{len(refs)} messages without {name}, counted as left: seq {listed}")
        if found.open_control is not None:
            typer.echo(f"control session of seq {found.open_control} is open, counted with its cap")
        if found.torn_bytes:
            typer.echo(f"{found.torn_bytes} bytes of an unfinished last line, of which nothing had left")
        head = f"{found.records - 1}:{found.head}" if found.head else "none"
        typer.echo(f"{'verified' if found.ok else 'NOT VERIFIED'}: {found.records} records, head {head}")
    if not found.ok:
        raise typer.Exit(1)


@app.command("show")
def show(
    path: LedgerPath,
    round_number: Annotated[int | None, typer.Option("--round", help="Only this round.")] = None,
    job: Annotated[str | None, typer.Option(help="Only this job.")] = None,
    as_json: Json = False,
) -> None:
    """Show every message that left, or counts as left."""
    rows = [
        message
        for message in ledger_audit.messages(ledger_audit.ledger_file(path))
        if round_number in (None, message.intent.round) and job in (None, message.intent.job)
    ]
    if as_json:
        typer.echo(json.dumps([_document(message) for message in rows]))
        return
    columns = ("seq", "time", "job", "round", "part", "tensors", "bytes", "recipient", "rule", "outcome")
    _print(columns, [_row(message) for message in rows])
    typer.echo(f"{len(rows)} messages, {sum(message.intent.message.bytes for message in rows):,} bytes")


@app.command("summary")
def summary(path: LedgerPath, as_json: Json = False) -> None:
    """Add up what left, by job and part. A message without digest counts with all bytes that it declared."""
    totals = ledger_audit.summary(ledger_audit.ledger_file(path))
    if as_json:
        rows = [{"job": job, "part": part, **asdict(total)} for (job, part), total in totals.items()]
        typer.echo(json.dumps(rows))
        return
    columns = ("job", "part", "messages", "tensors", "elements", "bytes", "of these assumed")
    cells = [
        [*key, *(f"{n:,}" for n in (t.messages, t.tensors, t.elements, t.bytes, t.assumed))]
        for key, t in totals.items()
    ]
    _print(columns, cells)
    typer.echo(f"{sum(total.bytes for total in totals.values()):,} bytes in all")


@app.command("report")
def report(
    path: LedgerPath,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page; a file of that name is replaced.")] = REPORT,
    job: Annotated[str | None, typer.Option(help="Only this job.")] = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The silo's policy, to print where it is the one in force.")
    ] = None,
    roster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The roster, for the names of federation and organisations.")
    ] = None,
) -> None:
    """Write one HTML page on what left, to print and to file; exit code 1 if the ledger does not hold.

    The page holds all of itself, loads nothing and needs no network. It says first whether the ledger holds.
    """
    from . import report as reports  # noqa: PLC0415 the template engine takes a moment to import
    from . import report_page  # noqa: PLC0415

    sources = report_page.Sources(
        policy=read_bytes(policy) if policy else None, roster=rosters.load(roster) if roster else None
    )
    made = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = reports.read(ledger_audit.ledger_file(path), made, sources, job or "")
    write_atomic(out, reports.html(page))
    if page.body is None:
        typer.echo(f"{out}: the ledger does NOT hold, and the page says why")
        raise typer.Exit(1)
    left = f"{page.body.message_count:,} messages, {page.body.total.bytes:,} bytes"
    typer.echo(f"{out}: verified, {left}, head {page.head or 'none'}")


def _known(text: str) -> tuple[int, str]:
    match = re.fullmatch(r"(\d{1,15}):([0-9a-f]{64})", text)
    if match is None:
        raise LocalError(f"--known {text!r} is not SEQ:LEAF, such as 412:9a0b… with 64 hex digits")
    return int(match[1]), match[2]


def _document(message: Message) -> dict[str, Any]:
    return {
        "seq": message.seq,
        "time": message.time,
        **message.intent.model_dump(mode="json"),
        "digested": message.digested,
        "outcome": message.status,
        "receipt": message.receipt,
    }


def _row(message: Message) -> list[str]:
    intent = message.intent
    return [
        str(message.seq),
        message.time,
        intent.job,
        str(intent.round),
        ", ".join(dict.fromkeys(tensor.part for tensor in intent.tensors)) or ledger_audit.MESSAGE,
        str(len(intent.tensors)),
        f"{intent.message.bytes:,}",
        intent.recipient.id,
        intent.policy.rule,
        message.status if message.digested else f"{message.status}, no digest",
    ]


def _print(columns: tuple[str, ...], rows: list[list[str]]) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
