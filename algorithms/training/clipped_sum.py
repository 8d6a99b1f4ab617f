"""A sum over records that adding or removing one record moves by at most one clip.

It is computed in integers, which add up exactly.

Noise is scaled to how far one record can move a sum, so the bound must hold for the sum as it is
computed. In floating point it does not hold: each addition rounds depending on what was added
before, and one record can change the rounding of all that follow (Casacuberta, Shoemate, Vadhan,
Wagaman, "Widespread underestimation of sensitivity in differentially private libraries and how to
fix it", CCS 2022). In float32, 23,553 records of clip 1 can be chosen so that leaving one out moves
the sum by 8; in float64 it still moves by more than 1, and further with more records
(tests/algorithms/training/test_clipped_sum.py). So the records' shares are added up in integers, in
units of which u make a clip C::

    u        2^38 / max(σ, 1)
    y_i      g_i (u - √P / 2) / max(C, (1 + 2^-20) ‖g_i‖), each of its P numbers rounded to an
             integer
    release  (Σ y_i + round(σ u z)) C / u          z standard normal

**The bound.** Norm and factor are computed in float64: with fewer than 2^31 numbers the norm is too
small by less than one part in 2^22, and the factor's error is smaller than that. Rounding P numbers
moves them by at most √P / 2. So ‖y_i‖ <= u, and the sums with and without record i differ by y_i
alone: by at most C, in any order, for any number of records and any number added at a time. There
is no slack that σ would have to cover. Int64 holds 2^24 records that all point in one direction;
with more, the result is the sum modulo 2^64, which can be computed from the noisy sum as well.

**The noise** is rounded before it is added. Rounding before or after adding an integer is the same,
so the release is computed from Σ y_i + σ u z, which is the Gaussian mechanism. The noise takes
every integer: float64 has a thousand steps within a unit at any size that σ u z reaches. So the
last bits of a release do not reveal what the noise was added to.

**Shares of the noise.** Where silos share the noise of a sum, each adds a discrete Gaussian, and
the sum crosses in integers (job/shared_steps.py). A clip has 2^SHARED_BITS of its units, whatever
σ, so that no number leaves what a secure sum holds (job/privacy_table.py).

**The share of a record** must be the same, bit for bit, with and without another record in the data
set. Matrix products round differently in calls of other sizes (for one record, for two, and from
four on, in the libraries that we have seen), so ``dataset.in_calls`` makes all calls of one size.
The libraries compute each row of such a call independently of the other rows' values and of its own
position; tests/algorithms/training/test_dp_sgd.py checks that.
"""

from collections.abc import Iterator, Sequence
from math import sqrt

import torch
from torch import Tensor

from ...errors import LocalError
from ..job.privacy_table import SHARED_BITS, share_variance
from ..numerics.ranks import Ranks
from .accountant import Random

BITS = 38
MOST_ROWS = 2 ** (53 - BITS)  # so many rows of integers add up exactly in float64
_MARGIN = 1 + 2.0**-20  # covers the rounding errors of norm and factor
_PIECE = 2**19  # numbers in float64 at a time: 4 MiB, which stay in the processor's cache


class ClippedSum:
    """A noisy sum of tensors of these shapes.

    Each record's tensors are clipped to the norm ``clip``, all of them together. The noise has a
    standard deviation of ``sigma`` clips. Call ``noisy`` once: a second call would be a second
    release of the same sum.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], clip: float, sigma: float, *, shared: bool = False
    ) -> None:
        """``shared``: in the units in which shares of noise are."""
        self._shapes, self._clip, self._sigma = shapes, clip, sigma
        # σ u is at most 2^BITS: float64 then has a thousand steps per unit at any size that σ u z
        # reaches, so the noise takes every integer.
        self._units = 2.0**SHARED_BITS if shared else 2.0**BITS / max(sigma, 1.0)
        # Rounding lengthens a share by at most √P / 2, which is set aside.
        self._room = self._units - sqrt(sum(shape.numel() for shape in shapes)) / 2
        # int64 holds the sum of 2^24 records, even if all point in one direction.
        self._totals = [torch.zeros(shape.numel(), dtype=torch.int64) for shape in shapes]

    @torch.no_grad()
    def add(self, shares: Sequence[Tensor]) -> None:
        """Add the shares of at most ``MOST_ROWS`` records, each [B, …].

        A record whose share is not finite adds nothing.
        """
        # Per tensor one row per record; norms are over a record's rows of all tensors.
        rows = [share.reshape(len(share), -1) for share in shares]
        if not 0 < len(rows[0]) <= MOST_ROWS:
            raise LocalError(
                f"{len(rows[0])} records to add up at a time, {MOST_ROWS:,} at most; a bug in"
                " Staddle"
            )
        norms = self._norms(rows)
        # A record with NaN or infinity must not spoil the sum of the others.
        known = norms.isfinite()
        whole = bool(known.all())
        # Shares longer than the clip are scaled down to it; all are converted to units.
        scale = self._room / (norms * _MARGIN).clamp(min=self._clip)
        factors = torch.where(known, scale, 0.0)[:, None]
        for total, row in zip(self._totals, rows, strict=True):
            for place, piece in _pieces(row):
                # In place, since ``_pieces`` gives copies.
                scaled = piece.mul_(factors)
                # 0 times NaN or infinity is NaN.
                if not whole:
                    scaled.nan_to_num_(0.0, 0.0, 0.0)
                # Exact in float64: MOST_ROWS integers of BITS bits add up to 2^53 at most.
                total[place] += scaled.round_().sum(0).long()

    def join(self, ranks: Ranks) -> None:
        """Add what other processes have added up, before any noise: exact, since it is integers."""
        ranks.add(self._totals)

    def noisy(self, random: Random, places: Sequence[int] | None = None) -> list[Tensor]:
        """The sums with noise, in float64; of the tensors at these ``places``, or of all.

        ``random`` must be fresh, and used for nothing else.
        """
        made = []
        for place in range(len(self._shapes)) if places is None else places:
            shape, total = self._shapes[place], self._totals[place]
            normal = torch.from_numpy(random.normal(shape.numel()))
            # Rounded before it is added: integers add exactly, so this is the Gaussian mechanism.
            noise = normal.mul_(self._sigma * self._units).round_().long()
            made.append(noise.add_(total).double().mul_(self._clip / self._units).reshape(shape))
        return made

    def shares(self, random: Random, honest: int, places: Sequence[int]) -> list[Tensor]:
        """The sums of the tensors at these ``places``, int64, with one share of the noise.

        The shares of ``honest`` silos are the noise of ``noisy`` together. In units of ``clip`` /
        2^SHARED_BITS, of a sum that is ``shared``.
        """
        variance = share_variance(self._sigma, 2**SHARED_BITS, honest)
        made = []
        for place in places:
            shape, total = self._shapes[place], self._totals[place]
            noise = torch.from_numpy(random.discrete_gaussian(shape.numel(), variance))
            made.append(noise.add_(total).reshape(shape))
        return made

    @staticmethod
    def _norms(rows: Sequence[Tensor]) -> Tensor:
        """Euclidean norms [B] of each record's share, over all tensors together, in float64."""
        squares = torch.zeros(len(rows[0]), dtype=torch.float64)
        for row in rows:
            for _, piece in _pieces(row):
                # In place, since ``_pieces`` gives copies.
                squares += piece.square_().sum(1)
        return squares.sqrt_()


def _pieces(row: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Copies of a matrix's columns in float64, piece by piece; each overwrites the one before."""
    # As many columns as fit the processor's cache, but at least one.
    width = max(_PIECE // len(row), 1)
    scratch = torch.empty(len(row), min(width, row.shape[1]), dtype=torch.float64)
    for start in range(0, row.shape[1], width):
        place = slice(start, min(start + width, row.shape[1]))
        yield place, scratch[:, : place.stop - start].copy_(row[:, place])
