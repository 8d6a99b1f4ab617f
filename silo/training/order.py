"""The order: a folder by which the agent has a round trained, and gets what comes of it.

::

    order.json               the signed job's document, the round, the device, the policy's bounds,
                             and of a private round what was set aside for it
    state.safetensors        the silo's state before the round
    delivered.safetensors    what came down
    records.safetensors      its records; of those that are read when they are used, their places,
                             and order.json has the table of the configuration that says where from
    trainer.log              what the processes print
    outcome.json             comes last: the loss and the work, or why there is none
    outcome.safetensors      the silo's state after the round, without what stands still
    given.safetensors        its contributions
    marks.safetensors        what is counted of each test record, for the agent to add up

No secret is in it: no key, no password, no address. It has the silo's records, so it is as private
as they are, and the agent removes it with the round.

The agent trusts nothing in what comes back but that it is this round's: files of bounded size, no
links, no code; names, shapes and dtypes are the model's, and all values are numbers.
"""

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, NonNegativeInt
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...algorithms.course import SiloState
from ...algorithms.data.dataset import Dataset
from ...algorithms.data.lazy import LazyRecords
from ...algorithms.data.registry import KINDS
from ...algorithms.exchange.parts import WEIGHT, Contribution, all_finite
from ...algorithms.job.job import Job
from ...algorithms.leaks.traps import Caution, TrapError
from ...algorithms.numerics.devices import Precision
from ...algorithms.tasks.counting import MODELS, Marks, Tally
from ...algorithms.training.accountant import Counts, MemorySpending, PrivateSilo
from ...algorithms.training.paid_ahead import PaidAhead
from ...algorithms.training.silo_round import (
    RoundOutcome,
    RoundReport,
    state_from_bytes,
    state_of,
    state_to_bytes,
    to_modules,
)
from ...algorithms.training.work import LocalWork
from ...errors import (
    CancelledError,
    ExhaustedError,
    LocalError,
    PeerError,
    StaddleError,
    UnwritableError,
    reason,
)
from ...files import tensor_file
from ...files.documents import (
    MAX_FILE_BYTES,
    Strict,
    parse_json,
    read_bytes,
    unwritable,
    validate,
    write_atomic,
)
from ...files.portable import NONBLOCK
from ...files.tagged import of_kind
from ...security.dp.noise import Randomness
from ..parts import contributions
from ..parts.contributions import Contributions, by_part, flattened
from .still_values import completed, still_names
from .trainer import SiloRound

ORDER, STATE, DELIVERED = "order.json", "state.safetensors", "delivered.safetensors"
RECORDS, LOG = "records.safetensors", "trainer.log"
OUTCOME, NEXT, GIVEN = "outcome.json", "outcome.safetensors", "given.safetensors"
MARKS = "marks.safetensors"
SIDES = ("train", "test")

# A method may keep more than its model, such as features of records. What comes back is read whole,
# so a trainer that went wrong must not fill the agent's memory.
LARGER = 16
LARGEST = 2**30

# What may have ended a round, by the word that crosses for it.
ENDS: Mapping[str, Callable[[str], StaddleError]] = {
    "local": LocalError,
    "cancelled": CancelledError,
    "unwritable": UnwritableError,
    "exhausted": ExhaustedError,
    "trap": TrapError,
    # A round has no other peer.
    "peer": partial(PeerError, "coordinator"),
}

KINDS_OF_ENDS: dict[object, str] = dict(zip(ENDS.values(), ENDS, strict=True))
KINDS_OF_ENDS[PeerError] = "peer"


class DeviceTable(Strict):
    """On what a trainer trains, as [training] has it."""

    device: str = "cpu"
    precision: Precision = "float32"
    graphs: bool = True
    shard: bool = False

    @property
    def of_private(self) -> Self:
        """The same for a private job."""
        # Its processes call the model as often as each has drawn records of, so not in turn.
        return self.model_copy(update={"shard": False})


class PaidFile(Strict):
    """What was set aside for a private round (algorithms/training/paid_ahead.py)."""

    counts: tuple[NonNegativeInt, ...] | None = None
    released: NonNegativeInt = 0
    reservation: NonNegativeInt | None = None
    steps: dict[str, NonNegativeInt] = Field(default_factory=dict)

    @classmethod
    def of(cls, paid: PaidAhead) -> "PaidFile":
        """The same as plain values."""
        steps = dict(paid.steps)
        if paid.known is None:
            return cls(reservation=paid.reservation, steps=steps)
        counts, released = tuple(paid.known.counts.tolist()), paid.known.id
        return cls(counts=counts, released=released, reservation=paid.reservation, steps=steps)

    @property
    def ahead(self) -> PaidAhead:
        """The account of the round."""
        counts = None
        if self.counts is not None:
            counts = Counts(torch.tensor(self.counts, dtype=torch.int64), self.released)
        return PaidAhead(counts, self.reservation, self.steps)


class LimitsTable(Strict):
    """The bounds of ``Caution``; None: no bound."""

    max_step: float | None = None
    max_parallel: float | None = None


class OrderFile(Strict):
    """``order.json``."""

    version: Literal[1] = 1
    silo: str
    round: NonNegativeInt
    trained: bool
    threads: int
    job: dict[str, Any]
    packages: tuple[str, ...]  # of others, whose code the agent lets this job run
    weights: Path | None  # the file that all silos begin with
    limits: LimitsTable
    paid: PaidFile | None
    source: dict[str, Any] | None  # where records are that are read when they are used
    on: DeviceTable


class WorkTable(Strict):
    """``LocalWork``."""

    steps: NonNegativeInt
    records: NonNegativeInt
    course: tuple[str, ...]


class OutcomeFile(Strict):
    """``outcome.json``: what is no tensor, or the kind and the text of an error."""

    kind: str = ""
    text: str = ""
    loss: float | None = None
    work: WorkTable | None = None
    taken: dict[str, NonNegativeInt] = Field(
        default_factory=dict
    )  # steps of a private round, by purpose


@dataclass(frozen=True, eq=False)
class OrderedRecords:
    """A job and its records, as an order has them: ``JobRecords``."""

    job: Job
    train: Dataset
    test: Dataset


@dataclass(frozen=True)
class OrderFolder:
    """The files of one order; ``mode`` is that of each."""

    path: Path
    mode: int = 0o600

    # The agent's half.

    def put(
        self,
        asked: SiloRound,
        on: DeviceTable,
        paid: PaidAhead | None = None,
        source: dict[str, Any] | None = None,
    ) -> None:
        """Write the order; UnwritableError where the disk does not take it.

        ``source`` is the table that says where records are that are read when they are used.
        """
        job, caution = asked.of.job, asked.caution
        # JSON has no infinity.
        limits = {name: None if bound == inf else bound for name, bound in vars(caution).items()}
        order = OrderFile(
            silo=asked.silo,
            round=asked.round,
            trained=asked.trained,
            threads=asked.threads,
            job=job.document(),
            packages=tuple(package.name for package in job.packages),
            weights=job.weights_file,
            limits=LimitsTable(**limits),
            paid=None if paid is None else PaidFile.of(paid),
            source=source,
            on=on.of_private if paid else on,
        )
        self._put_records(asked)
        delivered = _copied(flattened(asked.delivered))
        self._write(DELIVERED, tensor_file.to_bytes(delivered))
        self._write(STATE, state_to_bytes(asked.state))
        self._write(ORDER, order.model_dump_json().encode())

    def _put_records(self, asked: SiloRound) -> None:
        sides = zip(SIDES, (asked.of.train, asked.of.test), strict=True)
        tensors = {
            f"{side}/{name}": tensor
            for side, data in sides
            for name, tensor in _as_tensors(data).items()
        }
        path = self.path / RECORDS
        try:
            save_file(tensors, path)
            path.chmod(self.mode)
        except (OSError, SafetensorError) as error:
            raise UnwritableError(f"{path}: cannot write it: {_why(error)}") from error

    def outcome(self, asked: SiloRound) -> tuple[RoundOutcome, Mapping[str, int]]:
        """What came of an order, checked, and the steps that it took of a private round.

        Raises what the round raised, or LocalError for anything that is no outcome of it.
        """
        said = self._said()
        if said.kind:
            raise ENDS.get(said.kind, LocalError)(said.text)
        job, origin = asked.of.job, self._name(NEXT)
        most = LARGEST + LARGER * _bytes(asked)
        state = completed(asked, state_from_bytes(self._read(NEXT, most), origin))
        _check_state(job, asked.silo, state, origin)
        given = contributions.from_bytes(self._read(GIVEN, most), self._name(GIVEN))
        _check_names(job, asked.round, given)
        marks, _ = tensor_file.from_bytes(self._read(MARKS, most), self._name(MARKS))
        delivered, trained = (_counted(job, asked.of.test, marks, model) for model in MODELS)
        work = None if said.work is None else LocalWork(**said.work.model_dump())
        samples = 0 if asked.round == job.length else len(asked.of.train)
        report = RoundReport(asked.round, samples, delivered, trained, said.loss, work)
        found = {part: _contribution(tensors) for part, tensors in given.tensors.items()}
        return RoundOutcome(state, found, report, given.taints), said.taken

    def _said(self) -> OutcomeFile:
        name = self._name(OUTCOME)
        return validate(parse_json(self._read(OUTCOME), name), OutcomeFile, name)

    # The trainer's half.

    def take(self) -> tuple[SiloRound, DeviceTable]:
        """The round to compute; LocalError for a folder that is no order."""
        order = validate(parse_json(read_bytes(self.path / ORDER), ORDER), OrderFile, ORDER)
        job = Job.from_document(order.job, ORDER, order.packages)
        job = replace(job, weights_file=order.weights)
        state = self._held(job, order)
        delivered, _ = tensor_file.from_bytes(self._whole(DELIVERED), self._name(DELIVERED))
        private = None if order.paid is None else PrivateSilo(order.paid.ahead, Randomness)
        asked = SiloRound(
            OrderedRecords(job, *self._records(job, order.source)),
            order.silo,
            order.round,
            state,
            by_part(delivered),
            order.threads,
            order.trained,
            private,
            Caution.of(order.limits.max_step, order.limits.max_parallel),
        )
        return asked, order.on

    def _held(self, job: Job, order: OrderFile) -> SiloState:
        """The state; weights that are to be sharded are mapped, so that nobody reads them whole."""
        found, metadata = tensor_file.read(self.path / STATE)
        mapped = still_names(job, order.silo) if order.on.shard else set()
        for name in found.keys() - mapped:
            found[name] = found[name].clone()  # for the reason that records are
        return state_of(found, metadata, self._name(STATE))

    def _records(self, job: Job, table: Mapping[str, Any] | None) -> list[Dataset]:
        found = load_file(self.path / RECORDS)
        # Copied, since a mapped file may not be aligned as torch's own tensors are: sums would be
        # added up in another order.
        held = {name: tensor.clone() for name, tensor in found.items()}
        if table is None:
            return [Dataset(held[f"{side}/x"], held[f"{side}/y"]) for side in SIDES]
        source = of_kind(dict(table), KINDS, "npz")
        read = source.load(job.model, job.features, wary=job.method().trains)
        places = [held[f"{side}/rows"] for side in SIDES]
        if not isinstance(read.x, LazyRecords) or len(read) <= max(map(_largest, places)):
            raise LocalError(
                f"{source.where}: holds other records than when the job was accepted; start the"
                " agent again"
            )
        sides = zip(SIDES, places, strict=True)
        return [Dataset(read.x[rows], held[f"{side}/y"]) for side, rows in sides]

    def give(self, outcome: RoundOutcome, noted: "Noted") -> None:
        """Write what came of the order; UnwritableError where the disk does not take it."""
        report, spending = outcome.report, outcome.spending
        tallies = zip(MODELS, (report.delivered, report.trained), strict=True)
        marks = {
            f"{model}/{name}": tensor
            for model, tally in tallies
            for name, tensor in noted.of(tally).items()
        }
        tensors = {part: _tensors(made) for part, made in outcome.contributions.items()}
        self._write(MARKS, tensor_file.to_bytes(marks))
        self._write(GIVEN, contributions.to_bytes(Contributions(tensors, outcome.taints)))
        self._write(NEXT, state_to_bytes(outcome.state))
        work = None if report.work is None else WorkTable(**vars(report.work))
        taken = dict(spending.taken) if isinstance(spending, MemorySpending) else {}
        self._end(OutcomeFile(loss=report.loss, work=work, taken=taken))

    def fail(self, error: StaddleError) -> None:
        """Write why there is no outcome, unless another process of the order has said why."""
        # What ended the first is the cause; others miss it.
        if (self.path / OUTCOME).exists():
            return
        kind = KINDS_OF_ENDS.get(type(error), "local")
        text = error.why if isinstance(error, PeerError) else str(error)
        self._end(OutcomeFile(kind=kind, text=text))

    def _end(self, said: OutcomeFile) -> None:
        # Last: who finds it finds all other files.
        self._write(OUTCOME, said.model_dump_json().encode())

    # Both.

    def _name(self, name: str) -> str:
        return str(self.path / name)

    def _write(self, name: str, data: bytes) -> None:
        write_atomic(self.path / name, data, self.mode)

    def _whole(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def _read(self, name: str, most: int = MAX_FILE_BYTES) -> bytes:
        """A file that a trainer wrote; LocalError for a link, or one that is too large."""
        path = self.path / name
        try:
            # A link could lead to a file of the agent's own, and a FIFO would keep it waiting.
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | NONBLOCK)
            with os.fdopen(file, "rb") as opened:
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode) or found.st_size > most:
                    raise LocalError(
                        f"{path}: {found.st_size} bytes, and a trainer may write a file of"
                        f" {most} at most"
                    )
                return opened.read(most)
        except OSError as error:
            raise LocalError(f"{path}: cannot read it: {reason(error)}") from error


@dataclass
class Noted:
    """The marks of each evaluation, by which the agent counts again: ``SiloRound.note``."""

    known: list[tuple[Tally, Mapping[str, Sequence[Marks]]]] = field(default_factory=list)

    def __call__(self, tally: Tally, marks: Mapping[str, Sequence[Marks]]) -> None:
        """Note an evaluation."""
        self.known.append((tally, marks))

    def of(self, tally: Tally) -> dict[str, Tensor]:
        """The marks that these counts were counted from, of all records."""
        marks = next(marks for known, marks in self.known if known is tally)
        return {name: torch.from_numpy(np.concatenate(own)) for name, own in marks.items()}


def _bytes(asked: SiloRound) -> int:
    """Bytes of all tensors from which a round begins."""
    held = (*asked.state.flat.values(), *flattened(asked.delivered).values())
    return sum(tensor.nbytes for tensor in held)


def _largest(rows: Tensor) -> int:
    return int(rows.max())


def _why(error: OSError | SafetensorError) -> str:
    return unwritable(error) if isinstance(error, OSError) else str(error)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as a file takes them: on the host, and none within another."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def _as_tensors(data: Dataset) -> dict[str, Tensor]:
    """The records of one side; where they are read when they are used, their places."""
    if isinstance(data.x, LazyRecords):
        return {"rows": torch.from_numpy(data.x.rows.copy()), "y": data.y.contiguous()}
    return {"x": data.x.contiguous(), "y": data.y.contiguous()}


def _tensors(made: Contribution) -> dict[str, Tensor]:
    """A contribution with its weight among the tensors."""
    weight = {} if made.weight is None else {WEIGHT: torch.as_tensor(made.weight).double()}
    return _copied({**made.tensors, **weight})


def _contribution(tensors: Mapping[str, Tensor]) -> Contribution:
    rest = dict(tensors)
    weight = rest.pop(WEIGHT, None)
    return Contribution(rest, weight)


def _check_state(job: Job, silo: str, state: SiloState, origin: str) -> None:
    """LocalError unless the state is one of the job's model, and all of its values are numbers."""
    # It compares names, shapes and dtypes.
    to_modules(job.method(), silo, state)
    for part, tensors in state.parts.items():
        spoilt = [name for name, tensor in tensors.items() if not all_finite(tensor)]
        if spoilt:
            raise LocalError(f"{origin}: {part}.{spoilt[0]} holds NaN or infinity; lower the lr")


def _check_names(job: Job, round_: int, given: Contributions) -> None:
    """LocalError unless these are the job's parts; who lays them out checks their tensors."""
    names = sorted(part.name for part in job.up(round_))
    if sorted(given.tensors) != names:
        raise LocalError(
            f"the trainer gave parts {sorted(given.tensors)}, the job has {names}; install the same"
            " release of Staddle where the agent runs and where it trains"
        )


def _counted(job: Job, data: Dataset, marks: Mapping[str, Tensor], model: str) -> Tally:
    """What the marks of a model count; LocalError unless there is one of each test record."""
    own = {name: marks.get(f"{model}/{name}") for name in job.counting.mark_names}
    found = {name: [mark.numpy()] for name, mark in own.items() if mark is not None}
    if len(found) < len(own) or any(len(mark) != len(data) for (mark,) in found.values()):
        raise LocalError(
            f"the trainer did not count {len(data)} test records; install the same release of"
            " Staddle where the agent runs and where it trains"
        )
    return job.counting.count(found, [data.y.cpu().numpy()])
