"""Splits that give each silo some of the classes: shards, numbers of classes, groups of labels.

- ``shards``: McMahan et al., 2017, arXiv:1602.05629, section 3: sorted by label, cut into equal
  shards, so many per silo; FedSimSup's pathological splits.
- ``classes_each``: "non-IID: 2/10" of FedSSA, after pFedHN (Shamsian et al., 2021,
  arXiv:2103.04628): equally many silos hold each class, and share its records unevenly, by draws
  from U(0.4, 0.6), as the code of both does. FedAIMS has so many classes a silo too, and does not
  say in which shares.
- ``label_groups``: PPFL, section 4.1: each silo belongs to one group and holds labels of that group
  alone.
- ``group_mixtures``: PPFL, "Effect of Heterogeneity", and its published splits: each group's
  records are spread over all silos by one Dirichlet draw.

All give ascending record indices per silo, no record twice. Records of a class that no silo holds
are in no part.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ...errors import LocalError, check_local
from ..numerics.streams import permutation, stream, uniform
from .draw import REDRAWS, check_alpha, check_enough, cut, dirichlet, hand_out, joined

# Bounds of a holder's share of a class before the shares are scaled to sum to 1: as in FedSSA's
# code, where shares are about U(0.4, 0.6).
LOW, HIGH = 0.4, 0.6

Indices = NDArray[np.int64]


def shards(labels: Indices, silos: int, each: int, seed: int, minimum: int = 10) -> list[Indices]:
    """``each`` shards per silo, of sizes that differ by one at most; each record exactly once.

    ``labels`` is [N] int64; the result has each silo's indices, ascending. LocalError if a silo
    would have fewer records than ``minimum``.
    """
    if each < 1:
        raise LocalError(f"partition: each = {each}; give each silo one shard or more")
    check_enough(len(labels), silos, max(minimum, each))
    # Mixed before the stable sort, so that a class's records are in random order within it.
    rng = stream(seed, "", 0, "partition/shards")
    mixed = permutation(rng, len(labels))
    pieces = np.array_split(mixed[np.argsort(labels[mixed], kind="stable")], silos * each)
    # Shards are dealt at random, so a silo may get two of one label.
    dealt = permutation(rng, len(pieces)).reshape(silos, each)
    parts = [np.sort(np.concatenate([pieces[i] for i in own])) for own in dealt]
    _check_smallest(parts, minimum, "raise each, take fewer silos or lower the minimum")
    return parts


def classes_each(
    labels: Indices, silos: int, each: int, seed: int, minimum: int = 10
) -> list[Indices]:
    """Records of ``each`` classes per silo; numbers of holders differ by one at most.

    Where there are fewer places than classes, silos times ``each``, the records of some classes are
    left over.
    """
    classes = np.unique(labels)
    check_local(
        1 <= each <= len(classes),
        f"partition: each = {each} of {len(classes)} classes; give 1 to {len(classes)}",
    )
    check_enough(len(labels), silos, minimum)
    rng = stream(seed, "", 0, "partition/classes")
    # Holders are drawn once; only the shares are drawn again.
    held = _holders(rng, len(classes), silos, each)
    # Bounded, since some minimums can never be met.
    for _ in range(REDRAWS):
        parts = _spread(rng, labels, classes, held)
        if min(map(len, parts)) >= minimum:
            break
    _check_smallest(parts, minimum, "raise each, take fewer silos or lower the minimum")
    return parts


def label_groups(
    labels: Indices, silos: int, groups: Sequence[Sequence[int]], seed: int, minimum: int = 10
) -> list[Indices]:
    """Silos dealt to the groups in equal numbers, the first groups taking one more.

    They get even shares of their group's labels. A label in several groups is shared by the silos
    of all of them.
    """
    _check_groups(labels, groups)
    if silos < len(groups):
        raise LocalError(
            f"partition: {silos} silos for {len(groups)} groups; take at least {len(groups)} silos"
        )
    check_enough(len(labels), silos, minimum)
    rng = stream(seed, "", 0, "partition/groups")
    parts: list[list[Indices]] = [[] for _ in range(silos)]
    # If the silos do not divide evenly, the first groups have one more.
    members = np.array_split(np.arange(silos), len(groups))
    for label in np.unique(labels):
        # A label may be in several groups; their silos share its records.
        inside = [number for number, group in enumerate(groups) if int(label) in group]
        holders = list(chain.from_iterable(members[number].tolist() for number in inside))
        records = np.flatnonzero(labels == label)
        # Records of a label that is in no group are left over.
        if holders:
            # In a random order, or the first silos would have each label's odd records.
            order = permutation(rng, len(holders))
            pieces = np.array_split(records[permutation(rng, len(records))], len(holders))
            hand_out(parts, np.array(holders)[order], pieces)
    whole = joined(parts)
    _check_smallest(
        whole, minimum, "give its group more labels, take fewer silos or lower the minimum"
    )
    return whole


def group_mixtures(
    labels: Indices,
    silos: int,
    groups: Sequence[Sequence[int]],
    alpha: float,
    seed: int,
    minimum: int = 10,
) -> list[Indices]:
    """Each group's records over all silos, in shares drawn from a symmetric Dirichlet(alpha)."""
    _check_groups(labels, groups)
    check_alpha(alpha)
    # −1 means that the record is in no group, and so in no part.
    numbers = np.full(len(labels), -1, dtype=np.int64)  # of the group of each record
    for number, group in enumerate(groups):
        inside = np.isin(labels, group)
        if bool((numbers[inside] >= 0).any()):
            raise LocalError(
                f"partition: a label of group {list(group)} is in an earlier group too; keep one"
            )
        numbers[inside] = number
    grouped = np.flatnonzero(numbers >= 0)
    # ``dirichlet`` gets groups in place of labels, so each group has one draw of shares.
    return [grouped[part] for part in dirichlet(numbers[grouped], silos, alpha, seed, minimum)]


def _holders(rng: np.random.Generator, classes: int, silos: int, each: int) -> NDArray[np.bool_]:
    """[silos, classes], ``each`` per row: a silo takes the classes that the fewest hold.

    Ties are broken at random.
    """
    held = np.zeros((silos, classes), dtype=bool)
    for number in range(silos):
        # Ties go by this random order, so that low class numbers are not preferred.
        order = permutation(rng, classes)
        fewest = order[np.argsort(held.sum(0)[order], kind="stable")[:each]]
        held[number, fewest] = True
    return held


def _spread(
    rng: np.random.Generator, labels: Indices, classes: Indices, held: NDArray[np.bool_]
) -> list[Indices]:
    parts: list[list[Indices]] = [[] for _ in held]
    for number, label in enumerate(classes):
        holders = np.flatnonzero(held[:, number])
        if len(holders):
            records = np.flatnonzero(labels == label)
            shares = uniform(rng, (len(holders),), LOW, HIGH)
            # ``cut`` takes shares with the sum 1.
            pieces = cut(records[permutation(rng, len(records))], shares / shares.sum())
            hand_out(parts, holders, pieces)
    return joined(parts)


def _check_groups(labels: Indices, groups: Sequence[Sequence[int]]) -> None:
    if not groups:
        raise LocalError(
            "partition: no group of labels; give one or more, such as [[0, 6], [5, 8]]"
        )
    known = set(np.unique(labels).tolist())
    for group in groups:
        unknown = sorted(set(group) - known)
        fault = f"unknown labels {unknown}" if group else "no label"
        if unknown or not group:
            raise LocalError(
                f"partition: group {list(group)} has {fault}; the records have"
                f" {min(known, default=0)} to {max(known, default=0)}"
            )


def _check_smallest(parts: Sequence[Indices], minimum: int, fix: str) -> None:
    sizes = list(map(len, parts))
    if min(sizes) < minimum:
        raise LocalError(
            f"partition: silo {sizes.index(min(sizes))} of {len(parts)} gets {min(sizes)} records, "
            f"the minimum is {minimum}; {fix}"
        )
