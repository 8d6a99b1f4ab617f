"""The job: what silos, coordinator and simulator all read, and what the operator signs.

A job file, as a person writes it::

    version = 1
    name = "digits"
    seed = 7
    rounds = 10
    silos = ["clinic-a", "clinic-b", "clinic-c"]

    [method]
    name = "pfedsim"
    options = { rho = 0.5 }

    [model]
    name = "cnn-digits"
    classes = 10

    [training]
    epochs = 2
    batch_size = 32
    lr = 0.1

The document is the same with every default filled in, decimals as strings, and the wire schema
written out: phase by phase the parts that cross. What is not in the schema cannot cross. A silo
recomputes it from its own code.
"""

import hashlib
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, filterfalse
from math import floor
from pathlib import Path
from threading import RLock
from typing import Annotated, Any, Literal

import pydantic
import torch
from numpy.random import Generator
from pydantic import AfterValidator, BeforeValidator, Field

from ...errors import LocalError, check_local
from ...files.documents import Real, Strict, canonical_json, no_bool, read_toml, validate
from ...files.packages import Package, others_code
from ...files.program_code import is_program
from ..catalog import METHODS, configure, method_class, method_options, without_optimiser
from ..course import Course
from ..data.augmentation import Augmenter
from ..data.features import Feature, width
from ..exchange.concentration import concentration_fault
from ..exchange.parts import Gram, Kind, Mix, Part
from ..exchange.transport import TransportTable
from ..method import Method, Setting, specs_of_buffers
from ..models.build import (
    ModelOptions,
    build,
    couples_records,
    dense,
    draws_randomly,
    has_batch_norm,
    image_shape,
    input_shape,
    maps,
    sketch,
    started,
    values_from_file,
)
from ..models.class_names import composed
from ..models.inputs import image_of
from ..models.pretrained import WEIGHTS_FOLDER, StartValues
from ..numerics.streams import Seed as AnySeed
from ..numerics.streams import raw, stream
from ..tasks.classification import Classification
from ..tasks.counting import LARGEST_COUNT, Counting
from ..tasks.metrics_table import MetricsTable, size_fault
from ..tasks.registry import TASKS, TaskTable, guard
from ..tasks.task import Task
from .batches import Batches, drawn_batches, smallest_round, split, whole_batches
from .blind_rules import Crossing, Draw, cohort_fault, crossing_fault
from .class_census import ClassCensus, by_class
from .foreign_code import Allowed, check_code, libraries_of, packages_of, runs_others_code
from .lr_schedule import paced
from .privacy_table import SHARING, PrivacyTable
from .schema import explain_difference, method_digest, model_digest, phases, plain, same_start
from .security import (
    Name,
    SecurityTable,
    by_method,
    exchanges,
    for_silos,
    is_summed,
    keyed_exchanges,
    tagged,
    unblind,
)
from .shared_steps import SHARED_BY_UNIT
from .torchmetrics_counting import counted, noise_fault
from .training_table import TrainingTable

LARGEST_SEED = 2**53 - 1  # what canonical JSON can hold
LONGEST_TIMEOUT = 30 * 24 * 3600.0
ENOUGH_ROUNDS = 64  # in which a method goes through all of its phases
# Keys of a document that are computed from the others by the installed code.
DERIVED = ("schema", "method_digest", "model_digest", "start", "packages")


Whole = Annotated[int, Field(strict=True)]


class MethodTable(Strict):
    """The [method] table; its options are checked by the method's own model.

    ``version`` must be that of the installed method.
    """

    name: str
    version: Whole | None = None  # left out: the version installed here
    published: bool = False  # its paper's options, but for those that stand in ``options``
    options: dict[str, Any] = Field(default_factory=dict)

    def chosen(self, origin: str) -> dict[str, Any]:
        """The options without defaults; LocalError where nobody knows the paper's."""
        if not self.published:
            return self.options
        published = method_class(self.name, origin).published
        if published is None:
            raise LocalError(
                f"{origin}: method.published = true: {self.name} does not say which options are its"
                " paper's; leave published out, and write the options that you want"
            )
        return {**published, **self.options}


Seed = Annotated[Whole, Field(ge=0, le=LARGEST_SEED)]
Rounds = Annotated[Whole, Field(ge=1, le=100_000)]
# One line without what moves a cursor or turns the direction of a text around.
SHOWN = r"[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]"
SHOWN_LINE = re.compile(rf"(?=\S){SHOWN}*(?<=\S)")


def _one_line(text: str) -> str:
    """ValueError for what people at silos, who decide by it, might not read as it stands."""
    if not SHOWN_LINE.fullmatch(text):
        raise ValueError(
            "has a line's end or another control character in it, or a space at an end; write one"
            " line of plain text"
        )
    return text


Purpose = Annotated[str, Field(min_length=10, max_length=500), AfterValidator(_one_line)]
Silos = Annotated[tuple[Name, ...], Field(min_length=2, max_length=10_000)]


class JobSettings(Strict):
    """Keys of a job file that a simulation's file of several jobs has once for all of them.

    Times are in seconds; shares are between 0 and 1.
    """

    version: Annotated[Literal[1], BeforeValidator(no_bool)]
    name: Name
    purpose: Purpose | None = None
    """What the job is for, in a sentence that silos' people read before they approve it.

    Simulations need none: ``check_purpose``.
    """
    rounds: Rounds
    participation: Annotated[Real, Field(gt=0, le=1)] = 1.0
    min_cohort: Annotated[Whole, Field(ge=1)] = 2
    round_timeout: Annotated[Real, Field(gt=0, le=LONGEST_TIMEOUT)] = 600.0
    """Seconds after which a round continues without the silos that have not uploaded.

    Together with min_cohort: "cut off".
    """
    quorum: Annotated[Real, Field(gt=0, le=1)] = 1.0
    """Share of a cohort whose contributions close a round at once.

    1 waits for all that are there.
    """
    model: ModelOptions
    task: TaskTable = Classification()
    training: TrainingTable
    features: Annotated[tuple[Feature, ...], Field(max_length=10_000)] = ()
    """What each feature of a record is, in their order; none: the job does not say."""
    metrics: MetricsTable = MetricsTable()
    security: SecurityTable = SecurityTable()
    transport: TransportTable | None = None
    """In which form uploads cross; None: as they are."""


class JobFile(JobSettings):
    """A job file.

    pydantic checks each key on its own, then ``_combinations`` checks them together.
    """

    seed: Seed
    silos: Silos
    method: MethodTable
    privacy: PrivacyTable | None = None
    dataset: Name | None = None
    """Which of a silo's data sets the job is on; None: that of each silo's [data]."""

    @pydantic.model_validator(mode="after")
    def _combinations(self) -> "JobFile":
        # Rules that concern several keys; pydantic has checked each key on its own.
        # Each name's count minus one: what is left was named more than once.
        twice = sorted(Counter(self.silos) - Counter(set(self.silos)))
        batch_norm = has_batch_norm(self.model)
        if twice:
            raise ValueError(f"silos names {', '.join(twice)} more than once; keep one of each")
        # No round could ever have that many silos.
        if self.min_cohort > len(self.silos):
            raise ValueError(
                f"min_cohort = {self.min_cohort}, but there are {len(self.silos)} silos; lower it"
            )
        # Batch norm turns a lone record into zeros where feature maps have shrunk to one pixel
        # (record_checks.py).
        if batch_norm and self.training.batch_size == 1:
            raise ValueError(
                "a model with batch norm cannot train with training.batch_size = 1; raise it to 2"
                " or more"
            )
        with guard(self.task):
            fault = self._task_fault() or self._counting_fault()
        if fault:
            raise ValueError(fault)
        if self.training.warmup >= self.rounds:
            raise ValueError(
                f"training.warmup = {self.training.warmup}, but there are {self.rounds} rounds;"
                " lower it"
            )
        if self.training.physical_batch is not None and couples_records(self.model):
            raise ValueError(
                "training.physical_batch would change what batch norm does, or another layer that"
                ' couples records; take it out, or choose norm = "group"'
            )
        for number, kind in enumerate(self.training.augment):
            if fault := kind.fault(image_shape(self.model)):
                raise ValueError(f"training.augment.{number}: {kind.kind} {fault}")
        if self.transport is not None and self.security.required:
            raise ValueError(self.transport.blind_fault)
        if self.privacy is not None:
            if not self.privacy.whole_silos:
                self._check_private_model()
            self._check_private_task(self.privacy)
            if self.privacy.shared:
                self._check_shared_noise(self.privacy)
        return self

    @property
    def counting(self) -> Counting:
        """What evaluation counts."""
        return counted(self.task, self.model.width, self.metrics, noised=self.privacy is not None)

    def _task_fault(self) -> str:
        """Why model and metrics do not go with the task; empty if they do."""
        kind, wanted, has = self.task.kind, self.task.outputs_key, self.model.outputs_key
        if wanted != has:
            return (
                f"the task is {kind}, so the model has {wanted}; write model.{wanted} and leave"
                f" model.{has} out, or choose another task.kind"
            )
        if dense(self.model) != self.task.dense:
            gives = "for the whole record", "for each position"
            mine, its = gives[dense(self.model)], gives[self.task.dense]
            return (
                f"model {self.model.name!r} has outputs {mine}, and the task {kind} takes them"
                f" {its}; choose another model or task"
            )
        if idle := sorted(self.metrics.asked - self.task.own_metrics):
            return f"metrics.{idle[0]} does nothing where the task is {kind}; take it out"
        return self.task.fault(self.model.width)

    def _counting_fault(self) -> str:
        """Why metrics cannot cross; empty if they can."""
        try:
            return size_fault(self.counting)
        # As pydantic tells what is wrong with a file.
        except LocalError as error:
            return str(error)

    def _check_private_task(self, privacy: PrivacyTable) -> None:
        # What one record adds to its sums is what its own code says.
        if privacy.metrics_sigma is None:
            return
        if self.task.kind not in TASKS:
            raise ValueError(
                f"privacy.metrics_sigma with the task {self.task.kind!r} of an installed package:"
                " nobody checks how much one record changes its sums; leave metrics_sigma out, and"
                " they stay at the silos"
            )
        if fault := noise_fault(self.counting):
            raise ValueError(fault)

    def _check_shared_noise(self, privacy: PrivacyTable) -> None:
        """ValueError where sums open without the shares of all silos, or are seen one by one."""
        where, security = 'privacy.noise = "shared"', self.security
        # Whoever saw a silo's own upload would see it under a share of the noise alone.
        if not security.required:
            raise ValueError(
                f"{where} protects sums alone: write security.secure_aggregation ="
                ' "required", or noise = "local"'
            )
        if security.dropouts == "any" or self.participation != 1:
            raise ValueError(
                f"{where} takes a share of the noise from every silo: leave out security.dropouts"
                " and participation"
            )
        if security.weights == "public":
            raise ValueError(
                f'{where}: security.weights = "public" does nothing, because steps are weighed by'
                ' noisy counts, or with unit = "silo" not at all; take it out, and security.counts'
            )
        # Who colludes with the coordinator knows its own share.
        if privacy.dishonest < security.colluders:
            raise ValueError(
                f"{where} with dishonest = {privacy.dishonest}: security.colluders ="
                f" {security.colluders} silos may collude; raise dishonest to that"
            )
        if privacy.honest(len(self.silos)) < 2:
            raise ValueError(
                f"{where} with dishonest = {privacy.dishonest} of {len(self.silos)} silos: nobody"
                ' is left to share noise with; lower it, name more silos, or write noise = "local"'
            )

    def _check_private_model(self) -> None:
        # Clipping cannot bound how one record moves the gradients of others.
        if any(kind.mixes for kind in self.training.augment):
            raise ValueError(
                "[privacy] with training.augment MixUp, by which each record moves the gradients of"
                " others; leave MixUp out"
            )
        if couples_records(self.model):
            raise ValueError(
                "[privacy] with batch norm, or other layers by which each record moves the"
                ' gradients of others or a buffer; choose norm = "group", or a model without them'
            )
        if not maps(self.model):
            raise ValueError(
                f"[privacy] takes gradients record by record, and torch.vmap cannot run model"
                f" {self.model.name!r}; choose one without recurrent layers and the like"
            )


def _features_fault(file: JobFile) -> str:
    """Why the declared features do not go with the model; empty if they do, or none are."""
    if not file.features:
        return ""
    names = Counter(composed(feature.name) for feature in file.features)
    name, times = names.most_common(1)[0]
    if times > 1:
        return f"features names {name!r} {times} times; name each once"
    shape, has = input_shape(file.model), width(file.features)
    if shape != (1, 1, has):  # as a table's records have it
        return (
            f"features have {has} numbers, so a record has the shape [1, 1, {has}], and model"
            f" {file.model.name!r} takes {list(shape)}; write model.input = [1, 1, {has}], or"
            " declare the others"
        )
    if file.model.classes and file.model.class_names is None:
        return "features without model.class_names: name the classes in order, too"
    return ""


def _located(
    model: ModelOptions, origin: str, folder: Path | None
) -> tuple[ModelOptions, Path | None]:
    """The model with the digest of its file of weights, and the file."""
    if model.weights is None:
        return model, None
    # Whoever wrote a document may not have this machine open a path.
    if (folder is None) != (model.weights.file is None):
        raise LocalError(
            f"{origin}: model.weights.file: a job file names the file; a job that crosses has its"
            " sha256 and size instead, which `staddle job sign` writes"
        )
    if folder is None:
        return model, None
    try:
        weights, path = model.weights.found(folder)
    except LocalError as error:
        raise LocalError(f"{origin}: model.weights: {error}") from error
    return model.model_copy(update={"weights": weights}), path


LONGEST_ERROR = 2000  # characters
READING = RLock()  # held while a job with code of others is read
COPIED = tuple(key for key in JobFile.model_fields if key not in {"version", "method"})
"""Keys that a job file, a job and its document have alike."""
LATER = ("dataset", "purpose", "transport")  # of these, a document has those that the file has


# Keys of [privacy] that do nothing where whole silos are protected.
OF_RECORDS = ("histogram_sigma", "statistics_clip", "statistics_sigma")
# Keys of [training] that do nothing where each record is drawn by chance.
OF_BATCHES = ("batch_size", "last_batch", "shuffle")


def _idle_fault(file: JobFile) -> str:
    """Why a setting that was written does nothing in this private job; empty if all do something.

    Defaults are no settings that anybody wrote.
    """
    privacy, fault = file.privacy, ""
    if privacy is None:
        return fault
    written = privacy.model_fields_set.intersection(OF_RECORDS)
    if privacy.whole_silos and written:
        keys = ", ".join(f"privacy.{key}" for key in sorted(written))
        fault = (
            f'with unit = "silo" silos publish no counts or statistics: take out {keys},'
            " which would do nothing"
        )
    # A method from outside may train what stays at its silo without noise, in batches.
    own = without_optimiser(file.method.name) in METHODS
    drawn = file.training.model_fields_set.intersection(OF_BATCHES)
    if own and not privacy.whole_silos and drawn:
        keys = ", ".join(map("training.{}".format, sorted(drawn)))
        fault = (
            "in a private job privacy.sample_rate says how many records a step draws: take out"
            f" {keys}, which would do nothing"
        )
    return fault


@dataclass(frozen=True)
class Job:
    """A checked job; the one form of it that all of Staddle uses.

    Its fields are ``COPIED`` and the method's. A job never changes, so what takes long to derive
    from them is cached.
    """

    name: str
    seed: int
    rounds: int
    silos: tuple[str, ...]  # in job order: the order of every fold
    participation: float
    min_cohort: int
    round_timeout: float  # seconds
    quorum: float
    method_name: str
    method_options: Strict
    model: ModelOptions
    task: Task
    training: TrainingTable
    features: tuple[Feature, ...]
    metrics: MetricsTable
    security: SecurityTable
    privacy: PrivacyTable | None = None
    dataset: str | None = None  # of each silo; None: that of its [data]
    purpose: str | None = None  # for the silos' people
    transport: TransportTable | None = None
    # It is not signed, so jobs that differ only in it are equal.
    federated: bool = field(default=False, compare=False)
    # the entry ``start`` of the document that the job was read from
    signed_start: Mapping[str, Any] | None = field(default=None, compare=False)
    # where the file of ``model.weights`` lies on this machine; None where nobody needs its values
    weights_file: Path | None = field(default=None, compare=False)

    @classmethod
    def from_toml(cls, path: Path) -> "Job":
        """Read a job file; LocalError names file, key, value and the fix."""
        file = read_toml(path, JobFile)
        # Here alone: a signed document has all keys, whether a person wrote them or not.
        if fault := _idle_fault(file):
            raise LocalError(f"{path}: {fault}")
        job = cls.from_file(file, str(path), path.parent)
        job.check_purpose(str(path))
        return job

    @classmethod
    def from_file(cls, file: JobFile, origin: str, folder: Path | None = None) -> "Job":
        """The job of a parsed job file.

        ``folder`` is where its paths begin; None for what came from elsewhere, which has none.
        """
        # The installed code computes the rounds, so a job for another version is declined.
        installed = method_class(file.method.name, origin).version
        if file.method.version not in (None, installed):
            raise LocalError(
                f"{origin}: method.version = {file.method.version}: this silo's {file.method.name}"
                f" version differs, it is {installed}; install the Staddle release that the job was"
                " written with"
            )
        options = method_options(file.method.name, file.method.chosen(origin), origin)
        model, weights_file = _located(file.model, origin, folder)
        job = cls(
            **{key: getattr(file, key) for key in COPIED if key != "model"},
            model=model,
            weights_file=weights_file,
            method_name=file.method.name,
            method_options=options,
        )
        # Checked once here, so that users of a job need not check its silos again.
        for fault in (cohort_fault(job._draw), _features_fault(file)):
            if fault:
                raise LocalError(f"{origin}: {fault}")
        return job

    @classmethod
    def from_document(
        cls, document: Any, origin: str, allowed: Allowed, *, federated: bool = True
    ) -> "Job":
        """The job of a document that came from elsewhere.

        LocalError unless this machine's code makes the same document of it, and all packages that
        it names are ``allowed``. ``federated`` as in ``for_federation``: False for a document that
        a simulation kept.
        """
        if not isinstance(document, Mapping):
            raise LocalError(
                f"{origin}: a job document is a JSON object, not {type(document).__name__}"
            )
        try:
            # Before any code of a package runs: to read the job is to import it.
            check_code(document, allowed, origin)
            # A job with code of others alone may fail in any way: any other is a bug of ours.
            what = f"{origin}: the code that the job names fails"
            guard = others_code(what, "correct it, or choose another")
            if not runs_others_code(document):
                return cls._of_document(document, origin, federated)
            # One at a time: each may take gigabytes.
            with READING, guard:
                return cls._of_document(document, origin, federated)
        except LocalError as error:
            # Errors repeat what the document says, and they go into logs and answers.
            if len(str(error)) <= LONGEST_ERROR:
                raise
            raise LocalError(f"{str(error)[:LONGEST_ERROR]}…") from error

    @classmethod
    def _of_document(cls, document: Mapping[str, Any], origin: str, federated: bool) -> "Job":
        # Derived keys are computed again and compared below, never trusted.
        written = {key: value for key, value in document.items() if key not in DERIVED}
        file, start = validate(written, JobFile, origin), document.get("start")
        job = replace(
            cls.from_file(file, origin),
            federated=federated,
            signed_start=start if isinstance(start, Mapping) else None,
        )
        # Without the planned noise a silo cannot know what a round costs.
        if job.privacy is not None and job.privacy.sigma is None:
            raise LocalError(
                f"{origin}: privacy.sigma is missing; `staddle job sign` plans it: have the job"
                " signed that way"
            )

        # Whoever signed it may not have asked ``for_federation``.
        if federated:
            job.check_federated(origin)
        # A silo recomputes the schema by its own code: what it does not compute must not cross.
        computed = job.document()
        if computed != document:
            why = explain_difference(document, computed, job.method_name, job.model.name)
            raise LocalError(f"{origin}: {why}")
        # Python takes 1, 1.0 and true for equal, and the job's digest is over one of them.
        if canonical_json(computed) != canonical_json(dict(document)):
            raise LocalError(
                f"{origin}: one of its values has another type than Staddle writes, such as 0"
                " for false; have the job signed again"
            )
        return job

    def check_purpose(self, origin: str) -> None:
        """LocalError where the job does not say what it is for.

        Whoever signs, queues or joins a job asks this. A simulation has nobody to ask for approval,
        and documents of earlier jobs are still read.
        """
        if not self.purpose:
            raise LocalError(
                f"{origin}: purpose is missing, and people at the silos decide by it; say in one"
                " line what the job is for, such as: purpose ="
                ' "Predict the length of stay, for the planning of wards"'
            )

    def document(self) -> dict[str, Any]:
        """The document that is signed, hashed and sent: canonical JSON can hold it.

        Decimals are strings. LocalError if the method cannot work with this job.
        """
        schema = self._schema  # first: it says what a method cannot do with this job
        # Digests of code and model are in the signed document, so that silos of another release
        # decline the job instead of training another method.
        return {
            **self._written(),
            "schema": schema,
            "method_digest": method_digest(self._method, schema),
            "model_digest": model_digest(self.model, self._method),
            **self._start,
            **self._code,
        }

    @cached_property
    def packages(self) -> tuple[Package, ...]:
        """Installed packages whose code the job runs, by name; none where all is Staddle's own."""
        libraries = libraries_of(plain(self.metrics))
        return packages_of(self.method_name, self.model.name, self.task.kind, libraries)

    @property
    def _code(self) -> dict[str, Any]:
        """The entry on packages; nothing where all code is Staddle's own."""
        return {"packages": list(map(asdict, self.packages))} if self.packages else {}

    @cached_property
    def _start(self) -> dict[str, Any]:
        """The entry on initial values that only releases of other code decide; else nothing."""
        found, signed = started(self.model, self.root), self.signed_start
        # Other releases are no fault if they make the same values: the document stays as signed.
        if found and signed is not None and same_start(found, signed):
            found = dict(signed)
        return {"start": found} if found else {}

    def _written(self) -> dict[str, Any]:
        """The document without its derived keys."""
        return {
            "version": 1,
            "method": {
                "name": self.method_name,
                "version": method_class(self.method_name, self.name).version,
                "options": plain(self.method_options),
            },
            **{key: plain(getattr(self, key)) for key in COPIED if key not in LATER},
            # What older releases did not know is left out where it changes nothing: their documents
            # stay as they are.
            **{key: plain(getattr(self, key)) for key in LATER if getattr(self, key)},
            "privacy": _written_privacy(self.privacy),
        }

    def with_weights(self, directory: Path) -> "Job":
        """The job at a silo or coordinator, which keeps files of weights below its folder."""
        if self.model.weights is None:
            return self
        return replace(self, weights_file=directory / WEIGHTS_FOLDER / self.model.weights.name)

    def start_values(self) -> StartValues:
        """What the file of ``model.weights`` brings; LocalError unless it fits the model."""
        return values_from_file(self.model, self.weights_file)

    def for_federation(self) -> "Job":
        """The job as silos run it: their draws follow from the whole job, not from its seed.

        So no two jobs train alike, and the sums of two jobs that differ by one silo do not reveal
        that silo's values (security rule 35). In a simulation, compared methods share what the
        seed draws.
        """
        for name in filter(is_program, (self.model.name, self.method_name)):
            raise LocalError(
                f"{name!r} is of a program on this machine, for simulations; make it an entry point"
                " of a package, which silos can install"
            )
        self.check_federated(self.method_name)
        return replace(self, federated=True)

    def check_federated(self, origin: str) -> None:
        """LocalError for options of the method that are for simulations alone."""
        fault = self.method().simulated_only
        check_local(not fault, f"{origin}: {fault}")

    @cached_property
    def root(self) -> AnySeed:
        """The root of all streams of the job: the seed, or in a federation a digest.

        The digest is SHA-256 of the written job in hex, without the noise multiplier, which is
        planned for the written job. All silos have the same root, so they draw the same cohorts and
        initial models.
        """
        if not self.federated:
            return self.seed
        written = self._written()
        # Planning the noise draws cohorts from this root, so the root cannot depend on the noise.
        if written["privacy"] is not None:
            written["privacy"] = {**written["privacy"], "sigma": None}
        return hashlib.sha256(canonical_json(written)).hexdigest()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical document, in hex: the job's name in signatures and ledgers.

        It covers the schema, and the versions of method and models that the two digests stand for.
        """
        return hashlib.sha256(canonical_json(self.document())).hexdigest()

    @property
    def _draw(self) -> Draw:
        return Draw(**{key.name: getattr(self, key.name) for key in fields(Draw)})

    @cached_property
    def _method(self) -> Method:
        method = configure(self.method_name, self.method_options, self.setting())
        # A job must not promise global buffers that no round uploads.
        if self.model.buffers == "global" and not self._uploads_buffers(method):
            raise LocalError(
                f"model.buffers = 'global', but method {self.method_name!r} uploads no running"
                " statistics in any round; leave model.buffers out, or choose another method"
            )
        if self.privacy is not None and (fault := method.private_fault):
            raise LocalError(f"[privacy] with method {self.method_name!r}: {fault}")
        self._check_loaded_parts(method)
        # A blind sum by class shows the silos of a class that few hold (class_census.py).
        if self.security.required and self._sums_by_class(method):
            method = self._counted_first()
        if self.shares_noise:
            shared = SHARED_BY_UNIT[self.private.unit]
            return shared(method, self.setting(), self.private, self.lr)
        return method

    def _check_loaded_parts(self, method: Method) -> None:
        """LocalError where weights are of no use, or their sums would reveal single silos."""
        # Networks that silos have for themselves are none of [model].
        apart = bool(getattr(self.method_options, "extractors", ()))
        if self.model.lora is not None and apart:
            raise LocalError(
                f"model.lora with method.options.extractors of {self.method_name!r}: silos have"
                " networks of their own, which train as a whole; leave out one of the two"
            )
        if self.model.weights is None:
            return
        if self.security.required and self.privacy is None and self.security.dropouts == "any":
            raise LocalError(
                "model.weights in a blind job with security.dropouts = 'any': from one start, sums"
                " over changing silos reveal what single silos contributed; leave out dropouts, or"
                " add [privacy]"
            )
        if apart:
            raise LocalError(
                f"model.weights with method.options.extractors of {self.method_name!r}: silos have"
                " networks of their own, which the file does not fit; leave out one of the two"
            )
        with torch.device("meta"):
            has = method.modules(self.silos[0]).keys()
        if absent := [part for part in self.model.weights.parts if part not in has]:
            raise LocalError(
                f"model.weights.parts names {absent[0]!r}, which method {self.method_name!r} does"
                " not have; leave it out, or model.weights where nothing else is in it"
            )

    def _sums_by_class(self, method: Method) -> bool:
        # All rounds, since a method may sum by class in a later phase only.
        return any(by_class(method, round_) for round_ in range(self.rounds))

    def _counted_first(self) -> Method:
        """The method inside a census: each of its rounds is one later, with that one's cohort."""
        # The inner method's round numbers are one lower than the job's.
        later = replace(self.setting(), drawn=lambda round_: self.cohort(round_ + 1))
        inner = configure(self.method_name, self.method_options, later)
        return ClassCensus(inner, self.setting(), self.fewest_holders)

    def _uploads_buffers(self, method: Method) -> bool:
        buffers = {
            f"{part}.{spec.name}"
            for part, module in sketch(self.model).items()
            for spec in specs_of_buffers(module)
        }
        up = chain.from_iterable(map(method.up, range(self.rounds + method.census)))
        return not buffers.isdisjoint(spec.name for part in up for spec in part.tensors)

    @cached_property
    def _schema(self) -> list[dict[str, Any]]:
        where = f"job {self.name!r} ({self.method_name} on {self.model.name})"
        try:
            self.check_task()
            schema = phases(self.length, self.up, self.down)
        except LocalError as error:
            raise LocalError(f"{where}: {error}") from error
        crossing = Crossing(self._draw, self._method, schema, self.blind_methods)
        if fault := crossing_fault(crossing):
            raise LocalError(f"{where}: {fault}")
        if self.transport is not None and (fault := self.transport.fault(schema)):
            raise LocalError(f"{where}: {fault}")
        return schema

    def check_task(self) -> None:
        """LocalError where the method needs classes, and the task has none."""
        does = method_class(self.method_name, self.name).needs_classes
        if does and not self.task.has_classes:
            able = [name for name, method in METHODS.items() if not method.needs_classes]
            raise LocalError(
                f"method {self.method_name!r} {does}, and the task is {self.task.kind}; methods for"
                f" any task: {', '.join(able)}"
            )

    @cached_property
    def keyed(self) -> bool:
        """True if it is blind and takes a key that all its silos share.

        They use it to mix, compare, count or tag, or to hide sums from the coordinator.
        """
        uses = (
            self.counted,
            bool(self.for_silos),
            keyed_exchanges(self._schema),
            tagged(self.security, self._schema),
        )
        return self.security.required and any(uses)

    @cached_property
    def for_silos(self) -> frozenset[str]:
        """Parts whose sums only the silos read."""
        return for_silos(self.security.audience, self._schema)

    @property
    def counted(self) -> bool:
        """True if it is blind and sums class by class: round 0 counts the holders of each.

        That round counts in ``length``.
        """
        return isinstance(self._method, ClassCensus)

    @property
    def min_holders(self) -> int:
        """Fewest holders of a class whose rows are summed, besides colluders.

        It is ``min_cohort`` unless the job sets it (security rule 7).
        """
        return self.security.min_holders or self.min_cohort

    @property
    def fewest_holders(self) -> int:
        """Fewest holders of a class for a counted job to show sums of it.

        Even if all colluders hold the class, ``min_holders`` honest silos hold it too.
        """
        return self.min_holders + self.security.colluders

    @cached_property
    def weighing(self) -> Mapping[str, int]:
        """The declared counts, where they are weights of a blind sum; empty where they are none."""
        return self.security.counts if "sum.mean" in exchanges(self._schema) else {}

    def blind_methods(self) -> list[str]:
        """Methods that, with their default options, work with this job's model and can be blind."""
        found = []
        # Few rounds: this only helps an error's text, and a job may have 100,000.
        short = replace(self, rounds=min(self.rounds, ENOUGH_ROUNDS), security=SecurityTable())
        for name in METHODS:
            other = replace(short, method_name=name, method_options=method_options(name, {}))
            # A method that cannot work with this model is not suggested.
            with suppress(LocalError):
                other.check_task()
                schema = phases(other.length, other.up, other.down)
                if not any(unblind(schema)):
                    found.append(name)
        return found

    @cached_property
    def phase_starts(self) -> tuple[int, ...]:
        """The rounds at which another set of parts begins to cross.

        The final delivery is not among them.
        """
        starts = [phase["from_round"] for phase in self._schema]
        # The final delivery begins a phase too, since nothing goes up in it.
        return tuple(starts[: bisect_left(starts, self.length)])

    @property
    def private(self) -> PrivacyTable:
        """The [privacy] table; LocalError where the job has none."""
        if self.privacy is None:
            raise LocalError(f"job {self.name!r} has no [privacy] table")
        return self.privacy

    @property
    def shares_noise(self) -> bool:
        """True if it is private, and its silos share the noise of its sums."""
        return self.privacy is not None and self.privacy.shared

    def setting(self) -> Setting:
        """The facts about the job that both halves of the method know."""
        return Setting(
            self.silos,
            self.cohort_size,
            self.rounds,
            self.model.width,
            self.task,
            input_shape(self.model),
            self.training.epochs,
            self.training.rule,
            self.root,
            # Functions, so that a model is built only where its values are needed.
            lambda prefix="": build(self.model, self.root, prefix, self.weights_file),
            lambda: sketch(self.model),
            self.cohort,
            self.model.buffers,
            self.security.counts,
            self.security.class_counts,
            self.security.mix == "directed",
            self.features,
            self.privacy is not None,
        )

    def method(self) -> Method:
        """The configured method; it holds no state, so all users share one.

        LocalError where it cannot work.
        """
        # Computed for its checks: a faulty schema must stop every use of the method.
        _ = self._schema
        return self._method

    @property
    def length(self) -> int:
        """Number of rounds: those that train, a census before them, one that tunes after them."""
        # ``census`` and ``tunes`` are bool, and add one round each.
        return self.rounds + self._method.census + self._method.tunes

    @property
    def cohort_size(self) -> int:
        """Silos drawn for a round that trains.

        ``participation`` times the silos, rounded half up, at least ``min_cohort``. A blind job
        draws whole batches; there it is the smallest number that a round may have.
        """
        if self.batched:
            return smallest_round(len(self.silos), *self._batching)
        # Half up: ``round`` would make 2.5 silos 2.
        return max(floor(self.participation * len(self.silos) + 0.5), self.min_cohort)

    @property
    def least_batch(self) -> int:
        """Fewest silos of a batch: ``min_cohort``, and at least two that do not collude.

        If only one silo of a batch were honest, the others could subtract their parts from the sum.
        """
        return max(self.min_cohort, self.security.colluders + 2)

    @property
    def fewest(self) -> int:
        """Fewest silos of a sum of a blind job (security rule 6).

        With c colluders it has more than 3c silos, so fewer than a third of them collude.
        """
        return max(self.min_cohort, 3 * self.security.colluders + 1)

    @property
    def batched(self) -> bool:
        """True if it is blind, and its rounds draw some of its batches.

        Such a job never sums any other sets of silos.
        """
        return (
            self.security.required
            and self.security.dropouts == "batches"
            and self._batching != (1, 1)
        )

    @cached_property
    def _batching(self) -> tuple[int, int]:
        """Number of batches of a blind job, and how many of them a round draws."""
        # All silos take part in every round, so no batches are drawn.
        if self.participation == 1:
            return 1, 1
        return drawn_batches(self.participation, len(self.silos), self.least_batch, self.fewest)

    @cached_property
    def batches(self) -> Batches:
        """Silos that are in a blind sum together or not at all (batches.py).

        Empty where any may be missing. Rounds that draw some of the silos draw among these
        batches.
        """
        # With dropouts = "any" a job accepts that sums over changing sets may reveal a silo.
        if not self.security.required or self.security.dropouts == "any":
            return ()
        if self.batched:
            return split(self.silos, self._batching[0])
        # A sum without a silo would lack its share of the noise.
        if self.shares_noise:
            return (self.silos,)

        # Sums of what hardly changes between rounds, such as the classes of a silo, are over all
        # silos: over several sets they would reveal single silos (security rule 1).
        if self._sums_more_than_means:
            return (self.silos,)

        # The most batches in which no silo outweighs the others: a lost silo costs its own batch.
        numbers = whole_batches(len(self.silos), self.least_batch, self.fewest)
        candidates = (split(self.silos, number) for number in numbers)
        return next(filter(self._even, candidates), (self.silos,))

    @property
    def _sums_more_than_means(self) -> bool:
        summed = filter(is_summed, by_method(self._schema))
        return any(part["exchange"] != "sum.mean" for part in summed)

    def _even(self, batches: Batches) -> bool:
        """True if no silo declared too many records for its batch."""
        counts = self.weighing
        # Without declared weights no silo weighs more than another.
        if not counts:
            return True
        declared = ([counts[silo] for silo in batch] for batch in batches)
        return not any(concentration_fault(numbers, self.min_cohort) for numbers in declared)

    def up(self, round_: int) -> tuple[Part, ...]:
        """Parts that a silo uploads in a round, METRICS last; none in the final delivery.

        Parts have the exchanges that the job chose. Those of evaluation come last.
        """
        self._check_round(round_)
        if round_ == self.length:
            return ()
        crossing = tuple(map(self._crossing, self._method.up(round_)))
        if self.transport is not None:
            crossing = self.transport.coded(crossing, self._passed_on(round_))
        return (*crossing, *self.counted_parts)

    def _passed_on(self, round_: int) -> tuple[Part, ...]:
        """Parts that the round before summed, and that come down to all silos of this one."""
        if not round_:
            return ()
        down = {part.name: part for part in self._method.down(round_)}
        return tuple(
            part
            for part in self._method.up(round_ - 1)
            if part.name in down.keys() - set(self._method.addressed)
            and down[part.name].tensors == part.tensors
        )

    @cached_property
    def counting(self) -> Counting:
        """What evaluation counts of each model."""
        return counted(self.task, self.model.width, self.metrics, noised=self.privacy is not None)

    @cached_property
    def counted_parts(self) -> tuple[Part, ...]:
        """The parts of evaluation; a task's own code is asked once, where the job is read."""
        with guard(self.task):
            parts = tuple(self.counting.parts())
        # A share of the noise may take a silo's count below zero.
        return tuple(map(_of_any_sign, parts)) if self.shares_noise else parts

    def down(self, round_: int) -> tuple[Part, ...]:
        """Parts that may be delivered at the start of a round.

        Round number ``length`` is the final delivery.
        """
        self._check_round(round_)
        return tuple(map(self._crossing, self._method.down(round_)))

    def _crossing(self, part: Part) -> Part:
        """A part of the method with the exchange that the job chooses for it."""
        if part.kind is Kind.METRIC:
            raise LocalError(
                f"part {part.name!r} has kind METRIC, which is for test counts that Staddle adds;"
                " choose another, such as COUNTS"
            )
        # A method says what is mixed or compared; the job says how.
        directed, shared = self.security.mix == "directed", self.security.compare == "shared"
        match part.exchange:
            case Mix() if directed:
                return replace(part, exchange=Mix(directed=True))
            case Gram() as gram if shared:
                return replace(part, exchange=replace(gram, shared=True))
            case _:
                return part

    def away(self, round_: int) -> tuple[str, ...]:
        """Silos that are not drawn for a round, in job order.

        None are away if a round asks all.
        """
        return tuple(filterfalse(self.cohort(round_).__contains__, self.silos))

    def row_readers(self, round_: int) -> tuple[str, ...]:
        """Silos that get rows of what a round mixes by directed sums, in job order.

        They are those that the round draws, or those that are away.
        """
        if self._method.directed_for == "members":
            return self.cohort(round_)
        return self.away(round_)

    @cached_property
    def together(self) -> Batches:
        """Silos that are in an attempt at a blind sum together or not at all.

        Empty where all silos that are drawn are asked again. Rows for a round's own members depend
        on who is in it, so the next attempt makes new ones, without the silos that were lost.
        """
        if self.batches:
            return self.batches
        # Batches of one silo: a lost silo takes no other with it.
        if self.security.mix == "directed" and self._method.directed_for == "members":
            return tuple((silo,) for silo in self.silos)
        return ()

    def cohort(self, round_: int) -> tuple[str, ...]:
        """Silos that train in a round, in job order: the same draw for every method.

        ``cohort_size`` silos are drawn; in a blind job, those of some of its ``batches``.
        LocalError for a round that the job does not have.
        """
        self._check_round(round_)
        if self.cohort_size == len(self.silos) or self._asks_all(round_):
            return self.silos

        # From the job's root, not from anything that the coordinator chooses: silos draw the cohort
        # again and compare (security rule 36).
        rng = stream(self.root, "", round_, "cohort")
        if self.batched:
            numbers = _drawn(rng, len(self.batches), self._batching[1])
            drawn = set(chain.from_iterable(self.batches[i] for i in numbers))
        else:
            numbers = _drawn(rng, len(self.silos), self.cohort_size)
            drawn = {self.silos[i] for i in numbers}
        # Job order, not the order of the draw: folds follow it.
        return tuple(filter(drawn.__contains__, self.silos))

    def _asks_all(self, round_: int) -> bool:
        """True if a round is the census or the one that tunes, in which every silo takes part."""
        if round_ == 0:
            return self._method.census
        return self._method.tunes and round_ == self.length - 1

    def rounds_before(self, round_: int) -> int:
        """Rounds that train before this one: a census is none, nor is the one that tunes.

        Learning rate schedules use it.
        """
        return min(max(round_ - self._method.census, 0), self.rounds)

    def paced(self, course: Course, round_: int) -> Course:
        """A silo's course of a round at the learning rates that the schedule has for it.

        Surveys and changes have no rate, and stay. Batches are taken in pieces of at most
        ``training.physical_batch`` records, and augmented.
        """
        table = self.training
        rows, last, shuffle = table.physical_batch, table.last_batch, table.shuffle
        return paced(course, self._pace(round_), rows, self._augmenter, last, shuffle)

    def lr(self, round_: int) -> float:
        """The learning rate of ``training`` in a round, as the schedule has it."""
        return self.training.rule.lr * self._pace(round_)

    def _pace(self, round_: int) -> float:
        return self.training.factor(self.rounds_before(round_), self.rounds)

    # One object, by which stages of silos that train at once are alike.
    @cached_property
    def _augmenter(self) -> Augmenter | None:
        kinds = self.training.augment
        if not kinds:
            return None
        private = self.privacy is not None
        return Augmenter(
            kinds,
            image_shape(self.model),
            self.task.dense,
            forgiving=private,
            image=image_of(self.model.named_inputs),
        )

    @property
    def draws(self) -> bool:
        """True if training takes random numbers: of layers, or to augment."""
        return bool(self.training.augment) or draws_randomly(self.model)

    def summed_sets(self) -> Batches:
        """The sets of silos over which a blind job sums: batches, or else the rounds' cohorts."""
        return self.batches or tuple(dict.fromkeys(self.cohorts()))

    def cohorts(self) -> Iterator[tuple[str, ...]]:
        """The cohorts of all rounds, in turn, with repetitions.

        There is one per round, with the census and the round that tunes.
        """
        return map(self.cohort, range(self.length))

    def _check_round(self, round_: int) -> None:
        # ``length`` is the number of the final delivery.
        if not 0 <= round_ <= self.length:
            raise LocalError(
                f"round {round_} of job {self.name!r}, which has rounds 0 to {self.length - 1}"
            )


def _written_privacy(table: PrivacyTable | None) -> Any:
    if table is None or table.shared:
        return plain(table)
    return plain(table.model_dump(exclude=SHARING))


def _of_any_sign(part: Part) -> Part:
    specs = (replace(spec, least=-LARGEST_COUNT) for spec in part.tensors)
    return replace(part, tensors=tuple(specs))


def _drawn(rng: Generator, silos: int, number: int) -> list[int]:
    # By raw words, whose definition is fixed: NumPy may change ``choice`` between releases.
    words = raw(rng, silos).tolist()
    # Indices break ties, so equal words draw the same silos on every machine.
    return sorted(range(silos), key=lambda i: (words[i], i))[:number]
