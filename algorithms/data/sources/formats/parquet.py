"""Tabular records from a Parquet file."""

from pathlib import Path
from typing import Literal

from ...rows import Reading, parquet_rows
from .table import Table


class Parquet(Table):
    """``kind = "parquet"``; it needs pyarrow, which ``staddle[parquet]`` installs."""

    kind: Literal["parquet"]
    file: Path

    def rows(self) -> Reading:
        """The records, after the names of the columns."""
        return parquet_rows(self.file, self.used)
