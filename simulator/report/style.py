"""How all pictures look, those of simulations and of the demo: one palette, one style.

Nothing of a user's own settings.

Figures are made by matplotlib's objects and drawn by Agg, so nothing here needs a screen or touches
what another part of the process draws. matplotlib is imported by whoever draws: it comes with the
extra ``staddle[plots]``.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Dashes: TypeAlias = Literal["-"] | tuple[float, tuple[float, ...]]

# Okabe and Ito's, no yellow
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h")
# a second and a third time round the colours
DASHES: tuple[Dashes, ...] = ("-", (0.0, (5.0, 2.0)), (0.0, (1.5, 1.5)))
DOTS_AN_INCH = 120
STYLE: dict[Any, Any] = {  # matplotlib names its keys in a Literal
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "text.parse_math": False,  # a name may hold two dollars
    "svg.fonttype": "none",
    "svg.hashsalt": "staddle",
}


NOT_DRAWN = "no curves and heat maps, which matplotlib draws; pip install 'staddle[plots]'"


def can_draw() -> bool:
    """Whether matplotlib is installed; without it there are no curves and heat maps."""
    return find_spec("matplotlib") is not None


@dataclass(frozen=True)
class Style:
    """The look of one method, the same in every picture.

    No two of the first twenty-one share colour and dashes.
    """

    colour: str
    marker: str
    dashes: Dashes


def styles_of(labels: Sequence[str]) -> dict[str, Style]:
    """Styles by label, in the labels' order.

    The n-th label has the n-th style in all pictures of an experiment.
    """
    styles = {}
    for number, label in enumerate(labels):
        colour = COLOURS[number % len(COLOURS)]
        marker = MARKERS[number % len(MARKERS)]
        dashes = DASHES[number // len(COLOURS) % len(DASHES)]
        styles[label] = Style(colour, marker, dashes)
    return styles


def percent(axes: "Axes", way: Literal["x", "y"]) -> None:
    """Write one axis, of shares in 0…1, in percent, with grid lines across it."""
    from matplotlib.ticker import PercentFormatter  # noqa: PLC0415 - an extra

    axis = {"x": axes.xaxis, "y": axes.yaxis}[way]
    axis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    axes.grid(axis=way)


def within(values: Sequence[float], *, share: bool = True) -> tuple[float, float]:
    """Limits around scores, with some air; those of a ``share`` are hardly beyond 0 and 1.

    They are apart, so that the axis has a range even for equal values.
    """
    low, high = min(values), max(values)
    if not share:
        air = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
        return low - air, high + air
    air = max(0.04 * (high - low), 0.01)
    return max(low - air, -0.02), min(high + air, 1.02)


def picture(
    width: float,
    height: float,
    draw: Callable[["Figure"], None],
    form: Literal["png", "svg"] = "png",
) -> bytes:
    """What ``draw`` puts into a figure of this width and height, in inches.

    The same bytes for the same figure. Texts of an SVG stay texts, which a reader can search.
    """
    import matplotlib as mpl  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context():
        # The user's matplotlib settings must not change a picture.
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        figure = Figure((width, height), dpi=DOTS_AN_INCH, layout="constrained")
        draw(figure)
        buffer = io.BytesIO()
        # Without the time of day, and with names of its parts that are not drawn at random.
        metadata = {"Date": None} if form == "svg" else None
        figure.savefig(buffer, format=form, metadata=metadata)
        return buffer.getvalue()
