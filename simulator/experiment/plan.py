"""The input of a simulation: the silos' records, and one job for each method and seed."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...algorithms.engines.attendance import EVERYONE, Attendance
from ...algorithms.engines.engine import Records
from ...algorithms.job.job import Job
from ...algorithms.partition.file import PartitionFile


@dataclass(frozen=True, eq=False)
class Population:
    """Every silo's records by side, under the silos' names in jobs.

    ``digest`` is SHA-256 in hex of the partition and of all records: two populations with one
    digest are the same. ``partition`` is its file, None where records are drawn silo by silo.
    ``notes`` are for people.
    """

    records: Mapping[str, Records]
    classes: int  # 0 in a task without
    class_names: tuple[str, ...] | None
    digest: str
    partition: PartitionFile | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One method with one seed; ``label`` names it in folders, tables and curves.

    ``job`` has the seed, too. Runs of one label differ only in the seed. ``attendance`` is the
    same for all runs of an experiment.
    """

    label: str
    seed: int
    job: Job
    attendance: Attendance = EVERYONE

    @property
    def title(self) -> str:
        """Label and seed, which together identify a run of an experiment, for people."""
        return f"{self.label}, seed {self.seed}"


@dataclass(frozen=True)
class Schedule:
    """Rounds between two looks at all silos, and between two snapshots.

    Both also come after the last round. Without ``keep_models`` a finished run has neither models
    nor a snapshot.
    """

    look_every: int
    snapshot_every: int
    keep_models: bool = True
