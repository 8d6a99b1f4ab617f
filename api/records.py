"""Records that a program has."""

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
        case _ if hasattr(data, "__getitem__"):
            x, y = (np.stack(list(map(np.asarray, own))) for own in zip(*_pairs(data), strict=True))
        case _:
            raise LocalError(
                f"data: {type(data).__name__}; give a torch data set of pairs, a pair of arrays x"
                " and y, or a [data] table"
            )
    return Dataset(torch.from_numpy(x.astype(np.float32)), as_truth(y, y.shape[1:]))


def _pairs(data: Any) -> Any:
    return map(data.__getitem__, range(len(data)))
