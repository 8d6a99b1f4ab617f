"""Records of which nobody knows what is true: what a trained model is asked about."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from torch import Tensor

from ..models.inputs import Shapes

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class NewRecords:
    """Some records ``x`` [B, …] float32, as a model takes them, and the name of each.

    Packed records have the shapes of their ``inputs`` by name (models/inputs.py).
    """

    names: Sequence[str]
    x: Tensor
    inputs: Shapes = field(default_factory=dict)


def in_pieces(found: Iterable[T], rows: int) -> Iterator[list[T]]:
    """So many at a time; the last piece may have fewer."""
    rest = iter(found)
    while piece := list(islice(rest, rows)):
        yield piece
