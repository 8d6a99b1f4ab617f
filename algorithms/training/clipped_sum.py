"""A sum over records that one record, more or less, moves by a clip at most.

It is in integers, which add up exactly.

Noise is measured by how far one record moves a sum, so that has to hold of the sum as it is
computed. In floating point it does not: each addition rounds by what was added before, and one
record can turn the rounding of all that follow (Casacuberta, Shoemate, Vadhan, Wagaman, "Widespread
underestimation of sensitivity in differentially private libraries and how to fix it", CCS 2022). In
float32, record by record, 23,553 of clip 1 can be chosen so that the sum moves by 8 where one is
left out; in float64 it still moves by more than 1, and by more the more records there are
(tests/algorithms/training/test_clipped_sum.py). So what records give is added up in integers, in
units of which u are a clip C::

    u        2^38 / max(σ, 1)
    y_i      g_i (u - √P / 2) / max(C, (1 + 2^-20) ‖g_i‖), each of its P numbers rounded to an
             integer
    release  (Σ y_i + round(σ u z)) C / u          z standard normal

**The bound.** Norm and factor are computed in float64: with fewer than 2^31 numbers the norm comes
out too small by less than one part in 2^22, and the factor is off by less than that. To round P
numbers moves them by √P / 2 at most. So ‖y_i‖ <= u, and with record i and without it the sums
differ by y_i and nothing else: by C at most, in any order, however many records there are and
however many are added at a time. There is no slack that σ had to cover. Int64 holds 2^24 records
that all point one way; with more it is the sum modulo 2^64, which is computed from the noisy sum as
well.

**The noise** is rounded before it is added. Adding an integer before rounding or after it is the
same, so the release is computed from Σ y_i + σ u z, which is the Gaussian mechanism. And noise
takes every integer: float64 has a thousand steps within a unit at any size that σ u z reaches. So
the last bits of a release do not tell what the noise was added to.

**What a record gives** has to be the same with another record in the data set and without it, in
each bit. Matrix products round otherwise in calls of other sizes (for one record, for two, and from
four on, by the libraries that we have seen), so ``data.in_calls`` makes all calls of one size. That
rows of such a call do not depend on one another's values, nor on their own place, is the libraries'
doing; tests/algorithms/training/test_dp_sgd.py looks at it.
"""

from collections.abc import Iterator, Sequence
from math import sqrt

import torch
from torch import Tensor

from ...errors import LocalError
from .accountant import Random

BITS = 38
MOST_ROWS = 2 ** (53 - BITS)  # of which sums of integers are exact in float64
_MARGIN = 1 + 2.0**-20
_PIECE = 2**19  # numbers that are in float64 at a time: 4 MiB, which stay in the processor's cache


class ClippedSum:
    """Of tensors of these shapes, each record's cut to ``clip`` in all of them together.

    Noise of ``sigma`` clips.
    """

    def __init__(self, shapes: Sequence[torch.Size], clip: float, sigma: float) -> None:
        self._shapes, self._clip, self._sigma = shapes, clip, sigma
        self._units = 2.0**BITS / max(sigma, 1.0)
        self._room = self._units - sqrt(sum(shape.numel() for shape in shapes)) / 2
        self._totals = [torch.zeros(shape.numel(), dtype=torch.int64) for shape in shapes]

    @torch.no_grad()
    def add(self, shares: Sequence[Tensor]) -> None:
        """What at most ``MOST_ROWS`` records give, each [B, …].

        A record in whose there is no number adds nothing.
        """
        rows = [share.reshape(len(share), -1) for share in shares]
        if not 0 < len(rows[0]) <= MOST_ROWS:
            raise LocalError(
                f"{len(rows[0])} records to add up at a time, {MOST_ROWS:,} at most; a bug in"
                " Staddle"
            )
        norms = self._norms(rows)
        known = norms.isfinite()
        whole = bool(known.all())
        factors = torch.where(known, self._room / (norms * _MARGIN).clamp(min=self._clip), 0.0)[
            :, None
        ]
        for total, row in zip(self._totals, rows, strict=True):
            for place, piece in _pieces(row):
                scaled = piece.mul_(factors)
                if not whole:
                    scaled.nan_to_num_(0.0, 0.0, 0.0)  # 0 by what is no number
                total[place] += scaled.round_().sum(0).long()

    def noisy(self, random: Random) -> list[Tensor]:
        """The sums with noise, in float64."""
        made = []
        for shape, total in zip(self._shapes, self._totals, strict=True):
            noise = (
                torch.from_numpy(random.normal(shape.numel()))
                .mul_(self._sigma * self._units)
                .round_()
                .long()
            )
            made.append(noise.add_(total).double().mul_(self._clip / self._units).reshape(shape))
        return made

    @staticmethod
    def _norms(rows: Sequence[Tensor]) -> Tensor:
        """Euclidean norms [B], each of a record's numbers in all tensors together, in float64."""
        squares = torch.zeros(len(rows[0]), dtype=torch.float64)
        for row in rows:
            for _, piece in _pieces(row):
                squares += piece.square_().sum(1)
        return squares.sqrt_()


def _pieces(row: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Copies of columns of a matrix, so many at a time, in float64 and each in the memory of the
    one before.
    """
    width = max(_PIECE // len(row), 1)
    scratch = torch.empty(len(row), min(width, row.shape[1]), dtype=torch.float64)
    for start in range(0, row.shape[1], width):
        place = slice(start, min(start + width, row.shape[1]))
        yield place, scratch[:, : place.stop - start].copy_(row[:, place])
