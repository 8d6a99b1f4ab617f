"""Measures what a simulated silo costs, and the driver's memory, from few silos to thousands.

``python benchmarks/simulated_silos.py [--silos 100 1000 5000] [--model lenet5] [--engine ray]``

FedAvg on random images, ``--records`` of them a silo; one silo in ``--share`` trains a round, and
all are evaluated after the last. Each number of silos runs in a process of its own, as ``staddle
simulate`` runs it, with a snapshot after each round, and without models at the end. Prints the
seconds per trained silo (median over the rounds but the first), per evaluated silo, how many times
these are those of the first number of silos, and the peak of the driver's resident memory.
"""

import argparse
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.engine import Records
from staddle.algorithms.job.job import Job, JobFile
from staddle.simulator.engines.choose import Cluster, choose
from staddle.simulator.engines.signals import StopSignal
from staddle.simulator.experiment.plan import Population, Run, Schedule
from staddle.simulator.run.history import Measured
from staddle.simulator.run.progress import Doing, Unwatched
from staddle.simulator.run.runner import complete

INPUTS = {"lenet5": [1, 28, 28], "resnet18": [3, 32, 32]}
NORMS = {"resnet18": {"norm": "group"}}


@dataclass(frozen=True)
class SiloCost:
    """Seconds per silo, trained and evaluated, and bytes of the driver."""

    silos: int
    trained: float
    evaluated: float
    peak: int


class Watch(Unwatched):
    """The instants at which rounds and looks begin."""

    def __init__(self) -> None:
        self.at: list[tuple[str, float]] = []

    def work(self, doing: Doing, silos: int) -> None:
        """A stage begins."""
        self.at.append((doing, time.monotonic()))

    def round(self, rounds: int, measured: Sequence[Measured]) -> None:
        """A round is over."""
        self.at.append(("over", time.monotonic()))


def measure(line: "Connection[Any, Any]", silos: int, asked: argparse.Namespace) -> None:
    """Run it in this process, and send its cost."""
    names, shape = [f"silo-{n:05}" for n in range(silos)], INPUTS[asked.model]
    document = {
        "version": 1,
        "name": "bench",
        "seed": 1,
        "rounds": asked.rounds,
        "participation": max(2, round(silos / asked.share)) / silos,
        "silos": names,
        "method": {"name": "fedavg"},
        "model": {"name": asked.model, "classes": 10, "input": shape, **NORMS.get(asked.model, {})},
        "training": {"epochs": 1, "lr": 0.01, "batch_size": asked.records},
    }
    job = Job.from_file(JobFile.model_validate(document), "benchmark")
    made = torch.Generator().manual_seed(1)
    x = torch.randn(asked.records, *shape, generator=made)
    held = Dataset(x, torch.arange(asked.records) % 10)
    records = {name: Records(held, held) for name in names}
    run = Run("fedavg", 1, job)
    population = Population(records, 10, None, "0" * 64)
    schedule, watch = Schedule(asked.rounds, 1, keep_models=False), Watch()
    cluster = Cluster() if asked.engine == "ray" else None
    with (
        tempfile.TemporaryDirectory(dir=asked.place) as out,
        choose(records, "cpu", asked.workers, cluster=cluster) as engines,
    ):
        complete(Path(out), run, population, schedule, engines.engine, watch, StopSignal())
    begun = [at for doing, at in watch.at if doing == "training"]
    (looking, over) = (at for doing, at in watch.at[-2:])
    rounds = [
        after - before for before, after in zip(begun[1:], [*begun[2:], looking], strict=True)
    ]
    cohort = max(2, round(silos / asked.share))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    cost = (statistics.median(rounds) / cohort, (over - looking) / silos, peak)
    line.send(SiloCost(silos, *cost))


def told(costs: Sequence[SiloCost]) -> str:
    """One line per number of silos."""
    first = costs[0]
    return "".join(
        f"{each.silos:>5} silos: {each.trained * 1e3:.1f} ms per trained silo"
        f" ({each.trained / first.trained:.2f} times), {each.evaluated * 1e3:.1f} ms per evaluated"
        f" one ({each.evaluated / first.evaluated:.2f} times), driver {each.peak / 1e9:.2f} GB\n"
        for each in costs
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--silos", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--model", choices=sorted(INPUTS), default="lenet5")
    parser.add_argument("--engine", choices=("local", "ray"), default="ray")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=int, default=50)
    parser.add_argument("--records", type=int, default=32)
    parser.add_argument(
        "--place", help="where results go until the end; default: a temporary folder"
    )
    asked = parser.parse_args()
    # The first is left out: it begins the workers.
    if asked.rounds < 3:
        raise SystemExit("--rounds: give at least 3 rounds")
    costs = []
    for silos in asked.silos:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=measure, args=(theirs, silos, asked))
        process.start()
        theirs.close()
        costs.append(ours.recv())
        process.join()
    sys.stdout.write(told(costs))


if __name__ == "__main__":
    main()
