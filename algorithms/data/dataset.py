"""A silo's records: loading, checking, and a split into training and test records that
never moves.
"""

import hashlib
import hmac
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import LocalError
from .arrays import FIXES, read_arrays

SPLIT_DOMAIN = b"staddle/split/1"  # then the index of a record without id, in 8 bytes
SPLIT_ID_DOMAIN = b"staddle/split-id/1"  # then the id
FEWEST_RECORDS = 2  # one to train on, one to test on
BY_RECORD = ("ids", "sources", "groups")  # texts of a data set, one per record


@dataclass(frozen=True, eq=False)
class Dataset:
    """Records ``x`` [N, …] float32, labels ``y`` [N] int64.

    Where known, the classes' names and the records' ids.

    ``sources`` names where each record comes from, such as a hospital; records of one of
    ``groups``, such as windows that overlap, are on one side of the split.
    """

    x: Tensor
    y: Tensor
    class_names: tuple[str, ...] | None = None
    ids: tuple[str, ...] | None = None
    sources: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.x.dtype != torch.float32 or self.y.dtype != torch.int64:
            raise LocalError(
                f"data set: x is {self.x.dtype} and y is {self.y.dtype}; give float32 and int64"
            )
        if self.y.ndim != 1 or len(self.x) != len(self.y):
            raise LocalError(
                f"data set: x is {list(self.x.shape)} and y {list(self.y.shape)}; give one label a"
                " record"
            )
        for column in BY_RECORD:
            texts, name = getattr(self, column), column.removesuffix("s")
            if texts is not None and len(texts) != len(self.y):
                raise LocalError(
                    f"data set: {len(texts)} {name}s for {len(self.y)} records; give one {name} a"
                    " record"
                )

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device) -> "Dataset":
        """The same records, held by a device; themselves where they are there."""
        x, y = self.x.to(device), self.y.to(device)
        return self if x is self.x and y is self.y else replace(self, x=x, y=y)

    def take(self, indices: NDArray[np.int64]) -> "Dataset":
        """The records at the given indices, in their order."""
        index = torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64))
        places = index.tolist()

        def taken(texts: tuple[str, ...] | None) -> tuple[str, ...] | None:
            return None if texts is None else tuple(texts[place] for place in places)

        return Dataset(
            self.x[index],
            self.y[index],
            self.class_names,
            taken(self.ids),
            taken(self.sources),
            taken(self.groups),
        )


def batch_of(data: Dataset, where: Tensor | slice, device: torch.device) -> tuple[Tensor, Tensor]:
    """Records and labels at some places, on a device."""
    if isinstance(where, slice):
        return data.x[where].to(device), data.y[where].to(device)
    index = where.to(data.x.device)
    return data.x.index_select(0, index).to(device), data.y.index_select(0, index).to(device)


def in_calls(x: Tensor, y: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Records x [N, …] and labels y [N] in calls of ``rows`` each, and how many of them are
    records.

    Zeros fill up the last one.
    """
    for start in range(0, len(x), rows):
        xs, ys = x[start : start + rows], y[start : start + rows]
        records, lack = len(xs), rows - len(xs)
        if lack:
            xs, ys = (torch.cat([t, t.new_zeros(lack, *t.shape[1:])]) for t in (xs, ys))
        yield xs, ys, records


def load_npz(path: Path) -> Dataset:
    """Read arrays ``x`` and ``y`` of a .npz file, and those of ``FIXES`` that are there.

    Never unpickles.

    LocalError, before anything is read, for a file that asks for more memory than is available.
    Whether the records fit a job is for ``fit.check_records`` to say.
    """
    arrays = read_arrays(path, ("x", "y"))
    x, y, names = arrays["x"], arrays["y"], arrays.get("class_names")
    _check_records(path, x, y)
    _check_texts(path, arrays, y)
    with np.errstate(over="ignore"):  # what float32 cannot hold is found later, as infinity
        x = x.astype(np.float32)
    by_record = {name: arrays[name] for name in BY_RECORD if name in arrays}
    return Dataset(
        torch.from_numpy(np.ascontiguousarray(x)),
        torch.from_numpy(y.astype(np.int64)),
        None if names is None else tuple(names.tolist()),
        **{name: tuple(map(str, texts.tolist())) for name, texts in by_record.items()},
    )


def _check_records(path: Path, x: NDArray[Any], y: NDArray[Any]) -> None:
    if not np.issubdtype(x.dtype, np.floating):
        raise LocalError(f"{path}: x is {x.dtype}; store float32 (for images, divide by 255)")
    if not np.issubdtype(y.dtype, np.integer):
        raise LocalError(f"{path}: y is {y.dtype}; store class numbers as int64")
    if x.ndim == 0 or y.shape != x.shape[:1]:
        raise LocalError(
            f"{path}: x is {list(x.shape)} and y {list(y.shape)}; give one label a record"
        )
    if len(x) < FEWEST_RECORDS:
        raise LocalError(
            f"{path}: holds {len(x)} records; at least {FEWEST_RECORDS} are needed, to train and to"
            " test"
        )


def _check_texts(path: Path, arrays: Mapping[str, NDArray[Any]], y: NDArray[Any]) -> None:
    names = arrays.get("class_names")
    if names is not None and (names.dtype.kind != "U" or names.ndim != 1):
        raise LocalError(
            f"{path}: class_names is {names.dtype} {list(names.shape)}; {FIXES['class_names']}"
        )
    for name in BY_RECORD:
        texts = arrays.get(name)
        if texts is None:
            continue
        if texts.dtype.kind not in "Uiu" or texts.shape != y.shape:
            raise LocalError(
                f"{path}: {name} is {texts.dtype} {list(texts.shape)} for {len(y)} records;"
                f" {FIXES[name]}"
            )


def save_npz(path: Path, data: Dataset) -> None:
    """Write a data set so that ``load_npz`` reads it back."""
    arrays: dict[str, Any] = {"x": data.x.numpy(), "y": data.y.numpy()}
    if data.class_names is not None:
        arrays["class_names"] = np.array(data.class_names, dtype=np.str_)
    for name in BY_RECORD:
        if (texts := getattr(data, name)) is not None:
            arrays[name] = np.array(texts, dtype=np.str_)
    try:
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)
    except OSError as error:
        raise LocalError(f"{path}: cannot write it: {error.strerror or error}") from error


def digits() -> Dataset:
    """The 1,797 handwritten digits bundled with scikit-learn: x [1797, 1, 8, 8] in 0…1, ten
    classes.
    """
    from sklearn.datasets import (  # noqa: PLC0415 - two seconds of import that only the demo needs
        load_digits,
    )

    bunch = load_digits()
    x = (bunch.images / 16).astype(np.float32)[:, None]
    return Dataset(torch.from_numpy(x), torch.from_numpy(bunch.target.astype(np.int64)))


def split(data: Dataset, key: bytes, test_fraction: float) -> tuple[Dataset, Dataset]:
    """Training and test records, each record's side drawn by a keyed hash of its id alone, or of
    its index without ids.

    Records that have groups are drawn by those in place of their ids: a group is on one side.

    With ids a record keeps its side whatever happens to the others, and two records of one id are
    on one side. Without, only records appended at the end leave the sides as they are. Who lacks
    the key cannot tell a side.
    """
    if not 0 < test_fraction < 1:
        raise LocalError(
            f"test_fraction = {test_fraction}: choose a value between 0 and 1, such as 0.25"
        )
    if not key:
        raise LocalError("the split needs a key; give a few random bytes that stay at this silo")
    threshold = int(test_fraction * 2**64)
    drawn = data.groups or data.ids or range(len(data))
    tested = np.array([_draw(key, record) < threshold for record in drawn], dtype=bool)
    for empty, side, fix in ((tested.all(), "training", "lower"), (~tested.any(), "test", "raise")):
        if empty:
            raise LocalError(
                f"test_fraction = {test_fraction} leaves no {side} record of {len(data)}; "
                f"{fix} it or add records"
            )
    return data.take(np.flatnonzero(~tested)), data.take(np.flatnonzero(tested))


def _draw(key: bytes, record: int | str) -> int:
    if isinstance(record, int):
        message = SPLIT_DOMAIN + record.to_bytes(8, "little")
    else:
        # file names may hold surrogates
        message = SPLIT_ID_DOMAIN + record.encode("utf-8", "surrogatepass")
    digest = hmac.new(key, message, hashlib.sha256).digest()
    return int.from_bytes(digest[:8], "little")
