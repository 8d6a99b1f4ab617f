"""PNG pictures of several methods' runs: the score over rounds, bytes or time, and over silos."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf
from statistics import fmean
from typing import Literal, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ...algorithms.tasks.class_counting import ACCURACY
from ...algorithms.tasks.counting import ScoreForm
from ...errors import LocalError
from ..run.history import Measure, Measured
from ..run.scores import ALL, TITLES, Average
from .style import Style, percent, picture, styles_of, within

# by label and seed, in the order of the experiment
Histories = Mapping[str, Mapping[int, Sequence[Measured]]]
Numbers = NDArray[np.float64]
T = TypeVar("T")
Pace = Mapping[int, float]  # by rounds that train, what was spent by then


@dataclass(frozen=True)
class Axis:
    """What a score is drawn against; ``file`` is the picture's, ``over`` follows its title."""

    file: str
    over: str
    label: str


ROUNDS = Axis("curves.png", "over rounds", "rounds of training")
MEGABYTES = Axis("bytes.png", "over bytes", "MB up and down, all silos together")
SECONDS = Axis("seconds.png", "over time", "seconds of training and aggregation")
SIMULATED = Axis("simulated.png", "over simulated time", "simulated seconds of local training")

# Labels of the axis.
MEANS: dict[Average, str] = {
    "macro": "macro: mean over silos",
    "micro": "micro: mean over all silos' records",
    "balanced": "balanced: mean over silos and their classes",
}
GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 are spread evenly, however many
DOTS = ((50, 26, 0.7), (400, 14, 0.5), (inf, 6, 0.3))  # up to so many: points², and how opaque
LEGEND = 6.4  # inches that it takes
FEW = 12  # points that all get a marker


@dataclass(frozen=True, eq=False)
class Curve:
    """Mean, lowest and highest of the seeds, [R] each, over the rounds that every seed has.

    With one seed, all three are equal.
    """

    rounds: tuple[int, ...]
    mean: Numbers
    low: Numbers
    high: Numbers


def curve(
    seeds: Mapping[int, Sequence[Measured]], measure: Measure, mean: Average = "macro"
) -> Curve:
    """The curve of one method; no rounds where a seed has none of this measure.

    Seeds are averaged round by round. ``mean`` says how silos are averaged.
    """
    by_seed = []
    for history in seeds.values():
        measured = _only(history, measure)
        by_seed.append({m.rounds: getattr(m, mean) for m in measured})

    # a mean over fewer seeds than elsewhere would make the line jump
    rounds: tuple[int, ...] = ()
    if by_seed:
        rounds = tuple(sorted(set.intersection(*map(set, by_seed))))
    rows = [[own[round_] for round_ in rounds] for own in by_seed]
    values = np.array(rows).reshape(len(by_seed), len(rounds))  # one of them may be zero
    return Curve(
        rounds=rounds,
        mean=values.mean(0),
        low=values.min(0),
        high=values.max(0),
    )


def pace(seeds: Sequence[Mapping[int, float]]) -> Pace:
    """The mean over seeds of what was spent, by round; only rounds that all of them have."""
    return {
        rounds: fmean(own[rounds] for own in seeds)
        for rounds in sorted(set.intersection(*map(set, seeds)))
    }


def last(seeds: Mapping[int, Sequence[Measured]], measure: Measure) -> Numbers:
    """The silos' scores in the last look of one measure, those of all seeds together.

    Empty where a seed has none; one per silo and seed.
    """
    looks = []
    for history in seeds.values():
        measured = _only(history, measure)
        if not measured:
            return np.array([])
        looks.append(measured[-1].by_silo)
    return np.concatenate(looks) if looks else np.array([])


def _only(history: Sequence[Measured], measure: Measure) -> list[Measured]:
    return [one for one in history if one.measure == measure]


def curves(
    histories: Histories,
    measures: Sequence[Measure] = ALL,
    mean: Average = "macro",
    form: ScoreForm = ACCURACY,
    axis: Axis = ROUNDS,
    paces: Mapping[str, Pace] | None = None,
) -> bytes:
    """PNG with a panel per measure and a line per method.

    LocalError where no method has any of the measures.

    The same histories give the same bytes. ``mean`` says how silos are averaged. ``paces`` are
    places on the ``axis`` by label; without them it has rounds.
    """
    _check(histories, measures)

    # before anything is drawn: an empty picture would look like a result
    styles, seeds = styles_of(list(histories)), _most_seeds(histories)
    drawn = _by_measure(histories, measures, partial(curve, mean=mean))

    # both axes are shared, so their limits come from the curves of all panels
    shown = list(chain.from_iterable(panel.values() for panel in drawn.values()))
    placed: dict[int, Sequence[float]] = {}
    for panel in drawn.values():
        for label, one in panel.items():
            placed[id(one)] = _places(one, (paces or {}).get(label))
    longest = max(chain.from_iterable(placed.values()))
    lowest = float(np.concatenate([one.low for one in shown]).min())
    highest = float(np.concatenate([one.high for one in shown]).max())
    explained = "one seed"
    if seeds > 1:
        explained = f"line: mean of {seeds} seeds     band: from the lowest to the highest seed"

    def draw(figure: Figure) -> None:
        panels = _panels(figure, measures)
        for axes, measure in panels.items():
            for label, one in drawn[measure].items():
                _line(axes, one, placed[id(one)], styles[label])
            axes.set_xlabel(axis.label)
            if paces is None:
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            _scale(axes, "y", form)
        # The panels share their axes, so the first sets the limits of all.
        first = next(iter(panels))
        first.set_ylabel(f"{form.axis} ({MEANS[mean]})")
        # A margin, so that the last marker is not cut off.
        first.set_xlim(0, 1.02 * longest)
        first.set_ylim(within([lowest, highest], share=form.share))
        handles = [_handle(style) for style in styles.values()]
        figure.legend(handles, list(styles), loc="outside right center")
        figure.suptitle(f"{form.title} on held-out records {axis.over}")
        figure.supxlabel(explained, fontsize="small")

    return picture(4.4 * len(measures) + 0.9 + _label_width(histories), 4.6, draw)


def spread(
    histories: Histories, measures: Sequence[Measure] = ALL, form: ScoreForm = ACCURACY
) -> bytes:
    """PNG with a panel per measure, a row per method, and a dot per silo and seed.

    LocalError as for ``curves``.

    """
    _check(histories, measures)
    styles, seeds = styles_of(list(histories)), _most_seeds(histories)
    drawn = _by_measure(histories, measures, last)

    # the panels share the axis of scores, so its limits come from all of them
    shown = np.concatenate([values for panel in drawn.values() for values in panel.values()])
    limits = within([float(shown.min()), float(shown.max())], share=form.share)
    looks = "the last look"
    if seeds > 1:
        looks = f"the last look of {seeds} seeds"

    def draw(figure: Figure) -> None:
        panels = _panels(figure, measures)
        for axes, measure in panels.items():
            for row, (label, values) in enumerate(drawn[measure].items()):
                _dots(axes, row, values, styles[label])
            axes.set_xlabel(f"{form.axis} of a silo")
            _scale(axes, "x", form)
        first = next(iter(panels))
        first.set_yticks(range(len(styles)), list(styles))
        first.set_ylim(len(styles) - 0.5, -0.5)  # the first method on top
        first.set_xlim(limits)
        figure.suptitle(f"{form.title} on held-out records, silo by silo, in {looks}")
        legend = (
            "dot: a silo under one seed     box: the middle half     bar: median     diamond: mean"
            " (macro)"
        )
        figure.supxlabel(legend, fontsize="small")

    width = max(4.4 * len(measures) + _label_width(histories), LEGEND)
    return picture(width, 1.7 + 0.45 * len(styles), draw)


def _scale(axes: Axes, way: Literal["x", "y"], form: ScoreForm) -> None:
    """Grid lines across one axis, which has percents for shares."""
    if form.share:
        percent(axes, way)
    else:
        axes.grid(axis=way)


def _check(histories: Histories, measures: Sequence[Measure]) -> None:
    # One run with a measure is enough: a panel may lack some methods.
    found: set[Measure] = set()
    for seeds in histories.values():
        for history in seeds.values():
            found.update(one.measure for one in history)
    if not found & set(measures):
        raise LocalError(
            f"a picture of {', '.join(measures)}: no run has measured that; measured:"
            f" {sorted(found)}"
        )


def _by_measure(
    histories: Histories,
    measures: Sequence[Measure],
    taken: Callable[[Mapping[int, Sequence[Measured]], Measure], T],
) -> dict[Measure, dict[str, T]]:
    """What ``taken`` makes of each method's seeds, by measure and label."""
    drawn = {}
    for measure in measures:
        drawn[measure] = {label: taken(seeds, measure) for label, seeds in histories.items()}
    return drawn


def _most_seeds(histories: Histories) -> int:
    return max(map(len, histories.values()))


def _panels(figure: Figure, measures: Sequence[Measure]) -> dict[Axes, Measure]:
    """One titled panel per measure, side by side; all share both axes."""
    row = figure.subplots(1, len(measures), sharex=True, sharey=True, squeeze=False)[0]
    panels = dict(zip(row, measures, strict=True))
    for axes, measure in panels.items():
        axes.set_title(f"{TITLES[measure]}\n({measure})")
    return panels


def _label_width(labels: Iterable[str]) -> float:
    """Inches that the longest label takes."""
    return 0.2 + 0.085 * max(map(len, labels))


def _places(one: Curve, pace: Pace | None) -> Sequence[float]:
    """Where the points of a curve stand on the axis."""
    if pace is None:
        return one.rounds
    return [pace[rounds] for rounds in one.rounds]


def _line(axes: Axes, one: Curve, places: Sequence[float], style: Style) -> None:
    # The band from the lowest to the highest seed.
    axes.fill_between(places, one.low, one.high, color=style.colour, alpha=0.15, linewidth=0)
    line = _handle(style)
    line.set_data(places, one.mean)
    # More markers would hide the line.
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
    """The dots of one method, and over them the box, median and mean."""
    if not len(values):
        return
    ordered = np.sort(values)

    # the dots are spread across the row, so that equal silos do not hide one another
    offsets = (np.arange(len(ordered)) * GOLDEN % 1 - 0.5) * 0.6
    # a thousand silos in dots for fifty would be one blot
    _, size, alpha = next(dot for dot in DOTS if len(ordered) <= dot[0])
    axes.scatter(ordered, row + offsets, s=size, color=style.colour, alpha=alpha, linewidths=0)

    # zorder keeps what summarises the silos in front of their dots
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
