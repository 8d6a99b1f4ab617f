"""The picture of a demo's result: how well each method did, and how much left the silos for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from ...simulator.report.style import COLOURS, percent, picture, within
from ..terminal.output import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE, DOTS = COLOURS[1], COLOURS[0]
WIDTH, HEIGHT = 8.5, 3.2  # inches


@dataclass(frozen=True)
class MethodResult:
    """What one method of a demo came to; all numbers are counts."""

    method: str
    correct: Mapping[str, int]  # held-out records that the silo's final model got right, by silo
    left: Mapping[str, int]  # bytes that left all silos, by part, as their ledgers have them


def svg(results: Sequence[MethodResult], tested: Mapping[str, int]) -> bytes:
    """An SVG of two panels, by method: accuracy, and bytes that left by part.

    ``tested`` counts each silo's held-out records. Texts stay texts. The same bytes for the same
    numbers.
    """

    def draw(figure: "Figure") -> None:
        accuracy, left = figure.subplots(1, 2)
        _draw_accuracy(accuracy, results, tested)
        _draw_left(left, results)

    return picture(WIDTH, HEIGHT, draw, form="svg")


def _draw_accuracy(
    axes: "Axes", results: Sequence[MethodResult], tested: Mapping[str, int]
) -> None:
    records = sum(tested.values())
    shares = [sum(each.correct.values()) / records for each in results]
    silos = [[each.correct[silo] / of for silo, of in tested.items()] for each in results]

    # Lines and no bars: bars would have to begin at 0, where no difference could be seen.
    at_left, at_right = ([at + way for at in range(len(results))] for way in (-0.3, 0.3))
    axes.hlines(shares, at_left, at_right, color=LINE, linewidth=3)
    for at, (share, own) in enumerate(zip(shares, silos, strict=True)):
        axes.plot([at] * len(own), own, "o", color=DOTS, markersize=4)
        # To the right of the line, where no dot hides it.
        axes.annotate(
            f"{share:.1%}".replace("%", " %"), (at + 0.33, share), va="center", fontsize=9
        )

    low, high = within([*shares, *chain.from_iterable(silos)])
    axes.set_ylim(low, high)
    axes.set_xlim(-0.5, len(results) - 0.1)
    axes.set_xticks(range(len(results)), [each.method for each in results])
    percent(axes, "y")
    axes.set_title(f"Accuracy on {records} held-out records, all and per silo")


def _draw_left(axes: "Axes", results: Sequence[MethodResult]) -> None:
    parts = list(dict.fromkeys(chain.from_iterable(each.left for each in results)))
    base = [0] * len(results)
    for number, part in enumerate(parts):
        own = [each.left.get(part, 0) for each in results]
        colour = COLOURS[number % len(COLOURS)]
        axes.bar(range(len(results)), own, 0.6, bottom=base, color=colour, label=part)
        base = [below + more for below, more in zip(base, own, strict=True)]

    for at, total in enumerate(base):
        axes.annotate(size(total), (at, total), ha="center", va="bottom", fontsize=9)
    axes.set_ylim(0, 1.15 * max(base))
    axes.set_xticks(range(len(results)), [each.method for each in results])
    # The numbers stand above the bars, so an axis would only repeat them.
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.legend(loc="upper left", fontsize=8)
    axes.set_title("Bytes that left all silos, by part")
