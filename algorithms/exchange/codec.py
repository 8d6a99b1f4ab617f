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
==========  ==============================================  =====================

Tensors of one dimension and scalars, such as biases, statistics of batch norm and weights of sums,
cross as they are: they are few bytes, and some may not become negative.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import LocalError
from .parts import UNBOUNDED, Part, Read, Tensors, TensorSpec, value_fault


def codable(spec: TensorSpec) -> bool:
    """True if a codec may change a tensor: a matrix, at least, of floats without bounds."""
    matrix = len(spec.shape) > 1 and spec.elements > 0
    return matrix and spec.dtype == "float32" and spec.bounds == UNBOUNDED


@dataclass(frozen=True)
class Bfloat16:
    """The upper half of each float32: its range, and eight bits of precision."""

    def specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensor in half of its bytes."""
        return (replace(spec, dtype="bfloat16"),) if codable(spec) else (spec,)

    def encode(self, spec: TensorSpec, value: Tensor) -> dict[str, Tensor]:
        """The nearest bfloat16 of each element."""
        return {spec.name: value.to(torch.bfloat16)}


def encoded(part: Part, given: Tensors) -> dict[str, Tensor]:
    """Exactly ``part.wire`` of the tensors that an exchange made of a contribution.

    LocalError for a value that no longer is one once it is coded.
    """
    if part.codec is None:
        return dict(given)
    made: dict[str, Tensor] = {}
    for spec in part.given:
        value = given[spec.name]
        made |= part.codec.encode(spec, value) if codable(spec) else {spec.name: value}
    for spec in part.wire:
        # A float32 next to the largest rounds to infinity.
        if fault := value_fault(spec, made[spec.name]):
            raise LocalError(
                f"part {part.name!r}: tensor {spec.name!r} {fault} once it is coded; training has"
                " diverged, lower the lr"
            )
    return made


class Decoded:
    """Reads uploads as the numbers that they stand for; what is not coded passes as it is."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def __call__(self, silo: str, name: str) -> Tensor:
        """A whole tensor, float32 where it was coded."""
        return _floats(self._read(silo, name))

    def region(self, silo: str, name: str, region: slice) -> Tensor:
        """The same of these elements alone, as one row."""
        return _floats(self._read(silo, name).reshape(-1)[region])


def region_of(read: Read, silo: str, name: str, region: slice) -> Tensor:
    """Elements of a tensor, row-major; of a coded one no others are decoded."""
    if isinstance(read, Decoded):
        return read.region(silo, name, region)
    return read(silo, name).reshape(-1)[region]


def _floats(value: Tensor) -> Tensor:
    return value.float() if value.dtype == torch.bfloat16 else value
