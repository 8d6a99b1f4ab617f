"""Records whose values are their places, for processes that read them."""

from dataclasses import replace

import torch

from staddle.algorithms.data.lazy import LazyRecords

N = 50


def reader(read=None):
    """What reads record ``n``: [n, n + 0.5], noted in ``read``."""

    def one(place):
        if read is not None:
            read.append(place)
        return (torch.tensor([place, place + 0.5]),)

    return one


class Kept:
    """What reads the rows of a tensor, in whichever process."""

    def __init__(self, x):
        self.x = x

    def __call__(self):
        return lambda place: (self.x[place],)


def lazily(data, workers=0):
    """The same data set, whose records are read when they are used."""
    x = LazyRecords.of(Kept(data.x), len(data), data.x.shape[1:], workers, "the set")
    return replace(data, x=x)
