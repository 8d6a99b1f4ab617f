"""Codecs: forms in which a part's tensors take fewer bytes on the way to the coordinator.

A job's [transport] table names one (transport.py). What it makes are the tensors that cross: they
stand in the signed schema, the gate checks and hashes them, policy and ledger name their dtypes and
bytes. The coordinator decodes them where it folds, a region at a time, so a coded upload takes no
more memory than another.

==========  ==============================================  =====================
codec       what crosses of a float32 tensor                bytes of an element
==========  ==============================================  =====================
bfloat16    ``name`` bfloat16, rounded to nearest, ties to  2
            even
int8        ``name`` int8, in steps; ``name@scale``         1, and 4 for a row
            float32 [rows], the size of a row's steps
==========  ==============================================  =====================

Tensors of one dimension and scalars, such as biases, statistics of batch norm and weights of sums,
cross as they are: they are few bytes, and some may not become negative.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .parts import UNBOUNDED, Read, TensorSpec

SCALE = "@scale"  # behind the name of a tensor in steps
MOST_STEPS = 127.0
LARGEST_SCALE = 2.0**120  # times 127 it is finite


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


def in_steps(steps: Tensor, scale: Tensor, region: slice) -> Tensor:
    """These elements of rows in steps; ``steps`` is int8 [rows · width], ``scale`` [rows]."""
    places = torch.arange(len(steps), device=steps.device)[region]
    return steps[region].float() * scale[places // (len(steps) // len(scale))]


class Decoded:
    """Reads uploads as the numbers that they stand for; what is not coded passes as it is."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def __call__(self, silo: str, name: str) -> Tensor:
        """A whole tensor, float32 where it was coded."""
        shape = self._read(silo, name).shape
        return self.region(silo, name, slice(None)).reshape(shape)

    def region(self, silo: str, name: str, region: slice) -> Tensor:
        """The same of these elements alone, as one row."""
        crossed = self._read(silo, name).reshape(-1)
        if crossed.dtype == torch.int8:
            return in_steps(crossed, self._read(silo, name + SCALE), region)
        return _floats(crossed[region])


def region_of(read: Read, silo: str, name: str, region: slice) -> Tensor:
    """Elements of a tensor, row-major; of a coded one no others are decoded."""
    if isinstance(read, Decoded):
        return read.region(silo, name, region)
    return read(silo, name).reshape(-1)[region]


def _floats(value: Tensor) -> Tensor:
    return value.float() if value.dtype == torch.bfloat16 else value
