"""The figures of a model as rows of texts, for the card and for terminals."""

from collections.abc import Iterator, Sequence
from itertools import repeat
from math import log10
from operator import itemgetter

from .description import Figures, Range, Threshold

Row = Sequence[str]

MAJORITY = "majority"  # the accuracy of the best constant answer, which is told as such
MEASURES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "calibration_error": "expected calibration error",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "r2": "R²",
    "concordance": "concordance index",
    "dice": "Dice score",
    "loss": "mean loss",
}
KINDS = ("sensitivity", "specificity", "precision", "f1")
FIGURES: Row = ("figure", "value (95 % interval)")
CLASSES: Row = ("class", "test records", *KINDS)
THRESHOLDS: Row = ("class", "threshold", "chosen on", "measured on", *KINDS[:2])
IN_UNIT = {"mae", "rmse"}  # measures in the unit of what is predicted
INTERVAL = ("{} ({} to {})", "{}")
DIGITS = 3  # after the point, of values below 10


def figure(value: float | None, interval: Range | None = None) -> str:
    """A figure with its interval, such as 0.912 (0.873 to 0.940)."""
    if value is None:
        return "–"
    # A figure and its interval are as long as each other.
    digits = max(0, DIGITS - int(log10(max(abs(value), 1))))
    texts = map(format, (value, *(interval or ())), repeat(f",.{digits}f"))
    return INTERVAL[interval is None].format(*texts)


def figure_rows(measured: Figures, names: Sequence[str] = (), unit: str = "") -> Iterator[Row]:
    """The single figures of all records, and that of the best constant answer.

    ``names`` are those of the classes, ``unit`` that of what is predicted.
    """
    for key, said in measured.said.items():
        value = said.get("value") if isinstance(said, dict) else said
        if isinstance(value, float) and key != MAJORITY:
            yield name_of(key, names, unit), figure(value, measured.intervals.get(key))
    best = f"{name_of(measured.score, names, unit)} of the best constant answer"
    yield best, figure(measured.baseline)


def name_of(key: str, names: Sequence[str] = (), unit: str = "") -> str:
    """A measure as people call it, with its class or its unit."""
    numbered = {f"dice_class_{place}": f"Dice score of {name}" for place, name in enumerate(names)}
    known = {**MEASURES, **numbered}.get(key, key.replace("_", " "))
    return f"{known} ({unit})" if unit and key in IN_UNIT else known


def class_rows(measured: Figures, names: Sequence[str]) -> Iterator[Row]:
    """The figures of each class or label; nothing in other tasks."""
    for place, own in enumerate(measured.said.get("classes", ())):
        paths = map(f"classes.{place}.".__add__, KINDS)
        cells = map(figure, itemgetter(*KINDS)(own), map(measured.intervals.get, paths))
        yield names[place], f"{own['records']:,}", *cells


def threshold_rows(thresholds: Sequence[Threshold]) -> Iterator[Row]:
    """Each threshold with what comes of it."""
    for own in thresholds:
        counts = f"{own.chosen_on:,}", f"{own.measured_on:,}"
        sensitivity = figure(own.sensitivity, own.sensitivity_interval)
        specificity = figure(own.specificity, own.specificity_interval)
        yield own.of, f"{own.value:.4f}", *counts, sensitivity, specificity
