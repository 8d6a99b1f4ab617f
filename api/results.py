"""What has come of an experiment: tables, pictures and models, for programs and notebooks."""

import csv
import html
import json
from dataclasses import dataclass
from importlib import import_module
from itertools import filterfalse
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..commands.simulate import results as tables
from ..errors import LocalError
from ..simulator.report.finished_runs import Recorded, finished_runs, load_runs
from ..simulator.report.ranking import TOO_GOOD
from ..simulator.report.report import SWEEP
from ..simulator.report.results_html import results_html

Picture: TypeAlias = Literal["curves", "bytes", "seconds", "simulated", "spread", "partition"]
NUMBERS = ("value", "loss", "simulated_seconds", "seconds")
WHOLE = ("seed", "round", "silos", "bytes_up", "bytes_down")
TEXTS = ("method", "label", "ranked_by")


@dataclass(frozen=True)
class PictureFile:
    """A PNG file: a path for programs, and a picture in a notebook."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


class Results:
    """The results in a folder; they are read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def runs(self) -> tuple[Recorded, ...]:
        """All runs, finished or not, with their history and models."""
        return load_runs(self.folder)

    def rows(self) -> list[dict[str, Any]]:
        """Every measure of every finished run, as in results.csv (docs/simulate.md)."""
        path = self._there("results.csv")
        with path.open(newline="", encoding="utf-8") as file:
            return [_numbers(row) for row in csv.DictReader(file)]

    def frame(self) -> Any:
        """The same as a pandas data frame; LocalError without pandas."""
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError as error:
            raise LocalError("frame() needs pandas: pip install pandas; or take rows()") from error
        return pandas.DataFrame(self.rows())

    def sweep(self) -> list[dict[str, Any]]:
        """The variants of each method in a sweep, best first, as in sweep.csv (docs/sweeps.md).

        Empty without a sweep. An empty cell is None.
        """
        path = self.folder / SWEEP
        if not path.exists():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            return list(map(_ranked, csv.DictReader(file)))

    def summary(self) -> str:
        """The report as Markdown: the methods compared, what each took, silo by silo."""
        return self._there("summary.md").read_text(encoding="utf-8")

    def plot(self, what: Picture = "curves") -> PictureFile:
        """A picture of the report: a path that a notebook shows as the picture."""
        return PictureFile(self._there(f"{what}.png"))

    def _there(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            raise LocalError(f"{path}: not there: no run is finished; call run() first")
        return path

    def _choice(self) -> str:
        """Whose records chose the variants of a sweep that are shown; empty without a sweep."""
        rows = self.sweep()
        if not rows:
            return ""
        by = rows[0]["ranked_by"]
        text = f"Of a sweep the best variant of each method, by {by} records; sweep() has all"
        return f"{text}; {TOO_GOOD}" if by == "test" else text

    def _outranked(self) -> set[str]:
        return {row["label"] for row in self.sweep() if row["rank"] > 1}

    def _table(self) -> tables.ResultsTable | None:
        # Of a sweep, as in the report: the best variant of each method.
        outranked = self._outranked()
        finished = finished_runs(self.folder)
        best = list(filterfalse(lambda run: run.label in outranked, finished))
        return tables.results_table(best) if best else None

    def __repr__(self) -> str:
        table = self._table()
        if table is None:
            return f"Results({str(self.folder)!r}): no run is finished"
        rows = [list(table.columns), *map(list, table.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, table.meaning, *filter(None, [self._choice()])])

    def _repr_html_(self) -> str:
        """For notebooks: the methods compared, what training took, warnings, the curves."""
        runs = self.runs
        if not any(run.finished for run in runs):
            return html.escape(repr(self))
        curves = self.folder / "curves.png"
        picture = curves.read_bytes() if curves.exists() else b""
        return results_html(runs, picture, self._outranked(), self._choice())


def _numbers(row: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = dict(row)
    found |= {name: float(row[name] or "nan") for name in NUMBERS}
    return found | {name: int(row[name]) for name in WHOLE}


def _ranked(row: dict[str, str]) -> dict[str, Any]:
    return {name: text if name in TEXTS else _value(text) for name, text in row.items()}


def _value(text: str) -> Any:
    """A score or a swept value; what is no number or truth value stays text."""
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text
