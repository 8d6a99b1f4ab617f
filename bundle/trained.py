"""A trained model that is loaded: verified, rebuilt by this machine's code, and tried."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..algorithms.data.features import Feature, beyond_range, range_faults, shown
from ..algorithms.data.new_records import NewRecords
from ..algorithms.data.options import DataTable
from ..algorithms.data.registry import KINDS
from ..algorithms.data.rows import is_parquet
from ..algorithms.data.sources.formats.csv_file import Csv
from ..algorithms.job.foreign_code import Allowed, check_code
from ..algorithms.job.job import DERIVED, Job, JobFile
from ..algorithms.models.build import input_shape, vocabularies
from ..algorithms.models.class_names import names_fault
from ..algorithms.models.inputs import inputs_differ, shapes_of
from ..algorithms.numerics.devices import exact
from ..algorithms.tasks.multilabel import HALF
from ..algorithms.tasks.registry import guard
from ..algorithms.training.loop import evaluation_chunk
from ..algorithms.training.record_checks import LARGEST_MISS
from ..algorithms.training.silo_round import state_from_bytes
from ..errors import LocalError
from ..files.documents import validate
from ..files.file_bounds import check_fits
from ..files.packages import others_code
from . import folder
from .description import Description
from .making import trial_answers
from .predictor import Predictor

PATHS = ("file", "folder")  # keys of a [data] table that a contract lacks
NAMING = ("output_names", "job.model")  # keys of a description
SAID = ", with {} {!r}"  # what is said of a file
TRIAL_BYTES = 64  # per number of a record: two of them, and what a few layers make of them
# Releases and machines round otherwise; a model that is computed otherwise is further off.
RELATIVE, ABSOLUTE = 1e-3, 1e-4


@dataclass(frozen=True, eq=False)
class AnsweredRecords:
    """Records by name, the model's answers [B, answers, …] and decisions [B, …], if there are any.

    ``outside`` names for each record the features that are beyond their declared range.
    """

    names: tuple[str, ...]
    answers: Tensor
    decisions: Tensor | None
    outside: tuple[str, ...]


@dataclass(frozen=True, eq=False, repr=False)
class TrainedModel:
    """A model that is ready for new records.

    ``module`` takes records as the model takes them, [B, …] float32, and gives answers.
    """

    folder: folder.VerifiedFolder
    job: Job
    module: Predictor
    written: Mapping[str, str] = field(default_factory=dict)
    """How CSV files are written, where it is another way than the contract's (``as_written``)."""
    said: str = ""
    """The same, as errors have it."""

    def __repr__(self) -> str:
        """What a notebook shows."""
        origin = self.description.origin
        where = f"job {self.job.name!r}, {origin.role} {origin.name!r}"
        return f"<{type(self).__name__} of {where}: {', '.join(self.answer_names)}>"

    @property
    def description(self) -> Description:
        """What the model is."""
        return self.folder.description

    @property
    def answer_names(self) -> tuple[str, ...]:
        """The columns of answers."""
        return self.job.task.answer_names(self.description.output_names)

    @property
    def threshold_names(self) -> tuple[str, ...]:
        """The labels, or the one of two classes, that may have a threshold."""
        return self.description.output_names[-self.job.task.cut_offs(self.job.model.width) :]

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Those by which it decides, 0.5 for a label without one; empty if none has any."""
        found = {own.of: own.value for own in self.description.thresholds}
        return tuple(found.get(name, HALF) for name in self.threshold_names) if found else ()

    @cached_property
    def contract(self) -> DataTable:
        """How records are read, with the constants that the silo took from the job."""
        kind = KINDS.get(str(self.description.contract.get("kind")))
        where = f"{self.folder.path / folder.DESCRIPTION}: contract{self.said}"
        if kind is None:
            raise LocalError(f"{where}: unknown kind; load it with the release that made it")
        there = dict.fromkeys(filter(kind.model_fields.__contains__, PATHS), Path("data"))
        table = validate({**self.description.contract, **self.written, **there}, kind, where)
        return table.agreed(self.job.features, self.module.learned)

    def as_written(self, data: Path, **keys: str | None) -> Self:
        """The model for a CSV file whose delimiter, decimal or encoding is not the contract's.

        ``keys`` are those of a [data] table; None leaves that of the contract. LocalError for a
        file, or a model, to which they do not apply.
        """
        given = {key: own for key, own in keys.items() if own is not None}
        if given and (is_parquet(data) or not isinstance(self.contract, Csv)):
            options = " and ".join(map("--{}".format, given))
            raise LocalError(f"{data}: only CSV files are read by {options}; leave that out")
        return replace(self, written=given, said="".join(map(SAID.format, given, given.values())))

    def answer(self, data: Path) -> Iterator[AnsweredRecords]:
        """The answers for a file or folder of new records, piece by piece.

        LocalError where it has not what the contract says. Too many values outside a declared range
        are told with the last piece.
        """
        rows = evaluation_chunk((1, *input_shape(self.job.model)), self.module.parts)
        yield from self.answers_of(
            self.contract.new_records(data, input_shape(self.job.model), rows), str(data)
        )

    def answers_of(self, pieces: Iterable[NewRecords], where: str) -> Iterator[AnsweredRecords]:
        """The answers for records as the model takes them; ``where`` names them in errors."""
        ranges, total = Ranges(self.job.features), 0
        for piece in pieces:
            self._check(piece, where)
            total += len(piece.x)
            with exact(), guard(self.job.task):
                answers = self.module.answers(piece.x)
                decisions = self.job.task.decisions(answers, self.thresholds)
            # Else a class would be called that no number stands for.
            if not answers.isfinite().all():
                raise LocalError(
                    f"{self.folder.path}: answers with NaN or infinity: its training"
                    " diverged; use another model"
                )
            yield AnsweredRecords(tuple(piece.names), answers, decisions, ranges.outside(piece.x))
        if not total:
            raise LocalError(f"{where}: holds no records; give at least one")
        ranges.check(where)

    def _check(self, piece: NewRecords, where: str) -> None:
        """LocalError for a record that the model would misread."""
        model, x = self.job.model, piece.x
        if differs := inputs_differ(shapes_of(model.named_inputs), piece.inputs):
            raise LocalError(f"{where}: {differs}")
        wrong = {"holds NaN or a value beyond float32": ~x.isfinite()}
        for place, tokens in vocabularies(model):
            own = x[:, place]
            odd = (own != own.round()) | (own < 0) | (own >= tokens)
            wrong[f"has numbers that are no tokens from 0 to {tokens - 1}"] = odd
        for why, found in wrong.items():
            if found.any():
                name = piece.names[int(found.flatten(1).any(1).nonzero()[0])]
                raise LocalError(f"{where}: record {name} {why}; correct it, or leave it out")


class Ranges:
    """Values outside the ranges that features declare, over all pieces of a file."""

    def __init__(self, features: tuple[Feature, ...]) -> None:
        self._features = features
        self._found: dict[str, tuple[int, int]] = {}

    def outside(self, x: Tensor) -> tuple[str, ...]:
        """By record, the names of features whose value is outside; empty texts where none is."""
        names: list[list[str]] = [[] for _ in range(len(x))]
        for feature, beyond, here in beyond_range(self._features, x):
            records, values = self._found.get(feature.name, (0, 0))
            own = records + int(beyond.sum()), values + int(here.sum())
            self._found[feature.name] = own
            for place in beyond.nonzero().flatten().tolist():
                names[place].append(feature.name)
        return tuple(map("; ".join, names))

    def check(self, where: str) -> None:
        """LocalError where so many values are outside that a column seems to be something else."""
        if faults := range_faults(self._features, self._found, LARGEST_MISS):
            raise LocalError(f"{where}: {shown(faults)}")


def load(path: Path, packages: Allowed = ()) -> TrainedModel:
    """The model of a folder; its files are as they were signed, and it computes what it computed.

    ``packages`` are installed ones of other projects whose code may run. LocalError says what of
    this does not hold, or how this machine's code differs.
    """
    verified = folder.read(path)
    document, where = verified.description.job, str(path / folder.DESCRIPTION)
    check_code(document, packages, where)
    # A description from elsewhere may ask for anything, and code of packages fails in any way.
    with others_code(f"{where}: the model cannot be rebuilt", "free memory, or ask for it again"):
        job = _job(verified, where)
        if fault := names_fault(verified.description.output_names, job.model.width, *NAMING):
            raise LocalError(f"{where}: {fault}")
        weights = path / folder.WEIGHTS
        tried = TRIAL_BYTES * prod(input_shape(job.model))
        check_fits(weights, 2 * weights.stat().st_size + tried, "the model and its trial")
        state = state_from_bytes(weights.read_bytes(), str(weights))
        module = Predictor.of(job, verified.description.origin.name, state)
        _try(module, job, verified)
    return TrainedModel(verified, job, module)


def _job(verified: folder.VerifiedFolder, where: str) -> Job:
    document = verified.description.job
    written: dict[str, Any] = {key: own for key, own in document.items() if key not in DERIVED}
    # Whether another version of the method computes the same is what the trial says.
    method = written.get("method")
    if isinstance(method, Mapping):
        written["method"] = {key: own for key, own in method.items() if key != "version"}
    job = Job.from_file(validate(written, JobFile, where), where)
    return job if verified.description.origin.kind == "simulation" else job.for_federation()


def _try(module: Predictor, job: Job, verified: folder.VerifiedFolder) -> None:
    """LocalError unless the model gives for made-up records what it gave where it was made."""
    with exact():
        found = trial_answers(module, job)
    wanted = torch.tensor(verified.description.self_test.outputs, dtype=torch.float64)
    same = found.shape == wanted.shape
    if same and torch.allclose(found, wanted, rtol=RELATIVE, atol=ABSOLUTE):
        return
    made = verified.description.releases
    raise LocalError(
        f"{verified.path}: this release computes something else of the model than where it was"
        f" made; install staddle {made.staddle} with torch {made.torch}"
    )
