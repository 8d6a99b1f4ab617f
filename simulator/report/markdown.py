"""Text as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

SPECIAL = "\\`*_{}[]<>#|$~"


@dataclass(frozen=True)
class MarkdownColumn:
    """Of a table; numbers stand on the right."""

    title: str
    numbers: bool = False


def escaped(text: str) -> str:
    """A text of somebody else's, to be read as it is; its line breaks become spaces."""
    return "".join(f"\\{c}" if c in SPECIAL else c for c in " ".join(text.split()))


def table(columns: Sequence[MarkdownColumn], rows: Sequence[Sequence[str]]) -> str:
    """A table whose source reads well too; the cells are Markdown."""
    cells = [[column.title for column in columns], *rows]
    widths = [max(3, *(len(row[place]) for row in cells)) for place in range(len(columns))]
    rule = [
        "-" * (width - 1) + (":" if column.numbers else "-")
        for column, width in zip(columns, widths, strict=True)
    ]
    first, *rest = (_padded(row, columns, widths) for row in cells)
    return "".join(f"| {' | '.join(row)} |\n" for row in (first, rule, *rest))


def _padded(
    row: Sequence[str], columns: Sequence[MarkdownColumn], widths: Sequence[int]
) -> list[str]:
    return [
        cell.rjust(width) if column.numbers else cell.ljust(width)
        for cell, column, width in zip(row, columns, widths, strict=True)
    ]
