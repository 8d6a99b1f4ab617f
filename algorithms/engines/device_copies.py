"""Large values of silos that stay on the device between rounds, while the host holds them.

States lie on the host, where methods work on them silo by silo, and what holds one is replaced and
never altered (states.py). So a tensor of the host that a round left there, and that the next round
brings again, has the values of its copy on the device, which need not cross a second time. A part
that was delivered, or changed, is another tensor, and crosses.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..exchange.parts import Tensors
from ..numerics.devices import room, stacked

SHARE = 4  # of the memory that a simulation plans with
# of a silo's tensor: a smaller one crosses in about the time in which its copy is begun
WORTH_BYTES = 2**16


@dataclass(frozen=True, eq=False)
class _Copy:
    """Values on the device, and how often the tensor of the host had been altered by then."""

    values: Tensor
    version: int


class DeviceCopies:
    """Copies of tensors of the host, at most ``most`` bytes; the oldest make room for others.

    ``most`` is a part of the device's memory where it is left out, and nothing on a CPU, whose
    values lie on the host anyway.
    """

    def __init__(self, device: torch.device, most: int | None = None) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._most = room(device) // SHARE * on_gpu if most is None else most
        # By identity; a copy goes once nobody holds the tensor of the host.
        self._copies: MutableMapping[Tensor, _Copy] = WeakTensorKeyDictionary()

    def keep(self, host: Sequence[Tensors], device: Tensors) -> None:
        """Keep silos' values, by name: the rows of tensors of the device [N, ...].

        ``host`` are each silo's copies of them on the host. Small tensors are not kept, nor are
        values that are more than may be.
        """
        worth = {name: rows for name, rows in device.items() if rows[0].nbytes >= WORTH_BYTES}
        size = sum(rows.nbytes for rows in worth.values())
        if size >= self._most:
            return
        self._make_room(size)
        for name, rows in worth.items():
            for own, row in zip(host, rows, strict=True):
                # Each by itself: a row of a copy of all would keep all of it.
                tensor, copy = own[name], row.clone()
                self._copies[tensor] = _Copy(copy, tensor._version)  # noqa: SLF001 torch has no other name

    def _make_room(self, size: int) -> None:
        over = self.kept + size - self._most
        for own, copy in list(self._copies.items()):
            if over <= 0:
                return
            over -= copy.values.nbytes
            del self._copies[own]

    @property
    def kept(self) -> int:
        """Bytes of all copies."""
        return sum(copy.values.nbytes for copy in self._copies.values())

    def stacked(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of the host [...] as one tensor [N, ...] on the device."""
        here = []
        for tensor in tensors:
            copy = self._copies.get(tensor)
            # A method of others may have altered the tensor, against the rule.
            if copy is None or copy.version != tensor._version:  # noqa: SLF001 as above
                return stacked(tensors, self._device)
            here.append(copy.values)
        # With a place of its own it is laid out as what crosses, whatever the rows' layout.
        place = here[0].new_empty((len(here), *here[0].shape))
        return torch.stack(here, out=place)
