"""Text as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

NONE = "–"  # a cell without a value
# Includes characters that only some renderers treat as markup.
SPECIAL = "\\`*_{}[]<>#|$~"
ESCAPES = str.maketrans({letter: f"\\{letter}" for letter in SPECIAL})


@dataclass(frozen=True)
class MarkdownColumn:
    """A column of a table; numbers stand on the right."""

    title: str
    numbers: bool = False


def escaped(text: str) -> str:
    """Foreign text that Markdown shows as it is; its line breaks become spaces.

    For names of silos, labels and data sets, which others choose.
    """
    return " ".join(text.split()).translate(ESCAPES)


def table(columns: Sequence[MarkdownColumn], rows: Sequence[Sequence[str]]) -> str:
    """A table whose source is readable too; the cells are Markdown.

    Every row needs a cell per column.
    """
    titles = [column.title for column in columns]
    cells = zip(titles, *rows, strict=True)
    padded = list(map(_padded, columns, cells))
    text = ""
    for line in zip(*padded, strict=True):
        text += f"| {' | '.join(line)} |\n"
    return text


def method_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A row per method: its label, then numbers under these titles."""
    numbers = [MarkdownColumn(title, numbers=True) for title in titles]
    return table([MarkdownColumn("method"), *numbers], rows)


def _padded(column: MarkdownColumn, cells: Sequence[str]) -> list[str]:
    """A column's lines, all of one width: the title, the rule, the cells of the rows."""
    width = max(3, *map(len, cells))
    rule, pad = "-" * width, str.ljust
    if column.numbers:
        rule, pad = "-" * (width - 1) + ":", str.rjust
    title, *rest = (pad(cell, width) for cell in cells)
    return [title, rule, *rest]
