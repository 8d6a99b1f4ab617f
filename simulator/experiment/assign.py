"""Which client holds which records, and on which side: as the tables of an experiment say, or as a
file does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...algorithms.data.dataset import Dataset
from ...algorithms.data.options import DataTable
from ...algorithms.partition.file import read, read_ppfl
from ...algorithms.partition.options import Partition, alike, deal
from ...algorithms.partition.split import Sides, apart, merged
from ...errors import LocalError
from .options import Apart, Merged, PartitionFromFile, Split

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dealt:
    """The sides of each client; ``seed`` and ``how`` are for a file that tells of it."""

    sides: Mapping[str, Sides]
    seed: int | None
    how: Mapping[str, Any]


def from_file(table: PartitionFromFile, source: DataTable, data: Dataset) -> Dealt:
    """As a file says that was made for these records."""
    labels = data.y.numpy()
    match table.format:
        case "ppfl":
            found = read_ppfl(table.file, labels, source.title)
            dealt = sum(len(own.all()) for own in found.sides().values())
            if dealt != len(labels):  # it says nothing else of the records that it was made for
                raise LocalError(
                    f"{table.file}: deals out {dealt} records, there are {len(labels)}; take the"
                    " data set that it is of, official training and test records together"
                )
        case "staddle":
            found = read(table.file)
            found.check_labels(labels)
    return Dealt(found.sides(), found.seed, found.how)


def from_tables(table: Partition, split: Split, source: DataTable, data: Dataset) -> Dealt:
    """Dealt out and split anew; the same tables and records give the same."""
    labels, column = data.y.numpy(), _column(data.sources)
    how = {**table.model_dump(exclude={"seed"}, exclude_none=True), "split": split.model_dump()}
    match split:
        case Merged():
            parts = deal(table, labels, column)
            return Dealt(merged(parts, split.ratio, table.seed, data.groups), table.seed, how)
        case Apart():
            total = _training_part(source, data)
            parts = deal(table, labels[:total], None if column is None else column[:total])
            sides = apart(parts, alike(table, labels, column), total, table.seed, split.validation)
            return Dealt(sides, table.seed, how)


def kept(sides: Mapping[str, Sides], count: int | None) -> Mapping[str, Sides]:
    """So many of the clients, spread evenly over all in their order; all of them for None."""
    if count is None:
        return sides
    if count > len(sides):
        raise LocalError(
            f"partition.keep = {count}, there are {len(sides)} clients; lower it, or leave it out"
        )
    clients = list(sides)
    return {
        client: sides[client]
        for client in (clients[place * len(clients) // count] for place in range(count))
    }


def check_groups(sides: Mapping[str, Sides], groups: Sequence[str] | None) -> None:
    """LocalError where records of one group, such as windows that overlap, are on two sides, at
    whatever silos.
    """
    if groups is None:
        return
    known, numbers = np.unique(np.array(groups, np.str_), return_inverse=True)
    side_of = np.full(len(known), -1)
    for silo, own in sides.items():
        for side, indices in enumerate((own.train, own.validation, own.test)):
            here = numbers[indices]
            clash = here[(side_of[here] >= 0) & (side_of[here] != side)]
            if len(clash):
                raise LocalError(
                    f"partition: records of group {str(known[clash[0]])!r}, which belong together,"
                    " are on two sides, "
                    f"one of them at silo {silo!r}; let one silo have all of a group, as kind ="
                    ' "column" does'
                )
            side_of[here] = side


def _column(sources: Sequence[str] | None) -> Sequence[str] | Sequence[int] | None:
    """Numbers as such, so that 2 comes before 10."""
    if sources is not None and all(own.isdecimal() and own == str(int(own)) for own in sources):
        return [int(own) for own in sources]
    return sources


def _training_part(source: DataTable, data: Dataset) -> int:
    """How many of the records, which come first, are official training records."""
    if not source.has_official_parts:
        raise LocalError(
            'split: kind = "apart" takes official training and test records: data of kind'
            ' torchvision or tiny-imagenet with part = "both"; write kind = "merged"'
        )
    return sum(own.startswith("train/") for own in data.ids or ())
