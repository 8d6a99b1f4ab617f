"""What stands in a table, column by column, and all that is wrong with it at once.

It is for the people who hold the file: what is shown stays with them. The source of records
(sources/csv_file.py) reads strictly, and ends at the first fault.
"""

import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from ...files.file_bounds import check_fits
from .features import NUMBER, Feature
from .rows import LONGEST_CELL, Decimal, Encoding, Rows, pointed, rows_of
from .saved_set import SavedSet, open_saved, saved_folder

Kind = Literal["number", "categories", "date", "text", "empty", "image", "array", "other"]

MARKS = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?", "-", ".")
COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")
DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([ T].*)?|[0-9]{1,2}[./][0-9]{1,2}[./][0-9]{2,4}")
MOST_CATEGORIES = 20  # distinct texts; more are names or free text
MOST_DISTINCT = 10_000  # texts of a column that are counted one by one
ASKED_EVERY = 2**14  # records, after which the available memory is checked again
NUMBER_BYTES = 16  # per number: as it is read, and once more for quantiles


@dataclass
class Column:
    """The cells of one column, without the white space around them."""

    name: str
    decimal: Decimal = "."
    missing: Counter[str] = field(default_factory=Counter)  # by mark
    numbers: "array[float]" = field(default_factory=lambda: array("d"))
    texts: Counter[str] = field(default_factory=Counter)  # of cells that are no number
    dates: int = 0
    commas: int = 0
    first_text: int = 0  # line of the first cell that is no number
    first_comma: int = 0
    many: bool = False  # more texts than are counted, or longer ones
    known: tuple[str, ...] = ()  # classes that the data set declares itself
    held: tuple[Kind, str] | None = None  # no cells, but values of this type

    def add(self, line: int, cell: str) -> None:
        """Count one cell."""
        written = pointed(cell, self.decimal)
        if cell in MARKS:
            self.missing[cell] += 1
        elif NUMBER.fullmatch(written):
            self.numbers.append(float(written))
        else:
            self._add_text(line, cell)

    def _add_text(self, line: int, cell: str) -> None:
        self.first_text = self.first_text or line
        if COMMA.fullmatch(cell):
            self.commas += 1
            self.first_comma = self.first_comma or line
        if DATE.fullmatch(cell):
            self.dates += 1
        few = len(self.texts) < MOST_DISTINCT and len(cell) <= LONGEST_CELL
        if few or cell in self.texts:
            self.texts[cell] += 1
        else:
            self.many = True

    @property
    def kind(self) -> Kind:
        """What most of its cells are."""
        if self.held is not None:
            return self.held[0]
        texts, numbers = sum(self.texts.values()), len(self.numbers)
        if not texts and not numbers:
            return "empty"
        # A few texts among numbers are faults, not categories.
        if numbers > texts or self.commas > texts / 2:
            return "number"
        if self.dates > texts / 2:
            return "date"
        few = len(self.texts) <= MOST_CATEGORIES and not self.many
        return "categories" if few and len(self.texts) < texts else "text"

    @property
    def categories(self) -> tuple[str, ...]:
        """Its texts, in their order as texts; numbers among them stand as they were read.

        Or what the data set declares, in that order.
        """
        return self.known or tuple(sorted(self.texts))

    def shown(self) -> str:
        """Its distribution, in a few words."""
        if self.held is not None:
            return self.held[1]
        match self.kind:
            case "number" if len(self.numbers):
                low, middle, high = np.quantile(np.array(self.numbers), [0, 0.5, 1])
                return f"{low:g} to {high:g}, median {middle:g}"
            case "categories":
                return ", ".join(f"{text} {count:,}" for text, count in self.texts.most_common())
            case "text":
                return f"{'more than ' if self.many else ''}{len(self.texts):,} different texts"
            case _:
                return ""

    def faults(self) -> Iterator[str]:
        """What a reader of numbers or categories would stumble over."""
        if self.kind == "empty":
            yield "has no value"
        # Such as a cholesterol of 0 in every record.
        if len(self.numbers) > 1 and min(self.numbers) == max(self.numbers) and not self.texts:
            yield (
                f"has {self.numbers[0]:g} in all records that have a value; if it stands for a"
                " missing one, add it in quotes to the column's list in data.missing_marks"
            )
        if self.commas:
            yield (
                f"decimals with a comma: {self.commas:,}, the first in line {self.first_comma};"
                ' say data.decimal = "," (here --decimal ,) if all have one, or write a point'
            )
        others = sum(self.texts.values()) - self.commas
        if self.kind == "number" and others > 0:
            yield (
                f"cells that are no numbers: {others:,}, the first in line {self.first_text};"
                " correct them, or add what stands for a missing value to the column's list in"
                " data.missing_marks"
            )
        if self.kind == "categories" and len(self.numbers):
            yield f"numbers among its texts: {len(self.numbers):,}"
        if self.kind == "date":
            yield (
                "has dates; as a feature they need data.dates, which says how they are written, and"
                " become days since 1970"
            )


@dataclass(frozen=True)
class TableSurvey:
    """A whole file: its columns in order, its records, and faults that are of no single column."""

    columns: tuple[Column, ...]
    records: int
    faults: tuple[str, ...]

    def __getitem__(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    @property
    def names(self) -> list[str]:
        """The names of the columns, in order."""
        return [column.name for column in self.columns]


def survey(
    path: Path,
    delimiter: str = ",",
    encoding: Encoding = "utf-8",
    decimal: Decimal = ".",
    split: str | None = None,
) -> TableSurvey:
    """Read a Parquet file, a CSV file whose first line has the columns' names, or a saved data set.

    LocalError for a file or folder that cannot be read at all.
    """
    if path.is_dir() | (split is not None):
        return _survey_saved(open_saved(saved_folder(path, split)))
    with rows_of(path, delimiter, encoding) as rows:
        return _read(path, rows, decimal)


def _survey_saved(saved: SavedSet) -> TableSurvey:
    forms = dict(zip(saved.names, map(saved.form, saved.names), strict=True))
    cells = [name for name, form in forms.items() if form == "cell"]
    found = _read(saved.folder, saved.rows(cells), ".")
    for column in found.columns:
        column.known = saved.class_names.get(column.name, ())
        form = forms[column.name]
        if form != "cell":
            column.missing.clear()
            column.held = form, saved.held(column.name)
    return found


def _read(path: Path, rows: Rows, decimal: Decimal) -> TableSurvey:
    header = [name.strip() for name in next(rows)[1]]
    columns = tuple(Column(name, decimal) for name in header)
    ragged: list[int] = []
    records = 0
    for line, row in rows:
        records += 1
        # A short file may unpack to many numbers.
        if not records % ASKED_EVERY:
            size = records * len(header) * NUMBER_BYTES
            check_fits(path, size, f"the values of its first {records:,} records")
        # Its cells may stand under wrong names, so they are not counted.
        if len(row) != len(header):
            ragged.append(line)
            continue
        for column, cell in zip(columns, row, strict=True):
            column.add(line, cell.strip())
    return TableSurvey(columns, records, tuple(_whole_faults(header, ragged, records)))


def _whole_faults(header: Sequence[str], ragged: Sequence[int], records: int) -> Iterator[str]:
    for name, times in Counter(header).items():
        if times > 1:
            yield f"{times} columns are named {name!r}; name them apart"
    if len(header) == 1:
        yield "its first line has a single column; is --delimiter another?"
    if ragged:
        lines = ", ".join(map(str, ragged[:5])) + " …" * (len(ragged) > 5)
        yield (
            f"lines with more or fewer columns than the first, which has {len(header)}:"
            f" {len(ragged):,}, in lines {lines}; correct them"
        )
    if not records:
        yield "has no records"


def contract_faults(found: TableSurvey, features: Sequence[Feature]) -> list[str]:
    """What stands against a job's features in a file, all at once; empty for nothing."""
    faults = []
    for feature in features:
        if feature.name not in found.names:
            faults.append(f"the job's feature {feature.name!r} is no column here")
            continue
        faults += [
            f"column {feature.name!r}: {fault}" for fault in _against(found[feature.name], feature)
        ]
    return faults


def _against(column: Column, feature: Feature) -> Iterator[str]:
    gone = column.missing.total()
    if gone and feature.missing is None:
        yield f"missing values: {gone:,}, and in the job none may be missing"
    if feature.categories is not None:
        yield from _other_categories(column, feature.categories)
        return
    texts = column.texts.total()
    if texts:
        yield f"cells that are no numbers: {texts:,}, the first in line {column.first_text}"
    values = np.array(column.numbers)
    outside = int(((values < feature.low) | (values > feature.high)).sum())
    if outside:
        unit = f" {feature.unit}" if feature.unit else ""
        yield (
            f"{outside:,} of {len(values):,} values are outside {feature.low:g} to"
            f" {feature.high:g}{unit}; they are {values.min():g} to {values.max():g}: is it another"
            " unit?"
        )


def _other_categories(column: Column, known: Sequence[str]) -> Iterator[str]:
    # Numbers may be categories, too, such as 0 and 1.
    numbers = [f"{number:.15g}" for number in set(column.numbers)]
    others = [text for text in (*column.texts, *numbers) if text not in known]
    if others:
        yield (
            f"has {', '.join(map(repr, others[:5]))}, the job's categories are {', '.join(known)}"
        )
