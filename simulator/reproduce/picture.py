"""A picture of a published table: the paper's values and ours, a panel per setting."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from ..report.style import COLOURS, percent, picture, within
from .comparison import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL, ROW = 3.6, 0.3  # inches: the width of a panel, the height of a row
HEAD = 1.2  # inches above and below the rows
Points: TypeAlias = dict[float, tuple[float, float]]  # means and deviations, by place

ACROSS = 3  # panels side by side
APART = 0.12  # of a row: how far above its middle the published value stands, and ours below


def drawn(cells: Sequence[Cell], form: Literal["png", "svg"] = "png") -> bytes:
    """A picture with a panel per column and a row per method; ``cells`` is not empty.

    A circle is the paper's value, a dot is ours, and lines are their deviations. A method without
    either has no row. The same cells give the same bytes.
    """
    by_column: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.ours is not None or cell.value.mean is not None:
            by_column[cell.column.title].append(cell)
    across = min(ACROSS, len(by_column))
    down = -(-len(by_column) // across)
    most = max(map(len, by_column.values()))

    def draw(figure: "Figure") -> None:
        panels = [*figure.subplots(down, across, squeeze=False).flat]
        for (title, own), axes in zip(by_column.items(), panels, strict=False):
            axes.set_title(title)
            _panel(axes, own)
        # the last line of panels may not be full
        for axes in panels[len(by_column) :]:
            axes.set_axis_off()
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))

    return picture(PANEL * across + 1, (ROW * most + HEAD) * down, draw, form)


def _panel(axes: "Axes", cells: Sequence[Cell]) -> None:
    """One setting's methods from top to bottom, as the table has them."""
    axes.set_yticks(range(len(cells)), [cell.row.title for cell in cells])
    # the first row on top
    axes.set_ylim(len(cells) - 0.5, -0.5)
    published: Points = {}
    ours: Points = {}
    for place, cell in enumerate(cells):
        if cell.value.mean is not None:
            published[place - APART] = cell.value.mean, cell.value.deviation or 0.0
        if cell.ours is not None:
            ours[place + APART] = cell.ours.score.mean, cell.ours.score.deviation or 0.0
    _points(axes, published, "published", COLOURS[0], filled=False)
    _points(axes, ours, "ours", COLOURS[1], filled=True)
    means, deviations = np.array([*published.values(), *ours.values()]).T
    axes.set_xlim(*within([*(means - deviations), *(means + deviations)]))
    axes.locator_params(axis="x", nbins=5)
    percent(axes, "x")


def _points(
    axes: "Axes",
    points: Points,
    label: str,
    colour: str,
    *,
    filled: bool,
) -> None:
    """Dots with their deviations, in a panel."""
    means, deviations = np.array([*points.values()]).reshape(-1, 2).T
    face = colour if filled else "white"
    axes.errorbar(
        means,
        [*points],
        xerr=deviations,
        fmt="o",
        color=colour,
        markerfacecolor=face,
        label=label,
    )
