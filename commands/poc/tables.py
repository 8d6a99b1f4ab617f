"""One CSV file per silo: what all have in common, and drafts of the silos' data and of a job.

Whoever drafts here holds all files. Silos on machines of their own agree on such constants
beforehand, or find them together (docs/statistics.md).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import ceil, floor, inf, log10
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from ...algorithms.data.features import Feature, width
from ...algorithms.data.rows import Decimal
from ...algorithms.data.survey import (
    MOST_CATEGORIES,
    Column,
    TableSurvey,
    contract_faults,
    survey,
)
from ...errors import check_local
from ...files.documents import Strict
from ..silo.data import DELIMITERS, Contract, TruthColumns, classes_of, drafted_table

WIDER = 1.0  # of what was seen, by which the range of a feature is wider at either end
SHOWN = 12  # faults in one error
MODEL: Mapping[str, Any] = {"name": "mlp", "options": {"widths": [32]}}


class TableForm(Strict):
    """How the files are written, and which of their columns are no features."""

    target: str = ""
    record_id: str = ""
    delimiter: str = Field(default="", max_length=1)  # "": as the first line of each has it
    decimal: Decimal = "."


@dataclass(frozen=True)
class SiloTable:
    """One silo's file, as it was read."""

    path: Path
    form: Mapping[str, str]
    found: TableSurvey

    def __len__(self) -> int:
        return self.found.records

    def faults(self, reading: TableForm, contract: Contract) -> list[str]:
        """What stands in it against a job with this contract."""
        target, columns = self.found[reading.target], self.found.columns
        others = set(classes_of(target)) - set(contract.class_names or ())
        gone = target.missing.total()
        found = {
            f"target {target.name!r}: the jobs know no class {_listed(others)}": others,
            f"target {target.name!r}: missing values: {gone:,}; fill them in": gone,
        }
        # A column of these alone has no numbers, and would be left out.
        commas = chain.from_iterable(column.faults() for column in columns if column.commas)
        wrong = contract_faults(self.found, contract.features)
        all_faults = [*self.found.faults, *filter(found.get, found), *wrong, *commas]
        return [f"{self.path}: {fault}" for fault in all_faults]

    def data(self, reading: TableForm, contract: Contract, name: str) -> dict[str, Any]:
        """The silo's table [data], for a copy of the file with this name next to silo.toml."""
        truth = TruthColumns("label", (reading.target,))
        table = drafted_table(Path(name), self.found, truth, reading.record_id, self.form, contract)
        # Of the job, also where this silo lacks one; it calls them as the job does.
        table.pop("class_names", None)
        return {**table, "classes": list(contract.class_names or ())}


def read_table(path: Path, reading: TableForm) -> SiloTable:
    """Read a file; LocalError for one that is no table with the target, or has faults."""
    check_local(path.is_file(), f"{path}: no such file; give the CSV file of a silo's records")
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline()
    delimiter = reading.delimiter or max(DELIMITERS, key=first.count)
    found = survey(path, delimiter, decimal=reading.decimal)
    known = ", ".join(found.names)
    for option, name in {"--target": reading.target, "--id": reading.record_id}.items():
        named = name in ("", *found.names)
        why = f"{path}: has no column {name!r} ({option}); its first line names {known}"
        check_local(named, why)
    return SiloTable(path, {"delimiter": delimiter, "decimal": reading.decimal}, found)


@dataclass(frozen=True)
class SiloTables:
    """The files of all silos, by silo."""

    reading: TableForm
    tables: Mapping[str, SiloTable]

    @cached_property
    def _columns(self) -> dict[str, list[Column]]:
        """By name, the column in each file."""
        each = list(self.tables.values())
        return {name: [own.found[name] for own in each] for name in each[0].found.names}

    def check(self) -> None:
        """LocalError with what keeps the files from being read as one data set."""
        first = next(iter(self.tables.values()))
        for other in self.tables.values():
            here, there = set(first.found.names), set(other.found.names)
            check_local(
                here == there,
                f"{other.path}: its columns differ from those of {first.path}; it lacks"
                f" {_listed(here - there)}, and has besides {_listed(there - here)}. Give all files"
                " the same columns",
            )
        some = len(self.classes) in range(2, MOST_CATEGORIES + 1)
        check_local(
            some,
            f"--target {self.reading.target}: {len(self.classes):,} different values; a target has"
            f" 2 to {MOST_CATEGORIES} classes. For other tasks write the job yourself"
            " (docs/operate.md)",
        )
        faults = self._class_faults()
        for table in self.tables.values():
            faults += table.faults(self.reading, self.contract)
        shown = "\n".join(["the files cannot be used as they are", *faults[:SHOWN]])
        check_local(not faults, shown)

    def _class_faults(self) -> list[str]:
        """Files that spell the classes differently, which no job could put together."""
        column = self.reading.target
        seen = {own.path: set(classes_of(own.found[column])) for own in self.tables.values()}
        shared = next(iter(seen.values()))
        # As often as there are files: each may be what joins the next one to the others.
        for classes in [*seen.values()] * len(seen):
            shared = shared | classes if shared & classes else shared
        return [
            f"{path}: target {column!r} has {_listed(classes)}, and other files have"
            f" {_listed(shared)}; write the same value for the same class in all files"
            for path, classes in seen.items()
            if not shared & classes
        ]

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """All that any file has in its target, in one order."""
        seen = chain.from_iterable(map(classes_of, self._columns[self.reading.target]))
        return tuple(sorted(set(seen), key=_in_order))

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """Columns of numbers or categories, centred and scaled over all files."""
        others = {self.reading.target, self.reading.record_id}
        drafted = map(_feature, (own for name, own in self._columns.items() if name not in others))
        return tuple(filter(None, drafted))

    @property
    def contract(self) -> Contract:
        """What the job says a record is."""
        return Contract(features=self.features, class_names=self.classes)

    @property
    def described(self) -> dict[str, Any]:
        """The tables of a job file that say what a record is, and a model for it."""
        names = list(self.classes)
        size = {"classes": len(names), "class_names": names, "input": [1, 1, width(self.features)]}
        tables = [own.model_dump(exclude_defaults=True) for own in self.features]
        return {"model": {**MODEL, **size}, "features": tables}

    def notes(self) -> Iterator[str]:
        """What whoever holds the files should look at."""
        kept = {self.reading.target, *(feature.name for feature in self.features)}
        if left := self._columns.keys() - kept - {self.reading.record_id}:
            yield (
                f"left out: {_listed(left)}; neither numbers nor categories, or the same in all"
                " records"
            )
        for silo, table in self.tables.items():
            found = table.found
            if lacking := set(self.classes) - set(classes_of(found[self.reading.target])):
                yield f"{silo}: has no record of class {_listed(lacking)}"
            for name in sorted(kept & set(found.names)):
                yield from (f"{silo}: column {name!r} {fault}" for fault in found[name].faults())


def _feature(columns: Sequence[Column]) -> Feature | None:
    """What all files have in a column; None where it is no feature."""
    name, kinds = columns[0].name, Counter(column.kind for column in columns)
    gone = any(column.missing for column in columns)
    # What most files have; ``check`` names the others.
    kind = max(kinds, key=lambda kind: (kind != "empty", kinds[kind]))
    if kind == "categories":
        seen = sum((column.texts for column in columns), Counter())
        common = seen.most_common(1)[0][0]
        return Feature(name=name, categories=tuple(sorted(seen)), missing=common if gone else None)
    numbers = np.concatenate([np.array(column.numbers) for column in columns])
    if kind != "number" or len(set(numbers)) < 2:
        return None
    # Rounded to a hundredth of a deviation, so that no single value shows.
    deviation = float(f"{numbers.std():.2g}")
    digits = 2 - ceil(log10(deviation))
    mean = round(float(numbers.mean()), digits)
    least, most = _range(float(numbers.min()), float(numbers.max()))
    return Feature(
        name=name,
        least=least,
        most=most,
        center=mean,
        scale=deviation,
        missing=repr(mean) if gone else None,
    )


def _range(first: float, last: float) -> tuple[float, float]:
    """The bounds of a feature whose smallest and largest values are these.

    What is never negative stays so. The ends are a multiple of the power of ten above the width: a
    job is read by all its silos, and none of them is to read the value of an extreme record.
    """
    width = last - first
    digits = -floor(log10(width)) - 1
    step = 10.0**-digits
    # Zero limits an end that no value has crossed.
    lowest, highest = {True: 0.0}.get(first >= 0, -inf), {True: 0.0}.get(last <= 0, inf)
    least = max(lowest, floor((first - WIDER * width) / step) * step)
    most = min(highest, ceil((last + WIDER * width) / step) * step)
    return round(least, digits), round(most, digits)


def _in_order(name: str) -> tuple[float, str]:
    """Numbers by size, before texts."""
    number = name.removeprefix("-").replace(".", "", 1).isdecimal()
    return (float(name), "") if number else (float("inf"), name)


def _listed(names: set[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"
