"""A silo's records into training, validation and test records.

Indices count the official training records first and the official test records after them, as
PPFL's published splits do. Merged (FedSimSup, pFedSim, PPFL), a partition of both together is split
silo by silo. Kept apart (FedSSA), the official training records are partitioned, and the official
test records dealt so that each silo has the same share of a class in both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import LocalError, check_local
from ..numerics.streams import permutation, stream
from .draw import hand_out, joined

Indices = NDArray[np.int64]
Ratio = Literal["50/50", "75/25", "80/20", "8:1:1"]
RATIOS: dict[Ratio, tuple[int, int, int]] = {  # training, validation, test
    "50/50": (1, 0, 1),  # pFedSim
    "75/25": (3, 0, 1),  # PFLlib
    "80/20": (4, 0, 1),  # PPFL
    "8:1:1": (8, 1, 1),  # FedSSA
}


@dataclass(frozen=True, eq=False)
class Sides:
    """Ascending record indices of one silo, no record on two sides.

    Indices are int64, and count the official training records before the official test records.
    ``validation`` is empty if the ratio has no such side.
    """

    train: Indices
    validation: Indices
    test: Indices

    def all(self) -> Indices:
        """The silo's records of all sides, ascending."""
        return np.sort(np.concatenate([self.train, self.validation, self.test]))


def merged(
    parts: Mapping[str, Indices], ratio: Ratio, seed: int, groups: Sequence[str] | None = None
) -> dict[str, Sides]:
    """Each silo's records at random on the sides of a ratio, at least one on each of them.

    ``groups`` names one group per record, such as windows that overlap. A silo's records of one
    group are then on one side, and the ratio is met as nearly as the order drawn for its groups
    allows.
    """
    numbers = None
    if groups is not None:
        # Numbers in place of texts, since groups are only compared.
        _, inverse = np.unique(np.array(groups, np.str_), return_inverse=True)
        numbers = inverse.astype(np.int64)
    return {silo: _split(part, RATIOS[ratio], silo, seed, numbers) for silo, part in parts.items()}


def apart(
    parts: Mapping[str, Indices],
    keys: Sequence[int] | Indices,
    train_total: int,
    seed: int,
    validation: bool = False,
) -> dict[str, Sides]:
    """The partition ``parts`` of the official training records, with test records dealt alike.

    ``keys`` says what is dealt alike, one key per record of both official parts: the label, or for
    a partition by source or column the number of its value. A silo with a share of a key's training
    records gets that share of its test records, up to one record; test records of a key that no
    silo trains on are left over. With ``validation``, one in nine training records validates, as
    8:1 of 8:1:1.
    """
    key = np.asarray(keys, dtype=np.int64)
    check_local(
        0 < train_total < len(key),
        f"split: {train_total} training records of {len(key)} in all; give the keys of both"
        " official parts",
    )
    if any(part.max(initial=-1) >= train_total for part in parts.values()):
        raise LocalError(
            f"split: the partition holds records beyond {train_total}; partition the training part"
            " alone"
        )

    # Each silo is tested on the classes that it trains on, in the same proportions: otherwise the
    # test records would measure another distribution than the silo's.
    tests = _alike([key[part] for part in parts.values()], key[train_total:], seed)
    sides = {}
    for (silo, part), test in zip(parts.items(), tests, strict=True):
        # 8:1 of FedSSA's 8:1:1; the official test records are the third share.
        trained = _split(part, (8, int(validation), 0), silo, seed)
        # ``test`` counts from 0 within the official test records.
        sides[silo] = Sides(trained.train, trained.validation, test + train_total)

    without = [silo for silo, side in sides.items() if not len(side.test)]
    if without:
        raise LocalError(
            f"split: {len(key) - train_total} test records leave silos {without} none; "
            "take fewer silos or merge the official parts"
        )
    return sides


def _split(
    part: Indices, ratio: tuple[int, int, int], silo: str, seed: int, groups: Indices | None = None
) -> Sides:
    own, what = np.arange(len(part)), "records"
    # Renumbered from 0 within this silo.
    if groups is not None:
        own, what = np.unique(groups[part], return_inverse=True)[1], "groups of records"
    sizes = np.bincount(own)  # [groups] without groups every record is one
    # Each side with a weight needs at least one group.
    wanted = sum(weight > 0 for weight in ratio)
    if len(sizes) < wanted:
        raise LocalError(
            f"split: silo {silo} has {len(sizes)} {what} for {wanted} sides; raise the minimum to"
            f" {wanted}"
        )

    # A stream per silo: its sides are the same whatever other silos there are.
    mixed = permutation(stream(seed, silo, 0, "partition/split"), len(sizes))
    # Number of records up to and including each group, in the drawn order.
    ends = np.cumsum(sizes[mixed])

    # the training records come first, then validation from ``first``, test from ``second``
    validation, test = (_side(len(part), weight, sum(ratio)) for weight in ratio[1:])
    # Without a test side, training and validation share all groups.
    second = len(sizes)
    if test:
        second = _nearest(ends, len(part) - test, wanted - 1, len(sizes) - 1)
    first = second
    if validation:
        first = _nearest(ends, len(part) - validation - test, 1, second - 1)
    # places[g] is the position of group g in the drawn order.
    places = np.empty(len(sizes), np.int64)
    places[mixed] = np.arange(len(sizes))
    of_record = places[own]
    bounds = ((0, first), (first, second), (second, len(sizes)))
    return Sides(*(part[(of_record >= start) & (of_record < stop)] for start, stop in bounds))


def _side(records: int, weight: int, whole: int) -> int:
    """Records of a side: by its weight, and one at least on each side that has a weight."""
    return max(records * weight // whole, 1) if weight else 0


def _nearest(ends: Indices, wanted: int, least: int, most: int) -> int:
    """The number of groups, ``least`` to ``most``, nearest to ``wanted`` records; ties to fewer."""
    return least + int(np.argmin(np.abs(ends[least - 1 : most] - wanted)))


def _alike(train: Sequence[Indices], test: Indices, seed: int) -> list[Indices]:
    """Per silo, positions in ``test``: of each key in ``train``'s proportion, within one record."""
    rng = stream(seed, "", 0, "partition/alike")
    # An empty piece first, since ``concatenate`` rejects an empty list.
    parts: list[list[Indices]] = [[np.empty(0, np.int64)] for _ in train]
    for key in np.unique(test):
        # In a random order, or the same silos would lose by rounding in every key.
        order = permutation(rng, len(train))
        counts = np.array([np.count_nonzero(train[silo] == key) for silo in order])
        records = np.flatnonzero(test == key)
        records = records[permutation(rng, len(records))]
        if counts.any():
            # Cumulative and in whole numbers: no record is lost, and each share is off by less
            # than one.
            ends = len(records) * np.cumsum(counts) // counts.sum()
            hand_out(parts, order, np.split(records, ends[:-1]))
    return joined(parts)
