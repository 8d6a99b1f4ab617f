"""Rows of tables as texts, from CSV and Parquet files: first the names of the columns, then cells.

Errors name lines, never what stands there: they reach the silo's log and its ledger.
"""

import codecs
import csv
import io
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal, TextIO, TypeAlias

from ...errors import LocalError, reason
from ...files.file_bounds import check_fits, open_regular
from .parquet_pages import column_chunks, records_at_once

Encoding: TypeAlias = Literal["utf-8", "latin-1", "cp1252", "utf-16"]
Decimal: TypeAlias = Literal[".", ","]  # what stands before the decimals of a number
Rows: TypeAlias = Iterator[tuple[int, list[str]]]  # with the number of the line, or of the record
Reading: TypeAlias = AbstractContextManager[Rows]

COMMAS = str.maketrans(",.", ".,")
AT_ONCE = 4096  # records of a Parquet file, at most
CELLS_AT_ONCE = 2**20  # of a Parquet file
BUFFER = 2**20  # bytes of a column that are read at a time
LONGEST_ROW = 2**24  # characters of a CSV file: a few million cells
LONGEST_CELL = 4096  # characters of a cell that is used: a path, at most


@contextmanager
def csv_rows(
    path: Path, delimiter: str = ",", encoding: Encoding = "utf-8", *, whole: bool = True
) -> Iterator[Rows]:
    """Lines of a CSV file that are not blank, with their numbers.

    The file is to fit the memory, unless the caller does not keep its ``whole`` text. LocalError
    for a file that is empty, is not of that encoding, or has quotes that do not close.
    """
    # Spreadsheets write a byte order mark, which would be part of the first name.
    known = {"utf-8": "utf-8-sig"}.get(encoding, encoding)
    try:
        with (
            open_regular(path) as opened,
            io.TextIOWrapper(opened, known, newline="") as file,
        ):
            if whole:
                check_fits(path, path.stat().st_size, "its text")
            # ``strict`` makes a misplaced quote an error; without it, csv would guess.
            lines = _BoundedRows(path, file)
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
            try:
                yield ((reader.line_num, row) for row in map(lines.next_row, reader) if row)
            # Raised by the caller's ``next`` for the header if the file is empty.
            except StopIteration:
                raise LocalError(
                    f"{path}: is empty; give a line with the columns' names and records"
                ) from None
            except csv.Error as error:
                raise LocalError(
                    f"{path}, line {reader.line_num}: {error}; correct its quotes"
                ) from error
    # Without its cause, whose text has the file's bytes: errors must not show a record.
    except UnicodeError:
        name = codecs.lookup(encoding).name.upper()
        raise LocalError(f"{path}: is not {name}; save it as UTF-8, or name its encoding") from None
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}") from error


class _BoundedRows:
    """The lines of a text, of which one row takes at most ``LONGEST_ROW`` characters.

    A file may be one line, or one row of many: Python would read either whole.
    """

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path, self._file = path, file
        self._line, self._taken = 0, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(LONGEST_ROW - self._taken + 1)
        self._line, self._taken = self._line + 1, self._taken + len(line)
        if self._taken > LONGEST_ROW:
            raise LocalError(
                f"{self._path}, line {self._line}: its row is longer than {LONGEST_ROW:,}"
                " characters; end each record by a line break, and close its quotes"
            )
        if not line:
            raise StopIteration
        return line

    def next_row(self, row: list[str]) -> list[str]:
        """The same row, after which the next begins."""
        self._taken = 0
        return row


@contextmanager
def parquet_rows(path: Path, used: Collection[str] | None = None) -> Iterator[Rows]:
    """Records of a Parquet file, from 1 on, after the names of its columns as record 0.

    Numbers are written so that they read back as they are, true and false as 1 and 0, dates as ISO
    8601 has them; what is missing is an empty text. Columns that are not ``used``, and those that
    hold lists or further columns, are not read: their cells have the type. LocalError for a file
    that is none, or whose records would not fit the memory.
    """
    try:
        from pyarrow import ArrowException  # noqa: PLC0415 - installed for those who have such files
        from pyarrow.parquet import ParquetFile  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise LocalError(
            f"{path}: Parquet files are read by pyarrow; pip install 'staddle[parquet]'"
        ) from error
    try:
        with open_regular(path) as opened:
            chunks = column_chunks(path, opened)
            # Without a buffer, all of a column in a row group would be read.
            with ParquetFile(opened, buffer_size=BUFFER) as file:
                plan = partial(records_at_once, path, opened, chunks, file.metadata.schema)
                yield _records(path, file, _cell_columns(file.metadata.schema, used), plan)
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}") from error
    except ArrowException as error:
        why = str(error).partition("\n")[0]
        raise LocalError(f"{path}: cannot read it as Parquet: {why}; write it again") from error
    except UnicodeDecodeError:  # its text has the bytes
        raise LocalError(f"{path}: its columns' names are not UTF-8; write it again") from None


def _cell_columns(schema: Any, used: Collection[str] | None) -> dict[str, int]:
    """The columns that are read, and their places: those with one value per record.

    ``schema`` is Parquet's. A name means all that lies below it, in lists and columns of columns.
    """
    leaves = list(map(schema.column, range(len(schema))))
    above = (accumulate(own.path.split("."), "{}.{}".format) for own in leaves)
    below = Counter(chain.from_iterable(above))
    return {
        own.path: place
        for place, own in enumerate(leaves)
        if below[own.path] == 1 and own.max_repetition_level == 0
        if used is None or own.path.strip() in used
    }


def _records(
    path: Path, file: Any, columns: Mapping[str, int], plan: Callable[[dict[int, bool], int], int]
) -> Rows:
    fields = list(file.schema_arrow)
    yield 0, list(file.schema_arrow.names)
    # How many records there are would be what the metadata claims, without a page for any.
    if not columns:
        raise LocalError(
            f"{path}: no column that is read has one value per record; give columns of numbers or"
            " texts"
        )
    # Before anything is unpacked: a page of some bytes may claim gigabytes.
    kept = {field.name for field in fields if hasattr(field.type, "index_type")}
    places = {place: name in kept for name, place in columns.items()}
    at_once = plan(places, max(1, min(AT_ONCE, CELLS_AT_ONCE // max(1, len(fields)))))
    number = 0
    for batch in file.iter_batches(at_once, columns=[*columns]):
        found = dict(zip(batch.schema.names, batch.columns, strict=True))
        cells = [
            texts_of(path, field.name, found[field.name])
            if field.name in found
            else [f"({field.type})"] * len(batch)
            for field in fields
        ]
        for row in zip(*cells, strict=True):
            number += 1
            yield number, list(row)


def texts_of(path: Path, name: str, column: Any) -> list[str]:
    """The cells of an Arrow array as texts; LocalError for what Python cannot hold.

    Cells of a dictionary share the text of its entry, which may be long.
    """
    if hasattr(column, "dictionary"):
        used = column.indices.unique()
        entries = texts_of(path, name, column.dictionary.take(used))
        known = dict(zip(used.to_pylist(), entries, strict=True))
        return list(map(known.__getitem__, column.indices.to_pylist()))
    try:
        return list(map(as_text, _in_microseconds(column).to_pylist()))
    # Without its cause, whose text has the value: such as a time finer than Python's.
    except (ValueError, OverflowError):
        raise LocalError(
            f"{path}, column {name!r}: Python cannot hold one of its values, of type"
            f" {column.type}; write it with another type, such as timestamp[us]"
        ) from None


def _in_microseconds(column: Any) -> Any:
    """Times in the unit that Python's have; ValueError where one is finer.

    Where pandas is installed, pyarrow would make pandas' times of finer ones, whose texts differ.
    """
    import pyarrow as pa  # noqa: PLC0415 - installed for those who have such files

    kind = column.type
    if getattr(kind, "unit", "") != "ns":
        return column
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("us", kind.tz))
    wider = pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")
    return column.cast(wider)


def as_text(value: Any) -> str:
    """A value as a cell has it; true and false as 1 and 0, what is missing as nothing."""
    # pandas writes a column of whole numbers, of which one is missing, as others, and that as NaN.
    if value is None or value != value:  # noqa: PLR0124 - NaN alone does not equal itself
        return ""
    whole = isinstance(value, bool | float) and float(value).is_integer()
    return str(int(value) if whole else value)


def rows_of(path: Path, delimiter: str = ",", encoding: Encoding = "utf-8") -> Reading:
    """The rows of a file by its name: Parquet for ``.parquet``, else CSV."""
    if is_parquet(path):
        return parquet_rows(path)
    return csv_rows(path, delimiter, encoding)


def is_parquet(path: Path) -> bool:
    """True for a Parquet file by its name."""
    return path.suffix.lower() == ".parquet"


def pointed(text: str, decimal: Decimal) -> str:
    """A number as a point writes it: where ``decimal`` is a comma, "27,5" is "27.5".

    And the other way round, so that a point is no number there: it could stand for thousands.
    """
    return text.translate(COMMAS) if decimal == "," else text
