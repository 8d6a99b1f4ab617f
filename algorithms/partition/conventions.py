"""Dirichlet partitions by other conventions than ``draw.dirichlet``: Hsu et al.'s, and peers' code.

Symbols: N records, n silos, n_c records of class c.

- ``hsu``: Hsu et al., 2019, arXiv:1909.06335, section 2. Silo i draws the shares of classes among
  its own records, q_i ~ Dir(α p), where p_c = n_c / N. All silos have equally many records.
- ``pfllib``: ``separate_data`` in PFLlib's dataset/utils/dataset_utils.py (d832e76). Class c draws
  the shares of silos, p_c ~ Dir(α 1_n); p_ci becomes 0 where silo i has N / n records already, and
  the rest is scaled to the sum 1.
- ``fl_bench``: ``dirichlet`` in FL-bench's data/utils/schemes/dirichlet.py (06e658b). The same
  shares as they are drawn. It cites Hsu et al., whose draws are others.
- ``ppfl``: ``split_dataset_by_labels`` of FedEM (Marfoq et al., 2021, arXiv:2108.10252), which PPFL
  (arXiv:2310.14337) has, too. Labels are dealt to clusters at random; of cluster k silo i gets m_ki
  records, w_k ~ Dir(α 1_n), m_k ~ Multinomial(n_k, w_k).

The last three draw as that code draws, from numpy's old generator (NEP 19), and ``ppfl`` from
Python's, too: with the same labels and the same seed a silo has the same records. What that code
then tests on is another draw, which is not repeated here.

All give ascending record indices per silo, no record twice.
"""

import random
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import LocalError, check_local
from ..numerics.streams import permutation, stream
from .draw import check_alpha, check_enough, cut, scaled

# Peers draw for ever; at a small alpha with many silos that never ends.
MOST_DRAWS = 1000
LARGEST_SEED = 2**32 - 1  # that numpy's old generator takes
PFLLIB_MINIMUM = 40  # records, of a batch of 10 for tests at a quarter
FL_BENCH_MINIMUM = 10

Indices = NDArray[np.int64]
Shares = NDArray[np.float64]


def hsu(labels: Indices, silos: int, alpha: float, seed: int, minimum: int = 10) -> list[Indices]:
    """Equally many records per silo, to one; each silo draws its own shares of the classes.

    Our choice where a class has run out: it is left out, and the shares of the others are scaled to
    the sum 1, so the last silos get what is left. Sizes are even, so nothing is drawn again for
    ``minimum``.
    """
    check_alpha(alpha)
    check_enough(len(labels), silos, minimum)
    rng = stream(seed, "", 0, "partition/hsu")
    # One pile per class, in random order, of which silos take from the top.
    piles = []
    for label in np.unique(labels):
        records = np.flatnonzero(labels == label)
        piles.append(records[permutation(rng, len(records))])
    left = np.array(list(map(len, piles)), np.int64)
    prior = left / left.sum()

    parts = []
    for number in range(silos):
        size = len(labels) // silos + (number < len(labels) % silos)
        # NumPy may change this draw between releases; a partition file keeps its result.
        shares = rng.dirichlet(alpha * prior)
        counts = _taken(rng, shares, left, size)
        stops = [len(pile) for pile in piles] - left
        left -= counts
        parts.append(
            np.concatenate(
                [
                    pile[stop : stop + count]
                    for pile, stop, count in zip(piles, stops, counts, strict=True)
                ]
            )
        )
    return list(map(np.sort, parts))


def _taken(rng: np.random.Generator, shares: Shares, left: Indices, size: int) -> Indices:
    """Records of each class [C] that a silo of ``size`` records takes of those ``left``."""
    counts = np.zeros_like(left)
    while size:
        # Each pass fills the size or uses up a class, so it ends.
        free = left - counts
        drawn = rng.multinomial(size, scaled(np.where(free > 0, shares, 0), free > 0))
        taken = np.minimum(drawn, free)
        counts += taken
        size -= int(taken.sum())
    return counts


def pfllib(
    labels: Indices, silos: int, alpha: float, seed: int, minimum: int | None = None
) -> list[Indices]:
    """PFLlib's, whose scripts have the seed 1.

    It draws again while a silo has fewer records than min(40, N / 2n), or ``minimum``.
    """
    check_alpha(alpha)
    least = min(PFLLIB_MINIMUM, len(labels) // (2 * silos)) if minimum is None else minimum
    check_enough(len(labels), silos, least)
    rng = _old_generator(seed)

    def draw() -> list[Indices]:
        classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        return _by_class(rng, classes, silos, alpha, len(labels) / silos)

    return _large_enough(draw, least)


def fl_bench(
    labels: Indices, silos: int, alpha: float, seed: int, minimum: int | None = None
) -> list[Indices]:
    """FL-bench's, whose scripts have the seed 42.

    It draws again while a silo has fewer records than 10, or ``minimum``.
    """
    check_alpha(alpha)
    least = FL_BENCH_MINIMUM if minimum is None else minimum
    check_enough(len(labels), silos, least)
    rng = _old_generator(seed)
    # Shuffled again and again in place, so a draw depends on those before it; and numbered from 0
    # on, so that a class without records draws shares, too.
    classes = [np.flatnonzero(labels == label) for label in range(labels.max(initial=-1) + 1)]
    return _large_enough(lambda: _by_class(rng, classes, silos, alpha, np.inf), least)


def ppfl(
    labels: Indices,
    silos: int,
    alpha: float,
    seed: int,
    minimum: int | None = None,
    clusters: int | None = None,
) -> list[Indices]:
    """FedEM's and PPFL's, whose scripts have the seed 12345; ``clusters`` of labels, or one each.

    They draw once, and a silo may get nothing. With ``minimum`` it is drawn again.
    """
    check_alpha(alpha)
    check_enough(len(labels), silos, minimum or 0)
    names = list(range(int(labels.max(initial=-1)) + 1))
    if clusters is not None and clusters > len(names):
        raise LocalError(
            f"partition: clusters = {clusters} of {len(names)} classes; give 1 to {len(names)}"
        )
    old = _old_generator(seed)
    mixing = random.Random(seed)  # noqa: S311 - as that code does
    mixing.shuffle(names)
    groups = _divided(names, clusters or len(names))
    cluster_of = np.empty(len(names), np.int64)
    for number, group in enumerate(groups):
        cluster_of[group] = number
    order = np.array(mixing.sample(range(len(labels)), len(labels)), np.int64)
    piles = []
    for number in range(len(groups)):
        pile = order[cluster_of[labels[order]] == number].tolist()
        mixing.shuffle(pile)
        piles.append(np.array(pile, np.int64))

    def draw() -> list[Indices]:
        parts: list[list[Indices]] = [[] for _ in range(silos)]
        for pile in piles:
            ends = np.cumsum(_multinomial(old, len(pile), _shares(old, alpha, silos)))
            for part, piece in zip(parts, np.split(pile, ends[:-1]), strict=True):
                part.append(piece)
        return list(map(np.concatenate, parts))

    return _large_enough(draw, minimum or 0)


def _multinomial(rng: np.random.RandomState, count: int, shares: Shares) -> Indices:
    """``rng.multinomial`` [n] as numpy had it before 2.5.

    Since then numpy also draws for what cannot come, and what follows is drawn otherwise.
    """
    found = np.zeros(len(shares), np.int64)
    rest = 1.0
    for place, share in enumerate(shares[:-1]):
        if count and share > 0:
            # Rounding may leave a rest below the share.
            found[place] = rng.binomial(count, min(share / rest, 1.0))
        count -= int(found[place])
        rest -= share
    found[-1] = count
    return found


def _divided(names: Sequence[int], groups: int) -> list[list[int]]:
    """Consecutive groups, of sizes that differ by one at most, the smaller ones first."""
    size, larger = divmod(len(names), groups)
    smaller = (groups - larger) * size
    first = [list(names[at : at + size]) for at in range(0, smaller, size)]
    rest = range(smaller, len(names), size + 1)
    return first + [list(names[at : at + size + 1]) for at in rest]


def _old_generator(seed: int) -> np.random.RandomState:
    if seed > LARGEST_SEED:
        raise LocalError(
            f"partition: seed = {seed}; the code that this convention follows takes at most"
            f" {LARGEST_SEED}"
        )
    return np.random.RandomState(seed)


def _shares(rng: np.random.RandomState, alpha: float, silos: int) -> Shares:
    shares: Shares = rng.dirichlet(np.repeat(alpha, silos))
    _check_shares(shares, alpha)
    return shares


def _check_shares(shares: Shares, alpha: float) -> None:
    """LocalError where all shares underflowed, which peers divide by 0."""
    check_local(
        shares.sum() > 0,
        f"partition: alpha = {alpha} is too small for the generator of this convention, whose"
        ' draws underflow; raise alpha to 0.01 or more, or take convention = "per-class"',
    )


def _by_class(
    rng: np.random.RandomState,
    classes: Sequence[Indices],
    silos: int,
    alpha: float,
    full: float,
) -> list[Indices]:
    """One draw: each class over the silos that have fewer than ``full`` records so far.

    ``classes`` holds the records of each class, which are shuffled in place.
    """
    parts: list[list[Indices]] = [[] for _ in range(silos)]
    sizes = np.zeros(silos, np.int64)
    for records in classes:
        rng.shuffle(records)
        shares = _shares(rng, alpha, silos)
        if full < np.inf:
            shares = np.where(sizes < full, shares, 0)
            _check_shares(shares, alpha)
            shares /= shares.sum()
        for number, piece in enumerate(cut(records.copy(), shares)):
            parts[number].append(piece)
            sizes[number] += len(piece)
    return list(map(np.concatenate, parts))


def _large_enough(draw: Callable[[], list[Indices]], minimum: int) -> list[Indices]:
    """The first draw whose silos all have ``minimum`` records, each silo's ascending."""
    for _ in range(MOST_DRAWS):
        parts = draw()
        if min(map(len, parts)) >= minimum:
            return list(map(np.sort, parts))
    raise LocalError(
        f"partition: in each of {MOST_DRAWS} draws some silo got fewer than {minimum} records;"
        ' lower the minimum, raise alpha, take fewer silos, or convention = "per-class" or'
        ' "balanced", which move records to the smallest silos'
    )
