"""``staddle simulate``: an experiment of many silos, one run after another."""

import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import filterfalse
from pathlib import Path
from typing import Annotated

import typer

from ...algorithms.data.options import SourceTable
from ...errors import CancelledError, LocalError, UnwritableError
from ...simulator.engines.choose import Cluster, Engines, OnGpu, choose
from ...simulator.engines.signals import stopping
from ...simulator.experiment.experiment import CheckedExperiment, read
from ...simulator.experiment.plan import Population, Run
from ...simulator.experiment.population import populate
from ...simulator.experiment.runs import chosen_methods, runs
from ...simulator.report.finished_runs import by_label, finished_runs
from ...simulator.report.ranking import rank, rows
from ...simulator.report.report import write_report
from ...simulator.report.style import NOT_DRAWN, can_draw
from ...simulator.run import out_folder
from ...simulator.run.runner import complete
from ...simulator.tracking.choose import TrackerName, check_installed, tracking
from ..terminal import printer
from ..terminal.device_options import (
    Address,
    Device,
    EngineName,
    Graphs,
    OneByOne,
    Precision,
    Workers,
    cluster,
)
from ..terminal.output import number
from ..terminal.printer import Screen
from . import results
from .progress import shown

# SIGHUP as well: closing the terminal is like Ctrl-C, and the same command resumes. Windows has
# none.
ENDS = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
MOST_TOLD = 3  # runs that could not continue, in the error at the end


@dataclass(frozen=True)
class RunOptions:
    """Options of the command line, next to the experiment file.

    ``rounds`` None leaves them to the file, ``workers`` None to the machine.
    """

    out: Path | None
    methods: Sequence[str]
    seeds: Sequence[int]
    rounds: int | None
    workers: int | None
    device: str
    gpu: OnGpu
    track: Sequence[TrackerName] = ()
    cluster: Cluster | None = None


@dataclass(frozen=True, eq=False)
class Prepared:
    """Runs of an experiment that can begin, or resume, in their output folder.

    The records are in memory; nothing is trained or written yet.
    """

    experiment: CheckedExperiment
    out: Path
    population: Population
    runs: Sequence[Run]


def simulate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.toml",
            help="The experiment: a job file with data, a partition, methods; staddle simulate init"
            " FILE.toml writes an example.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where results go. Default: a folder next to FILE, named after the experiment.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="Only this method of FILE; may be given again."),
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Instead of FILE's seeds; may be given again."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Instead of FILE's rounds; more lengthen a run."),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Instead of FILE's, such as training.lr=0.05; may be given again.",
        ),
    ] = None,
    workers: Workers = None,
    device: Device = "auto",
    graphs: Graphs = True,
    one_by_one: OneByOne = False,
    precision: Precision = "float32",
    engine: EngineName = "local",
    address: Address = None,
    track: Annotated[
        list[TrackerName] | None,
        typer.Option(help="Show runs in this tool, too; may be given again."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON, for scripts.")
    ] = False,
) -> None:
    """Run an experiment on this machine, and compare its methods.

    Each method runs with each seed, on the same silos. After a stop or a kill, the same command
    resumes, and the results are byte-identical. Finished runs are not repeated; with more rounds
    they continue from their last one. Results, curves and a summary are in DIR.
    """
    gpu = OnGpu(graphs=graphs, stacked=not one_by_one, precision=precision)
    asked = RunOptions(
        out=out,
        methods=tuple(method or ()),
        seeds=tuple(seed or ()),
        rounds=rounds,
        workers=workers,
        device=device,
        gpu=gpu,
        track=track or (),
        cluster=cluster(engine, address),
    )

    # before records are read and dealt out, which can take minutes
    check_installed(asked.track)

    screen = Screen(err=as_json)
    # An error in the file shows before the records are read.
    experiment = read(file, setting or ())
    prepared = prepare(screen, experiment, asked.out or file.parent / experiment.name, asked)

    # a run that failed does not hide the results of the others: the report comes first
    faults = train(screen, prepared, asked)
    _report(screen, prepared, as_json=as_json)
    raise_faults(faults, len(prepared.runs))


def prepare(
    screen: Screen, experiment: CheckedExperiment, out: Path, asked: RunOptions
) -> Prepared:
    """Read the records and deal them out; LocalError where the folder is of other runs.

    It takes minutes for large data sets. Nothing is written to ``out``.
    """
    # refused before records are read, which may take a while
    chosen_methods(experiment, asked.methods)
    _check_apart(out, experiment.file.data)
    with screen.waiting("records are read and dealt out"):
        population = populate(experiment)
    chosen = runs(experiment, population, asked.methods, asked.seeds, asked.rounds)
    # Do not overwrite results of other runs, or mix them with these.
    out_folder.check(out, chosen, population, experiment.schedule)
    return Prepared(experiment, out, population, chosen)


def _check_apart(out: Path, data: SourceTable) -> None:
    """LocalError for a folder of results among the records, where these fill their folder."""
    places = (out.resolve(), *out.resolve().parents)
    if data.fills_folder and Path(data.where).resolve() in places:
        raise LocalError(
            f"{out}: is the folder of the records, or in it; choose another by --out, or another"
            " name for the experiment"
        )


def train(screen: Screen, prepared: Prepared, asked: RunOptions) -> list[str]:
    """Complete run after run; returns why some could not continue.

    Finished runs are skipped. CancelledError once a signal asked for the end; the same command
    resumes.
    """
    population, schedule = prepared.population, prepared.experiment.schedule
    # Engines are made again after a fault.
    engines = partial(
        choose, population.records, asked.device, asked.workers, asked.gpu, asked.cluster
    )
    with engines() as made:
        screen.show(f"{_of(population)}, trained by {made.where}", *population.notes)
    with stopping(*ENDS) as stop, shown(screen, prepared.runs) as watch:

        def go_on(run: Run, made: Engines) -> None:
            complete(
                prepared.out,
                run,
                population,
                schedule,
                made.engine,
                watch,
                stop,
                device=made.device,
                track=partial(tracking, asked.track),
            )

        return _each(screen, prepared.runs, engines, go_on)


def report(prepared: Prepared) -> Path:
    """Write the report on all runs in the folder; returns the path of its summary.

    It covers runs of earlier commands, too.
    """
    summary, *_ = write_report(
        prepared.out,
        prepared.population,
        _labels(prepared),
        prepared.experiment.variants,
    )
    return summary


def raise_faults(faults: Sequence[str], count: int) -> None:
    """LocalError of the runs that could not continue, if there were some.

    Call it last, after the results of the others were shown.
    """
    if faults:
        told = list(faults[:MOST_TOLD])
        # Each was shown when it happened; dozens of a sweep hide the first.
        if len(faults) > MOST_TOLD:
            told.append(f"and {len(faults) - MOST_TOLD} more, as shown above")
        raise LocalError(
            f"{number(len(faults), 'run')} of {count} could not continue: {'; '.join(told)}"
        )


def _each(
    screen: Screen,
    chosen: Sequence[Run],
    engines: Callable[[], Engines],
    go_on: Callable[[Run, Engines], None],
) -> list[str]:
    """Run after run; a fault ends only its own run.

    Returns why runs could not continue; each fault is also shown when it happens.
    """
    faults: list[str] = []
    waiting = deque(chosen)
    while waiting:
        with engines() as made:  # new ones after a fault, which may have ended worker processes
            while waiting:
                run = waiting.popleft()
                try:
                    go_on(run, made)
                # These two end all runs: a signal came, or the disk does not take any more.
                except (CancelledError, UnwritableError):
                    raise
                except LocalError as error:
                    faults.append(f"{run.title}: {error}")
                    screen.show(faults[-1])
                    break
    return faults


def _report(screen: Screen, prepared: Prepared, *, as_json: bool) -> None:
    labels, finished = _labels(prepared), finished_runs(prepared.out)
    if not finished:
        return
    summary = report(prepared)
    # In the file's order; labels that the file no longer has come last.
    finished.sort(key=lambda run: labels.index(run.label) if run.label in labels else len(labels))
    ranking = rank(by_label(finished), prepared.experiment.variants)
    if as_json:
        sweep = {"sweep": rows(ranking)} if ranking else {}
        methods = results.document(finished)
        printer.show_json({"out": str(prepared.out), "methods": methods, **sweep})
        return
    if ranking:
        best = results.best_table(ranking, finished[0].form)
        printer.show(printer.PrintedTable(best.columns, best.rows))
        screen.show(best.meaning)
        outranked = ranking.outranked
        finished = list(filterfalse(lambda run: run.label in outranked, finished))
    table = results.results_table(finished)
    printer.show(printer.PrintedTable(table.columns, table.rows))
    screen.show(f"{table.meaning}; all measures, and pictures: {summary}")
    if not can_draw():
        screen.show(NOT_DRAWN)


def _labels(prepared: Prepared) -> list[str]:
    return [method.title for method in prepared.experiment.file.all_methods]


def _of(population: Population) -> str:
    """How many silos and records there are."""
    sizes = [len(own.train) for own in population.records.values()]
    tests = sum(len(own.test) for own in population.records.values())
    return (
        f"{number(len(sizes), 'silo')} with {number(sum(sizes), 'training record')} ({min(sizes):,}"
        f" to {max(sizes):,}) and {number(tests, 'test record')}"
    )
