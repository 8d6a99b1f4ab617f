"""What ``staddle reproduce --list`` shows: the tables that there are, and of one its settings and
what it came to.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...simulator.reproduce.experiments import SEEDS, missing, records_of
from ...simulator.reproduce.published import Document, PaperSetting, PaperTable, find, published
from ..console import printer
from ..console.toml import inline

TABLES = ("table", "title", "columns", "methods", "data")
NOWHERE = Path("DIR")  # stands for the folder that nobody has named yet


def show(path: str | None, data: Path | None, *, as_json: bool) -> None:
    """All tables, or one; with a folder, what it lacks of their data."""
    tables = published() if path is None else (find(path),)
    if as_json:
        printer.show_json([_document(table, data) for table in tables])
    elif path is None:
        printer.show(printer.PrintedTable(TABLES, [_row(table, data) for table in tables]))
        printer.show(
            "methods: rows of the table that run here, of all; staddle reproduce --list TABLE shows"
            " one."
        )
    else:
        _one(tables[0], data)


def _title(setting: PaperSetting, data: Path | None) -> str:
    title = records_of(setting, NOWHERE).data.long_title
    missing = data is not None and _missing(setting, data)
    return f"{title} (missing)" if missing else title


def _row(table: PaperTable, data: Path | None) -> list[str]:
    runnable = sum(bool(row.methods) for row in table.rows)
    sets = dict.fromkeys(_title(setting, data) for setting in table.settings)
    return [
        table.path,
        table.title,
        str(len(table.columns)),
        f"{runnable} of {len(table.rows)}",
        ", ".join(sets),
    ]


def _one(table: PaperTable, data: Path | None) -> None:
    for line in (f"{table.path}: {table.title}", table.citation, ""):
        printer.show(line)
    common = _common([setting.document for setting in table.settings])
    if common:
        _keys("in all settings", common)
    for setting in table.settings:
        own = {key: value for key, value in setting.document.items() if key not in common}
        _keys(f"[{setting.name}] {setting.title}", own)
        for what in _missing(setting, data):
            printer.show(f"  {'missing' if data else 'needs'} {what}")
    printer.show("")
    columns = ("method", "label here", *(column.title for column in table.columns))
    rows = []
    for row in table.rows:
        labels = dict.fromkeys(method.title for method in row.methods.values())
        rows.append([row.title, ", ".join(labels) or "-", *(value.text for value in row.values)])
    printer.show(printer.PrintedTable(columns, rows))
    for note in (*table.notes, f"seeds: {table.seeds or f'not said; {SEEDS} here'}"):
        printer.show(note)


def _keys(head: str, document: Document) -> None:
    printer.show(head)
    for key, value in document.items():
        printer.show(f"  {key} = {inline(value)}")


def _common(documents: Sequence[Document]) -> Document:
    """What all of several have."""
    first = documents[0] if len(documents) > 1 else {}
    return {
        key: value
        for key, value in first.items()
        if all(own.get(key) == value for own in documents)
    }


def _document(table: PaperTable, data: Path | None) -> dict[str, Any]:
    return {
        "table": table.path,
        "title": table.title,
        "citation": table.citation,
        "seeds": table.seeds,
        "deviation": table.deviation,
        "notes": table.notes,
        "settings": [_setting(setting, data) for setting in table.settings],
        "rows": [
            {
                "title": row.title,
                "labels": {name: method.title for name, method in row.methods.items()},
                "published": {
                    column.name: {
                        "text": value.text,
                        "mean": value.mean,
                        "deviation": value.deviation,
                    }
                    for column, value in zip(table.columns, row.values, strict=True)
                },
            }
            for row in table.rows
        ],
    }


def _setting(setting: PaperSetting, data: Path | None) -> dict[str, Any]:
    needed = {"needs" if data is None else "missing": _missing(setting, data)}
    return {"name": setting.name, "title": setting.title, "experiment": setting.document, **needed}


def _missing(setting: PaperSetting, data: Path | None) -> tuple[str, ...]:
    records = records_of(setting, data or NOWHERE)
    return missing(records.data, records.partition)
