"""Tabular records whose columns the silo declares, whatever file they are in.

Numbers are taken as they are, categories one-hot, dates as days. What stands in for a missing
value, what is subtracted and what is divided by are declared constants: taken from the records,
they would be one more thing that the model tells of them. Errors name line and column, never what
is there: they reach the silo's log and its ledger.
"""

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import filterfalse
from math import inf, isfinite
from pathlib import Path
from typing import Any, Self

import numpy as np
import pydantic
import torch
from pydantic import Field
from torch import Tensor

from .....files.file_bounds import check_fits
from ....models.class_names import composed
from ...dataset import Dataset
from ...features import REACH, Feature, stated
from ...new_records import NewRecords, in_pieces
from ...options import Names, Number, Positive, UndeclaredError
from .labelled import Labelled, fault, parsed, twice

# Bytes per value once all are read: float64, float32, and float32 of each side of the split.
VALUE_BYTES = 16
ASKED_EVERY = 2**22  # values, after which the available memory is checked again
UNMARKED = ("",)  # how a missing value is written, unless something else is said
EXAMPLE = datetime(2003, 11, 27, tzinfo=UTC)
DAYS = "days since 1970-01-01"  # the unit of dates

Cell = tuple[float, ...]


class Table(Labelled):
    """A table whose columns are the features."""

    features: Names
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
    def inputs(self) -> tuple[str, ...]:
        """The features."""
        return self.features

    def marks(self, name: str) -> tuple[str, ...]:
        """How a missing value of a column is written."""
        return self.missing_marks.get(name, UNMARKED)

    def reach(self, name: str) -> float:
        """The largest standardised value of a feature whose scale is the job's."""
        return self._reach.get(name, inf)

    def _check_features(self, key: str, columns: Iterable[str]) -> None:
        for name in filterfalse(self.features.__contains__, columns):
            raise ValueError(
                f"{key}: {name!r} is not in features; known: {', '.join(self.features)}"
            )

    def _check_categories(self, name: str, values: Sequence[str]) -> None:
        fault = twice(values)
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
        """The job's features in its order, if the table has all of them, and maybe others.

        With the job's center, scale and missing for features of which the table states none.
        """
        jobs = {composed(feature.name): feature for feature in features}
        own = {composed(name): name for name in self.features}
        # Where one is missing, both sides' declarations say so, later.
        if jobs and jobs.keys() <= own.keys():
            return self.chosen([own[name] for name in jobs]).with_constants(jobs, wary=wary)
        return self.with_constants(jobs, wary=wary)

    def chosen(self, names: Sequence[str]) -> Self:
        """The table with these of its features."""
        stated = ("categories", "center", "scale", "missing", "missing_marks", "units", "dates")
        chosen = {
            key: {name: said for name, said in getattr(self, key).items() if name in names}
            for key in stated
        }
        return self.model_copy(update={**chosen, "features": tuple(names)})

    def with_constants(self, jobs: Mapping[str, Feature], *, wary: bool) -> Self:
        """The table with the constants of a job's features, by composed name."""
        changed = {key: dict(getattr(self, key)) for key in ("center", "scale", "missing")}
        for name in self.features:
            feature = jobs.get(composed(name))
            # Of the other kind, both sides' declarations say what is wrong, later.
            if feature is None or bool(feature.categories) != (name in self.categories):
                continue
            for key, value in feature.constants(wary).items():
                changed[key].setdefault(name, value)
        table, reach = self.model_copy(update=changed), (inf, REACH)[wary]
        # A contract's table may agree again, and states the job's scales by then.
        own = dict.fromkeys(changed["scale"].keys() - self.scale, reach)
        table._reach = self._reach | own  # noqa: SLF001 its own
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

    def gaps(self) -> dict[str, int]:
        """Counted over all records."""
        own = tuple(filterfalse(self.missing.__contains__, self.features))
        found = Counter(
            name
            for _, cells in self.cells(self.streamed(), own)
            for name in own
            if cells[name] in self.marks(name)
        )
        return dict(found.most_common())

    def filled(self) -> Self:
        """With the first category, or 0."""
        stand_ins = {name: self.categories.get(name, (0.0,))[0] for name in self.features}
        return self.model_copy(update={"missing": {**stand_ins, **self.missing}})

    def contract(self) -> dict[str, Any]:
        """How a CSV file of such records is read."""
        own = set(Table.model_fields) - {"test_fraction"}
        return {"kind": "csv", **self.model_dump(mode="json", include=own, exclude_defaults=True)}

    def label_free(self, rows: int) -> Iterator[NewRecords]:
        """Records [B, 1, 1, numbers] of this file without what is true of them."""
        named = tuple(filter(None, (self.id,)))
        return self.of_cells(self.cells(self.streamed(), self.features, named), rows)

    def of_cells(
        self, found: Iterable[tuple[int, Mapping[str, str]]], rows: int
    ) -> Iterator[NewRecords]:
        """Records of cells by column, each with the number of its line."""
        for piece in in_pieces(found, rows):
            names = [cells.get(self.id or "") or str(line) for line, cells in piece]
            values = [
                value
                for line, cells in piece
                for name in self.features
                for value in _value(self, line, name, cells[name])
            ]
            yield NewRecords(names, self._as_records(values, len(piece)))

    def read(self) -> Dataset:
        """Records [1, 1, numbers] in the order of the file.

        Ids and sources are those of their columns, if declared.
        """
        # Typed arrays: lists of Python numbers would take four times the memory.
        x, checked = array("d"), 0

        def take(line: int, cells: Mapping[str, str]) -> None:
            nonlocal checked
            for name in self.features:
                x.extend(_value(self, line, name, cells[name]))
            # How many values the file's text holds is not known before it is read.
            if len(x) >= checked + ASKED_EVERY:
                checked = len(x)
                what = f"the values of its first {line:,} {self.counted}s"
                check_fits(Path(self.where), checked * VALUE_BYTES, what)

        found = self.truth_of_all(take)
        whole = self._as_records(x, len(found.y))
        names, by_record = self.names, (found.ids, found.sources, found.groups)
        return Dataset(whole, found.y, names, *by_record, features=self.declared)

    def _as_records(self, values: Sequence[float], count: int) -> Tensor:
        """Records [count, 1, 1, numbers] float32 of their numbers one after another."""
        # One-hot columns take one number per category, other columns one.
        width = sum(len(self.categories.get(name, "1")) for name in self.features)
        # What float32 cannot hold becomes infinity, which record_checks finds.
        with np.errstate(over="ignore"):
            narrow = np.array(values, dtype=np.float64).astype(np.float32)
        return torch.from_numpy(narrow.reshape(count, 1, 1, width))


def _value(table: Table, line: int, name: str, text: str) -> Cell:
    """The numbers of one cell."""
    value: float | str = text
    # First, since ``missing`` may declare a category for the missing cells of a column.
    if text in table.marks(name):
        if name not in table.missing:
            why = (
                "is missing; complete it. Or the silo declares, before it trains, what it counts"
                " as: in data.missing or, with least and most, in the job's features"
            )
            raise UndeclaredError(str(fault(table, line, name, why)))
        value = table.missing[name]
    known = table.categories.get(name)
    if known is None:
        reads = _day if name in table.dates else _number
        # What stands in for a missing value is a number already.
        number = reads(table, line, name, value) if isinstance(value, str) else value
        # Declared constants, never the records' own mean (see the top of this file).
        value = (number - table.center.get(name, 0.0)) / table.scale.get(name, 1.0)
        # Few values may lie outside a range: an operator's scale is not to make them stand out.
        reach = table.reach(name)
        return (min(max(value, -reach), reach) if isfinite(value) else value,)
    if value not in known:
        raise fault(
            table,
            line,
            name,
            f"is not one of its categories ({', '.join(known)}); correct it or add one",
        )
    return tuple(float(value == category) for category in known)


def _number(table: Table, line: int, name: str, text: str) -> float:
    fix = (
        f"write it like {table.number('-3.5')}. Or the silo declares, before it trains, its"
        " categories, or adds it to data.missing_marks"
    )
    return parsed(table, line, name, text, fix)


def _day(table: Table, line: int, name: str, text: str) -> float:
    """Days since 1970 of a date."""
    form = table.dates[name]
    try:
        when = datetime.strptime(text, form)  # noqa: DTZ007 - UTC where it names no zone
    # Without its cause, whose text has the date.
    except ValueError:
        raise fault(
            table, line, name, f"is not a date written like {form}; correct one of them"
        ) from None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return (when - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(days=1)
