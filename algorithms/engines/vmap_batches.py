"""Batches of many silos side by side, and the records of all silos on one device.

Where a record's output does not depend on others, shorter batches are filled up with records that
count nothing; elsewhere silos whose batches are equally long go together. A silo without a batch is
in no call. Each record lies on the device once; a silo's batches are places among the records.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import LocalError
from ..data.dataset import Dataset
from .engine import Records

# of one silo: the places of the records of each call, in turn
Pieces: TypeAlias = Sequence[NDArray[np.int64]]
Rows: TypeAlias = slice | Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """One call: the silos ``rows``, m of them, and the places of their records [m, L].

    ``places`` are indices into ``Resident.x``. Rows with fewer records are filled up with their
    first one.
    """

    step: int  # how many pieces of these silos came before
    rows: Rows  # a slice where they are the first, which a view can tell apart
    places: Tensor
    lengths: Tensor | None  # [m] of how many records each silo's count, where not all do
    shortest: tuple[int, int]  # one of ``rows`` of which the fewest count, and how many
    silos: Sequence[int]  # the silos of ``rows``, known without asking the device

    @property
    def counts(self) -> Tensor | None:
        """Which of the records count [m, L]; None where all do.

        It is a bool mask, on the device of ``lengths``.
        """
        if self.lengths is None:
            return None
        return counting(self.lengths, self.places.shape[1])


def counting(lengths: Tensor, most: int) -> Tensor:
    """Which of so many records count [m, most], of which ``lengths`` [m] do.

    Those that count come first in each row.
    """
    return torch.arange(most, device=lengths.device) < lengths[:, None]


def together(pieces: Sequence[Pieces], exact: bool, device: torch.device) -> list[Batch]:
    """The calls that go through the pieces of all silos; each of equal lengths if ``exact``.

    All that they need goes to the device at once, before the first. A silo without further pieces
    is in no later call. ``exact`` is for losses that couple the records of a batch: filling up
    would change them.
    """
    steps: list[int] = []
    silos: list[NDArray[np.int64]] = []
    filled: list[NDArray[np.int64]] = []
    sizes: list[NDArray[np.int64]] = []
    for step, members in _calls(pieces, exact):
        own = [pieces[silo][step] for silo in members]
        steps.append(step)
        silos.append(np.array(members))
        filled.append(_filled(own))
        sizes.append(np.array([*map(len, own)]))

    # One copy to the device for all calls: a copy per call would wait for the device.
    places = _split_on(device, filled)
    lengths = _split_on(device, sizes)
    rows = _split_on(device, silos)
    batches = []
    for call, step in enumerate(steps):
        fewest, most = int(sizes[call].min()), int(sizes[call].max())
        taking: Rows = rows[call]
        first = np.arange(len(silos[call]))
        # Silos 0 … m − 1 make a slice, through which a step can write in place.
        if np.array_equal(silos[call], first):
            taking = slice(0, len(first))
        own_places = places[call].view(filled[call].shape)
        own_lengths = lengths[call] if fewest < most else None
        shortest = (int(sizes[call].argmin()), fewest)
        batches.append(Batch(step, taking, own_places, own_lengths, shortest, silos[call].tolist()))
    return batches


def _calls(pieces: Sequence[Pieces], exact: bool) -> Iterator[tuple[int, list[int]]]:
    """Step and silos of each call."""
    for step in range(max(map(len, pieces), default=0)):
        by_length: dict[int, list[int]] = {}
        for silo, own in enumerate(pieces):
            if len(own) <= step:
                continue
            # Key 0 puts all silos that have a piece at this step into one call.
            length = len(own[step]) if exact else 0
            by_length.setdefault(length, []).append(silo)
        for length in sorted(by_length):
            yield step, by_length[length]


def _filled(own: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Rows of one length [m, L]: behind a silo's own records, the first of them again."""
    filled = np.empty((len(own), max(map(len, own))), np.int64)
    for row, piece in zip(filled, own, strict=True):
        row[: len(piece)], row[len(piece) :] = piece, piece[0]
    return filled


def _split_on(device: torch.device, arrays: Sequence[NDArray[np.int64]]) -> tuple[Tensor, ...]:
    """The arrays on the device, flat; they go there in one copy."""
    # An empty array first, since ``concatenate`` rejects an empty list.
    joined = np.concatenate([np.empty(0, np.int64), *map(np.ravel, arrays)])
    return torch.split(torch.from_numpy(joined).to(device), list(map(np.size, arrays)))


@dataclass(frozen=True, eq=False)
class Staged:
    """Records ``x`` and what is true of them, ``y``, [R, …] of one call, changed for it.

    A recorded step reads them at the same addresses in each call.
    """

    x: Tensor
    y: Tensor

    @classmethod
    def like(cls, x: Tensor, y: Tensor, records: int) -> "Staged":
        """Room for so many records such as those of x [N, …] and y [N, …]."""
        return cls(x.new_empty(records, *x.shape[1:]), y.new_empty(records, *y.shape[1:]))

    def filled(
        self,
        batch: Batch,
        changed: Callable[[int, NDArray[np.int64]], tuple[Tensor, Tensor]],
        pieces: Sequence[Pieces],
    ) -> Batch:
        """The call with places among these records.

        ``changed`` gives a silo's records at some places. Rows with fewer of them are filled up
        with the first one, as in ``together``.
        """
        length = batch.places.shape[1]
        for row, silo in enumerate(batch.silos):
            own, start = pieces[silo][batch.step], row * length
            for whole, part in zip((self.x, self.y), changed(silo, own), strict=True):
                whole[start : start + len(own)] = part
                whole[start + len(own) : start + length] = part[:1]
        places = torch.arange(batch.places.numel(), device=batch.places.device)
        return replace(batch, places=places.view_as(batch.places))


class Resident:
    """Records ``x`` and what is true of them, ``y``, [N, …] of all silos and sides on one device.

    They stay there as long as the object. LocalError if the device cannot hold them.
    """

    def __init__(self, records: Mapping[str, Records], device: str) -> None:
        sides = [data for own in records.values() for data in own.sides]
        distinct = {id(data): data for data in sides}  # silos may be tested on the same records
        # All records of a job have the shape and dtype of the first.
        count, first = sum(map(len, distinct.values())), sides[0]
        try:
            self.x, self.y = (
                torch.empty(count, *like.shape[1:], dtype=like.dtype, device=device)
                for like in (first.held, first.y)
            )
        # An AssertionError comes from a torch that was built without the device.
        except (RuntimeError, AssertionError) as error:
            raise LocalError(
                f"device {device!r} cannot hold the {count:,} records of all silos: {error}; choose"
                " another device"
            ) from error
        self._places: dict[int, range] = {}
        self._kept = sides  # an id names an object only as long as the object lives
        at = 0
        for key, data in distinct.items():
            places = self._places[key] = range(at, at + len(data))
            # Copied once, at the start; rounds only send indices.
            self.x[at : places.stop], self.y[at : places.stop] = data.held, data.y
            at = places.stop

    def places(self, data: Dataset | None) -> range:
        """Where a silo's records of one side lie; nowhere where it has none.

        They are indices into ``x`` and ``y``. KeyError for records that were not given at first.
        """
        if data is None:
            return range(0)
        return self._places[id(data)]
