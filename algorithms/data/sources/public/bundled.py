"""Three public sets for trials without data of one's own: scikit-learn's (``staddle[examples]``).

- "digits": 1,797 handwritten digits, x [1, 8, 8] in 0 … 1, ten classes.
- "diabetes": 442 patients, x [1, 1, 10], and for a regression how far the disease had progressed a
  year later, 25 … 346 (Efron et al., 2004); features are scaled as scikit-learn has them, times
  the root of 442, so that each has deviation 1.
- "breast-cancer": 569 tumours, x [1, 1, 30], classes malignant and benign. Each feature is
  standardised by its mean and deviation over all 569, which are public, and not over a silo's
  share.
"""

from typing import Literal

import numpy as np
import torch

from ...dataset import Dataset, bundled, digits
from ...options import Shared


class Bundled(Shared):
    """``kind = "bundled"``."""

    kind: Literal["bundled"]
    name: Literal["digits", "breast-cancer", "diabetes"]

    def read(self) -> Dataset:
        """The set, or a share of it; a record's id is its index in the set.

        Ids are those of the whole set, so no two shares have an id in common.
        """
        sets = {"digits": digits, "breast-cancer": breast_cancer, "diabetes": diabetes}
        data = sets[self.name]()
        own = self.indices(len(data))
        return Dataset(data.held[own], data.y[own], data.class_names, tuple(map(str, own.tolist())))


def diabetes() -> Dataset:
    """The 442 patients bundled with scikit-learn; y is a number per patient."""
    bunch = bundled("diabetes")
    x = bunch.data * len(bunch.data) ** 0.5
    return Dataset(
        torch.from_numpy(x.astype(np.float32))[:, None, None],
        torch.from_numpy(bunch.target.astype(np.float32)),
    )


def breast_cancer() -> Dataset:
    """The 569 tumours bundled with scikit-learn.

    x is standardised by the figures of all 569 records, which are public.
    """
    bunch = bundled("breast_cancer")
    x = (bunch.data - bunch.data.mean(0)) / bunch.data.std(0)
    names = tuple(str(name) for name in bunch.target_names)
    return Dataset(
        torch.from_numpy(x.astype(np.float32))[:, None, None],
        torch.from_numpy(bunch.target.astype(np.int64)),
        names,
    )
