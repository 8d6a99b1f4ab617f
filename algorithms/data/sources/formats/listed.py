"""Images that a CSV file lists, with what is true of each.

::

    file;patient;months;died
    visit-1/0001.png;17;12,5;1
    visit-1/0002.nii.gz;18;40;0

Images lie in ``folder`` and below; a folder of DICOM files is one image where the job's model takes
volumes.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from ....models.registry import Shape
from ...dataset import Dataset
from .csv_file import CsvRows
from .image_files import ImageFolder, files_of, is_image, listing, read_images, size_of
from .labelled import Truths, fault


class ListedImages(CsvRows, ImageFolder):
    """``kind = "listed"``."""

    fills_folder: ClassVar[bool] = False

    kind: Literal["listed"]
    image: str
    """The column of the images' paths in the folder."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The column of the images."""
        return (self.image,)

    def at(self, data: Path) -> "ListedImages":
        """The table with another list, whose images lie in the folder of the list and below."""
        return self.model_copy(update={"file": data, "folder": data.parent})

    def examine(self) -> str:
        """How many images are listed; none is opened."""
        found, _ = self._rows()
        return f"{len(found):,} images that a file lists"

    def read_at(self, shape: Shape) -> Dataset:
        """The images in the order of the file.

        A record's id is its image's path, unless a column has ids.
        """
        self.check_shape(shape)
        texts, found = self._rows()
        paths = list(map(self.folder.joinpath, texts))
        with listing(self.folder):
            identity = partial(self.identity, self.folder, paths, list(map(size_of, paths)))
        x, ids = read_images(self, paths, shape, identity), found.ids or tuple(texts)
        groups = found.groups or self.groups_of(texts)
        return Dataset(x, found.y, self.names, ids, found.sources, groups)

    def _rows(self) -> tuple[list[str], Truths]:
        """Each image's path in the folder, and what is true of it."""
        texts: list[str] = []

        def take(line: int, cells: Mapping[str, str]) -> None:
            text = cells[self.image]
            if not _is_there(self.folder, text):
                why = "names no image in data.folder; correct the path, or add the image"
                raise fault(self, line, self.image, why)
            texts.append(text)

        return texts, self.truth_of_all(take)


def _is_there(folder: Path, text: str) -> bool:
    """True if a cell is the path, below the folder, of an image or of a folder with files.

    Folders are joined by /, whatever the system.
    """
    path = folder / text
    # A text that is no path at all may be too long for one.
    with suppress(OSError):
        below = folder.resolve() in path.resolve().parents and not Path(text).is_absolute()
        return below and path.exists() and is_image(path) and bool(files_of(path))
    return False
