"""Several inputs of one model, such as an image, a row of laboratory values and a note.

::

    [model.inputs]
    image = { shape = [1, 64, 64] }
    labs = { shape = [7] }
    note = { shape = [128], tokens = 30522 }

A record of a data set is then a dictionary of tensors of these names, and the model's ``forward``
takes them by keyword. Everywhere between the two, a record is one row of numbers: its inputs in
the order of their names, one after another, each flattened. So whatever holds for records of one
tensor holds for these: reading them lazily, batches, differential privacy, silos that are stacked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from keyword import iskeyword
from math import prod
from typing import Annotated, Any, TypeAlias

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from ...files.documents import Strict
from .registry import Shape

Size = Annotated[int, Field(strict=True, ge=1, le=4096)]
Shapes: TypeAlias = Mapping[str, Shape]  # by the name of an input
IMAGE = 3  # sides of an image [channels, height, width]; a volume has one more
MOST_TOKENS = 2**24  # whole numbers up to it are exact in float32


def _argument(name: str) -> str:
    if iskeyword(name):
        raise ValueError(f"{name!r} is a word of Python, which no argument can be named")
    return name


InputName = Annotated[
    str, Field(pattern=r"^[A-Za-z]\w*$", max_length=64), AfterValidator(_argument)
]


class Input(Strict):
    """One input of a model: its shape, and how many different tokens its whole numbers are.

    Without ``tokens`` it is float32. With ``tokens`` it reaches the model as int64 from 0 to
    tokens - 1; other numbers count as the nearest token.
    """

    shape: Annotated[tuple[Size, ...], Field(max_length=4)]
    tokens: Annotated[int, Field(strict=True, ge=0, le=MOST_TOKENS)] = 0


Inputs: TypeAlias = tuple[tuple[str, Input], ...]  # in the order of their names


@dataclass(frozen=True)
class Piece:
    """Where one input stands in a packed record."""

    name: str
    start: int
    end: int
    shape: Shape
    tokens: int

    @property
    def place(self) -> slice:
        """Its numbers among those of a record."""
        return slice(self.start, self.end)

    def of(self, x: Tensor) -> Tensor:
        """The input [B, …] of packed records [B, numbers], as they hold it."""
        return x[:, self.place].reshape(len(x), *self.shape)

    def given(self, x: Tensor) -> Tensor:
        """The input [B, …] as the model takes it."""
        own = self.of(x)
        if not self.tokens:
            return own
        # A record that could not be read is NaN, and no record may end private training.
        return own.nan_to_num().round().clamp(0, self.tokens - 1).long()


def ordered(inputs: Mapping[str, Input]) -> Inputs:
    """The inputs in the order in which a record holds them."""
    return tuple(sorted(inputs.items()))


def packed_shape(inputs: Inputs) -> Shape:
    """The shape [numbers] of a packed record."""
    return (sum(prod(own.shape) for _, own in inputs),)


def shapes_of(inputs: Inputs) -> dict[str, Shape]:
    """The shapes by name."""
    return {name: own.shape for name, own in inputs}


def pieces(inputs: Inputs) -> tuple[Piece, ...]:
    """Where each input stands in a packed record, in order."""
    ends = accumulate((prod(own.shape) for _, own in inputs), initial=0)
    return tuple(
        Piece(name, start, end, own.shape, own.tokens)
        for (name, own), (start, end) in zip(inputs, pairwise(ends), strict=True)
    )


def image_of(inputs: Inputs) -> Piece | None:
    """The one input that is an image or a volume; None where none or several are."""
    found = [piece for piece in pieces(inputs) if len(piece.shape) >= IMAGE]
    return found[0] if len(found) == 1 else None


def pack(record: Mapping[str, Tensor]) -> Tensor:
    """One row of numbers [numbers] float32 of a record's tensors by name."""
    return torch.cat([record[name].reshape(-1).float() for name in sorted(record)])


def unpacked(x: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """The inputs [N, …] by name of packed records [N, numbers], as they hold them."""
    own = ordered({name: Input.model_construct(shape=shape) for name, shape in shapes.items()})
    return {piece.name: piece.of(x) for piece in pieces(own)}


def shown(shapes: Shapes) -> str:
    """Names and shapes for people, such as ``image [1, 64, 64], labs [7]``."""
    texts = [f"{name} {list(shape)}" for name, shape in sorted(shapes.items())]
    return ", ".join(texts) or "one tensor"


def inputs_differ(job: Shapes, own: Shapes) -> str:
    """Why a data set's inputs are not those of a job's model; empty if they are."""
    if job == own:
        return ""
    return (
        f"a record here has {shown(own)}, and the job's model takes {shown(job)}; give what the"
        " model takes (a dictionary of tensors, or arrays x.NAME of a .npz file), or correct"
        " model.inputs"
    )


@dataclass(frozen=True)
class Unpack:
    """A hook by which a module takes packed records, and its ``forward`` their inputs by name."""

    own: tuple[Piece, ...]

    def __call__(
        self, _: nn.Module, args: tuple[Tensor, ...], __: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Tensor]]:
        """The arguments of ``forward`` in place of packed records [B, numbers]."""
        (x,) = args
        return (), {piece.name: piece.given(x) for piece in self.own}


def unpacking(whole: nn.Module, inputs: Inputs) -> None:
    """Have a module take packed records; nothing changes for a module without named inputs."""
    # A hook, and not a module around it: tensors keep the names that they have in the module.
    if inputs:
        whole.register_forward_pre_hook(Unpack(pieces(inputs)), with_kwargs=True)
