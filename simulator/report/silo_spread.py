"""What the silos' accuracies of one measure say of the weakest and the strongest, and against
training alone.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, TypeAlias

import numpy as np

from ..run.history import Measured

Product: TypeAlias = Literal["delivered", "trained"]  # of a method


@dataclass(frozen=True)
class Spectrum:
    """Of the silos' accuracies, in 0…1; a tenth is of the silos, one at least."""

    least: float
    worst_tenth: float  # mean of the lowest
    median: float
    best_tenth: float  # mean of the highest
    most: float
    spread: float  # standard deviation over the silos, of a population


@dataclass(frozen=True)
class Against:
    """How many silos do better, as well and worse than by another run."""

    better: int
    equal: int
    worse: int


def kept(history: Sequence[Measured], product: Product, trained: Collection[str]) -> Measured:
    """Of the last look, each silo with the model that it keeps: the one that
    ``algorithms.local_round.kept`` says.
    """
    last = {one.measure: one for one in history}
    delivered, own = last["all/aggregated"], last["all/trained"]
    if product == "delivered":
        return delivered
    correct = {silo: (own if silo in trained else delivered).correct[silo] for silo in own.records}
    return Measured(own.rounds, own.measure, correct, own.records)


def spectrum(measured: Measured) -> Spectrum:
    """Of one measure of one run."""
    ordered = np.sort(measured.accuracies)
    tenth = ceil(len(ordered) / 10)
    return Spectrum(
        float(ordered[0]),
        float(ordered[:tenth].mean()),
        float(np.median(ordered)),
        float(ordered[-tenth:].mean()),
        float(ordered[-1]),
        measured.spread,
    )


def against(measured: Measured, other: Measured) -> Against:
    """Silo by silo, on the same records: the number that is right decides."""
    gains = [measured.correct[silo] - other.correct[silo] for silo in measured.records]
    return Against(
        sum(gain > 0 for gain in gains),
        sum(gain == 0 for gain in gains),
        sum(gain < 0 for gain in gains),
    )
