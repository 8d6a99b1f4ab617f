"""Measures accuracy against epsilon where silos share their noise.

``python benchmarks/shared_accuracy.py DATA OUT [--folder DIR]``

==============  ==========================================================================
DATA            records, and DIR
==============  ==========================================================================
digits          scikit-learn's 1,797 on four silos; no DIR
mnist           the first 10,000 of MNIST on ten silos; torchvision's layout
hospitals       UCI heart disease, each of the four hospitals a silo; its four files
cifar-features  frozen features of 10,000 pictures on ten silos; benchmarks/frozen_features.py
                makes DIR/cifar10-features.npz
==============  ==========================================================================

Each method runs through ``simulate`` as a private job, by the sums of a blind one, once for each
epsilon and seed, under shared and under local noise, and without privacy; beside them what a silo
trains alone, and FedAvg under the noise of a trusted curator, who needs no silo's share to be left
out. A seed draws the partition (Dirichlet over labels, 0.3; the hospitals are as they are), the
first values and the batches; the noise is never seeded. Accuracy is of each silo's own model on its
own held-out quarter, over all silos' records together.

Writes OUT.csv (a row a run; rows that are there already are not run again) and OUT.svg, and prints
the table of DATA.
"""

import argparse
import csv
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accuracy_chart import Cell, charts, table

from staddle.algorithms.data.dataset import Dataset, digits, split
from staddle.algorithms.data.sources.formats.npz import Npz
from staddle.algorithms.data.sources.public.heart_disease import HOSPITALS, read_heart
from staddle.algorithms.data.sources.public.torchvision_sets import Torchvision
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.partition.draw import dirichlet
from staddle.algorithms.training.accountant import MemoryAccount, PrivateSilo
from staddle.commands.privacy.noise import planned
from staddle.security.blind.plan import simulated
from staddle.security.dp.noise import Randomness

NONE = "none"  # in place of an epsilon
SHARED, LOCAL = {"noise": "shared"}, {}
TEN = tuple(f"silo-{number}" for number in range(1, 11))
ALPHA, MINIMUM, TEST = 0.3, 100, 0.25
COUNT = 10_000  # records that are taken of a large set
DRAWN = ("alone", "fedavg, shared", "fedper, shared", "pfedsim, shared", "fedssa, local")


@dataclass(frozen=True)
class Setting:
    """How a method trains: a learning rate for each epsilon, or one for all."""

    method: str
    lr: tuple[float, float, float, float] | float
    rounds: int
    privacy: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    colluders: int = 1


@dataclass(frozen=True)
class Data:
    """A data set, the model and privacy of its jobs, and how each method trains on it."""

    silos: tuple[str, ...]
    model: dict[str, Any]
    privacy: dict[str, Any]
    settings: dict[str, Setting]


EPSILONS = ("1", "2", "4", "8")


def settings(
    rounds: int,
    alone: tuple[float, float, float, float] | float,
    local: tuple[float, float, float, float] | float,
    steps: int,
    shared: tuple[float, float, float, float] | float,
) -> dict[str, Setting]:
    """Every row of a table: ``rounds`` at rates of local noise, ``steps`` under shared noise.

    What has local noise in a job with shared noise bears smaller steps. pFedSim's last four rounds,
    or four epochs of tuning, have it.
    """
    few = {**SHARED, "local_rate": 0.1}
    late = steps * 7 // 10
    return {
        "alone": Setting("local", alone, rounds),
        "fedavg, shared": Setting("fedavg", shared, steps, SHARED),
        "fedavg, curator": Setting(
            "fedavg", shared, steps, {**SHARED, "dishonest": 0}, colluders=0
        ),
        "fedavg, local": Setting("fedavg", local, rounds),
        "fedper, shared": Setting("fedper", shared, steps, {**SHARED, "local_rate": 0.5}),
        "fedper, local": Setting("fedper", local, rounds),
        "pfedsim, shared": Setting("pfedsim", shared, late + 4, few, {"rho": late / (late + 4)}),
        "pfedsim, local": Setting("pfedsim", local, rounds),
        "fedavg-ft, shared": Setting("fedavg-ft", shared, late, few, {"tuning_epochs": 4}),
        "fedssa, local": Setting("fedssa", alone, rounds, options={"t_stable": rounds // 2}),
    }


# From a few runs on other seeds, for MNIST on other records; some rates are interpolated. A rate is
# that of the mean of gradients that are cut to the clip.
DATA = {
    "digits": Data(
        TEN[:4],
        {"name": "cnn-digits", "classes": 10, "norm": "group"},
        {"delta": 1e-4, "clip": 1.0, "sample_rate": 0.25},
        settings(20, (0.2, 0.3, 0.5, 0.7), (0.2, 0.3, 0.5, 0.8), 120, (0.35, 0.5, 0.9, 1.0)),
    ),
    "mnist": Data(
        TEN,
        {"name": "lenet5", "classes": 10, "norm": "group", "input": (1, 28, 28)},
        {"delta": 1e-5, "clip": 0.5, "sample_rate": 0.1},
        settings(12, (0.8, 0.7, 1.0, 1.4), (0.5, 0.7, 1.0, 1.2), 120, (2.0, 3.0, 4.0, 4.0)),
    ),
    "hospitals": Data(
        HOSPITALS,
        {"name": "mlp", "classes": 2, "input": (1, 1, 22), "options": {"widths": (16,)}},
        {"delta": 1e-3, "clip": 1.0, "sample_rate": 0.25},
        settings(20, (0.2, 0.3, 0.4, 0.6), (0.2, 0.3, 0.4, 0.6), 80, 0.5),
    ),
    "cifar-features": Data(
        TEN,
        {"name": "mlp", "classes": 10, "input": (1, 1, 1280), "options": {"widths": (32,)}},
        {"delta": 1e-5, "clip": 1.0, "sample_rate": 0.1},
        settings(12, (0.1, 0.2, 0.3, 0.4), (0.1, 0.2, 0.3, 0.4), 120, (0.7, 1.3, 2.0, 3.0)),
    ),
}
# Without privacy, where no clip bounds a step: as the demo trains.
PLAIN_ROUNDS, PLAIN = 20, {"epochs": 1, "batch_size": 16, "lr": 0.03, "momentum": 0.9}


@dataclass(frozen=True)
class Run:
    """A row of the CSV file."""

    data: str
    name: str
    epsilon: str
    seed: int
    sigma: str
    correct: int
    tested: int
    seconds: float


def job_of(data: Data, name: str, epsilon: str, seed: int) -> Job:
    """The job of one run, its noise planned."""
    how = data.settings[name]
    document: dict[str, Any] = {
        "version": 1,
        "name": "accuracy",
        "seed": seed,
        "rounds": how.rounds,
        "silos": data.silos,
        "min_cohort": 3,
        "method": {"name": how.method, "options": how.options},
        "model": data.model,
    }
    if epsilon == NONE:
        options = {} if how.method == "pfedsim" else how.options
        document |= {"rounds": PLAIN_ROUNDS, "training": PLAIN}
        document["method"] = {"name": how.method, "options": options}
    else:
        rates = how.lr if isinstance(how.lr, tuple) else (how.lr,) * len(EPSILONS)
        document |= {
            "training": {"epochs": 1, "lr": rates[EPSILONS.index(epsilon)]},
            "security": {"secure_aggregation": "required", "colluders": how.colluders},
            "privacy": {
                "epsilon": float(epsilon),
                "physical_batch": 96,
                **data.privacy,
                **how.privacy,
            },
        }
    return planned(Job.from_file(JobFile.model_validate(document), name), name)


def shards_of(data: Data, records: Dataset, seed: int) -> dict[str, tuple[Dataset, Dataset]]:
    """Training and test records by silo; a record of the hospitals names its own."""
    if records.sources is None:
        parts = dirichlet(records.y.numpy(), len(data.silos), ALPHA, seed, MINIMUM)
    else:
        parts = [np.flatnonzero(np.array(records.sources) == silo) for silo in data.silos]
    context = b"accuracy" if records.sources is None else b"accuracy %d" % seed
    return {
        silo: split(records.take(part), context, TEST)
        for silo, part in zip(data.silos, parts, strict=True)
    }


def run(kind: str, records: Dataset, name: str, epsilon: str, seed: int) -> Run:
    """Simulate one job to its end."""
    data = DATA[kind]
    job, began = job_of(data, name, epsilon, seed), time.perf_counter()
    plain = job.privacy is None
    result = simulate(
        job,
        shards_of(data, records, seed),
        exchanges=None if plain else simulated(job),
        private=None if plain else lambda _: PrivateSilo(MemoryAccount(job), Randomness),
    )
    last = [getattr(reports[-1], job.method().product) for reports in result.history.values()]
    return Run(
        kind,
        name,
        epsilon,
        seed,
        "" if plain else str(job.private.sigma),
        sum(tally.correct for tally in last),
        sum(tally.records for tally in last),
        round(time.perf_counter() - began, 1),
    )


def records_of(kind: str, folder: Path | None) -> Dataset:
    """The records of a data set, all silos' together."""
    if kind == "digits":
        return digits()
    if folder is None:
        raise SystemExit(f"{kind} needs --folder")
    if kind == "hospitals":
        return read_heart(folder, HOSPITALS)
    if kind == "mnist":
        found = Torchvision(kind="torchvision", name="MNIST", folder=folder, part="train").read()
    else:
        found = Npz(file=folder / "cifar10-features.npz").read()
    return Dataset(found.x[:COUNT], found.y[:COUNT])


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


def cells(runs: list[Run]) -> tuple[Cell, ...]:
    """Accuracies by name and epsilon, in the order in which the runs are."""
    found: dict[tuple[str, str], list[float]] = {}
    for one in runs:
        found.setdefault((one.name, one.epsilon), []).append(one.correct / one.tested)
    return tuple(Cell(*key, tuple(values)) for key, values in found.items())


def main() -> None:
    """Parse the arguments, run what is missing, draw the picture, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(DATA["mnist"].settings)
    parser.add_argument("data", choices=DATA)
    parser.add_argument("out", type=Path, help="without ending, such as docs/shared-accuracy")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--names", nargs="+", choices=names, default=names)
    parser.add_argument("--epsilons", nargs="+", default=[*EPSILONS, NONE])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    records, path = records_of(options.data, options.folder), options.out.with_suffix(".csv")
    done = {(one.data, one.name, one.epsilon, one.seed) for one in read(path)}
    for seed in options.seeds:  # seed by seed, so that a grid that was stopped is even
        for epsilon in options.epsilons:
            for name in options.names:
                # Without privacy a method has one row, whosever noise it would be.
                twice = epsilon == NONE and name.endswith((", curator", ", local"))
                wanted = not twice or name.startswith("fedssa")
                if wanted and (options.data, name, epsilon, seed) not in done:
                    made = run(options.data, records, name, epsilon, seed)
                    add(path, made)
                    print(made, flush=True)  # noqa: T201 its progress
    order = {key: place for place, key in enumerate((*names, *EPSILONS, NONE))}
    runs = sorted(read(path), key=lambda one: (order[one.name], order[one.epsilon], one.seed))
    by_data = {kind: [one for one in runs if one.data == kind] for kind in DATA}
    drawn = {
        kind: cells([one for one in own if one.name in DRAWN]) for kind, own in by_data.items()
    }
    options.out.with_suffix(".svg").write_text(charts(drawn))
    print(table(cells(by_data[options.data])))  # noqa: T201 likewise


if __name__ == "__main__":
    main()
