"""Records whose values are their places, for processes that read them."""

from dataclasses import replace
from functools import partial

import torch

from staddle.algorithms.data.lazy import LazyRecords
from staddle.errors import LocalError

N = 50


def reader(read=None):
    """What reads record ``n``: [n, n + 0.5], noted in ``read``."""

    def one(place):
        if read is not None:
            read.append(place)
        return (torch.tensor([place, place + 0.5]),)

    return one


def numbered(read=None, workers=0):
    """All of them, lazy."""
    return LazyRecords.of(partial(reader, read), N, (2,), workers, "the set", str)


class Kept:
    """What reads the rows of a tensor, in whichever process; some cannot be read."""

    def __init__(self, x, unreadable):
        self.x, self.unreadable = x, unreadable

    def __call__(self):
        return self.read

    def read(self, place):
        if place in self.unreadable:
            raise LocalError(f"record {place} cannot be read")
        return (self.x[place],)


def lazily(data, workers=0, unreadable=()):
    """The same data set, whose records are read when they are used."""
    x = LazyRecords.of(
        Kept(data.x, unreadable), len(data), data.x.shape[1:], workers, "the set", str
    )
    return replace(data, x=x)
