"""Text as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

# Everything that some renderer takes for markup, also where plain Markdown would not.
SPECIAL = "\\`*_{}[]<>#|$~"
ESCAPES = str.maketrans({letter: f"\\{letter}" for letter in SPECIAL})


@dataclass(frozen=True)
class MarkdownColumn:
    """A column of a table; numbers stand on the right."""

    title: str
    numbers: bool = False


def escaped(text: str) -> str:
    """Foreign text that Markdown shows as it is; its line breaks become spaces.

    Names of silos, labels and data sets come from files of others.
    """
    return " ".join(text.split()).translate(ESCAPES)


def table(columns: Sequence[MarkdownColumn], rows: Sequence[Sequence[str]]) -> str:
    """A table whose source is readable too; the cells are Markdown.

    Columns are padded to one width. Every row has as many cells as there are columns.
    """
    titles = [column.title for column in columns]
    cells = zip(titles, *rows, strict=True)
    padded = list(map(_padded, columns, cells))
    text = ""
    for line in zip(*padded, strict=True):
        text += f"| {' | '.join(line)} |\n"
    return text


def _padded(column: MarkdownColumn, cells: Sequence[str]) -> list[str]:
    """A column's lines, all of one width: the title, the rule, the cells of the rows."""
    width = max(3, *map(len, cells))
    rule, pad = "-" * width, str.ljust
    if column.numbers:
        rule, pad = "-" * (width - 1) + ":", str.rjust
    title, *rest = (pad(cell, width) for cell in cells)
    return [title, rule, *rest]
