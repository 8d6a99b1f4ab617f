"""A partition as a table of a file: one kind per way to split, with what each of them needs."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import Field

from ...errors import LocalError
from ...files.documents import Strict
from . import conventions
from .by_label import classes_each, group_mixtures, label_groups, shards
from .by_source import by_column, by_source
from .draw import SMALLEST_ALPHA, dirichlet

Indices = NDArray[np.int64]
Count = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Alpha = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=SMALLEST_ALPHA)]
Label = Annotated[int, Field(strict=True, ge=0)]
Groups = Annotated[
    tuple[Annotated[tuple[Label, ...], Field(min_length=1)], ...], Field(min_length=1)
]
MINIMUM = 10  # records of a silo, where a table says nothing


class PartitionTable(Strict):
    """Keys that every kind of partition has."""

    minimum: Annotated[int, Field(strict=True, ge=0)] | None = None
    """Fewest records of a silo; default: 10, or what a Dirichlet convention has."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**53)] = 0
    """Seed of the partition and of its split, whatever seeds its runs have."""
    keep: Count | None = None
    """How many of its silos take part, spread evenly over all in their order; default: all."""


class Dirichlet(PartitionTable):
    """``draw.dirichlet``, or one of ``conventions``."""

    kind: Literal["dirichlet"]
    silos: Count
    alpha: Alpha
    convention: Literal["per-class", "balanced", "hsu", "pfllib", "fl-bench", "ppfl"] = "per-class"
    clusters: Count | None = None
    """For "ppfl": clusters of labels; default: one per label."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _renamed(cls, given: Any) -> Any:
        if isinstance(given, dict) and "balanced" in given:
            raise ValueError(
                'balanced has become a convention: write convention = "balanced" for balanced ='
                " true, and nothing for false; the draws are the same"
            )
        return given

    @pydantic.model_validator(mode="after")
    def _clusters_of_ppfl(self) -> "Dirichlet":
        if self.clusters is not None and self.convention != "ppfl":
            raise ValueError(
                f'clusters belongs to convention = "ppfl", this is {self.convention!r}; leave it'
                " out"
            )
        return self


class Shards(PartitionTable):
    """``by_label.shards``."""

    kind: Literal["shards"]
    silos: Count
    each: Count


class Classes(PartitionTable):
    """``by_label.classes_each``."""

    kind: Literal["classes"]
    silos: Count
    each: Count


class LabelGroups(PartitionTable):
    """``by_label.label_groups``."""

    kind: Literal["label-groups"]
    silos: Count
    groups: Groups


class GroupMixtures(PartitionTable):
    """``by_label.group_mixtures``."""

    kind: Literal["group-mixtures"]
    silos: Count
    groups: Groups
    alpha: Alpha


class BySource(PartitionTable):
    """``by_source.by_source``: how many silos each source has."""

    kind: Literal["sources"]
    silos: Annotated[dict[str, Count], Field(min_length=1)]


class ByColumn(PartitionTable):
    """``by_source.by_column``."""

    kind: Literal["column"]


Partition: TypeAlias = Annotated[
    Dirichlet | Shards | Classes | LabelGroups | GroupMixtures | BySource | ByColumn,
    Field(discriminator="kind"),
]


KINDS: dict[str, type[PartitionTable]] = {
    "dirichlet": Dirichlet,
    "shards": Shards,
    "classes": Classes,
    "label-groups": LabelGroups,
    "group-mixtures": GroupMixtures,
    "sources": BySource,
    "column": ByColumn,
}


def deal(
    table: Partition, labels: Indices, column: Sequence[str] | Sequence[int] | None = None
) -> dict[str, Indices]:
    """Ascending record indices per silo; a silo without a name of its own has its number.

    ``column`` has one value per record, for the kinds "sources" and "column": its source, subject,
    hospital.
    """
    seed = table.seed
    minimum = MINIMUM if table.minimum is None else table.minimum
    match table:
        # Silos of these two have names of their own.
        case BySource():
            sources = list(map(str, _column(table, labels, column)))
            return by_source(sources, table.silos, seed, minimum)
        case ByColumn():
            return by_column(_column(table, labels, column), minimum)

        case Dirichlet():
            parts = _dirichlet(table, labels, minimum)
        case Shards(silos=silos, each=each):
            parts = shards(labels, silos, each, seed, minimum)
        case Classes(silos=silos, each=each):
            parts = classes_each(labels, silos, each, seed, minimum)
        case LabelGroups(silos=silos, groups=groups):
            parts = label_groups(labels, silos, groups, seed, minimum)
        case GroupMixtures(silos=silos, groups=groups, alpha=alpha):
            parts = group_mixtures(labels, silos, groups, alpha, seed, minimum)
    return _numbered(parts)


def _dirichlet(table: Dirichlet, labels: Indices, minimum: int) -> list[Indices]:
    """The parts of a convention; only ours have ``minimum`` in place of what is left out."""
    of_all = (labels, table.silos, table.alpha, table.seed)
    match table.convention:
        case "per-class":
            return dirichlet(*of_all, minimum)
        case "balanced":
            return dirichlet(*of_all, minimum, balanced=True)
        case "hsu":
            return conventions.hsu(*of_all, minimum)
        case "pfllib":
            return conventions.pfllib(*of_all, table.minimum)
        case "fl-bench":
            return conventions.fl_bench(*of_all, table.minimum)
        case "ppfl":
            return conventions.ppfl(*of_all, table.minimum, table.clusters)


def alike(
    table: Partition, labels: Indices, column: Sequence[str] | Sequence[int] | None = None
) -> Indices:
    """Keys for ``split.apart``, one per record: numbers of the column's values, or else labels."""
    if not isinstance(table, BySource | ByColumn):
        # By label, so that a silo has the same shares of classes in training and test.
        return labels
    values = np.array(_column(table, labels, column))
    # Numbered over all records at once, so both official parts have the same numbers.
    _, numbers = np.unique(values, return_inverse=True)
    return numbers.astype(np.int64)


def _column(
    table: BySource | ByColumn, labels: Indices, column: Sequence[str] | Sequence[int] | None
) -> Sequence[str] | Sequence[int]:
    if column is not None and len(column) == len(labels):
        return column
    found = "none" if column is None else len(column)
    raise LocalError(
        f"partition: kind {table.kind!r} takes one value per record, here"
        f" {found} for {len(labels)} records; take data"
        " that names its sources, subjects or hospitals"
    )


def _numbered(parts: Sequence[Indices]) -> dict[str, Indices]:
    return {str(number): part for number, part in enumerate(parts)}
