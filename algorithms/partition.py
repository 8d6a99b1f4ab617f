"""Splitting one data set over simulated silos, unevenly by label (Hsu et al., 2019, arXiv:1909.06335).

For each class, the silos' shares of its records are one draw from a symmetric Dirichlet(alpha): alpha 0.1 leaves a
silo with one or two classes, alpha 100 is nearly even.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..errors import LocalError
from .streams import permutation, stream

REDRAWS = 20  # as in the common recipe a draw with too small a silo is thrown away, but not for ever
SMALLEST_ALPHA = 1e-3  # below it one silo gets each class whole, and gamma variates underflow


def dirichlet(
    labels: NDArray[np.int64], silos: int, alpha: float, seed: int, minimum: int = 10
) -> list[NDArray[np.int64]]:
    """Ascending record indices per silo: each record exactly once, at least ``minimum`` records a silo.

    After ``REDRAWS`` draws with a silo below the minimum, the last draw is kept and the largest silo hands records
    to the smallest until none is below.
    """
    if silos < 1 or minimum < 0 or not SMALLEST_ALPHA <= alpha < float("inf"):
        raise LocalError(f"partition: silos = {silos}, alpha = {alpha}, minimum = {minimum}; give positive values")
    if silos * minimum > len(labels):
        raise LocalError(
            f"partition: {len(labels)} records do not give {silos} silos {minimum} each; "
            f"take at most {len(labels) // max(minimum, 1)} silos or a lower minimum"
        )
    rng = stream(seed, "", 0, "partition/dirichlet")
    for _ in range(REDRAWS):
        shards = _draw(labels, silos, alpha, rng)
        if min(len(shard) for shard in shards) >= minimum:
            break
    _level(shards, minimum)
    return [np.array(sorted(shard), dtype=np.int64) for shard in shards]


def _draw(labels: NDArray[np.int64], silos: int, alpha: float, rng: np.random.Generator) -> list[list[int]]:
    shards: list[list[int]] = [[] for _ in range(silos)]
    for label in np.unique(labels):
        records = np.flatnonzero(labels == label)
        records = records[permutation(rng, len(records))]
        shares = rng.dirichlet(np.full(silos, alpha))
        cuts = [0, *(np.cumsum(shares)[:-1] * len(records)).astype(int).tolist(), len(records)]
        for shard, (start, stop) in zip(shards, pairwise(cuts), strict=True):
            shard.extend(records[start:stop].tolist())
    return shards


def _level(shards: list[list[int]], minimum: int) -> None:
    """Move records one by one from the largest shard to the smallest; ties go to the earlier silo."""
    sizes = [len(shard) for shard in shards]
    while min(sizes) < minimum:
        source, target = sizes.index(max(sizes)), sizes.index(min(sizes))
        shards[target].append(shards[source].pop())
        sizes[source] -= 1
        sizes[target] += 1
