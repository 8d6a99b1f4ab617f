"""A picture of a published table: the paper's values and ours, a panel per setting.

Methods stand in rows. The values of a parameter stand on an axis of their own.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, cycle
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from ..report.style import COLOURS, DASHES, Dashes, percent, picture, within
from .comparison import Cell

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL, ROW = 3.6, 0.3  # inches: the width of a panel, the height of a row
HEAD = 1.2  # inches above and below the rows
CURVE = 2.0  # inches: the height of a panel whose values stand on an axis
Source: TypeAlias = Literal["published", "ours"]
Points: TypeAlias = dict[float, tuple[float, float]]  # means and deviations, by place

ACROSS = 3  # panels side by side
APART = 0.12  # of a row: how far above its middle the published value stands, and ours below
WIDE = 50  # a parameter whose values are so many times apart stands on a logarithmic axis
COLOUR: dict[Source, str] = {"published": COLOURS[0], "ours": COLOURS[1]}
INSIDE: dict[Source, str] = {"published": "white", "ours": COLOURS[1]}
LOWER: dict[Source, float] = {"published": -APART, "ours": APART}


def drawn(
    cells: Sequence[Cell], form: Literal["png", "svg"] = "png", *, parameter: str = ""
) -> bytes:
    """A picture with a panel per column and a row per method; ``cells`` is not empty.

    With a ``parameter``, accuracy stands over its values, and rows without a value are lines across
    the panel. A circle is the paper's value, a dot is ours, and lines are their deviations. A
    method without either has no row. The same cells give the same bytes.
    """
    by_column: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        if any(_known(cell)):
            by_column[cell.column.title].append(cell)
    across = min(ACROSS, len(by_column))
    down = -(-len(by_column) // across)
    height = CURVE if parameter else ROW * max(map(len, by_column.values()))

    # all panels have one axis, whatever is known in each
    places = sorted({place for place, _ in _placed(cells)})
    # nor does a method change its dashes from panel to panel
    across_it = dict.fromkeys(cell.row.title for cell in cells if cell.row.at is None)
    dashes = dict(zip(across_it, cycle(DASHES[1:]), strict=False))

    def draw(figure: "Figure") -> None:
        panels = [*figure.subplots(down, across, squeeze=False).flat]
        shown: dict[str, Artist] = {}
        for (title, own), axes in zip(by_column.items(), panels, strict=False):
            axes.set_title(title)
            if parameter:
                axes.set_xlabel(parameter)
                _curve(axes, own, places, dashes)
            else:
                _panel(axes, own)
            # a panel may lack what another has
            handles, labels = axes.get_legend_handles_labels()
            shown |= dict(zip(labels, handles, strict=True))
        # the last line of panels may not be full
        for axes in panels[len(by_column) :]:
            axes.set_axis_off()
        columns = min(len(shown), 2 * across)
        figure.legend([*shown.values()], [*shown], loc="outside upper right", ncols=columns)

    return picture(PANEL * across + 1, (height + HEAD) * down, draw, form)


def _known(cell: Cell) -> Iterator[tuple[Source, float, float]]:
    """Whose value it is, its mean and its deviation."""
    if cell.value.mean is not None:
        yield "published", cell.value.mean, cell.value.deviation or 0.0
    if cell.ours is not None:
        yield "ours", cell.ours.score.mean, cell.ours.score.deviation or 0.0


def _placed(cells: Iterable[Cell]) -> Iterator[tuple[float, Cell]]:
    """The cells of rows that are a value of the parameter, with that value."""
    for cell in cells:
        if cell.row.at is not None:
            yield cell.row.at, cell


def _points(placed: Iterable[tuple[float, Cell]]) -> dict[Source, Points]:
    """What is published, and what is ours; who has no value is absent."""
    points: dict[Source, Points] = {}
    for place, cell in placed:
        for source, mean, deviation in _known(cell):
            points.setdefault(source, {})[place] = mean, deviation
    return dict(sorted(points.items(), reverse=True))


def _panel(axes: "Axes", cells: Sequence[Cell]) -> None:
    """One setting's methods from top to bottom, as the table has them."""
    axes.set_yticks(range(len(cells)), [cell.row.title for cell in cells])
    # the first row on top
    axes.set_ylim(len(cells) - 0.5, -0.5)
    for source, points in _points(enumerate(cells)).items():
        means, deviations = _numbers(points)
        places = np.array([*points]) + LOWER[source]
        _dots(axes, source, x=means, y=places, xerr=deviations, fmt="o")
    axes.set_xlim(*_limits(cells))
    axes.locator_params(axis="x", nbins=5)
    percent(axes, "x")


def _curve(
    axes: "Axes", cells: Sequence[Cell], places: Sequence[float], dashes: Mapping[str, Dashes]
) -> None:
    """One setting's accuracy over the parameter's values; rows without one are lines across."""
    placed = sorted(_placed(cells), key=itemgetter(0))
    for source, points in _points(placed).items():
        means, deviations = _numbers(points)
        _dots(axes, source, x=[*points], y=means, yerr=deviations, fmt="o-")
    for cell in (cell for cell in cells if cell.row.at is None):
        title = cell.row.title
        for source, mean, _ in _known(cell):
            label = f"{title}, {source}"
            axes.axhline(mean, color=COLOUR[source], linestyle=dashes[title], label=label)

    low, high = min(places, default=0.0), max(places, default=0.0)
    axes.set_xscale("log" if 0 < WIDE * low <= high else "linear")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.set_ylim(*_limits(cells))
    percent(axes, "y")


def _numbers(points: Points) -> Any:
    """Means and deviations."""
    return np.array([*points.values()]).T


def _limits(cells: Sequence[Cell]) -> tuple[float, float]:
    """The limits of the axis of accuracies."""
    known = [*chain.from_iterable(map(_known, cells))]
    lows = [mean - deviation for _, mean, deviation in known]
    return within([*lows, *(mean + deviation for _, mean, deviation in known)])


def _dots(axes: "Axes", source: Source, **drawn: Any) -> None:
    """Dots with their deviations, in a panel; ``drawn`` as matplotlib's errorbar has it."""
    colour = COLOUR[source]
    axes.errorbar(color=colour, markerfacecolor=INSIDE[source], label=source, **drawn)
