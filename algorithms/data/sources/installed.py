"""Records of a data set that an installed package brings, as torch's own ``Dataset``.

A package names it as an entry point of group ``staddle.datasets``: a function that takes the path,
or None, and further arguments, and returns a map-style ``torch.utils.data.Dataset`` of pairs: what
the model takes, a float32 tensor, and what is true of it. The silo's own people install the package
and name it in their configuration: no job brings it.

Where the data set has them, ``ids``, ``sources`` and ``groups`` are one text per record,
``class_names`` one per class.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import DataLoader

from ....errors import LocalError
from ....files import packages
from ....files.file_bounds import check_fits
from ....files.packages import others_code
from ..dataset import FEWEST_RECORDS, Dataset
from ..options import DataTable

AT_ONCE = 64  # records that a worker hands over together
COPIES = 2  # of the records: these, and those of both sides of the split
FIX = "correct the data set, or data.options"
TEXTS = ("class_names", "ids", "sources", "groups")

Option = bool | int | float | str


class Installed(DataTable):
    """``kind = "package"``."""

    kind: Literal["package"]
    name: str
    """The entry point."""
    file: Path | None = None
    folder: Path | None = None
    options: Annotated[dict[str, Option], Field(max_length=64)] = Field(default_factory=dict)
    """Further arguments of the function."""
    workers: Annotated[int, Field(strict=True, ge=0, le=256)] = 0
    """Processes that read records; 0: this one alone."""

    @pydantic.model_validator(mode="after")
    def _one_path(self) -> "Installed":
        if self.file is not None and self.folder is not None:
            raise ValueError("file and folder: name one of them, or none")
        return self

    def read(self) -> Dataset:
        """All records, in the order of the data set.

        LocalError for records that do not fit the memory, or are not alike.
        """
        made, where = packages.load(packages.DATASETS, self.name, f"data set {self.name!r}")
        with others_code(f"{where}, fails", FIX):
            dataset = made(self.path, **self.options)
            count, first = len(dataset), _record(dataset[0], where, 0)
        if count < FEWEST_RECORDS:
            raise LocalError(
                f"{where}: {count} records; at least {FEWEST_RECORDS} are needed, to train and to"
                " test"
            )
        needed = COPIES * count * sum(tensor.nbytes for tensor in first)
        check_fits(self.path or Path(self.name), needed, f"the {count:,} records of {self.name}")
        # Rows of the whole are written in place: a list of pieces would be a second copy.
        x, y = (tensor.new_empty(count, *tensor.shape) for tensor in first)
        done = 0
        with others_code(f"{where}, fails", FIX):
            for number, (own_x, own_y) in enumerate(self._records(dataset, where)):
                _check_alike(first, (own_x, own_y), where, number)
                x[number], y[number] = own_x, own_y
                done = number + 1
        if done != count:
            raise LocalError(f"{where}: has {done} records, and says {count}; {FIX}")
        class_names, ids, sources, groups = (_texts(dataset, name, where) for name in TEXTS)
        return Dataset(x, y, class_names, ids, sources, groups)

    def _records(self, dataset: Any, where: str) -> Iterator[tuple[Tensor, Tensor]]:
        loader = DataLoader(dataset, batch_size=AT_ONCE, num_workers=self.workers, collate_fn=list)
        number = 0
        for records in loader:
            for record in records:
                yield _record(record, where, number)
                number += 1


def _record(record: Any, where: str, number: int) -> tuple[Tensor, Tensor]:
    """A record's tensors; LocalError where it is no pair of them."""
    match record:
        case (Tensor() as x, y):
            truth = torch.as_tensor(y)
        case _:
            raise LocalError(f"{where}: record {number} is no pair of a tensor and a target; {FIX}")
    # Numbers of Python, and of other precisions, are meant as these two.
    truth = truth.float() if truth.is_floating_point() else truth.long()
    if x.dtype != torch.float32:
        raise LocalError(f"{where}: record {number} is {x.dtype}; give float32")
    return x, truth


def _check_alike(
    first: tuple[Tensor, Tensor], record: tuple[Tensor, Tensor], where: str, number: int
) -> None:
    for what, one, other in zip(("x", "y"), first, record, strict=True):
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
