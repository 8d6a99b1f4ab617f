"""What a simulation runs: the silos' records, and one job for each method and seed."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...algorithms.engines.engine import Records
from ...algorithms.job.job import Job
from ...algorithms.partition.file import PartitionFile


@dataclass(frozen=True, eq=False)
class Population:
    """Every silo's records by side, under the names that jobs take, and what names them exactly.

    ``digest`` is SHA-256 in hex of the partition and of all records: two populations with one
    digest are the same. ``partition`` is its file, where it is not drawn silo by silo; ``notes``
    are what a person should know of it.
    """

    records: Mapping[str, Records]
    classes: int
    class_names: tuple[str, ...] | None
    digest: str
    partition: PartitionFile | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One method with one seed; ``label`` names the method with its options in folders, tables and
    curves.
    """

    label: str
    seed: int
    job: Job


@dataclass(frozen=True)
class Schedule:
    """After how many rounds all silos are looked at, and after how many a checkpoint is written.

    The last counts.
    """

    look_every: int
    checkpoint_every: int
