"""Processes that hold pieces of weights, played by one: it knows what the others hold."""

from torch import nn

from staddle.algorithms.numerics.sharded_weight import sharded


class Played:
    """One of ``size`` processes, and a record of what was gathered."""

    def __init__(self, rank=0, size=3):
        self.rank, self.size, self.whole, self.numbers = rank, size, {}, []

    def shard(self, weight, number=1):
        """The piece of this process."""
        flat = weight.detach().flatten()
        self.whole[number] = nn.functional.pad(flat, (0, -len(flat) % self.size))
        return sharded(weight, self, number)

    def gathered(self, piece, number):
        """The pieces of all."""
        self.numbers.append(number)
        return self.whole[number].to(piece.dtype)
