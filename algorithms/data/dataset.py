"""A silo's records: loading, checking, and a lasting split into training and test records."""

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import LocalError, check_local, reason
from ..models.inputs import MOST_TOKENS, Shapes, unpacked
from ..numerics.devices import CPU
from .arrays import FIXES, read_arrays
from .features import Feature
from .lazy import LazyRecords

# Two domains, so that an id of 8 bytes is no index.
SPLIT_DOMAIN = b"staddle/split/1"  # then the index of a record without id, in 8 bytes
SPLIT_ID_DOMAIN = b"staddle/split-id/1"  # then the id
TRUTHS = (torch.int64, torch.float32, torch.uint8)  # dtypes of y
FEWEST_RECORDS = 2  # one to train on, one to test on


@dataclass(frozen=True, eq=False)
class Dataset:
    """Records ``x`` [N, …] float32, and what is true of them, ``y`` [N, …].

    ``y`` is int64 or float32; class numbers of each position of a record may be uint8. In a
    classification ``y`` [N] are class numbers (algorithms/tasks). Where known, the classes'
    names, the records' ids and what each feature is. ``x`` may be read when it is used (lazy.py);
    ``y`` is always in memory.

    ``sources`` names where each record comes from, such as a hospital; records of one of
    ``groups``, such as windows that overlap, are on one side of the split.

    Records that are dictionaries of tensors have ``inputs``: their shapes by name. Each is then a
    packed row [numbers] of ``x`` (models/inputs.py). Others have none.
    """

    x: Tensor | LazyRecords
    y: Tensor
    class_names: tuple[str, ...] | None = None
    ids: tuple[str, ...] | None = None
    sources: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None
    features: tuple[Feature, ...] | None = None
    inputs: Shapes = field(default_factory=dict)

    # Checked once here, so that later functions can rely on dtypes and lengths.
    def __post_init__(self) -> None:
        if self.x.dtype != torch.float32 or self.y.dtype not in TRUTHS:
            raise LocalError(
                f"data set: x is {self.x.dtype} and y is {self.y.dtype}; give float32, and int64,"
                " float32 or uint8"
            )
        if not self.y.ndim or len(self.x) != len(self.y):
            raise LocalError(
                f"data set: x is {list(self.x.shape)} and y {list(self.y.shape)}; give one target"
                " per record"
            )
        for key, texts in self.by_record().items():
            if len(texts) != len(self.y):
                name = key.removesuffix("s")
                raise LocalError(
                    f"data set: {len(texts)} {key} for {len(self.y)} records; give one {name} per"
                    " record"
                )

    def by_record(self) -> dict[str, tuple[str, ...]]:
        """The ids, sources and groups that are known, one text per record each."""
        texts = {"ids": self.ids, "sources": self.sources, "groups": self.groups}
        return {key: known for key, known in texts.items() if known is not None}

    def __len__(self) -> int:
        return len(self.y)

    @property
    def held(self) -> Tensor:
        """The records ``x`` in memory; LocalError where they are read when they are used."""
        if isinstance(self.x, LazyRecords):
            raise LocalError(
                "records that are read when they are used (data.lazy) cannot be taken whole here;"
                " leave data.lazy out"
            )
        return self.x

    def to(self, device: torch.device) -> "Dataset":
        """The data set on a device; itself where the records are there already, or are lazy."""
        if isinstance(self.x, LazyRecords):
            return self
        x, y = self.x.to(device), self.y.to(device)
        if x is self.x and y is self.y:
            return self
        return replace(self, x=x, y=y)

    def take(self, indices: NDArray[np.int64]) -> "Dataset":
        """The records at the given indices, in their order.

        Ids, sources and groups are taken along.
        """
        index = torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64))
        places = index.tolist()
        texts: dict[str, Any] = {}
        for key, known in self.by_record().items():
            texts[key] = tuple(known[place] for place in places)
        return replace(self, x=self.x[index], y=self.y[index], **texts)


def forgiving(data: Dataset) -> Dataset:
    """The data set, in which a record that cannot be read when it is used is NaN."""
    if isinstance(data.x, LazyRecords):
        return replace(data, x=data.x.forgiving())
    return data


def batches_of(
    data: Dataset, batches: Iterable[NDArray[np.int64]], device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """The records and targets of each batch in turn, on a device.

    ``batches`` are indices [B] int64. A list may be read ahead. Any other iterable is asked for
    a batch only when it is that batch's turn, so a private step draws its records only when it
    is taken.
    """
    if isinstance(data.x, LazyRecords):
        for index, x in data.x.batches(batches, device):
            yield x, data.y[torch.from_numpy(index)].to(device)
        return
    for own in _places(batches, data.x.device):
        yield data.x.index_select(0, own).to(device), data.y.index_select(0, own).to(device)


def chunks_of(
    data: Dataset, rows: int, device: torch.device = CPU
) -> Iterator[tuple[Tensor, Tensor]]:
    """All records and targets in order, so many at a time, on a device."""
    starts = range(0, len(data), rows)
    if isinstance(data.x, LazyRecords):
        everything = np.arange(len(data))
        yield from batches_of(data, [everything[start : start + rows] for start in starts], device)
        return
    for start in starts:
        piece = slice(start, start + rows)
        yield data.x[piece].to(device), data.y[piece].to(device)


def calls_of(data: Dataset, rows: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """All records and targets in order, in calls of one size (``in_calls``)."""
    for x, y in chunks_of(data, rows):
        yield from in_calls(x, y, rows)


def _places(batches: Iterable[NDArray[np.int64]], device: torch.device) -> Iterable[Tensor]:
    """The indices of an epoch's batches, on the device that holds the records.

    They go to a GPU all at once, since each transfer waits.
    """
    if device == CPU:
        return map(torch.from_numpy, batches)
    whole = list(batches)
    return torch.split(
        torch.from_numpy(np.concatenate(whole)).to(device), [len(index) for index in whole]
    )


def in_calls(x: Tensor, y: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Records x [N, …] and labels y [N, …] in calls of ``rows``, each with its number of records.

    Zeros fill up the last call. The caller must drop the results of those rows.
    """
    # Calls of one size: a record's output must not depend on how many others there are
    # (training/clipped_sum.py).
    for start in range(0, len(x), rows):
        xs, ys = x[start : start + rows], y[start : start + rows]
        records = len(xs)
        lack = rows - records
        if lack:
            xs = torch.cat([xs, xs.new_zeros(lack, *xs.shape[1:])])
            ys = torch.cat([ys, ys.new_zeros(lack, *ys.shape[1:])])
        yield xs, ys, records


def load_npz(path: Path) -> Dataset:
    """Read arrays ``x`` and ``y`` of a .npz file, and those of ``FIXES`` that are there.

    In place of ``x`` a file may have arrays ``x.NAME``, one per input of a model that has several.
    It never unpickles. LocalError, before anything is read, for a file that asks for more memory
    than is available. ``record_checks.check_records`` says if the records fit a job.
    """
    arrays = read_arrays(path, ("y",), several=("x",))
    y = arrays.pop("y")
    found = {name: arrays.pop(name) for name in FIXES.keys() & arrays.keys()}
    # Dtypes and shapes first: the conversions below do not check them.
    for name, x in arrays.items():
        _check_records(path, name, x, y)
    check_some(str(path), len(y))
    texts: dict[str, Any] = {}
    for name, array in found.items():
        _check_texts(path, name, array, len(y))
        texts[name] = tuple(map(str, array.tolist()))
    truth = as_truth(y, y.shape[1:])
    x, inputs = _as_rows(arrays)
    return Dataset(x, truth, **texts, inputs=inputs)


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """Records of a .npz file, as in ``Dataset``, and the name of each."""

    names: tuple[str, ...]
    x: Tensor
    inputs: Shapes


def unlabelled(path: Path) -> Unlabelled:
    """Like ``load_npz``, for a file that need not say what is true of its records."""
    arrays = read_arrays(path, (), several=("x",))
    found = {name: arrays.pop(name) for name in FIXES.keys() & arrays.keys()}
    count = len(np.atleast_1d(next(iter(arrays.values()))))
    for name, x in arrays.items():
        _check_records(path, name, x, np.zeros(count, np.int64))
    names = tuple(map(str, range(count)))
    if "ids" in found:
        _check_texts(path, "ids", found["ids"], count)
        names = tuple(map(str, found["ids"].tolist()))
    return Unlabelled(names, *_as_rows(arrays))


def _as_rows(arrays: Mapping[str, NDArray[Any]]) -> tuple[Tensor, Shapes]:
    """The records of an array ``x``, or packed ones of arrays ``x.NAME`` and their shapes."""
    # What float32 cannot hold becomes infinity, which ``check_records`` finds.
    with np.errstate(over="ignore"):
        if "x" in arrays:
            return torch.from_numpy(np.ascontiguousarray(arrays["x"].astype(np.float32))), {}
        inputs = {name.removeprefix("x."): x.shape[1:] for name, x in arrays.items()}
        rows = [x.reshape(len(x), -1) for _, x in sorted(arrays.items())]
        x = np.concatenate(rows, axis=1, dtype=np.float32, casting="same_kind")
        return torch.from_numpy(x), inputs


def as_truth(found: Any, shape: Sequence[int]) -> Tensor:
    """What is true of records, of the dtypes of ``Dataset.y``; ``shape`` is that of one record's.

    Numbers of eight bits stay so where a record has two sides or more: classes of its positions.
    """
    # An array of numpy's stays where it is.
    y = np.asarray(found)
    with np.errstate(over="ignore"):
        if y.dtype.kind not in "biu":
            return torch.from_numpy(y.astype(np.float32, copy=False))
        small = len(shape) > 1 and y.dtype in (np.uint8, np.bool_)
        return torch.from_numpy(y.astype(np.uint8 if small else np.int64, copy=False))


def _check_records(path: Path, name: str, x: NDArray[Any], y: NDArray[Any]) -> None:
    # Pixels of 8 bits are no tokens.
    if not (np.issubdtype(x.dtype, np.floating) or (x.dtype.kind in "iu" and x.itemsize > 1)):
        raise LocalError(
            f"{path}: {name} is {x.dtype}; store float32 (for images, divide by 255), or tokens as"
            " int32"
        )
    if x.dtype.kind in "iu" and np.abs(x).max(initial=0) > MOST_TOKENS:
        raise LocalError(
            f"{path}: {name} has whole numbers beyond {MOST_TOKENS:,}, which float32 does not hold;"
            " number the tokens from 0"
        )
    check_local(
        y.dtype.kind in "biuf",
        f"{path}: y is {y.dtype}; store class numbers as int64, those of positions as uint8, or"
        " other targets as float32",
    )
    if x.ndim == 0 or y.ndim == 0 or len(y) != len(x):
        raise LocalError(
            f"{path}: {name} is {list(x.shape)} and y {list(y.shape)}; give one target per record"
        )


def check_some(where: str, records: int) -> None:
    """LocalError for too few records to train and to test on."""
    if records < FEWEST_RECORDS:
        raise LocalError(
            f"{where}: holds {records} records; at least {FEWEST_RECORDS} are needed, to train and"
            " to test"
        )


def _check_texts(path: Path, name: str, texts: NDArray[Any], records: int) -> None:
    """LocalError unless these are names of classes, or one text or whole number per record."""
    found = f"{path}: {name} is {texts.dtype} {list(texts.shape)}"
    if name == "class_names":
        if texts.dtype.kind != "U" or texts.ndim != 1:
            raise LocalError(f"{found}; {FIXES[name]}")
        return
    if texts.dtype.kind not in "Uiu" or texts.shape != (records,):
        raise LocalError(f"{found} for {records} records; {FIXES[name]}")


def save_npz(path: Path, data: Dataset) -> None:
    """Write a data set so that ``load_npz`` reads it back.

    Texts are stored as fixed-width Unicode, since objects would be pickled. LocalError if the file
    cannot be written.
    """
    apart = unpacked(data.held, data.inputs)
    arrays: dict[str, Any] = {f"x.{name}": own.numpy() for name, own in apart.items()}
    arrays = (arrays or {"x": data.held.numpy()}) | {"y": data.y.numpy()}
    if data.class_names is not None:
        arrays["class_names"] = np.array(data.class_names, dtype=np.str_)
    for name, texts in data.by_record().items():
        arrays[name] = np.array(texts, dtype=np.str_)
    try:
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)
    except OSError as error:
        raise LocalError(f"{path}: cannot write it: {reason(error)}") from error


def bundled(name: Literal["digits", "diabetes", "breast_cancer"]) -> Any:
    """A set that comes with scikit-learn, as that returns it.

    LocalError where scikit-learn is not installed.
    """
    try:
        from sklearn import datasets  # noqa: PLC0415 - two seconds of import, and an extra
    except ModuleNotFoundError as error:
        if error.name != "sklearn":
            raise  # scikit-learn is there, and lacks something of its own
        raise LocalError(
            f"the {name.replace('_', ' ')} records come with scikit-learn, which is not installed;"
            " pip install 'staddle[examples]'"
        ) from error
    return getattr(datasets, f"load_{name}")()


@cache
def _digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    bunch = bundled("digits")  # a text that takes 20 ms to parse
    # scikit-learn has pixels of 0 … 16.
    return (bunch.images / 16).astype(np.float32), bunch.target.astype(np.int64)


def digits() -> Dataset:
    """The 1,797 handwritten digits bundled with scikit-learn: x [1797, 1, 8, 8] in 0…1, y 0…9.

    They are in scikit-learn's order.
    """
    x, y = _digits()
    return Dataset(torch.from_numpy(x.copy()[:, None]), torch.from_numpy(y.copy()))


def split(data: Dataset, key: bytes, test_fraction: float) -> tuple[Dataset, Dataset]:
    """Training and test records; a keyed hash of a record's id decides its side.

    Records that have groups are drawn by their group in place of their id, so a group is on one
    side; records without either are drawn by their index.

    With ids, a record keeps its side whatever happens to the others, and two records of one id are
    on one side. Without ids, only records appended at the end leave the sides as they are. Nobody
    can tell a record's side without the key.
    """
    check_local(
        0 < test_fraction < 1,
        f"test_fraction = {test_fraction}: choose a value between 0 and 1, such as 0.25",
    )
    # Without a secret key anybody could compute which records are for testing.
    if not key:
        raise LocalError("the split needs a key; give a few random bytes that stay at this silo")

    # By hash and not by a shuffle: records that come or go later must not move others from one
    # side to the other, or the model would be tested on records that it has trained on.
    # Hashes are uniform in 0 … 2^64 − 1, so a share of test_fraction is below the threshold.
    threshold = int(test_fraction * 2**64)
    # By group if there are any: records of one group must be on one side.
    drawn = data.groups or data.ids or range(len(data))
    tested = np.array([_draw(key, record) < threshold for record in drawn], dtype=bool)

    if tested.all():
        raise LocalError(
            f"test_fraction = {test_fraction} leaves no training record out of {len(data)}; "
            "lower it or add records"
        )
    check_local(
        bool(tested.any()),
        f"test_fraction = {test_fraction} leaves no test record out of {len(data)}; "
        "raise it or add records",
    )
    return data.take(np.flatnonzero(~tested)), data.take(np.flatnonzero(tested))


def _draw(key: bytes, record: int | str) -> int:
    if isinstance(record, int):
        message = SPLIT_DOMAIN + record.to_bytes(8, "little")
    else:
        # An id may be a file name, which may hold surrogates.
        message = SPLIT_ID_DOMAIN + record.encode("utf-8", "surrogatepass")
    digest = hmac.new(key, message, hashlib.sha256).digest()
    # 64 bits, to compare with the threshold of ``split``.
    return int.from_bytes(digest[:8], "little")
