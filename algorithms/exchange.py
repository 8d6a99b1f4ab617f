"""The four exchanges, and their plain arithmetic.

Everything that a method sends upward is a part, and each part crosses by one of four exchanges (DESIGN.md section 1):

=========  =============================================  ===================================================
exchange   silo i gives                                   the coordinator needs only
=========  =============================================  ===================================================
``Sum``    tensors x_i and a weight w_i                   sum_i w_i x_i and sum_i w_i, over all or row by row
``Mix``    tensors x_i                                    for each recipient r: sum_j A_rj x_j
``Gram``   vectors v_i, one per group                     the inner products <v_i, v_j>, or those of sketches
``Each``   tensors x_i                                    x_i itself
=========  =============================================  ===================================================

The folds take the silos in one fixed order and accumulate in float64, element by element, so the simulator and the
coordinator give the same bits (Gram uses a matrix product: the same bits at one thread).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from math import fsum, prod
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..errors import LocalError
from .devices import CPU
from .sketch import count_sketch

Tensors = Mapping[str, Tensor]
Read = Callable[[str, str], Tensor]  # (silo, tensor name) -> what that silo gave

WEIGHT = "@weight"  # the name under which a Sum's weight crosses; "@" cannot start a tensor's own name
BLOCK = 1 << 16  # elements of a float64 accumulator that are worked on at a time: 512 KiB, inside a core's cache
WORKERS = 2  # threads that fold a large tensor
GPU_BLOCK = 1 << 24  # elements that are folded side by side on a GPU
REGION = 1 << 19  # elements of which there is an accumulator at all: 4 MiB, whatever the size of a tensor
LARGEST_WEIGHT = 2.0**53  # counts of records are exact up to here
MOST_TENSORS = 16_384  # of one transfer: a manifest has a header of each
MIX_BITS = 32  # SECURITY.md rule 19: the integer weights of a Mix row add up to 2^32 exactly

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Kind(IntEnum):
    """What a part is, in the field's words; the numbers are those of ``PartKind`` in proto/tensor.proto."""

    WHOLE_MODEL = 1
    BACKBONE = 2
    INTER_LEARNING_MODEL = 3
    HEADER_ROWS = 4
    PROTOTYPES = 5
    CANONICAL_MODELS = 6
    CLASSIFIER_ROWS = 7
    MEMBERSHIP = 8
    COUNTS = 9
    METRIC = 10
    SKETCH = 11
    KEY = 12
    SHARE = 13


DISCLOSED = (Kind.COUNTS, Kind.MEMBERSHIP, Kind.METRIC)  # non-negative by nature: their inner products tell them


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (a key of DTYPES) and shape of one tensor that crosses; bounds of its values, where it has some."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    least: float | None = None
    most: float | None = None

    @property
    def elements(self) -> int:
        """Number of elements; Python integers, so no shape overflows it."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.elements * DTYPES[self.dtype].itemsize


def specs_of(tensors: Tensors) -> tuple[TensorSpec, ...]:
    """Specs of the given tensors, in their order."""
    return tuple(TensorSpec(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items())


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum over silos.

    ``mean``: sum_i w_i x_i / sum_i w_i with one weight a silo. ``ratio``: the same row by row, w_i of shape [rows],
    rows without weight come back as zeros. ``total``: sum_i x_i, no weight, in float64 (int64 stays int64). ``most`` is
    the largest weight that a silo may have: 1 where it says whether a silo has a row.
    """

    form: Literal["mean", "ratio", "total"] = "mean"
    most: float = LARGEST_WEIGHT


@dataclass(frozen=True, slots=True)
class Mix:
    """A weighted sum per recipient, over the last version that each silo gave.

    ``directed``: over what was given in one round alone, by weights that are known before it, for who was away then.
    """

    directed: bool = False


@dataclass(frozen=True, slots=True)
class Gram:
    """Inner products of one tensor [groups, d] per silo, group by group; never for counts or proportions.

    ``sketch`` = k > 0: of sketches [groups, k] of the vectors, which alone cross, as float32 (sketch.py). In the clear
    all know their map, that of ``seed``; blind it follows from the key that the job's silos share.
    """

    sketch: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Each:
    """The value of each silo, visible to the coordinator."""


Exchange = Sum | Mix | Gram | Each


@dataclass(frozen=True, slots=True)
class Part:
    """What crosses together: a name, a kind, an exchange and the tensors in their wire order."""

    name: str
    kind: Kind
    exchange: Exchange
    tensors: tuple[TensorSpec, ...]

    @property
    def given(self) -> tuple[TensorSpec, ...]:
        """Specs of everything that a method gives for this part, the weight of a Sum included."""
        match self.exchange:
            case Sum("mean", most):
                return (*self.tensors, TensorSpec(WEIGHT, "float64", (), 0.0, most))
            case Sum("ratio", most):
                return (*self.tensors, TensorSpec(WEIGHT, "float64", self.tensors[0].shape[:1], 0.0, most))
            case _:
                return self.tensors

    @property
    def wire(self) -> tuple[TensorSpec, ...]:
        """Specs of everything that a silo sends for this part: what is given, or the sketches of it."""
        if not self.sketch:
            return self.given
        (spec,) = self.tensors
        return (TensorSpec(spec.name, "float32", (*spec.shape[:-1], self.sketch)),)

    @property
    def sketch(self) -> int:
        """Numbers of each sketch in which the vectors of a Gram cross; 0 where they cross as they are."""
        return self.exchange.sketch if isinstance(self.exchange, Gram) else 0


@dataclass(frozen=True, slots=True)
class Gift:
    """What a silo gives for one part: its tensors and, for a Sum of form mean or ratio, the weight."""

    tensors: Tensors
    weight: float | Tensor | None = None


class Exchanges(Protocol):
    """One way to run the exchanges, chosen once at job admission: in the clear, or blind."""

    def give(self, part: Part, gift: Gift) -> dict[str, Tensor]:
        """At the silo: what ``collect`` reads, exactly ``part.wire`` in its order; blind, ``part.given`` (laid_out)."""
        ...

    def collect(self, part: Part, members: Sequence[str], read: Read) -> dict[str, Tensor]:
        """At the coordinator: the result over ``members``, in that order; empty for a Mix."""
        ...

    def mix(self, part: Part, recipient: str, weights: Mapping[str, float], read: Read) -> dict[str, Tensor] | None:
        """One recipient's row over the last version of each silo in ``weights``, which may name the recipient too.

        None where it gets no row: a blind one that would show it too much (SECURITY.md rules 4 to 6).
        """
        ...


class Plain:
    """The exchanges in the clear: what each silo gives is visible to the coordinator.

    ``device`` is where a Mix is folded, a simulation's GPU, say. The bits are the same on each.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device

    def give(self, part: Part, gift: Gift) -> dict[str, Tensor]:
        """What leaves of a gift; LocalError names what does not fit."""
        given = laid_out(part, gift)
        match part.exchange:
            case Gram(sketch, seed) if sketch:
                (spec,), (vectors,) = part.wire, given.values()
                short = torch.stack([count_sketch(vector, sketch, seed) for vector in vectors])
                return {spec.name: _fitting(part, spec, short.to(DTYPES[spec.dtype]))}
            case _:
                return given

    def collect(self, part: Part, members: Sequence[str], read: Read) -> dict[str, Tensor]:
        """Fold what the members gave; ``members`` must not be empty.

        Sum: the tensors of the part and ``@weight`` (the total; absent for form total). Gram: ``gram``
        [groups, n, n] float64. Each: every tensor with a leading axis [n]. Mix: nothing, the versions stay stored.
        """
        if not members:
            raise LocalError(f"part {part.name!r}: nothing to fold, no silo gave it")
        match part.exchange:
            case Sum("total"):
                return {spec.name: _total(spec, members, read) for spec in part.tensors}
            case Sum():
                return _ratio(part, members, read)
            case Gram():
                (spec,) = part.tensors
                vectors = torch.stack([read(silo, spec.name).double() for silo in members], dim=1)  # [groups, n, d]
                return {"gram": vectors @ vectors.transpose(1, 2)}
            case Each():
                return {s.name: torch.stack([read(silo, s.name) for silo in members]) for s in part.tensors}
            case Mix():
                return {}

    def mix(self, part: Part, recipient: str, weights: Mapping[str, float], read: Read) -> dict[str, Tensor]:
        """Row sum_j a_j x_j / 2^32 with a_j the integer weights of SECURITY.md rule 19, folded in float64."""
        integers = integer_weights(list(weights.values()))
        shares = {s: integer / 2**MIX_BITS for s, integer in zip(weights, integers, strict=True) if integer}
        row = _weighted(part.tensors, shares, read, 1.0, self._device)
        return {name: tensor.cpu() for name, tensor in row.items()}


PLAIN = Plain()


def laid_out(part: Part, gift: Gift) -> dict[str, Tensor]:
    """A gift checked against its part, exactly ``part.given`` in its order; LocalError names what does not fit."""
    given = dict(gift.tensors)
    if part.given != part.tensors:
        if gift.weight is None:
            raise LocalError(f"part {part.name!r}: a Sum of form {part.exchange!r} needs a weight")
        given[WEIGHT] = torch.as_tensor(gift.weight, dtype=torch.float64)
        if fault := value_fault(part.given[-1], given[WEIGHT]):
            raise LocalError(f"part {part.name!r}: its weight {fault}")
    elif gift.weight is not None:
        raise LocalError(f"part {part.name!r}: {part.exchange!r} takes no weight")
    if set(given) != {spec.name for spec in part.given}:
        raise LocalError(f"part {part.name!r}: gave {sorted(given)}, its schema has {[s.name for s in part.given]}")
    return {spec.name: _fitting(part, spec, given[spec.name]) for spec in part.given}


def _fitting(part: Part, spec: TensorSpec, tensor: Tensor) -> Tensor:
    if not fits(spec, tensor):
        raise LocalError(
            f"part {part.name!r}: tensor {spec.name!r} is {DTYPE_NAMES.get(tensor.dtype, tensor.dtype)} "
            f"{list(tensor.shape)}, its schema says {spec.dtype} {list(spec.shape)}"
        )
    if fault := value_fault(spec, tensor):
        raise LocalError(f"part {part.name!r}: tensor {spec.name!r} {fault}; training has diverged, lower the lr")
    return tensor.detach().contiguous()


def _total(spec: TensorSpec, members: Sequence[str], read: Read) -> Tensor:
    total = torch.zeros(spec.shape, dtype=torch.int64 if spec.dtype == "int64" else torch.float64)
    for silo in members:
        total += read(silo, spec.name)
    return total


def _ratio(part: Part, members: Sequence[str], read: Read) -> dict[str, Tensor]:
    """Weighted mean, over all or by leading row, a silo after another."""
    weights = [read(silo, WEIGHT) for silo in members]
    total = torch.stack(weights).sum(0)  # [] or [rows]
    divisor = torch.where(total > 0, total, 1.0)
    if not total.ndim:
        shares = {silo: float(weight) for silo, weight in zip(members, weights, strict=True)}
        return {**_weighted(part.tensors, shares, read, float(divisor), CPU), WEIGHT: total}
    folded: dict[str, Tensor] = {}
    for spec in part.tensors:  # row by row; header rows and prototypes are small
        column = (-1,) + (1,) * (len(spec.shape) - 1)
        fold = torch.zeros(spec.shape, dtype=torch.float64)
        for silo, weight in zip(members, weights, strict=True):
            fold += read(silo, spec.name).double() * weight.reshape(column)
        folded[spec.name] = (fold / divisor.reshape(column)).to(DTYPES[spec.dtype])
    return {**folded, WEIGHT: total}


def _weighted(
    specs: Sequence[TensorSpec], shares: Mapping[str, float], read: Read, divisor: float, device: torch.device
) -> dict[str, Tensor]:
    """sum_i share_i x_i / divisor in float64 of each tensor, element by element in the order of the silos.

    On the ``device``, where each product is rounded before it is added, as here.
    """
    found: dict[str, Tensor] = {}
    most = BLOCK if device == CPU else GPU_BLOCK
    for dtype in sorted({spec.dtype for spec in specs}):
        for pack in _packs([spec for spec in specs if spec.dtype == dtype], most):
            if pack[0].elements > most and device == CPU:
                found[pack[0].name] = _weighted_large(pack[0], shares, read, divisor)
            else:
                found |= _weighted_together(pack, shares, read, divisor, device)
    return {spec.name: found[spec.name] for spec in specs}


def _packs(specs: Sequence[TensorSpec], most: int) -> Iterator[list[TensorSpec]]:
    """Tensors of so many elements together at most; one with more is alone."""
    pack: list[TensorSpec] = []
    for spec in specs:
        if pack and sum(own.elements for own in pack) + spec.elements > most:
            yield pack
            pack = []
        pack.append(spec)
    if pack:
        yield pack


def _weighted_together(
    specs: Sequence[TensorSpec], shares: Mapping[str, float], read: Read, divisor: float, device: torch.device
) -> dict[str, Tensor]:
    """Of tensors of one dtype, side by side: one by one, calls would take most of the time."""
    dtype, sizes = DTYPES[specs[0].dtype], [spec.elements for spec in specs]
    given = torch.empty(sum(sizes), dtype=dtype, device=device)
    values = torch.empty(sum(sizes), dtype=torch.float64, device=device)
    total = torch.zeros_like(values)
    for silo, share in shares.items():
        torch.cat([read(silo, spec.name).to(device).reshape(-1) for spec in specs], out=given)
        total += values.copy_(given).mul_(share)
    folded = torch.split((total / divisor).to(dtype), sizes)
    return {spec.name: own.reshape(spec.shape).clone() for spec, own in zip(specs, folded, strict=True)}


def _weighted_large(spec: TensorSpec, shares: Mapping[str, float], read: Read, divisor: float) -> Tensor:
    """Region by region, block by block: no large temporary, and in cache.

    A region is read anew from each silo, so that of mapped files no more than a region is in memory for each worker.
    """
    result = torch.empty(spec.elements, dtype=DTYPES[spec.dtype])

    def fold(start: int) -> None:
        here = slice(start, start + REGION)
        total = torch.zeros(min(REGION, spec.elements - start), dtype=torch.float64)
        for silo, share in shares.items():
            values = read(silo, spec.name).reshape(-1)[here]
            for at in range(0, len(total), BLOCK):
                block = slice(at, at + BLOCK)
                total[block] += values[block].double() * share
        target = result[here]
        for at in range(0, len(total), BLOCK):
            block = slice(at, at + BLOCK)
            target[block] = total[block] / divisor

    starts = range(0, spec.elements, REGION)
    if len(starts) > 1:  # regions do not overlap: who folds which does not matter to the bits
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(fold, starts))
    else:
        fold(0)
    return result.reshape(spec.shape)


def fits(spec: TensorSpec, tensor: Tensor) -> bool:
    """Whether a tensor has its spec's dtype and shape."""
    return tensor.dtype == DTYPES[spec.dtype] and tuple(tensor.shape) == spec.shape


def value_fault(spec: TensorSpec, tensor: Tensor) -> str:
    """What is wrong with a tensor's values; empty if nothing is."""
    if not all_finite(tensor):
        return "holds NaN or infinity"
    return bounds_fault(spec, tensor)


def bounds_fault(spec: TensorSpec, tensor: Tensor) -> str:
    """What is wrong with finite values beside the bounds of their spec; empty if nothing is."""
    if tensor.numel() == 0 or (spec.least is None and spec.most is None):
        return ""
    low, high = torch.aminmax(tensor)
    if spec.least is not None and low.item() < spec.least:
        return f"holds a value below {spec.least:g}"
    if spec.most is not None and high.item() > spec.most:
        return f"holds a value above {spec.most:g}"
    return ""


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite; without a temporary of the tensor's size."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    low, high = torch.aminmax(tensor)  # NaN comes through
    return bool(torch.isfinite(low) and torch.isfinite(high))


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Non-negative integers in the proportion of ``weights`` that add up to 2^32 exactly, by largest remainder.

    Ties go to the earlier silo. Raises LocalError for weights that are negative, not finite or all zero.
    """
    if not weights or any(not 0 <= w < float("inf") for w in weights) or sum(weights) <= 0:
        raise LocalError(f"mixing weights {list(weights)} are not non-negative finite numbers with a positive sum")
    whole = fsum(weights)  # the same whatever adds up
    exact = [w / whole * 2**MIX_BITS for w in weights]
    floors = [int(e) for e in exact]
    missing = 2**MIX_BITS - sum(floors)
    by_remainder = sorted(range(len(weights)), key=lambda i: (floors[i] - exact[i], i))
    for i in by_remainder[:missing]:
        floors[i] += 1
    return tuple(floors)


def walk_tensors(parts: Sequence[Part]) -> Iterator[tuple[Part, TensorSpec]]:
    """All tensors that cross, in wire order."""
    for part in parts:
        for spec in part.wire:
            yield part, spec
