"""Tabular records whose columns the silo declares, whatever file they are in.

Numbers are taken as they are, categories one-hot, dates as days. What stands in for a missing
value, what is subtracted and what is divided by are declared constants: taken from the records,
they would be one more thing that the model tells of them. Errors name line and column, never what
is there: they reach the silo's log and its ledger.
"""

import difflib
import re
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, ClassVar, Self

import numpy as np
import pydantic
import torch
from pydantic import Field

from .....errors import LocalError
from .....files.file_bounds import check_fits
from ....models.class_names import composed
from ...dataset import Dataset
from ...features import NUMBER, REACH, Feature, stated
from ...options import DataTable, Names, Number, Positive, UndeclaredError
from ...rows import Reading

# fits int64; record_checks rejects classes out of range
CLASS_NUMBER = re.compile(r"-?[0-9]{1,18}")
# Bytes per value once all are read: float64, float32, and float32 of each side of the split.
VALUE_BYTES = 16
ASKED_EVERY = 2**22  # values, after which the available memory is checked again
MOST_LISTED = 20  # names of columns, in an error
UNMARKED = ("",)  # how a missing value is written, unless something else is said
EXAMPLE = datetime(2003, 11, 27, tzinfo=UTC)
DAYS = "days since 1970-01-01"  # the unit of dates

Cell = tuple[float, ...]


class Table(DataTable):
    """A kind of table: its rows, and how they write numbers."""

    counted: ClassVar[str] = "record"
    """What is counted in errors."""

    file: Path
    label: str | None = None
    """The column of the classes; the other three are for other tasks than classification."""
    labels: tuple[str, ...] = ()
    """Columns of 0 and 1, one per label."""
    target: str | None = None
    """The column of the numbers that a regression learns."""
    survival: tuple[str, ...] = ()
    """The columns of the time, and of 1 for an event or 0 for last seen without."""
    features: Names
    id: str | None = None
    source: str | None = None
    """The column that says where a record comes from, such as its hospital."""
    classes: Annotated[tuple[str, ...], Field(min_length=2)] | None = None
    """Texts of the label's column for 0, 1, …; default: those numbers themselves."""
    class_names: Names | None = None
    """The job's names for the classes, where they differ."""
    categories: dict[str, Names] = Field(default_factory=dict)
    center: dict[str, Number] = Field(default_factory=dict)
    scale: dict[str, Positive] = Field(default_factory=dict)
    missing: dict[str, Number | str] = Field(default_factory=dict)
    """Replacement of a missing value by column, before it is centred and scaled.

    In other columns a missing value is an error.
    """
    missing_marks: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """How a missing value is written, by column; other columns leave it empty.

    A list in place of a table is for all columns.
    """
    dates: dict[str, str] = Field(default_factory=dict)
    """How the dates of a column are written, such as "%d.%m.%Y"; they become days since 1970."""
    units: dict[str, str] = Field(default_factory=dict)
    """Units of the features' values, to be compared with the job's."""
    _reach: dict[str, float] = pydantic.PrivateAttr(default_factory=dict)
    """The largest standardised value, by feature, where the scale is the job's."""

    @pydantic.field_validator("missing_marks", mode="before")
    @classmethod
    def _by_column(cls, marks: object, info: pydantic.ValidationInfo) -> object:
        columns: tuple[str, ...] = info.data.get("features", ())
        return dict.fromkeys(columns, marks) if isinstance(marks, list | tuple) else marks

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "Table":
        # A label that is also a feature would give the model its answer.
        used = (*self.features, *self.truths, *self._named_columns())
        check_distinct("features, targets, id and source", used)
        if sum(map(bool, (self.label, self.labels, self.target, self.survival))) != 1:
            raise ValueError(
                "name what is true of a record: label, the column of its class, or one of labels,"
                " target and survival"
            )
        if len(self.survival) not in (0, 2):
            raise ValueError("survival: name two columns, first that of the time, then the event's")
        if self.label is None and (self.classes or self.class_names):
            raise ValueError("classes and class_names are of a label; leave them out, or name it")
        check_distinct("classes", self.classes or ())
        for key in ("categories", "center", "scale", "missing", "missing_marks", "units", "dates"):
            self._check_features(key, getattr(self, key))
        for name, form in self.dates.items():
            self._check_dates(name, form)
        for name, values in self.categories.items():
            self._check_categories(name, values)
        for name, value in self.missing.items():
            self._check_missing(name, value)
        return self

    @property
    def header(self) -> tuple[str, ...] | None:
        """Names of all columns, where the file has no row with them."""
        return None

    @abstractmethod
    def rows(self) -> Reading:
        """The rows of the file, the first with the names of the columns unless ``header`` has."""

    def number(self, text: str) -> str:
        """A number of the file as a point writes it, and the other way round."""
        return text

    def single_fix(self) -> str:
        """What to do about a file with a single column, where another was looked for."""
        return "it has a single one; name that, or give another file"

    @property
    def truths(self) -> tuple[str, ...]:
        """The columns of what is true of a record."""
        return (*filter(None, (self.label, self.target)), *self.labels, *self.survival)

    @property
    def _reader(self) -> Callable[["Table", int, str, str], float]:
        """How a cell of these columns is read."""
        known = ((self.label, _class), (self.labels, _flag), (True, _measured))
        return next(reader for said, reader in known if said)

    def marks(self, name: str) -> tuple[str, ...]:
        """How a missing value of a column is written."""
        return self.missing_marks.get(name, UNMARKED)

    def _named_columns(self) -> list[str]:
        """The columns that name each record's id and source, where declared."""
        return [name for name in (self.id, self.source) if name is not None]

    def _check_features(self, key: str, columns: Iterable[str]) -> None:
        for name in columns:
            if name not in self.features:
                raise ValueError(
                    f"{key}: {name!r} is not in features; known: {', '.join(self.features)}"
                )

    def _check_categories(self, name: str, values: Sequence[str]) -> None:
        fault = _twice(values)
        if fault:
            raise ValueError(f"categories: {fault!r} is listed twice for {name!r}; name each once")
        if name in {*self.center, *self.scale, *self.dates}:
            raise ValueError(
                f"{name!r} has categories, which are not centred or scaled, and no dates; leave one"
                " of them out"
            )

    def _check_dates(self, name: str, form: str) -> None:
        # A directive that stands twice is an error of the pattern that Python makes of it.
        with suppress(ValueError, re.error):
            if datetime.strptime(EXAMPLE.strftime(form), form).date() == EXAMPLE.date():  # noqa: DTZ007 - made UTC below
                return
        raise ValueError(
            f'dates: {name} = {form!r} does not tell one day from another; write it like "%d.%m.%Y"'
        )

    def _check_missing(self, name: str, value: float | str) -> None:
        known = self.categories.get(name)
        if known is None:
            if isinstance(value, str):
                raise ValueError(
                    f"missing: {name} = {value!r}; give a number, or declare the column's"
                    " categories"
                )
            return
        if value not in known:
            raise ValueError(
                f"missing: {name} = {value!r}; give one of its categories: {', '.join(known)}"
            )

    def agreed(self, features: Sequence[Feature], wary: bool) -> Self:
        """With the job's center, scale and missing for features of which the table states none."""
        jobs = {composed(feature.name): feature for feature in features}
        changed = {key: dict(getattr(self, key)) for key in ("center", "scale", "missing")}
        for name in self.features:
            feature = jobs.get(composed(name))
            # Of the other kind, both sides' declarations say what is wrong, later.
            if feature is None or bool(feature.categories) != (name in self.categories):
                continue
            for key, value in feature.constants(wary).items():
                changed[key].setdefault(name, value)
        table, reach = self.model_copy(update=changed), (inf, REACH)[wary]
        table._reach = dict.fromkeys(changed["scale"].keys() - self.scale, reach)  # noqa: SLF001 its own
        return table

    @property
    def declared(self) -> tuple[Feature, ...]:
        """What each feature is, as a job declares it."""
        return tuple(
            stated(
                name,
                self.units.get(name, DAYS if name in self.dates else ""),
                self.center.get(name, 0.0),
                self.scale.get(name, 1.0),
                self.categories.get(name),
                self.missing.get(name),
            )
            for name in self.features
        )

    def read(self) -> Dataset:
        """Records [1, 1, numbers] in the order of the file.

        Ids and sources are those of their columns, if declared.
        """
        # Typed arrays: lists of Python numbers would take four times the memory.
        # Doubles hold class numbers and targets.
        x, y, checked = array("d"), array("d"), 0
        texts: dict[str, list[str]] = {name: [] for name in self._named_columns()}
        records, reader = 0, self._reader
        with self.rows() as rows:
            # By name, not position: one more column in the file must not shift the others.
            header = [name.strip() for name in self.header or next(rows)[1]]
            used = (*self.features, *self.truths, *texts)
            places = {name: _place(self, header, name) for name in used}
            for line, row in rows:
                # A row with a cell too few would put values under wrong names.
                if len(row) != len(header):
                    raise LocalError(
                        f"{self.file}, {self.counted} {line}: {len(row)} columns, not"
                        f" {len(header)}; correct it"
                    )
                cells = {name: row[place].strip() for name, place in places.items()}
                for name in self.features:
                    x.extend(_value(self, line, name, cells[name]))
                y.extend(reader(self, line, name, cells[name]) for name in self.truths)
                records += 1
                for name, column in texts.items():
                    column.append(_text(self, line, name, cells[name]))
                # How many values the file's text holds is not known before it is read.
                if len(x) >= checked + ASKED_EVERY:
                    checked = len(x)
                    check_fits(
                        self.file,
                        checked * VALUE_BYTES,
                        f"the values of its first {line:,} {self.counted}s",
                    )

        # One-hot columns take one number per category, other columns one.
        width = sum(len(self.categories.get(name, "1")) for name in self.features)
        # What float32 cannot hold becomes infinity, which record_checks finds.
        with np.errstate(over="ignore"):
            values = np.array(x, dtype=np.float64).astype(np.float32).reshape(records, 1, 1, width)
            dtype = np.float32 if reader is _measured else np.int64
            shape = (records, *map(len, filter(None, (self.labels, self.survival))))
            truths = np.array(y, dtype=np.float64).astype(dtype).reshape(shape)
        columns: dict[str | None, tuple[str, ...]] = {}
        for name, column in texts.items():
            columns[name] = tuple(column)
        return Dataset(
            torch.from_numpy(values),
            torch.from_numpy(truths),
            self.class_names or self.classes or self.labels or None,
            columns.get(self.id),
            columns.get(self.source),
            features=self.declared,
        )


def _place(table: Table, header: list[str], name: str) -> int:
    # A name that is there twice would leave open which column is meant.
    if header.count(name) == 1:
        return header.index(name)
    if name in header:
        raise LocalError(
            f"{table.file}: has {header.count(name)} columns {name!r}; name them apart"
        )
    if table.header is not None:
        raise LocalError(
            f"{table.file}: data.columns has no {name!r}; add it where it stands in the file"
        )
    raise LocalError(f"{table.file}: has no column {name!r}; {_column_fix(table, header, name)}")


def _column_fix(table: Table, header: list[str], name: str) -> str:
    if len(header) == 1:
        return table.single_fix()
    declared = {*table.features, *table.truths, table.id, table.source}
    # The first line may be a record then, and an error must not show a record.
    if declared.isdisjoint(header):
        return (
            "nor any other that is declared; where a file has no line with the columns' names, give"
            " data.columns"
        )
    near = difflib.get_close_matches(name, header, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    rest = " …" if len(header) > MOST_LISTED else ""
    return f"its columns: {', '.join(header[:MOST_LISTED])}{rest}"


def _value(table: Table, line: int, name: str, text: str) -> Cell:
    """The numbers of one cell."""
    value: float | str = text
    # First, since ``missing`` may declare a category for the missing cells of a column.
    if text in table.marks(name):
        if name not in table.missing:
            why = (
                "is missing; complete it, or declare what it counts as, in data.missing or, with"
                " least and most, in the job's features"
            )
            raise UndeclaredError(str(_fault(table, line, name, why)))
        value = table.missing[name]
    known = table.categories.get(name)
    if known is None:
        reads = _day if name in table.dates else _number
        # What stands in for a missing value is a number already.
        number = reads(table, line, name, value) if isinstance(value, str) else value
        # Declared constants, never the records' own mean (see the top of this file).
        value = (number - table.center.get(name, 0.0)) / table.scale.get(name, 1.0)
        # Few values may lie outside a range: an operator's scale is not to make them stand out.
        reach = table._reach.get(name, inf)  # noqa: SLF001 this file's
        return (min(max(value, -reach), reach) if isfinite(value) else value,)
    if value not in known:
        raise _fault(
            table,
            line,
            name,
            f"is not one of its categories ({', '.join(known)}); correct it or add one",
        )
    return tuple(float(value == category) for category in known)


def _number(table: Table, line: int, name: str, text: str) -> float:
    fix = (
        f"write it like {table.number('-3.5')}, declare its categories, or add it to"
        " data.missing_marks"
    )
    return _parsed(table, line, name, text, fix)


def _parsed(table: Table, line: int, name: str, text: str, fix: str) -> float:
    text = table.number(text)
    # float() also takes "nan", "1_000" and digits of other scripts.
    if not NUMBER.fullmatch(text):
        raise _fault(table, line, name, f"is not a number; {fix}")
    return float(text)


def _day(table: Table, line: int, name: str, text: str) -> float:
    """Days since 1970 of a date."""
    form = table.dates[name]
    try:
        when = datetime.strptime(text, form)  # noqa: DTZ007 - UTC where it names no zone
    # Without its cause, whose text has the date.
    except ValueError:
        raise _fault(
            table, line, name, f"is not a date written like {form}; correct one of them"
        ) from None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return (when - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(days=1)


def _text(table: Table, line: int, name: str, text: str) -> str:
    if not text:
        needed = "an id" if name == table.id else "a source"
        raise _fault(table, line, name, f"is empty; give the record {needed}")
    return text


def _measured(table: Table, line: int, name: str, text: str) -> float:
    fix = "correct it, or leave the record out: a target cannot be missing"
    return _parsed(table, line, name, text, fix)


def _flag(table: Table, line: int, name: str, text: str) -> int:
    if text not in {"0", "1"}:
        raise _fault(table, line, name, "is neither 0 nor 1; correct it")
    return int(text)


def _class(table: Table, line: int, name: str, text: str) -> int:
    if table.classes is None:
        if not CLASS_NUMBER.fullmatch(text):
            raise _fault(
                table,
                line,
                name,
                "is not a class number; declare what stands there in order: classes = […]",
            )
        return int(text)
    if text not in table.classes:
        raise _fault(
            table,
            line,
            name,
            f"is not one of data.classes ({', '.join(table.classes)}); correct one of them",
        )
    return table.classes.index(text)


# Never the value itself: errors reach the silo's log and its ledger.
def _fault(table: Table, line: int, column: str, why: str) -> LocalError:
    return LocalError(f"{table.file}, {table.counted} {line}, column {column!r}: {why}")


def check_distinct(key: str, names: Sequence[str]) -> None:
    """ValueError where a name is listed twice."""
    fault = _twice(names)
    if fault:
        raise ValueError(f"{key}: {fault!r} is listed twice; name each once")


def _twice(names: Sequence[str]) -> str | None:
    """The first name that was there before, in their order."""
    return next((name for place, name in enumerate(names) if name in names[:place]), None)
