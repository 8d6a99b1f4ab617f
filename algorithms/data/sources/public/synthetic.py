"""PPFL's synthetic population: labels come from a mixture of logistic models per silo.

It follows Marfoq et al., 2021.

θ_k ~ U(−1, 1)^d for each component k; for silo i: n_i = min(⌊LogNormal(4, 2)⌋ + 50, 1000), w_i ~
Dirichlet(α·1), counts by component ~ Multinomial(n_i, w_i), x ~ U(−1, 1)^d, y = round(sigmoid(x·θ_k
+ N(0, σ))).

The published population has 300 silos, K = 3, d = 150, α = 0.4, σ = 0.1 and seed 12345. The
distributions are the same here and the draws are not: they come from this project's streams. Test
records, drawn like the training records and ``tests`` for each silo, are our choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .....errors import LocalError
from ....numerics.streams import stream, uniform
from ...dataset import Dataset

SMALLEST, LARGEST = 50, 1000  # records of a silo
PUBLISHED_SILOS = 300


@dataclass(frozen=True)
class SyntheticDraw:
    """Data for the simulator, and the mixtures and coefficients that they were drawn from.

    Both tensors are float64.
    """

    shards: dict[str, tuple[Dataset, Dataset]]  # silo → (training records, test records)
    mixtures: Tensor  # [N, K] w_i, in the order of the silos
    coefficients: Tensor  # [K, d] θ_k


def population(
    silos: Sequence[str],
    components: int = 3,
    dimension: int = 150,
    alpha: float = 0.4,
    noise: float = 0.1,
    seed: int = 12345,
    tests: int = 100,
    largest: int = LARGEST,
) -> SyntheticDraw:
    """Draw a population; records have shape [1, 1, d], as the network "glm" takes them.

    A silo has at most ``largest`` training records, and ``tests`` test records. ``noise`` is σ,
    which may be 0. LocalError for a number that is out of range.
    """
    if (
        components < 1
        or dimension < 1
        or tests < 1
        or largest < 1
        or not (alpha > 0 and noise >= 0)
    ):
        raise LocalError(
            f"population: components = {components}, dimension = {dimension}, alpha = {alpha},"
            f" noise = {noise}, tests = {tests}, largest = {largest}; give positive values"
        )

    # One stream per silo: its records are the same whatever other silos are drawn with it.
    theta = uniform(stream(seed, "", 0, "synthetic/coefficients"), (components, dimension), -1, 1)
    shards, mixtures = {}, []
    for silo in silos:
        rng = stream(seed, silo, 0, "synthetic/silo")
        # As published: min(⌊LogNormal(4, 2)⌋ + 50, 1000) records.
        size = min(int(rng.lognormal(4, 2)) + SMALLEST, largest)
        mixture = rng.dirichlet(np.full(components, alpha))
        # Training records are drawn first, so they do not depend on the number of test records.
        shards[silo] = (
            _draw(rng, theta, mixture, size, noise),
            _draw(rng, theta, mixture, tests, noise),
        )
        mixtures.append(mixture)
    return SyntheticDraw(shards, torch.from_numpy(np.stack(mixtures)), torch.from_numpy(theta))


def _draw(
    rng: np.random.Generator,
    theta: NDArray[np.float64],
    mixture: NDArray[np.float64],
    size: int,
    noise: float,
) -> Dataset:
    # Records come component by component; training shuffles them.
    component = np.repeat(np.arange(len(theta)), rng.multinomial(size, mixture))  # [n]
    x = rng.uniform(-1, 1, (size, theta.shape[1]))
    # [n]: each record's score by the coefficients of its component.
    score = (x * theta[component]).sum(1) + rng.normal(0, noise, size)
    y = np.round(1 / (1 + np.exp(-score))).astype(np.int64)
    return Dataset(torch.from_numpy(x.astype(np.float32)[:, None, None]), torch.from_numpy(y))
