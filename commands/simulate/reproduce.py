"""``staddle reproduce``: a published table, run here and shown next to the paper's values."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import LocalError
from ...files.documents import write_atomic
from ...simulator.engines.choose import OnGpu
from ...simulator.experiment.experiment import CheckedExperiment
from ...simulator.report.finished_runs import finished_runs, load_runs
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
from ...simulator.reproduce.published import PaperTable, find
from ..terminal import printer
from ..terminal.device_options import Device, Graphs, OneByOne, Precision, Workers
from ..terminal.printer import Screen
from . import published
from .simulate import Prepared, RunOptions, prepare, raise_faults, report, train


def reproduce(
    table: Annotated[
        str | None,
        typer.Argument(metavar="PAPER/TABLE", help="Such as pfedsim/table3; --list names them."),
    ] = None,
    listed: Annotated[
        bool,
        typer.Option(
            "--list", help="List the tables, or show settings and values of the one that is named."
        ),
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Holds the data sets, each where --list says that it belongs."
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this setting; may be given again."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL", help="Only this method, and Local and FedRep; may be given again."
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Only so many of the paper's clients, each with its own records."
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Instead of the paper's rounds.")
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", help="Instead of 1, 2, … as many as in the paper; may be given again."
        ),
    ] = None,
    workers: Workers = None,
    device: Device = "auto",
    graphs: Graphs = True,
    one_by_one: OneByOne = False,
    precision: Precision = "float32",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where results go; left out, a folder here, named as the paper."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what is shown as JSON, for scripts.")
    ] = False,
) -> None:
    """Run a published table, and show it next to the paper's values.

    It runs setting by setting, always with Local and FedRep. After a stop or a kill, the same
    command resumes. Finished runs are not repeated.
    """
    # before the checks: listing the tables needs no data sets
    if listed:
        published.show(table, data, as_json=as_json)
        return
    if table is None:
        raise LocalError(
            "which table? Name it, such as pfedsim/table3; staddle reproduce --list shows all"
        )
    if data is None:
        raise LocalError(f"{table}: --data DIR is missing, the folder with the data sets")
    gpu = OnGpu(graphs=graphs, stacked=not one_by_one, precision=precision)
    asked = RunOptions(out, tuple(method or ()), tuple(seed or ()), rounds, workers, device, gpu)
    _run(table, data, tuple(setting or ()), clients, asked, as_json=as_json)


def _run(
    path: str,
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
    table = find(path)
    # Unknown names fail before records are read.
    settings, labels = chosen_settings(table, wanted), chosen_labels(table, asked.methods)
    scale = Scale(clients, asked.rounds)
    experiments = {
        setting.name: experiment_of(table, setting, data, scale, labels, asked.seeds)
        for setting in settings
    }

    # Missing data is reported now, not after earlier settings have run.
    _check_data(data, experiments)
    out = asked.out or Path(table.paper)
    # Values at a smaller scale do not compare with the paper's.
    smaller = reduced(settings, scale)
    if smaller:
        screen.show(warning(smaller))
    begun: list[str] = []  # the others' folders may hold runs at another scale
    faults, count = [], 0
    try:
        for name, experiment in experiments.items():
            screen.show(
                f"{name}: {', '.join(method.title for method in experiment.file.all_methods)}"
            )
            # The labels were chosen above, so ``methods`` must not filter again.
            prepared = prepare(screen, experiment, out / name, replace(asked, methods=()))
            _check_scale(prepared)
            begun.append(name)
            # Runs that were reached, for the error on faults.
            count += len(prepared.runs)
            faults += [f"{name}, {fault}" for fault in _complete(screen, prepared, asked)]
            del prepared  # its records, before others are read
    finally:
        # Also after Ctrl-C: show what is finished.
        _report(screen, table, begun, out, smaller, as_json=as_json)
    raise_faults(faults, count)


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


def _complete(screen: Screen, prepared: Prepared, asked: RunOptions) -> list[str]:
    """All runs of a setting, and its summary; why some could not continue."""
    faults = train(screen, prepared, asked)
    # No summary without a finished run.
    if finished_runs(prepared.out):
        report(prepared)
    return faults


def _check_data(data: Path, experiments: Mapping[str, CheckedExperiment]) -> None:
    """Raise LocalError for all that is missing for all settings, before anything runs."""
    lacking = {}
    for name, experiment in experiments.items():
        file = experiment.file
        # Check all settings, so that the error names everything to fetch.
        if found := missing(file.data, file.partition):
            lacking[name] = found
    if not lacking:
        return
    fault = (
        f"{data}: lacks records of {', '.join(lacking)}; put there the official files,"
        " unpacked, or choose other settings with --setting:"
    )
    belongs = dict.fromkeys(chain.from_iterable(lacking.values()))
    raise LocalError("\n".join([fault, *belongs]))


def _report(
    screen: Screen,
    table: PaperTable,
    settings: Sequence[str],
    out: Path,
    smaller: Sequence[str],
    *,
    as_json: bool,
) -> None:
    cells = compared(table, {name: finished_runs(out / name) for name in settings})
    # No finished run has a place in the table.
    if not cells:
        return
    files = {
        out / f"{table.name}.md": to_markdown(table, cells, smaller),
        out / f"{table.name}.csv": to_csv(table, cells),
    }
    for path, text in files.items():
        write_atomic(path, text.encode(), 0o644)

    # the files are written whatever is printed, so that a script's run leaves them too
    if as_json:
        shown = {
            "table": table.path,
            "out": str(out),
            "reduced": smaller,
            "values": [_document(cell) for cell in cells],
        }
        printer.show_json(shown)
        return
    printer.show(
        printer.PrintedTable(HEADINGS, table_rows(cells, over_silos=table.deviation == "silos"))
    )
    notes = [warning(smaller)] if smaller else []
    screen.show(
        meaning(table),
        *notes,
        f"Notes, and the same as Markdown and CSV: {', '.join(map(str, files))}",
    )


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
