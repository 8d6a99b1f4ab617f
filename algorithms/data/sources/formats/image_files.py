"""Folders of images: pictures (PNG, JPEG) and scans (NIfTI, DICOM), one file each.

Where the job's model takes volumes, a folder of DICOM files is one image. Records have the size
that the model takes.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import filterfalse
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pydantic
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from .....errors import LocalError, reason
from ....models.registry import Shape
from ...lazy import LazyRecords
from ...new_records import NewRecords
from ...options import ImageFiles, Number, OneByOne, Positive, SourceTable
from . import dicom, nifti, pictures
from .scans import Fit, Scan

NIFTI = re.compile(r"\.nii(\.gz)?$", re.IGNORECASE)
# Archives leave the ending out, or name a file by its UID.
DICOM = re.compile(r"(\.dcm|\.ima|(^|\.)[0-9]+|^[^.]+)$", re.IGNORECASE)
# Hidden files, the list of files of a DICOM medium, and what Windows, macOS, file servers and file
# systems leave in folders, such as thumbnails and waste bins.
UNSHOWN = re.compile(
    r"\.|(DICOMDIR|Thumbs\.db|ehthumbs(_vista)?\.db|desktop\.ini|Icon\r|__MACOSX|\$RECYCLE\.BIN"
    r"|System Volume Information|@eaDir|#recycle|lost\+found)\Z",
    re.IGNORECASE,
)
ENDING = re.compile(r"\.(nii(\.gz)?|dcm|ima|png|jpe?g)$", re.IGNORECASE)
VOLUME = 4  # sides of a volume's record, channels included
KNOWN = "a PNG, JPEG, NIfTI or DICOM"


class ImageFolder(ImageFiles, OneByOne):
    """Images below a folder, in memory or read when they are used."""

    fills_folder: ClassVar[bool] = True

    folder: Path
    resize: bool = False
    window: tuple[Number, Number] | Literal["each"] | None = None
    """Of scans: the values that become 0 and 1, or ``"each"`` by each scan's own mean."""
    spacing: Annotated[tuple[Positive, ...], Field(min_length=2, max_length=3)] | None = None
    """Of scans: millimetres between the values of a record, along (depth,) height and width."""
    grouped: bool = False
    """Images of one folder, such as a patient's, stay on one side of the split.

    In classes' folders, folders of one name below them are one.
    """

    @pydantic.model_validator(mode="after")
    def _one_size(self) -> "ImageFolder":
        if self.resize and self.spacing is not None:
            raise ValueError("resize and spacing each say how large a scan becomes; leave one out")
        if isinstance(self.window, tuple) and self.window[0] >= self.window[1]:
            raise ValueError("window: give the value that becomes 0, and then a larger one for 1")
        return self

    @property
    def fit(self) -> Fit:
        """How scans become records."""
        return Fit(self.window, self.spacing, self.resize)

    def contract(self) -> dict[str, Any]:
        """All keys but those that say where the images lie, and how they are read in training."""
        elsewhere = {"file", "folder", "lazy", "workers", "test_fraction"}
        kept = {"kind": self.kind}
        return kept | self.model_dump(mode="json", exclude=elsewhere, exclude_defaults=True)

    def at(self, data: Path) -> "ImageFolder":
        """The table with another folder."""
        return self.model_copy(update={"folder": data})

    def new_records(self, data: Path, shape: Shape, rows: int) -> Iterator[NewRecords]:
        """All images below a folder, whatever its folders are named; a name is a path in it."""
        table = self.model_copy(update={"folder": data, "lazy": True, "workers": 0})
        SourceTable.check_present(table)
        with listing(data):
            paths = image_files(data, is_volume(shape))
        table.check_shape(shape)
        x, names = read_images(table, paths, shape, lambda: ""), relative_ids(data, paths)
        starts = range(0, len(paths), rows)
        places = [np.arange(start, min(start + rows, len(paths))) for start in starts]
        for index, piece in LazyRecords.batches(x, places):  # type: ignore[arg-type] # lazy ones
            yield NewRecords([names[place] for place in index], piece)

    def check_shape(self, shape: Shape) -> None:
        """LocalError unless records of this shape can be made of images."""
        if not is_volume(shape):
            pictures.check_shape(self.folder, shape)
        if self.spacing is not None and len(self.spacing) != len(shape) - 1:
            raise LocalError(
                f"{self.folder}: data.spacing has {len(self.spacing)} numbers, and the job's model"
                f" takes {list(shape)}; give one for each side after the channels"
            )

    def groups_of(self, ids: Sequence[str], above: int = 0) -> tuple[str, ...] | None:
        """What stays together: the images of one folder; others are alone.

        Of an image's path the first folders, ``above`` of them, say no more than its class.
        """
        if not self.grouped:
            return None
        return tuple("/".join(own.split("/")[above:-1]) or own for own in ids)

    def identity(self, folder: Path, paths: Sequence[Path], sizes: Sequence[int]) -> str:
        """What tells two folders of images apart without decoding them: names, sizes, constants."""
        digest = listing_digest(folder, paths, sizes)
        return f"{self.kind} {digest} {self.constants} {self.fit}"


class ImageReader:
    """Reads one image after another; each process has its own."""

    def __init__(self, table: ImageFolder, paths: Sequence[Path], shape: Shape) -> None:
        self._table, self._paths, self._shape = table, paths, shape

    def __call__(self, place: int) -> tuple[Tensor]:
        """The image at a place, [channels, (depth,) height, width]."""
        values = self._values(self._paths[place])
        record = torch.from_numpy(np.array(values))[None]
        return (self._table.normalised(record, self._table.where)[0],)

    def _values(self, path: Path) -> NDArray[np.float32]:
        table, shape = self._table, self._shape
        if is_scan(path):
            return table.fit.record(path, read_scan(path), shape)
        if table.window or table.spacing or is_volume(shape):
            raise LocalError(
                f"{path}: is not a scan; move it away, or leave data.window and data.spacing out,"
                " with a model for images"
            )
        return pictures.read_pixels(path, shape, table.resize)


def read_images(
    table: ImageFolder, paths: Sequence[Path], shape: Shape, identity: Callable[[], str]
) -> Tensor | LazyRecords:
    """Images [N, *shape], which are read now unless the table is ``lazy``.

    ``identity`` tells lazy ones from others. LocalError where one cannot be read, or they do not
    fit the memory.
    """
    count, size = len(paths), math.prod(shape) * np.dtype(np.float32).itemsize
    table.check_fits(count * size, f"{count:,} images of {' x '.join(map(str, shape))}")
    # First: a wrong number of constants is no fault of an image.
    table.normalised(torch.zeros(1, *shape), table.where)
    opened = partial(ImageReader, table, paths, shape)
    x = LazyRecords.of(opened, count, shape, table.workers, table.where, identity)
    return x if table.lazy else x.whole()


def is_scan(path: Path) -> bool:
    """True for NIfTI and DICOM by the name, and for a folder of slices."""
    return NIFTI.search(path.name) is not None or is_dicom(path)


def is_dicom(path: Path) -> bool:
    """True for a DICOM file by the name, and for a folder of slices."""
    return DICOM.search(path.name) is not None or path.is_dir()


def read_scan(path: Path, values: bool = True) -> Scan:
    """A scan of a file, or of a folder of slices; LocalError where it cannot be read.

    Without ``values`` headers alone are read, and all values are 0.
    """
    if path.is_dir():
        return dicom.read_series(path, files_of(path), values)
    reads = nifti.read if NIFTI.search(path.name) else dicom.read_slice
    return reads(path, values)


@contextmanager
def listing(folder: Path) -> Iterator[None]:
    """LocalError in place of what the system says: a folder may be unreadable, or vanish."""
    try:
        yield
    except OSError as error:
        raise LocalError(f"{error.filename or folder}: cannot read it: {reason(error)}") from error


def is_volume(shape: Shape) -> bool:
    """True for records [channels, depth, height, width]."""
    return len(shape) == VOLUME


def image_files(folder: Path, volumes: bool) -> list[Path]:
    """All images below a folder, which may be absent, by name.

    Where they are ``volumes``, a folder of DICOM files is one. A file that is no image
    is an error, unless ``shown`` leaves it out.
    """
    # Images in sub-folders of a class belong to it, too.
    paths = list(filterfalse(Path.is_dir, shown(folder, folder.rglob("*"))))
    if unknown := next(filterfalse(is_image, paths), None):
        raise LocalError(f"{unknown}: is not {KNOWN} by its name; convert it, or move it away")
    if not volumes:
        return paths_in_order(paths)
    single, slices = filterfalse(is_dicom, paths), list(filter(is_dicom, paths))
    if bare := next(filter(set(folder.glob("*")).__contains__, slices), None):
        raise LocalError(f"{bare}: lies next to other series; give each a folder of its own")
    return paths_in_order([*single, *{path.parent for path in slices}])


def paths_in_order(paths: Iterable[Path]) -> list[Path]:
    """By their texts with slashes, which sort the same on every system."""
    return sorted(paths, key=Path.as_posix)


def shown(folder: Path, paths: Iterable[Path]) -> Iterator[Path]:
    """Those of the paths in a folder that a person put there: UNSHOWN names none on the way."""
    return filterfalse(partial(_is_unshown, folder), paths)


def _is_unshown(folder: Path, path: Path) -> bool:
    return any(map(UNSHOWN.match, path.relative_to(folder).parts))


def is_image(path: Path) -> bool:
    """True for a picture and a scan, by the name."""
    return is_scan(path) or path.suffix.lower() in pictures.SUFFIXES


def files_of(path: Path) -> list[Path]:
    """The files of an image, by name: those of a series are several."""
    if not path.is_dir():
        return [path]
    return paths_in_order(filterfalse(Path.is_dir, shown(path, path.iterdir())))


def stem(path: Path) -> Path:
    """A path without the ending that says what kind of image it is."""
    return path.with_name(ENDING.sub("", path.name))


def size_of(path: Path) -> int:
    """Bytes of an image's files."""
    return sum(part.stat().st_size for part in files_of(path))


def listing_digest(folder: Path, paths: Sequence[Path], sizes: Sequence[int]) -> str:
    """SHA-256 in hex of images' paths in a folder and their sizes."""
    digest = hashlib.sha256()
    for name, size in zip(relative_ids(folder, paths), sizes, strict=True):
        digest.update(f"{name}\0{size}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()


def relative_ids(folder: Path, paths: Sequence[Path]) -> tuple[str, ...]:
    """Ids of images: their paths in the folder.

    They have slashes on every system, so ids do not depend on it.
    """
    return tuple(path.relative_to(folder).as_posix() for path in paths)
