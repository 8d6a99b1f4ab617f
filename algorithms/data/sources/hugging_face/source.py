"""Records of a data set that Hugging Face's ``datasets`` saved on disk, by ``save_to_disk``.

The silo names what a model takes: columns of a table, an image, or an array of numbers or tokens. A
``ClassLabel`` column has the names of its classes as texts, as a column of a CSV file would.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import pydantic
import torch
from pydantic import Field
from torch import Tensor

from .....errors import LocalError
from ....models.registry import Shape
from ...dataset import Dataset
from ...lazy import LazyRecords
from ...options import OneByOne, Pixels
from ...rows import Rows
from ...saved_set import SavedSet, open_saved, saved_folder
from ..formats import pictures
from ..formats.labelled import Truths
from ..formats.table import Table
from .arrays import read_arrays
from .images import ColumnImages, check_images

# What a model takes, and the keys that are of that alone.
FORMS: dict[str, set[str]] = {
    "features": {"categories", "center", "scale", "missing", "missing_marks", "dates", "units"},
    "image": {"mean", "std", "pixels", "resize", "lazy", "workers"},
    "array": set(),
}


class HuggingFace(Table, Pixels, OneByOne):
    """``kind = "huggingface"``; it needs pyarrow, which ``staddle[huggingface]`` installs."""

    fills_folder: ClassVar[bool] = True

    kind: Literal["huggingface"]
    folder: Path
    split: Annotated[str, Field(pattern=r"^[^/\\\x00.][^/\\\x00]*$")] | None = None
    """The split of a ``DatasetDict``."""
    features: tuple[str, ...] = ()
    """Columns of a table; ``image`` or ``array`` name something else that a model takes."""
    image: str | None = None
    """The column of images."""
    array: str | None = None
    """The column of lists of numbers or tokens."""
    resize: bool = False

    # Before others, which would miss the features that a wrong key names.
    @pydantic.model_validator(mode="before")
    @classmethod
    def _one_form(cls, table: dict[str, Any]) -> dict[str, Any]:
        named = list(filter(table.get, FORMS))
        if len(named) != 1:
            raise ValueError(
                "name what a model takes: features, the columns of a table, or else image or array,"
                " one column"
            )
        form = named[0]
        if odd := sorted(table.keys() & set().union(*FORMS.values()) - FORMS[form]):
            raise ValueError(
                f"{odd[0]} does not go with {form}; leave it out, or name another column that a"
                " model takes"
            )
        return table

    @property
    def path(self) -> Path:
        """The folder of the split."""
        return Path(self.folder, *filter(None, (self.split,)))

    @property
    def title(self) -> str:
        """The name of the folder, and of the split."""
        return "/".join(filter(None, (self.folder.name, self.split)))

    @property
    def places(self) -> tuple[tuple[str, ...], ...]:
        """The folder of the split, without links."""
        # Another table may name the split's folder itself.
        alone = self.model_copy(update={"folder": self.path, "split": None})
        return super(HuggingFace, alone).places

    @property
    def inputs(self) -> tuple[str, ...]:
        """The features, or the column of what a model takes."""
        return (*self.features, *filter(None, (self.image, self.array)))

    @property
    def needs_model(self) -> bool:
        """True for images, which are decoded in the size that a model takes."""
        return self.image is not None

    def contract(self) -> dict[str, Any]:
        """As for a table's columns, for pictures or for arrays, whichever a model takes."""
        if self.features:
            return super().contract()
        if self.image is None:
            return {"kind": "npz"}
        kept = self.model_dump(mode="json", include={"mean", "std", "pixels", "resize"})
        return {"kind": "images", **kept}

    def check_present(self) -> None:
        """LocalError unless the folder is a saved data set, with the split if one is named."""
        saved_folder(self.folder, self.split)

    @contextmanager
    def rows(self) -> Iterator[Rows]:
        """The records, after the names of the columns; cells of images and arrays are empty."""
        found = self._opened()
        wanted = (*self.features, *self.truths, *self._named_columns())
        # 0 and 1, and the numbers of a regression, are no names.
        numbered = (*self.labels, *self.survival, *filter(None, (self.target,)))
        # A column that is missing is told by whoever looks for it in the names.
        yield found.rows(list(filter({*found.names}.__contains__, wanted)), numbered)

    def _opened(self) -> SavedSet:
        return open_saved(saved_folder(self.folder, self.split))

    def _classed(self, found: SavedSet) -> Self:
        """The table with the classes of a ClassLabel, where it declares none itself."""
        classes = self.classes or found.class_names.get(self.label or "")
        return self.model_copy(update={"classes": classes})

    def read(self) -> Dataset:
        """Records of a table [1, 1, numbers], or arrays as they are; LocalError for images."""
        if self.image is not None:
            raise LocalError(
                f"{self.where}: images are read in the size that a job's model takes; give a job"
            )
        found = self._opened()
        table = self._classed(found)
        if self.array is None:
            return Table.read(table)
        truths = table.truths_alone()
        return table.with_truths(read_arrays(found, self.array), truths)

    def read_at(self, shape: Shape) -> Dataset:
        """Images in the size that a model takes; arrays with sides of 1 in front as it has them."""
        if self.image is None:
            return _sided(self.read(), shape)
        pictures.check_shape(self.path, shape)
        found = self._opened()
        table = self._classed(found)
        truths = table.truths_alone()
        check_images(found, self.image)
        count, sides = len(truths.y), " x ".join(map(str, shape))
        size = count * prod(shape) * np.dtype(np.float32).itemsize
        self.check_fits(size, f"{count:,} images of {sides}")
        # First: a wrong number of constants is no fault of an image.
        self.normalised(torch.zeros(1, *shape), self.where)
        opened = partial(ColumnImages, self, self.path, self.image, shape, resize=self.resize)
        identity = f"{self.kind} {found.identity} {self.image} {self.constants} {self.resize}"
        x = LazyRecords.of(opened, count, shape, self.workers, self.where, partial(str, identity))
        return table.with_truths(x if self.lazy else x.whole(), truths)

    def truths_alone(self) -> Truths:
        """What is true of the records, in their order; LocalError for the first fault."""
        return self.truth_of_all(lambda _record, _cells: None)

    def with_truths(self, x: Tensor | LazyRecords, truths: Truths) -> Dataset:
        """Records, and what is true of them."""
        return Dataset(x, truths.y, self.names, truths.ids, truths.sources, truths.groups)

    def examine(self) -> str:
        """How many images there are; none is decoded."""
        found = self._opened()
        count = len(self._classed(found).truths_alone().y)
        check_images(found, self.image or "")
        return f"{count:,} images of a saved data set"


def _sided(data: Dataset, shape: Shape) -> Dataset:
    """The records with sides of 1 in front, where a model's shape has more sides than they."""
    x = data.held
    lack = (1,) * (len(shape) - x.ndim + 1)
    return replace(data, x=x.reshape(len(x), *lack, *x.shape[1:]))
