"""Many silos' models looked at at once: what they classify correctly, what a method measures, what
memory they take.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import vmap

from ..course import Measurement, Parts
from ..method import Method
from ..training.loop import EVALUATION_CHUNK, Modules
from .vmap_batches import Batch, together
from .vmap_training import Silos, Values, couples, parts_of, rows_of

CHUNK = 128  # records of a silo at once, where their number changes nothing


@torch.no_grad()
def evaluate(method: Method, silos: Silos, places: Sequence[range]) -> list[int]:
    """How many of the records at its places each silo's model classifies correctly, in evaluation
    mode.
    """
    exact, most = _evaluating(silos.modules), chunk(silos.modules)
    pieces = [_cut(own, most) for own in places]
    correct = torch.zeros(silos.count, dtype=torch.int64, device=silos.x.device)

    def right(values: Values, x: Tensor, y: Tensor) -> Tensor:
        return method.predict(parts_of(silos.modules, values), x).argmax(dim=1) == y

    for batch in together(pieces, exact, silos.x.device):
        # [m, L]
        hits = vmap(right)(
            rows_of(silos.values, batch.rows), silos.x[batch.places], silos.y[batch.places]
        )
        if batch.counts is not None:
            hits &= batch.counts
        correct[batch.rows] += hits.sum(1)
    counts: list[int] = correct.tolist()
    return counts


def _lay(
    laid: Sequence[dict[str, list[Tensor]]], found: Mapping[str, Tensor], silos: Sequence[int]
) -> None:
    """Put the rows of one call behind those that each silo has."""
    for name, tensor in found.items():
        for silo, own in zip(silos, tensor.cpu(), strict=True):
            laid[silo].setdefault(name, []).append(own)


@torch.no_grad()
def measure(
    measurement: Measurement, silos: Silos, places: Sequence[range], rows: bool = False
) -> list[dict[str, Tensor]]:
    """What a measurement adds up over the records at each silo's places, or its ``rows``, as
    ``training.measure``.

    What is added up cannot be taken out again, so no batch is filled up.
    """
    pieces = [
        _cut(own, chunk(silos.modules)) if _evaluating(silos.modules) else _halved(own)
        for own in places
    ]

    sums: dict[str, Tensor] = {}
    laid: list[dict[str, list[Tensor]]] = [{} for _ in places]

    def measured(values: Values, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = measurement(parts_of(silos.modules, values), x, y)
        return {name: tensor.double() for name, tensor in found.items()}

    for batch in together(pieces, True, silos.x.device):
        found = vmap(measured)(
            rows_of(silos.values, batch.rows), silos.x[batch.places], silos.y[batch.places]
        )
        if rows:
            _lay(laid, found, _silos(batch, silos.count))
            continue
        for name, tensor in found.items():
            if name not in sums:
                sums[name] = tensor.new_zeros(silos.count, *tensor.shape[1:])
            sums[name][batch.rows] += tensor

    if rows:
        return [{name: torch.cat(pieces) for name, pieces in own.items()} for own in laid]
    host = {name: tensor.cpu() for name, tensor in sums.items()}
    return [
        {name: tensor[silo].clone() for name, tensor in host.items()} for silo in range(silos.count)
    ]


def chunk(modules: Modules) -> int:
    """How many of a silo's records are looked at at once.

    In evaluation mode, into which the modules are put.
    """
    return EVALUATION_CHUNK if _evaluating(modules) else CHUNK


def _silos(batch: Batch, count: int) -> list[int]:
    """The silos of a call."""
    silos: list[int] = torch.arange(count, device=batch.places.device)[batch.rows].tolist()
    return silos


def saved_bytes(
    predict: Callable[[Parts, Tensor], Tensor], modules: Modules, shape: Sequence[int]
) -> int:
    """About what a backward pass keeps of one record's forward pass, beside the values of the
    modules.
    """
    own = {
        t.untyped_storage().data_ptr()
        for m in modules.values()
        for t in (*m.parameters(), *m.buffers())
    }
    # by place, each once; a tensor that is kept is at no other's place
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = tensor
        return tensor

    _evaluating(modules)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        predict(modules, torch.zeros(2, *shape))  # two: batch norm takes no single number
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) // 2


def _evaluating(modules: Modules) -> bool:
    """Whether a record's output depends on others in evaluation mode, into which the modules are
    put.
    """
    for module in modules.values():
        module.eval()
    return couples(modules)


def _cut(places: range, chunk: int) -> list[NDArray[np.int64]]:
    return [np.asarray(places[start : start + chunk]) for start in range(0, len(places), chunk)]


def _halved(places: range) -> list[NDArray[np.int64]]:
    """Pieces whose lengths are powers of two, so that silos of all sizes have some of one
    length.
    """
    pieces, length = _cut(places, CHUNK), CHUNK
    if pieces and len(pieces[-1]) < CHUNK:
        rest = pieces.pop()
        while len(rest):
            length //= 2
            if len(rest) >= length:
                pieces.append(rest[:length])
                rest = rest[length:]
    return pieces
