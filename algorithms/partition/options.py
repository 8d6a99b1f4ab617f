"""A partition as a table of a file: one kind per way to split, with what each of them needs."""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ...errors import LocalError
from ...files.documents import Strict
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


class PartitionTable(Strict):
    """Keys that every kind of partition has."""

    minimum: Annotated[int, Field(strict=True, ge=0)] = 10
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**53)] = 0
    """Seed of the partition and of its split, whatever seeds its runs have."""
    keep: Count | None = None
    """How many of its silos take part, spread evenly over all in their order; default: all."""


class Dirichlet(PartitionTable):
    """``draw.dirichlet``."""

    kind: Literal["dirichlet"]
    silos: Count
    alpha: Alpha
    balanced: bool = False


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
    seed, minimum = table.seed, table.minimum
    match table:
        # Silos of these two have names of their own.
        case BySource():
            sources = list(map(str, _column(table, labels, column)))
            return by_source(sources, table.silos, seed, minimum)
        case ByColumn():
            return by_column(_column(table, labels, column), minimum)

        case Dirichlet(silos=silos, alpha=alpha, balanced=balanced):
            parts = dirichlet(labels, silos, alpha, seed, minimum, balanced=balanced)
        case Shards(silos=silos, each=each):
            parts = shards(labels, silos, each, seed, minimum)
        case Classes(silos=silos, each=each):
            parts = classes_each(labels, silos, each, seed, minimum)
        case LabelGroups(silos=silos, groups=groups):
            parts = label_groups(labels, silos, groups, seed, minimum)
        case GroupMixtures(silos=silos, groups=groups, alpha=alpha):
            parts = group_mixtures(labels, silos, groups, alpha, seed, minimum)
    return _numbered(parts)


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
