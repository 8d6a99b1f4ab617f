"""Two public sets that come with scikit-learn, for trials without data of one's own.

- "digits": 1,797 handwritten digits, x [1, 8, 8] in 0 … 1, ten classes.
- "breast-cancer": 569 tumours, x [1, 1, 30], classes malignant and benign. Each feature is
  standardised by its mean and deviation over all 569, which are public, and not over a silo's
  share.
"""

from typing import Literal

import numpy as np
import torch

from ..dataset import Dataset, digits
from ..options import Shared


class Bundled(Shared):
    """``kind = "bundled"``."""

    kind: Literal["bundled"]
    name: Literal["digits", "breast-cancer"]

    def read(self) -> Dataset:
        """The set, or a share of it; a record's id is its index in the set.

        Ids are those of the whole set, so no two shares have an id in common.
        """
        data = digits() if self.name == "digits" else breast_cancer()
        own = self.indices(len(data))
        return Dataset(data.x[own], data.y[own], data.class_names, tuple(map(str, own.tolist())))


def breast_cancer() -> Dataset:
    """The 569 tumours bundled with scikit-learn.

    x is standardised by the figures of all 569 records, which are public.
    """
    from sklearn.datasets import load_breast_cancer  # noqa: PLC0415 - two seconds of import that only trials need

    bunch = load_breast_cancer()
    x = (bunch.data - bunch.data.mean(0)) / bunch.data.std(0)
    names = tuple(str(name) for name in bunch.target_names)
    return Dataset(
        torch.from_numpy(x.astype(np.float32))[:, None, None],
        torch.from_numpy(bunch.target.astype(np.int64)),
        names,
    )
