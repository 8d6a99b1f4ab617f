"""A silo's records: loading, checking, and a split into training and test records that never moves."""

import hashlib
import hmac
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import LocalError

SPLIT_DOMAIN = b"staddle/split/1"
FEWEST_RECORDS = 2  # one to train on, one to test on
NAMES_FIX = "store numpy.array([…], dtype=str), one name a class"


@dataclass(frozen=True, eq=False)
class Dataset:
    """Records ``x`` [N, …] float32, their labels ``y`` [N] int64 and, where known, the classes' names by label."""

    x: Tensor
    y: Tensor
    class_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.x.dtype != torch.float32 or self.y.dtype != torch.int64:
            raise LocalError(f"data set: x is {self.x.dtype} and y is {self.y.dtype}; give float32 and int64")
        if self.y.ndim != 1 or len(self.x) != len(self.y):
            raise LocalError(f"data set: x is {list(self.x.shape)} and y {list(self.y.shape)}; give one label a record")

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: NDArray[np.int64]) -> "Dataset":
        """The records at the given indices, in their order."""
        index = torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64))
        return Dataset(self.x[index], self.y[index], self.class_names)


def load_npz(path: Path) -> Dataset:
    """Read arrays ``x`` and ``y``, and ``class_names`` if there is one, of a .npz file; never unpickles.

    Whether they fit a job is for ``fit.check_records`` to say.
    """
    x, y, names = _read_arrays(path)
    if not np.issubdtype(x.dtype, np.floating):
        raise LocalError(f"{path}: x is {x.dtype}; store float32 (for images, divide by 255)")
    if not np.issubdtype(y.dtype, np.integer):
        raise LocalError(f"{path}: y is {y.dtype}; store class numbers as int64")
    if x.ndim == 0 or y.shape != x.shape[:1]:
        raise LocalError(f"{path}: x is {list(x.shape)} and y {list(y.shape)}; give one label a record")
    if len(x) < FEWEST_RECORDS:
        raise LocalError(f"{path}: holds {len(x)} records; at least {FEWEST_RECORDS} are needed, to train and to test")
    if names is not None and (names.dtype.kind != "U" or names.ndim != 1):
        raise LocalError(f"{path}: class_names is {names.dtype} {list(names.shape)}; {NAMES_FIX}")
    with np.errstate(over="ignore"):  # what float32 cannot hold is found later, as infinity
        x = x.astype(np.float32)
    known = None if names is None else tuple(names.tolist())
    return Dataset(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y.astype(np.int64)), known)


def _read_arrays(path: Path) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise LocalError(f"{path}: holds one array; save x and y together with numpy.savez")
            for name in ("x", "y"):
                if name not in archive.files:
                    raise LocalError(f"{path}: has no array {name!r}, only {sorted(archive.files)}; save x and y")
            return archive["x"], archive["y"], _read_names(path, archive)
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise LocalError(
            f"{path}: not a .npz file of plain arrays; write one with numpy.savez(file, x=…, y=…)"
        ) from error


def _read_names(path: Path, archive: Any) -> NDArray[Any] | None:
    if "class_names" not in archive.files:
        return None
    try:
        names: NDArray[Any] = archive["class_names"]
    except ValueError as error:
        raise LocalError(f"{path}: class_names is no plain array; {NAMES_FIX}") from error
    return names


def save_npz(path: Path, data: Dataset) -> None:
    """Write a data set so that ``load_npz`` reads it back."""
    arrays: dict[str, Any] = {"x": data.x.numpy(), "y": data.y.numpy()}
    if data.class_names is not None:
        arrays["class_names"] = np.array(data.class_names, dtype=np.str_)
    try:
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)
    except OSError as error:
        raise LocalError(f"{path}: cannot write it: {error.strerror or error}") from error


def digits() -> Dataset:
    """The 1,797 handwritten digits bundled with scikit-learn: x [1797, 1, 8, 8] in 0…1, ten classes."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - two seconds of import that only the demo needs

    bunch = load_digits()
    x = (bunch.images / 16).astype(np.float32)[:, None]
    return Dataset(torch.from_numpy(x), torch.from_numpy(bunch.target.astype(np.int64)))


def split(data: Dataset, key: bytes, test_fraction: float) -> tuple[Dataset, Dataset]:
    """Training and test records, each record's side drawn by a keyed hash of its index alone.

    Records appended later leave the sides of the earlier ones as they are, and who lacks the key cannot tell a side.
    """
    if not 0 < test_fraction < 1:
        raise LocalError(f"test_fraction = {test_fraction}: choose a value between 0 and 1, such as 0.25")
    if not key:
        raise LocalError("the split needs a key; give a few random bytes that stay at this silo")
    threshold = int(test_fraction * 2**64)
    tested = np.array([_draw(key, index) < threshold for index in range(len(data))], dtype=bool)
    if tested.all() or not tested.any():
        side = "training" if tested.all() else "test"
        raise LocalError(
            f"test_fraction = {test_fraction} leaves no {side} record of {len(data)}; "
            f"{'lower' if tested.all() else 'raise'} it or add records"
        )
    return data.take(np.flatnonzero(~tested)), data.take(np.flatnonzero(tested))


def _draw(key: bytes, index: int) -> int:
    digest = hmac.new(key, SPLIT_DOMAIN + index.to_bytes(8, "little"), hashlib.sha256).digest()
    return int.from_bytes(digest[:8], "little")
