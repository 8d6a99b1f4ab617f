"""Measures accuracy against epsilon.

``python benchmarks/private_accuracy.py digits OUT``, or ``mnist OUT --folder DIR``

Each method runs through ``simulate`` as a private job, once for each epsilon and seed, and without
[privacy]; what a silo trains alone ("local") beside them. A seed draws the partition over four
silos (Dirichlet over labels, 0.3), the first values and which silos take part; the noise is never
seeded. Accuracy is of each silo's own model on its own held-out quarter, over all silos' records
together. All methods have the same settings, those of ``DATA``, and beside them only what the demo
gives them (commands/terminal/job_example.py). Nothing was tuned for one method.

Writes OUT.csv (a row a run; rows that are there already are not run again) and OUT.svg, and prints
the table. "mnist" reads the MNIST folder of torchvision's layout, and takes its first
``--records``.
"""

import argparse
import csv
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from accuracy_chart import Cell, chart, table

from staddle.algorithms.data.dataset import Dataset, digits, split
from staddle.algorithms.data.sources.public.torchvision_sets import Torchvision
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.partition.draw import dirichlet
from staddle.algorithms.training.accountant import MemoryAccount, PrivateSilo
from staddle.commands.privacy.noise import planned
from staddle.commands.terminal.job_example import SETTINGS
from staddle.security.dp.noise import Randomness

METHODS = ("local", "fedavg", "fedsimsup", "fedssa", "ppfl", "fedaims", "pfedsim")
SILOS = ("silo-1", "silo-2", "silo-3", "silo-4")
ALPHA, MINIMUM, TEST = 0.3, 100, 0.25
NONE = "none"  # in place of an epsilon


@dataclass(frozen=True)
class Settings:
    """The same for all methods."""

    records: int
    delta: float
    rounds: int
    epochs: int
    lr: float
    clip: float
    sample_rate: float
    plain_batch: int  # without privacy, where no clip bounds a step
    plain_lr: float
    plain_momentum: float
    histogram: float  # noise of the counts by class: this by epsilon
    statistics: float  # noise of what a method measures: this by epsilon
    statistics_clip: float


@dataclass(frozen=True)
class Data:
    """A data set, and the models that fit it."""

    settings: Settings
    model: dict[str, Any]
    blocks: dict[str, Any]  # for fedaims, which supervises the blocks of a network


@dataclass(frozen=True)
class Run:
    """A row of the CSV file."""

    method: str
    epsilon: str
    seed: int
    sigma: str
    correct: int
    tested: int
    lowest: float  # accuracy of the silo that has the lowest
    seconds: float

    @property
    def key(self) -> tuple[str, str, int]:
        """Which run it is."""
        return self.method, self.epsilon, self.seed


COMMON = Settings(
    records=1797,
    delta=1e-4,
    rounds=20,
    epochs=1,
    lr=0.5,
    clip=1.0,
    sample_rate=0.25,
    plain_batch=16,
    plain_lr=0.03,
    plain_momentum=0.9,
    histogram=10.0,
    statistics=40.0,
    statistics_clip=1.0,
)
DATA = {
    "digits": Data(
        COMMON,
        {"name": "cnn-digits", "classes": 10, "norm": "group"},
        {"name": "convnet-digits", "classes": 10, "norm": "group"},
    ),
    "mnist": Data(
        replace(COMMON, records=8000, delta=1e-5, sample_rate=0.1),
        {"name": "lenet5", "classes": 10, "norm": "group", "input": (1, 28, 28)},
        {"name": "convnet-3x64", "classes": 10, "norm": "group", "input": (1, 28, 28)},
    ),
}


def job_of(data: Data, method: str, epsilon: str, seed: int) -> Job:
    """The job of one run, its noise planned."""
    how, special = data.settings, SETTINGS.get(method, {})
    document: dict[str, Any] = {
        "version": 1,
        "name": "accuracy",
        "seed": seed,
        "rounds": how.rounds,
        "silos": SILOS,
        "participation": special.get("participation", 1.0),
        "method": {"name": method, "options": special.get("options", {})},
        "model": data.blocks if method == "fedaims" else data.model,
        "training": {"epochs": how.epochs, "lr": how.lr},
    }
    if epsilon == NONE:
        document["training"] |= {
            "batch_size": how.plain_batch,
            "lr": how.plain_lr,
            "momentum": how.plain_momentum,
        }
    else:
        document["privacy"] = {
            "epsilon": float(epsilon),
            "delta": how.delta,
            "clip": how.clip,
            "sample_rate": how.sample_rate,
            "histogram_sigma": how.histogram / float(epsilon),
            "statistics_clip": how.statistics_clip,
            "statistics_sigma": how.statistics / float(epsilon),
        }
    return planned(Job.from_file(JobFile.model_validate(document), method), method)


def shards_of(records: Dataset, seed: int) -> dict[str, tuple[Dataset, Dataset]]:
    """Training and test records by silo."""
    parts = dirichlet(records.y.numpy(), len(SILOS), ALPHA, seed, MINIMUM)
    return {
        silo: split(records.take(part), b"accuracy", TEST)
        for silo, part in zip(SILOS, parts, strict=True)
    }


def run(data: Data, records: Dataset, method: str, epsilon: str, seed: int) -> Run:
    """Simulate one job to its end."""
    job, began = job_of(data, method, epsilon, seed), time.perf_counter()
    private = None if job.privacy is None else lambda _: PrivateSilo(MemoryAccount(job), Randomness)
    result = simulate(job, shards_of(records, seed), private=private)
    product = job.method().product
    last = [reports[-1] for reports in result.history.values()]
    return Run(
        method,
        epsilon,
        seed,
        "" if job.privacy is None else str(job.privacy.sigma),
        sum(getattr(report, product).correct for report in last),
        sum(report.tested for report in last),
        round(min(result.scores(product).values()), 4),
        round(time.perf_counter() - began, 1),
    )


class Rows:
    """The CSV file: the settings in a comment, then a row per run, added when the run ends."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path, self._names = path, [field.name for field in fields(Run)]
        head = "# " + ", ".join(f"{name} {value:g}" for name, value in asdict(settings).items())
        if not path.exists():
            path.write_text(f"{head}\n{','.join(self._names)}\n")
        with path.open(newline="") as file:
            if file.readline().rstrip() != head:
                raise SystemExit(
                    f"{path} has rows of other settings; choose another OUT, or remove it"
                )
            self.runs = [Run(**self._typed(row)) for row in csv.DictReader(file)]

    def add(self, made: Run) -> None:
        """Write a row."""
        self.runs.append(made)
        with self._path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(asdict(made).values())

    @staticmethod
    def _typed(row: dict[str, str]) -> dict[str, Any]:
        return {field.name: field.type(row[field.name]) for field in fields(Run)}  # type: ignore[operator]


def cells(runs: Sequence[Run], methods: Sequence[str], epsilons: Sequence[str]) -> Iterator[Cell]:
    """Accuracies by method and epsilon."""
    for method in methods:
        for epsilon in epsilons:
            found = [
                made.correct / made.tested
                for made in runs
                if (made.method, made.epsilon) == (method, epsilon)
            ]
            if found:
                yield Cell(method, epsilon, tuple(found))


def records_of(name: str, folder: Path | None, count: int) -> Dataset:
    """The first records of a data set."""
    if name == "digits":
        return digits()
    if folder is None:
        raise SystemExit("mnist needs --folder, which holds torchvision's MNIST/raw")
    found = Torchvision(kind="torchvision", name="MNIST", folder=folder, part="train").read()
    return Dataset(found.x[:count], found.y[:count])


def main() -> None:
    """Parse the arguments, run what is missing, draw the picture, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", choices=DATA)
    parser.add_argument("out", type=Path, help="without ending, such as docs/private-accuracy")
    parser.add_argument("--folder", type=Path, help="of torchvision's MNIST")
    parser.add_argument("--records", type=int, help="that are taken of mnist")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--epsilons", nargs="+", default=["1", "2", "4", "8", NONE])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = DATA[options.data]
    given = {
        key: value for key in ("records", "rounds") if (value := getattr(options, key)) is not None
    }
    data = replace(data, settings=replace(data.settings, **given))
    records = records_of(options.data, options.folder, data.settings.records)
    rows = Rows(options.out.with_suffix(".csv"), data.settings)
    done = {made.key for made in rows.runs}
    for seed in options.seeds:  # seed by seed, so that a grid that was stopped is even
        for epsilon in options.epsilons:
            for method in options.methods:
                if (method, epsilon, seed) not in done:
                    rows.add(run(data, records, method, epsilon, seed))
                    print(rows.runs[-1], flush=True)  # noqa: T201 its progress
    found = tuple(cells(rows.runs, options.methods, options.epsilons))
    options.out.with_suffix(".svg").write_text(chart(found))
    print(table(found))  # noqa: T201 likewise


if __name__ == "__main__":
    main()
