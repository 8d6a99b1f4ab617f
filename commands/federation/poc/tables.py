"""One CSV file per silo: what all have in common, and drafts of the silos' data and of a job.

Whoever drafts here holds all files. Silos on machines of their own agree on such constants
beforehand, or find them together (docs/statistics.md).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import ceil, log10
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from ....algorithms.data.features import Feature, width
from ....algorithms.data.rows import Decimal
from ....algorithms.data.survey import (
    MOST_CATEGORIES,
    Column,
    TableSurvey,
    contract_faults,
    survey,
)
from ....errors import LocalError
from ....files.documents import Strict
from ...silo.data import Contract, TruthColumns, classes_of, drafted_table

DELIMITERS = ",;\t|"
FAR = 10  # deviations from the mean at which a value is out of range
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
        """What stands in it against a job that was drafted before."""
        target = self.found[reading.target]
        faults = contract_faults(self.found, contract.features)
        if others := set(classes_of(target)) - set(contract.class_names or ()):
            faults.append(f"target {target.name!r}: the jobs know no class {_listed(others)}")
        if gone := target.missing.total():
            faults.append(f"target {target.name!r}: missing values: {gone:,}; fill them in")
        return [*self.found.faults, *faults]

    def data(self, reading: TableForm, contract: Contract, name: str) -> dict[str, Any]:
        """The silo's table [data], for a copy of the file with this name next to silo.toml."""
        truth = TruthColumns("label", (reading.target,))
        table = drafted_table(Path(name), self.found, truth, reading.record_id, self.form, contract)
        # Of the job, also where this silo lacks one; it calls them as the job does.
        del table["class_names"]
        return {**table, "classes": list(contract.class_names or ())}


def read_table(path: Path, reading: TableForm) -> SiloTable:
    """Read a file; LocalError for one that is no table with the target, or has faults."""
    if not path.is_file():
        raise LocalError(f"{path}: no such file; give the CSV file of a silo's records")
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline()
    delimiter = reading.delimiter or max(DELIMITERS, key=first.count)
    found = survey(path, delimiter, decimal=reading.decimal)
    for option, name in {"--target": reading.target, "--id": reading.record_id}.items():
        if name not in ("", *found.names):
            known = ", ".join(found.names)
            raise LocalError(f"{path}: has no column {name!r} ({option}); its columns: {known}")
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
            if here != there:
                raise LocalError(
                    f"{other.path}: its columns differ from those of {first.path}; it lacks"
                    f" {_listed(here - there)}, and has besides {_listed(there - here)}. Give all"
                    " files the same columns"
                )
        faults = list(chain.from_iterable(map(self._faults, self.tables.values())))
        if len(self.classes) not in range(2, MOST_CATEGORIES + 1):
            faults.append(
                f"--target {self.reading.target}: {len(self.classes):,} different values; a target"
                f" has 2 to {MOST_CATEGORIES} classes. For other tasks write the job yourself"
                " (docs/operate.md)"
            )
        if faults:
            raise LocalError("\n".join(["the files cannot be used as they are", *faults[:SHOWN]]))

    def _faults(self, table: SiloTable) -> Iterator[str]:
        yield from (f"{table.path}: {fault}" for fault in table.found.faults)
        target = table.found[self.reading.target]
        if gone := target.missing.total():
            yield f"{table.path}: target {target.name!r}: missing values: {gone:,}; fill them in"
        features = {own.name: own for own in self.features}
        for column in table.found.columns:
            feature = features.get(column.name)
            kind = "categories" if feature and feature.categories else "number"
            if feature and column.kind not in (kind, "empty"):
                yield f"{table.path}: column {column.name!r}: {column.kind} here, {kind} elsewhere"
            # Elsewhere a column with texts is left out, but commas show how the file is written.
            elif column.commas or (feature and kind == "number" and column.texts):
                yield from (f"{table.path}: column {column.name!r}: {f}" for f in column.faults())

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
        return {"model": {**MODEL, **size}, "features": _written(self.features)}

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


def _written(features: Sequence[Feature]) -> list[dict[str, Any]]:
    """The tables [[features]] of a job file."""
    tables = [own.model_dump(exclude_defaults=True) for own in features]
    for table in tables:
        if "missing" in table and "categories" not in table:
            table["missing"] = float(table["missing"])
    return tables


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
    # To a thousandth of a deviation, so that no single value shows.
    deviation = float(f"{numbers.std():.2g}")
    mean = round(float(numbers.mean()), 2 - ceil(log10(deviation)))
    return Feature(
        name=name,
        least=float(f"{mean - FAR * deviation:.4g}"),
        most=float(f"{mean + FAR * deviation:.4g}"),
        center=mean,
        scale=deviation,
        missing=repr(mean) if gone else None,
    )


def _in_order(name: str) -> tuple[float, str]:
    """Numbers by size, before texts."""
    number = name.removeprefix("-").replace(".", "", 1).isdecimal()
    return (float(name), "") if number else (float("inf"), name)


def _listed(names: set[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"
