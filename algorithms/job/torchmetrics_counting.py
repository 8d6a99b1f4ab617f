"""Metrics of torchmetrics next to what a task counts: their states cross, as counts of records.

A metric of torchmetrics has states, such as a confusion matrix. ``update`` adds records to them,
and ``compute`` says what they are worth. Where states add up over records, the sums of all silos'
states are those of all their records, so ``compute`` of the sums is the pooled value::

    torchmetrics   per model: the states of all metrics over the test records, one after another
                   as the job names them, [numbers]

A metric whose states are lists of records, or sums of fractions, is refused where a job is read.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from math import isfinite, prod
from operator import attrgetter, methodcaller
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import LocalError
from ...files import packages
from ...files.documents import closest
from ..exchange.parts import Contribution, Part
from ..models.torchvision_import import torchvision
from ..tasks.counting import MODELS, Counting, Marks, Said, ScoreForm, Sums, Table, Tally, joined
from ..tasks.metrics_table import LARGEST_TABLE, LibraryMetric, MetricsTable
from ..tasks.table_counting import tables_part
from ..tasks.task import Task

TORCHMETRICS = "torchmetrics"
WHERE = f"metrics.{TORCHMETRICS}"
FAMILY = re.compile("Binary|Multiclass|Multilabel")
# By family: the argument of its classes that is how many outputs the model has.
KNOWN: Mapping[str, tuple[str, ...]] = {
    "Binary": (),
    "Multiclass": ("num_classes",),
    "Multilabel": ("num_labels",),
}
# Numbers of a metric's states, times the records that it takes in one call: whoever writes a job
# chooses the states, and torchmetrics makes as many numbers for each record.
MOST_AT_ONCE = 2**23
# By state: the square of the most that one record changes it, from its shape.
SQUARED: Mapping[str, Callable[[Sequence[int]], int]] = {
    # A record is once in each table of the last two axes: one per threshold, class or label.
    "confmat": lambda shape: prod(shape[:-2]),
    # And it is one of the four for each class or label.
    "tp": prod,
    **dict.fromkeys(("fp", "tn", "fn"), lambda _: 0),
    "correct": prod,
    "total": prod,
}
USE_THRESHOLDS = "write options = { thresholds = 100 }, and it counts by threshold"
USE_BINS = "leave it out; metrics.score_bins = 64 gives calibration errors"
USE_ANOTHER = "choose another metric, or other options"


@dataclass(frozen=True)
class MetricStates:
    """A metric that a job names, and its states by name and shape; plain values alone."""

    metric: LibraryMetric
    outputs: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def sizes(self) -> list[int]:
        """The numbers of each state."""
        return [prod(shape) for _, shape in self.shapes]

    @property
    def numbers(self) -> int:
        """The numbers of all states."""
        return sum(self.sizes)

    @property
    def squared(self) -> int:
        """The square of the most that one record changes its states; 0 if nobody knows."""
        # A record counts there once for each class.
        summed = self.metric.options.get("average") == "micro"
        if summed or dict(self.shapes).keys() - SQUARED.keys():
            return 0
        return sum(SQUARED[name](shape) for name, shape in self.shapes)

    def summed(self, scores: Marks, truth: Marks, most: int) -> Table:
        """The states over records, [numbers].

        Where a record may change at most a number that is not 0, in square, each is counted by
        itself, and those that change more are left out.
        """
        probabilities, target = torch.from_numpy(scores).float(), torch.from_numpy(truth)
        # With two classes such a metric takes the chance of the second one.
        if self.metric.name.startswith("Binary"):
            probabilities = probabilities.reshape(-1, self.outputs)[:, 1]
        step = 1 if most else max(MOST_AT_ONCE // (1 + self.numbers), 1)
        whole = torch.zeros(self.numbers, dtype=torch.int64)

        with _running(self.metric):
            made = _made(self.metric, self.outputs)
            for start in range(0, len(target), step):
                made.reset()
                made.update(
                    probabilities[start : start + step],
                    target[start : start + step],
                )
                states = [getattr(made, name).reshape(-1) for name, _ in self.shapes]
                own = torch.cat(states)
                if not most or int(own.square().sum()) <= most:
                    whole += own
        table: Table = whole.numpy()
        return table

    def value(self, table: Table) -> Any:
        """What states [numbers] are worth, as plain values."""
        with _running(self.metric):
            made = _made(self.metric, self.outputs)
            pieces = torch.split_with_sizes(torch.from_numpy(table), self.sizes)
            for (name, shape), piece in zip(self.shapes, pieces, strict=True):
                setattr(made, name, piece.reshape(shape))
            # Of the class: the object's own looks for other processes, and warns without records.
            return _plain(type(made).compute(made))


def counted(task: Task, outputs: int, metrics: MetricsTable, *, noised: bool) -> Counting:
    """What a job's evaluation counts, with the metrics that it names.

    LocalError for a metric that cannot cross as counts, or without torchmetrics.
    """
    own = task.counting(outputs, metrics, noised=noised)
    if not metrics.torchmetrics:
        return own
    known = [*filter(methodcaller("startswith", task.families(outputs)), vars(_classes()))]
    named = tuple(_states(metric, outputs, known) for metric in metrics.torchmetrics)
    return StateCounting(own, task, named, noised)


def installed() -> bool:
    """True if torchmetrics can be imported; this does not import it."""
    return find_spec(TORCHMETRICS) is not None


def noise_fault(counting: Counting) -> str:
    """Why noise cannot hide a record in what is counted; empty if it can."""
    if not isinstance(counting, StateCounting) or counting.bounded:
        return ""
    unknown = min(counting.metrics, key=attrgetter("squared")).metric.called
    return (
        f"privacy.metrics_sigma with {unknown} of {WHERE}: nobody knows how much one record"
        ' changes its counts; choose an average other than "micro", or another metric, or leave'
        " metrics_sigma out, and counts stay at the silos"
    )


@dataclass(frozen=True, eq=False)
class StateTally(Tally):
    """What the task counts on some records, and the states of all metrics."""

    own: Tally
    states: Table  # [numbers]
    counting: "StateCounting"

    @property
    def records(self) -> int:
        """Records that were tested."""
        return self.own.records

    @property
    def score(self) -> float:
        """The task's score."""
        return self.own.score

    @property
    def baseline(self) -> float:
        """The task's."""
        return self.own.baseline

    @property
    def balanced(self) -> float | None:
        """The task's."""
        return self.own.balanced

    @property
    def tables(self) -> dict[str, Any]:
        """All counts by name, as plain values."""
        return {**self.own.tables, TORCHMETRICS: self.states.tolist()}

    def said(self) -> Said:
        """What the task says, and the metrics."""
        found = self.own.said()
        return found | self.counting.values(self.states) if found else found


@dataclass(frozen=True)
class StateCounting(Counting):
    """What a task counts, and states of metrics in a part of their own.

    In a private job states are ``noised``. Each record is then counted by itself, and is left out
    if it changes more than ``squared`` says, so that noise hides it whatever a metric adds.
    """

    own: Counting
    task: Task
    metrics: tuple[MetricStates, ...]
    noised: bool

    @property
    def score(self) -> ScoreForm:
        """The task's."""
        return self.own.score

    @property
    def bounded(self) -> bool:
        """True if it is known how much one record changes."""
        return all(map(attrgetter("squared"), self.metrics))

    @property
    def squared_sensitivity(self) -> int:
        """The task's, and that of each metric's states of both models."""
        # ``noise_fault`` refuses a job with a metric whose bound is not known.
        return self.own.squared_sensitivity + len(MODELS) * self._squared

    @property
    def _squared(self) -> int:
        return sum(map(attrgetter("squared"), self.metrics))

    def unit(self, part: str, tensor: str) -> int:
        """The most that one record adds to one number: 1, or one per class or label."""
        if part != TORCHMETRICS:
            return self.own.unit(part, tensor)
        return 1 if self.bounded else self.metrics[0].outputs

    def parts(self) -> tuple[Part, ...]:
        """The part of all states, and those of the task."""
        numbers = sum(map(attrgetter("numbers"), self.metrics))
        return (tables_part(TORCHMETRICS, (numbers,), self.noised), *self.own.parts())

    def marks(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The task's marks, and the probabilities of each record."""
        # What has diverged has none. A number beyond 0 and 1 would make torchmetrics take all of a
        # call's for logits.
        found = self.task.probabilities(outputs).float().nan_to_num(0.0).clamp(0, 1)
        return {**self.own.marks(outputs, y), TORCHMETRICS: found}

    @property
    def mark_names(self) -> tuple[str, ...]:
        """The task's, and the probabilities."""
        return (*self.own.mark_names, TORCHMETRICS)

    def count(self, marks: Mapping[str, Sequence[Marks]], truth: Sequence[Marks]) -> StateTally:
        """The counts of all records, from their marks and what is true of them."""
        scores = joined(marks[TORCHMETRICS], self.metrics[0].outputs)
        # No record has no labels, whatever their shape.
        labels = np.concatenate(truth) if len(scores) else np.empty(0, np.int64)
        states = [one.summed(scores, labels, self.noised * one.squared) for one in self.metrics]
        return StateTally(self.own.count(marks, truth), np.concatenate(states), self)

    def pooled(self, tallies: Sequence[StateTally]) -> StateTally:
        """The counts of several sets of records together."""
        own = self.own.pooled([tally.own for tally in tallies])
        return StateTally(own, np.sum([tally.states for tally in tallies], axis=0), self)

    def contributions(self, delivered: StateTally, trained: StateTally) -> dict[str, Contribution]:
        """The states of both models, and what the task gives."""
        states = map(torch.from_numpy, (delivered.states, trained.states))
        return {
            TORCHMETRICS: Contribution(dict(zip(MODELS, states, strict=True))),
            **self.own.contributions(delivered.own, trained.own),
        }

    def fault(self, values: Mapping[tuple[str, str], Tensor], tested: int) -> str:
        """Why exact counts contradict one another; no code of torchmetrics is asked."""
        own, most = dict(values), tested * self._squared
        for model in MODELS:
            total = int(own.pop((TORCHMETRICS, model)).sum())
            if self.bounded and total > most:
                return (
                    f"{TORCHMETRICS}/{model} has {total} counts, {tested} test records make at most"
                    f" {most}"
                )
        return self.own.fault(own, tested)

    def of_sums(self, sums: Sums) -> dict[str, Said]:
        """What the task says, and the metrics; noise may leave no value of these."""
        found = self.own.of_sums(sums)
        for model in found.keys() & {name.removeprefix(f"{TORCHMETRICS}.") for name in sums}:
            # Noise leaves numbers below zero.
            states = np.asarray(sums[f"{TORCHMETRICS}.{model}"], np.int64).clip(0)
            with suppress(LocalError):
                found[model] = found[model] | self.values(states)
        return found

    def values(self, states: Table) -> Said:
        """What states are worth, as ``torchmetrics.NAME``; None for numbers that are none."""
        ends = np.cumsum([*map(attrgetter("numbers"), self.metrics)])
        pieces = np.split(states, ends[:-1])
        return {
            f"{TORCHMETRICS}.{one.metric.called}": one.value(piece)
            for one, piece in zip(self.metrics, pieces, strict=True)
        }


def _plain(value: Any) -> Any:
    """A tensor, or several, as lists and numbers; None for a number that is not finite."""
    if isinstance(value, Tensor):
        # A tensor of one number is that number, as ``compute`` of a metric has it.
        value = value.double().squeeze().tolist()
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return float(value) if isfinite(value) else None


def _states(metric: LibraryMetric, outputs: int, known: Sequence[str]) -> MetricStates:
    """A metric and its states' shapes; LocalError unless they can cross."""
    if metric.name not in known:
        near = filter(None, (closest(metric.name, known), *known[:2]))
        raise LocalError(
            f"{WHERE}: {metric.name!r} is no metric of torchmetrics.classification for this task"
            f" and {outputs} outputs; choose one such as {', '.join(near)}"
        )
    # Shapes alone: options may ask for more numbers than the memory holds.
    with _running(metric, "meta"):
        made = _made(metric, outputs)
        defaults: Mapping[str, Any] = vars(made)["_defaults"]
        takes = [*inspect.signature(made.update).parameters]
    if takes != ["preds", "target"]:
        raise LocalError(
            f"{WHERE}: {metric.name} takes {', '.join(takes)}, and evaluation has outputs and"
            " labels alone; choose another metric"
        )

    # Curves keep every record where no thresholds are given.
    fixes = {hasattr(made, "thresholds"): USE_THRESHOLDS, "Calibration" in metric.name: USE_BINS}
    fix = fixes.get(True, USE_ANOTHER)
    for name, state in defaults.items():
        if fault := _state_fault(name, state, vars(made)["_reductions"][name], fix):
            raise LocalError(f"{WHERE}: {metric.name} {fault}")
    shapes = tuple((name, tuple(state.shape)) for name, state in defaults.items())
    found = MetricStates(metric, outputs, shapes)
    # Some options are refused only where a record is counted or states are valued, which would end
    # a job after its first round, or at its end. Larger states are refused by their size.
    if found.numbers <= LARGEST_TABLE:
        labels = (1, outputs) if metric.name.startswith("Multilabel") else (1,)
        found.value(found.summed(np.zeros((1, outputs)), np.zeros(labels, np.int64), 0))
    return found


def _state_fault(name: str, state: object, reduction: object, fix: str) -> str:
    """Why a state does not cross; empty if it does."""
    faults = {
        f"keeps {name!r} of every record, and records do not leave a silo; {fix}": not isinstance(
            state, Tensor
        ),
        f"has {name!r}, which is no sum over records; choose another metric": (
            getattr(reduction, "__name__", "") != "dim_zero_sum"
        ),
        f"adds up fractions in {name!r}, and only counts of records cross; choose a metric of"
        " counts, or bring a task with a value of its own (docs/tasks.md)": (
            getattr(state, "dtype", None) != torch.int64
        ),
    }
    return next(filter(faults.get, faults), "")


@contextmanager
def _running(metric: LibraryMetric, device: str = "cpu") -> Iterator[None]:
    """LocalError for whatever a metric raises."""
    what = f"{WHERE}: {metric.name} fails"
    guard = packages.others_code(what, "correct its options, or leave it out")
    # Models are built on "meta", where a metric would have no numbers.
    with guard, torch.device(device), torch.no_grad():
        yield


def _made(metric: LibraryMetric, outputs: int) -> Any:
    """A metric without records, on the current device."""
    known = KNOWN[FAMILY.findall(metric.name)[0]]
    found = getattr(_classes(), metric.name)
    # Thresholds of its own have to be a list there, and a job's lists are tuples.
    options = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in metric.options.items()
    }
    made = found(**options, **dict.fromkeys(known, outputs))
    # Options are checked by now, and records before they are used.
    made.validate_args = False
    return made


@lru_cache(maxsize=1)
def _classes() -> ModuleType:
    """The module torchmetrics.classification."""
    # It imports torchvision, which may need help.
    torchvision("transforms", "a module that torchmetrics imports")
    with torch.device("cpu"):
        found, _ = packages.load(packages.METRICS, TORCHMETRICS, WHERE)
    classes: ModuleType = found.classification
    return classes
