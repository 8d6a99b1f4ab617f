"""Accuracy over rounds, and how it is spread over the silos: PNG of what the runs of several
methods measured.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ...errors import LocalError
from ..run.history import Measure, Measured
from ..run.scores import ALL, TITLES, Average
from .style import Style, percent, picture, styles_of, within

# by label and seed, in the order of the experiment
Histories = Mapping[str, Mapping[int, Sequence[Measured]]]
Numbers = NDArray[np.float64]

MEANS: dict[Average, str] = {
    "macro": "macro: mean over silos",
    "micro": "micro: share of all silos' records",
}
GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 are spread evenly, however many
DOTS = ((50, 26, 0.7), (400, 14, 0.5), (inf, 6, 0.3))  # up to so many: points², and how opaque
LEGEND = 6.4  # inches that it takes
FEW = 12  # points that all get a marker


@dataclass(frozen=True, eq=False)
class Curve:
    """A measure over the rounds after which every seed has it: mean, lowest and highest of the
    seeds.
    """

    rounds: tuple[int, ...]
    mean: Numbers
    low: Numbers
    high: Numbers


def curve(
    seeds: Mapping[int, Sequence[Measured]], measure: Measure, mean: Average = "macro"
) -> Curve:
    """Of one method; no rounds where a seed has none of this measure."""
    found = [
        {m.rounds: getattr(m, mean) for m in history if m.measure == measure}
        for history in seeds.values()
    ]
    rounds = tuple(sorted(set.intersection(*map(set, found)))) if found else ()
    values = np.array([[one[round_] for round_ in rounds] for one in found]).reshape(
        len(found), len(rounds)
    )
    return Curve(rounds, values.mean(0), values.min(0), values.max(0))


def last(seeds: Mapping[int, Sequence[Measured]], measure: Measure) -> Numbers:
    """The silos' accuracies in the last of one measure, those of all seeds together.

    None where a seed has none.
    """
    found = [
        [m.accuracies for m in history if m.measure == measure][-1:] for history in seeds.values()
    ]
    return (
        np.concatenate([one for own in found for one in own])
        if all(found) and found
        else np.array([])
    )


def curves(
    histories: Histories, measures: Sequence[Measure] = ALL, mean: Average = "macro"
) -> bytes:
    """PNG: a panel a measure, a line a method.

    LocalError where no method has any of the measures.
    """
    _check(histories, measures)
    styles, seeds = styles_of(list(histories)), max(map(len, histories.values()))
    drawn = {m: {label: curve(own, m, mean) for label, own in histories.items()} for m in measures}
    shown = [one for panel in drawn.values() for one in panel.values() if one.rounds]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(measures), sharex=True, sharey=True, squeeze=False)[0]
        for axes, measure in zip(panels, measures, strict=True):
            for label, one in drawn[measure].items():
                _line(axes, one, styles[label])
            axes.set_title(f"{TITLES[measure]}\n({measure})")
            axes.set_xlabel("rounds of training")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            percent(axes, "y")
        panels[0].set_ylabel(f"accuracy ({MEANS[mean]})")
        panels[0].set_xlim(0, 1.02 * max(one.rounds[-1] for one in shown))
        panels[0].set_ylim(
            within([float(v) for one in shown for v in (one.low.min(), one.high.max())])
        )
        handles = [_handle(style) for style in styles.values()]
        figure.legend(handles, list(styles), loc="outside right center")
        figure.suptitle("Accuracy on held-out records over rounds")
        several = f"line: mean of {seeds} seeds     band: from the lowest to the highest seed"
        figure.supxlabel(several if seeds > 1 else "one seed", fontsize="small")

    return picture(4.4 * len(measures) + 0.9 + _room(histories), 4.6, draw)


def spread(histories: Histories, measures: Sequence[Measure] = ALL) -> bytes:
    """PNG: a panel a measure, a row a method, a dot a silo and seed.

    LocalError as for ``curves``.
    """
    _check(histories, measures)
    styles, seeds = styles_of(list(histories)), max(map(len, histories.values()))
    drawn = {m: {label: last(own, m) for label, own in histories.items()} for m in measures}
    shown = [one for panel in drawn.values() for one in panel.values() if len(one)]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(measures), sharex=True, sharey=True, squeeze=False)[0]
        for axes, measure in zip(panels, measures, strict=True):
            for row, (label, values) in enumerate(drawn[measure].items()):
                _dots(axes, row, values, styles[label])
            axes.set_title(f"{TITLES[measure]}\n({measure})")
            axes.set_xlabel("accuracy of a silo")
            percent(axes, "x")
        panels[0].set_yticks(range(len(styles)), list(styles))
        panels[0].set_ylim(len(styles) - 0.5, -0.5)  # the first method on top
        panels[0].set_xlim(within([float(v) for one in shown for v in (one.min(), one.max())]))
        several = f"the last look of {seeds} seeds" if seeds > 1 else "the last look"
        figure.suptitle(f"Accuracy on held-out records, silo by silo, in {several}")
        legend = (
            "dot: a silo under one seed     box: the middle half     bar: median     diamond: mean"
            " (macro)"
        )
        figure.supxlabel(legend, fontsize="small")

    return picture(
        max(4.4 * len(measures) + _room(histories), LEGEND), 1.7 + 0.45 * len(styles), draw
    )


def _check(histories: Histories, measures: Sequence[Measure]) -> None:
    found = {
        m.measure for seeds in histories.values() for history in seeds.values() for m in history
    }
    if not found & set(measures):
        raise LocalError(
            f"a picture of {', '.join(measures)}: no run has measured that; measured:"
            f" {sorted(found)}"
        )


def _room(labels: Iterable[str]) -> float:
    """Inches that the longest label takes."""
    return 0.2 + 0.085 * max(map(len, labels))


def _line(axes: Axes, one: Curve, style: Style) -> None:
    axes.fill_between(one.rounds, one.low, one.high, color=style.colour, alpha=0.15, linewidth=0)
    line = _handle(style)
    line.set_data(one.rounds, one.mean)
    line.set_markevery(max(1, len(one.rounds) // FEW))
    axes.add_line(line)


def _handle(style: Style) -> Line2D:
    return Line2D(
        [],
        [],
        color=style.colour,
        linestyle=style.dashes,
        linewidth=1.5,
        marker=style.marker,
        markersize=4,
    )


def _dots(axes: Axes, row: int, values: Numbers, style: Style) -> None:
    if not len(values):
        return
    ordered = np.sort(values)
    # so that equal silos do not hide one another
    beside = (np.arange(len(ordered)) * GOLDEN % 1 - 0.5) * 0.6
    size, alpha = next((size, alpha) for most, size, alpha in DOTS if len(ordered) <= most)
    axes.scatter(ordered, row + beside, s=size, color=style.colour, alpha=alpha, linewidths=0)
    first, median, third = np.quantile(ordered, (0.25, 0.5, 0.75))
    low, high = row - 0.34, row + 0.34
    axes.plot(
        [first, third, third, first, first],
        [low, low, high, high, low],
        color="black",
        linewidth=1,
        zorder=3,
    )
    axes.plot([median, median], [low, high], color="black", linewidth=2, zorder=3)
    axes.plot(
        [ordered.mean()],
        [row],
        marker="D",
        markersize=6,
        color="white",
        markeredgecolor="black",
        zorder=4,
    )
