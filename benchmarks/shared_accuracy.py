"""Measures accuracy against epsilon where silos share their noise.

``python benchmarks/shared_accuracy.py OUT --folder DIR``

DIR is MNIST in torchvision's layout, of which the first 10,000 records go to ten silos (Dirichlet
over labels, 0.3). Each method runs through ``simulate`` as a private job, by the sums of a blind
one, once for each epsilon and seed. Beside them stand what a silo trains alone under local noise of
the same epsilon, FedAvg under local noise, and FedAvg under the noise of a trusted curator, who
needs no silo's share to be left out. A seed draws the partition, the first values and the batches;
the noise is never seeded. Accuracy is of each silo's own model on its own held-out quarter, over
all silos' records together.

``SETTINGS`` were chosen on other seeds and other records. Writes OUT.csv (a row a run; rows that
are there already are not run again) and prints the table.
"""

import argparse
import csv
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accuracy_chart import Cell, table

from staddle.algorithms.data.dataset import Dataset, split
from staddle.algorithms.data.sources.public.torchvision_sets import Torchvision
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.partition.draw import dirichlet
from staddle.algorithms.training.accountant import MemoryAccount, PrivateSilo
from staddle.commands.privacy.noise import planned
from staddle.security.blind.plan import simulated
from staddle.security.dp.noise import Randomness

SILOS = tuple(f"silo-{number}" for number in range(1, 11))
RECORDS, ALPHA, MINIMUM, TEST = 10_000, 0.3, 100, 0.25
DELTA, CLIP, RATE = 1e-5, 0.5, 0.1
SHARED = {"noise": "shared"}


@dataclass(frozen=True)
class Setting:
    """A method, and how it trains: learning rates by epsilon, or one for all."""

    method: str
    lr: dict[str, float] | float
    rounds: int
    options: dict[str, Any]
    privacy: dict[str, Any]
    training: dict[str, Any]
    colluders: int = 1


# Steps: ten in a round of local noise, one in a round of shared noise. A rate is that of the mean
# of gradients that are cut to CLIP.
SETTINGS = {
    "alone": Setting("local", {"1": 0.8, "2": 0.7, "4": 1.0, "8": 1.4}, 12, {}, {}, {}),
    "fedavg, local noise": Setting("fedavg", 1.0, 12, {}, {}, {}),
    "fedssa, local noise": Setting(
        "fedssa", {"1": 0.8, "2": 0.7, "4": 1.0, "8": 1.4}, 12, {"t_stable": 6}, {}, {}
    ),
    "fedavg": Setting("fedavg", 4.0, 120, {}, SHARED, {}),
    "fedavg, curator": Setting("fedavg", 4.0, 120, {}, {**SHARED, "dishonest": 0}, {}, colluders=0),
    # What has local noise bears smaller steps.
    "fedper": Setting("fedper", 4.0, 120, {}, {**SHARED, "local_rate": 0.5}, {}),
    # Four rounds of its second phase, or four epochs of tuning, at a tenth of the rate.
    "pfedsim": Setting("pfedsim", 4.0, 88, {"rho": 0.955}, {**SHARED, "local_rate": 0.1}, {}),
    "fedavg-ft": Setting(
        "fedavg-ft", 4.0, 84, {"tuning_epochs": 4}, {**SHARED, "local_rate": 0.1}, {}
    ),
}


@dataclass(frozen=True)
class Run:
    """A row of the CSV file."""

    name: str
    epsilon: str
    seed: int
    sigma: str
    correct: int
    tested: int
    seconds: float


def job_of(name: str, epsilon: str, seed: int) -> Job:
    """The job of one run, its noise planned."""
    how = SETTINGS[name]
    lr = how.lr if isinstance(how.lr, float) else how.lr[epsilon]
    privacy = {"epsilon": float(epsilon), "delta": DELTA, "clip": CLIP, "sample_rate": RATE}
    document = {
        "version": 1,
        "name": "accuracy",
        "seed": seed,
        "rounds": how.rounds,
        "silos": SILOS,
        "min_cohort": 3,
        "method": {"name": how.method, "options": how.options},
        "model": {"name": "lenet5", "classes": 10, "norm": "group", "input": (1, 28, 28)},
        "training": {"epochs": 1, "lr": lr, **how.training},
        "security": {"secure_aggregation": "required", "colluders": how.colluders},
        "privacy": {**privacy, **how.privacy, "physical_batch": 64},
    }
    return planned(Job.from_file(JobFile.model_validate(document), name), name)


def run(records: Dataset, name: str, epsilon: str, seed: int) -> Run:
    """Simulate one job to its end."""
    job, began = job_of(name, epsilon, seed), time.perf_counter()
    parts = dirichlet(records.y.numpy(), len(SILOS), ALPHA, seed, MINIMUM)
    shards = {
        silo: split(records.take(part), b"accuracy", TEST)
        for silo, part in zip(SILOS, parts, strict=True)
    }
    result = simulate(
        job,
        shards,
        exchanges=simulated(job),
        private=lambda _: PrivateSilo(MemoryAccount(job), Randomness),
    )
    last = [getattr(reports[-1], job.method().product) for reports in result.history.values()]
    return Run(
        name,
        epsilon,
        seed,
        str(job.private.sigma),
        sum(tally.correct for tally in last),
        sum(tally.records for tally in last),
        round(time.perf_counter() - began, 1),
    )


def read(path: Path) -> list[Run]:
    """The runs that are there already."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        Run(**{field.name: field.type(row[field.name]) for field in fields(Run)})  # type: ignore[operator]
        for row in rows
    ]


def add(path: Path, made: Run) -> None:
    """Write a row, under a head if it is the first."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(made)), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(asdict(made))


def cells(runs: list[Run], names: list[str], epsilons: list[str]) -> tuple[Cell, ...]:
    """Accuracies by name and epsilon."""
    found = []
    for name in names:
        for epsilon in epsilons:
            own = [one for one in runs if (one.name, one.epsilon) == (name, epsilon)]
            if own:
                found.append(Cell(name, epsilon, tuple(one.correct / one.tested for one in own)))
    return tuple(found)


def main() -> None:
    """Parse the arguments, run what is missing, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="without ending, such as docs/shared-accuracy")
    parser.add_argument("--folder", type=Path, required=True, help="of torchvision's MNIST")
    parser.add_argument("--names", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--epsilons", nargs="+", default=["1", "2", "4", "8"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = Torchvision(
        kind="torchvision", name="MNIST", folder=options.folder, part="train"
    ).read()
    records, path = Dataset(found.x[:RECORDS], found.y[:RECORDS]), options.out.with_suffix(".csv")
    runs = read(path)
    done = {(one.name, one.epsilon, one.seed) for one in runs}
    for seed in options.seeds:  # seed by seed, so that a grid that was stopped is even
        for epsilon in options.epsilons:
            for name in options.names:
                if (name, epsilon, seed) not in done:
                    runs.append(run(records, name, epsilon, seed))
                    add(path, runs[-1])
                    print(runs[-1], flush=True)  # noqa: T201 its progress
    print(table(cells(runs, options.names, options.epsilons)))  # noqa: T201 likewise


if __name__ == "__main__":
    main()
