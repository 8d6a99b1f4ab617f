"""Processes that compute a round of one silo together, each a share of every batch.

Only their owner knows how they reach one another (silo/training/ranks.py): a method, and the loop
that trains it, ask for sums and no more.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Ranks(Protocol):
    """The processes, as one of them sees them; all of them make the same calls in turn."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, which is the same bits in each."""
        ...

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, through which gradients flow back."""
        ...

    def gathered(self, piece: Tensor, number: int) -> Tensor:
        """The pieces [n] of all processes, one after another; ``number`` is that of the whole."""
        ...


class OneRank:
    """A process alone."""

    rank, size = 0, 1

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to add."""

    def summed(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def gathered(self, piece: Tensor, number: int) -> Tensor:
        """The piece, which is all there is."""
        return piece


ALONE: Ranks = OneRank()
