"""Evaluates and measures many silos' models at once, and estimates the memory that they take."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..course import Measurement, Parts
from ..exchange.parts import Tensors
from ..method import Method
from ..models.functional import mapped
from ..numerics.devices import exact
from ..tasks.counting import Counting, Marks, Tally, gathered
from ..training.loop import Modules, evaluation_chunk
from .stacked_layers import over_silos
from .vmap_batches import Batch, together
from .vmap_training import Silos, Values, couples, parts_of, rows_of

_Found: TypeAlias = tuple[Batch, dict[str, Tensor]]  # a call, and what it measured [m, …] by name

CHUNK = 128  # records of a silo per call, where no record's output depends on the others


@torch.no_grad()
def evaluate(
    method: Method, silos: Silos, places: Sequence[range], counting: Counting
) -> list[Tally]:
    """The counts of each silo's model on its records, in evaluation mode.

    ``places`` are each silo's records in ``silos.x``, maybe none.
    """
    exact, most = _evaluating(silos.modules), chunk(silos.modules, silos.x.shape)
    pieces = list(map(partial(_cut, chunk=most), places))

    def marks(values: Values, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return counting.marks(method.predict(parts_of(silos.modules, values), x), y)

    batches = together(pieces, exact, silos.x.device)
    found = [(batch, over_silos(marks)(*_inputs(silos, batch))) for batch in batches]
    own_marks = [gathered(counting) for _ in range(silos.count)]
    labels: list[list[Marks]] = [[] for _ in range(silos.count)]
    # Only now, since reading marks waits for the device.
    for batch, tensors in found:
        members, longest = _silos(batch, silos.count), batch.places.shape[1]
        lengths = [longest] * len(members)
        if batch.lengths is not None:
            lengths = batch.lengths.tolist()
        host = {name: mark.cpu().numpy() for name, mark in tensors.items()}
        truth = silos.y[batch.places].cpu().numpy()
        for row, (silo, length) in enumerate(zip(members, lengths, strict=True)):
            # Records that only fill up a row do not count.
            labels[silo].append(truth[row, :length])
            for name, mark in host.items():
                own_marks[silo][name].append(mark[row, :length])
    return [counting.count(*own) for own in zip(own_marks, labels, strict=True)]


@torch.no_grad()
def measure(
    measurement: Measurement, silos: Silos, places: Sequence[range], rows: bool = False
) -> list[dict[str, Tensor]]:
    """A measurement's sums over each silo's records, or its ``rows``, as ``training.measure``.

    What is added up cannot be taken out again, so no batch is filled up.
    """
    cut = _halved
    # Batch norm without running statistics needs the chunks of silos one by one.
    if _evaluating(silos.modules):
        cut = partial(_cut, chunk=chunk(silos.modules, silos.x.shape))

    def measured(values: Values, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = measurement(parts_of(silos.modules, values), x, y)
        # In float64, as ``training.measure`` adds up.
        return {name: tensor.double() for name, tensor in found.items()}

    batches = together(list(map(cut, places)), True, silos.x.device)
    found = ((batch, over_silos(measured)(*_inputs(silos, batch))) for batch in batches)
    return _rows_by_silo(found, silos.count) if rows else _sums_by_silo(found, silos.count)


def _inputs(silos: Silos, batch: Batch) -> tuple[Values, Tensor, Tensor]:
    """The values, records and labels that a call takes."""
    return rows_of(silos.values, batch.rows), silos.x[batch.places], silos.y[batch.places]


def _rows_by_silo(found: Iterable[_Found], count: int) -> list[dict[str, Tensor]]:
    pieces: list[dict[str, list[Tensor]]] = [{} for _ in range(count)]
    for batch, tensors in found:
        members = _silos(batch, count)
        for name, tensor in tensors.items():
            for silo, own in zip(members, tensor.cpu(), strict=True):
                pieces[silo].setdefault(name, []).append(own)
    return [{name: torch.cat(own) for name, own in each.items()} for each in pieces]


def _sums_by_silo(found: Iterable[_Found], count: int) -> list[dict[str, Tensor]]:
    sums: dict[str, Tensor] = {}
    for batch, tensors in found:
        for name, tensor in tensors.items():
            if name not in sums:
                sums[name] = tensor.new_zeros(count, *tensor.shape[1:])
            sums[name][batch.rows] += tensor

    # One transfer per name. Clones, since a silo's view would keep the sums of all in memory.
    tables: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, column in sums.items():
        for table, tensor in zip(tables, column.cpu(), strict=True):
            table[name] = tensor.clone()
    return tables


def chunk(modules: Modules, shape: Sequence[int]) -> int:
    """How many of a silo's records, of a set of this shape [N, …], are evaluated per call.

    The modules are put in evaluation mode. It is that of ``evaluation_chunk`` if a record's
    output depends on the others, else ``CHUNK``.
    """
    # Batch norm without running statistics gives other outputs in chunks of another size, so these
    # are cut as they are where silos are evaluated one by one.
    return evaluation_chunk(shape, modules) if _evaluating(modules) else CHUNK


def _silos(batch: Batch, count: int) -> list[int]:
    """The silos of a call."""
    silos: list[int] = torch.arange(count, device=batch.places.device)[batch.rows].tolist()
    return silos


def saved_bytes(
    predict: Callable[[Any, Tensor], Tensor], modules: Modules, shape: Sequence[int]
) -> int:
    """About how many bytes a backward pass keeps of one record's forward pass.

    The values of the modules themselves do not count.
    """
    # Saved parameters and buffers belong to the model, not to a record.
    own: set[int] = set()
    for module in modules.values():
        own.update(map(_address, module.parameters()))
        own.update(map(_address, module.buffers()))
    # by address, each once; a tensor that is kept is at no other's address
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in own:
            kept[address] = tensor
        return tensor

    _evaluating(modules)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        predict(modules, torch.zeros(2, *shape))  # two: batch norm takes no single number
    # Half, since the pass was of two records.
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) // 2


def over_one_silo(
    predict: Callable[[Parts, Tensor], Tensor],
) -> Callable[[Mapping[str, nn.Module], Tensor], Tensor]:
    """The prediction as it is computed for many silos at once, of one silo."""

    def run(modules: Mapping[str, nn.Module], x: Tensor) -> Tensor:
        values: dict[str, Tensors] = {}
        for part, module in modules.items():
            values[part] = dict(module.named_parameters()) | dict(module.named_buffers())
        found = over_silos(lambda values, x: predict(parts_of(modules, values), x))
        # In which form a convolution is computed depends on the precision.
        with exact():
            return found(mapped(values, lambda tensor: tensor[None]), x[None])[0]

    return run


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _evaluating(modules: Modules) -> bool:
    """Puts the modules in evaluation mode; whether a record's output depends on others then."""
    for module in modules.values():
        module.eval()
    return couples(modules)


def _cut(places: range, chunk: int) -> list[NDArray[np.int64]]:
    return [np.asarray(places[start : start + chunk]) for start in range(0, len(places), chunk)]


def _halved(places: range) -> list[NDArray[np.int64]]:
    """Pieces whose lengths are powers of two, so that silos of all sizes share some lengths."""
    whole = len(places) // CHUNK * CHUNK
    pieces = _cut(places[:whole], CHUNK)
    rest = np.asarray(places[whole:])
    length = CHUNK
    while len(rest):
        length //= 2
        # The binary digits of the rest: each length once at most.
        if len(rest) >= length:
            pieces.append(rest[:length])
            rest = rest[length:]
    return pieces
