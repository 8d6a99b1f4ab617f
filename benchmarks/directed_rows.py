"""What directed rows cost pFedSim in accuracy and bytes: ``python benchmarks/directed_rows.py``.

scikit-learn's 1,797 digits on ten silos, of two classes each or by Dirichlet shares (0.3), as a
simulation in three forms: *plain*, *one-upload* (blind, Eq. 4 as in the plain form) and *directed*
(blind, weights one round old over the silos of the round). A fourth, *alone*, mixes nothing after
the generalisation phase (``self_weight`` at its largest).

A row is of one seed, or of all: test accuracy over all silos' records of the models that were
trained last and of those that came down after the last round, how many rows went down and how many
a silo was due, and the bytes that a silo gives in a round that mixes, the rotated classifier rows
left out.

Then what a coordinator and one silo make of that silo's rows in two rounds in a row, of which the
first weighs another silo by a half and the second by nothing: the correlation of what they find
with that silo's extractor, after the mean of all is taken away. Least, mean and most over silos and
rounds.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from likeness import CLASSES, PARTITIONS, SILOS, Watched, correlation, shards_of
from torch import Tensor

from staddle.algorithms.data.dataset import digits
from staddle.algorithms.engines.engine import Serial
from staddle.algorithms.engines.simulation import Simulation, simulate
from staddle.algorithms.exchange.parts import Exchanges, Mix, Part, Read, Tensors
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.job.job import Job, JobFile
from staddle.security.blind.plan import simulated

FORMS = ("plain", "one-upload", "directed", "alone")
LARGEST_SELF = 1e6  # Φ_ii at its largest, beside which no neighbour counts
# a number, and silo
WORD_BYTES = {"plain": 4, "one-upload": 8, "directed": 4 * len(SILOS), "alone": 4}


class Counting:
    """Exchanges that count the rows asked for and made."""

    def __init__(self, inner: Exchanges) -> None:
        self.contribute, self.collect, self._mix = inner.contribute, inner.collect, inner.mix
        self.asked = self.made = 0

    def mix(
        self, part: Part, recipient: str, weights: Mapping[str, float], read: Read
    ) -> dict[str, Tensor] | None:
        """As the exchanges that it counts for."""
        row = self._mix(part, recipient, weights, read)
        self.asked += 1
        self.made += row is not None
        return row

    def mix_rows(
        self, part: Part, rows: Mapping[str, Mapping[str, float]], read: Read
    ) -> Mapping[str, Tensors | None]:
        """As ``mix``."""
        return {silo: self.mix(part, silo, weights, read) for silo, weights in rows.items()}


@dataclass(frozen=True)
class Found:
    """What one run gave."""

    trained: float
    delivered: float
    asked: float
    made: float
    nbytes: float


def job_of(
    form: str, seed: int, rounds: int, participation: float, counts: Mapping[str, int]
) -> Job:
    """PFedSim, half of the rounds generalisation."""
    security: dict[str, Any] = {}
    if form in ("one-upload", "directed"):
        security = {
            "secure_aggregation": "required",
            "mix": form,
            "weights": "public",
            "counts": counts,
        }
    document: dict[str, Any] = {
        "version": 1,
        "name": "rows",
        "seed": seed,
        "rounds": rounds,
        "silos": SILOS,
        "participation": participation,
        "min_cohort": 3,
        "method": {
            "name": "pfedsim",
            "options": {"self_weight": LARGEST_SELF} if form == "alone" else {},
        },
        "model": {"name": "cnn-digits", "classes": CLASSES},
        "training": {"epochs": 1, "batch_size": 16, "lr": 0.03, "momentum": 0.9},
        "security": security,
    }
    return Job.from_file(JobFile.model_validate(document), "rows")


def run(form: str, partition: str, seed: int, rounds: int, participation: float) -> Found:
    """One simulation."""
    shards = {
        silo: (own.train, own.test) for silo, own in shards_of(digits(), partition, seed).items()
    }
    job = job_of(
        form, seed, rounds, participation, {silo: len(train) for silo, (train, _) in shards.items()}
    )
    counting = Counting(simulated(job) if job.security.required else PLAIN)
    last = [reports[-1] for reports in simulate(job, shards, exchanges=counting).history.values()]
    tested = sum(report.tested for report in last)
    (numbers,) = {
        sum(spec.elements for spec in part.tensors)
        for part in job.up(job.length - 1)
        if isinstance(part.exchange, Mix)
    }
    return Found(
        sum(report.trained.correct for report in last) / tested,
        sum(report.delivered.correct for report in last) / tested,
        counting.asked,
        counting.made,
        WORD_BYTES[form] * numbers * (participation if form == "directed" else 1),
    )


def two_rows(partition: str, seed: int, rounds: int) -> list[float]:
    """Correlations by silo and round: how much two rows for the first silo reveal of the others."""
    job, watched = job_of("plain", seed, rounds, 1.0, {}), Watched("exact", seed)
    simulation = Simulation(
        job, Serial(job, shards_of(digits(), partition, seed)), exchanges=watched
    )
    while simulation.round < job.length:
        simulation.step()
    found = []
    for before, after in pairwise(each.numpy()[1:] for each in watched.given):
        mean, rest = before.mean(axis=0), len(before) - 1
        for victim in range(len(before)):
            others = np.ones(len(before)) / rest
            others[victim] = 0
            first, second = (others @ before + before[victim]) / 2, others @ after
            found.append(correlation(2 * first - second - mean, before[victim] - mean))
    return found


def shown(name: str, runs: Sequence[Found]) -> str:
    """One line: means, and the spread of the accuracies."""
    trained, delivered, asked, made, nbytes = map(fmean, zip(*map(astuple, runs), strict=True))
    spread = stdev(each.trained for each in runs) if len(runs) > 1 else 0.0
    return (
        f"{name:24}{trained:9.4f} ±{spread:.4f}{delivered:11.4f}{made:8.0f} of"
        f" {asked:.0f}{nbytes:12.0f}"
    )


def main() -> None:
    """Run all, and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=30, help="half of them mix")
    parser.add_argument("--participation", type=float, default=1.0)
    parser.add_argument("--partitions", nargs="+", choices=PARTITIONS, default=PARTITIONS)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':24}{'trained':>17}{'delivered':>11}{'rows':>13}{'bytes':>12}")  # noqa: T201 its result
    for partition in options.partitions:
        for form in options.forms:
            made = [
                run(form, partition, seed, options.rounds, options.participation)
                for seed in options.seeds
            ]
            print(shown(f"{partition} {form}", made), flush=True)  # noqa: T201 its result
        told = [
            each for seed in options.seeds for each in two_rows(partition, seed, options.rounds)
        ]
        name = f"{partition} two rows"
        print(f"{name:24}{min(told):9.2f}{fmean(told):9.2f}{max(told):9.2f}", flush=True)  # noqa: T201 its result


if __name__ == "__main__":
    main()
