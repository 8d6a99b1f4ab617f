"""A column of images, PNG or JPEG: their bytes, or paths of files in the data set's folder."""

from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .....errors import LocalError, reason
from .....files.file_bounds import check_fits, open_regular
from ....models.registry import Shape
from ...options import Pixels
from ...saved_set import SavedSet, inside, open_saved
from ..formats import pictures


class ColumnImages:
    """Reads one image of a column after another; each process has its own."""

    def __init__(
        self, table: Pixels, folder: Path, column: str, shape: Shape, *, resize: bool
    ) -> None:
        self._table, self._folder, self._column = table, folder, column
        self._shape, self._resize = shape, resize
        self._pieces = list(map(_parts, open_saved(folder).pieces(column)))
        self._ends = np.cumsum(list(map(len, map(itemgetter(0), self._pieces))))

    def __call__(self, place: int) -> tuple[Tensor]:
        """The image at a place, [channels, height, width]."""
        piece = int(np.searchsorted(self._ends, place, side="right"))
        held, paths = self._pieces[piece]
        row = place - int(self._ends[piece]) + len(held)
        where = _place(self._folder, place, self._column)
        data = held[row].as_py()
        if data is None:
            data = _read(where, _file_of(self._folder, where, paths[row].as_py()))
        pixels = pictures.read_pixels(where, self._shape, self._resize, data)
        record = torch.from_numpy(np.array(pixels))[None]
        return (self._table.normalised(record, self._table.where)[0],)


def check_images(found: SavedSet, column: str) -> None:
    """LocalError unless a column has an image in each record; no image is decoded."""
    pieces = found.pieces(column)
    if found.form(column) != "image":
        raise LocalError(
            f"{found.place(column)}: holds {found.held(column)}, not images; name a column of type"
            " Image, or make one by cast_column of datasets and save it"
        )
    start = 0
    for held, paths in map(_parts, pieces):
        # Most images are bytes; files are looked for only where these are missing.
        missing: NDArray[np.bool_] = held.is_null().to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(missing).tolist():
            where = _place(found.folder, start + row, column)
            _file_of(found.folder, where, paths[row].as_py())
        start += len(held)


def _parts(piece: Any) -> tuple[Any, Any]:
    """Bytes and paths of images, of which either may be missing."""
    import pyarrow as pa  # noqa: PLC0415

    if not pa.types.is_struct(piece.type):
        return piece, pa.nulls(len(piece))
    held, paths = piece.flatten()
    return held, paths


def _place(folder: Path, place: int, column: str) -> Path:
    # Records are counted from 1 in errors, as those of tables are.
    return Path(f"{folder}, record {place + 1}, column {column!r}")


def _read(where: Path, path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            check_fits(path, path.stat().st_size, "the image's file")
            return file.read()
    except OSError as error:
        raise LocalError(f"{where}: cannot read its file: {reason(error)}") from error


def _file_of(folder: Path, where: Path, text: str | None) -> Path:
    """The file in the folder that holds an image whose bytes are missing."""
    path = inside(folder, text or "")
    # An address, or a path to elsewhere, is whatever those who wrote the data set chose.
    if path is None:
        raise LocalError(
            f"{where}: holds no image, nor the path of one in the data set's folder; save the data"
            " set again on a machine that has its images, which stores their bytes, or leave the"
            " record out"
        )
    return path
