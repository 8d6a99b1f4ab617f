"""The tables [data], [partition] and [split] of a simulation's file."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, PlainValidator

from ...algorithms.data import registry
from ...algorithms.data.options import Shared, SourceTable
from ...algorithms.data.sources.public.pfllib import Pfllib
from ...algorithms.data.sources.public.synthetic import LARGEST, PUBLISHED_SILOS
from ...algorithms.job.job import Seed
from ...algorithms.partition import options
from ...algorithms.partition.other_files import Format
from ...algorithms.partition.split import Ratio
from ...files.documents import Strict
from ...files.tagged import of_kind

Count = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class Synthetic(SourceTable):
    """``kind = "synthetic"``: ``synthetic.population``, which needs no partition.

    The defaults give the distributions that PPFL published, but other draws
    (algorithms/data/sources/public/synthetic.py).
    """

    kind: Literal["synthetic"]
    silos: Annotated[int, Field(strict=True, ge=2, le=10_000)] = PUBLISHED_SILOS
    components: Count = 3
    dimension: Count = 150
    alpha: Positive = 0.4
    noise: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0.1
    seed: Seed = 12345
    tests: Count = 100
    """Test records of each silo."""
    largest: Count = LARGEST
    """Training records of the largest silo."""


class PartitionFromFile(Strict):
    """``file = …``: a file, of this software or another, with each silo's records and sides.

    ``format`` is one of ``other_files``; left out, the file's content shows it.
    """

    kind: Literal["file"] = "file"
    file: Path
    format: Format | None = None
    keep: Count | None = None
    """So many of its clients take part, spread evenly over all in their order; all if left out."""


class Merged(Strict):
    """``kind = "merged"``: both official parts together, each silo's share split by a ratio.

    ``ratio`` is that of training and test records, or with a third number, of validation records,
    too.
    """

    kind: Literal["merged"] = "merged"
    ratio: Ratio = "75/25"


class Apart(Strict):
    """``kind = "apart"``: official training records partitioned, official test records alike.

    Each silo is tested on official test records in proportion to its own classes.
    """

    kind: Literal["apart"]
    validation: Annotated[bool, Field(strict=True)] = False
    """One in nine training records becomes a validation record."""


PARTITIONS: dict[str, type[Strict]] = {**options.KINDS, "file": PartitionFromFile}
SPLITS: dict[str, type[Strict]] = {"merged": Merged, "apart": Apart}


def _data(value: Any) -> SourceTable:
    # Both hold the records of all silos, so neither is in a silo's configuration.
    of_all: dict[str, type[SourceTable]] = {"pfllib": Pfllib, "synthetic": Synthetic}
    kinds = {**registry.KINDS, **of_all}
    # The default kind is that of a silo's configuration.
    table = of_kind(value, kinds, "npz")

    # one table serves a silo's configuration too; there these split its records, here [split] and
    # [partition] do, and a key without effect would mislead
    if "test_fraction" in table.model_fields_set:
        raise ValueError(
            "test_fraction is of a silo's configuration; take it out, [split] says what is"
            " tested on"
        )
    if isinstance(table, Shared) and table.share is not None:
        raise ValueError(
            "share is of a silo's configuration; take it out, [partition] deals out the records"
        )
    return table


def _partition(value: Any) -> Strict:
    # a table that names a file needs no kind
    default = None
    if isinstance(value, dict) and "file" in value:
        default = "file"
    return of_kind(value, PARTITIONS, default)


def _split(value: Any) -> Strict:
    return of_kind(value, SPLITS, "merged")


Data: TypeAlias = Annotated[registry.Source | Pfllib | Synthetic, PlainValidator(_data)]
Partition: TypeAlias = Annotated[options.Partition | PartitionFromFile, PlainValidator(_partition)]
Split: TypeAlias = Annotated[Merged | Apart, PlainValidator(_split)]


def below(data: Data, partition: Partition | None, folder: Path) -> tuple[Data, Partition | None]:
    """The same tables, with paths that start at a folder.

    Absolute paths stay as they are.
    """
    if isinstance(partition, PartitionFromFile):
        partition = partition.model_copy(update={"file": folder / partition.file})
    return data.below(folder), partition
