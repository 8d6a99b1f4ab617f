"""What evaluation counts where each record has several labels, or none: tables per label.

::

    confusion  [L, 2, 2]     per label, row: whether a record has it, column: whether the model says
                             so, which it does from probability 1/2 on
    scores     [L, 2, bins]  per label: how many records have a score in each bin, first those
                             without the label (table_counting.py)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .counting import Marks, Said, ScoreForm, Table, joined
from .measures import of_labels, of_scores
from .table_counting import (
    CONFUSION,
    CORRECT,
    SCORES,
    Shape,
    TableCounting,
    TableTally,
    counted,
    places,
    pooled_tables,
)

LABEL_ACCURACY = ScoreForm("accuracy", "label accuracy", "always the same labels")


@dataclass(frozen=True, eq=False)
class LabelTally(TableTally):
    """The counts of one model on some records."""

    confusion: Table  # [L, 2, 2]
    scores: Table | None = None

    @property
    def records(self) -> int:
        """Records that were tested."""
        return int(self.confusion[0].sum())

    @property
    def correct(self) -> int:
        """Labels that are right, over all records."""
        return int(self.confusion[:, 0, 0].sum() + self.confusion[:, 1, 1].sum())

    @property
    def score(self) -> float:
        """The share of all labels of all records that are right."""
        return self.correct / int(self.confusion.sum())

    @property
    def baseline(self) -> float:
        """The same for an answer that gives every record the labels that most have."""
        return int(self.confusion.sum(2).max(1).sum()) / int(self.confusion.sum())

    @property
    def balanced(self) -> float:
        """The mean over labels of their balanced accuracies."""
        return float(of_labels(self.confusion)["balanced_accuracy"])

    def said(self) -> Said:
        """Accuracy, the same of the best constant answer, and each label."""
        if not self.records:
            return {}
        said = {"accuracy": self.score, **of_labels(self.confusion)}
        return said if self.scores is None else said | of_scores(self.scores)


@dataclass(frozen=True)
class LabelCounting(TableCounting):
    """What such a task counts: always the confusion of each label; [metrics] says what crosses."""

    @property
    def score(self) -> ScoreForm:
        """The share of labels that are right."""
        return LABEL_ACCURACY

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the tables."""
        return {CONFUSION: (self.classes, 2, 2), SCORES: (self.classes, 2, self.bins)}

    def unit(self, part: str, tensor: str) -> int:
        """All labels of a record may be right."""
        return self.classes if tensor.startswith(CORRECT) else 1

    def of_confusion(self, confusion: Table) -> Said:
        """What sums of the matrices say."""
        return of_labels(confusion.clip(min=0))

    def marks(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Which labels the model gives each record [B, L], and places of scores [B, L]."""
        called = {"called": outputs >= 0}
        # The logit is the score itself.
        return {**called, "bins": places(outputs, self.bins)} if self.bins else called

    def count(self, marks: Mapping[str, Sequence[Marks]], truth: Sequence[Marks]) -> LabelTally:
        """The counts of all records, from their marks and labels, piece by piece."""
        called, labels = joined(marks["called"], self.classes), joined(truth, self.classes)
        confusion = _by_label(labels * 2 + called, (2, 2))
        if not self.bins:
            return LabelTally(confusion)
        cells = labels * self.bins + joined(marks["bins"], self.classes)
        return LabelTally(confusion, _by_label(cells, (2, self.bins)))

    def pooled(self, tallies: Sequence[LabelTally]) -> LabelTally:
        """The counts of several sets of records together."""
        return LabelTally(**pooled_tables(tallies))


def _by_label(cells: Marks, shape: Shape) -> Table:
    """How often each cell occurs, label by label: [L, *shape] of cells [N, L]."""
    return np.stack([counted(column.astype(np.int64), shape) for column in cells.T])
