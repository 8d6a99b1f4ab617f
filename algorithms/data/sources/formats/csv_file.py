"""Tabular records from a CSV file.

::

    age;sex;bmi;outcome
    63;f;27,5;B             → an error that names line 2 and column 'bmi', unless decimal = ","
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from ....models.registry import Shape
from ...new_records import NewRecords
from ...options import Names
from ...rows import Decimal, Encoding, Reading, csv_rows, is_parquet, pointed
from .labelled import Labelled, check_distinct
from .parquet import Parquet
from .table import Table


class CsvRows(Labelled):
    """The rows of a CSV file."""

    counted: ClassVar[str] = "line"

    file: Path
    columns: Names | None = None
    """Names of all columns, where the file's first line is a record already."""
    delimiter: Annotated[str, Field(pattern=r'^[^"\r\n\x00]$')] = ","
    encoding: Encoding = "utf-8"
    decimal: Decimal = "."
    """What stands before the decimals of a number."""

    @pydantic.model_validator(mode="after")
    def _own_consistent(self) -> "CsvRows":
        check_distinct("columns", self.columns or ())
        if self.decimal == self.delimiter:
            raise ValueError(
                f"decimal and delimiter are both {self.decimal!r}; name the delimiter of the file"
            )
        return self

    @property
    def header(self) -> tuple[str, ...] | None:
        """``columns``."""
        return self.columns

    def rows(self) -> Reading:
        """The lines that are not blank."""
        return csv_rows(self.file, self.delimiter, self.encoding)

    def streamed(self) -> Reading:
        """The lines, whose text need not fit the memory."""
        return csv_rows(self.file, self.delimiter, self.encoding, whole=False)

    def number(self, text: str) -> str:
        """Points and commas change places where ``decimal`` is a comma."""
        return pointed(text, self.decimal)

    def single_fix(self) -> str:
        """To name another delimiter."""
        first = f"its first line has no {self.delimiter!r}"
        return f"{first}: separate columns so, or correct data.delimiter or --delimiter"


class Csv(CsvRows, Table):
    """``kind = "csv"``."""

    kind: Literal["csv"]

    def contract(self) -> dict[str, Any]:
        """Also how the file is written."""
        written = {"columns", "delimiter", "encoding", "decimal"}
        own = self.model_dump(mode="json", include=written, exclude_defaults=True)
        return {**super().contract(), **own}

    def at(self, data: Path) -> Table:
        """The table in another file, which may be Parquet by its name."""
        return self.typed(data) if is_parquet(data) else self.model_copy(update={"file": data})

    def typed(self, where: Path) -> Parquet:
        """The table of records that are no text; ``where`` names them in errors."""
        own = self.model_dump(include=set(Table.model_fields))
        found = Parquet(kind="parquet", file=where, **own)
        found._reach = self._reach  # noqa: SLF001 - what model_dump leaves out
        return found

    def new_records(self, data: Path, shape: Shape, rows: int) -> Iterator[NewRecords]:
        """The rows of a CSV or Parquet file; a name is that of the id's column, or its line."""
        return self.at(data).label_free(rows)
