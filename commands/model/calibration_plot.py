"""The calibration of a model: how often what it calls likely is true.

In tenths of probability, each with Wilson's interval: finer bins of few records show chance alone.
Counts of scores do not say where in a bin they are, so its middle counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...algorithms.tasks.measures import CalibrationBin
from ...bundle.measuring import wilson
from ...errors import LocalError
from ...files.documents import write_atomic
from ...simulator.report.style import can_draw, percent, picture, styles_of
from ..terminal.printer import PrintedTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMS: Mapping[str, Literal["png", "svg"]] = {".png": "png", ".svg": "svg"}
MOST_CURVES = 12
TENTHS = 10
WIDTH = 40  # of a bar, in characters

Curve = Sequence[CalibrationBin]


def check_name(path: Path) -> None:
    """LocalError unless a picture's kind is known by its name, and can be drawn here."""
    if not can_draw():
        raise LocalError(f"{path}: pictures are drawn by matplotlib; pip install 'staddle[plots]'")
    if path.suffix.lower() not in FORMS:
        raise LocalError(f"{path}: name a file that ends in {' or '.join(FORMS)}")


def write(path: Path, curves: Mapping[str, Curve]) -> None:
    """Draw a curve per class or label, at most ``MOST_CURVES``.

    UnwritableError where the file cannot be written.
    """
    shown = dict(list(curves.items())[:MOST_CURVES])
    styles = styles_of(list(shown))

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color="#999999", linewidth=0.8)
        for name, curve in shown.items():
            style, points = styles[name], list(tenths(curve))
            # Matplotlib takes how far an interval reaches below and above.
            reach = np.array([own.reach for own in points]).T
            x, y = [own.given for own in points], [own.true for own in points]
            looks: dict[str, Any] = {"color": style.colour, "marker": style.marker}
            axes.errorbar(x, y, reach, **looks, markersize=4, linewidth=1, label=name)
        percent(axes, "x")
        percent(axes, "y")
        axes.set_xlabel("probability that the model gives")
        axes.set_ylabel("share of records of which it is true, with 95 % intervals")
        axes.legend(loc="best")

    write_atomic(path, picture(5.5, 5.0, draw, FORMS[path.suffix.lower()]), 0o644)


def tables(curves: Mapping[str, Curve]) -> Iterator[PrintedTable]:
    """The same as text."""
    for name, curve in list(curves.items())[:MOST_CURVES]:
        rows = []
        for own in tenths(curve):
            between = f"{own.place / TENTHS:.0%} to {(own.place + 1) / TENTHS:.0%}"
            bar = "#" * round(own.true * WIDTH)
            rows.append((between, f"{own.records:,}", f"{own.true:.1%}", bar))
        columns = ("probability", "records", "true", f"true: {WIDTH} marks are all")
        yield PrintedTable(columns, rows, (1, 2), title=f"calibration of {name}")


@dataclass(frozen=True)
class CalibrationTenth:
    """Records whose probability is in one tenth: the mean of it, and of how many it is true."""

    place: int
    records: int
    given: float
    true: float

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's, of the share that is true."""
        return wilson(self.true, self.records)

    @property
    def reach(self) -> tuple[float, float]:
        """How far it reaches below and above the share."""
        low, high = self.interval
        return self.true - low, high - self.true


def tenths(curve: Curve) -> Iterator[CalibrationTenth]:
    """The tenths of probability that have records, in order."""
    for place, group in groupby(curve, lambda one: min(int(_middle(one) * TENTHS), TENTHS - 1)):
        own = list(group)
        records = sum(one.records for one in own)
        given = sum(_middle(one) * one.records for one in own) / records
        true = sum(one.observed * one.records for one in own) / records
        yield CalibrationTenth(place, records, given, true)


def _middle(one: CalibrationBin) -> float:
    return (one.least + one.most) / 2
