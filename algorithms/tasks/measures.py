"""What counts say: measures of classes, labels and risks, from tables that may be sums over silos.

Definitions are scikit-learn's. What a histogram of scores cannot say exactly comes with bounds: the
records of one bin could be in any order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma

from .counting import Table

# No sum of counts comes near it, and a few million such cells still add up within 64 bits.
MOST_COUNT = 2**40  # as ``counting.LARGEST_COUNT``, which is a bound of floats
LARGEST_SCORE = 8.0  # a probability of 0.99966

# Bounded measures of classes [N, 3]: value, least and most.
Rows: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class ClassMeasures:
    """Measures of one class against all others; None where nothing is divided by nothing."""

    records: int
    sensitivity: float | None  # recall: of the class's records, the share that is called it
    specificity: float | None  # of other records, the share that is not called it
    precision: float | None  # of the records that are called it, the share that is of it
    f1: float | None


@dataclass(frozen=True)
class Bounded:
    """A measure, and the least and the largest value that the unbinned scores could give."""

    value: float
    least: float
    most: float


@dataclass(frozen=True)
class CalibrationBin:
    """Records whose probability of a class is from ``least`` to ``most``."""

    least: float
    most: float
    records: int
    observed: float  # share of them that is of the class


def balanced_accuracy(by_class: Table) -> float:
    """The mean sensitivity of the classes that have records.

    ``by_class`` as in class_counting.py, with at least one record.
    """
    right, records = by_class[0], by_class[1]
    held = records > 0
    return float((right[held] / records[held]).mean())


def of_classes(by_class: Table) -> tuple[ClassMeasures, ...]:
    """The measures of each class, in order."""
    everything = int(by_class[1].sum())
    return tuple(_of_class(column, everything) for column in by_class.T.tolist())


def _of_class(column: Sequence[int], everything: int) -> ClassMeasures:
    right, records, called = column
    others = everything - records
    wrongly_called = called - right
    return ClassMeasures(
        records,
        _share(right, records),
        # Noisy columns may have more than all records of other classes.
        _share(max(others - wrongly_called, 0), others),
        _share(right, called),
        _share(2 * right, records + called),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def auroc(scores: Table) -> Rows:
    """Areas under ROC curves from histograms [K, 2, bins]; records of a bin are ties.

    Of classes that have records and for which there are others, one row each.
    """
    others, own = scores.astype(np.float64).swapaxes(0, 1)
    pairs = others.sum(1) * own.sum(1)
    below = np.cumsum(others, axis=1) - others
    won, tied = (own * below).sum(1), (own * others).sum(1)
    known = pairs > 0
    found: Rows = np.stack([won + tied / 2, won, won + tied], axis=1)[known] / pairs[known, None]
    return found


def auprc(scores: Table) -> Rows:
    """Average precisions from histograms [K, 2, bins]; records of a bin are ties.

    Of classes that have records, one row each.
    """
    # From the highest score down: each bin is one threshold.
    others, own = scores[:, :, ::-1].astype(np.float64).swapaxes(0, 1)
    before_own, before_others = np.cumsum(own, axis=1) - own, np.cumsum(others, axis=1) - others
    called = np.maximum(before_own + own + before_others + others, 1)
    value = own * (before_own + own) / called
    # In a bin the class's records stand before all others, or behind them.
    most = _precisions(before_own, own, before_others)
    least = _precisions(before_own, own, before_others + others)
    records = own.sum(1)
    known = records > 0
    sums = np.stack([part.sum(1) for part in (value, least, most)], axis=1)
    found: Rows = sums[known] / records[known, None]
    return found


def _precisions(
    before: NDArray[np.float64], own: NDArray[np.float64], others: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The sum over i = 1…own of (before + i) / (before + i + others), by bin."""
    # 1 - others / (…), and a sum of reciprocals is a difference of digammas.
    start = before + others + 1
    sums: NDArray[np.float64] = own - others * (digamma(start + own) - digamma(start))
    return sums


def concordance(risks: Table) -> Bounded | None:
    """The concordance index from a table of risks [2, T + 1, bins] (risk_counting.py).

    Of all pairs of a record with an event and one that was still without it in a later interval,
    the share in which the first one has the higher risk (Harrell et al., 1982); one bin is a tie.
    None where there is no such pair.
    """
    events, everyone = risks[1].astype(np.float64), risks.sum(0).astype(np.float64)
    # By interval: the records of all later ones, and of these those of lower bins.
    later = everyone[::-1].cumsum(0)[::-1] - everyone
    below = later.cumsum(1) - later
    pairs = float((events.sum(1) * later.sum(1)).sum())
    if not pairs:
        return None
    won, tied = float((events * below).sum()), float((events * later).sum())
    return Bounded((won + tied / 2) / pairs, won / pairs, (won + tied) / pairs)


def calibration(scores: Table) -> tuple[CalibrationBin, ...]:
    """The calibration curve from one class's histogram [2, bins]: bins that have records."""
    edges = _edges(scores.shape[1]).tolist()
    found = []
    for place, (others, own) in enumerate(scores.T.tolist()):
        if others + own:
            share = own / (others + own)
            found.append(CalibrationBin(edges[place], edges[place + 1], others + own, share))
    return tuple(found)


@cache
def _edges(bins: int) -> NDArray[np.float64]:
    """The probabilities between which bins lie."""
    inner = map(_probability, np.arange(1, bins) / bins)
    return np.array([0.0, *inner, 1.0])


def _probability(share: float) -> float:
    """The probability at a share of the way through the bins."""
    return 1 / (1 + exp(-(2 * float(share) - 1) * LARGEST_SCORE))


def calibration_error(scores: Table) -> Rows:
    """Expected calibration errors from histograms [K, 2, bins].

    That is the mean distance, over records, of a bin's observed share from its mean probability,
    which lies between its edges: the value takes the middle. Of classes with records, one row each.
    """
    others, own = scores.astype(np.float64).swapaxes(0, 1)
    records = others + own
    everything = records.sum(1)
    known = everything > 0
    # A bin without records has no share, and no weight.
    observed = own / np.maximum(records, 1)
    weights = records / np.maximum(everything, 1)[:, None]
    edges = _edges(scores.shape[2])
    low, high = observed - edges[1:], observed - edges[:-1]
    # An observed share between the edges may be the mean itself.
    least = np.maximum(np.maximum(low, -high), 0)
    most = np.maximum(np.abs(low), np.abs(high))
    distances = (np.abs(low + high) / 2, least, most)
    # One order of adding, whatever the processor: reports are compared byte by byte.
    sums = [np.cumsum(weights * distance, axis=1)[:, -1] for distance in distances]
    found: Rows = np.stack(sums, axis=1)[known]
    return found


def clipped(cells: Any, *, signed: bool = False) -> Table:
    """A table of sums, within what can be added up; below zero only where ``signed``."""
    table: Table = np.array(cells, dtype=np.int64).clip(-MOST_COUNT if signed else 0, MOST_COUNT)
    return table


def share(value: float) -> float:
    """A share that noise may have moved, within 0 and 1."""
    return min(max(value, 0.0), 1.0)


def of_confusion(confusion: Table) -> dict[str, Any]:
    """``of_by_class`` of a matrix, made consistent where noise leaves cells below zero.

    Sums of cells come first: over many cells noise adds up to little.
    """
    records = confusion.sum(1).clip(min=0)
    right = confusion.diagonal().clip(min=0)
    right = np.minimum(right, records)
    return of_by_class(np.stack([right, records, np.maximum(confusion.sum(0), right)]))


def of_by_class(by_class: Table) -> dict[str, Any]:
    """Balanced accuracy, the majority baseline and each class's measures, as plain values.

    Empty without records.
    """
    records = int(by_class[1].sum())
    if records <= 0:
        return {}
    return {
        "balanced_accuracy": balanced_accuracy(by_class),
        "majority": int(by_class[1].max()) / records,
        "classes": [vars(one) for one in of_classes(by_class)],
    }


def of_labels(confusion: Table) -> dict[str, Any]:
    """Like ``of_by_class``, for labels that a record may have or not (label_counting.py).

    The majority baseline gives every record the labels that most records have.
    """
    everything = int(confusion.sum())
    if not everything:
        return {}
    # Of each label both sides are classes, as in a classification of two.
    sides = list(map(_sides, confusion))
    # Noise may leave nothing of a label.
    known = [own for own in sides if own[1].any()]
    return {
        "balanced_accuracy": float(np.mean(list(map(balanced_accuracy, known)))),
        "majority": int(confusion.sum(2).max(1).sum()) / everything,
        "classes": [vars(of_classes(own)[1]) for own in sides],
    }


def _sides(confusion: Table) -> Table:
    return np.stack([confusion.diagonal(), confusion.sum(1), confusion.sum(0)])


def of_scores(scores: Table) -> dict[str, Any]:
    """AUROC, AUPRC and calibration error, each as the mean over the classes that have one.

    ``scores`` [K, 2, bins] as in class_counting.py.
    """
    measures = {"auroc": auroc, "auprc": auprc, "calibration_error": calibration_error}
    rows = {name: measure(scores) for name, measure in measures.items()}
    return {name: vars(_mean(own)) for name, own in rows.items() if len(own)}


def _mean(rows: Rows) -> Bounded:
    # Sums of many fractions may miss 0 and 1 by their last bits.
    return Bounded(*map(float, np.mean(rows, axis=0).clip(0, 1)))
