"""Images that a CSV file lists, with what is true of each.

::

    file;patient;months;died
    visit-1/0001.png;17;12,5;1
    visit-1/0002.nii.gz;18;40;0

Images lie in ``folder`` and below; a folder of DICOM files is one image where the job's model takes
volumes.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from ....models.registry import Shape
from ...dataset import Dataset
from .csv_file import CsvRows
from .image_files import ImageFolder, listing, read_images, size_of
from .labelled import Truths, fault


class ListedImages(CsvRows, ImageFolder):
    """``kind = "listed"``."""

    kind: Literal["listed"]
    image: str
    """The column of the images' paths in the folder."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The column of the images."""
        return (self.image,)

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
        return Dataset(x, found.y, self.names, ids, found.sources, self.groups_of(texts))

    def _rows(self) -> tuple[list[str], Truths]:
        """Each image's path in the folder, and what is true of it."""
        texts: list[str] = []

        def take(line: int, cells: Mapping[str, str]) -> None:
            text = cells[self.image]
            if not text or Path(text).is_absolute() or not (self.folder / text).exists():
                why = "names no file in data.folder; correct it, or add the image"
                raise fault(self, line, self.image, why)
            texts.append(text)

        return texts, self.truth_of_all(take)
