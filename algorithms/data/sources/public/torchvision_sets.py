"""Public sets in torchvision's layouts, from a folder; nothing is ever downloaded.

CIFAR-10 and CIFAR-100 are read from their official binary layouts where these are there, without
torchvision. Their Python layouts are pickles, which torchvision opens only where their MD5 is the
official one.

USPS is read from ``usps.npz`` where that is there: arrays x_train, y_train, x_test and y_test of
the files zip.train and zip.test (Hastie, Tibshirani & Friedman, The Elements of Statistical
Learning), pixels of -1 … 1, which become 8 bits as in torchvision. LIBSVM's usps.t.bz2, which
torchvision reads, is another smoothing of the test records: never mix them.

EMNIST's images are left as they are stored, transposed; labels of its split "letters" count from 1
there, from 0 here.
"""

import bz2
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

import numpy as np
import pydantic
import torch
from numpy.typing import NDArray

from .....errors import LocalError, reason
from .....files.file_bounds import check_fits, open_regular
from ....models.registry import Shape
from ....models.torchvision_import import torchvision
from ...arrays import read_arrays
from ...dataset import Dataset
from ...options import Pixels, Shared

FAULTS = (
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AssertionError,
)

Part = Literal["train", "test"]
Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]  # pixels [N, channels, height, width], labels


@dataclass(frozen=True)
class Layout:
    """The shape of a set's records, and the files of its folder."""

    shape: Shape
    files: str
    # paths of which one is there where the set is; SPLIT stands for EMNIST's
    signs: tuple[str, ...]
    by_part: bool = False  # torchvision asks for the part by name


IDX = "raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"
FIRST = "raw/train-images-idx3-ubyte"
SETS = {
    "MNIST": Layout((1, 28, 28), f"MNIST/{IDX}", (f"MNIST/{FIRST}",)),
    "FashionMNIST": Layout((1, 28, 28), f"FashionMNIST/{IDX}", (f"FashionMNIST/{FIRST}",)),
    "KMNIST": Layout((1, 28, 28), f"KMNIST/{IDX}", (f"KMNIST/{FIRST}",)),
    "EMNIST": Layout(
        (1, 28, 28),
        "EMNIST/raw/emnist-SPLIT-{train,test}-{images-idx3,labels-idx1}-ubyte",
        ("EMNIST/raw/emnist-SPLIT-train-images-idx3-ubyte",),
    ),
    "CIFAR10": Layout(
        (3, 32, 32),
        "cifar-10-batches-bin/{data_batch_1 … 5,test_batch}.bin, or cifar-10-batches-py",
        ("cifar-10-batches-bin", "cifar-10-batches-py"),
    ),
    "CIFAR100": Layout(
        (3, 32, 32),
        "cifar-100-binary/{train,test}.bin, or cifar-100-python",
        ("cifar-100-binary", "cifar-100-python"),
    ),
    "SVHN": Layout((3, 32, 32), "{train,test}_32x32.mat", ("train_32x32.mat",), by_part=True),
    "USPS": Layout((1, 16, 16), "usps.npz, or usps.bz2 and usps.t.bz2", ("usps.npz", "usps.bz2")),
}
Name = Literal["MNIST", "FashionMNIST", "KMNIST", "EMNIST", "CIFAR10", "CIFAR100", "SVHN", "USPS"]
BINARY: dict[str, dict[Part, tuple[str, ...]]] = {
    "CIFAR10": {
        "train": tuple(f"cifar-10-batches-bin/data_batch_{n}.bin" for n in range(1, 6)),
        "test": ("cifar-10-batches-bin/test_batch.bin",),
    },
    "CIFAR100": {"train": ("cifar-100-binary/train.bin",), "test": ("cifar-100-binary/test.bin",)},
}
USPS_FILE = "usps.npz"
# Copies of all pixels as bytes; bytes per pixel of the share as float32, twice while it is split.
BYTE_COPIES, PIXEL_BYTES = 3, 8
MOST_UNPACKED = 2**30  # of a packed file: the official ones unpack to 30 MB
# before a record's pixels; the last is its class, the other a coarse one
LABEL_BYTES = {"CIFAR10": 1, "CIFAR100": 2}


PARTS: dict[str, tuple[Part, ...]] = {
    "train": ("train",),
    "test": ("test",),
    "both": ("train", "test"),
}


class Torchvision(Pixels, Shared):
    """``kind = "torchvision"``."""

    shares_folder: ClassVar[bool] = True

    kind: Literal["torchvision"]
    name: Name
    folder: Path
    part: Literal["train", "test", "both"] = "both"
    split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"] | None = None

    @pydantic.model_validator(mode="after")
    def _split_of_emnist(self) -> "Torchvision":
        if (self.name == "EMNIST") != (self.split is not None):
            raise ValueError(
                'split is EMNIST\'s, which needs one, such as "letters"; other sets have none'
            )
        return self

    @property
    def has_official_parts(self) -> bool:
        """Both parts, the training records first."""
        return self.part == "both"

    @property
    def long_title(self) -> str:
        """The set's name, and for EMNIST its split."""
        return f"{self.name} {self.split or ''}".rstrip()

    def lacking(self) -> str | None:
        """The set's official files."""
        # Any one of these layouts is enough.
        layout, split = SETS[self.name], self.split or ""
        for sign in layout.signs:
            path = self.folder / sign.replace("SPLIT", split)
            if path.exists():
                return None
        return f"{self.folder}/{layout.files.replace('SPLIT', split)}"

    def read(self) -> Dataset:
        """The set, or a share of it; a record's id is its official part and its index there."""
        xs, ys = [], []
        ids: list[str] = []
        # ``PARTS`` has training before test, on which ``has_official_parts`` relies.
        for part in PARTS[self.part]:
            x, y = _read(self, part)
            xs.append(x)
            ys.append(y)
            ids.extend(f"{part}/{index}" for index in range(len(y)))
        # Only the share becomes float32, which takes four times the memory of bytes.
        own = self.indices(len(ids))
        pixels = self.from_bytes(np.concatenate(xs)[own], str(self.folder))
        labels = torch.from_numpy(np.concatenate(ys)[own])
        return Dataset(pixels, labels, None, tuple(ids[index] for index in own.tolist()))


def _read(table: Torchvision, part: Part) -> Arrays:
    x, y = _arrays(table, part)
    wanted = SETS[table.name].shape
    if x.dtype != np.uint8 or x.shape != (len(y), *wanted):
        raise LocalError(
            f"{table.folder}: {table.name}, part {part!r}: {len(y)} labels for {x.dtype}"
            f" {list(x.shape)}, not uint8 [N, {', '.join(map(str, wanted))}]; fetch the official"
            " files again"
        )
    return x, y


def _arrays(table: Torchvision, part: Part) -> Arrays:
    """A part's arrays, from a layout that needs no torchvision where that is there."""
    if table.name in BINARY:
        files = [table.folder / file for file in BINARY[table.name][part]]
        if files[0].parent.is_dir():
            return _binary(table, files)
    if table.name == "USPS":
        file = table.folder / USPS_FILE
        if file.is_file():
            return _usps(file, part)
    return _official(table, part)


def _binary(table: Torchvision, files: list[Path]) -> Arrays:
    """CIFAR's binary layout: a label, or a coarse and a fine one, then 3 x 32 x 32 pixels."""
    label_bytes = LABEL_BYTES[table.name]
    row = label_bytes + 3 * 32 * 32
    rows = []
    for file in files:
        try:
            with open_regular(file) as opened:
                check_fits(file, _memory(table, file.stat().st_size), "its records")
                read = np.fromfile(opened, np.uint8)
        except OSError as error:
            raise LocalError(f"{file}: cannot read it: {reason(error)}; fetch it again") from error
        # All records have one length: a remainder means a file cut short, or of another set.
        if not len(read) or len(read) % row:
            raise LocalError(
                f"{file}: {len(read)} bytes are not a whole number of records; fetch the official"
                " file again"
            )
        rows.append(read.reshape(-1, row))
    stacked = np.concatenate(rows)
    labels = stacked[:, label_bytes - 1].astype(np.int64)
    return stacked[:, label_bytes:].reshape(-1, 3, 32, 32), labels


def _usps(file: Path, part: Part) -> Arrays:
    """Arrays of the one file; pixels as torchvision makes them of the same numbers."""
    # All four must be there, whatever part is read.
    arrays = read_arrays(file, ("x_train", "y_train", "x_test", "y_test"))
    x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
    form = (x.dtype.kind, x.ndim, y.dtype.kind)
    # NaN is not within the bound either.
    if form not in (("f", 3, "i"), ("f", 3, "u")) or not (np.abs(x) <= 1).all():
        raise LocalError(
            f"{file}: x_{part} is {x.dtype} {list(x.shape)} and y_{part} {y.dtype} {list(y.shape)};"
            " give pixels of -1 … 1 [N, 16, 16] and labels 0 … 9"
        )
    # 8 bits, as torchvision makes them, so that both files give the same records.
    return ((x[:, None] + 1) / 2 * 255).astype(np.uint8), y.astype(np.int64)


def _check_files(table: Torchvision) -> None:
    """LocalError where torchvision would open what is no file, or what does not fit the memory."""
    for sign in SETS[table.name].signs:
        for file in _files_of(table.folder, Path(sign).parts[0]):
            try:
                with open_regular(file) as opened:
                    size = file.stat().st_size
                    # A packed file is as large in memory as what it unpacks to.
                    if Path(sign).suffix == ".bz2":
                        size = _unpacked(file, opened)
            except OSError as error:
                raise LocalError(
                    f"{file}: cannot read it: {reason(error)}; fetch it again"
                ) from error
            check_fits(file, _memory(table, size), "its records")


def _files_of(folder: Path, first: str) -> Iterator[Path]:
    """The files in the sub-folder ``first``, or those next to a file ``first`` of its suffix."""
    suffix = Path(first).suffix
    paths: Iterable[Path] = ()
    if (folder / first).is_dir():
        paths = (folder / first).rglob("*")
    elif suffix:
        paths = folder.glob(f"*{suffix}")
    for path in paths:
        if not path.is_dir():
            yield path


def _unpacked(file: Path, opened: BinaryIO) -> int:
    """Bytes that a .bz2 file unpacks to, none of which are kept."""
    # A few packed bytes can unpack to terabytes, so counting stops at the bound.
    total = 0
    try:
        with bz2.open(opened) as unpacked:
            while piece := unpacked.read(2**20):
                total += len(piece)
                if total > MOST_UNPACKED:
                    raise LocalError(
                        f"{file}, holds {file.stat().st_size:,} bytes: unpacks to more than"
                        f" {MOST_UNPACKED:,} bytes; fetch the official file again"
                    )
    except (OSError, EOFError):  # torn: torchvision says so
        return total
    return total


def _memory(table: Torchvision, size: int) -> int:
    """Bytes of memory that reading so many bytes of pixels takes at most."""
    _, shares = table.share or (1, 1)
    return size * BYTE_COPIES + size * PIXEL_BYTES // shares


def _official(table: Torchvision, part: Part) -> Arrays:
    layout = SETS[table.name]
    which: dict[str, Any] = {"train": part == "train"}
    labels = "targets"
    if layout.by_part:
        which = {"split": part}
        labels = "labels"
    if table.split is not None:
        which["split"] = table.split

    # torchvision itself opens whatever lies there, a FIFO or more than the memory holds too.
    _check_files(table)
    datasets = torchvision("datasets", f"data set {table.name!r}")
    try:
        found = getattr(datasets, table.name)(table.folder, download=False, **which)
        x = np.asarray(found.data)
        y = np.asarray(getattr(found, labels), dtype=np.int64)
    except FAULTS as error:
        raise LocalError(
            f"{table.folder}: no {table.name}, part {part!r}, that torchvision can read there; "
            f"put the official files there, unpacked: {layout.files}"
        ) from error
    # Grey sets lack the axis of channels.
    if x.ndim == 3:
        x = x[:, None]
    # Some sets have colours last; models take them first.
    if x.shape[-1] == 3:
        x = x.transpose(0, 3, 1, 2)
    # EMNIST's "letters" numbers its classes from 1.
    return x, y - (table.split == "letters")
