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

import math
import struct
import warnings
from pathlib import Path
from threading import Lock
from typing import Annotated, Literal, NamedTuple

import numpy as np
import pydantic
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from pydantic import Field

from ....errors import LocalError
from ....files.file_bounds import check_fits, open_regular
from ...models.registry import Shape
from ..dataset import Dataset
from ..options import ImageFiles, Names

FORMATS = ("PNG", "JPEG")  # no other decoder of Pillow's is reached
SUFFIXES = (".png", ".jpg", ".jpeg")
MOST_PIXELS = 64 * 2**20  # a small file can claim any size: it is asked before a pixel is decoded
# Pillow's mode → read as
MODES = {"1": "L", "L": "L", "P": "RGB", "RGB": "RGB", "I;16": "I;16", "I;16B": "I;16"}
OPENING = Lock()  # what warnings do is the process's, and silos of a simulation read in threads
FAULTS = (OSError, EOFError, SyntaxError, ValueError, TypeError, IndexError, KeyError, struct.error)


class Images(ImageFiles):
    """``kind = "images"``."""

    kind: Literal["images"]
    folder: Path
    classes: Annotated[tuple[str, ...], Field(min_length=2)] | None = None
    """The sub-folders in the order of the labels, one that this silo has no images of included.

    Else by name.
    """
    class_names: Names | None = None
    """What the job calls them, where that is something else."""
    subset: bool = False
    """Sub-folders that are not among the classes are left out; else they are an error."""
    domains: Names | None = None
    """The folders whose sub-folders are the classes' folders.

    Left out, those lie in the folder itself.
    """
    resize: bool = False

    @pydantic.model_validator(mode="after")
    def _distinct(self) -> "Images":
        for name, folders in (("classes", self.classes or ()), ("domains", self.domains or ())):
            if len(set(folders)) < len(folders):
                raise ValueError(f"{name}: a folder is there twice; name each once")
        if self.subset and self.classes is None:
            raise ValueError(
                "subset leaves out what is not in classes; name the classes, or leave subset out"
            )
        return self

    def lacking(self) -> str | None:
        """The folders of the classes, or those of the declared domains."""
        folders = [self.folder / domain for domain in self.domains or ()]
        if self.folder.exists() and all(folder.is_dir() for folder in folders):
            return None
        domains = f"/{{{','.join(self.domains)}}}" if self.domains else ""
        return f"{self.folder}{domains}/CLASS/*.png"

    def read_at(self, shape: Shape) -> Dataset:
        """Images in the order of domains, classes and names.

        A record's id is its path in the folder.
        """
        if shape[0] not in (1, 3):
            raise LocalError(
                f"{self.folder}: images have 1 or 3 channels, the job's model takes {shape[0]}"
            )
        try:
            classes, found = self._listed()
        except OSError as error:
            raise LocalError(
                f"{error.filename or self.folder}: cannot read it: {error.strerror or error}"
            ) from error
        x = blank(self.folder, len(found), shape)
        for record, image in enumerate(found):
            x[record] = read_pixels(image.path, shape, self.resize)
        labels = [image.label for image in found]
        domains = tuple(image.domain for image in found)
        return Dataset(
            self.normalised(torch.from_numpy(x), str(self.folder)),
            torch.tensor(labels, dtype=torch.int64),
            self.class_names or classes,
            tuple(image.path.relative_to(self.folder).as_posix() for image in found),
            None if self.domains is None else domains,
        )

    def _listed(self) -> tuple[tuple[str, ...], list["_ImageFile"]]:
        """The classes and the files of their images, domain by domain."""
        roots = [self.folder / domain for domain in self.domains or ("",)]
        there: set[str] = set()
        for root in roots:
            there.update(_classes(self, root))
        classes = self.classes or tuple(sorted(there))
        found: list[_ImageFile] = []
        for root in roots:
            for label, name in enumerate(classes):
                found += (_ImageFile(path, label, root.name) for path in _images(root / name))
        return classes, found


class _ImageFile(NamedTuple):
    path: Path
    label: int
    domain: str


def _classes(table: Images, root: Path) -> list[str]:
    """The classes' folders there."""
    entries = sorted(path for path in root.iterdir() if not path.name.startswith("."))
    declared = () if table.subset else table.classes or ()  # a subset leaves the others out
    for path in entries:
        if not path.is_dir():
            raise LocalError(
                f"{path}: lies beside the classes' folders; move it into one of them, or away"
            )
        if declared and path.name not in declared:
            raise LocalError(
                f"{path}: is not in data.classes ({', '.join(declared)}); add it, or move it away"
            )
    return [path.name for path in entries]


def _images(folder: Path) -> list[Path]:
    """All files below a folder, which may be absent, by name.

    One that is no image is an error, unless hidden.
    """
    files = [
        path for path in folder.rglob("*") if not path.is_dir() and not path.name.startswith(".")
    ]
    for path in files:
        if path.suffix.lower() not in SUFFIXES:
            raise LocalError(
                f"{path}: is not a {' or '.join(FORMATS)} by its name; convert it, or move it away"
            )
    return sorted(files, key=lambda path: path.as_posix())


def blank(folder: Path, records: int, shape: Shape) -> NDArray[np.float32]:
    """Room for so many images [records, channels, height, width].

    LocalError where the memory is too small for it.
    """
    size = records * math.prod(shape) * np.dtype(np.float32).itemsize
    # again for the split
    check_fits(folder, 2 * size, f"{records:,} images of {' x '.join(map(str, shape))}")
    return np.empty((records, *shape), np.float32)


def read_pixels(path: Path, shape: Shape, resize: bool) -> NDArray[np.float32]:
    """One image as [channels, height, width] in 0 … 1."""
    try:
        with open_regular(path) as file:
            # of an image above half its limit Pillow warns; ours is lower
            with OPENING, warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                opened = Image.open(file, formats=FORMATS)  # reads its header alone
            with opened as image:
                return _converted(path, image, shape, resize)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise LocalError(_too_large(path)) from error
    except FAULTS as error:
        raise LocalError(f"{path}: cannot read it as PNG or JPEG: {error}; replace it") from error


def _converted(path: Path, image: Image.Image, shape: Shape, resize: bool) -> NDArray[np.float32]:
    channels, height, width = shape
    if image.width * image.height > MOST_PIXELS:
        raise LocalError(_too_large(path))
    if image.mode not in MODES or "transparency" in image.info:
        raise LocalError(
            f"{path}: mode {image.mode}, with transparency or unusual colours; store it as grey"
            " or RGB"
        )
    upright = ImageOps.exif_transpose(image)  # as a viewer shows it
    mode = MODES[upright.mode]
    if mode == "I;16":  # convert() would cut 16 bits off at 255
        flat = Image.fromarray(np.asarray(upright).astype(np.float32) / 65535)
    else:
        flat = upright.convert("L" if channels == 1 else "RGB")
    if flat.size != (width, height):
        if not resize:
            raise LocalError(
                f"{path}: {flat.width} x {flat.height} pixels, the job's model takes {width} x"
                f" {height}; resize it, or set data.resize = true"
            )
        flat = flat.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(flat, dtype=np.float32).reshape(height, width, -1).transpose(2, 0, 1)
    return np.broadcast_to(pixels if mode == "I;16" else pixels / np.float32(255), shape)


def _too_large(path: Path) -> str:
    size = path.stat().st_size
    return (
        f"{path}, holds {size:,} bytes: claims more than {MOST_PIXELS:,} pixels; scale it down, or"
        " replace it"
    )
