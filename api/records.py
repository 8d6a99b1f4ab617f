"""Records that a program has."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..algorithms.data.dataset import Dataset, as_truth, digits
from ..errors import LocalError

DIGITS = "digits"


def records_of(data: Any) -> Dataset:
    """Records of a pair of arrays, of a torch data set of pairs, or "digits".

    LocalError for anything else.
    """
    match data:
        case Dataset():
            return data
        case str() if data == DIGITS:
            return digits()
        case [x, y] if isinstance(data, tuple):
            x, y = map(np.asarray, (x, y))
        case str():
            raise LocalError(f"data: unknown set {data!r}; known: {DIGITS}")
        # Arrays and data frames have items, too, which are no pairs.
        case _ if hasattr(data, "__getitem__") and not hasattr(data, "shape"):
            x, y = (np.stack(list(map(np.asarray, own))) for own in zip(*_pairs(data), strict=True))
        case _:
            raise LocalError(
                f"data: {type(data).__name__}; give a torch data set of pairs, a pair of arrays x"
                " and y, or a [data] table"
            )
    return Dataset(torch.from_numpy(x.astype(np.float32)), as_truth(y, y.shape[1:]))


def _pairs(data: Any) -> Iterator[Any]:
    for item in map(data.__getitem__, range(len(data))):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise LocalError(
                f"data: an item is {type(item).__name__}; give pairs of a record and its target"
            )
        yield item
