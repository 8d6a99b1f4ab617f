"""A data source is a [data] table that reads its own records.

A kind of source is one class in one file of ``sources``, which ``registry`` lists. Its fields are
the keys of the table. The rest of the software asks a source nothing but what its methods say, so a
new kind writes ``read`` and overrides whatever else is different for it.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
import pydantic
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ...errors import LocalError, check_local
from ...files.documents import Strict
from ...files.file_bounds import check_fits, check_regular
from ..models.build import ModelOptions, input_shape
from ..models.inputs import inputs_differ, shapes_of
from ..models.registry import Shape
from ..numerics.streams import permutation, stream
from .dataset import Dataset
from .features import Feature
from .new_records import NewRecords

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]
Count = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Names = Annotated[tuple[str, ...], Field(min_length=1)]

COPIES = 2  # of the records in memory: these, and those of both sides of the split
FEWER = "give fewer records, or free memory"
SCALES = {"unit": 1, "bytes": 255}  # the largest pixel


class UndeclaredError(LocalError):
    """A value is missing, and neither the table nor a job says what it counts as."""


class SourceTable(Strict):
    """The properties of a source that are known before a record is read.

    Three keys mean the same in every kind: ``file`` or ``folder`` holds the records, and ``name``
    is one of the sets that the kind reads. A source with neither path makes its records itself.
    """

    fills_folder: ClassVar[bool] = False
    """True if all that is in the folder is records."""
    shares_folder: ClassVar[bool] = False
    """True if sets of several names lie in one folder."""

    # every kind declares its own Literal; a field here would come first in errors
    if TYPE_CHECKING:
        kind: str

    @property
    def path(self) -> Path | None:
        """The file or folder that holds the records; None where they come with the software."""
        for key in ("file", "folder"):
            path: Path | None = getattr(self, key, None)
            if path is not None:
                return path
        return None

    @property
    def title(self) -> str:
        """The name of the records in a partition's file, which is compared: it must not change.

        It is the set's name, or else the last part of the path, or else the kind.
        """
        name: str = getattr(self, "name", "")
        if not name and self.path is not None:
            name = self.path.name
        return name or self.kind

    @property
    def long_title(self) -> str:
        """The title for people, with what tells apart two tables of one title."""
        return self.title

    @property
    def where(self) -> str:
        """The records as errors name them.

        That is the path, or without one the kind and title.
        """
        if self.path is None:
            return f"{self.kind} {self.title}"
        return str(self.path)

    @property
    def places(self) -> tuple[tuple[str, ...], ...]:
        """What is read: each file and folder, without links, or else the name of the records."""
        name = getattr(self, "name", "") if self.shares_folder else ""
        given = filter(None, (getattr(self, key, None) for key in ("file", "folder")))
        found = tuple((_real(path), name) for path in given)
        return found or ((self.where, str(getattr(self, "options", ""))),)

    def below(self, base: Path) -> Self:
        """The same table with its path relative to a folder.

        Absolute paths stay.
        """
        # Paths in a configuration are relative to its file, not to where a command is started.
        moved: dict[str, Path] = {}
        for key in {"file", "folder"} & type(self).model_fields.keys():
            if (path := getattr(self, key)) is not None:
                moved[key] = base / path
        return self.model_copy(update=moved)

    def check_present(self) -> None:
        """LocalError if the file or folder is missing or is a FIFO or the like.

        A silo calls it when it starts, so that a wrong path shows before any job.
        """
        file: Path | None = getattr(self, "file", None)
        folder: Path | None = getattr(self, "folder", None)
        if file is not None:
            _check_file(file)
        if folder is not None and not folder.is_dir():
            raise LocalError(f"{folder}: no such folder; correct the path, or data.folder")

    def contract(self) -> dict[str, Any]:
        """The table by which new records of this kind are read: no path, nothing of a record.

        Kinds that have no form for new records take arrays, as they give them to a model.
        """
        return {"kind": "npz"}

    def lacking(self) -> str | None:
        """The path that is missing, with what belongs there; None if the records are there.

        Whether the records can be read shows only when they are.
        """
        if self.path is None or self.path.exists():
            return None
        return str(self.path)


def _real(path: Path) -> str:
    # No file has a name with NUL; that it is missing is said when it is looked for.
    with suppress(ValueError):
        return os.path.realpath(path)
    return str(path)


def _check_file(file: Path) -> None:
    if file.is_file():
        return
    # Reading from a FIFO or a device would wait for ever; check_regular says which it is.
    if file.exists() and not file.is_dir():
        check_regular(file)
    raise LocalError(
        f"{file}: no such file; data.file in the configuration names the silo's records"
    )


class DataTable(SourceTable, ABC):
    """A source that a silo can have: it reads the records of one silo."""

    test_fraction: float = Field(default=0.25, gt=0, lt=1)

    @property
    def needs_model(self) -> bool:
        """True if the records are read in the size that a job's model takes."""
        return False

    @property
    def meanings(self) -> str:
        """Which values of a label count as which classes, where these are called differently.

        Nobody but the silo's people can tell if that is right.
        """
        return ""

    @property
    def has_official_parts(self) -> bool:
        """True if official training records, with ids ``train/…``, precede test records.

        Only then can an experiment keep the official split.
        """
        return False

    def check_first(self) -> None:
        """LocalError for what the beginning of the records already shows to be wrong.

        An agent's start calls it, so it may read a few records of many. By default none is read.
        """

    def gaps(self) -> dict[str, int]:
        """How many values are missing, by column, for which this source has nothing to stand in.

        The column with most of them comes first; records without columns have none.
        """
        return {}

    def filled(self) -> Self:
        """The source as if a job said what a missing value counts as, to look at all others."""
        return self

    def examine(self) -> str:
        """The records in a few words, as far as they can be judged without a job's model.

        ``silo check`` shows it of a kind that ``needs_model``; no agent's start calls it, so it may
        read every file. LocalError for the first fault.
        """
        return "records"

    def load(
        self, model: ModelOptions | None, features: Sequence[Feature] = (), *, wary: bool = False
    ) -> Dataset:
        """Read the records for a job's model; ``record_checks`` says whether they fit the job.

        ``features`` are those that the job declares; ``wary`` as in ``Feature.constants``. Without
        a model the records are read before there is a job; LocalError if the kind needs one, or
        memory runs out.
        """
        table = self.agreed(features, wary)
        if model is not None and model.inputs and self.needs_model:
            differs = inputs_differ(shapes_of(model.named_inputs), {})
            raise LocalError(f"{self.where}: {differs}")
        try:
            if model is None:
                return table.read()
            return table.read_at(input_shape(model))
        # The available memory was checked first, but another process can take it meanwhile.
        except MemoryError as error:
            raise LocalError(
                f"{self.where}: out of memory while reading the records; give fewer records"
            ) from error

    def agreed(self, features: Sequence[Feature], wary: bool) -> Self:
        """The table with what it leaves to a job's declaration, where its kind leaves anything."""
        return self

    def at(self, data: Path) -> "DataTable":
        """The table of a contract with other records; LocalError where its kind cannot have any."""
        raise LocalError(f"{data}: {self.kind!r} has no records elsewhere; give a .npz file")

    def new_records(self, data: Path, shape: Shape, rows: int) -> Iterator[NewRecords]:
        """The records of a contract's kind at another place, so many at a time.

        What is true of them need not be there. LocalError for what is not of the contract.
        """
        raise LocalError(f"{data}: {self.kind!r} has no new records; give a .npz file")

    @abstractmethod
    def read(self) -> Dataset:
        """The records in their own shape.

        Images are [N, channels, height, width], tables [N, 1, 1, columns].
        """

    def read_at(self, shape: Shape) -> Dataset:
        """The records in a shape [channels, height, width], or in their own if they have one."""
        return self.read()


class OneByOne(DataTable):
    """A kind that reads its records one by one, at first or when they are used."""

    lazy: bool = False
    """Records are read when they are used (lazy.py), and may be more than the memory holds."""
    workers: Annotated[int, Field(strict=True, ge=0, le=256)] = 0
    """Processes that read records; 0: this one alone."""

    def check_fits(self, needed: int, what: str) -> None:
        """LocalError where so many bytes are too many, unless the records are lazy."""
        if not self.lazy:
            place = self.path or Path(self.title)
            check_fits(place, COPIES * needed, what, f"{FEWER}; or set data.lazy = true")


class Pixels(DataTable):
    """Images whose pixels become (pixel - mean) / std, constants per channel or for all.

    The constants are declared in public, never computed from a silo's records: then the model would
    reveal one more figure about them.
    """

    mean: tuple[Number, ...] = Field(default=(0.0,), min_length=1)
    std: tuple[Positive, ...] = Field(default=(1.0,), min_length=1)
    pixels: Literal["unit", "bytes"] = "unit"
    """Pixels are 0 … 1, or 0 … 255 with ``bytes``, from which ``mean`` is subtracted.

    Some code takes constants for 0 … 1 from pixels of 0 … 255; tables of papers need that again.
    """

    @property
    def constants(self) -> str:
        """What tells apart two tables that make other records of the same pixels."""
        # Tables without the key stay what they were.
        return f"{self.mean} {self.std}" + (" bytes" if self.pixels == "bytes" else "")

    def from_bytes(self, x: NDArray[np.uint8], where: str) -> Tensor:
        """Records [N, channels, height, width] from pixels of 0 … 255.

        They are float32, and normalised by ``mean`` and ``std``. ``where`` names them in errors.
        """
        # torch rejects arrays with negative strides.
        pixels = torch.from_numpy(np.ascontiguousarray(x))
        return self.normalised(pixels.to(torch.float32).div_(255), where)

    def normalised(self, x: Tensor, where: str) -> Tensor:
        """The records (pixel - mean) / std of pixels of 0 … 1, changed in place.

        LocalError unless there is one constant for all channels, or one per channel.
        """
        channels = x.shape[1]
        for name, values in (("mean", self.mean), ("std", self.std)):
            check_local(
                len(values) in (1, channels),
                f"{where}: data.{name} has {len(values)} numbers for {channels} channels; give "
                "one a channel, or one for all",
            )
        # [channels, 1, …], which broadcasts over images and volumes of any size.
        sides = (-1, *[1] * (x.ndim - 2))
        mean, std = (torch.tensor(each).reshape(sides) for each in (self.mean, self.std))
        return x.mul_(SCALES[self.pixels]).sub_(mean).div_(std)


class ImageFiles(Pixels):
    """Images that are decoded in the size that a job's model takes.

    Such a kind writes ``read_at``.
    """

    @property
    def needs_model(self) -> bool:
        """True: images have no size of their own."""
        return True

    def examine(self) -> str:
        """Nothing more is known of a kind in general."""
        return "images"

    def read(self) -> Dataset:
        """LocalError: there is no size yet."""
        raise LocalError(
            f"{self.where}: images are read in the size that a job's model takes; give a job"
        )


class Shared(DataTable):
    """The k-th of n disjoint random shares of a public set, for trials that deal it out."""

    share: tuple[Count, Count] | None = None
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**53)] | None = None
    """The seed of the deal; the same at all silos."""

    @pydantic.model_validator(mode="after")
    def _one_of_n(self) -> "Shared":
        if self.share is None:
            if self.seed is not None:
                raise ValueError(
                    "seed deals out shares; give share = [k, n] too, or leave seed out"
                )
            return self
        own, shares = self.share
        if own > shares:
            raise ValueError(
                f"share = [{own}, {shares}]: give [k, n], the k-th of n shares, k from 1 to n"
            )
        return self

    def indices(self, total: int) -> NDArray[np.int64]:
        """The records of this share, in their order in the set.

        They are int64 and ascending; without a declared share, all of them.
        """
        if self.share is None:
            return np.arange(total)
        own, shares = self.share

        # All silos draw the same permutation and take every n-th, so the shares are disjoint.
        drawn = permutation(stream(self.seed or 0, "", 0, "share"), total)
        # The permutation chooses records; their order stays that of the set.
        return np.sort(drawn[own - 1 :: shares])
