"""Accuracy by method and epsilon: a table in Markdown, and an SVG without a plotting library."""

from collections.abc import Mapping
from dataclasses import dataclass

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 60, 600, 20, 370  # of the plot
# Okabe and Ito's
COLOURS = ("#000000", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
SHIFT = 5  # between the lines of methods, so that their ranges do not hide each other


@dataclass(frozen=True)
class Cell:
    """Accuracies of the seeds."""

    method: str
    epsilon: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return sum(self.values) / len(self.values)


def table(cells: tuple[Cell, ...]) -> str:
    """A row a method: mean in percent, and in brackets the least and the largest of the seeds."""
    methods, epsilons = axes(cells)
    found = {(cell.method, cell.epsilon): cell for cell in cells}
    lines = [
        "| method | "
        + " | ".join(
            f"ε = {epsilon}" if epsilon != "none" else "no privacy" for epsilon in epsilons
        )
        + " |",
        "|---" * (len(epsilons) + 1) + "|",
    ]
    for method in methods:
        texts = [
            told(found[method, epsilon]) if (method, epsilon) in found else ""
            for epsilon in epsilons
        ]
        lines.append(f"| {method} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def told(cell: Cell) -> str:
    """One cell, for people."""
    spread = (
        f" ({min(cell.values) * 100:.1f} to {max(cell.values) * 100:.1f})"
        if len(cell.values) > 1
        else ""
    )
    return f"{cell.mean * 100:.1f}{spread}"


def axes(cells: tuple[Cell, ...]) -> tuple[list[str], list[str]]:
    """Methods and epsilons, in the order in which they come."""
    return list(dict.fromkeys(c.method for c in cells)), list(
        dict.fromkeys(c.epsilon for c in cells)
    )


def chart(cells: tuple[Cell, ...]) -> str:
    """Lines of the means, with the seeds' range at each point.

    The first method is drawn with dashes.
    """
    return charts({"": cells})


def charts(panels: Mapping[str, tuple[Cell, ...]]) -> str:
    """Such lines for several sets of records, one below another, each under its name."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT * len(panels)}">',
        '<g font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT * len(panels)}" fill="#ffffff"/>',
    ]
    for number, (name, cells) in enumerate(panels.items()):
        parts += [f'<g transform="translate(0 {HEIGHT * number})">', *panel(name, cells), "</g>"]
    return "\n".join([*parts, "</g>", "</svg>"]) + "\n"


def panel(name: str, cells: tuple[Cell, ...]) -> list[str]:
    """The lines of one set of records."""
    methods, epsilons = axes(cells)
    parts = [f'<text x="{RIGHT + 20}" y="{TOP + 4}" font-weight="bold">{name}</text>']
    for percent in range(0, 101, 20):
        y = height(percent / 100)
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{RIGHT}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{percent} %</text>')
    step = (RIGHT - LEFT) / max(len(epsilons), 1)
    middle = {epsilon: LEFT + step * (i + 0.5) for i, epsilon in enumerate(epsilons)}
    for epsilon, x in middle.items():
        label = f"ε = {epsilon}" if epsilon != "none" else "no privacy"
        parts.append(f'<text x="{x:g}" y="{BOTTOM + 22}" text-anchor="middle">{label}</text>')
    for number, method in enumerate(methods):
        colour = COLOURS[number % len(COLOURS)]
        dashes = ' stroke-dasharray="6 4"' if not number else ""
        shift = (number - (len(methods) - 1) / 2) * SHIFT
        points = [(middle[cell.epsilon] + shift, cell) for cell in cells if cell.method == method]
        path = " ".join(f"{x:g},{height(cell.mean)}" for x, cell in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>'
        )
        for x, cell in points:
            low, high = height(min(cell.values)), height(max(cell.values))
            parts.append(f'<line x1="{x:g}" y1="{low}" x2="{x:g}" y2="{high}" stroke="{colour}"/>')
            parts.append(f'<circle cx="{x:g}" cy="{height(cell.mean)}" r="3" fill="{colour}"/>')
        y = TOP + 30 + 22 * number
        parts.append(
            f'<line x1="{RIGHT + 20}" y1="{y}" x2="{RIGHT + 50}" y2="{y}"'
            f' stroke="{colour}"{dashes}/>'
        )
        parts.append(f'<circle cx="{RIGHT + 35}" cy="{y}" r="3" fill="{colour}"/>')
        parts.append(f'<text x="{RIGHT + 58}" y="{y + 4}">{method}</text>')
    parts.append(
        f'<text x="{LEFT}" y="{HEIGHT - 12}">accuracy on held-out records; lines: least to largest'
        " seed</text>"
    )
    return parts


def height(value: float) -> float:
    """Where an accuracy stands in the picture."""
    return round(BOTTOM - value * (BOTTOM - TOP), 1)
