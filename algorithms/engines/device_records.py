"""All silos' records on one device, each once; a silo's batches are places among them."""

from collections.abc import Mapping

import torch

from ...errors import LocalError
from ..data.dataset import Dataset
from .engine import Records


class Resident:
    """Records ``x`` [N, …] and labels ``y`` [N] of all silos and sides, one after another on a device."""

    def __init__(self, records: Mapping[str, Records], device: str) -> None:
        sides = [data for own in records.values() for data in own.sides]
        distinct = {id(data): data for data in sides}  # silos may be tested on the same records
        count, like = sum(map(len, distinct.values())), sides[0].x
        try:
            self.x = torch.empty(count, *like.shape[1:], dtype=like.dtype, device=device)
            self.y = torch.empty(count, dtype=torch.int64, device=device)
        except (RuntimeError, AssertionError) as error:  # the latter from a torch that was built without the device
            raise LocalError(
                f"device {device!r} cannot hold the {count:,} records of all silos: {error}; choose another device"
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
