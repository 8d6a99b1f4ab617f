"""A data set as PFLlib's ``generate_*.py`` leaves it, with the records of each client.

::

    <folder>/train/0.npz   {"x": [n, …], "y": [n]} of client 0, a dictionary in the array "data"
    <folder>/test/0.npz
    <folder>/config.json   how it was dealt out, which nothing here needs

The dictionary is a pickle, of which nothing is run (``pickled``). Sets of texts, whose x is a list,
are not read.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from .....errors import LocalError
from .....files.file_bounds import check_fits
from ...arrays import read_object
from ...dataset import Dataset
from ...options import COPIES, FEWER, DataTable
from ...pickled import PickledArray, read_pickled

SIDES = ("train", "test")
FLOAT_BYTES, INDEX_BYTES = 4, 8  # of a number of x, and of a class


class Pfllib(DataTable):
    """``kind = "pfllib"``: a client is a source, and its training records precede all tests."""

    kind: Literal["pfllib"]
    folder: Path

    @property
    def has_official_parts(self) -> bool:
        """Both parts, the training records of all clients first."""
        return True

    def lacking(self) -> str | None:
        """The files of a client."""
        if (self.folder / "train").is_dir() and (self.folder / "test").is_dir():
            return None
        return f"{self.folder}/{{train,test}}, as PFLlib's dataset/generate_….py leaves them"

    def read(self) -> Dataset:
        """All clients' records, x as float32 in their own shape, y as class numbers.

        An id is the side, the client and the record's place in its file.
        """
        clients = _clients(self.folder)
        xs: list[NDArray[np.float32]] = []
        ys: list[NDArray[np.int64]] = []
        ids, sources = [], []
        for side in SIDES:
            for client in clients:
                x, y = _read_client(self.folder / side / f"{client}.npz")
                if xs and x.shape[1:] != xs[0].shape[1:]:
                    raise LocalError(
                        f"{self.folder}/{side}/{client}.npz: records of shape {list(x.shape[1:])},"
                        f" and {list(xs[0].shape[1:])} before; make the set again"
                    )
                xs.append(x)
                ys.append(y)
                ids += [f"{side}/{client}/{place}" for place in range(len(y))]
                sources += [str(client)] * len(y)
        needed = COPIES * sum(x.nbytes for x in xs)
        check_fits(self.folder, needed, "its records", FEWER)
        return Dataset(
            torch.from_numpy(np.concatenate(xs)),
            torch.from_numpy(np.concatenate(ys)),
            ids=tuple(ids),
            sources=tuple(sources),
        )


def _clients(folder: Path) -> list[int]:
    """The numbers of all clients, ascending; LocalError where one has one side alone."""
    found = [
        {int(file.stem) for file in (folder / side).glob("*.npz") if file.stem.isdecimal()}
        for side in SIDES
    ]
    train, test = found
    if not train or train != test:
        raise LocalError(
            f"{folder}: {len(train)} clients have train/NUMBER.npz, and {len(test)} have"
            " test/NUMBER.npz; name the folder that PFLlib's dataset/generate_….py left, such as"
            " dataset/MNIST"
        )
    return sorted(train)


def _read_client(file: Path) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """X [n, …] and y [n] of a client; LocalError for a file of another kind."""
    content = read_pickled(read_object(file, "data"), str(file))
    held = content.objects if isinstance(content, PickledArray) else None
    if not held or type(held[0]) is not dict or not {"x", "y"} <= held[0].keys():
        raise LocalError(f"{file}: holds no x and y of a client; make it again with PFLlib")
    x, y = _numbers(file, "x", held[0]["x"], "iuf"), _numbers(file, "y", held[0]["y"], "iu")
    if y.ndim != 1 or x.ndim < 1 or len(x) != len(y) or not len(y):
        raise LocalError(
            f"{file}: x is {list(x.shape)} and y {list(y.shape)}; one class per record and one"
            " record or more are needed"
        )
    # Of a byte each become four.
    check_fits(file, x.size * FLOAT_BYTES + y.size * INDEX_BYTES, "its records", FEWER)
    # As PFLlib's read_client_data makes of them.
    return x.astype(np.float32, copy=False), y.astype(np.int64, copy=False)


def _numbers(file: Path, name: str, given: Any, kinds: str) -> NDArray[Any]:
    found = given.numbers if isinstance(given, PickledArray) else None
    if found is None or found.dtype.kind not in kinds:
        raise LocalError(
            f"{file}: {name} is no array of numbers; of PFLlib's sets those of texts are not read,"
            " nor values other than classes"
        )
    return found
