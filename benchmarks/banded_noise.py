"""Compares banded noise with the independent noise of DP-SGD, at the same cost in epsilon.

``python benchmarks/banded_noise.py noise``, or ``accuracy --folder DIR --records N``

Banded matrix factorisation (Choquette-Choo et al., "(Amplified) Banded Matrix Factorization",
NeurIPS 2023) adds rows of C^-1 Z to the sums of the steps; Z is independent noise, and C a
lower-triangular matrix [steps, steps] with b bands and columns of norm 1, chosen to have little
noise in the sums of all steps so far. The records are dealt into b fixed groups, and step t draws
from group t mod b, each record with probability b q. A record's columns of C do not overlap, so all
steps cost what ⌈steps / b⌉ steps of DP-SGD with rate b q cost (theorem 4 there). b = 1 is DP-SGD.

"noise" is computed, not measured: the root mean square error of the sums so far, in units of the
sum of all steps if all N gradients have the norm of the clip and one direction, times N; for DP-SGD
and for the best number of bands above 1. "accuracy" trains a small network on MNIST, by itself or
by FedAvg over ``--silos``, and tests it on the 10,000 test records. Each row has the learning rate
that is best on these: the same freedom for all rows. The noise is torch's, by seed: it protects
nobody.
"""

import argparse
from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.data.sources.public.torchvision_sets import Torchvision
from staddle.algorithms.job.privacy import Spend
from staddle.security.dp.noise_planner import least_sigma

CLIP, HIDDEN, CLASSES = 1.0, 64, 10
RATES, BANDS = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0), (1, 2, 4, 5, 8, 10, 20)
MOST_STEPS = 1000  # that a strategy is computed for
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """Steps and bands at a rate, for a number of epochs."""

    epochs: int
    q: float
    bands: int

    @property
    def steps(self) -> int:
        """Of the whole job."""
        return round(self.epochs / self.q)

    @property
    def possible(self) -> bool:
        """True if a group has the records that a step draws."""
        return self.q * self.bands < 1 + 1e-9 and self.bands <= self.steps <= MOST_STEPS

    def sigma(self, epsilon: str, delta: float) -> float:
        """The least noise of Z, in clips, that keeps ε at δ."""
        rate, steps = min(self.q * self.bands, 1.0), ceil(self.steps / self.bands)
        return float(
            least_sigma(lambda s: [Spend("training", s, f"{rate:g}", steps)], epsilon, delta)
        )


def banded(values: Tensor, steps: int) -> Tensor:
    """C [steps, steps] of these values along each band [b], columns normalised; float64."""
    bands = [torch.diag(value.expand(steps - k), -k) for k, value in enumerate(values)]
    made = torch.stack(bands).sum(0)
    return made / made.norm(dim=0)


def error(strategy: Tensor) -> Tensor:
    """Mean square error of the sums so far, for noise Z of variance 1."""
    steps = len(strategy)
    sums = torch.ones(steps, steps, dtype=torch.float64).tril()
    noise = torch.linalg.solve_triangular(strategy, sums, upper=False, left=False)
    return noise.square().sum() / steps


@lru_cache
def strategy(steps: int, bands: int) -> Tensor:
    """The best of these C that is found from the square root of the sums' matrix."""
    first, start = torch.ones(1, dtype=torch.float64), [1.0]
    for k in range(1, bands):
        start.append(start[-1] * (2 * k - 1) / (2 * k))
    if bands == 1:
        return banded(first, steps)

    def objective(values: Matrix) -> tuple[float, Matrix]:
        rest = torch.from_numpy(values).requires_grad_()
        value = error(banded(torch.cat([first, rest]), steps))
        value.backward()
        return value.item(), rest.grad.numpy()

    found = minimize(
        objective, np.array(start[1:]), jac=True, method="L-BFGS-B", options={"maxiter": 60}
    )
    return banded(torch.cat([first, torch.from_numpy(found.x)]), steps)


class Noise:
    """Rows of C^-1 Z, one by one; it keeps the b - 1 rows before."""

    def __init__(self, plan: Plan, size: int, random: torch.Generator) -> None:
        self._strategy = strategy(plan.steps, plan.bands)
        self._size, self._random, self._step = size, random, 0
        self._rows: deque[Tensor] = deque(maxlen=plan.bands - 1)

    def row(self) -> Tensor:
        """The next one [size]."""
        t = self._step
        row = torch.randn(self._size, generator=self._random)
        # forward substitution in C x = z
        for k, before in enumerate(reversed(self._rows), 1):
            row -= self._strategy[t, t - k].item() * before
        row /= self._strategy[t, t].item()
        self._rows.append(row)
        self._step += 1
        return row


class Network:
    """Two layers with tanh between; clipped gradients without one gradient per record."""

    def __init__(self, inputs: int, random: torch.Generator) -> None:
        self.weights = [
            torch.randn(HIDDEN, inputs, generator=random) / inputs**0.5,
            torch.zeros(HIDDEN),
            torch.randn(CLASSES, HIDDEN, generator=random) * 0.3 / HIDDEN**0.5,
            torch.zeros(CLASSES),
        ]

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(x @ self.weights[0].T + self.weights[1])
        return hidden, hidden @ self.weights[2].T + self.weights[3]

    def clipped_sum(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Σ of the records' gradients of cross-entropy, each cut to CLIP."""
        hidden, logits = self._forward(x)
        above = logits.softmax(1) - torch.nn.functional.one_hot(y, CLASSES)
        below = (above @ self.weights[2]) * (1 - hidden.square())
        # A layer's gradient of one record is an outer product, so its norm is a product of norms.
        squares = above.square().sum(1) * (hidden.square().sum(1) + 1)
        squares += below.square().sum(1) * (x.square().sum(1) + 1)
        factors = (CLIP / squares.sqrt().clamp(min=CLIP))[:, None]
        above, below = above * factors, below * factors
        return [below.T @ x, below.sum(0), above.T @ hidden, above.sum(0)]

    def accuracy(self, records: Dataset) -> float:
        """In percent."""
        return float((self._forward(records.x)[1].argmax(1) == records.y).double().mean() * 100)


class Silo:
    """SGD with banded noise on one silo's records; the noise goes on from round to round."""

    def __init__(self, plan: Plan, sigma: float, records: Dataset, random: torch.Generator) -> None:
        self._plan, self._sigma, self._records, self._random = plan, sigma, records, random
        self._groups = torch.randint(plan.bands, records.y.shape, generator=random)
        self._noise: Noise | None = None

    def step(self, network: Network, t: int, lr: float) -> None:
        """Step ``t`` of the job, in place."""
        plan, weights, count = self._plan, network.weights, len(self._records.y)
        sizes = [weight.numel() for weight in weights]
        if self._noise is None:
            self._noise = Noise(plan, sum(sizes), self._random)
        drawn = torch.rand(count, generator=self._random) < plan.q * plan.bands
        drawn &= self._groups == t % plan.bands
        sums = network.clipped_sum(self._records.x[drawn], self._records.y[drawn])
        rows = self._noise.row().split(sizes)
        for weight, total, row in zip(weights, sums, rows, strict=True):
            noisy = total + self._sigma * CLIP * row.view_as(weight)
            weight.sub_(lr * noisy / (plan.q * count))


def trained(plan: Plan, sigma: float, lr: float, shards: list[Dataset], seed: int) -> Network:
    """FedAvg over silos of equally many records, an epoch a round; with one silo, plain SGD."""
    random = torch.Generator().manual_seed(seed)
    network = Network(shards[0].x.shape[1], random)
    silos = [Silo(plan, sigma, shard, random) for shard in shards]
    steps = plan.steps // plan.epochs
    for round_ in range(plan.epochs):
        copies = [deepcopy(network) for _ in silos]
        for silo, own in zip(silos, copies, strict=True):
            for step in range(steps):
                silo.step(own, round_ * steps + step, lr)
        models = zip(*(own.weights for own in copies), strict=True)
        network.weights = [torch.stack(parts).mean(0) for parts in models]
    return network


def noise_rows(epochs: int, epsilons: list[str], delta: float) -> Iterator[str]:
    """A row of the table for each rate: DP-SGD, then the best number of bands."""
    for q in RATES:
        plans = [plan for b in BANDS if (plan := Plan(epochs, q, b)).possible]
        if not plans:
            continue
        roots = [error(strategy(plan.steps, plan.bands)).item() ** 0.5 for plan in plans]
        cells = []
        for epsilon in epsilons:
            found = [
                (plan.sigma(epsilon, delta) * root / epochs, plan.bands)
                for plan, root in zip(plans, roots, strict=True)
            ]
            text = f"{found[0][0]:.3f}"
            if found[1:]:
                least, bands = min(found[1:])
                text += f", {least:.3f} (b = {bands})"
            cells.append(text)
        yield f"| {q:g}, {plans[0].steps} steps | " + " | ".join(cells) + " |"


def mnist(folder: Path, part: str) -> Dataset:
    """MNIST, flat, with values of 0 … 1."""
    found = Torchvision(kind="torchvision", name="MNIST", folder=folder, part=part).read()
    return Dataset(found.x.flatten(1), found.y)


def accuracies(options: argparse.Namespace) -> Iterator[str]:
    """A row for each rate and number of bands: mean, least and largest of the seeds, at best lr."""
    train, test = mnist(options.folder, "train"), mnist(options.folder, "test")
    for q, bands in product(options.rates, options.bands):
        plan = Plan(options.epochs, q, bands)
        if not plan.possible:
            continue
        sigma, by_rate = plan.sigma(options.epsilon, options.delta), {}
        for lr in options.lrs:
            by_rate[lr] = []
            for seed in options.seeds:
                random = torch.Generator().manual_seed(seed)
                order = torch.randperm(len(train.y), generator=random)
                parts = order[: options.silos * options.records].split(options.records)
                shards = [Dataset(train.x[part], train.y[part]) for part in parts]
                by_rate[lr].append(trained(plan, sigma, lr, shards, seed).accuracy(test))
        lr, found = max(by_rate.items(), key=lambda item: sum(item[1]))
        mean = sum(found) / len(found)
        yield (
            f"| {q:g} | {bands} | {sigma:.3f} | {lr:g} | {mean:.1f} ({min(found):.1f} to"
            f" {max(found):.1f}) |"
        )


def main() -> None:
    """Parse the arguments and print the rows as they are made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("noise", "accuracy"))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--epsilon", default="8", help="for accuracy")
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--folder", type=Path, help="of torchvision's MNIST")
    parser.add_argument("--silos", type=int, default=1)
    parser.add_argument("--records", type=int, default=6000, help="of each silo")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.25, 1.0])
    parser.add_argument("--bands", type=int, nargs="+", default=[1, 4, 10, 20])
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.25, 0.5, 1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "accuracy" and options.folder is None:
        parser.error("accuracy needs --folder, which holds torchvision's MNIST/raw")
    rows = (
        noise_rows(options.epochs, ["1", "2", "4", "8"], options.delta)
        if options.what == "noise"
        else accuracies(options)
    )
    for row in rows:
        print(row, flush=True)  # noqa: T201 its result


if __name__ == "__main__":
    main()
