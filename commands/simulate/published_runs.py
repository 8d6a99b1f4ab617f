"""Runs published tables setting by setting, one of them or all, and writes what came of them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, product
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from ...errors import CancelledError, LocalError, UnwritableError
from ...files.documents import write_atomic
from ...simulator.experiment.experiment import CheckedExperiment
from ...simulator.report.finished_runs import finished_runs, load_runs
from ...simulator.report.style import can_draw
from ...simulator.reproduce.comparison import (
    HEADINGS,
    Cell,
    compared,
    meaning,
    table_rows,
    to_csv,
    to_markdown,
    warning,
)
from ...simulator.reproduce.experiments import (
    Scale,
    chosen_labels,
    chosen_settings,
    experiment_of,
    missing,
    reduced,
)
from ...simulator.reproduce.picture import drawn
from ...simulator.reproduce.published import PaperSetting, PaperTable
from ..terminal import printer
from ..terminal.printer import Screen
from .simulate import Prepared, RunOptions, prepare, raise_faults, report, train

ALL = ("table", "runs finished", "of")

Named: TypeAlias = tuple[str, int]  # a run's label and seed


class TableRuns:
    """The runs of one table in their folder, one setting after another, and the table's files."""

    def __init__(
        self,
        screen: Screen,
        table: PaperTable,
        data: Path,
        wanted: Sequence[str],
        clients: int | None,
        asked: RunOptions,
    ) -> None:
        """``wanted`` are names of settings, all where it is empty; unknown names are refused."""
        self.table = table
        self.out = asked.out or Path(table.paper)
        self.settings = chosen_settings(table, wanted)
        self._screen, self._data = screen, data
        self._asked, self._scale = asked, Scale(clients, asked.rounds)
        self._labels = chosen_labels(table, asked.methods)
        # Values at a smaller scale do not compare with the paper's.
        self.smaller = reduced(self.settings, self._scale)
        # the others' folders may hold runs at another scale
        self._begun: list[str] = []

    def experiment(self, setting: PaperSetting, seeds: Sequence[int] = ()) -> CheckedExperiment:
        """What a setting runs, with these seeds or those that were asked for."""
        chosen = seeds or self._asked.seeds
        return experiment_of(self.table, setting, self._data, self._scale, self._labels, chosen)

    def lacking(self) -> dict[str, tuple[str, ...]]:
        """By setting, the files of records that are missing; settings that lack none are absent."""
        found = {}
        for setting in self.settings:
            file = self.experiment(setting).file
            if absent := missing(file.data, file.partition):
                found[setting.name] = absent
        return found

    def finished(self, setting: PaperSetting) -> frozenset[Named]:
        """The finished runs of a setting, by label and seed."""
        return frozenset(map(attrgetter("label", "seed"), finished_runs(self.out / setting.name)))

    def is_done(self, setting: PaperSetting, wanted: frozenset[Named]) -> bool:
        """Whether these runs are finished, in a folder that was checked when it was begun."""
        return setting.name in self._begun and wanted <= self.finished(setting)

    def complete(self, setting: PaperSetting, seeds: Sequence[int] = ()) -> list[str]:
        """Run what is unfinished of a setting, and write its summary; why runs could not continue.

        LocalError where its folder holds other runs.
        """
        experiment = self.experiment(setting, seeds)
        self._screen.show(f"{setting.name}: {', '.join(titles(experiment))}")
        # The labels were chosen before, so ``methods`` must not filter again.
        asked = replace(self._asked, methods=(), seeds=seeds or self._asked.seeds)
        prepared = prepare(self._screen, experiment, self.out / setting.name, asked)
        _check_scale(prepared)
        self._begun.append(setting.name)
        faults = train(self._screen, prepared, asked)
        # No summary without a finished run.
        if finished_runs(prepared.out):
            report(prepared)
        return [f"{setting.name}, {fault}" for fault in faults]

    def write(self) -> tuple[Cell, ...]:
        """Write the table of what is finished; nothing where no run is.

        Its cells, of the settings that were begun here.
        """
        begun = {name: finished_runs(self.out / name) for name in self._begun}
        cells = compared(self.table, begun)
        if cells:
            markdown, values, image = self.files
            write_atomic(markdown, to_markdown(self.table, cells, self.smaller).encode(), 0o644)
            write_atomic(values, to_csv(self.table, cells).encode(), 0o644)
            if can_draw():
                write_atomic(image, drawn(cells, parameter=self.table.parameter), 0o644)
        return cells

    @property
    def files(self) -> tuple[Path, Path, Path]:
        """The table as Markdown, as CSV and as a picture, which has to be drawn."""
        name = self.table.name
        return self.out / f"{name}.md", self.out / f"{name}.csv", self.out / f"{name}.png"

    def document(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """The table for scripts."""
        return {
            "table": self.table.path,
            "out": str(self.out),
            "reduced": self.smaller,
            "values": [_document(cell) for cell in cells],
        }


def run_table(
    table: PaperTable,
    data: Path,
    wanted: Sequence[str],
    clients: int | None,
    asked: RunOptions,
    *,
    as_json: bool,
) -> None:
    """Run all wanted settings, then write the table.

    After a stop, the table has what is finished.
    """
    # With --json, standard output has only the document.
    screen = Screen(err=as_json)
    runs = TableRuns(screen, table, data, wanted, clients, asked)
    # Missing data is reported now, not after earlier settings have run.
    _check_data(data, runs.lacking())
    if runs.smaller:
        screen.show(warning(runs.smaller))
    faults: list[str] = []
    count = 0
    try:
        for setting in runs.settings:
            faults += runs.complete(setting)
            # Runs that were reached, for the error on faults.
            count += len(names_of(runs.experiment(setting)))
    finally:
        # Also after Ctrl-C: show what is finished.
        _show(screen, runs, as_json=as_json)
    raise_faults(faults, count)


def run_all(
    tables: Sequence[PaperTable],
    data: Path,
    clients: int | None,
    asked: RunOptions,
    *,
    as_json: bool,
) -> None:
    """Run what is unfinished of all tables: the first seed of each setting, then the second.

    Among runs of one turn, in the order of the tables. A setting whose records are missing is left
    out, and one that cannot continue ends no other.
    """
    screen = Screen(err=as_json)
    root = asked.out or Path()
    every = [
        TableRuns(screen, table, data, (), clients, replace(asked, out=root / table.paper))
        for table in filter(attrgetter("settings"), tables)
    ]
    lacking = {runs.table.path: runs.lacking() for runs in every}
    # the order of the turns: sorting keeps that of the tables
    turns = sorted(_turns(every, lacking), key=attrgetter("place"))
    _show_left_out(screen, data, lacking)
    if not turns:
        raise LocalError(f"{data}: has the records of no table; --list --data {data} names them")
    faults: list[str] = []
    try:
        for turn in turns:
            faults += turn.take()
    finally:
        _show_all(screen, every, turns, as_json=as_json)
    raise_faults(faults, sum(len(turn.wanted) for turn in turns))


@dataclass(frozen=True)
class Turn:
    """One seed of a setting; ``place`` is that of the seed, from 0."""

    place: int
    seed: int
    runs: TableRuns
    setting: PaperSetting

    @property
    def wanted(self) -> frozenset[Named]:
        """The runs of this turn."""
        return names_of(self.runs.experiment(self.setting, (self.seed,)))

    def take(self) -> list[str]:
        """Complete what is unfinished, and write the table; why runs could not continue."""
        if self.runs.is_done(self.setting, self.wanted):
            return []
        try:
            faults = self.runs.complete(self.setting, (self.seed,))
        # These two end all: a signal came, or the disk does not take any more.
        except (CancelledError, UnwritableError):
            raise
        except LocalError as error:
            faults = [f"{self.setting.name}, seed {self.seed}: {error}"]
        self.runs.write()
        return [f"{self.runs.table.path}, {fault}" for fault in faults]


def _turns(
    every: Sequence[TableRuns], lacking: Mapping[str, Mapping[str, object]]
) -> Iterator[Turn]:
    for runs in every:
        for setting in runs.settings:
            if setting.name in lacking[runs.table.path]:
                continue
            for place, seed in enumerate(runs.experiment(setting).file.all_seeds):
                yield Turn(place, seed, runs, setting)


def names_of(experiment: CheckedExperiment) -> frozenset[Named]:
    """The runs of an experiment, by label and seed."""
    return frozenset(product(titles(experiment), experiment.file.all_seeds))


def titles(experiment: CheckedExperiment) -> list[str]:
    """The labels of its methods."""
    return list(map(attrgetter("title"), experiment.file.all_methods))


def _check_scale(prepared: Prepared) -> None:
    """LocalError for runs of other lengths, since a table says of all its values what was reduced.

    Lengthened one after another, those that are still shorter would stand in it unsaid.
    """
    here = {run.label: run.job.rounds for run in prepared.runs}
    for run in load_runs(prepared.out):
        wanted = here.get(run.label, run.rounds)
        if run.rounds != wanted:
            raise LocalError(
                f"{run.folder}: is at another scale, rounds is {run.rounds} there and {wanted}"
                " here; choose another --out, or remove it"
            )


def _check_data(data: Path, lacking: Mapping[str, Sequence[str]]) -> None:
    """Raise LocalError for all that is missing for all settings, before anything runs."""
    if not lacking:
        return
    fault = (
        f"{data}: lacks records of {', '.join(lacking)}; put there the official files,"
        " unpacked, or choose other settings with --setting:"
    )
    belongs = dict.fromkeys(chain.from_iterable(lacking.values()))
    raise LocalError("\n".join([fault, *belongs]))


def _show_left_out(
    screen: Screen, data: Path, lacking: Mapping[str, Mapping[str, Sequence[str]]]
) -> None:
    out = [f"{table} {', '.join(found)}" for table, found in lacking.items() if found]
    if out:
        screen.show(
            f"left out, since {data} lacks their records: {'; '.join(out)}. staddle reproduce"
            f" --list --data {data} says which files."
        )


def _show(screen: Screen, runs: TableRuns, *, as_json: bool) -> None:
    table, cells = runs.table, runs.write()
    # No finished run has a place in the table.
    if not cells:
        return
    if as_json:
        printer.show_json(runs.document(cells))
        return
    rows = table_rows(cells, over_silos=table.deviation == "silos")
    printer.show(printer.PrintedTable(HEADINGS, rows))
    notes = [warning(runs.smaller)] if runs.smaller else []
    files = [str(path) for path in runs.files if path.exists()]
    screen.show(
        meaning(table),
        *notes,
        f"Notes, and the same as Markdown and CSV: {', '.join(files)}",
    )


def _show_all(
    screen: Screen, every: Sequence[TableRuns], turns: Sequence[Turn], *, as_json: bool
) -> None:
    if as_json:
        printer.show_json([runs.document(runs.write()) for runs in every])
        return
    wanted: Counter[str] = Counter()
    done: Counter[str] = Counter()
    for turn in turns:
        path = turn.runs.table.path
        wanted[path] += len(turn.wanted)
        done[path] += len(turn.wanted & turn.runs.finished(turn.setting))
    rows = [[path, str(done[path]), str(count)] for path, count in sorted(wanted.items())]
    printer.show(printer.PrintedTable(ALL, rows))
    screen.show("The same command resumes what is left.")


def _document(cell: Cell) -> dict[str, Any]:
    return {
        "column": cell.column.name,
        "method": cell.row.title,
        "label": cell.label,
        "score": dict(zip(("measure", "average", "choice"), cell.row.score, strict=True)),
        "published": {
            "text": cell.value.text,
            "mean": cell.value.mean,
            "deviation": cell.value.deviation,
        },
        "ours": None if cell.ours is None else asdict(cell.ours),
        "difference": cell.difference,
    }
