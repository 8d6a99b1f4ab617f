"""From the file of a simulation to every silo's records: read, dealt out, split and cut, once for
all runs.

The records of all silos are views of one memory, in the order of silos and sides: together they
take what the data set takes, which is rearranged where it was read. CIFAR-10's 60,000 images take
0.74 GB.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...algorithms.data.dataset import Dataset
from ...algorithms.data.options import DataTable
from ...algorithms.data.sources import synthetic
from ...algorithms.engines.engine import Records
from ...algorithms.partition.file import partition_file
from ...algorithms.partition.split import Sides
from ...algorithms.training.record_checks import same_id
from ...errors import LocalError
from ...files.documents import canonical_json
from .assign import check_groups, from_file, from_tables, kept
from .experiment import Experiment, ExperimentFile
from .options import Merged, PartitionFromFile, Synthetic
from .plan import Population
from .silo_names import silo_names

Counts = NDArray[np.int64]

DOMAIN = b"staddle/population/1"
MOST_NAMED = 10  # clients, in a note


def populate(experiment: Experiment) -> Population:
    """Every silo's records; LocalError says what the file, the data or the partition lack."""
    file = experiment.file
    if isinstance(file.data, Synthetic):
        drawn = _drawn(
            file.data, silo_names([str(number) for number in range(file.data.silos)], file.silos)
        )
        names = file.model.class_names
        return Population(
            drawn, file.model.classes, names, _digest(drawn, file.model.classes, names)
        )
    return _populate(file, file.data)


def counts(population: Population) -> Counts:
    """Records by silo and class [N, C], all sides together; for a picture."""
    held = [
        torch.cat([side.y for _, side in _sides(records)])
        for records in population.records.values()
    ]
    return np.array([np.bincount(y.numpy(), minlength=population.classes) for y in held], np.int64)


def _populate(file: ExperimentFile, source: DataTable) -> Population:
    if file.partition is None:
        raise LocalError(f"data of kind {source.kind!r} take a [partition]; add it")
    data = _load(file, source)
    if isinstance(file.partition, PartitionFromFile):
        dealt = from_file(file.partition, source, data)
    else:
        dealt = from_tables(file.partition, file.split or Merged(), source, data)
    some = {client: sides for client, sides in dealt.sides.items() if len(sides.all())}
    held = kept(some, file.partition.keep)
    silos = dict(zip(silo_names(tuple(held), file.silos), held.values(), strict=True))
    check_groups(silos, data.groups)
    partition = partition_file(silos, data.y.numpy(), source.title, dealt.seed, dealt.how)
    records = cut(data, silos)
    classes, names = file.model.classes, file.model.class_names or data.class_names
    notes = _notes(
        [client for client in dealt.sides if client not in some], silos, len(some), len(data)
    )
    return Population(records, classes, names, _digest(records, classes, names), partition, notes)


def _load(file: ExperimentFile, source: DataTable) -> Dataset:
    source.check_present()
    data = source.load(file.model)
    outside = data.y[(data.y < 0) | (data.y >= file.model.classes)]
    if len(outside):
        raise LocalError(
            f"{source.where}: label {int(outside[0])} in {len(outside)} of {len(data)} records,"
            f" model.classes = {file.model.classes}: its classes are 0 to {file.model.classes - 1};"
            " correct it, or number from 0"
        )
    if twice := same_id(data.ids):
        raise LocalError(
            f"{source.where}: records {twice[0]} and {twice[1]} have the same id; give each its own"
        )
    return data


def _drawn(table: Synthetic, silos: Sequence[str]) -> dict[str, Records]:
    keys = table.model_dump(exclude={"kind", "silos"})
    return {
        silo: Records(*sides) for silo, sides in synthetic.population(silos, **keys).shards.items()
    }


def cut(data: Dataset, sides: Mapping[str, Sides]) -> dict[str, Records]:
    """The records of each silo, as views of the data set's memory, which is rearranged: it holds
    nothing else then.
    """
    pieces = [piece for own in sides.values() for piece in (own.train, own.validation, own.test)]
    order = np.concatenate(pieces)
    rest = np.setdiff1d(np.arange(len(data)), order, assume_unique=True)
    x, y = data.x.contiguous(), data.y[torch.from_numpy(order)]
    rearrange(x, np.concatenate([order, rest]))
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    cuts = iter(
        Dataset(x[end - len(piece) : end], y[end - len(piece) : end], data.class_names)
        for piece, end in zip(pieces, ends, strict=True)
    )
    return {silo: _records(*(next(cuts) for _ in range(3))) for silo in sides}


def _records(train: Dataset, validation: Dataset, test: Dataset) -> Records:
    return Records(train, test, validation if len(validation) else None)


def rearrange(x: Tensor, order: NDArray[np.int64]) -> None:
    """Let row n be what row ``order[n]`` was, in place, along the cycles of the permutation."""
    rows, pending = x.numpy(), np.ones(len(order), dtype=bool)
    for start in range(len(order)):
        if not pending[start] or order[start] == start:
            continue
        first, here = rows[start].copy(), start
        while (source := order[here]) != start:
            rows[here] = rows[source]
            pending[here], here = False, source
        rows[here] = first
        pending[here] = False


def _sides(records: Records) -> Iterator[tuple[str, Dataset]]:
    yield "train", records.train
    if records.validation is not None:
        yield "validation", records.validation
    yield "test", records.test


def _digest(records: Mapping[str, Records], classes: int, names: Sequence[str] | None) -> str:
    """Of what each record is, whose, and on which side.

    A length before all bytes keeps two from running together.
    """
    digest = hashlib.sha256(
        DOMAIN + canonical_json([classes, None if names is None else list(names)])
    )
    for silo, own in records.items():
        for side, data in _sides(own):
            digest.update(canonical_json([silo, side, list(data.x.shape)]))
            digest.update(data.x.contiguous().numpy().data)
            digest.update(data.y.contiguous().numpy().data)
    return digest.hexdigest()


def _notes(
    empty: Sequence[str], silos: Mapping[str, Sides], clients: int, records: int
) -> tuple[str, ...]:
    notes = (
        [f"{len(silos)} of the partition's {clients} clients take part"]
        if len(silos) < clients
        else []
    )
    if empty:
        named = ", ".join(empty[:MOST_NAMED]) + (" …" if len(empty) > MOST_NAMED else "")
        notes.append(f"clients of the partition without any record take no part: {named}")
    if rest := records - sum(len(own.all()) for own in silos.values()):
        notes.append(f"{rest:,} of {records:,} records are given to no silo")
    return tuple(notes)
