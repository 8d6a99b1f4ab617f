"""The weakest and the strongest silos in one measure, and each silo against training alone."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, TypeAlias

import numpy as np

from ..run.history import Measured

Product: TypeAlias = Literal["delivered", "trained"]  # of a method


@dataclass(frozen=True)
class Spectrum:
    """Scores from the weakest to the strongest silo; a tenth is at least one silo."""

    least: float
    worst_tenth: float  # mean of the worst
    median: float
    best_tenth: float  # mean of the best
    most: float
    spread: float  # standard deviation over the silos, of a population


@dataclass(frozen=True)
class Against:
    """How many silos do better, as well and worse than by another run."""

    better: int
    equal: int
    worse: int


def kept(
    history: Sequence[Measured],
    product: Product,
    trained: Collection[str],
    side: Literal["test", "validation"] = "test",
) -> Measured:
    """The last look at one side's records, each silo with the model that it keeps.

    A silo that never trained keeps what was delivered, whatever the method's product.

    ``trained`` are the silos that were in a cohort. ``history`` must have an evaluation after the
    last round.
    """
    last = {one.measure: one for one in history}
    delivered, own = last["all/aggregated"], last["all/trained"]
    if side == "validation":
        delivered, own = last["validation/aggregated"], last["validation/trained"]
    if product == "delivered":
        return delivered

    # a silo outside every cohort has no model that it trained
    at_own = {silo: score for silo, score in own.scores.items() if silo in trained}
    recalls = {silo: recall for silo, recall in own.recalls.items() if silo in trained}
    return replace(
        own,
        scores={**delivered.scores, **at_own},
        recalls={**delivered.recalls, **recalls},
    )


def spectrum(measured: Measured, *, higher: bool = True) -> Spectrum:
    """The spectrum of one measure of one run; tenths are rounded up.

    The best score is the ``higher`` one, or the lower.
    """
    ordered = np.sort(measured.by_silo)
    if not higher:
        ordered = ordered[::-1]
    tenth = ceil(len(ordered) / 10)
    return Spectrum(
        float(ordered[0]),
        float(ordered[:tenth].mean()),
        float(np.median(ordered)),
        float(ordered[-tenth:].mean()),
        float(ordered[-1]),
        measured.spread,
    )


def against(measured: Measured, other: Measured, *, higher: bool = True) -> Against:
    """Silo by silo, on the same records: the ``higher`` score wins, or the lower."""
    silos = list(measured.records)
    # Of as many records, so scores that tie are the same number.
    gains = np.array([measured.scores[silo] - other.scores[silo] for silo in silos])
    if not higher:
        gains = -gains
    return Against(int((gains > 0).sum()), int((gains == 0).sum()), int((gains < 0).sum()))
