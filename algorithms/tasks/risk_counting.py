"""What evaluation counts of survival models: a table of risks by time, and sums of losses.

::

    risks     [2, T + 1, bins]  records by interval of time and by risk: first those that were last
                                seen without the event, then those that had it; the last interval is
                                all time after the others
    metrics   per model: the sum of the losses; and the number of test records

A record's risk is the probability that the model gives the event before the last interval, as its
logit, in bins like scores (table_counting.py).
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..exchange.parts import Contribution, Part
from .counting import (
    METRICS,
    MODELS,
    Counting,
    Marks,
    Said,
    ScoreForm,
    Sums,
    Table,
    Tally,
    joined,
)
from .measures import clipped, concordance
from .table_counting import counted, places, tables_part
from .value_counting import ValueCounting, Valued, ValueTally

RISKS = "risks"
OWN_BINS = 1024  # of a silo's own table; those that cross are made of these, and fewer
C_INDEX = "concordance"


class Timed(Valued, Protocol):
    """A task of events in intervals of time, which end at ``cuts``."""

    @property
    def cuts(self) -> tuple[float, ...]:
        """Ends of the intervals, in order."""

    @abstractmethod
    def interval(self, time: Tensor) -> Tensor:
        """The interval of each time [B]: 0 … T - 1, or T for what is after all of them."""

    @abstractmethod
    def log_survival(self, outputs: Tensor) -> Tensor:
        """Logarithm of the probability of no event up to the end of each interval [B, T]."""


@dataclass(frozen=True, eq=False)
class RiskTally(Tally):
    """The counts of one model on some records."""

    losses: ValueTally
    risks: Table

    @property
    def records(self) -> int:
        """Records that were tested."""
        return self.losses.tested

    @property
    def score(self) -> float:
        """The concordance index; 1/2 where no two records can be compared."""
        found = concordance(self.risks)
        return 0.5 if found is None else found.value

    @property
    def baseline(self) -> float:
        """An answer that is the same for all ties every pair."""
        return 0.5

    @property
    def tables(self) -> dict[str, Any]:
        """The table of risks, and the sum of losses."""
        return {**self.losses.tables, RISKS: self.risks.tolist()}

    def said(self) -> Said:
        """Concordance with its bounds, and the mean loss."""
        return {**self.losses.said(), **_said(self.risks)}


@dataclass(frozen=True)
class RiskCounting(Counting):
    """What survival counts; with ``bins``, which [metrics] asks for, the table crosses."""

    task: Timed
    bins: int = 0
    noised: bool = False

    @property
    def score(self) -> ScoreForm:
        """The concordance index."""
        return self.task.score

    @property
    def _losses(self) -> ValueCounting:
        return ValueCounting(self.task, noised=self.noised)

    @property
    def squared_sensitivity(self) -> int:
        """A record is in one cell of each model's table."""
        return self._losses.squared_sensitivity + (len(MODELS) if self.bins else 0)

    def unit(self, part: str, tensor: str) -> int:
        """Cells are counts, losses are in units."""
        return 1 if part == RISKS else self._losses.unit(part, tensor)

    @property
    def _rows(self) -> tuple[int, int]:
        return (2, len(self.task.cuts) + 1)

    def parts(self) -> tuple[Part, ...]:
        """The table where it crosses, and METRICS."""
        if not self.bins:
            return self._losses.parts()
        return (tables_part(RISKS, (*self._rows, self.bins), self.noised), *self._losses.parts())

    def contributions(self, delivered: RiskTally, trained: RiskTally) -> dict[str, Contribution]:
        """The tensors of both models, by part."""
        found = self._losses.contributions(delivered.losses, trained.losses)
        if not self.bins:
            return found
        # Each bin that crosses begins at one of the silo's own.
        starts = -(-np.arange(self.bins) * OWN_BINS // self.bins)
        tables = (
            torch.from_numpy(np.add.reduceat(tally.risks, starts, axis=2))
            for tally in (delivered, trained)
        )
        return {RISKS: Contribution(dict(zip(MODELS, tables, strict=True))), **found}

    def marks(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Losses, and places in the table [B]."""
        survived = self.task.log_survival(outputs)[:, -1]
        # log odds of an event: log(1 - S) - log S.
        bins = places(torch.log(-torch.expm1(survived)) - survived, OWN_BINS)
        event = (y[:, 1] > 0).long()
        row = event * self._rows[1] + self.task.interval(y[:, 0])
        return {**self._losses.marks(outputs, y), RISKS: row * OWN_BINS + bins}

    @property
    def mark_names(self) -> tuple[str, ...]:
        """The names of all marks."""
        return (*self._losses.mark_names, RISKS)

    def count(self, marks: Mapping[str, Sequence[Marks]], truth: Sequence[Marks]) -> RiskTally:
        """The counts of all records."""
        risks = counted(joined(marks[RISKS]), (*self._rows, OWN_BINS))
        return RiskTally(self._losses.count(marks, truth), risks)

    def pooled(self, tallies: Sequence[RiskTally]) -> RiskTally:
        """The counts of several sets of records; pairs across these sets are compared, too."""
        losses = self._losses.pooled([tally.losses for tally in tallies])
        return RiskTally(losses, np.sum([tally.risks for tally in tallies], axis=0))

    def fault(self, values: Mapping[tuple[str, str], Tensor], tested: int) -> str:
        """Why tables do not count each test record once, or in other intervals than one another."""
        known: Tensor | None = None
        for (part, model), table in values.items():
            if part == METRICS:
                continue
            where, intervals = f"{part}/{model}", table.sum(2)
            if int(table.sum()) != tested:
                return f"{where} does not count each of {tested} test records once"
            if known is not None and not torch.equal(known, intervals):
                return f"{where} has other records by interval than the other model's table"
            known = intervals
        return ""

    def of_sums(self, sums: Sums) -> dict[str, Said]:
        """The mean losses, and concordance where the tables cross."""
        found = self._losses.of_sums(sums)
        for model, own in list(found.items()):
            if (risks := sums.get(f"{RISKS}.{model}")) is not None:
                found[model] = own | _said(clipped(risks))
        return found


def _said(risks: Table) -> Said:
    found = concordance(risks)
    return {} if found is None else {C_INDEX: vars(found)}
