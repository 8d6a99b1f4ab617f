"""Codecs: forms in which a part's tensors take fewer bytes on the way to the coordinator.

A job's [transport] table names one (transport.py). What it makes are the tensors that cross: they
stand in the signed schema, the gate checks and hashes them, policy and ledger name their dtypes and
bytes. The coordinator decodes them where it folds, a region at a time, so a coded upload takes no
more memory than another.

==========  ==============================================  ===========================
codec       what crosses of a float32 tensor                bytes of an element
==========  ==============================================  ===========================
bfloat16    ``name`` bfloat16, rounded to nearest, ties to  2
            even
int8        ``name`` int8, in steps; ``name@scale``         1, and 4 for a row
            float32 [rows], the size of a row's steps
top-k       ``name@indices`` int32 and ``name@values``      8 of one that crosses, 0 of
            float32, of the share that changed most         another
==========  ==============================================  ===========================

Tensors of one dimension and scalars, such as biases, statistics of batch norm and weights of sums,
cross as they are: they are few bytes, and some may not become negative.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from ...errors import LocalError
from .parts import UNBOUNDED, Part, Read, Tensors, TensorSpec

SCALE = "@scale"  # behind the name of a tensor in steps
MOST_STEPS = 127.0
LARGEST_SCALE = 2.0**120  # times 127 it is finite
INDICES, VALUES = "@indices", "@values"  # behind the name of a tensor of which a share crosses
LARGEST_PLACES = 2**31  # elements whose places int32 holds
LARGEST = torch.finfo(torch.float32).max


def codable(spec: TensorSpec) -> bool:
    """True if a codec may change a tensor: a matrix, at least, of floats without bounds."""
    matrix = len(spec.shape) > 1 and spec.elements > 0
    return matrix and spec.dtype == "float32" and spec.bounds == UNBOUNDED


def source_of(name: str) -> str:
    """The tensor from which a codec makes the one of this name."""
    # Staddle's own names begin with "@", such as that of a weight.
    return name.rpartition("@")[0] or name


@dataclass(frozen=True)
class Bfloat16:
    """The upper half of each float32: its range, and eight bits of precision."""

    feeds_back: bool = False
    compares: bool = False

    def specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensor in half of its bytes."""
        return (replace(spec, dtype="bfloat16"),) if codable(spec) else (spec,)

    def encode(self, spec: TensorSpec, value: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The nearest bfloat16 of each element."""
        coded = value.to(torch.bfloat16)
        return {spec.name: coded}, coded.float()


@dataclass(frozen=True)
class Int8:
    """Each row in steps of 1/127 of its largest magnitude, and what is left out fed back."""

    feeds_back: bool = True
    compares: bool = False

    def specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The steps, and the size of a row's step, whose bounds keep all products finite."""
        if not codable(spec):
            return (spec,)
        steps = replace(spec, dtype="int8", least=-MOST_STEPS, most=MOST_STEPS)
        return steps, TensorSpec(spec.name + SCALE, "float32", spec.shape[:1], 0.0, LARGEST_SCALE)

    def encode(self, spec: TensorSpec, value: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The nearest number of steps, ties to even."""
        rows = value.reshape(spec.shape[0], -1)
        scale = rows.abs().amax(1) / MOST_STEPS
        # A row of zeros has steps of 0; the smallest numbers round to steps a little too small.
        steps = (rows / torch.where(scale > 0, scale, 1.0)[:, None]).round()
        coded = steps.clamp(-MOST_STEPS, MOST_STEPS).to(torch.int8).reshape(spec.shape)
        stands_for = in_steps(coded.reshape(-1), scale, slice(None)).reshape(spec.shape)
        return {spec.name: coded, spec.name + SCALE: scale}, stands_for


@dataclass(frozen=True)
class TopK:
    """The share of a tensor that changed most since it came down; the rest is fed back.

    Of ties the first ones cross, so that the choice is the same everywhere.
    """

    keep: float
    feeds_back: bool = True
    compares: bool = True

    def specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Places in the flat tensor, rising, and what is added there; larger tensors are whole."""
        if not codable(spec) or spec.elements > LARGEST_PLACES:
            return (spec,)
        shape = (max(1, round(spec.elements * self.keep)),)
        places = TensorSpec(spec.name + INDICES, "int32", shape, 0.0, spec.elements - 1.0)
        values = TensorSpec(spec.name + VALUES, "float32", shape, -LARGEST_SCALE, LARGEST_SCALE)
        return places, values

    def encode(self, spec: TensorSpec, value: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The places of the largest magnitudes, and the values there."""
        flat, (places, _) = value.reshape(-1), self.specs(spec)
        order = torch.sort(flat.abs(), descending=True, stable=True).indices
        chosen = order[: places.elements].sort().values
        crossed = flat[chosen]
        stands_for = torch.zeros_like(flat).index_copy_(0, chosen, crossed).reshape(spec.shape)
        return {spec.name + INDICES: chosen.int(), spec.name + VALUES: crossed}, stands_for


def rising(places: Tensor) -> bool:
    """True if each place comes after the one before: none twice."""
    return bool((places[1:] > places[:-1]).all())


def base_of(part: Part, came: Tensors | None) -> dict[str, Tensor]:
    """What coded tensors of a part are compared with; LocalError where nothing came down."""
    if came is None:
        raise LocalError(
            f"part {part.name!r} is coded by how far it is from what came down, and nothing of it"
            " did; choose another transport.codec"
        )
    return {spec.name: came[spec.name] for spec in part.tensors if codable(spec)}


def in_steps(steps: Tensor, scale: Tensor, region: slice) -> Tensor:
    """These elements of rows in steps; ``steps`` is int8 [rows · width], ``scale`` [rows]."""
    places = torch.arange(len(steps), device=steps.device)[region]
    return steps[region].float() * scale[places // (len(steps) // len(scale))]


class Decoded:
    """Reads uploads as the numbers that they stand for; what is not coded passes as it is."""

    def __init__(self, read: Read, base: Tensors = MappingProxyType({})) -> None:
        """``base`` are the tensors of which changes crossed."""
        self._read, self._base = read, base

    def __call__(self, silo: str, name: str) -> Tensor:
        """A whole tensor, float32 where it was coded."""
        if name in self._base:
            return self._changed(silo, name, slice(None)).reshape(self._base[name].shape)
        # Most tensors cross as they are, and a row of a mix reads thousands of them.
        crossed = self._read(silo, name)
        if crossed.dtype == torch.int8:
            return self.region(silo, name, slice(None)).reshape(crossed.shape)
        return _floats(crossed)

    def region(self, silo: str, name: str, region: slice) -> Tensor:
        """The same of these elements alone, as one row."""
        if name in self._base:
            return self._changed(silo, name, region)
        crossed = self._read(silo, name).reshape(-1)
        if crossed.dtype == torch.int8:
            return in_steps(crossed, self._read(silo, name + SCALE), region)
        return _floats(crossed[region])

    def _changed(self, silo: str, name: str, region: slice) -> Tensor:
        base = self._base[name].reshape(-1)
        start, stop, _ = region.indices(len(base))
        places, values = self._read(silo, name + INDICES), self._read(silo, name + VALUES)
        # Places rise, so those of a region stand together.
        ends = torch.searchsorted(places, torch.tensor([start, stop], dtype=places.dtype))
        own = slice(*ends.tolist())
        found = base[region].clone()
        found[places[own].long() - start] += values[own]
        # Of finite numbers the sum is finite, whatever a silo sent.
        return found.clamp(-LARGEST, LARGEST)


def region_of(read: Read, silo: str, name: str, region: slice) -> Tensor:
    """Elements of a tensor, row-major; of a coded one no others are decoded."""
    if isinstance(read, Decoded):
        return read.region(silo, name, region)
    return read(silo, name).reshape(-1)[region]


def _floats(value: Tensor) -> Tensor:
    return value.float() if value.dtype == torch.bfloat16 else value
