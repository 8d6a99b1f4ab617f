"""One digest per table of ``coordinator.sqlite`` shows rows that a disk changed, lost or restored.

SQLite checks how its pages hang together, not what their rows say. Table ``seals`` has for each
other table the SHA-256 of all its rows, added up by XOR, so that a changed row costs as much as it
is long. Temporary triggers do that: no statement names the table, and what another program writes
into the database is found like what a disk does.

``jobs.method`` is left out, it carries its own digest (tensor_file.py) and may be large.
"""

import hashlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from ...errors import LocalError

TABLE = """
CREATE TABLE seals (                    -- what shows whether a disk changed rows: table_seals.py
  name TEXT PRIMARY KEY,
  sha256 BLOB NOT NULL
) STRICT"""
SEALED_SINCE = 5  # the version of the database
LEFT_OUT = {("jobs", "method")}
NO_ROWS = bytes(32)

Value: TypeAlias = str | int | float | bytes | None


def begin(connection: sqlite3.Connection) -> None:
    """Seal a new database, or one of an earlier release, in the transaction that is open.

    The rows that are there are taken as correct.
    """
    if "seals" not in _names(connection):
        connection.execute(TABLE.strip())
    connection.execute("DELETE FROM seals")
    for table in _tables(connection):
        connection.execute("INSERT INTO seals VALUES (?, ?)", (table, _found(connection, table)))


def keep(connection: sqlite3.Connection) -> None:
    """Keep the seals of all that is written through this connection.

    Call it once per connection, before the first write. Its triggers end with the connection.
    """
    connection.create_function("staddle_sealed", -1, _sealed, deterministic=True)
    # Else INSERT OR REPLACE would delete a row without a trigger.
    connection.execute("PRAGMA recursive_triggers = ON")
    for table in _tables(connection):
        columns = _columns(connection, table)
        added, gone = (", ".join(f"{row}.{column}" for column in columns) for row in ("NEW", "OLD"))
        # XOR is its own inverse: an update removes the old row and adds the new one.
        for event, rows in (("INSERT", [added]), ("DELETE", [gone]), ("UPDATE", [gone, added])):
            steps = (
                f"UPDATE seals SET sha256 = staddle_sealed(sha256, {row}) WHERE name = '{table}';"  # noqa: S608 ours
                for row in rows
            )
            name = f"sealed_{table}_{event.lower()}"
            connection.execute(
                f"CREATE TEMP TRIGGER {name} AFTER {event} ON {table} BEGIN {' '.join(steps)} END"
            )


def stored(connection: sqlite3.Connection) -> dict[str, bytes]:
    """The seals as they were written, by table: they differ once any row does."""
    return dict(connection.execute("SELECT name, sha256 FROM seals"))


def check(connection: sqlite3.Connection, path: Path) -> None:
    """LocalError names a table that is not as it was written, or ``seals`` where that is gone.

    Databases of releases that knew no seals are taken as they are.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version < SEALED_SINCE:
        return
    # The seals first, since they name the table.
    changed = _changed(connection)
    # Pages that hang together wrongly may still give all rows: SQLite's own check finds them.
    (whole,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if changed or whole != "ok":
        what = f"table {', '.join(changed)}" if changed else f"the file ({whole})"
        raise LocalError(
            f"{path}: {what} is not as it was written: the disk changed it; with the coordinator"
            " stopped, put back the newest copy of its whole folder, or have its jobs signed under"
            " new names and move the folder away"
        )


def _changed(connection: sqlite3.Connection) -> list[str]:
    """Tables that are not as they were written."""
    if "seals" not in _names(connection):
        return ["seals"]
    kept = stored(connection)
    tables = _tables(connection)
    # A table without a seal, or a seal without a table: neither can be compared.
    if odd := sorted({*tables} ^ kept.keys()):
        return odd
    return [name for name in tables if kept[name] != _found(connection, name)]


def _names(connection: sqlite3.Connection) -> list[str]:
    found = connection.execute(
        "SELECT name FROM main.sqlite_master WHERE type = 'table' ORDER BY name"
    )
    return [name for (name,) in found]


def _tables(connection: sqlite3.Connection) -> list[str]:
    return [name for name in _names(connection) if name != "seals"]


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    found = connection.execute(f"PRAGMA table_info({table})")
    return [name for _, name, *_ in found if (table, name) not in LEFT_OUT]


def _found(connection: sqlite3.Connection, table: str) -> bytes:
    """The seal of a table as it is."""
    seal = NO_ROWS
    # In any order: XOR does not depend on it.
    for row in connection.execute(f"SELECT {', '.join(_columns(connection, table))} FROM {table}"):  # noqa: S608 ours
        seal = _sealed(seal, *row)
    return seal


def _sealed(seal: bytes, *row: Value) -> bytes:
    """With one row more, or without it."""
    return (int.from_bytes(seal) ^ int.from_bytes(_digest(row))).to_bytes(len(NO_ROWS))


def _digest(row: Sequence[Value]) -> bytes:
    digest = hashlib.sha256()
    for value in row:
        # With type and length, so that no two rows have the same bytes: 1 and "1" differ, and so do
        # ("ab", "c") and ("a", "bc").
        data = value if isinstance(value, bytes) else repr(value).encode()
        digest.update(f"{type(value).__name__} {len(data)} ".encode() + data)
    return digest.digest()
