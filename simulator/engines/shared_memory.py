"""The silos' records in memory that several processes read: held once, whatever their number.

On Linux that is memory without a name (memfd): /dev/shm does not limit it, and it is gone with the
last process that has it, however that ends. Elsewhere it is a temporary file without a name. In it
x (float32) and y (int64) of each side of each silo follow one another, each from a multiple of 64
bytes, and then a table in JSON of where they begin:

    {"hospital-a": {"train": [0, 614400, [50, 3, 32, 32]], "test": [614848, 737728, [10, 3, 32,
    32]]}}

Ids, groups and names stay behind: nothing that trains looks at them.
"""

import json
import mmap
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import reduction
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...algorithms.data.dataset import Dataset
from ...algorithms.engines.engine import Records
from ...errors import LocalError, reason

# Windows passes no file to another process by its number.
SHARED = hasattr(reduction, "DupFd")
ALIGNED = 64  # bytes, as torch aligns its own tensors
SIDES = ("train", "test", "validation")

Buffer: TypeAlias = mmap.mmap | NDArray[np.uint8]
# the byte at which an array begins, its dtype and its shape
Position: TypeAlias = tuple[int, str, tuple[int, ...]]


class Descriptor(int):
    """The number of an open file; in a process that receives it, the number may differ.

    Pass it as an argument to a process that is being started. The receiver gets a duplicate and has
    to close it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(int(self)),)


def written(records: Mapping[str, Records]) -> tuple[BinaryIO, int]:
    """Memory that holds these records, and the position of its table.

    LocalError where there is not enough memory.
    """
    if not SHARED:
        raise LocalError(
            "worker processes cannot share the records on this system; leave --workers out, and"
            " all silos train in one process"
        )
    file = _memory()
    try:
        # the table comes last, when all positions are known; readers are told where
        positions = _write(file, records)
        table = file.tell()
        file.write(json.dumps(positions).encode())
        file.flush()
    except OSError as error:
        # The error says how much memory is missing.
        size = sum(map(_bytes, records.values()))
        raise LocalError(
            f"the records of {len(records)} silos, {size / 1e6:,.0f} MB, cannot be held once more"
            f" for the worker processes: {reason(error)}; free memory, or use one worker"
        ) from error
    return file, table


def mapped(descriptor: int, table: int) -> dict[str, Records]:
    """The records behind a descriptor, which this closes.

    What a process writes to them, no other sees.

    Tensors share memory with the map, which lives as long as they do. ``table`` comes from
    ``written``.
    """
    # copied on write: workers share the pages, and none alters another's records
    memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    os.close(descriptor)
    return laid_out(memory, memory[table:])


def laid_out(memory: Buffer, table: bytes) -> dict[str, Records]:
    """The records in what ``written`` wrote, of which ``table`` is the end; tensors share it."""
    records = {}
    for silo, positions in json.loads(table).items():
        sides = {side: _dataset(memory, *position) for side, position in positions.items()}
        records[silo] = Records(**sides)
    return records


def _bytes(own: Records) -> int:
    return sum(data.held.nbytes + data.y.nbytes for _, data in _sides(own))


def _received(duplicate: Any) -> int:
    return int(duplicate.detach())


def _memory() -> BinaryIO:
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("staddle-records"), "w+b")
    return tempfile.TemporaryFile()


def _write(
    file: BinaryIO, records: Mapping[str, Records]
) -> dict[str, dict[str, tuple[Position, Position]]]:
    known: dict[
        int, tuple[Position, Position]
    ] = {}  # several silos may be tested on the same records
    positions: dict[str, dict[str, tuple[Position, Position]]] = {}
    for silo, own in records.items():
        positions[silo] = {}
        for side, data in _sides(own):
            # Silos that share test records share one object: write it once.
            if id(data) not in known:
                known[id(data)] = _put(file, data.held), _put(file, data.y)
            positions[silo][side] = known[id(data)]
    return positions


def _put(file: BinaryIO, tensor: Tensor) -> Position:
    # torch's kernels may add up in another order where values are not aligned, and a worker's
    # results must be those of one process bit for bit
    file.write(bytes(-file.tell() % ALIGNED))
    start = file.tell()
    array = tensor.contiguous().numpy()
    file.write(array.reshape(-1).view(np.uint8).data)
    return start, array.dtype.str, array.shape


def _dataset(memory: Buffer, x: Position, y: Position) -> Dataset:
    return Dataset(_read(memory, *x), _read(memory, *y))


def _read(memory: Buffer, start: int, dtype: str, shape: Sequence[int]) -> Tensor:
    # An array over the map: pages are read only when they are used.
    array: NDArray[Any] = np.ndarray(shape, np.dtype(dtype), memory, start)
    with warnings.catch_warnings():
        # Ray's memory cannot be written to, and nothing writes to records.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _sides(own: Records) -> Iterator[tuple[str, Dataset]]:
    for side in SIDES:
        data = getattr(own, side)
        if data is not None:
            yield side, data
