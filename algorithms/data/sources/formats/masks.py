"""Images with a mask each, which says the class of every pixel.

::

    <folder>/images/visit-2/0001.jpg
    <folder>/masks/visit-2/0001.png     the same name, whatever the ending
    <folder>/images/visit-3.nii.gz      a volume, or a folder of DICOM slices
    <folder>/masks/visit-3.nii.gz

A mask's pixels are its classes' numbers, or values that the table lists: 0 and 255 are usual for
two classes. A mask is a PNG, grey or of a palette, whose indices count; JPEG would change it. A
volume's mask is NIfTI on the same grid.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from PIL.ExifTags import Base
from pydantic import Field

from .....errors import LocalError, check_local
from .....files.file_bounds import check_fits
from ....models.class_names import names_fault
from ....models.registry import Shape
from ...dataset import Dataset
from ...new_records import NewRecords
from ...options import COPIES, Names
from .image_files import (
    ImageFolder,
    image_files,
    is_scan,
    is_volume,
    listing,
    read_images,
    read_scan,
    relative_ids,
    size_of,
    stem,
)
from .labelled import check_distinct
from .pictures import decoded
from .scans import Scan

MOST_CLASS = 255
ORIENTATION = Base.Orientation
Value = Annotated[int, Field(strict=True, ge=0, le=MOST_CLASS)]
MODES = ("1", "L", "P")  # Pillow's, whose pixels are numbers of eight bits
NO_CLASS = MOST_CLASS + 1
LEVEL = 0.1  # of a voxel, by which a mask may lie off
LISTS = ("class_names", "values")  # of which each has an entry per class
# By Pillow's mode: what to do about a value that is none of those that the table lists.
CORRECT = "add it, or correct the mask"
FIXES = {
    "1": "its pixels have one bit, 0 or 1: store all masks alike, with 8 bits per pixel, or where"
    " all have one bit, say data.values = [0, 1]"
}


class Masks(ImageFolder):
    """``kind = "masks"``."""

    kind: Literal["masks"]
    values: Annotated[tuple[Value, ...] | None, Field(min_length=2)] = None
    """What a mask has for the classes 0, 1, …; default: those numbers themselves."""
    class_names: Names | None = None
    """The job's names for the classes."""

    @pydantic.model_validator(mode="after")
    def _distinct(self) -> "Masks":
        check_distinct("values", list(map(str, self.values or ())))
        names = self.class_names or ()
        if names and (fault := names_fault(names, len(self.values or names), *LISTS)):
            raise ValueError(fault)
        return self

    def check_present(self) -> None:
        """Also the two folders below it."""
        super().check_present()
        if self.lacking() is not None:
            raise LocalError(
                f"{self.folder}: images/ and masks/ are expected in this folder; make both, or"
                " correct data.folder"
            )

    def new_records(self, data: Path, shape: Shape, rows: int) -> Iterator[NewRecords]:
        """All images below a folder: of one with masks, as for a silo, those in ``images/``."""
        labelled = self.model_copy(update={"folder": data}).lacking() is None
        return super().new_records((data, data / "images")[labelled], shape, rows)

    def lacking(self) -> str | None:
        """The two folders."""
        both = self.folder / "images", self.folder / "masks"
        return None if all(map(Path.is_dir, both)) else f"{self.folder}/{{images,masks}}/*.png"

    def read_at(self, shape: Shape) -> Dataset:
        """Images and masks in the order of their names; a record's id is its image's path.

        Masks are in memory, images too unless ``lazy``.
        """
        self.check_shape(shape)
        with listing(self.folder):
            images, masks = self._pairs(is_volume(shape))
            sizes = list(map(size_of, images))
        sides = len(images), *shape[1:]
        what = f"{len(images):,} masks of {' x '.join(map(str, shape[1:]))}"
        check_fits(self.folder, COPIES * math.prod(sides), what)
        y = np.empty(sides, np.uint8)
        for record, path in enumerate(masks):
            y[record] = self._mask(path, images[record], shape)
        ids = relative_ids(self.folder / "images", images)
        identity = partial(self.identity, self.folder, images, sizes)
        return Dataset(
            read_images(self, images, shape, identity),
            torch.from_numpy(y),
            self.class_names,
            ids,
            groups=self.groups_of(ids),
        )

    def examine(self) -> str:
        """How many pairs there are, and their classes; each mask is read, of images the header."""
        held = np.zeros(NO_CLASS, bool)
        names = len(self.class_names or held)
        with listing(self.folder):
            # Masks of volumes are NIfTI, so folders of slices are volumes where there are any.
            images, masks = self._pairs(any((self.folder / "masks").rglob("*.nii*")))
        for image, mask in zip(images, masks, strict=True):
            classes = self._classes(mask, image).values.astype(np.int64)
            if (largest := classes.max()) >= names:
                raise LocalError(
                    f"{mask}: has class {largest}, and data.class_names has {names} names, from"
                    " class 0 on; name each class, or say in data.values what masks have for them"
                )
            held[classes] = True
        found = ", ".join(map(str, np.flatnonzero(held)))
        return f"{len(images):,} images with a mask each, whose classes are {found}"

    def _pairs(self, volumes: bool) -> tuple[list[Path], list[Path]]:
        """Images, and the mask of each."""
        self.check_present()
        images, masks = self._named("images", volumes), self._named("masks", volumes)
        for own, other, what in ((images, masks, "mask"), (masks, images, "image")):
            if lone := sorted(own.keys() - other.keys()):
                raise LocalError(
                    f"{own[lone[0]]}: has no {what} of its name; add it, or move it away"
                    f" ({len(lone):,} in all)"
                )
        if not images:
            raise LocalError(
                f"{self.folder}: images/ and masks/ are empty; put each image in images/, and its"
                " mask of the same name in masks/"
            )
        return list(images.values()), list(map(masks.__getitem__, images))

    def _named(self, part: str, volumes: bool) -> dict[Path, Path]:
        """The files of a folder by their names without ending."""
        root, found = self.folder / part, dict[Path, Path]()
        for path in image_files(root, volumes):
            first = found.setdefault(stem(path.relative_to(root)), path)
            check_local(first == path, f"{path}: {first.name} has the same name; keep one of them")
        return found

    def _mask(self, path: Path, of: Path, shape: Shape) -> NDArray[np.uint8]:
        """Class numbers [(depth,) height, width] of a record."""
        classes = self._classes(path, of)
        if is_scan(of):
            return self.fit.classes(path, classes, shape)
        whole = Image.fromarray(classes.values[0, 0].astype(np.uint8))
        return np.asarray(self._sized(path, whole, shape))

    def _classes(self, path: Path, of: Path) -> Scan:
        """Class numbers [1, z, height, width] of a mask, in the size of its image."""
        if not is_scan(of):
            return self._of_picture(path, of)
        image = read_scan(of, values=False)
        mask, fix = (read_scan(path), CORRECT) if is_scan(path) else _drawn(path)
        if (image.place is None) != (mask.place is None) or len(mask.values) > 1:
            raise LocalError(
                f"{path}: is no mask of {of.name}; give NIfTI for a volume, a PNG for a slice"
            )
        _check_lies_there(path, mask, image)
        # In its image's spacing: one that differs by rounding could give it another size.
        return replace(image, values=self._numbered(path, mask.values, fix))

    def _of_picture(self, path: Path, of: Path) -> Scan:
        """The classes of a picture's mask, which may be turned as the picture is."""
        with decoded(of) as image:
            size, turned = image.size, image.getexif().get(ORIENTATION, 1)
        with decoded(path) as mask:
            if (mask.size, mask.getexif().get(ORIENTATION, 1)) != (size, turned):
                raise LocalError(
                    f"{path}: {mask.width} x {mask.height} pixels, its image {size[0]} x {size[1]};"
                    " give them one size and, in Exif, one orientation"
                )
        drawn, fix = _drawn(path)
        return replace(drawn, values=self._numbered(path, drawn.values, fix))

    def _numbered(self, path: Path, values: NDArray[np.float32], fix: str) -> NDArray[np.float32]:
        """The classes of a mask's values; LocalError with ``fix`` for one that is none."""
        numbers = values.clip(0, MOST_CLASS).astype(np.uint8)
        check_local(
            np.array_equal(numbers, values),
            f"{path}: holds more than the whole numbers 0 to {MOST_CLASS}; correct it",
        )
        if self.values is None:
            return values
        table = np.full(MOST_CLASS + 1, NO_CLASS, np.int64)
        table[list(self.values)] = np.arange(len(self.values))
        classes = table[numbers]
        if (unknown := classes == NO_CLASS).any():
            raise LocalError(
                f"{path}: has the value {int(numbers[unknown][0])}, which is not in data.values"
                f" ({', '.join(map(str, self.values))}); {fix}"
            )
        return classes.astype(np.float32)

    def _sized(self, path: Path, image: Image.Image, shape: Shape) -> Image.Image:
        height, width = shape[1:]
        if image.size == (width, height):
            return image
        if not self.resize:
            raise LocalError(
                f"{path}: {image.width} x {image.height} pixels, the job's model takes {width} x"
                f" {height}; resize it, or set data.resize = true"
            )
        # Between two classes there is none.
        return image.resize((width, height), Image.Resampling.NEAREST)


def _drawn(path: Path) -> tuple[Scan, str]:
    """A picture as a mask, upright, and what to do about a value that no class has."""
    with decoded(path) as mask:
        _check_mask(path, mask)
        upright = np.asarray(ImageOps.exif_transpose(mask)).astype(np.float32)
        return Scan(upright[None, None], None), FIXES.get(mask.mode, CORRECT)


def _check_lies_there(path: Path, mask: Scan, image: Scan) -> None:
    """LocalError unless a mask has its image's size and lies in its image's place."""
    sides = image.values.shape[1:]
    if mask.values.shape[1:] != sides:
        raise LocalError(
            f"{path}: {' x '.join(map(str, mask.values.shape[1:]))} values, its image"
            f" {' x '.join(map(str, sides))}; draw it on the image's grid"
        )
    if mask.place is None or image.place is None:
        return
    # By the corners, x before y and z.
    ends = np.array(list(product(*((0, side - 1) for side in reversed(sides)), (1,)))).T
    apart = np.abs((mask.place - image.place) @ ends).max()
    if apart > LEVEL * min(image.spacing or (1.0,)):
        raise LocalError(f"{path}: lies {apart:.2f} mm from its image; draw it on the image's grid")


def _check_mask(path: Path, mask: Image.Image) -> None:
    """LocalError for a mask whose pixels are not the numbers that were stored."""
    check_local(
        mask.format == "PNG",
        f"{path}: is a {mask.format}, and masks are PNG; convert it without loss",
    )
    check_local(
        mask.mode in MODES,
        f"{path}: mode {mask.mode}; store one number per pixel, grey or of a palette",
    )
    # Pillow spreads grey of two and four bits over 0 … 255.
    tiles = getattr(mask, "tile", ())  # of files alone
    if mask.mode == "L" and any(tile[3] != "L" for tile in tiles):
        raise LocalError(f"{path}: has 2 or 4 bits per pixel; store 8, or a palette")
