"""What ``staddle simulate`` does: read, deal out, run after run, report."""

import json
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from ..errors import CancelledError, LocalError, UnwritableError
from ..simulator import out_folder
from ..simulator.experiment import Experiment, read
from ..simulator.plan import Population, Run
from ..simulator.population import populate
from ..simulator.recorded import load_runs
from ..simulator.runner import complete
from ..simulator.runs import runs
from ..simulator.stopping import stopping
from ..simulator.workers import Crew, usable_cores
from . import simulate_results
from .simulate_progress import named, shown
from .tables import print_table
from .units import number

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Asked:
    """What the command line says beside the file."""

    out: Path | None
    methods: Sequence[str]
    seeds: Sequence[int]
    rounds: int | None
    workers: int | None
    device: str


def simulate(path: Path, asked: Asked, *, as_json: bool) -> None:
    """All runs that are asked for, and the report of all that the output folder holds."""
    console = Console(stderr=as_json)
    experiment = read(path)
    out = asked.out or path.parent / experiment.name
    population = populate(experiment)
    chosen = runs(experiment, population, asked.methods, asked.seeds, asked.rounds)
    out_folder.check(out, chosen, population, experiment.schedule)
    _tell(console, [_of(population), *population.notes])
    faults = _run(console, out, experiment, population, chosen, asked)
    recorded = load_runs(out)
    if as_json:
        typer.echo(
            json.dumps({"experiment": experiment.name, "out": str(out), "methods": simulate_results.document(recorded)})
        )
    else:
        print_table(simulate_results.COLUMNS, simulate_results.rows(recorded))
    if faults:
        raise LocalError("\n".join(faults))


def _run(
    console: Console,
    out: Path,
    experiment: Experiment,
    population: Population,
    chosen: Sequence[Run],
    asked: Asked,
) -> list[str]:
    """Run after run; what a run could not do is told in the end, and keeps no other from its turn."""
    faults: list[str] = []
    waiting = deque(chosen)
    with stopping(*ENDS) as stop, shown(console, chosen) as watch:
        while waiting:
            with Crew(population.records, asked.workers or usable_cores()) as crew:  # anew after a fault
                faults += _until_fault(
                    waiting, lambda run: complete(out, run, population, experiment.schedule, crew.engine, watch, stop)
                )
    return faults


def _until_fault(waiting: deque[Run], run_it: Callable[[Run], None]) -> list[str]:
    """Runs in turn; of the first that cannot go on, what it said."""
    while waiting:
        run = waiting.popleft()
        try:
            run_it(run)
        except (CancelledError, UnwritableError):
            raise
        except LocalError as error:
            return [f"{named(run)}: {error}"]
    return []


def _of(population: Population) -> str:
    """How many silos and records there are."""
    sizes = [len(own.train) for own in population.records.values()]
    tests = sum(len(own.test) for own in population.records.values())
    return (
        f"{number(len(sizes), 'silo')} with {number(sum(sizes), 'training record')} ({min(sizes):,} to {max(sizes):,}) "
        f"and {number(tests, 'test record')}"
    )


def _tell(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
