"""The silos' records in memory that several processes read: held once, whatever their number.

On Linux that is memory without a name (memfd): /dev/shm does not limit it, and it is gone with the last process that
has it, however that ends. Elsewhere it is a temporary file without a name. In it x (float32) and y (int64) of each side
of each silo follow one another, each from a multiple of 64 bytes. Ids, groups and names stay behind: nothing that
trains looks at them.
"""

import mmap
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..algorithms.data import Dataset
from ..algorithms.engine import Records
from ..errors import LocalError

ALIGNED = 64  # bytes, as torch aligns its own tensors
SIDES = ("train", "test", "validation")


class Descriptor(int):
    """The number of an open file, handed to a process that is being started, where it may be another."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(int(self)),)


@dataclass(frozen=True)
class Place:
    """Where one side of a silo's records is: at which bytes x and y begin, and the shape of x."""

    x: int
    y: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Where all records are, by silo and side, and how many bytes they take."""

    places: Mapping[str, Mapping[str, Place]]
    size: int


def written(records: Mapping[str, Records]) -> tuple[BinaryIO, Layout]:
    """Memory that holds these records, and where they are in it; LocalError where there is not enough."""
    file = _memory()
    try:
        places = {
            silo: {side: Place(_put(file, data.x), _put(file, data.y), tuple(data.x.shape)) for side, data in _of(own)}
            for silo, own in records.items()
        }
        file.flush()
    except OSError as error:
        size = sum(data.x.nbytes + data.y.nbytes for own in records.values() for _, data in _of(own))
        raise LocalError(
            f"the records of {len(records)} silos, {size / 1e6:,.0f} MB, cannot be held once more for the worker "
            f"processes: {error.strerror or error}; free memory, or use one worker"
        ) from error
    return file, Layout(places, file.tell())


def mapped(descriptor: int, layout: Layout) -> dict[str, Records]:
    """The records behind a descriptor, which this closes. What a process writes to them, no other sees."""
    memory = mmap.mmap(descriptor, layout.size, access=mmap.ACCESS_COPY)
    os.close(descriptor)
    return {
        silo: Records(**{side: _dataset(memory, place) for side, place in sides.items()})
        for silo, sides in layout.places.items()
    }


def _received(duplicate: Any) -> int:
    return int(duplicate.detach())


def _memory() -> BinaryIO:
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("staddle-records"), "w+b")
    return tempfile.TemporaryFile()


def _put(file: BinaryIO, tensor: Tensor) -> int:
    file.write(bytes(-file.tell() % ALIGNED))
    start = file.tell()
    file.write(tensor.contiguous().numpy().reshape(-1).view(np.uint8).data)
    return start


def _dataset(memory: mmap.mmap, place: Place) -> Dataset:
    x: NDArray[np.float32] = np.ndarray(place.shape, np.float32, memory, place.x)
    y: NDArray[np.int64] = np.ndarray(place.shape[:1], np.int64, memory, place.y)
    return Dataset(torch.from_numpy(x), torch.from_numpy(y))


def _of(own: Records) -> Iterator[tuple[str, Dataset]]:
    for side in SIDES:
        data = getattr(own, side)
        if data is not None:
            yield side, data
