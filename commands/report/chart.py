"""Bars as numbers that a template draws: where each stands, how high, in which pattern.

Stacked ones of bytes, and those of what a privacy budget came to, under a line at its limit.

Own geometry, since all that the page needs is rectangles and labels, and it must be the same bytes
wherever it is made: a plotting library would bring 60 MB of packages, paths for every glyph in
place of text, and colours that print grey. Patterns tell the parts apart in black and white, the
legend has the bytes of those too small to be seen.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import ceil
from typing import TYPE_CHECKING

from ..terminal import output
from ..terminal.output import UNITS

if TYPE_CHECKING:
    from ...security.ledger.messages import At
    from ...security.ledger.records import PrivacyHead

# of the whole picture; 1 is a CSS pixel where it is shown at its own size
WIDTH, HEIGHT = 680.0, 190.0
LEFT, TOP, ACROSS, UP = 66.0, 12.0, 400.0, 132.0  # of the plot in it
LEGEND = 492.0
PATTERNS = 8  # that the template defines; the last stands for all further parts
MAX_BARS = 40  # each then has a slot of 10 pixels
TICKS = 4  # at most, besides that of 0
WIDEST = 60.0  # bar
GLYPH = 6.0  # at most, of a character of a label below the bars
MAX_NAME = 30  # characters of a name in the legend
# Possible steps between ticks, in the unit of the axis.
NICE = (1, 2, 5, 10, 20, 50, 100, 200, 250, 500, 1000, 2000)
REST = "all others"


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of one bar, and the bytes that it stands for.

    Coordinates are in pixels, y downwards; ``column`` is the label of its bar.
    """

    name: str
    bytes: int
    pattern: int
    x: float
    y: float
    width: float
    height: float
    column: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A label on an axis; ``at`` is x on the horizontal axis, y on the vertical one."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A line of the legend; ``bytes`` are those of all bars together."""

    pattern: int
    name: str  # shortened
    bytes: int
    y: float


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture; the template knows the frame from the constants above.

    Screen readers read ``title`` and ``description``.
    """

    title: str
    description: str
    across: str  # what the bars are
    segments: tuple[Segment, ...]
    ticks: tuple[Mark, ...]
    labels: tuple[Mark, ...]
    legend: tuple[LegendEntry, ...]


def patterns(totals: Mapping[str, int]) -> dict[str, int]:
    """A pattern for each name, the same in all pictures.

    The largest have one each, all others share one.
    """
    # Ties are broken by name, so that the same ledger gives the same picture.
    ranked = sorted(totals, key=lambda name: (-totals[name], name))
    return {name: min(rank, PATTERNS - 1) for rank, name in enumerate(ranked)}


def by_round(rounds: Mapping[int, Mapping[str, int]]) -> list[tuple[str, Counter[str]]]:
    """Columns of consecutive rounds, empty ones among them.

    Where there are many rounds, a column is several of them.
    """
    first, last = min(rounds), max(rounds)
    # Rounds per bar, rounded up so that at most MAX_BARS are needed.
    step = -(-(last - first + 1) // MAX_BARS)
    starts = range(first, last + 1, step)
    # Rounds in which nothing left keep their place: a gap is information.
    columns = [(_span(start, min(start + step - 1, last)), Counter[str]()) for start in starts]
    for number, parts in rounds.items():
        columns[(number - first) // step][1].update(parts)
    return columns


def by_date(dates: Mapping[str, Mapping[str, int]]) -> list[tuple[str, Counter[str]]]:
    """Columns of days (YYYY-MM-DD) on which something left; months or years if too many."""
    # The first 10, 7 or 4 characters of a date are the day, the month or the year.
    for digits in (10, 7, 4):
        columns: dict[str, Counter[str]] = {}
        for date in sorted(dates):
            columns.setdefault(date[:digits], Counter()).update(dates[date])
        if len(columns) <= MAX_BARS:
            break
    return list(columns.items())


def _span(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}\u2013{last}"


def stacked(
    title: str,
    across: str,
    columns: Sequence[tuple[str, Mapping[str, int]]],
    pattern: Mapping[str, int],
) -> Chart:
    """Bars of bytes, one per column, on a scale of their own.

    Parts lie in the order of their patterns.
    """
    totals: Counter[str] = Counter()
    for _, parts in columns:
        totals.update(parts)
    most = max(sum(parts.values()) for _, parts in columns)
    # One scale for all bars of a picture, so that their heights compare.
    end, ticks = _scale(most)
    slot = ACROSS / len(columns)
    width = min(0.8 * slot, WIDEST)

    # parts lie in one order in all bars, so that a part can be followed across
    order = sorted(totals, key=lambda name: (pattern[name], name))
    segments: list[Segment] = []
    for number, (column, parts) in enumerate(columns):
        x, y = LEFT + slot * (number + 0.5) - width / 2, TOP + UP
        for name in order:
            count = parts.get(name, 0)
            # A segment without height would still draw a border.
            if not count:
                continue
            height = UP * count / end
            y -= height
            segment = Segment(
                name=name,
                bytes=count,
                pattern=pattern[name],
                x=_r(x),
                y=_r(y),
                width=_r(width),
                height=_r(height),
                column=column,
            )
            segments.append(segment)

    # labels below the bars must not overlap, so where names are long only some bars have one
    longest = max(len(column) for column, _ in columns)
    every = ceil(GLYPH * (2 + longest) / slot)
    labels = []
    for number in range(0, len(columns), every):
        middle = LEFT + slot * (number + 0.5)
        labels.append(Mark(_r(middle), columns[number][0]))
    # For the description, the text alternative of the picture.
    by_part = ", ".join(f"{name} {totals[name]:,} bytes" for name in order)
    return Chart(
        title=title,
        description=(
            f"{title}: {totals.total():,} bytes in {len(columns)} bars, at most {most:,}"
            f" bytes in one; {by_part}"
        ),
        across=across,
        segments=tuple(segments),
        ticks=ticks,
        labels=tuple(labels),
        legend=_legend(totals, pattern),
    )


# What a privacy budget came to.


@dataclass(frozen=True, slots=True)
class Bar:
    """Epsilon that was spent up to one head of the budget.

    Coordinates as in ``Segment``.
    """

    text: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class SpendingChart:
    """One picture: a bar per head, or per several heads, and a line at the ``limit``."""

    title: str
    description: str
    bars: tuple[Bar, ...]
    ticks: tuple[Mark, ...]
    labels: tuple[Mark, ...]
    limit: Mark


def spending(heads: "Sequence[At[PrivacyHead]]") -> SpendingChart:
    """Bars of epsilon, one per head of one data set's budget.

    Where there are many heads, a bar is the last of several.
    """
    # what is spent never goes down, so the last of several heads is the highest
    step = -(-len(heads) // MAX_BARS)
    shown = [heads[min(end, len(heads)) - 1] for end in range(step, len(heads) + step, step)]
    last = heads[-1].record

    # the line at the limit must fit on the axis, too
    epsilons = [Decimal(at.record.epsilon) for at in shown]
    # Spending may exceed a limit that was lowered later.
    end, ticks = _decimal_scale(max(Decimal(last.limit), *epsilons))
    slot = ACROSS / len(shown)
    width = min(0.8 * slot, WIDEST)
    bars, labels = [], []
    every = ceil(GLYPH * (2 + len(str(len(heads)))) / slot)
    for number, at in enumerate(shown):
        height = UP * float(Decimal(at.record.epsilon) / end)
        middle = LEFT + slot * (number + 0.5)
        time = at.time[:19].replace("T", " ")
        bar = Bar(
            text=f"{time}: epsilon {at.record.epsilon} of {at.record.limit}",
            x=_r(middle - width / 2),
            y=_r(TOP + UP - height),
            width=_r(width),
            height=_r(height),
        )
        bars.append(bar)
        if number % every == 0:
            head = min((number + 1) * step, len(heads))
            labels.append(Mark(_r(middle), str(head)))
    limit = Mark(_r(TOP + UP * float(1 - Decimal(last.limit) / end)), f"limit {last.limit}")
    title = f"Data set {last.dataset}"
    after = output.number(len(heads), "head")
    summary = f"{title}: epsilon {last.epsilon} of {last.limit} at delta {last.delta} after {after}"
    return SpendingChart(title, summary, tuple(bars), ticks, tuple(labels), limit)


def _decimal_scale(most: Decimal) -> tuple[Decimal, tuple[Mark, ...]]:
    """The upper end of the axis, and its ticks: 1, 2 or 5 times a power of ten apart."""
    # One power of ten below the first digit, so that steps of 1, 2 or 5 are fine enough.
    power = Decimal(10) ** (most.adjusted() - 1) if most else Decimal(1)
    step = next(nice * power for nice in (1, 2, 5, 10, 20, 50) if nice * power * TICKS >= most)
    count = max(1, ceil(most / step))
    return step * count, _axis([format(i * step, "f") for i in range(1, count + 1)])


def _scale(most: int) -> tuple[int, tuple[Mark, ...]]:
    """Bytes at the upper end of the axis, and its ticks.

    Ticks are round numbers of the largest unit in which ``most`` is 4 or more.
    """
    power = 0
    while power + 1 < len(UNITS) and most >= 4 * 1024 ** (power + 1):
        power += 1
    unit = 1024**power
    high = -(-most // unit)
    # The smallest of these steps gives at most TICKS ticks.
    enough = [nice for nice in NICE if nice * TICKS >= high]
    step = enough[0] if enough else -(-high // TICKS)
    count = max(1, -(-high // step))
    labels = [f"{i * step} {UNITS[power]}" for i in range(1, count + 1)]
    return step * count * unit, _axis(labels)


def _axis(labels: Sequence[str]) -> tuple[Mark, ...]:
    """Ticks at equal distances: 0, and the labels of those above it."""
    marks = [Mark(_r(TOP + UP), "0")]
    for number, label in enumerate(labels, 1):
        marks.append(Mark(_r(TOP + UP * (1 - number / len(labels))), label))
    return tuple(marks)


def _legend(totals: Mapping[str, int], pattern: Mapping[str, int]) -> tuple[LegendEntry, ...]:
    found: dict[int, tuple[str, int]] = {}
    for name, count in totals.items():
        # All names with the last pattern share one line.
        before = found.get(pattern[name])
        found[pattern[name]] = (REST, before[1] + count) if before else (name, count)
    entries = []
    for line, (number, (name, count)) in enumerate(sorted(found.items())):
        short = name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "\u2026"
        entries.append(LegendEntry(number, short, count, TOP + 8 + 22 * line))
    return tuple(entries)


def _r(number: float) -> float:
    # Two digits: the same ledger must give the same bytes on every machine.
    return round(number, 2)
