"""Images in one folder a class.

::

    <folder>/benign/0001.png
    <folder>/benign/visit-2/0001.png    sub-folders of a class belong to it
    <folder>/malignant/0002.jpg

With domains, as in DomainNet (Peng et al., 2019, arXiv:1812.01754), one folder a domain holds one
folder a class, and an image's source is its domain::

    <folder>/sketch/zebra/0001.png

Pixels become 0 … 1: 8-bit grey and colour, 16-bit grey. Colour is turned into grey and grey into
colour as the job's model asks; nothing is done to an image with transparency or of four printing
colours but to name it.
"""

import hashlib
import itertools
import math
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Annotated, Literal

import numpy as np
import pydantic
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from pydantic import Field
from torch import Tensor

from .....errors import LocalError, reason
from .....files.file_bounds import check_fits, open_regular
from ....models.registry import Shape
from ...dataset import Dataset
from ...lazy import LazyRecords
from ...options import ImageFiles, Names, OneByOne

FORMATS = ("PNG", "JPEG")  # no other decoder of Pillow's is reached
SUFFIXES = (".png", ".jpg", ".jpeg")
MOST_PIXELS = 64 * 2**20  # a small file can claim any size: checked before a pixel is decoded
# Pillow's mode → read as
MODES = {"1": "L", "L": "L", "P": "RGB", "RGB": "RGB", "I;16": "I;16", "I;16B": "I;16"}
COLOURS = {1: "L", 3: "RGB"}  # Pillow's mode by the channels that a model takes
OPENING = Lock()  # what warnings do is the process's, and silos of a simulation read in threads
# Pillow's decoders raise any of these for a damaged file.
FAULTS = (OSError, EOFError, SyntaxError, ValueError, TypeError, IndexError, KeyError, struct.error)


class ImageFolder(ImageFiles, OneByOne):
    """Images below a folder, in memory or read when they are used."""

    folder: Path
    resize: bool = False


class Images(ImageFolder):
    """``kind = "images"``."""

    kind: Literal["images"]
    classes: Annotated[tuple[str, ...], Field(min_length=2)] | None = None
    """The sub-folders in the order of the labels, one that this silo has no images of included.

    Else by name.
    """
    class_names: Names | None = None
    """The job's names for the classes, where they differ."""
    subset: bool = False
    """Sub-folders that are not among the classes are left out; else they are an error."""
    domains: Names | None = None
    """The folders whose sub-folders are the classes' folders.

    Left out, those lie in the folder itself.
    """

    @pydantic.model_validator(mode="after")
    def _distinct(self) -> "Images":
        # A folder named twice would give each of its images twice, under two labels or domains.
        for key in ("classes", "domains"):
            folders = getattr(self, key) or ()
            if len(set(folders)) < len(folders):
                raise ValueError(f"{key}: a folder is listed twice; name each once")
        if self.subset and self.classes is None:
            raise ValueError(
                "subset leaves out what is not in classes; name the classes, or leave subset out"
            )
        return self

    def lacking(self) -> str | None:
        """The folders of the classes, or those of the declared domains."""
        if self.domains is None:
            return None if self.folder.exists() else f"{self.folder}/CLASS/*.png"
        if all(root.is_dir() for root in self._roots()):
            return None
        return f"{self.folder}/{{{','.join(self.domains)}}}/CLASS/*.png"

    def examine(self) -> str:
        """How many images and classes there are; no image is opened."""
        with listing(self.folder):
            classes, found = self._find()
        if not found.paths:
            raise LocalError(
                f"{self.folder}: has no images; give each class a folder with its own, as"
                f" {self._roots()[0]}/CLASS/*.png"
            )
        return f"{len(found.paths):,} images, {len(classes)} classes"

    def _roots(self) -> list[Path]:
        """The folders that hold the classes' folders: one per domain, or the folder itself."""
        return [self.folder / domain for domain in self.domains or ("",)]

    def read_at(self, shape: Shape) -> Dataset:
        """Images in the order of domains, classes and names.

        A record's id is its path in the folder.
        """
        # Checked before any file is opened, since no image can have another number of channels.
        check_shape(self.folder, shape)
        with listing(self.folder):
            classes, found = self._find()
        return Dataset(
            read_images(self, found.paths, shape, partial(self._identity, found)),
            torch.tensor(found.labels, dtype=torch.int64),
            self.class_names or classes,
            relative_ids(self.folder, found.paths),
            # Domains are the records' sources, by which a partition can deal them.
            None if self.domains is None else tuple(found.domains),
        )

    def _identity(self, found: "_Found") -> str:
        """What tells two folders of images apart without decoding them: names, sizes, constants."""
        digest = listing_digest(self.folder, found.paths, found.sizes)
        return f"images {digest} {self.mean} {self.std} {self.resize}"

    def _find(self) -> "tuple[tuple[str, ...], _Found]":
        """The classes, and the images in the order of domains, classes and names."""
        roots = self._roots()
        present: set[str] = set()
        for root in roots:
            present.update(_class_folders(self, root))
        # Sorted, so that undeclared classes get the same labels on every machine.
        classes = self.classes or tuple(sorted(present))

        found = _Found([], [], [], [])
        for root, (label, name) in itertools.product(roots, enumerate(classes)):
            paths = image_files(root / name)
            found.paths.extend(paths)
            found.sizes.extend(map(size_of, paths))
            found.labels.extend([label] * len(paths))
            found.domains.extend([root.name] * len(paths))
        return classes, found


@contextmanager
def listing(folder: Path) -> Iterator[None]:
    """LocalError in place of what the system says: a folder may be unreadable, or vanish."""
    try:
        yield
    except OSError as error:
        raise LocalError(f"{error.filename or folder}: cannot read it: {reason(error)}") from error


class ImageReader:
    """Reads one image after another; each process has its own."""

    def __init__(self, table: ImageFolder, paths: Sequence[Path], shape: Shape) -> None:
        self._table, self._paths, self._shape = table, paths, shape

    def __call__(self, place: int) -> tuple[Tensor]:
        """The image at a place, [channels, height, width]."""
        pixels = read_pixels(self._paths[place], self._shape, self._table.resize)
        record = torch.from_numpy(np.array(pixels))[None]
        return (self._table.normalised(record, self._table.where)[0],)


def read_images(
    table: ImageFolder, paths: Sequence[Path], shape: Shape, identity: Callable[[], str]
) -> Tensor | LazyRecords:
    """Images [N, *shape], which are read now unless the table is ``lazy``.

    ``identity`` tells lazy ones from others. LocalError as of ``read_pixels``, or where they do not
    fit the memory.
    """
    count, size = len(paths), math.prod(shape) * np.dtype(np.float32).itemsize
    table.check_fits(count * size, f"{count:,} images of {' x '.join(map(str, shape))}")
    # First: a wrong number of constants is no fault of an image.
    table.normalised(torch.zeros(1, *shape), table.where)
    opened = partial(ImageReader, table, paths, shape)
    x = LazyRecords.of(opened, count, shape, table.workers, table.where, identity)
    return x if table.lazy else x.whole()


@dataclass(frozen=True)
class _Found:
    """Images that a folder holds, one entry per image in each list."""

    paths: list[Path]
    sizes: list[int]  # in bytes
    labels: list[int]
    domains: list[str]


def size_of(path: Path) -> int:
    """Bytes of a file."""
    return path.stat().st_size


def listing_digest(folder: Path, paths: Sequence[Path], sizes: Sequence[int]) -> str:
    """SHA-256 in hex of files' paths in a folder and their sizes."""
    digest = hashlib.sha256()
    for name, size in zip(relative_ids(folder, paths), sizes, strict=True):
        digest.update(f"{name}\0{size}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()


def _class_folders(table: Images, root: Path) -> list[str]:
    names = []
    for path in sorted(root.iterdir()):
        if path.name.startswith("."):
            continue
        if not path.is_dir():
            raise LocalError(
                f"{path}: lies next to the classes' folders; move it into one of them, or away"
            )
        declared = table.classes or (path.name,)
        if path.name not in declared and not table.subset:
            # Otherwise a misspelt class would silently lose its images.
            raise LocalError(
                f"{path}: is not in data.classes ({', '.join(declared)}); add it, or move it away"
            )
        names.append(path.name)
    return names


def image_files(folder: Path) -> list[Path]:
    """All files below a folder, which may be absent, by name.

    One that is no image is an error, unless hidden.
    """
    files = []
    # Images in sub-folders of a class belong to it, too.
    for path in folder.rglob("*"):
        if path.is_dir() or path.name.startswith("."):
            continue
        if path.suffix.lower() not in SUFFIXES:
            raise LocalError(
                f"{path}: is not a {' or '.join(FORMATS)} by its name; convert it, or move it away"
            )
        files.append(path)
    # As text with slashes, which sorts the same on every system.
    return sorted(files, key=lambda path: path.as_posix())


def relative_ids(folder: Path, paths: Sequence[Path]) -> tuple[str, ...]:
    """Ids of images: their paths in the folder.

    They have slashes on every system, so ids do not depend on it.
    """
    return tuple(path.relative_to(folder).as_posix() for path in paths)


def check_shape(folder: Path, shape: Shape) -> None:
    """LocalError unless records of this shape can be made of images."""
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise LocalError(
            f"{folder}: images are [channels, height, width] with 1 or 3 channels, the job's model"
            f" takes {list(shape)}"
        )


def read_all(folder: Path, paths: Sequence[Path], shape: Shape, resize: bool) -> Tensor:
    """All images as [records, channels, height, width] in 0 … 1.

    They are float32. LocalError if they do not fit the memory, or one image cannot be read; it
    names the file.
    """
    records = len(paths)
    size = records * math.prod(shape) * np.dtype(np.float32).itemsize
    # Twice: the split copies every record.
    check_fits(folder, 2 * size, f"{records:,} images of {' x '.join(map(str, shape))}")
    # Filled in place: stacking a list would need the memory twice.
    x = np.empty((records, *shape), np.float32)
    for record, path in enumerate(paths):
        x[record] = read_pixels(path, shape, resize)
    return torch.from_numpy(x)


def read_pixels(path: Path, shape: Shape, resize: bool) -> NDArray[np.float32]:
    """One image as [channels, height, width] in 0 … 1.

    It is float32. LocalError for a file that is not a PNG or JPEG, has too many pixels, or without
    ``resize`` has another size.
    """
    with decoded(path) as image:
        return _converted(path, image, shape, resize)


@contextmanager
def decoded(path: Path) -> Iterator[Image.Image]:
    """A PNG or JPEG, of which only the header is read yet.

    LocalError for another file or one with too many pixels, and in place of what its decoder
    raises.
    """
    try:
        with open_regular(path) as file:
            # Pillow warns of an image above half its limit; ours is lower.
            with OPENING, warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                opened = Image.open(file, formats=FORMATS)  # reads its header alone
            with opened as image:
                # A small file can claim any size, and decoding allocates it.
                if image.width * image.height > MOST_PIXELS:
                    raise LocalError(_too_large(path))
                yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise LocalError(_too_large(path)) from error
    except FAULTS as error:
        raise LocalError(f"{path}: cannot read it as PNG or JPEG: {error}; replace it") from error


def _converted(path: Path, image: Image.Image, shape: Shape, resize: bool) -> NDArray[np.float32]:
    channels, height, width = shape
    if image.mode not in MODES or "transparency" in image.info:
        raise LocalError(
            f"{path}: mode {image.mode}, with transparency or unusual colours; store it as grey"
            " or RGB"
        )
    upright = ImageOps.exif_transpose(image)  # as a viewer shows it
    highest = np.float32(255)
    # convert() would cut 16 bits off at 255.
    if MODES[upright.mode] == "I;16":
        flat = Image.fromarray(np.asarray(upright).astype(np.float32) / 65535)
        highest = np.float32(1)
    else:
        flat = upright.convert(COLOURS[channels])
    if flat.size != (width, height):
        if not resize:
            raise LocalError(
                f"{path}: {flat.width} x {flat.height} pixels, the job's model takes {width} x"
                f" {height}; resize it, or set data.resize = true"
            )
        flat = flat.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(flat, dtype=np.float32).reshape(height, width, -1).transpose(2, 0, 1)
    # A 16-bit grey image has one channel; it is repeated for a model that takes three.
    return np.broadcast_to(pixels / highest, shape)


def _too_large(path: Path) -> str:
    size = path.stat().st_size
    return (
        f"{path}, holds {size:,} bytes: claims more than {MOST_PIXELS:,} pixels; scale it down, or"
        " replace it"
    )
