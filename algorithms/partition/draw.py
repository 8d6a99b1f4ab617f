"""Splitting one data set over simulated silos, unevenly by label.

Yurochkin et al., 2019, arXiv:1905.12022, section 4. For each class c, the silos' shares of its
records are one draw p_c ~ Dir(α 1_n): α = 0.1 leaves a silo with one or two classes, α = 100 is
nearly even. In the balanced form, which the code of that paper, NIID-Bench (Li et al., 2021,
arXiv:2102.02079) and PFLlib has, a silo that has as many records as an even share gets none of the
classes that follow. ``conventions`` has other forms, and that of peers to the record.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from ...errors import LocalError, check_local
from ..numerics.streams import permutation, stream

# draws with too small a silo that are thrown away
REDRAWS = 20
SMALLEST_ALPHA = 1e-3  # below it one silo gets each class whole, and gamma variates underflow


def dirichlet(
    labels: NDArray[np.int64],
    silos: int,
    alpha: float,
    seed: int,
    minimum: int = 10,
    *,
    balanced: bool = False,
) -> list[NDArray[np.int64]]:
    """Ascending record indices per silo: each record once, at least ``minimum`` records per silo.

    ``balanced``: classes in ascending order, each over the silos that have fewer than len(labels) /
    silos records so far, in proportion to their shares. Sizes differ less then, and each silo has
    fewer classes.

    After ``REDRAWS`` draws with a silo below the minimum, the last draw is kept and the largest
    silo hands records to the smallest until none is below.
    """
    check_alpha(alpha)
    check_enough(len(labels), silos, minimum)
    rng = stream(seed, "", 0, "partition/dirichlet")

    # The common recipe redraws for ever, which at a low alpha with many silos never ends.
    for _ in range(REDRAWS):
        shards = _draw(labels, silos, alpha, rng, balanced)
        if min(map(len, shards)) >= minimum:
            break
    _level(shards, minimum)
    # Ascending, like the parts of all other kinds.
    return [np.array(sorted(shard), dtype=np.int64) for shard in shards]


def _draw(
    labels: NDArray[np.int64], silos: int, alpha: float, rng: np.random.Generator, balanced: bool
) -> list[list[int]]:
    shards: list[list[int]] = [[] for _ in range(silos)]
    full = len(labels) / silos if balanced else inf  # a silo with so many records takes no more
    for label in np.unique(labels):
        records = np.flatnonzero(labels == label)
        records = records[permutation(rng, len(records))]
        # NumPy may change this draw between releases; a partition file keeps its result.
        shares = rng.dirichlet(np.full(silos, alpha))
        takers = [i for i, shard in enumerate(shards) if len(shard) < full]
        # Until a silo is full, balanced and unbalanced draws are the same.
        theirs = shares
        if len(takers) < silos:
            theirs = scaled(shares[takers], np.ones(len(takers), bool))
        for taker, own in zip(takers, cut(records, theirs), strict=True):
            shards[taker].extend(own.tolist())
    return shards


def scaled(shares: NDArray[np.float64], takers: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Shares that sum to 1; where all are 0, equal ones of those that may take some."""
    # At a low alpha the shares of all silos that are not full may underflow to 0.
    if not shares.any():
        shares = takers.astype(np.float64)
    whole: NDArray[np.float64] = shares / shares.sum()
    return whole


def cut(records: NDArray[np.int64], shares: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """Consecutive pieces of ``records``, one per share; the shares sum to 1.

    Every record is in exactly one piece, however the shares are rounded.
    """
    # Cuts are rounded, not lengths, so that no record is lost or taken twice.
    cuts = [0, *(np.cumsum(shares)[:-1] * len(records)).astype(int).tolist(), len(records)]
    return [records[start:stop] for start, stop in pairwise(cuts)]


def check_alpha(alpha: float) -> None:
    """LocalError unless a symmetric Dirichlet distribution of this concentration can be drawn."""
    check_local(
        SMALLEST_ALPHA <= alpha < inf,
        f"partition: alpha = {alpha}; give a finite value of {SMALLEST_ALPHA} or more, such as 0.1",
    )


def check_enough(records: int, silos: int, minimum: int) -> None:
    """LocalError where so many records cannot give every silo the minimum.

    A draw may still leave a silo below the minimum.
    """
    if silos < 1 or minimum < 0:
        raise LocalError(
            f"partition: silos = {silos}, minimum = {minimum}; give 1 silo or more, a minimum of 0"
            " or more"
        )
    if silos * minimum > records:
        raise LocalError(
            f"partition: {records} records do not give {silos} silos {minimum} each; "
            f"take at most {records // max(minimum, 1)} silos or a lower minimum"
        )


def hand_out(
    parts: Sequence[list[NDArray[np.int64]]],
    silos: Iterable[int],
    pieces: Iterable[NDArray[np.int64]],
) -> None:
    """Add one piece to the part of each of these silos."""
    for silo, piece in zip(silos, pieces, strict=True):
        parts[silo].append(piece)


def joined(parts: Sequence[Sequence[NDArray[np.int64]]]) -> list[NDArray[np.int64]]:
    """Each silo's pieces as one array of ascending indices."""
    return [np.sort(np.concatenate(pieces)) for pieces in parts]


def leftover(parts: Sequence[NDArray[np.int64]], records: int) -> NDArray[np.int64]:
    """The records of 0 … records - 1 that no part holds, ascending."""
    free = np.ones(records, dtype=bool)
    for part in parts:
        free[part] = False
    return np.flatnonzero(free)


def _level(shards: list[list[int]], minimum: int) -> None:
    """Move records one by one from the largest shard to the smallest.

    Ties go to the earlier silo.
    """
    sizes = list(map(len, shards))
    while min(sizes) < minimum:
        source, target = sizes.index(max(sizes)), sizes.index(min(sizes))
        shards[target].append(shards[source].pop())
        sizes[source] -= 1
        sizes[target] += 1
