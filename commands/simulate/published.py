"""What ``staddle reproduce --list`` shows: all tables, or one with its settings and values."""

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from ...simulator.report.markdown import NONE
from ...simulator.reproduce.costs import PaperCosts, find_any, published_costs
from ...simulator.reproduce.experiments import SEEDS, missing, records_of
from ...simulator.reproduce.published import (
    Document,
    PaperRow,
    PaperSetting,
    PaperTable,
    published,
)
from ..terminal import printer
from ..terminal.toml import inline

TABLES = ("table", "title", "columns", "methods", "data")
NOWHERE = Path("DIR")  # stands for the folder that nobody has named yet


def show(path: str | None, data: Path | None, *, as_json: bool) -> None:
    """All tables, or one; with a folder, what it lacks of their data.

    ``path`` as PAPER/TABLE. LocalError names the known tables for an unknown one.
    """
    tables: Sequence[PaperTable | PaperCosts] = (*published(), *published_costs())
    if path is not None:
        tables = (find_any(path),)
    if as_json:
        printer.show_json([_document(table, data) for table in tables])
        return
    if path is not None:
        _one(tables[0], data)
        return
    rows = [_row(table, data) for table in tables]
    printer.show(
        printer.PrintedTable(TABLES, rows),
        "methods: rows of the table that run here, of all; a table of costs needs no run and no"
        " data. staddle reproduce --list TABLE shows one.",
    )


def _title(setting: PaperSetting, data: Path | None) -> str:
    title = records_of(setting, NOWHERE).data.long_title
    # Without a folder, nothing is known to be missing.
    if data is not None and _missing(setting, data):
        return f"{title} (missing)"
    return title


def _row(table: PaperTable | PaperCosts, data: Path | None) -> list[str]:
    if isinstance(table, PaperCosts):
        return [table.path, table.title, str(len(table.columns)), NONE, NONE]
    # Some methods of a paper are not implemented here.
    runnable = sum(bool(row.methods) for row in table.rows)
    # Several settings may use one data set.
    sets = dict.fromkeys(_title(setting, data) for setting in table.settings)
    return [
        table.path,
        table.title,
        str(len(table.columns)),
        f"{runnable} of {len(table.rows)}",
        ", ".join(sets),
    ]


def _one(table: PaperTable | PaperCosts, data: Path | None) -> None:
    printer.show(f"{table.path}: {table.title}", table.citation, "")
    if isinstance(table, PaperCosts):
        printer.show(f"from the jobs of {table.of.path}, in MB", _costs(table), *table.notes)
        return
    _settings(table, data)
    printer.show("", _values(table), *table.notes)
    printer.show(f"seeds: {table.seeds or f'not said; {SEEDS} here'}")


def _settings(table: PaperTable, data: Path | None) -> None:
    """Print what differs between settings with each, and the rest once."""
    common = _common([setting.document for setting in table.settings])
    if common:
        _keys("in all settings", common)

    # without a folder nothing is known to be missing: a person reads what to fetch
    verb = "needs" if data is None else "missing"
    for setting in table.settings:
        own = dict(setting.document)
        # Common keys were printed above.
        for key in common:
            del own[key]
        _keys(f"[{setting.name}] {setting.title}", own)
        for what in _missing(setting, data):
            printer.show(f"  {verb} {what}")


def _values(table: PaperTable) -> printer.PrintedTable:
    titles = map(attrgetter("title"), table.columns)
    columns = ["method", "label here", *titles]
    rows = []
    for row in table.rows:
        # A row may stand for different methods in different settings.
        labels = dict.fromkeys(method.title for method in row.methods.values())
        label = ", ".join(labels) or "-"
        values = map(attrgetter("text"), row.values)
        rows.append([row.title, label, *values])
    return printer.PrintedTable(columns, rows)


def _costs(costs: PaperCosts) -> printer.PrintedTable:
    columns = ["row", "quantity", *map(attrgetter("title"), costs.columns)]
    rows = [[row.title, row.quantity, *row.values] for row in costs.rows]
    return printer.PrintedTable(columns, rows)


def _keys(head: str, document: Document) -> None:
    printer.show(head)
    for key, value in document.items():
        printer.show(f"  {key} = {inline(value)}")


def _common(documents: Sequence[Document]) -> Document:
    """The keys with one value in all of several documents."""
    # With a single setting, everything would be common and its own list empty.
    if len(documents) < 2:
        return {}
    common = dict(documents[0])
    for key, value in documents[0].items():
        if any(own.get(key) != value for own in documents):
            del common[key]
    return common


def _document(table: PaperTable | PaperCosts, data: Path | None) -> dict[str, Any]:
    if isinstance(table, PaperCosts):
        return _costs_document(table)
    return {
        "table": table.path,
        "title": table.title,
        "citation": table.citation,
        "seeds": table.seeds,
        "deviation": table.deviation,
        "notes": table.notes,
        "settings": [_setting(setting, data) for setting in table.settings],
        "rows": [_row_document(table, row) for row in table.rows],
    }


def _costs_document(costs: PaperCosts) -> dict[str, Any]:
    columns = [column.name for column in costs.columns]
    rows = []
    for row in costs.rows:
        published = dict(zip(columns, row.values, strict=True))
        rows.append({"title": row.title, "quantity": row.quantity, "published": published})
    return {
        "table": costs.path,
        "title": costs.title,
        "citation": costs.citation,
        "of": costs.of.path,
        "notes": costs.notes,
        "rows": rows,
    }


def _row_document(table: PaperTable, row: PaperRow) -> dict[str, Any]:
    published = {}
    for column, value in zip(table.columns, row.values, strict=True):
        published[column.name] = {
            "text": value.text,
            "mean": value.mean,
            "deviation": value.deviation,
        }
    labels = {name: method.title for name, method in row.methods.items()}
    return {"title": row.title, "labels": labels, "published": published}


def _setting(setting: PaperSetting, data: Path | None) -> dict[str, Any]:
    verb = "needs" if data is None else "missing"
    return {
        "name": setting.name,
        "title": setting.title,
        "experiment": setting.document,
        verb: _missing(setting, data),
    }


def _missing(setting: PaperSetting, data: Path | None) -> tuple[str, ...]:
    # Without a folder, paths are shown below a placeholder DIR.
    records = records_of(setting, data or NOWHERE)
    return missing(records.data, records.partition)
