"""What classifications count, of one class per record or of several labels: tables of fixed sizes.

A record's score for a class is the logit of its probability, log p - log(1 - p), which spreads
probabilities near 0 and 1 over many bins. Bins have one width from -LARGEST_SCORE to LARGEST_SCORE;
the first and the last also hold everything beyond.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..exchange.parts import Contribution, Kind, Part, Sum, TensorSpec
from .counting import (
    LARGEST_COUNT,
    METRICS,
    MODELS,
    TESTED,
    Counting,
    Said,
    Sums,
    Table,
    Tally,
)
from .measures import LARGEST_SCORE, clipped, of_scores, share

CONFUSION, SCORES, CORRECT = "confusion", "scores", "correct"
Shape = tuple[int, ...]

# Counts, not accuracies: their sums give the accuracy over all silos' test records, and a blind job
# can add them up.
RIGHT = Part(
    METRICS,
    Kind.METRIC,
    Sum("total"),
    # right with the model as delivered, right after local training, and all test records
    tuple(
        TensorSpec(name, "int64", (), 0.0)
        for name in (*(f"{CORRECT}.{model}" for model in MODELS), TESTED)
    ),
)


class TableTally(Tally):
    """A tally of tables; None for one that was not asked for."""

    if TYPE_CHECKING:  # fields of both kinds, which a dataclass here would put first
        confusion: Table | None
        scores: Table | None

    @property
    @abstractmethod
    def correct(self) -> int:
        """Records, or labels, that are right."""

    @property
    def asked(self) -> dict[str, Table]:
        """The tables that were asked for, by the names of their parts."""
        found = {CONFUSION: self.confusion, SCORES: self.scores}
        return {name: table for name, table in found.items() if table is not None}

    @property
    def tables(self) -> dict[str, Any]:
        """All counts by name, as plain values."""
        return as_lists(self.asked)


@dataclass(frozen=True)
class TableCounting(Counting):
    """Tables by class or label; [metrics] says which of them cross.

    In a private job tables are ``noised``: their numbers may be below zero, so that noise adds up
    to nothing over many cells and silos.
    """

    classes: int
    confusion: bool = False
    bins: int = 0  # of scores; 0 for none
    noised: bool = False

    @property
    @abstractmethod
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the tables.

        The last two axes are a table in which each record is once; there is one for each index of
        the axes before.
        """

    @abstractmethod
    def of_confusion(self, confusion: Table) -> Said:
        """What sums of the matrix say; cells may be below zero."""

    @property
    def _crossing(self) -> dict[str, Shape]:
        asked = {CONFUSION: self.confusion, SCORES: self.bins}
        return {name: shape for name, shape in self.shapes.items() if asked[name]}

    @property
    def squared_sensitivity(self) -> int:
        """A record is once in each table of each model, and METRICS are three counts."""
        return 3 + len(MODELS) * sum(prod(shape[:-2]) for shape in self._crossing.values())

    def parts(self) -> tuple[Part, ...]:
        """A part per table that crosses, with a table for each model, and METRICS."""
        crossing = self._crossing.items()
        return (*(tables_part(name, shape, self.noised) for name, shape in crossing), RIGHT)

    def contributions(self, delivered: TableTally, trained: TableTally) -> dict[str, Contribution]:
        """The tables of both models, by part, and how many records or labels are right."""
        found = {}
        for name in self._crossing:
            own = (torch.from_numpy(tally.asked[name]) for tally in (delivered, trained))
            found[name] = Contribution(dict(zip(MODELS, own, strict=True)))
        counts = torch.tensor([delivered.correct, trained.correct, delivered.records])
        names = (spec.name for spec in RIGHT.tensors)
        return {**found, METRICS: Contribution(dict(zip(names, counts, strict=True)))}

    @property
    def mark_names(self) -> tuple[str, ...]:
        """What the model says of each record, and places of its scores."""
        return ("called", "bins")[: 1 + bool(self.bins)]

    def fault(self, values: Mapping[tuple[str, str], Tensor], tested: int) -> str:
        """Why exact counts contradict one another.

        Every table says how many test records have each class or label, and all must say the same.
        """
        known: dict[int, int] = {}  # as the first table says
        for (part, model), table in values.items():
            if part == METRICS:
                continue
            where = f"{part}/{model}"
            once = table.reshape(prod(self.shapes[part][:-2]), -1).sum(1)
            if (once != tested).any():
                return f"{where} does not count each of {tested} test records once"
            right = int(table.diagonal(dim1=-2, dim2=-1).sum())
            said = int(values[METRICS, f"{CORRECT}.{model}"])
            if part == CONFUSION and right != said:
                return f"{where} has {right} on its diagonal, and {METRICS} {said} that are right"
            # Of two classes, a histogram alone is of the second one.
            held = (table if table.ndim == 2 else table[:, 1]).sum(1).tolist()
            for name, records in enumerate(held, self.classes - len(held)):
                if known.setdefault(name, records) != records:
                    return (
                        f"{where} has {records} test records of class {name}, another table"
                        f" {known[name]}"
                    )
        return ""

    def of_sums(self, sums: Sums) -> dict[str, Said]:
        """Accuracy, and what the tables say that the job has; shares stay within 0 and 1."""
        tested = sums.get(TESTED, 0)
        if tested <= 0:
            return {}
        found: dict[str, Said] = {}
        for model in MODELS:
            right = f"{CORRECT}.{model}"
            said = {"accuracy": share(sums.get(right, 0) / tested / self.unit(METRICS, right))}
            if (confusion := sums.get(f"{CONFUSION}.{model}")) is not None:
                said |= self.of_confusion(clipped(confusion, signed=True))
            if (scores := sums.get(f"{SCORES}.{model}")) is not None:
                # Noise leaves cells below zero.
                said |= of_scores(clipped(scores))
            found[model] = said
        return found


def tables_part(name: str, shape: Shape, noised: bool) -> Part:
    """A part with one table of this shape for each model."""
    least = -LARGEST_COUNT if noised else 0.0
    tables = (TensorSpec(model, "int64", shape, least, LARGEST_COUNT) for model in MODELS)
    return Part(name, Kind.METRIC, Sum("total"), tuple(tables))


def places(scores: Tensor, bins: int) -> Tensor:
    """The bins of scores, int16 of their shape."""
    # A model that has diverged has no probabilities: its records count as unlikely.
    scores = torch.nan_to_num(scores, nan=-LARGEST_SCORE)
    found = torch.floor((scores / (2 * LARGEST_SCORE) + 0.5) * bins)
    return found.clamp(0, bins - 1).to(torch.int16)


def counted(cells: NDArray[np.int64], shape: Shape) -> Table:
    """How often each cell of a table occurs."""
    return np.bincount(cells, minlength=prod(shape)).reshape(shape)


def as_lists(tables: Mapping[str, Table]) -> dict[str, list[Any]]:
    """Tables as plain values."""
    return {name: table.tolist() for name, table in tables.items()}


def pooled_tables(tallies: Sequence[TableTally]) -> dict[str, Table]:
    """The sums of all tallies' tables; each has those of the first."""
    first = tallies[0].asked
    return {name: np.sum([tally.asked[name] for tally in tallies], axis=0) for name in first}
