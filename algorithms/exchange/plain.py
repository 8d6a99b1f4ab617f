"""The exchanges in the clear: the plain arithmetic.

The folds take the silos in one fixed order and accumulate in float64, element by element, so the
simulator and the coordinator give the same bits (Gram uses a matrix product: the same bits at one
thread).
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter

import torch
from torch import Tensor

from ...errors import LocalError
from ..numerics.devices import CPU
from .codec import region_of
from .count_sketch import count_sketch
from .parts import (
    DTYPES,
    MIX_BITS,
    REGION,
    WEIGHT,
    Contribution,
    Each,
    Gram,
    Mix,
    Part,
    Read,
    Sum,
    TensorSpec,
    checked,
    elements_of,
    integer_weights,
    laid_out,
    picked,
)

# elements of a float64 accumulator that are worked on at a time: 512 KiB, inside a core's cache
BLOCK = 1 << 16
WORKERS = 2  # threads that fold a large tensor
GPU_BLOCK = 1 << 24  # elements that are folded side by side on a GPU
GPU_LEAST = 1 << 20  # elements of a part whose mean a GPU folds


class PlainExchange:
    """The exchanges in the clear: the coordinator sees what each silo uploads.

    A Mix, and the mean of a large part, is folded on the ``device``, such as a simulation's GPU;
    the bits are the same on each.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device

    def contribute(self, part: Part, contribution: Contribution) -> dict[str, Tensor]:
        """The tensors to upload for a contribution; LocalError names what does not fit.

        The tensors are exactly those of ``part.given``, in its order, or a sketch.
        """
        tensors = laid_out(part, contribution)
        match part.exchange:
            case Gram(sketch, seed) if sketch:
                (spec,), (vectors,) = part.wire, tensors.values()
                # Each group of a Gram is one vector, so each row is sketched on its own.
                short = torch.stack([count_sketch(vector, sketch, seed) for vector in vectors])
                return {spec.name: checked(part, spec, short.to(DTYPES[spec.dtype]))}
            case _:
                return tensors

    def collect(self, part: Part, members: Sequence[str], read: Read) -> dict[str, Tensor]:
        """Fold what the members uploaded; ``members`` must not be empty.

        Sum: the tensors of the part and ``@weight`` (the total; absent for form total). Gram:
        ``gram`` [groups, n, n] float64. Each: every tensor with a leading axis [n]. Mix: nothing,
        the versions stay stored.
        """
        if not members:
            raise LocalError(f"part {part.name!r}: nothing to average, no silo uploaded it")
        match part.exchange:
            case Sum("total"):
                return _by_tensor(part, lambda spec: _total(spec, members, read))
            case Sum():
                # Of small parts the calls of a GPU would take longer than the sums of a CPU.
                large = elements_of(part.tensors) >= GPU_LEAST
                return _ratio(part, members, read, self._device if large else CPU)
            case Gram():
                (spec,) = part.tensors
                # [groups, n, d]
                vectors = torch.stack([read(silo, spec.name).double() for silo in members], dim=1)
                return {"gram": vectors @ vectors.transpose(1, 2)}
            case Each():
                return _by_tensor(part, lambda spec: _stacked(spec, members, read))
            case Mix():
                return {}

    def mix(
        self, part: Part, recipient: str, weights: Mapping[str, float], read: Read
    ) -> dict[str, Tensor]:
        """Row sum_j a_j x_j / 2^32, folded in float64.

        The a_j are the integer weights of security rule 19. ``weights`` need not add up to 1;
        LocalError if none is positive.
        """
        return _weighted(part.tensors, _shares(weights), read, 1.0, self._device)

    def mix_rows(
        self, part: Part, rows: Mapping[str, Mapping[str, float]], read: Read
    ) -> dict[str, dict[str, Tensor]]:
        """``mix`` for each recipient, with the same bits."""
        # On a CPU the sums take the time, and on a GPU the calls.
        if self._device == CPU or not part.tensors:
            return {silo: self.mix(part, silo, weights, read) for silo, weights in rows.items()}
        shares = list(map(_shares, rows.values()))
        order = sorted(set().union(*shares))
        table = torch.zeros(len(rows), len(order), dtype=torch.float64)
        for row, own in zip(table, shares, strict=True):
            row[[*map(order.index, own)]] = torch.tensor([*own.values()], dtype=torch.float64)
        packs = _packs(part.tensors, GPU_BLOCK)
        made = [_weighted_together(own, table, order, read, 1.0, self._device) for own in packs]
        found = zip(rows, zip(*made, strict=True), strict=True)
        return {silo: picked(part.tensors, ChainMap(*row)) for silo, row in found}


PLAIN = PlainExchange()


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    """The weights of a row as the exchange takes them, in the order in which it adds versions up.

    Those that are 0 are left out: such silos may have uploaded nothing.
    """
    # The plain run uses the same integers, so that blind and plain give the same row.
    integers = dict(zip(weights, integer_weights(list(weights.values())), strict=True))
    # By name, so that all rows have one order. Division by a power of two is exact.
    return {silo: integers[silo] / 2**MIX_BITS for silo in sorted(filter(integers.get, integers))}


def _by_tensor(part: Part, fold: Callable[[TensorSpec], Tensor]) -> dict[str, Tensor]:
    return {spec.name: fold(spec) for spec in part.tensors}


def _total(spec: TensorSpec, members: Sequence[str], read: Read) -> Tensor:
    # Counts stay whole: float64 holds them exactly only up to 2^53.
    dtype = torch.int64 if spec.dtype == "int64" else torch.float64
    total = torch.zeros(spec.shape, dtype=dtype)
    for silo in members:
        total += read(silo, spec.name)
    return total


def _stacked(spec: TensorSpec, members: Sequence[str], read: Read) -> Tensor:
    return torch.stack([read(silo, spec.name) for silo in members])


def _ratio(
    part: Part, members: Sequence[str], read: Read, device: torch.device
) -> dict[str, Tensor]:
    """Weighted mean, over all or by leading row, one silo after another."""
    weights = [read(silo, WEIGHT) for silo in members]
    total = torch.stack(weights).sum(0)  # [] or [rows]
    # Rows that nobody holds have weight 0, and come back as zeros instead of NaN.
    divisor = torch.where(total > 0, total, 1.0)
    if not total.ndim:
        shares = dict(zip(members, map(float, weights), strict=True))
        return {**_weighted(part.tensors, shares, read, float(divisor), device), WEIGHT: total}

    # row by row; header rows and prototypes are small
    by_row = dict(zip(members, weights, strict=True))
    folded = _by_tensor(part, lambda spec: _by_row(spec, by_row, read, divisor))
    return {**folded, WEIGHT: total}


def _by_row(spec: TensorSpec, weights: Mapping[str, Tensor], read: Read, divisor: Tensor) -> Tensor:
    # One weight per row, broadcast over the other axes.
    column = (-1,) + (1,) * (len(spec.shape) - 1)
    fold = torch.zeros(spec.shape, dtype=torch.float64)
    for silo, weight in weights.items():
        fold += read(silo, spec.name).double() * weight.reshape(column)
    # Divided once, after the fold, so that it is rounded once.
    return (fold / divisor.reshape(column)).to(DTYPES[spec.dtype])


def _weighted(
    specs: Sequence[TensorSpec],
    shares: Mapping[str, float],
    read: Read,
    divisor: float,
    device: torch.device,
) -> dict[str, Tensor]:
    """sum_i share_i x_i / divisor in float64 of each tensor, in the order of the silos.

    The result is on the host.
    """
    # Each product is rounded before it is added, on a GPU too: a fused multiply-add would give
    # other bits.
    found: dict[str, Tensor] = {}
    on_cpu = device == CPU
    for pack in _packs(specs, BLOCK if on_cpu else GPU_BLOCK):
        first = pack[0]
        if on_cpu and first.elements > BLOCK:
            found[first.name] = _weighted_large(first, shares, read, divisor)
        else:
            row = torch.tensor([[*shares.values()]], dtype=torch.float64)
            found |= next(_weighted_together(pack, row, [*shares], read, divisor, device))
    return picked(specs, found)


def _packs(specs: Sequence[TensorSpec], most: int) -> list[list[TensorSpec]]:
    """Tensors of one dtype and ``most`` elements together at most; a larger one is alone."""
    packs: list[list[TensorSpec]] = []
    # Sorted by dtype: a pack is copied into one tensor, so it has one dtype.
    for spec in sorted(specs, key=lambda spec: spec.dtype):
        if packs and _fits(packs[-1], spec, most):
            packs[-1].append(spec)
        else:
            packs.append([spec])
    return packs


def _fits(pack: Sequence[TensorSpec], spec: TensorSpec, most: int) -> bool:
    return pack[0].dtype == spec.dtype and elements_of((*pack, spec)) <= most


def _weighted_together(
    specs: Sequence[TensorSpec],
    shares: Tensor,
    silos: Sequence[str],
    read: Read,
    divisor: float,
    device: torch.device,
) -> Iterator[dict[str, Tensor]]:
    """The weighted sums of small tensors of one dtype, side by side, on the host.

    One result for each row of shares [rows, silos] float64. Each version is read once for as many
    rows as fit. Adding 0 times a version changes no bit: sums begin at +0, and versions are finite.
    """
    # Tensor by tensor, or row by row on a GPU, the calls would take most of the time.
    dtype, elements = DTYPES[specs[0].dtype], elements_of(specs)
    contribution = torch.empty(elements, dtype=dtype, device=device)
    values = torch.empty(1, elements, dtype=torch.float64, device=device)
    for lot in torch.split(shares.to(device), max(1, GPU_BLOCK // max(1, elements))):
        total = torch.zeros(len(lot), elements, dtype=torch.float64, device=device)
        # Of one row the versions themselves are multiplied: a CPU's cache holds no more.
        term = values if len(lot) == 1 else torch.empty_like(total)
        # Silo by silo in the given order, since sums of floats depend on it.
        for share, silo in zip(lot.T, silos, strict=True):
            flat = [read(silo, spec.name).to(device).reshape(-1) for spec in specs]
            torch.cat(flat, out=contribution)
            total += torch.mul(share[:, None], values.copy_(contribution), out=term)
        for row in (total / divisor).to(dtype).cpu():
            yield _apart(specs, row)


def _apart(specs: Sequence[TensorSpec], flat: Tensor) -> dict[str, Tensor]:
    """The tensors that lie side by side in one."""
    parts = zip(specs, torch.split(flat, [*map(attrgetter("elements"), specs)]), strict=True)
    # Clones, or a state that keeps one tensor would keep the memory of all.
    return {spec.name: own.reshape(spec.shape).clone() for spec, own in parts}


def _blocks(elements: int) -> Iterator[slice]:
    return (slice(at, at + BLOCK) for at in range(0, elements, BLOCK))


def _weighted_large(
    spec: TensorSpec, shares: Mapping[str, float], read: Read, divisor: float
) -> Tensor:
    """The weighted sum of one large tensor, region by region and block by block.

    Each worker reads one region at a time from each silo, so it holds no more than one region of
    mapped files in memory.
    """
    result = torch.empty(spec.elements, dtype=DTYPES[spec.dtype])

    def fold(start: int) -> None:
        region = slice(start, start + REGION)
        # Each region has its own accumulator, so workers share nothing.
        total = torch.zeros(min(REGION, spec.elements - start), dtype=torch.float64)
        for silo, share in shares.items():
            values = region_of(read, silo, spec.name, region)
            # Block by block, so that accumulator and temporary stay in the core's cache.
            for block in _blocks(len(total)):
                total[block] += values[block].double() * share
        target = result[region]
        for block in _blocks(len(total)):
            target[block] = total[block] / divisor

    # Regions do not overlap: which worker folds one does not change the bits.
    starts = range(0, spec.elements, REGION)
    if len(starts) > 1:
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(fold, starts))
    else:
        fold(0)
    return result.reshape(spec.shape)
