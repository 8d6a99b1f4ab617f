"""Rows of tables as texts, from CSV and Parquet files: first the names of the columns, then cells.

Errors name lines, never what stands there: they reach the silo's log and its ledger.
"""

import codecs
import csv
import io
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ...errors import LocalError, reason
from ...files.file_bounds import check_fits, open_regular

Encoding: TypeAlias = Literal["utf-8", "latin-1", "cp1252", "utf-16"]
Decimal: TypeAlias = Literal[".", ","]  # what stands before the decimals of a number
Rows: TypeAlias = Iterator[tuple[int, list[str]]]  # with the number of the line, or of the record
Reading: TypeAlias = AbstractContextManager[Rows]

COMMAS = str.maketrans(",.", ".,")
AT_ONCE = 4096  # records of a Parquet file


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
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            try:
                yield ((reader.line_num, row) for row in reader if row)
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


@contextmanager
def parquet_rows(path: Path) -> Iterator[Rows]:
    """Records of a Parquet file, from 1 on, after the names of its columns as record 0.

    Numbers are written so that they read back as they are, true and false as 1 and 0, dates as ISO
    8601 has them; what is missing is an empty text. LocalError for a file that is none.
    """
    try:
        from pyarrow import ArrowException  # noqa: PLC0415 - installed for those who have such files
        from pyarrow.parquet import ParquetFile  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise LocalError(
            f"{path}: Parquet files are read by pyarrow; pip install 'staddle[parquet]'"
        ) from error
    try:
        with open_regular(path) as opened, ParquetFile(opened) as file:
            yield _records(path, file)
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}") from error
    except ArrowException as error:
        why = str(error).partition("\n")[0]
        raise LocalError(f"{path}: cannot read it as Parquet: {why}; write it again") from error


def _records(path: Path, file: Any) -> Rows:  # of pyarrow, which has no types
    names, number = list(file.schema_arrow.names), 0
    yield 0, names
    for batch in file.iter_batches(AT_ONCE):
        columns = list(map(partial(texts_of, path), names, batch.columns))
        for row in zip(*columns, strict=True):
            number += 1
            yield number, list(row)


def texts_of(path: Path, name: str, column: Any) -> list[str]:
    """The cells of an Arrow array as texts; LocalError for what Python cannot hold."""
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
