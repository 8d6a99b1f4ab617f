"""Every silo's records, from the file of a simulation: read, dealt out and split once for all runs.

The records of all silos are views of one memory, in the order of silos and sides: together they
take what the data set takes, which is rearranged where it was read. CIFAR-10's 60,000 images take
0.74 GB.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...algorithms.catalog import method_class
from ...algorithms.data.dataset import Dataset
from ...algorithms.data.lazy import LazyRecords
from ...algorithms.data.options import DataTable
from ...algorithms.data.sources.public import synthetic
from ...algorithms.engines.engine import Records
from ...algorithms.partition.file import partition_file
from ...algorithms.partition.split import Sides
from ...algorithms.training.record_checks import same_id
from ...errors import LocalError
from ...files.documents import canonical_json
from .assign import check_groups, from_clients, from_file, from_tables, kept
from .experiment import CheckedExperiment, ExperimentFile
from .options import Merged, PartitionFromFile, Synthetic
from .plan import Population
from .silo_names import silo_names

Counts = NDArray[np.int64]
Indices = NDArray[np.int64]

# Domain separation: no other digest of ours begins like this.
DOMAIN = b"staddle/population/1"
MOST_NAMED = 10  # clients, in a note


def populate(experiment: CheckedExperiment) -> Population:
    """Every silo's records; LocalError says what the file, the data or the partition lack.

    It may take minutes. The records are rearranged in place, without a second copy.
    """
    file = experiment.file
    if not isinstance(file.data, Synthetic):
        return _populate(file, file.data)
    if not file.task.has_classes:
        raise LocalError(
            f"data of kind {file.data.kind!r} have classes, and the task is {file.task.kind}; take"
            " other data"
        )
    clients = list(map(str, range(file.data.silos)))
    # Synthetic records are drawn silo by silo, so there is nothing to deal out.
    drawn = _drawn(file.data, silo_names(clients, file.silos))
    classes, names = file.model.width, file.model.class_names
    return Population(
        records=drawn,
        classes=classes,
        class_names=names,
        digest=_digest(drawn, classes, names),
    )


def counts(population: Population) -> Counts:
    """Records by silo and class [N, C], all sides together; for a picture.

    Silos in the order of ``population.records``.
    """
    rows = []
    for records in population.records.values():
        # a picture shows who holds what, whatever it is for
        y = torch.cat([side.y for side in _sides(records).values()])
        rows.append(np.bincount(y.numpy(), minlength=population.classes))
    return np.array(rows, np.int64)


def _populate(file: ExperimentFile, source: DataTable) -> Population:
    # A partition depends on the labels, so the data comes first.
    data = _load(file, source)
    labels = file.task.strata(data.y).numpy()
    match file.partition:
        case None:
            dealt = from_clients(source, data, labels)
        case PartitionFromFile():
            dealt = from_file(file.partition, source, labels)
        case _:
            dealt = from_tables(file.partition, file.split or Merged(), source, data, labels)

    # a skewed partition may leave a client no record at all; such a client cannot train
    empty = [client for client, sides in dealt.sides.items() if not len(sides.all())]
    some = dict(dealt.sides)
    for client in empty:
        del some[client]
    held = kept(some, file.partition.keep if file.partition else None)
    silos = dict(zip(silo_names(tuple(held), file.silos), held.values(), strict=True))
    # After clients were left out, whose groups do not matter.
    check_groups(silos, data.groups)

    # Before ``cut`` rearranges the records, to which the partition's indices refer.
    partition = partition_file(silos, labels, source.title, dealt.seed, dealt.how)
    notes = _notes(empty, silos, len(some), len(data))
    records = cut(data, silos)
    names = file.model.class_names or data.class_names
    digest = _digest(records, file.model.width, names)
    classes = file.model.width if file.task.has_classes else 0
    return Population(
        records=records,
        classes=classes,
        class_names=names,
        digest=digest,
        partition=partition,
        notes=notes,
    )


def _load(file: ExperimentFile, source: DataTable) -> Dataset:
    # Report missing files before reading begins.
    source.check_present()
    # As silos read them.
    classes = map(method_class, map(attrgetter("name"), file.all_methods))
    wary = any(map(attrgetter("trains"), classes))
    data = source.load(file.model, file.features, wary=wary)
    # Before training: torch would fail at a class that the model has no output for.
    if fault := file.task.records_fault(data.y, file.model.width):
        raise LocalError(f"{source.where}: {fault}")

    # a record that is there twice may be trained on and tested on
    twice = same_id(data.ids)
    if twice:
        raise LocalError(
            f"{source.where}: records {twice[0]} and {twice[1]} have the same id; give each its own"
        )
    return data


def _drawn(table: Synthetic, silos: Sequence[str]) -> dict[str, Records]:
    keys = table.model_dump(exclude={"kind", "silos"})
    shards = synthetic.population(silos, **keys).shards
    return {silo: Records(*sides) for silo, sides in shards.items()}


def cut(data: Dataset, sides: Mapping[str, Sides]) -> dict[str, Records]:
    """The records of each silo, as views of the data set's memory, which is rearranged for it.

    In the order of ``sides``, each silo's records as train, validation, test. Do not use ``data``
    afterwards.
    """
    if isinstance(data.x, LazyRecords):
        return {silo: _taken(data, own) for silo, own in sides.items()}
    pieces: list[Indices] = []
    for own in sides.values():
        pieces += (own.train, own.validation, own.test)
    order = np.concatenate(pieces)
    # Records of no silo go to the end.
    rest = np.setdiff1d(np.arange(len(data)), order, assume_unique=True)
    x, y = data.held.contiguous(), data.y[torch.from_numpy(order)]
    # In place, since a second copy may not fit into memory.
    rearrange(x, np.concatenate([order, rest]))

    start = 0

    def following(count: int) -> Dataset:
        nonlocal start
        rows = slice(start, start + count)
        start += count
        known = {"features": data.features, "inputs": data.inputs}
        return Dataset(x[rows], y[rows], data.class_names, **known)  # type: ignore[arg-type]

    records = {}
    for silo, own in sides.items():
        train = following(len(own.train))
        validation = following(len(own.validation))
        test = following(len(own.test))
        records[silo] = Records(train, test, validation if len(validation) else None)
    return records


def _taken(data: Dataset, own: Sides) -> Records:
    """A silo's records of a data set that is read when it is used."""
    bare = replace(data, ids=None, sources=None, groups=None)
    validation = bare.take(own.validation) if len(own.validation) else None
    return Records(bare.take(own.train), bare.take(own.test), validation)


def rearrange(x: Tensor, order: NDArray[np.int64]) -> None:
    """Let row n be what row ``order[n]`` was, in place, along the cycles of the permutation.

    ``order`` is a permutation of the rows of ``x`` [N, ...], which must be contiguous.
    """
    rows, pending = x.numpy(), np.ones(len(order), dtype=bool)
    for start in range(len(order)):
        # The row was moved with an earlier cycle, or stays where it is.
        if not pending[start] or order[start] == start:
            continue
        # Keep one row of the cycle aside and move the others by one place.
        first, row = rows[start].copy(), start
        while (source := order[row]) != start:
            rows[row] = rows[source]
            pending[row], row = False, source
        rows[row] = first
        pending[row] = False


def _sides(records: Records) -> dict[str, Dataset]:
    sides = {"train": records.train}
    if records.validation is not None:
        sides["validation"] = records.validation
    return sides | {"test": records.test}


def _digest(records: Mapping[str, Records], classes: int, names: Sequence[str] | None) -> str:
    """SHA-256 in hex of each record, its silo and its side.

    The lengths stand before the bytes, so that no two populations run together into the same.
    """
    listed = None
    if names is not None:
        listed = list(names)
    digest = hashlib.sha256(DOMAIN + canonical_json([classes, listed]))

    # the records themselves, not their files: the same data read from another place is the same
    # population
    for silo, own in records.items():
        for side, data in _sides(own).items():
            named = sorted(data.inputs.items())
            digest.update(canonical_json([silo, side, list(data.x.shape), *named]))
            digest.update(_bytes(data.x))
            digest.update(data.y.contiguous().numpy().data)
    return digest.hexdigest()


def _bytes(x: Tensor | LazyRecords) -> memoryview | bytes:
    if isinstance(x, LazyRecords):
        # Nobody reads a whole set for its digest: which set it is, and which records.
        return x.identity().encode() + b"\0" + x.rows.tobytes()
    return x.contiguous().numpy().data


def _notes(
    empty: Sequence[str], silos: Mapping[str, Sides], clients: int, records: int
) -> tuple[str, ...]:
    notes = []
    if len(silos) < clients:
        notes.append(f"{len(silos)} of the partition's {clients} clients take part")
    if empty:
        named = ", ".join(empty[:MOST_NAMED])
        if len(empty) > MOST_NAMED:
            named += " …"
        notes.append(f"clients of the partition without any record take no part: {named}")
    # A partition may leave records out.
    rest = records - sum(len(own.all()) for own in silos.values())
    if rest:
        notes.append(f"{rest:,} of {records:,} records are given to no silo")
    return tuple(notes)
