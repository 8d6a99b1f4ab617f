"""Tables of which each row is a record, with what is true of it, its id and its source in columns.

Errors name line and column, never what is there: they reach the silo's log and its ledger.
"""

import difflib
import re
from abc import abstractmethod
from array import array
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import pydantic
import torch
from pydantic import Field
from torch import Tensor

from .....errors import LocalError
from .....files.file_bounds import check_fits
from ...features import NUMBER
from ...options import DataTable, Names
from ...rows import LONGEST_CELL, Reading

# fits int64; record_checks rejects classes out of range
CLASS_NUMBER = re.compile(r"-?[0-9]{1,18}")
MOST_LISTED = 20  # names of columns, in an error
TRUTH_BYTES = 32  # per number of what is true: float64, as an array, and of both sides of the split
HELD_ASKED_EVERY = 2**25  # bytes, after which the available memory is checked again


@dataclass(frozen=True, eq=False)
class Truths:
    """What the rows of a file say of their records, in their order."""

    y: Tensor  # [N] int64 classes, [N, labels] int64, or float32 [N] and [N, 2]
    ids: tuple[str, ...] | None
    sources: tuple[str, ...] | None
    groups: tuple[str, ...] | None


class Labelled(DataTable):
    """A kind of table with a row per record: how it writes rows and numbers."""

    counted: ClassVar[str] = "record"
    """What is counted in errors."""

    label: str | None = None
    """The column of the classes; the other three are for other tasks than classification."""
    labels: tuple[str, ...] = ()
    """Columns of 0 and 1, one per label."""
    target: str | None = None
    """The column of the numbers that a regression learns."""
    survival: tuple[str, ...] = ()
    """The columns of the time, and of 1 for an event or 0 for last seen without."""
    id: str | None = None
    source: str | None = None
    """The column that says where a record comes from, such as its hospital."""
    group: str | None = None
    """The column of what stays on one side of the split, such as a patient with several records."""
    classes: Annotated[tuple[str, ...], Field(min_length=2)] | None = None
    """Texts of the label's column for 0, 1, …; default: those numbers themselves."""
    class_names: Names | None = None
    """The job's names for the classes, where they differ."""

    @pydantic.model_validator(mode="after")
    def _one_truth(self) -> "Labelled":
        # A label that is also a feature would give the model its answer.
        check_distinct("features, targets, id, source and group", self.used)
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
        values, names = self.classes or (), self.class_names or ()
        # The same names in another order can only be a slip, which would swap classes.
        if values != names and sorted(values) == sorted(names):
            raise ValueError(
                "classes and class_names have the same names in another order, so that one class"
                " would count as another; leave class_names out, and list classes as the job does"
            )
        return self

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, ...]:
        """The columns of what a model takes."""

    @property
    def header(self) -> tuple[str, ...] | None:
        """Names of all columns, where the file has no row with them."""
        return None

    @abstractmethod
    def rows(self) -> Reading:
        """The rows of the file, the first with the names of the columns unless ``header`` has."""

    def streamed(self) -> Reading:
        """The same, of a file that may be larger than the memory."""
        return self.rows()

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
    def used(self) -> tuple[str, ...]:
        """All columns that are read, where they are there."""
        return (*self.inputs, *self.truths, *self._named_columns())

    @property
    def _reader(self) -> Callable[["Labelled", int, str, str], float]:
        """How a cell of these columns is read."""
        known = ((self.label, _class), (self.labels, _flag), (True, _measured))
        return next(reader for said, reader in known if said)

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the classes or labels, where the table has any."""
        return self.class_names or self.classes or self.labels or None

    @property
    def meanings(self) -> str:
        """Its classes, or numbers from 0 on, that have other names in the job."""
        values = self.classes or tuple(map(str, range(len(self.class_names or ()))))
        pairs = zip(values, self.class_names or (), strict=False)
        return ", ".join(f"{value!r} counts as {name!r}" for value, name in pairs if value != name)

    def _named_columns(self) -> list[str]:
        """The columns of each record's id, source and group, where declared."""
        return [name for name in (self.id, self.source, self.group) if name is not None]

    def truth_of_all(self, take: Callable[[int, Mapping[str, str]], None]) -> Truths:
        """Read all rows; ``take`` gets each one's number and the texts of its cells by column."""
        # A typed array: a list of Python numbers would take four times the memory. Doubles hold
        # class numbers and targets.
        y, reader = array("d"), self._reader
        texts: dict[str, list[str]] = {name: [] for name in self._named_columns()}
        records = held = checked = 0
        for line, cells in self.cells(self.rows(), self.used):
            take(line, cells)
            y.extend(reader(self, line, name, cells[name]) for name in self.truths)
            for name, column in texts.items():
                column.append(_text(self, line, name, cells[name]))
                held += len(column[-1])
            records += 1
            # A short file may unpack to long texts, or to many numbers.
            held += TRUTH_BYTES * len(self.truths)
            if held >= checked + HELD_ASKED_EVERY:
                checked = held
                what = f"what is true of its first {records:,} {self.counted}s, and their ids,"
                check_fits(Path(self.where), held, what)
        dtype = np.float32 if reader is _measured else np.int64
        shape = (records, *map(len, filter(None, (self.labels, self.survival))))
        # What float32 cannot hold becomes infinity, which record_checks finds.
        with np.errstate(over="ignore"):
            truths = np.array(y, dtype=np.float64).astype(dtype).reshape(shape)
        known = zip(texts, map(tuple, texts.values()), strict=True)
        columns: dict[str | None, tuple[str, ...]] = dict(known)
        by_record = map(columns.get, (self.id, self.source, self.group))
        return Truths(torch.from_numpy(truths), *by_record)

    def check_first(self) -> None:
        """LocalError where a column is missing, or the first row has another number of cells."""
        with closing(self.cells(self.streamed(), self.used)) as rows:
            next(rows, None)

    def cells(
        self, reading: Reading, used: Sequence[str], optional: Collection[str] = ()
    ) -> Generator[tuple[int, dict[str, str]]]:
        """The number of each row, and the texts of its cells in the columns that are ``used``.

        Optional columns may be missing.
        """
        with reading as rows:
            # By name, not position: one more column in the file must not shift the others.
            header = list(map(str.strip, self.header or next(rows)[1]))
            there = [*used, *filter(header.__contains__, optional)]
            places = {name: _place(self, header, name) for name in there}
            for line, row in rows:
                # A row with a cell too few would put values under wrong names.
                if len(row) != len(header):
                    raise LocalError(
                        f"{self.where}, {self.counted} {line}: {len(row)} columns, not"
                        f" {len(header)}; correct it"
                    )
                cells = {name: row[place] for name, place in places.items()}
                if max(map(len, cells.values()), default=0) > LONGEST_CELL:
                    raise _too_long(self, line, cells)
                yield line, dict(zip(cells, map(str.strip, cells.values()), strict=True))


def _place(table: Labelled, header: list[str], name: str) -> int:
    # A name that is there twice would leave open which column is meant.
    if header.count(name) == 1:
        return header.index(name)
    if name in header:
        raise LocalError(
            f"{table.where}: has {header.count(name)} columns {name!r}; name them apart"
        )
    if table.header is not None:
        raise LocalError(
            f"{table.where}: data.columns has no {name!r}; add it where it stands in the file"
        )
    raise LocalError(f"{table.where}: has no column {name!r}; {_column_fix(table, header, name)}")


def _column_fix(table: Labelled, header: list[str], name: str) -> str:
    if len(header) == 1:
        return table.single_fix()
    declared = {*table.inputs, *table.truths, table.id, table.source, table.group}
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


def _text(table: Labelled, line: int, name: str, text: str) -> str:
    if not text:
        needed = {table.id: "an id", table.source: "a source"}.get(name, "a group")
        raise fault(table, line, name, f"is empty; give the record {needed}")
    return text


def _measured(table: Labelled, line: int, name: str, text: str) -> float:
    fix = "correct it, or leave the record out: a target cannot be missing"
    return parsed(table, line, name, text, fix)


def _flag(table: Labelled, line: int, name: str, text: str) -> int:
    if text not in {"0", "1"}:
        raise fault(table, line, name, "is neither 0 nor 1; correct it")
    return int(text)


def _class(table: Labelled, line: int, name: str, text: str) -> int:
    if table.classes is None:
        if not CLASS_NUMBER.fullmatch(text):
            raise fault(
                table,
                line,
                name,
                "is not a class number; declare what stands there in order: classes = […]",
            )
        return int(text)
    if text not in table.classes:
        why = f"is not one of data.classes ({', '.join(table.classes)}); correct one of them"
        empty = "has no class; give the record one, or leave it out"
        raise fault(table, line, name, why if text else empty)
    return table.classes.index(text)


def parsed(table: Labelled, line: int, name: str, text: str, fix: str) -> float:
    """The number that a cell's text is; LocalError with ``fix`` where it is none."""
    text = table.number(text)
    # float() also takes "nan", "1_000" and digits of other scripts.
    if not NUMBER.fullmatch(text):
        raise fault(table, line, name, f"is not a number; {fix}")
    return float(text)


def _too_long(table: Labelled, line: int, cells: Mapping[str, str]) -> LocalError:
    name = max(cells, key=lambda name: len(cells[name]))
    why = f"is longer than {LONGEST_CELL:,} characters; correct it, or leave the record out"
    return fault(table, line, name, why)


# Never the value itself: errors reach the silo's log and its ledger.
def fault(table: Labelled, line: int, column: str, why: str) -> LocalError:
    """What is wrong in a cell."""
    return LocalError(f"{table.where}, {table.counted} {line}, column {column!r}: {why}")


def check_distinct(key: str, names: Sequence[str]) -> None:
    """ValueError where a name is listed twice."""
    if again := twice(names):
        raise ValueError(f"{key}: {again!r} is listed twice; name each once")


def twice(names: Sequence[str]) -> str | None:
    """The first name that was there before, in their order."""
    return next((name for place, name in enumerate(names) if name in names[:place]), None)
