"""A column of images, PNG or JPEG: their bytes, or paths of files in the data set's folder."""

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
        self._pieces = open_saved(folder).pieces(column)
        self._ends = np.cumsum([len(piece) for piece in self._pieces])

    def __call__(self, place: int) -> tuple[Tensor]:
        """The image at a place, [channels, height, width]."""
        piece = int(np.searchsorted(self._ends, place, side="right"))
        start = self._ends[piece] - len(self._pieces[piece])
        value = self._pieces[piece][int(place - start)].as_py()
        where = _place(self._folder, place, self._column)
        pixels = pictures.read_pixels(
            where, self._shape, self._resize, _bytes_of(self._folder, where, value)
        )
        record = torch.from_numpy(np.array(pixels))[None]
        return (self._table.normalised(record, self._table.where)[0],)


def check_images(found: SavedSet, column: str) -> None:
    """LocalError unless a column has an image in each record; no image is decoded."""
    pieces = found.pieces(column)
    if not found.is_image(column):
        raise LocalError(
            f"{found.place(column)}: holds {found.held(column)}, not images; name a column of type"
            " Image, or make one by cast_column of datasets and save it"
        )
    start = 0
    for piece in pieces:
        # Most images are bytes; files are looked for only where these are missing.
        held = piece.field("bytes") if hasattr(piece, "field") else piece
        for row in np.flatnonzero(_missing(held) | _missing(piece)).tolist():
            value = piece[row].as_py()
            _file_of(found.folder, _place(found.folder, start + row, column), value)
        start += len(piece)


def _place(folder: Path, place: int, column: str) -> Path:
    # Records are counted from 1 in errors, as those of tables are.
    return Path(f"{folder}, record {place + 1}, column {column!r}")


def _bytes_of(folder: Path, where: Path, value: Any) -> bytes:
    """The bytes of an image, or of the file in the folder that it names."""
    held: bytes | None = value.get("bytes") if isinstance(value, dict) else value
    if held is not None:
        return held
    path = _file_of(folder, where, value)
    try:
        with open_regular(path) as file:
            check_fits(path, path.stat().st_size, "the image's file")
            return file.read()
    except OSError as error:
        raise LocalError(f"{where}: cannot read its file: {reason(error)}") from error


def _file_of(folder: Path, where: Path, value: Any) -> Path:
    text = value.get("path") if isinstance(value, dict) else None
    path = inside(folder, text) if text else None
    # An address, or a path to elsewhere, is whatever those who wrote the data set chose.
    if path is None:
        raise LocalError(
            f"{where}: holds no image, nor the path of one in the data set's folder; save the data"
            " set again on a machine that has its images, which stores their bytes, or leave the"
            " record out"
        )
    return path


def _missing(array: Any) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False)
    return found
