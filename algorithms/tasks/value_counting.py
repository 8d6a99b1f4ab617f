"""What evaluation counts where a task gives each record numbers, such as an error: their sums.

A task says what these numbers are, each from 0 to 1 (``Valued``). They are counted in units of
2^-20, so that sums are whole numbers like all counts: the same in any order, blind or not.

::

    metrics   per value and model: the sum over the test records; and how many these are
    targets   per fact, such as the target itself: the same, which no model changes
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import LocalError
from ..exchange.parts import Contribution, Kind, Part, Sum, TensorSpec
from .counting import (
    LARGEST_COUNT,
    METRICS,
    MODELS,
    TESTED,
    Counting,
    Marks,
    Said,
    ScoreForm,
    Sums,
    Table,
    Tally,
    joined,
)
from .measures import share

UNIT = 1 << 20  # so a silo's sums over a million records are below LARGEST_COUNT
TARGETS = "targets"


class Valued(Protocol):
    """A task whose measures follow from means of numbers from 0 to 1, one per record."""

    @property
    def score(self) -> ScoreForm:
        """By what models are compared."""

    @property
    def value_names(self) -> tuple[str, ...]:
        """Names of ``values``."""

    @property
    def fact_names(self) -> tuple[str, ...]:
        """Names of ``facts``."""

    @abstractmethod
    def values(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Numbers [B] from 0 to 1 that say how good outputs are; it runs under ``torch.vmap``."""

    @abstractmethod
    def facts(self, y: Tensor) -> dict[str, Tensor]:
        """Numbers [B] from 0 to 1 of the records alone."""

    @abstractmethod
    def measures(self, means: Mapping[str, float]) -> Said:
        """What the means of values and facts say; without facts, what values alone do.

        Noise may have moved any mean within 0 and 1.
        """

    @abstractmethod
    def baseline(self, y: NDArray[Any]) -> float:
        """The score of the best answer that is the same for all records; there is at least one."""


@dataclass(frozen=True, eq=False)
class ValueTally(Tally):
    """Sums over some records, in units."""

    task: Valued
    tested: int
    sums: Table  # of values, then of facts
    constant: float

    @property
    def records(self) -> int:
        """Records that were tested."""
        return self.tested

    @property
    def score(self) -> float:
        """The task's score."""
        return float(self.said()[self.task.score.key])

    @property
    def baseline(self) -> float:
        """The score of the best answer that is the same for all these records."""
        return self.constant

    @property
    def tables(self) -> dict[str, Any]:
        """Test records, and the sums of values and facts by name."""
        sums = zip(self._names, (self.sums / UNIT).tolist(), strict=True)
        return {TESTED: self.tested, "sums": dict(sums)}

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self.task.value_names, *self.task.fact_names)

    def said(self) -> Said:
        """The task's measures."""
        if not self.tested:
            return {}
        means = (self.sums / UNIT / self.tested).tolist()
        return self.task.measures(dict(zip(self._names, means, strict=True)))


@dataclass(frozen=True)
class ValueCounting(Counting):
    """What such a task counts: values always, and facts where [metrics] asks for ``targets``.

    In a private job sums are ``noised``.
    """

    task: Valued
    targets: bool = False
    noised: bool = False

    @property
    def score(self) -> ScoreForm:
        """The task's."""
        return self.task.score

    @property
    def squared_sensitivity(self) -> int:
        """Each record is one of those tested, and adds one unit at most to each sum."""
        return sum(len(part.tensors) for part in self.parts())

    def unit(self, part: str, tensor: str) -> int:
        """A record adds a whole unit at most to any sum."""
        return 1 if tensor == TESTED else UNIT

    def parts(self) -> tuple[Part, ...]:
        """The part of facts, and METRICS."""
        named = [f"{value}.{model}" for model in MODELS for value in self.task.value_names]
        metrics = Part(METRICS, Kind.METRIC, Sum("total"), _specs((*named, TESTED), 0.0))
        # Noise may leave a sum below zero: silo by silo set to zero, it would add up.
        least = -LARGEST_COUNT if self.noised else 0.0
        facts = Part(TARGETS, Kind.METRIC, Sum("total"), _specs(self.task.fact_names, least))
        return (facts, metrics)[not self.targets :]

    def contributions(self, delivered: ValueTally, trained: ValueTally) -> dict[str, Contribution]:
        """The sums of both models, by part."""
        own = len(self.task.value_names)
        numbers = {
            TARGETS: delivered.sums[own:],
            METRICS: np.array([*delivered.sums[:own], *trained.sums[:own], delivered.tested]),
        }
        return {part.name: _named(part, numbers[part.name]) for part in self.parts()}

    def marks(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Values and facts of each record, in units, as int32 [B, all of them]."""
        found = {**self.task.values(outputs, y), **self.task.facts(y)}
        names = (*self.task.value_names, *self.task.fact_names)
        if found.keys() != set(names):
            raise LocalError(
                f"the task gives each record {', '.join(found)}, and names {', '.join(names)};"
                " correct values, facts or their names in the task's code"
            )
        shares = torch.stack([found[name] for name in names], 1).double()
        # What has diverged counts as 1, the worst of errors and losses.
        shares = torch.nan_to_num(shares, nan=1.0).clamp(0, 1)
        return {"units": (shares * UNIT).round().to(torch.int32)}

    @property
    def mark_names(self) -> tuple[str, ...]:
        """Values and facts together."""
        return ("units",)

    def count(self, marks: Mapping[str, Sequence[Marks]], truth: Sequence[Marks]) -> ValueTally:
        """The sums over all records, from their values, piece by piece."""
        width = len(self.task.value_names) + len(self.task.fact_names)
        units = joined(marks["units"], width)
        constant = self.task.baseline(np.concatenate(truth)) if len(units) else 0.0
        return ValueTally(self.task, len(units), units.sum(0, dtype=np.int64), constant)

    def pooled(self, tallies: Sequence[ValueTally]) -> ValueTally:
        """The sums over several sets of records; the baseline has one answer for each set."""
        tested = np.array([tally.tested for tally in tallies])
        constants = np.array([tally.constant for tally in tallies])
        sums = np.sum([tally.sums for tally in tallies], axis=0)
        constant = float(constants @ tested) / max(int(tested.sum()), 1)
        return ValueTally(self.task, int(tested.sum()), sums, constant)

    def fault(self, values: Mapping[tuple[str, str], Tensor], tested: int) -> str:
        """Nothing: no sum follows from another."""
        return ""

    def of_sums(self, sums: Sums) -> dict[str, Said]:
        """The task's measures of both models."""
        tested = sums.get(TESTED, 0)
        if tested <= 0:
            return {}
        found, whole = {}, UNIT * tested
        places = {name: f"{TARGETS}.{name}" for name in self.task.fact_names}
        # Noise may leave a mean that is none.
        facts = {}
        if sums.keys() >= set(places.values()):
            facts = {name: share(sums[place] / whole) for name, place in places.items()}
        for model in MODELS:
            values = {
                name: share(sums.get(f"{name}.{model}", 0) / whole)
                for name in self.task.value_names
            }
            found[model] = self.task.measures(values | facts)
        return found


def _named(part: Part, numbers: Table) -> Contribution:
    """The numbers by the names of a part's tensors."""
    names = (spec.name for spec in part.tensors)
    return Contribution(dict(zip(names, torch.from_numpy(numbers), strict=True)))


def _specs(names: Sequence[str], least: float) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, "int64", (), least, LARGEST_COUNT) for name in names)
