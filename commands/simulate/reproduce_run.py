"""What ``staddle reproduce`` does: every setting of a table as an experiment, and the table beside the paper's."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...errors import LocalError
from ...files.documents import write_atomic
from ...simulator.experiment.experiment import Experiment
from ...simulator.report.finished_runs import Recorded, load_runs
from ...simulator.reproduce.comparison import HEADINGS, Cell, compared, meaning, to_csv, to_markdown, told, warning
from ...simulator.reproduce.experiments import Scale, chosen_labels, chosen_settings, experiment_of, missing, reduced
from ...simulator.reproduce.published import PaperTable, find
from ..console import printer
from ..console.printer import Screen
from .run import Prepared, RunOptions, prepare, raise_faults, report, train


def reproduce(
    path: str, data: Path, wanted: Sequence[str], clients: int | None, asked: RunOptions, *, as_json: bool
) -> None:
    """All settings that are asked for, then the table; where it is stopped, the table of what is finished."""
    screen = Screen(err=as_json)
    table = find(path)
    settings, labels = chosen_settings(table, wanted), chosen_labels(table, asked.methods)
    scale = Scale(clients, asked.rounds)
    experiments = {
        setting.name: experiment_of(table, setting, data, scale, labels, asked.seeds) for setting in settings
    }
    _check_data(data, experiments)
    out = asked.out or Path(table.paper)
    smaller = reduced(settings, scale)
    if smaller:
        screen.show(warning(smaller))
    begun: list[str] = []  # the others' folders may hold runs at another scale
    faults, count = [], 0
    try:
        for name, experiment in experiments.items():
            screen.show(f"{name}: {', '.join(method.title for method in experiment.file.all_methods)}")
            prepared = prepare(screen, experiment, out / name, replace(asked, methods=()))
            begun.append(name)
            count += len(prepared.runs)
            faults += [f"{name}, {fault}" for fault in _complete(screen, prepared, asked)]
            del prepared  # its records, before others are read
    finally:
        _report(screen, table, begun, out, smaller, as_json=as_json)
    raise_faults(faults, count)


def _complete(screen: Screen, prepared: Prepared, asked: RunOptions) -> list[str]:
    """All runs of a setting, and its summary; why some could not go on."""
    faults = train(screen, prepared, asked)
    if _finished(prepared.out):
        report(prepared)
    return faults


def _check_data(data: Path, experiments: Mapping[str, Experiment]) -> None:
    """LocalError of all that is missing for all settings, before anything runs."""
    files = {name: experiment.file for name, experiment in experiments.items()}
    lacking = {name: found for name, file in files.items() if (found := missing(file.data, file.partition))}
    if lacking:
        belongs = dict.fromkeys(what for found in lacking.values() for what in found)
        raise LocalError(
            f"{data}: lacks records of {', '.join(lacking)}; put there the official files, unpacked, or choose other "
            "settings with --setting:" + "".join(f"\n{what}" for what in belongs)
        )


def _report(
    screen: Screen, table: PaperTable, settings: Sequence[str], out: Path, smaller: Sequence[str], *, as_json: bool
) -> None:
    cells = compared(table, {name: _finished(out / name) for name in settings})
    if not cells:
        return
    files = {
        out / f"{table.name}.md": to_markdown(table, cells, smaller),
        out / f"{table.name}.csv": to_csv(table, cells),
    }
    for path, text in files.items():
        write_atomic(path, text.encode(), 0o644)
    if as_json:
        shown = {
            "table": table.path,
            "out": str(out),
            "reduced": smaller,
            "values": [_document(cell) for cell in cells],
        }
        printer.show_json(shown)
        return
    printer.show(printer.PrintedTable(HEADINGS, told(cells, over_silos=table.deviation == "silos")))
    notes = [warning(smaller)] if smaller else []
    screen.show(meaning(table), *notes, f"Notes, and the same as Markdown and CSV: {', '.join(map(str, files))}")


def _finished(folder: Path) -> list[Recorded]:
    return [run for run in load_runs(folder) if run.finished]


def _document(cell: Cell) -> dict[str, Any]:
    return {
        "column": cell.column.name,
        "method": cell.row.title,
        "label": cell.label,
        "score": dict(zip(("measure", "average", "choice"), cell.row.score, strict=True)),
        "published": {"text": cell.value.text, "mean": cell.value.mean, "deviation": cell.value.deviation},
        "ours": None if cell.ours is None else asdict(cell.ours),
        "difference": cell.difference,
    }
