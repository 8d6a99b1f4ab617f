"""The file of a simulation: a job file with a few more tables, for several methods and seeds.

::

    version = 1
    name = "digits"
    seeds = [1, 2]             # or seed = 1
    rounds = 20
    participation = 0.5
    # silos = ["clinic-a", …]  # names of the partition's clients, in its order; left out, it names
                               them

    [data]            # as in a silo's configuration, or kind = "synthetic"; paths start at this
                      file
    kind = "bundled"
    name = "digits"

    [partition]           # or file = "partition.json", or that of another program
    kind = "dirichlet"
    silos = 10
    alpha = 0.5
    seed = 0              # of its own: all runs have the same partition

    [split]                           # or kind = "apart", with validation = true or false
    kind = "merged"
    ratio = "75/25"

    [model]
    name = "cnn-digits"
    classes = 10

    [training]
    epochs = 1
    batch_size = 32
    lr = 0.1

    [[methods]]                       # or one [method]
    name = "fedavg"

    [[methods]]
    name = "pfedsim"
    label = "pfedsim-early"           # of its folder and curve; left out, the method's name
    options = { rho = 0.3 }
    training = { lr = 0.05 }          # and model, rounds: what is different for this method

    [sweep]                           # values that each method tries (sweep.py)
    "training.lr" = [0.01, 0.05]

    [simulation]
    look_every = 1                    # rounds after which all silos are evaluated
    snapshot_every = 10               # rounds after which a snapshot is written
    keep_models = true                # false: neither models nor a snapshot once a run is finished

    [attendance]                      # who is there (algorithms/engines/attendance.py); left out,
                                      all silos are there in each round

A job file with [data] and [partition] is such a file too. [security] stays in the jobs: a
simulation adds up in the clear, withholds what a blind job withholds, and rejects what it rejects,
such as silos that change from round to round under private weights. The counts of silos may be left
out of it, since a simulation knows them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import BeforeValidator, Field

from ...algorithms.data.sources.public.pfllib import Pfllib
from ...algorithms.engines.attendance import EVERYONE, Attendance
from ...algorithms.job.job import Job, JobFile, JobSettings, MethodTable, Seed, Silos
from ...algorithms.job.security import SecurityTable
from ...algorithms.models.build import ModelOptions, input_shape
from ...algorithms.partition import options
from ...errors import LocalError, check_local
from ...files.documents import Strict, read_bytes, validate
from ...files.program_code import find_in, names_program
from ...files.toml_document import parse_document
from .chosen_method import ChosenMethod
from .options import Count, Data, Partition, PartitionFromFile, Split, Synthetic, below
from .overrides import overridden
from .plan import Schedule
from .silo_names import numbered
from .sweep import SweepTable, Variant, expanded

FEWEST = 2  # silos of a job


def _no_privacy(value: Any) -> None:
    if value is not None:
        raise ValueError(
            "a simulation keeps no privacy budget; take the table out, or run the job by staddle"
            " demo --private, or in a federation"
        )


class SimulationTable(Strict):
    """The [simulation] table.

    No key affects training.
    """

    look_every: Count = 1
    """Rounds after which all silos are evaluated."""
    snapshot_every: Count = 10
    """Rounds after which it is kept how far a run has come."""
    keep_models: bool = True
    """Whether silos' models and the last snapshot stay once a run is finished."""


class ExperimentFile(JobSettings):
    """The file.

    Errors name the key and the fix.
    """

    seed: Seed | None = None
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] | None = None
    silos: Silos | None = None
    sweep: SweepTable | None = None
    method: ChosenMethod | None = None
    methods: Annotated[tuple[ChosenMethod, ...], Field(min_length=1)] | None = None
    privacy: Annotated[None, BeforeValidator(_no_privacy)] = None
    data: Data
    partition: Partition | None = None
    split: Split | None = None
    simulation: SimulationTable = SimulationTable()
    attendance: Attendance = EVERYONE

    @pydantic.model_validator(mode="after")
    def _one_of_two(self) -> "ExperimentFile":
        self._check_either("seed", "seeds", "seeds = [1, 2]")
        self._check_either("method", "methods", "[[methods]]")

        # label and seed name a run's folder: two runs of one name would write into one another's;
        # some disks tell no case apart
        _once("seeds", list(map(str, self.all_seeds)), "keep one of each")
        titles = [method.title.lower() for method in self.all_methods]
        _once("methods", titles, 'give each a label = "…" of its own')
        _once("silos", self.silos or (), "keep one of each")
        return self

    def _check_either(self, one: str, several: str, shown: str) -> None:
        has_one = getattr(self, one) is not None
        has_several = getattr(self, several) is not None
        if has_one == has_several:
            found = "both" if has_one else "neither"
            raise ValueError(f"{found} of {one} and {several}; give {one}, or several as {shown}")

    @pydantic.model_validator(mode="after")
    def _dealt_out_once(self) -> "ExperimentFile":
        # Exactly one table may say which silo and side each record goes to.
        match self.data, self.partition:
            case Synthetic(), None:
                if self.split is not None:
                    raise ValueError("split: synthetic records are drawn for a side; take it out")
            case Synthetic(), _:
                raise ValueError("partition: synthetic records are drawn silo by silo; take it out")
            case Pfllib(), None:
                if self.split is not None:
                    raise ValueError(
                        "split: PFLlib's files say which side a record is on; take it out, or add"
                        " [partition] to deal the records out again"
                    )
            case _, None:
                raise ValueError(
                    "missing key 'partition'; add it: it says which silo holds which records"
                )
            case _, PartitionFromFile() if self.split is not None:
                raise ValueError(
                    "split: the partition's file says which side a record is on; take it out"
                )
        return self

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The file's ``seed`` or ``seeds``."""
        if self.seed is not None:
            return (self.seed,)
        return self.seeds or ()

    @property
    def all_methods(self) -> tuple[ChosenMethod, ...]:
        """The file's ``method`` or ``methods``."""
        if self.method is not None:
            return (self.method,)
        return self.methods or ()


@dataclass(frozen=True)
class CheckedExperiment:
    """An experiment file that was read; paths in it are absolute or start at its folder.

    ``path`` is for errors; paths in ``file`` are resolved already. Those of [model.weights] start
    at ``folder``, since methods may have their own. Methods of a sweep stand in ``file`` as their
    ``variants``.
    """

    path: Path
    file: ExperimentFile
    folder: Path
    variants: tuple[Variant, ...] = ()

    @property
    def name(self) -> str:
        """The file's name for it."""
        return self.file.name

    @property
    def schedule(self) -> Schedule:
        """The [simulation] table."""
        own = self.file.simulation
        return Schedule(own.look_every, own.snapshot_every, keep_models=own.keep_models)


def read(path: Path, settings: Sequence[str] = ()) -> CheckedExperiment:
    """Read the file; LocalError names file, key, value and the fix, in a method's changes too.

    ``settings`` replace some of the file's (overrides.py). Paths in both start at its folder, where
    functions of a program are found, too (files/program_code.py).
    """
    document = overridden(parse_document(read_bytes(path), str(path)), settings)
    # Only then: a file from elsewhere must not bring modules that it does not name.
    if names_program(document):
        find_in(path.parent)
    file = validate(document, ExperimentFile, str(path))
    _check_not_swept(file, settings)
    return checked(path, file, path.parent)


def _check_not_swept(file: ExperimentFile, settings: Sequence[str]) -> None:
    """LocalError for a setting of the command line that each variant would replace again."""
    if file.sweep is None:
        return
    for setting in settings:
        key = setting.partition("=")[0].strip()
        check_local(
            key not in file.sweep.settings,
            f"--set {setting}: [sweep] has values for {key!r}; choose a variant by --method, or"
            " change [sweep]",
        )


def checked(path: Path, file: ExperimentFile, folder: Path) -> CheckedExperiment:
    """The experiment of a file whose paths start at ``folder``.

    LocalError, which names ``path``, where a method cannot work.
    """
    # First, so that errors about files show full paths.
    data, partition = below(file.data, file.partition, folder)
    located = file.model_copy(update={"data": data, "partition": partition})
    variants: tuple[Variant, ...] = ()
    if file.sweep is not None:
        tables = list(ExperimentFile.model_fields)
        methods, variants = expanded(file.all_methods, file.sweep, tables, str(path))
        located = located.model_copy(update={"method": None, "methods": methods})
    experiment = CheckedExperiment(path, located, folder, variants)

    # reading the data may take minutes: a wrong method is found before, with names that stand in
    # for the silos'
    silos = stand_ins(file)
    for method in located.all_methods:
        # Any seed will do for this check.
        job = job_of(experiment, method, 0, silos, SecurityTable())
        # A file that does not fit would end each run of its own.
        job.start_values()
        fault = _records_fault(file.model, job.model)
        if fault:
            raise LocalError(f"{path}, method {method.title!r}: {fault}")
    return experiment


def job_of(
    experiment: CheckedExperiment,
    method: ChosenMethod,
    seed: int,
    silos: Sequence[str],
    security: SecurityTable,
) -> Job:
    """The job of a method with a seed; LocalError names the method and what is wrong with it.

    ``silos`` are names in job order. Settings that the file leaves out get a job file's defaults.
    """
    file = experiment.file
    origin = f"{experiment.path}, method {method.title!r}"

    # what a person left out stays out, so that the defaults are a job file's own
    document = file.model_dump(include=set(JobSettings.model_fields), exclude_unset=True)
    document |= {
        "seed": seed,
        "silos": tuple(silos),
        "security": security.model_dump(exclude_unset=True),
        "method": method.model_dump(include=set(MethodTable.model_fields), exclude_unset=True),
    }

    # checked together, and not table by table: a method's changes are to what the file has
    document["training"] |= method.training
    document["model"] |= method.model
    if method.rounds is not None:
        document["rounds"] = method.rounds
    # Validated like a job file, so that simulation and federation accept the same.
    return Job.from_file(validate(document, JobFile, origin), origin, experiment.folder)


def _records_fault(of_file: ModelOptions, of_method: ModelOptions) -> str:
    """Why a method's model does not take the records that the file's takes; empty if it does."""
    pairs = {
        "inputs": (of_file.inputs, of_method.inputs),
        "input": (input_shape(of_file), input_shape(of_method)),
        "classes": (of_file.classes, of_method.classes),
        "outputs": (of_file.outputs, of_method.outputs),
        "class_names": (of_file.class_names, of_method.class_names),
    }
    for key, (own, other) in pairs.items():
        if own != other:
            return (
                f"its model has {key} {other}, [model] of the file {own}; all methods take the same"
                " records"
            )
    return ""


def stand_ins(file: ExperimentFile) -> tuple[str, ...]:
    """Names of silos before any record is read: the file's own, or numbers in their place."""
    return file.silos or numbered(_announced(file))


def _announced(file: ExperimentFile) -> int:
    """The number of silos, as far as the file says it before any record is read."""
    match file.data, file.partition:
        case Synthetic(silos=count), _:
            return count
        case _, options.PartitionTable(keep=int(count)) | PartitionFromFile(keep=int(count)):
            return count
        case _, options.BySource(silos=by_source):
            return sum(by_source.values())
        # Only the records tell how many; for checking the method, any possible number will do.
        case _, options.ByColumn() | PartitionFromFile() | None:
            return max(file.min_cohort, FEWEST)
        case _, table:
            return table.silos


def _once(key: str, values: Sequence[str], fix: str) -> None:
    # Subtract each value once: repeated ones remain.
    repeated = Counter(values) - Counter(set(values))
    twice = sorted(repeated)
    if twice:
        raise ValueError(f"{key} has {', '.join(twice)} more than once; {fix}")
