"""Easy records, and who has which: a class of 8x8 pictures is where they have a bright band."""

import numpy as np
import torch

from staddle.algorithms.data.dataset import Dataset

CLASSES = 3


def banded(labels, seed):
    """Pictures of these classes."""
    y = np.asarray(labels)
    x = np.random.default_rng(seed).normal(0, 0.3, size=(len(y), 1, 8, 8)).astype(np.float32)
    for record, label in enumerate(y):
        x[record, 0, 2 * label + 1 : 2 * label + 3] += 1
    return Dataset(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)))


def banded_shards(silos, n=18, mostly=0.0):
    """n records at the first silo, six more at each next.

    A share of a silo's are of one class, the rest of all.
    """
    shards = {}
    for own, silo in enumerate(silos):
        size = n + 6 * own
        labels = [
            own % CLASSES if record < mostly * size else record % CLASSES for record in range(size)
        ]
        shards[silo] = (banded(labels, own), banded(labels, 100 + own))
    return shards
