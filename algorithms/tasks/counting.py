"""What evaluation counts of a model on a silo's records, whatever the task: whole numbers.

Counts of several silos add up to those of all their records. So a blind job can sum them, and a
private job knows how much one record can change them. A task says what is counted
(algorithms/tasks), and each way of counting is a file next to this one.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..exchange.parts import Contribution, Part

# Both models are tested on the same records: as delivered, and after local training.
MODELS = ("delivered", "trained")
METRICS = "metrics"  # the part that every round has; tables are parts of their own
TESTED = "tested"  # its number of test records

# Sums of a cell over all silos of a job stay far below what int64 holds.
LARGEST_COUNT = 2.0**40

Table = NDArray[np.int64]
Marks = NDArray[Any]  # whole numbers, of each record
Sums = Mapping[str, Any]  # of a round, by name, such as "tested" or "confusion.trained"
Said = dict[str, Any]  # measures, as plain values


@dataclass(frozen=True)
class ScoreForm:
    """The one number by which models of a task are compared: ``key`` among its measures.

    A ``share`` lies in 0…1 and is shown in percent; any other score has a ``unit``, or none.
    ``constant`` names the best answer that is the same for all records of a silo, with which every
    score is compared.
    """

    key: str
    name: str
    constant: str
    share: bool = True
    higher: bool = True  # whether more is better
    unit: str = ""

    @property
    def title(self) -> str:
        """The name at the beginning of a sentence."""
        return self.name[0].upper() + self.name[1:]

    @property
    def axis(self) -> str:
        """The name with the unit, if it has one."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    def text(self, value: float) -> str:
        """A value, such as 93.1% or 4.27 days."""
        if self.share:
            return f"{value:.1%}"
        return f"{_number(value)} {self.unit}".rstrip()

    def cell(self, mean: float, deviation: float | None) -> str:
        """A mean over seeds, and its deviation, without the unit; shares as percentages."""
        factor = 100 if self.share else 1
        text = f"{factor * mean:.2f}" if self.share else _number(mean)
        if deviation is None:
            return text
        return f"{text} ± {factor * deviation:{'.2f' if self.share else '.2g'}}"

    @property
    def measured_in(self) -> str:
        """What ``cell`` is in."""
        if self.share:
            return "in percent"
        return f"in {self.unit}" if self.unit else "in the target's own unit"


def _number(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


class Tally(ABC):
    """The counts of one model on some records."""

    @property
    @abstractmethod
    def records(self) -> int:
        """Records that were tested."""

    @property
    @abstractmethod
    def score(self) -> float:
        """The task's score; there is at least one record."""

    @property
    @abstractmethod
    def baseline(self) -> float:
        """The score of the best answer that is the same for all these records."""

    @property
    def balanced(self) -> float | None:
        """The score where each class counts the same; None in tasks without classes."""
        return None

    @property
    @abstractmethod
    def tables(self) -> dict[str, Any]:
        """All counts by name, as plain values."""

    @abstractmethod
    def said(self) -> Said:
        """What the counts say; empty without records."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.tables == other.tables

    __hash__ = None  # type: ignore[assignment]


class Counting(ABC):
    """What a job counts."""

    @property
    @abstractmethod
    def score(self) -> ScoreForm:
        """By what models are compared."""

    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The parts that cross: tables that the job's [metrics] asks for, and METRICS last."""

    @property
    @abstractmethod
    def squared_sensitivity(self) -> int:
        """The square of the most that one record changes all counts that cross, in the L2 norm.

        Each tensor is taken in its ``unit``.
        """

    def unit(self, part: str, tensor: str) -> int:
        """The most that one record adds to one number of a tensor."""
        return 1

    @abstractmethod
    def marks(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """What is counted of each record, [B, …] by name; it runs under ``torch.vmap``.

        ``outputs`` are the model's, ``y`` what is true of the records.
        """

    @property
    @abstractmethod
    def mark_names(self) -> tuple[str, ...]:
        """The names of all marks."""

    @abstractmethod
    def count(self, marks: Mapping[str, Sequence[Marks]], truth: Sequence[Marks]) -> Tally:
        """The counts of all records, from their marks and what is true of them, piece by piece."""

    @abstractmethod
    def pooled(self, tallies: Sequence[Any]) -> Tally:
        """The counts of several sets of records together."""

    @abstractmethod
    def contributions(self, delivered: Any, trained: Any) -> dict[str, Contribution]:
        """The tensors of all ``parts``, from the tallies of both models."""

    @abstractmethod
    def fault(self, values: Mapping[tuple[str, str], Tensor], tested: int) -> str:
        """Why exact counts, by part and tensor, contradict one another; empty if they do not.

        They are whole numbers from 0 to ``tested`` times their unit. More could hide in counts that
        need not agree.
        """

    @abstractmethod
    def of_sums(self, sums: Sums) -> dict[str, Said]:
        """What the sums of a round say of each model of ``MODELS``; empty without test records.

        Tables are nested lists or arrays. No sums raise an error: those of a private job have
        noise, and single silos may have counted wrongly.
        """


def gathered(counting: Counting) -> dict[str, list[Marks]]:
    """Room for the pieces of all marks."""
    return {name: [] for name in counting.mark_names}


def joined(pieces: Sequence[Marks], *columns: int) -> Marks:
    """All pieces one after another; there may be none."""
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate([np.empty((0, *columns), np.int64), *pieces])


def flattened(said: Mapping[str, Said]) -> dict[str, float]:
    """What ``of_sums`` says, without single classes, as ``balanced_accuracy.trained`` and so on.

    Bounds are named as in ``auroc.trained.least``.
    """
    found: dict[str, float] = {}
    for model, own in said.items():
        for name, value in own.items():
            match value:
                case float():
                    found[f"{name}.{model}"] = value
                case {"value": middle, "least": least, "most": most}:
                    found[f"{name}.{model}"] = middle
                    found[f"{name}.{model}.least"] = least
                    found[f"{name}.{model}.most"] = most
    return found
