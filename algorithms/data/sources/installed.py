"""Records of a data set that an installed package brings, as torch's own ``Dataset``.

A package names it as an entry point of group ``staddle.datasets``: a function that takes the path,
or None, and further arguments, and returns a map-style ``torch.utils.data.Dataset`` of pairs: what
the model takes, a float32 tensor or a dictionary of such tensors by name, and what is true of it.
The silo's own people install the package and name it in their configuration: no job brings it.

Where the data set has them, ``ids``, ``sources`` and ``groups`` are one text per record,
``class_names`` one per class, and ``targets`` what is true of each record, which spares reading all
records for it.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pydantic
import torch
from pydantic import Field
from torch import Tensor

from ....errors import LocalError, check_local
from ....files import packages
from ....files.documents import canonical_json
from ....files.packages import others_code
from ...exchange.parts import nbytes_of
from ...models.inputs import MOST_TOKENS, Shapes, pack, shown
from ..dataset import Dataset, as_truth, check_some
from ..lazy import LazyRecords, Reader
from ..options import OneByOne

FIX = "correct the data set, or data.options"
TOKENS = (torch.bool, torch.int16, torch.int32, torch.int64)  # dtypes of whole numbers
TEXTS = ("class_names", "ids", "sources", "groups")

Option = bool | int | float | str
Pair: TypeAlias = tuple[Tensor, Tensor]  # a record, and what is true of it


class Example(NamedTuple):
    """A record, what is true of it, and the shapes of its inputs where it is packed."""

    x: Tensor
    truth: Tensor
    inputs: Shapes = {}  # noqa: RUF012 - nobody changes it

    def without_values(self) -> "Example":
        """Shapes and dtypes alone, on the device "meta"."""
        return self._replace(x=self.x.to("meta"), truth=self.truth.to("meta"))


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
        self.check_fits(count * nbytes_of(first[:2]), f"the {count:,} records")
        # For other processes.
        like = first.without_values()
        targets = _targets(dataset, count, like, where) if self.lazy else None
        read = _reader(dataset, where, like, targets)
        # Other processes open the set again.
        opened = partial(_reopened, self, like) if self.workers else lambda: read
        identity = partial(self._identity, read, count)
        records = LazyRecords.of(opened, count, first.x.shape, self.workers, where, identity)
        x: Tensor | LazyRecords = records
        if not self.lazy:
            x, y = _at_once(records, like)
        elif targets is None:
            y = torch.cat([own for _, (_, own) in records.pieces()])
        else:
            _check_a_few(read, count, where)
            y = targets
        class_names, ids, sources, groups = (_texts(dataset, name, where) for name in TEXTS)
        return Dataset(x, y, class_names, ids, sources, groups, inputs=first.inputs)

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
        check_local(
            torch.equal(one.nan_to_num(), other.nan_to_num()),
            f"{where}: record {place} is another each time it is read; leave random changes out",
        )


def _reopened(table: Installed, like: Example) -> Reader:
    """What reads a data set in a process of its own."""
    dataset, where = table.opened()
    with others_code(f"{where}, fails", FIX):
        count = len(dataset)
    targets = _targets(dataset, count, like, where) if table.lazy else None
    return _reader(dataset, where, like, targets)


def _reader(dataset: Any, where: str, like: Example, targets: Tensor | None) -> Reader:
    def read(place: int) -> Pair:
        with others_code(f"{where}, fails at record {place}", FIX):
            record = _record(dataset[place], where, place)
        _check_alike(like, record, where, place)
        if targets is not None and not torch.equal(record.truth, targets[place]):
            raise LocalError(f"{where}: targets says something else of record {place}; {FIX}")
        return record.x, record.truth

    return read


def _at_once(records: LazyRecords, like: Example) -> Pair:
    """All records and their targets in memory, each record read once."""
    # Rows of the whole are written in place: a list of pieces would be a second copy.
    x = torch.empty(records.shape)
    y = torch.empty(len(records), *like.truth.shape, dtype=like.truth.dtype)
    for rows, (own_x, own_y) in records.pieces():
        x[rows], y[rows] = own_x, own_y
    return x, y


def _targets(dataset: Any, count: int, like: Example, where: str) -> Tensor | None:
    """What a data set says is true of all its records; None where it says nothing."""
    found = getattr(dataset, "targets", None)
    if found is None:
        return None
    with others_code(f"{where}: its targets cannot be read", FIX):
        targets = _truth(found, like.truth.shape)
    if targets.shape != (count, *like.truth.shape) or targets.dtype != like.truth.dtype:
        raise LocalError(
            f"{where}: targets is {targets.dtype} {list(targets.shape)} for {count} records, of"
            f" which the first has {like.truth.dtype} {list(like.truth.shape)}; {FIX}"
        )
    return targets


def _truth(found: Any, shape: Sequence[int]) -> Tensor:
    # Numbers of Python, and of other precisions, are meant as those of ``Dataset.y``.
    truth = torch.as_tensor(found)
    return truth.float() if truth.is_floating_point() else as_truth(truth, shape)


def _record(record: Any, where: str, number: int) -> Example:
    """A record's tensors, those of a dictionary packed; LocalError where it is no such pair."""
    match record:
        case (Tensor() as x, y):
            return Example(_numbers(x, where, f"record {number}"), _truth(y, np.shape(y)))
        case ({**named}, y) if named:
            own = {str(name): _numbers(x, where, _of(name, number)) for name, x in named.items()}
            shapes = {name: tuple(x.shape) for name, x in own.items()}
            return Example(pack(own), _truth(y, np.shape(y)), shapes)
    raise LocalError(
        f"{where}: record {number} is no pair of a tensor, or of a dictionary of tensors, and a"
        f" target; {FIX}"
    )


def _of(name: object, number: int) -> str:
    return f"{name!r} of record {number}"


def _numbers(x: Any, where: str, what: str) -> Tensor:
    """A tensor as float32; LocalError for what float32 does not hold exactly."""
    match x:
        # Tokens and marks are kept as float32, which holds them exactly.
        case Tensor() if x.dtype in TOKENS and bool((x.long().abs() <= MOST_TOKENS).all()):
            return x.float()
        case Tensor(dtype=torch.float32):
            return x
        case Tensor(dtype=dtype):
            raise LocalError(
                f"{where}: {what} is {dtype}; give float32, or tokens up to {MOST_TOKENS:,} as"
                " int64"
            )
    raise LocalError(f"{where}: {what} is {type(x).__name__}; give a tensor")


def _check_alike(like: Example, record: Example, where: str, number: int) -> None:
    if like.inputs != record.inputs:
        raise LocalError(
            f"{where}: record {number} has {shown(record.inputs)}, the first has"
            f" {shown(like.inputs)}; give records that are alike"
        )
    for what, one, other in zip(("x", "y"), like[:2], record[:2], strict=True):
        check_local(
            (one.shape, one.dtype) == (other.shape, other.dtype),
            f"{where}: {what} of record {number} is {other.dtype} {list(other.shape)}, that of"
            f" the first {one.dtype} {list(one.shape)}; give records that are alike",
        )


def _texts(dataset: Any, name: str, where: str) -> tuple[str, ...] | None:
    found = getattr(dataset, name, None)
    if found is None:
        return None
    with others_code(f"{where}: its {name} cannot be listed", FIX):
        return tuple(map(str, found))
