"""Curves over the rounds of a job as SVG shapes, and in words for those who do not see them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 320, 120  # of the drawing, without its labels
MOST_POINTS = 500  # rounds that are drawn: the newest
SHARE, NUMBER = ".1%", ".3g"  # how values are written

Points = Sequence[tuple[int, float]]  # (round, value)


@dataclass(frozen=True)
class Line:
    """One line of a chart; ``style`` is a class of the style sheet."""

    name: str
    style: str
    points: str  # of an SVG polyline
    last: str


@dataclass(frozen=True)
class MetricCurve:
    """A chart of one measure: its lines, the ends of its axes, and what it shows in words."""

    title: str
    lines: tuple[Line, ...]
    least: str
    most: str
    first: int
    last: int
    said: str


def curve(title: str, series: Mapping[str, Points], form: str = NUMBER) -> MetricCurve | None:
    """The chart of some series by name; None where there is no point."""
    series = {name: points[-MOST_POINTS:] for name, points in series.items() if points}
    every = [point for points in series.values() for point in points]
    if not every:
        return None
    rounds, values = [number for number, _ in every], [value for _, value in every]
    first, last, least, most = min(rounds), max(rounds), min(values), max(values)
    # One point, or values that are all the same, stand in the middle.
    across, up = max(last - first, 1), most - least

    def at(number: int, value: float) -> str:
        x = (number - first) / across * WIDTH
        y = HEIGHT * (1 - (value - least) / up if up else 0.5)
        return f"{x:.1f},{y:.1f}"

    lines = tuple(
        Line(
            name,
            f"line-{place}",
            " ".join(at(*point) for point in points),
            format(points[-1][1], form),
        )
        for place, (name, points) in enumerate(series.items())
    )
    ends = ", ".join(
        f"{line.name} {format(points[0][1], form)} to {line.last}"
        for line, points in zip(lines, series.values(), strict=True)
    )
    said = f"{title}, rounds {first} to {last}: {ends}"
    return MetricCurve(title, lines, format(least, form), format(most, form), first, last, said)
