"""Batches of many silos side by side: which silos take part in a call, and where their records lie.

Batches of fewer records are filled up with records that count nothing, where a record's output
depends on no other; elsewhere silos whose batches are equally long go together. A silo without a
batch is in no call.

All silos' records on one device, each once; a silo's batches are places among them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """One call: the silos ``rows``, m of them, and the places of their records [m, L]."""

    step: int  # how many pieces of these silos came before
    rows: Rows  # a slice where they are the first, which a view can tell apart
    places: Tensor
    lengths: Tensor | None  # [m] of how many records each silo's count, where not all do
    shortest: tuple[int, int]  # one of ``rows`` of which the fewest count, and how many

    @property
    def counts(self) -> Tensor | None:
        """Which of the records count [m, L]; None where all do."""
        return None if self.lengths is None else counting(self.lengths, self.places.shape[1])


def counting(lengths: Tensor, most: int) -> Tensor:
    """Which of so many records count [m, most], of which ``lengths`` [m] do."""
    return torch.arange(most, device=lengths.device) < lengths[:, None]


def together(pieces: Sequence[Pieces], exact: bool, device: torch.device) -> list[Batch]:
    """The calls that go through the pieces of all silos.

    Where it is ``exact``, of equally long pieces each.

    All that they need goes to the device at once, before the first.
    """
    calls = list(_calls(pieces, exact))
    own = [[pieces[silo][step] for silo in silos] for step, silos in calls]
    filled = [_filled(each) for each in own]
    places = torch.split(
        _on(device, [each.ravel() for each in filled]), [each.size for each in filled]
    )
    sizes = [np.array([len(piece) for piece in each]) for each in own]
    many = [len(silos) for _, silos in calls]
    lengths = torch.split(_on(device, sizes), many)
    rows = torch.split(_on(device, [np.array(silos) for _, silos in calls]), many)
    return [
        Batch(
            step,
            slice(0, len(silos)) if silos == list(range(len(silos))) else rows[call],
            places[call].view(filled[call].shape),
            lengths[call] if sizes[call].min() < sizes[call].max() else None,
            (int(sizes[call].argmin()), int(sizes[call].min())),
        )
        for call, (step, silos) in enumerate(calls)
    ]


def _calls(pieces: Sequence[Pieces], exact: bool) -> Iterator[tuple[int, list[int]]]:
    """Step and silos of each call."""
    for step in range(max(map(len, pieces), default=0)):
        alive = [silo for silo, own in enumerate(pieces) if len(own) > step]
        lengths = sorted({len(pieces[silo][step]) for silo in alive}) if exact else [None]
        for length in lengths:
            yield step, [silo for silo in alive if length in (None, len(pieces[silo][step]))]


def _filled(own: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Rows of one length [m, L]: behind a silo's own records, the first of them again."""
    filled = np.empty((len(own), max(map(len, own))), np.int64)
    for row, piece in zip(filled, own, strict=True):
        row[: len(piece)], row[len(piece) :] = piece, piece[0]
    return filled


def _on(device: torch.device, arrays: Sequence[NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *arrays])).to(device)


class Resident:
    """Records ``x`` [N, …] and labels ``y`` [N] of all silos and sides, one after another on a
    device.
    """

    def __init__(self, records: Mapping[str, Records], device: str) -> None:
        sides = [data for own in records.values() for data in own.sides]
        distinct = {id(data): data for data in sides}  # silos may be tested on the same records
        count, like = sum(map(len, distinct.values())), sides[0].x
        try:
            self.x = torch.empty(count, *like.shape[1:], dtype=like.dtype, device=device)
            self.y = torch.empty(count, dtype=torch.int64, device=device)
        # the latter from a torch that was built without the device
        except (RuntimeError, AssertionError) as error:
            raise LocalError(
                f"device {device!r} cannot hold the {count:,} records of all silos: {error}; choose"
                " another device"
            ) from error
        self._places: dict[int, range] = {}
        self._kept = sides  # an id names an object as long as it lives
        at = 0
        for key, data in distinct.items():
            places = self._places[key] = range(at, at + len(data))
            self.x[at : places.stop], self.y[at : places.stop] = data.x, data.y
            at = places.stop

    def places(self, data: Dataset | None) -> range:
        """Where a silo's records of one side lie; nowhere where it has none."""
        return range(0) if data is None else self._places[id(data)]
