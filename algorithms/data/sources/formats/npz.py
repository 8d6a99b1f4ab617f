"""Arrays of a .npz file, the kind of source where ``kind`` is left out."""

from pathlib import Path
from typing import Literal

from ...dataset import Dataset, load_npz
from ...options import DataTable


class Npz(DataTable):
    """``kind = "npz"``, which may be left out."""

    kind: Literal["npz"] = "npz"
    file: Path

    def read(self) -> Dataset:
        """The arrays as they are; a record's id is what the file declares.

        Nothing is unpickled. LocalError for a file that would not fit the memory.
        """
        return load_npz(self.file)
