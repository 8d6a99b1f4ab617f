"""The calibration of a model: how often what it calls likely is true.

Of a bin of probabilities the middle is drawn: counts of scores do not say where in it they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...algorithms.tasks.measures import CalibrationBin
from ...errors import LocalError
from ...files.documents import write_atomic
from ...simulator.report.style import can_draw, percent, picture, styles_of
from ..console.printer import PrintedTable

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
            style = styles[name]
            x = [_middle(own) for own in curve]
            y = [own.observed for own in curve]
            axes.plot(x, y, color=style.colour, marker=style.marker, markersize=4, label=name)
        percent(axes, "x")
        percent(axes, "y")
        axes.set_xlabel("probability that the model gives")
        axes.set_ylabel("share of records of which it is true")
        axes.legend(loc="upper left")

    write_atomic(path, picture(5.5, 5.0, draw, FORMS[path.suffix.lower()]), 0o644)


def tables(curves: Mapping[str, Curve]) -> Iterator[PrintedTable]:
    """The same as text, in tenths of probability."""
    for name, curve in list(curves.items())[:MOST_CURVES]:
        rows = []
        for tenth in range(TENTHS):
            own = [one for one in curve if min(int(_middle(one) * TENTHS), TENTHS - 1) == tenth]
            records = sum(one.records for one in own)
            if records:
                share = sum(one.observed * one.records for one in own) / records
                between = f"{tenth / TENTHS:.0%} to {(tenth + 1) / TENTHS:.0%}"
                bar = "#" * round(share * WIDTH)
                rows.append((between, f"{records:,}", f"{share:.1%}", bar))
        columns = ("probability", "records", "true", f"true: {WIDTH} marks are all")
        yield PrintedTable(columns, rows, (1, 2), title=f"calibration of {name}")


def _middle(one: CalibrationBin) -> float:
    return (one.least + one.most) / 2
