"""Records of a data set that an installed package brings, as torch's own ``Dataset``.

A package names it as an entry point of group ``staddle.datasets``: a function that takes the path,
or None, and further arguments, and returns a map-style ``torch.utils.data.Dataset`` of pairs: what
the model takes, a float32 tensor, and what is true of it. The silo's own people install the package
and name it in their configuration: no job brings it.

Where the data set has them, ``ids``, ``sources`` and ``groups`` are one text per record,
``class_names`` one per class, and ``targets`` what is true of each record, which spares reading all
records for it.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import pydantic
import torch
from pydantic import Field
from torch import Tensor

from ....errors import LocalError
from ....files import packages
from ....files.documents import canonical_json
from ....files.packages import others_code
from ...exchange.parts import nbytes_of
from ..dataset import MOST_TOKENS, Dataset, as_truth, check_some
from ..lazy import LazyRecords, Reader
from ..options import OneByOne

FIX = "correct the data set, or data.options"
TOKENS = (torch.int16, torch.int32, torch.int64)  # dtypes of whole numbers
TEXTS = ("class_names", "ids", "sources", "groups")

Option = bool | int | float | str
Pair: TypeAlias = tuple[Tensor, Tensor]  # a record, and what is true of it


class Installed(OneByOne):
    """``kind = "package"``."""

    kind: Literal["package"]
    name: str
    """The entry point."""
    file: Path | None = None
    folder: Path | None = None
    options: Annotated[dict[str, Option], Field(max_length=64)] = Field(default_factory=dict)
    """Further arguments of the function."""

    @pydantic.model_validator(mode="after")
    def _one_path(self) -> "Installed":
        if self.file is not None and self.folder is not None:
            raise ValueError("file and folder: name one of them, or none")
        return self

    def read(self) -> Dataset:
        """All records, in the order of the data set.

        LocalError for records that do not fit the memory, or are not alike.
        """
        dataset, where = self.opened()
        with others_code(f"{where}, fails", FIX):
            count, first = len(dataset), _record(dataset[0], where, 0)
        check_some(where, count)
        self.check_fits(count * nbytes_of(first), f"the {count:,} records")
        # What records look like, without their values, for other processes.
        like = first[0].to("meta"), first[1].to("meta")
        targets = _targets(dataset, count, like, where) if self.lazy else None
        read = _reader(dataset, where, like, targets)
        # Other processes open the set again.
        opened = partial(_reopened, self, like) if self.workers else lambda: read
        identity = partial(self._identity, read, count)
        records = LazyRecords.of(opened, count, first[0].shape, self.workers, where, identity)
        x: Tensor | LazyRecords = records
        if not self.lazy:
            x, y = _at_once(records, like)
        elif targets is None:
            y = torch.cat([own for _, (_, own) in records.pieces()])
        else:
            _check_a_few(read, count, where)
            y = targets
        class_names, ids, sources, groups = (_texts(dataset, name, where) for name in TEXTS)
        return Dataset(x, y, class_names, ids, sources, groups)

    def opened(self) -> tuple[Any, str]:
        """The package's data set, and a text on whose it is."""
        made, where = packages.load(packages.DATASETS, self.name, f"data set {self.name!r}")
        with others_code(f"{where}, fails", FIX):
            return made(self.path, **self.options), where

    def _identity(self, read: Reader, count: int) -> str:
        """Which records these are, wherever the package finds them: by its code and two of them."""
        own = packages.package(packages.DATASETS, self.name, f"data set {self.name!r}")
        options = {key: repr(value) for key, value in self.options.items()}
        ends = hashlib.sha256()
        for record in map(read, (0, count - 1)):
            ends.update(record[0].contiguous().numpy().data)
        entry = [own.name, own.version, own.sha256, self.name, options, ends.hexdigest()]
        return canonical_json(entry).decode()


def _check_a_few(read: Reader, count: int, where: str) -> None:
    """LocalError unless some records are the same each time, and those that ``targets`` says."""
    for place in sorted({0, count // 2, count - 1}):
        one, other = read(place)[0], read(place)[0]
        if not torch.equal(one.nan_to_num(), other.nan_to_num()):
            raise LocalError(
                f"{where}: record {place} is another each time it is read; leave random changes out"
            )


def _reopened(table: Installed, like: Pair) -> Reader:
    """What reads a data set in a process of its own."""
    dataset, where = table.opened()
    with others_code(f"{where}, fails", FIX):
        count = len(dataset)
    targets = _targets(dataset, count, like, where) if table.lazy else None
    return _reader(dataset, where, like, targets)


def _reader(dataset: Any, where: str, like: Pair, targets: Tensor | None) -> Reader:
    def read(place: int) -> Pair:
        with others_code(f"{where}, fails at record {place}", FIX):
            record = _record(dataset[place], where, place)
        _check_alike(like, record, where, place)
        if targets is not None and not torch.equal(record[1], targets[place]):
            raise LocalError(f"{where}: targets says something else of record {place}; {FIX}")
        return record

    return read


def _at_once(records: LazyRecords, like: Pair) -> Pair:
    """All records and their targets in memory, each record read once."""
    # Rows of the whole are written in place: a list of pieces would be a second copy.
    x = torch.empty(records.shape)
    y = torch.empty(len(records), *like[1].shape, dtype=like[1].dtype)
    for rows, (own_x, own_y) in records.pieces():
        x[rows], y[rows] = own_x, own_y
    return x, y


def _targets(dataset: Any, count: int, like: Pair, where: str) -> Tensor | None:
    """What a data set says is true of all its records; None where it says nothing."""
    found = getattr(dataset, "targets", None)
    if found is None:
        return None
    with others_code(f"{where}: its targets cannot be read", FIX):
        targets = _truth(found, like[1].shape)
    if targets.shape != (count, *like[1].shape) or targets.dtype != like[1].dtype:
        raise LocalError(
            f"{where}: targets is {targets.dtype} {list(targets.shape)} for {count} records, of"
            f" which the first has {like[1].dtype} {list(like[1].shape)}; {FIX}"
        )
    return targets


def _truth(found: Any, shape: Sequence[int]) -> Tensor:
    # Numbers of Python, and of other precisions, are meant as those of ``Dataset.y``.
    truth = torch.as_tensor(found)
    return truth.float() if truth.is_floating_point() else as_truth(truth, shape)


def _record(record: Any, where: str, number: int) -> Pair:
    """A record's tensors; LocalError where it is no pair of them."""
    match record:
        case (Tensor() as x, y):
            truth = _truth(y, np.shape(y))
        case _:
            raise LocalError(f"{where}: record {number} is no pair of a tensor and a target; {FIX}")
    # Tokens are kept as float32, which holds them exactly.
    if x.dtype in TOKENS and bool((x.abs() <= MOST_TOKENS).all()):
        x = x.float()
    if x.dtype != torch.float32:
        raise LocalError(
            f"{where}: record {number} is {x.dtype}; give float32, or tokens up to {MOST_TOKENS:,}"
            " as int64"
        )
    return x, truth


def _check_alike(like: Pair, record: Pair, where: str, number: int) -> None:
    for what, one, other in zip(("x", "y"), like, record, strict=True):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise LocalError(
                f"{where}: {what} of record {number} is {other.dtype} {list(other.shape)}, that of"
                f" the first {one.dtype} {list(one.shape)}; give records that are alike"
            )


def _texts(dataset: Any, name: str, where: str) -> tuple[str, ...] | None:
    found = getattr(dataset, name, None)
    if found is None:
        return None
    with others_code(f"{where}: its {name} cannot be listed", FIX):
        return tuple(map(str, found))
