"""Assigns records to clients and sides, by the tables of an experiment or by a file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...algorithms.data.dataset import Dataset
from ...algorithms.data.options import DataTable
from ...algorithms.partition.options import ByColumn, Partition, alike, deal
from ...algorithms.partition.other_files import read_partition
from ...algorithms.partition.split import Sides, apart, merged
from ...errors import LocalError, check_local
from .options import Apart, Merged, PartitionFromFile, Split

Indices = NDArray[np.int64]

DECIMAL = re.compile(r"0|[1-9][0-9]*")


@dataclass(frozen=True, eq=False)
class Dealt:
    """The sides of each client; ``seed`` and ``how`` go into the partition's file.

    ``seed`` is None if another program's file does not name it.
    """

    sides: Mapping[str, Sides]
    seed: int | None
    how: Mapping[str, Any]


def from_file(table: PartitionFromFile, source: DataTable, labels: Indices) -> Dealt:
    """The sides that a file holds, which was made for these records and labels [N].

    LocalError if the file does not fit these records.
    """
    found = read_partition(table.file, labels, source.title, table.format)
    for client, own in found.sides().items():
        train, test = len(own.train), len(own.test)
        # One without any record takes no part.
        if (train or test) and not (train and test):
            raise LocalError(
                f"{table.file}: client {client!r} has {train} training records and {test} test"
                " records; give it both, or neither to leave it out (FL-bench: --split sample)"
            )
    return Dealt(found.sides(), found.seed, found.how)


def from_clients(source: DataTable, data: Dataset, labels: Indices) -> Dealt:
    """The sides that a source of whole clients has, such as PFLlib's folders."""
    by_client = ByColumn(kind="column", minimum=0)
    return from_tables(by_client, Apart(kind="apart"), source, data, labels)


def from_tables(
    table: Partition, split: Split, source: DataTable, data: Dataset, labels: Indices
) -> Dealt:
    """The sides, dealt out and split; the same tables and records make the same sides.

    ``table`` says how records are dealt out to clients, by ``labels`` [N] where it looks at them,
    and ``split`` which of them are tested on.
    """
    column = _column(data.sources)
    how = table.model_dump(exclude={"seed"}, exclude_none=True)
    # The partition's file says how it was made.
    how["split"] = split.model_dump()

    # merged deals out all records and then splits each client's; apart deals out the official
    # training records, and the test records by the same shares of classes
    match split:
        case Merged():
            parts = deal(table, labels, column)
            sides = merged(parts, split.ratio, table.seed, data.groups)
        case Apart():
            total = _training_part(source, data)
            training = None
            if column is not None:
                training = column[:total]
            parts = deal(table, labels[:total], training)
            groups = alike(table, labels, column)
            sides = apart(parts, groups, total, table.seed, split.validation)
    return Dealt(sides, table.seed, how)


def kept(sides: Mapping[str, Sides], count: int | None) -> Mapping[str, Sides]:
    """``count`` of the clients, spread evenly over all in their order; all of them for None.

    LocalError if there are fewer. Each client keeps all of its records.
    """
    if count is None:
        return sides
    check_local(
        count <= len(sides),
        f"partition.keep = {count}, there are {len(sides)} clients; lower it, or leave it out",
    )

    # a partition may be sorted, by size or by class: the first ones would be of one kind
    clients = list(sides.items())
    chosen = {}
    for number in range(count):
        client, own = clients[number * len(clients) // count]
        chosen[client] = own
    return chosen


def check_groups(sides: Mapping[str, Sides], groups: Sequence[str] | None) -> None:
    """LocalError where records of one group are on two sides, at whatever silos.

    A group is, for example, windows that overlap: a model tested on one has seen the other.
    """
    if groups is None:
        return
    # Groups as numbers: there may be almost as many as records.
    known, numbers = np.unique(np.array(groups, np.str_), return_inverse=True)
    side_of = np.full(len(known), -1)  # by group; -1: not seen yet
    for silo, own in sides.items():
        for side, indices in enumerate((own.train, own.validation, own.test)):
            present = numbers[indices]
            before = side_of[present]
            # Groups that were seen before on another side.
            clash = present[(before >= 0) & (before != side)]
            if len(clash):
                raise LocalError(
                    f"partition: records of group {str(known[clash[0]])!r}, which belong together,"
                    " are on two sides, "
                    f"one of them at silo {silo!r}; let one silo have all of a group, as kind ="
                    ' "column" does where all records of a group have one source'
                )
            side_of[present] = side


def _column(sources: Sequence[str] | None) -> Sequence[str] | Sequence[int] | None:
    """Numbers as such, so that 2 comes before 10."""
    if sources is None:
        return None
    if all(DECIMAL.fullmatch(source) for source in sources):
        return list(map(int, sources))
    return sources


def _training_part(source: DataTable, data: Dataset) -> int:
    """The number of official training records, which come first."""
    if not source.has_official_parts:
        raise LocalError(
            'split: kind = "apart" takes official training and test records: data of kind'
            ' torchvision or tiny-imagenet with part = "both"; write kind = "merged"'
        )
    # Ids of records begin with the name of their official part.
    return sum(own.startswith("train/") for own in data.ids or ())
