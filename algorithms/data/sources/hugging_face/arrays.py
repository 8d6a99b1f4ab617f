"""A column of lists of numbers or tokens, of which all have one shape."""

from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .....errors import LocalError
from .....files.file_bounds import check_fits
from ....models.inputs import MOST_TOKENS
from ...saved_set import SavedSet, reading

DECIMALS = (np.float16, np.float32, np.float64)
# Pixels of 8 bits are no tokens.
TOKENS = (np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
VALUE_BYTES = 16  # per number: as it is, float32, and float32 of each side of the split


def read_arrays(found: SavedSet, column: str) -> Tensor:
    """The arrays of a column, [N, …] float32, of which all have the shape of the first.

    LocalError, which names the column and its type, for values that are none.
    """
    pieces = list(filter(len, found.pieces(column)))
    if found.form(column) != "array":
        raise LocalError(
            f"{found.place(column)}: holds {found.held(column)}, not lists of numbers; name it in"
            " data.features or data.image, or name another column"
        )
    with reading(found.folder):
        shapes = [_shape(found, column, piece) for piece in pieces]
        if len({*shapes}) > 1:
            raise _uneven(found, column)
        shape = next(iter(shapes), ())
        size = len(found) * prod(shape) * VALUE_BYTES
        check_fits(found.folder, size, f"the arrays of column {column!r}")
        # Filled in place: joining a list would need the memory twice.
        x = np.empty((len(found), *shape), np.float32)
        row = 0
        for piece in pieces:
            rows = x[row : row + len(piece)]
            # What float32 cannot hold becomes infinity, which record_checks finds.
            with np.errstate(over="ignore"):
                rows[:] = _numbers(found, column, piece).reshape(rows.shape)
            row += len(piece)
    return torch.from_numpy(x)


def _shape(found: SavedSet, column: str, piece: Any) -> tuple[int, ...]:
    """The shape that all lists of an Arrow array have, which may hold lists themselves."""
    shape: tuple[int, ...] = ()
    values = piece
    while hasattr(values, "value_lengths"):
        lengths = np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
        if values.null_count or len(lengths) != 1:
            raise _uneven(found, column)
        shape, values = (*shape, int(lengths[0])), values.flatten()
    return shape


def _numbers(found: SavedSet, column: str, piece: Any) -> NDArray[Any]:
    """All numbers of an Arrow array, one after another."""
    values = piece
    while hasattr(values, "value_lengths"):
        values = values.flatten()
    numbers: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    # A missing number would become NaN.
    if values.null_count or numbers.dtype not in (*DECIMALS, *TOKENS):
        raise LocalError(
            f"{found.place(column)}: holds {found.held(column)}, or a number is missing; give"
            " float32, or tokens as int32; divide pixels of 8 bits by 255, or save an Image column"
        )
    if numbers.dtype in TOKENS and np.abs(numbers).max(initial=0) > MOST_TOKENS:
        raise LocalError(
            f"{found.place(column)}: has whole numbers beyond {MOST_TOKENS:,}, which float32 does"
            " not hold; number the tokens from 0"
        )
    return numbers


def _uneven(found: SavedSet, column: str) -> LocalError:
    return LocalError(
        f"{found.place(column)}: its lists differ in length, or one is missing; cut or pad them to"
        ' one length, as a tokenizer does by padding = "max_length", and save the data set again'
    )
