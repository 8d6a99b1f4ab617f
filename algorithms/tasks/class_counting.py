"""What evaluation counts of a classifier on a silo's records: tables of fixed sizes.

::

    by_class   [3, C]        per class: records of it that were called it, all records of it, all
                             records that were called it
    confusion  [C, C]        row: the class of the records, column: the class that they were called
    scores     [K, 2, bins]  per class: how many records have a score in each bin, first the records
                             of other classes, then those of the class; K = C, or 1 for two classes,
                             where it is of class 1
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .counting import Marks, Said, ScoreForm, Table, joined
from .measures import balanced_accuracy, of_by_class, of_confusion, of_scores
from .table_counting import (
    CONFUSION,
    SCORES,
    Shape,
    TableCounting,
    TableTally,
    as_lists,
    counted,
    places,
    pooled_tables,
)

ACCURACY = ScoreForm("accuracy", "accuracy", "always the most frequent class")


@dataclass(frozen=True, eq=False)
class ClassTally(TableTally):
    """The counts of a classifier on some records; None for a table that was not asked for."""

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
    def score(self) -> float:
        """The accuracy."""
        return self.correct / self.records

    @property
    def baseline(self) -> float:
        """The share of the class that has the most: no model that always says one gets more."""
        return int(self.by_class[1].max()) / self.records

    @property
    def balanced(self) -> float:
        """The mean sensitivity of the classes that have records."""
        return balanced_accuracy(self.by_class)

    @property
    def tables(self) -> dict[str, Any]:
        """All counts by name, as plain values."""
        return as_lists({"by_class": self.by_class, **self.asked})

    def said(self) -> Said:
        """Accuracy, balanced accuracy, the share of the most frequent class, and each class."""
        if not self.records:
            return {}
        said = {"accuracy": self.score, **of_by_class(self.by_class)}
        return said if self.scores is None else said | of_scores(self.scores)


@dataclass(frozen=True)
class ClassCounting(TableCounting):
    """What a classification counts: always by class, and what its [metrics] table asks for."""

    @property
    def score(self) -> ScoreForm:
        """Accuracy."""
        return ACCURACY

    @property
    def scored(self) -> int:
        """Classes that have a histogram of scores."""
        # With two classes the second one's is the first one's reversed.
        return 1 if self.classes == 2 else self.classes

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the tables."""
        return {CONFUSION: (self.classes, self.classes), SCORES: (self.scored, 2, self.bins)}

    def of_confusion(self, confusion: Table) -> Said:
        """What sums of the matrix say."""
        return of_confusion(confusion)

    def marks(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """What is counted of each record, from its logits [B, C].

        ``called`` [B] is the class with the largest logit, ``bins`` [B, K] are places of scores.
        """
        called = outputs.argmax(dim=1)
        if not self.bins:
            return {"called": called}
        # Of two classes the second alone.
        chances = torch.log_softmax(outputs, dim=1)[:, self.classes - self.scored :]
        # log(1 - p) by expm1, since 1 - p would be zero from p = 1 - 6e-8 on.
        scores = chances - torch.log(-torch.expm1(chances))
        return {"called": called, "bins": places(scores, self.bins)}

    def count(self, marks: Mapping[str, Sequence[Marks]], truth: Sequence[Marks]) -> ClassTally:
        """The counts of all records, from their marks and labels, piece by piece."""
        called, labels = joined(marks["called"]), joined(truth)
        sides = (labels[called == labels], labels, called)
        by_class = np.stack([counted(side, (self.classes,)) for side in sides])
        confusion = scores = None
        if self.confusion:
            confusion = counted(labels * self.classes + called, (self.classes, self.classes))
        if self.bins:
            # Class by class: all at once would take eight bytes per record and class.
            columns = enumerate(joined(marks["bins"], self.scored).T, self.classes - self.scored)
            own = (
                (labels == label) * self.bins + column.astype(np.int64) for label, column in columns
            )
            scores = np.stack([counted(cells, (2, self.bins)) for cells in own])
        return ClassTally(by_class, confusion, scores)

    def pooled(self, tallies: Sequence[ClassTally]) -> ClassTally:
        """The counts of several sets of records together."""
        by_class = np.sum([tally.by_class for tally in tallies], axis=0)
        return ClassTally(by_class, **pooled_tables(tallies))
