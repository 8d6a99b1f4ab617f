"""Arrays of a .npz file, the kind of source where ``kind`` is left out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from .....errors import check_local
from ....models.registry import Shape
from ...dataset import Dataset, load_npz, unlabelled
from ...new_records import NewRecords
from ...options import DataTable


class Npz(DataTable):
    """``kind = "npz"``, which may be left out."""

    kind: Literal["npz"] = "npz"
    file: Path

    def at(self, data: Path) -> "Npz":
        """The table with another file."""
        return self.model_copy(update={"file": data})

    def new_records(self, data: Path, shape: Shape, rows: int) -> Iterator[NewRecords]:
        """Records of the array ``x``, or of arrays ``x.NAME``; a name is an id, or a number."""
        found = unlabelled(data)
        check_local(
            tuple(found.x.shape[1:]) == shape,
            f"{data}: x is {list(found.x.shape)}, and the model takes [N,"
            f" {', '.join(map(str, shape))}]; store it so",
        )
        for start in range(0, len(found.x), rows):
            piece = slice(start, start + rows)
            yield NewRecords(found.names[piece], found.x[piece], found.inputs)

    def read(self) -> Dataset:
        """The arrays as they are; a record's id is what the file declares.

        Nothing is unpickled. LocalError for a file that would not fit the memory.
        """
        return load_npz(self.file)
