"""What evaluation counts of a model on a silo's records: tables of whole numbers, of fixed sizes.

Counts of several silos add up to those of all their records. So a blind job can sum them, and a
private job knows how much one record can change them.

::

    by_class   [3, C]        per class: records of it that were called it, all records of it, all
                             records that were called it
    confusion  [C, C]        row: the class of the records, column: the class that they were called
    scores     [K, 2, bins]  per class: how many records have a score in each bin, first the records
                             of other classes, then those of the class; K = C, or 1 for two classes,
                             where it is of class 1

A record's score for a class is the logit of its probability, log p - log(1 - p), which spreads
probabilities near 0 and 1 over many bins. Bins have one width from -LARGEST_SCORE to LARGEST_SCORE;
the first and the last also hold everything beyond.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..exchange.parts import Contribution, Kind, Part, Sum, TensorSpec

LARGEST_SCORE = 8.0  # a probability of 0.99966
CONFUSION, SCORES = "confusion", "scores"
# Both models are tested on the same records: as delivered, and after local training.
MODELS = ("delivered", "trained")

# Sums over all silos of a job stay far below what int64 holds.
LARGEST_COUNT = 2.0**40

Table = NDArray[np.int64]
Marks = NDArray[Any]  # whole numbers


@dataclass(frozen=True, eq=False)
class Tally:
    """The counts of one model on some records; None for a table that was not asked for."""

    by_class: Table
    confusion: Table | None = None
    scores: Table | None = None

    @property
    def records(self) -> int:
        """Records that were classified."""
        return int(self.by_class[1].sum())

    @property
    def correct(self) -> int:
        """Records that were classified correctly."""
        return int(self.by_class[0].sum())

    @property
    def most_frequent(self) -> int:
        """Records of the class that has the most: no model that always says one class gets more."""
        return int(self.by_class[1].max())

    @property
    def tables(self) -> dict[str, Table]:
        """The tables that were asked for, by the names of their parts."""
        found = {CONFUSION: self.confusion, SCORES: self.scores}
        return {name: table for name, table in found.items() if table is not None}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tally) or self.tables.keys() != other.tables.keys():
            return False
        own, others = self.tables, other.tables
        same = all(np.array_equal(own[name], others[name]) for name in own)
        return same and np.array_equal(self.by_class, other.by_class)

    __hash__ = None  # type: ignore[assignment]


def pooled(tallies: Sequence[Tally]) -> Tally:
    """The counts of several sets of records together, which were counted alike."""
    first = tallies[0].tables
    sums = {name: sum(tally.tables[name] for tally in tallies) for name in first}
    by_class = np.sum([tally.by_class for tally in tallies], axis=0)
    return Tally(by_class, sums.get(CONFUSION), sums.get(SCORES))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Counting:
    """What a job counts: always by class, and what its [metrics] table asks for.

    In a private job tables are ``noised``: their numbers may be below zero, so that noise adds up
    to nothing over many cells and silos.
    """

    classes: int
    confusion: bool = False
    bins: int = 0  # of scores; 0 for none
    noised: bool = False

    @property
    def scored(self) -> int:
        """Classes that have a histogram of scores."""
        # With two classes the second one's is the first one's reversed.
        return 1 if self.classes == 2 else self.classes

    @property
    def squared_sensitivity(self) -> int:
        """The square of the most that one record changes all counts that cross, in the L2 norm.

        METRICS are three counts, and each model's record is in one cell of a confusion matrix and
        in one bin of each class's histogram.
        """
        tables = self.confusion + (self.scored if self.bins else 0)
        return 3 + len(MODELS) * tables

    def parts(self) -> tuple[Part, ...]:
        """The parts that cross besides METRICS, each with a table per model."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.confusion:
            shapes[CONFUSION] = (self.classes, self.classes)
        if self.bins:
            shapes[SCORES] = (self.scored, 2, self.bins)
        least = -LARGEST_COUNT if self.noised else 0.0
        return tuple(
            Part(
                name,
                Kind.METRIC,
                Sum("total"),
                tuple(TensorSpec(model, "int64", shape, least, LARGEST_COUNT) for model in MODELS),
            )
            for name, shape in shapes.items()
        )

    def contributions(self, delivered: Tally, trained: Tally) -> dict[str, Contribution]:
        """The tables of both models, by part."""
        return {
            part.name: Contribution(
                {
                    model: torch.from_numpy(counts.tables[part.name])
                    for model, counts in zip(MODELS, (delivered, trained), strict=True)
                }
            )
            for part in self.parts()
        }

    def marks(self, logits: Tensor) -> dict[str, Tensor]:
        """What is counted of each record, from its logits [B, C]; it runs under ``torch.vmap``.

        ``called`` [B] is the class with the largest logit, ``bins`` [B, K] are places of scores.
        """
        called = logits.argmax(dim=1)
        if not self.bins:
            return {"called": called}
        return {"called": called, "bins": self._places(logits)}

    def _places(self, logits: Tensor) -> Tensor:
        # Of two classes the second alone.
        chances = torch.log_softmax(logits, dim=1)[:, self.classes - self.scored :]
        # log(1 - p) by expm1, since 1 - p would be zero from p = 1 - 6e-8 on.
        scores = chances - torch.log(-torch.expm1(chances))
        # A model that has diverged has no probabilities: its records count as unlikely.
        scores = torch.nan_to_num(scores, nan=-LARGEST_SCORE)
        places = torch.floor((scores / (2 * LARGEST_SCORE) + 0.5) * self.bins)
        return places.clamp(0, self.bins - 1).to(torch.int16)

    def no_marks(self) -> dict[str, list[Marks]]:
        """The names of all marks, to gather pieces of them."""
        names = ("called", "bins")[: 1 + bool(self.bins)]
        return {name: [] for name in names}

    def count(self, marks: Mapping[str, Sequence[Marks]], labels: Sequence[Marks]) -> Tally:
        """The counts of all records, from their marks and labels, piece by piece."""
        called, truth = _joined(marks["called"]), _joined(labels)
        by_class = np.empty((3, self.classes), np.int64)
        for row, classes in zip(by_class, (truth[called == truth], truth, called), strict=True):
            row[:] = np.bincount(classes, minlength=self.classes)
        confusion = scores = None
        if self.confusion:
            confusion = _counted(truth * self.classes + called, (self.classes, self.classes))
        if self.bins:
            # Class by class: all at once would take eight bytes per record and class.
            columns = _joined(marks["bins"], self.scored).T
            first = self.classes - self.scored
            scores = np.stack(
                [
                    _counted((truth == label) * self.bins + column.astype(np.int64), (2, self.bins))
                    for label, column in enumerate(columns, first)
                ]
            )
        return Tally(by_class, confusion, scores)


def tables_fault(
    tables: Mapping[tuple[str, str], Tensor], tested: int, correct: Mapping[str, int]
) -> str:
    """Why exact tables, by part and model, contradict METRICS or one another; empty if they do not.

    Every table says how many test records each class has, and all must say the same: more could
    hide in tables that need not agree.
    """
    known: dict[int, int] = {}  # by class: its test records, as the first table says
    for (part, model), table in tables.items():
        where = f"{part}/{model}"
        # Every record is in one cell of a confusion matrix, and in one bin per class.
        once = table if part == SCORES else table[None]
        if (once.flatten(1).sum(1) != tested).any():
            return f"{where} does not count each of {tested} test records once"
        if part == CONFUSION and int(table.diagonal().sum()) != correct[model]:
            found = int(table.diagonal().sum())
            return f"{where} has {found} on its diagonal, {correct[model]} records are right"
        for label, records in _records_by_class(part, table).items():
            if known.setdefault(label, records) != records:
                return (
                    f"{where} has {records} test records of class {label}, another table"
                    f" {known[label]}"
                )
    return ""


def _records_by_class(part: str, table: Tensor) -> dict[int, int]:
    if part == CONFUSION:
        return dict(enumerate(table.sum(1).tolist()))
    # One histogram alone is of class 1.
    return dict(enumerate(table[:, 1].sum(1).tolist(), len(table) == 1))


def _joined(pieces: Sequence[Marks], *columns: int) -> Marks:
    """All pieces one after another; there may be none."""
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate([np.empty((0, *columns), np.int64), *pieces])


def _counted(places: NDArray[np.int64], shape: tuple[int, int]) -> Table:
    """How often each place of a table occurs."""
    rows, columns = shape
    return np.bincount(places, minlength=rows * columns).reshape(shape)
