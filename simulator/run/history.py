"""What a run measured: how many records of each silo were right, by which model, after how many rounds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...algorithms.training.silo_round import Look, Report, Seen

Measure = Literal[
    "selected/before",  # silos of a round's cohort: the model as delivered, before local training, on test records
    "selected/after",  # the same silos after local training
    "all/aggregated",  # every silo: what the rounds so far would deliver to it now, on test records
    "all/trained",  # every silo: the model that it trained last
    "validation/aggregated",  # as all/aggregated, on validation records
    "validation/trained",  # as all/trained, on validation records
]


@dataclass(frozen=True)
class Measured:
    """One measure after so many rounds that train: right and all records, by silo in job order."""

    rounds: int
    measure: Measure
    correct: Mapping[str, int]
    records: Mapping[str, int]

    @property
    def accuracies(self) -> NDArray[np.float64]:
        """Of each silo [n], in 0…1."""
        pairs = [(self.correct[silo], count) for silo, count in self.records.items()]
        return np.array([right / count for right, count in pairs])

    @property
    def macro(self) -> float:
        """The mean of the silos' accuracies: each silo counts the same."""
        return float(self.accuracies.mean())

    @property
    def micro(self) -> float:
        """The share of all silos' records that are right: each record counts the same."""
        return sum(self.correct.values()) / sum(self.records.values())

    @property
    def spread(self) -> float:
        """The standard deviation of the silos' accuracies (of a population, not of a sample)."""
        return float(self.accuracies.std())


def of_round(rounds: int, reports: Mapping[str, Report]) -> tuple[Measured, ...]:
    """The measures of the silos that trained in the last of these rounds."""
    records = {silo: report.tested for silo, report in reports.items()}
    before = {silo: report.correct_delivered for silo, report in reports.items()}
    after = {silo: report.correct_trained for silo, report in reports.items()}
    return Measured(rounds, "selected/before", before, records), Measured(rounds, "selected/after", after, records)


def of_look(rounds: int, looks: Mapping[str, Look]) -> tuple[Measured, ...]:
    """The measures of all silos; those on validation records where every silo has some."""
    test = {silo: look.test for silo, look in looks.items()}
    found = [*_pair(rounds, ("all/aggregated", "all/trained"), test)]
    validation = {silo: look.validation for silo, look in looks.items() if look.validation is not None}
    if len(validation) == len(looks):
        found += _pair(rounds, ("validation/aggregated", "validation/trained"), validation)
    return tuple(found)


def _pair(rounds: int, measures: tuple[Measure, Measure], seen: Mapping[str, Seen]) -> tuple[Measured, Measured]:
    aggregated, trained = measures
    records = {silo: one.records for silo, one in seen.items()}
    return (
        Measured(rounds, aggregated, {silo: one.delivered for silo, one in seen.items()}, records),
        Measured(rounds, trained, {silo: one.trained for silo, one in seen.items()}, records),
    )
