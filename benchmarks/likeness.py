"""What pFedSim's comparisons and rows tell: ``python benchmarks/likeness.py``.

scikit-learn's 1,797 digits on ten silos, of two classes each or by Dirichlet shares (0.3): pFedSim
as a simulation, the exchanges in the clear, which are those of a blind job but for rounding. Who
reads what:

- The coordinator, the inner products of classifier rows. With ``per_class`` it guesses the holders
  of each class by where their rows lie on the axis along which the silos' rows differ most.
  *First*, of the first round that compares, and *all*, of the mean of all rounds, are the AUC: how
  often a silo with at least a tenth of its records of a class comes before one without any, mean
  over classes, for who knows which end holds it; *lot* is the same of guesses by lot, so more than
  a half. With ``mean`` they are the rank correlation, over pairs, of their cosines and those of
  their label proportions.
- A silo, its rows of the mixing rounds: least squares give the other silos' extractors. *Whole* is
  the correlation with the true one, *own* that of what tells one silo from another, after the mean
  of all is taken away: means over silos.

What is compared is changed before the inner products are taken: vectors in steps of their largest
number ("4 bits"), or with Gaussian noise as long as they are, or twice ("noise 2"); or the inner
products themselves are in steps of 2^-3 ("product 3 bits"), which no blind job can do, since there
whoever multiplies has the exact product. Beside each stands the accuracy of what was trained and of
what came down, over all silos' records.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from staddle.algorithms.data.dataset import Dataset, digits, split
from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.exchange.parts import Gram, Mix, Part, Read
from staddle.algorithms.exchange.plain import PlainExchange
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.methods.pfedsim import PFedSim
from staddle.algorithms.partition.by_label import classes_each
from staddle.algorithms.partition.draw import dirichlet

Reals = NDArray[np.float64]

SILOS = tuple(f"silo-{number}" for number in range(10))
CLASSES = 10
PARTITIONS = ("classes", "dirichlet")
HOLDS = 0.1  # of a silo's records: what counts as holding a class
CHANGES = ("exact", "8 bits", "4 bits", "2 bits", "noise 1", "noise 2", "product 3 bits")
SMALLEST = 1e-12  # by which the numbers of a vector differ that is not constant
LOTS = 50  # drawn to say what guessing by lot has


@dataclass
class Watched(PlainExchange):
    """The exchanges in the clear, which change what is compared and keep what each side reads."""

    change: str
    seed: int
    grams: list[Tensor] = field(default_factory=list)  # [groups, n, n] a round
    given: list[Tensor] = field(default_factory=list)  # [n, elements] a round: the extractors

    def __post_init__(self) -> None:
        super().__init__()
        self._random = torch.Generator().manual_seed(self.seed)

    def collect(self, part: Part, members: Sequence[str], read: Read) -> dict[str, Tensor]:
        """As ``PlainExchange.collect``, of what was changed."""
        if isinstance(part.exchange, Mix):
            flat = [
                torch.cat([read(silo, spec.name).double().reshape(-1) for spec in part.tensors])
                for silo in members
            ]
            self.given.append(torch.stack(flat))
        if not isinstance(part.exchange, Gram):
            return super().collect(part, members, read)
        (spec,) = part.tensors
        vectors = torch.stack(
            [self._changed(read(silo, spec.name).double()) for silo in members], dim=1
        )
        gram = vectors @ vectors.transpose(1, 2)
        if self.change.startswith("product"):
            steps = 2.0 ** int(self.change.split()[1])
            gram = (gram * steps).round() / steps
        self.grams.append(gram)
        return {"gram": gram}

    def _changed(self, vectors: Tensor) -> Tensor:
        """Vectors [groups, d] as they would leave, of length one."""
        what, *rest = self.change.split()
        if what == "noise":
            length = vectors.norm(dim=1, keepdim=True) / vectors.shape[1] ** 0.5
            noise = torch.randn(vectors.shape, generator=self._random, dtype=vectors.dtype)
            vectors = vectors + float(rest[0]) * length * noise
        elif rest == ["bits"]:
            step = vectors.abs().amax(dim=1, keepdim=True) / (2.0 ** (int(what) - 1) - 1)
            vectors = (vectors / step).round() * step
        unit: Tensor = vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-12)
        return unit


def job_of(similarity: str, seed: int, rounds: int) -> Job:
    """PFedSim over all silos in every round, half of them generalisation."""
    document: dict[str, Any] = {
        "version": 1,
        "name": "likeness",
        "seed": seed,
        "rounds": rounds,
        "silos": SILOS,
        "method": {"name": "pfedsim", "options": {"similarity": similarity}},
        "model": {"name": "cnn-digits", "classes": CLASSES},
        "training": {"epochs": 1, "batch_size": 16, "lr": 0.03, "momentum": 0.9},
    }
    return Job.from_file(JobFile.model_validate(document), "likeness")


def shards_of(records: Dataset, partition: str, seed: int) -> dict[str, Records]:
    """Training and test records by silo."""
    labels, n = records.y.numpy(), len(SILOS)
    parts = (
        classes_each(labels, n, 2, seed)
        if partition == "classes"
        else dirichlet(labels, n, 0.3, seed, 40)
    )
    sides = {
        silo: split(records.take(part), b"likeness", 0.25)
        for silo, part in zip(SILOS, parts, strict=True)
    }
    return {silo: Records(*both) for silo, both in sides.items()}


def auc(scores: Reals, held: NDArray[np.bool_], absent: NDArray[np.bool_]) -> float:
    """How often a holder's score is above that of a silo without, ties half."""
    high, low = scores[held][:, None], scores[absent][None, :]
    return float((high > low).mean() + (high == low).mean() / 2)


def axis(gram: Reals) -> Reals:
    """Positions [n] on the axis along which vectors of these inner products [n, n] differ most."""
    centre = np.eye(len(gram)) - 1 / len(gram)
    return np.asarray(np.linalg.eigh(centre @ gram @ centre)[1][:, -1])


def holders(shares: Reals) -> dict[int, tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """By class, of label proportions [n, C]: who holds it, and who has none of it.

    Where there are both.
    """
    found = {number: (share >= HOLDS, share == 0) for number, share in enumerate(shares.T)}
    return {
        number: (held, absent)
        for number, (held, absent) in found.items()
        if held.any() and absent.any()
    }


def holders_found(gram: Tensor, shares: Reals) -> float:
    """Mean AUC over classes.

    ``gram`` are inner products [C, n, n], ``shares`` the silos' label proportions [n, C].
    """
    return fmean(
        told_side(axis(gram[number].numpy()), *sides) for number, sides in holders(shares).items()
    )


def guessed(shares: Reals, seed: int) -> float:
    """The same by lot."""
    random = np.random.default_rng(seed)
    sides = holders(shares).values()
    return fmean(
        told_side(random.normal(size=len(shares)), *each) for each in sides for _ in range(LOTS)
    )


def told_side(scores: Reals, held: NDArray[np.bool_], absent: NDArray[np.bool_]) -> float:
    """The AUC for who knows at which end the holders are."""
    one = auc(scores, held, absent)
    return max(one, 1 - one)


def rank_correlation(gram: Tensor, shares: Reals) -> float:
    """Spearman's correlation, over pairs of silos, of inner products and label cosines.

    ``gram`` is [n, n]; the cosines are those of ``shares``, the label proportions [n, C].
    """
    unit = shares / np.linalg.norm(shares, axis=1, keepdims=True)
    pairs = np.triu_indices(len(shares), 1)
    return correlation(ranks(gram.numpy()[pairs]), ranks((unit @ unit.T)[pairs]))


def ranks(values: Reals) -> Reals:
    """Ranks, those of equal values their mean."""
    _, where, count = np.unique(values.round(9), return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[where]


def correlations(found: Reals, true: Reals) -> Reals:
    """Of each row [n, d] with its own."""
    return np.array([correlation(one, other) for one, other in zip(found, true, strict=True)])


def correlation(one: Reals, other: Reals) -> float:
    """Pearson's; 0 where one of them is constant."""
    constant = min(np.ptp(one), np.ptp(other)) < SMALLEST
    return 0.0 if constant else float(np.corrcoef(one, other)[0, 1])


@dataclass(frozen=True)
class Found:
    """What one run told."""

    first: float  # AUC, or rank correlation, of the first round that compares
    all: float  # the same of the mean of all rounds
    lot: float  # the same of who guesses by lot
    whole: float  # correlation of extractors as solved for, mean over the other silos
    own: float  # the same of what tells one from the others
    trained: float
    delivered: float


def run(
    records: Dataset, partition: str, similarity: str, change: str, seed: int, rounds: int
) -> Found:
    """One simulation, and what the coordinator and the first silo make of it."""
    job, silos, watched = (
        job_of(similarity, seed, rounds),
        shards_of(records, partition, seed),
        Watched(change, seed),
    )
    method = cast(PFedSim, job.method())
    shares = np.stack(
        [np.bincount(own.train.y.numpy(), minlength=CLASSES) for own in silos.values()]
    ).astype(float)
    shares /= shares.sum(axis=1, keepdims=True)
    simulation, weights, rows = Simulation(job, Serial(job, silos), exchanges=watched), [], []
    while simulation.round < job.length:
        last = simulation.step().reports.values()
        if watched.given:
            row = as_shares(method.weights(simulation.coordinator, SILOS[0]))
            weights.append(row[1:])
            rows.append(row[1:] @ watched.given[-1].numpy()[1:])
    true = watched.given[-1].numpy()[1:]
    solved = np.linalg.lstsq(np.array(weights), np.array(rows), rcond=None)[0]
    looked, lot = (watched.grams[0], torch.stack(watched.grams).mean(0)), 0.0
    if similarity == "per_class":
        told = [holders_found(gram, shares) for gram in looked]
        lot = guessed(shares, seed)
    else:
        told = [rank_correlation(gram[0], shares) for gram in looked]
    tested = sum(report.tested for report in last)
    return Found(
        told[0],
        told[1],
        lot,
        float(correlations(solved, true).mean()),
        float(correlations(solved - solved.mean(axis=0), true - true.mean(axis=0)).mean()),
        sum(report.trained.correct for report in last) / tested,
        sum(report.delivered.correct for report in last) / tested,
    )


def as_shares(weights: Mapping[str, float]) -> Reals:
    """A row that adds up to one, in the order of the silos."""
    row = np.array([weights.get(silo, 0.0) for silo in SILOS])
    return np.asarray(row / row.sum())


def main() -> None:
    """Run all, and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=40, help="half of them mix")
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=CHANGES)
    parser.add_argument("--partitions", nargs="+", choices=PARTITIONS, default=PARTITIONS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("trained", "delivered", "first", "all", "lot", "whole", "own")
    print(  # noqa: T201
        f"{'partition':9}  {'similarity':10}  {'compared':14}"
        + "".join(f"{name:>11}" for name in columns)
    )
    for partition in options.partitions:
        for similarity in ("per_class", "mean"):
            for change in options.changes:
                made = [
                    run(digits(), partition, similarity, change, seed, options.rounds)
                    for seed in options.seeds
                ]
                means = (fmean(getattr(one, name) for one in made) for name in columns)
                row = "".join(f"{value:11.3f}" for value in means)
                print(f"{partition:9}  {similarity:10}  {change:14}{row}", flush=True)  # noqa: T201 its result


if __name__ == "__main__":
    main()
