"""Plain training by several processes: each takes its share of a batch, and all move alike.

A batch of B records has the gradient Σ_r (B_r / B) g_r, where g_r is that of the mean loss of the
B_r records of process r, penalty included. So all processes make the step of one process, but for
the last bits of sums.

- A batch whose loss is ``coupled``, or that has fewer records than there are processes, is computed
  whole by each of them: the result is the same, and nothing is gained. So are those of a model from
  outside that couples records without batch norm, and those whose shares would take another number
  of calls in one process than in another.
- Batch norm takes its statistics over the whole batch, by sums over all processes. (torch has
  nn.SyncBatchNorm for that, which refuses CPUs.) What couples records next to it sees the share of
  one process.
- What draws at random, such as dropout and augmentation, draws otherwise in each process, but for
  stages that each computes whole.
- Evaluations, measurements and surveys are not divided (silo/training/ranks.py).
"""

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..course import Parts, Penalty, Stage
from ..exchange.parts import Tensors
from ..models.foreign import traits_of
from ..numerics.devices import Precision
from ..numerics.ranks import Ranks
from .loop import PLAIN, Modules, PlainStepper, Step, batch_coupled, batch_norms


class DataParallel(PlainStepper):
    """A ``PlainStepper`` of one of several processes."""

    def __init__(
        self, ranks: Ranks, precision: Precision = "float32", hidden: bool = False
    ) -> None:
        super().__init__(precision, hidden)
        self._ranks = ranks
        # of the stage at hand: whether its batches cannot be split, and records of one call
        self._whole, self._rows = False, sys.maxsize
        # of the batches to come: whether each is split, and how much of it is computed here
        self._shares: deque[tuple[bool, float]] = deque()
        self._split, self._weight = False, 1 / ranks.size

    def batches(
        self, stage: Stage, records: int, batch_size: int, rng: np.random.Generator, wrap: bool
    ) -> list[NDArray[np.int64]]:
        """Indices of this process's share of each batch: it reads no other records."""
        ranks, own = self._ranks, []
        for batch in super().batches(stage, records, batch_size, rng, wrap):
            split, _ = share = self._shared(len(batch))
            own.append(batch[ranks.rank :: ranks.size] if split else batch)
            self._shares.append(share)
        return own

    def _shared(self, records: int) -> tuple[bool, float]:
        rank, size = self._ranks.rank, self._ranks.size
        # Weights are gathered in each call: all must have as many, and no share may be empty.
        least = ceil(records // size / self._rows)
        most = ceil(ceil(records / size) / self._rows)
        split = least == most and not self._whole
        return split, len(range(rank, records, size)) / records if split else 1 / size

    def draws(self, of_job: np.random.Generator) -> np.random.Generator:
        """Other numbers in each process: equal ones would drop the same units of every share."""
        own = super().draws(of_job)
        # Far apart in one sequence, whose numbers nobody uses twice.
        apart = 0 if self._whole else self._ranks.rank
        return np.random.Generator(cast(np.random.Philox, own.bit_generator).jumped(apart))

    def begin(self, modules: Modules, stage: Stage) -> Step:
        """The step on this process's share of a batch."""
        for norm in batch_norms(modules):
            norm.forward = partial(self._normalised, norm)  # type: ignore[method-assign]
        # What else a model from outside does to couple records is not known.
        unknown = traits_of(modules).couples and not batch_coupled(modules)
        self._whole, self._rows = stage.coupled or unknown, stage.rows or sys.maxsize
        # A round that failed left the shares of batches that it did not take.
        self._shares.clear()
        step = super().begin(modules, self._weighed(stage))

        def own_step(x: Tensor, y: Tensor) -> Tensor:
            self._split, self._weight = self._shares.popleft()
            return step(x, y)

        return own_step

    def _weighed(self, stage: Stage) -> Stage:
        """The stage, whose losses count as much as this process computes of a batch.

        Before any gradient is taken: that of batch norm flows to the other processes.
        """
        loss, penalty = stage.loss, stage.penalty

        def own_loss(modules: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
            return loss(modules, x, y, context) * self._weight

        def own_penalty(parameters: Mapping[str, Tensors], context: Tensors) -> Tensor:
            # All processes together add it once.
            return cast(Penalty, penalty)(parameters, context) * self._weight

        return replace(stage, loss=own_loss, penalty=None if penalty is None else own_penalty)

    def _joined(self, loss: Tensor, gradients: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        # Sums are written in place, and a gradient of zeros may be one number seen many times.
        found = [
            own.detach().clone(memory_format=torch.contiguous_format) for own in (loss, *gradients)
        ]
        self._ranks.add(found)
        return found[0], found[1:]

    def _normalised(self, norm: _BatchNorm, x: Tensor) -> Tensor:
        """The forward of batch norm, over the shares of all processes."""
        # Without running statistics it takes those of the batch in evaluation mode, too.
        of_batch = norm.training or norm.running_mean is None
        if not (of_batch and self._split):
            return type(norm).forward(norm, x)
        # As the layer's own: in float32 at least, over all but the features.
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        over, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
        count = values.new_tensor([values.numel() / values.shape[1]])
        sums = self._ranks.summed(torch.cat([values.sum(over), count]))
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centred = values - mean.reshape(shape)
        variance = self._ranks.summed(centred.square().sum(over)) / total
        _remember(norm, mean.detach(), variance.detach() * total / (total - 1))
        made = centred * torch.rsqrt(variance + norm.eps).reshape(shape)
        if norm.affine:
            made = made * norm.weight.reshape(shape) + norm.bias.reshape(shape)
        return made.to(x.dtype)


@torch.no_grad()
def _remember(norm: Any, mean: Tensor, variance: Tensor) -> None:
    """Take the statistics of a batch into the running ones, as the layer's own forward does."""
    if not norm.track_running_stats:
        return
    norm.num_batches_tracked.add_(1)
    factor = norm.momentum
    if factor is None:
        factor = 1 / float(norm.num_batches_tracked)
    norm.running_mean.lerp_(mean, factor)
    norm.running_var.lerp_(variance, factor)


def plain_on(ranks: Ranks) -> PlainStepper:
    """Plain training by these processes, or by one alone."""
    return PLAIN if ranks.size == 1 else DataParallel(ranks)
