"""The local loop for many silos at once: their values lie along a first axis, and each call of the model is of all.

The modules are of one architecture, the stages of one course (alike.py). Silos do not meet: the losses of each are its
own, so the gradient of the sum of their means is each one's own, and one backward pass gives all. In a step at which a
silo has no batch its parameters, momentum and buffers stand still. So each silo gets what ``training`` gives it, but
for the last bits of floating-point sums.

Modules hold no values, they lie on torch's device "meta"; and nothing waits for the device between two steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import LocalError
from .exchange import Tensors
from .functional import Bound
from .method import Optimiser, Parts, Stage
from .stacked_batches import Batch, Pieces, Rows, together
from .training import Modules, mirror_step, sgd_step

Values: TypeAlias = dict[str, dict[str, Tensor]]  # by part and name, [S, …] each
Names: TypeAlias = Sequence[tuple[str, str]]  # (part, name)

TOLERANCE = 1e-3  # by which losses may differ, of the largest, where the batch is filled up


@dataclass(frozen=True, eq=False)
class Silos:
    """The values of S silos of one architecture, and the records x [N, …], y [N] of all silos of a job."""

    modules: Modules
    values: Values
    x: Tensor
    y: Tensor

    @property
    def count(self) -> int:
        """S."""
        return next(len(tensor) for named in self.values.values() for tensor in named.values())


def parts_of(modules: Modules, values: Mapping[str, Mapping[str, Tensor]]) -> Parts:
    """The parts of one silo as a method calls them."""
    return {part: Bound(module, values[part]) for part, module in modules.items()}


def rows_of(values: Values, rows: Rows) -> Values:
    """The values of some silos."""
    return {part: {name: tensor[rows] for name, tensor in named.items()} for part, named in values.items()}


def couples(modules: Modules) -> bool:
    """Whether a record's output depends on the others of its batch, in the modes that the modules are in."""
    leaves = (leaf for module in modules.values() for leaf in module.modules() if isinstance(leaf, _BatchNorm))
    return any(leaf.training or leaf.running_mean is None for leaf in leaves)


def train(silos: Silos, stage: Stage, context: Tensors, pieces: Sequence[Pieces]) -> Tensor:
    """Run one stage in place; ``context`` [S, …] stands for the stage's own, ``pieces`` are each silo's batches.

    Gives the loss of each batch [steps, S] in float64, NaN where a silo has none. LocalError where a record's loss
    depends on its batch and the stage does not say so.
    """
    modules, device = silos.modules, silos.x.device
    for part, module in modules.items():
        module.train(part in stage.trains)
    batches = together(pieces, stage.coupled or couples(modules), device)
    step = _Step(silos, stage, context)
    losses = torch.full((max(map(len, pieces)), silos.count), torch.nan, dtype=torch.float64, device=device)
    filled = next((batch for batch in batches if batch.lengths is not None), None)
    for batch in batches:
        if batch is filled:
            oddness = step.oddness(batch)
        losses[batch.step, batch.rows] = step(batch)
    if filled is not None and float(oddness) > TOLERANCE:
        raise LocalError(
            "the loss of a record depends on the batch that it is in, and the stage does not say that it is coupled; "
            "this is a bug in the method"
        )
    return losses


class _Step:
    """The step on one batch of each of some silos; it holds what outlives a step: values and momentum."""

    def __init__(self, silos: Silos, stage: Stage, context: Tensors) -> None:
        self._silos, self._stage, self._context = silos, stage, context
        modules = silos.modules
        self._moved = [(part, name) for part in stage.trains for name, _ in modules[part].named_parameters()]
        self._buffers = [(part, name) for part in stage.trains for name, _ in modules[part].named_buffers()]
        momentum = _of(silos.values, self._moved) if stage.optimiser.momentum else []
        self._velocity = [torch.zeros_like(tensor) for tensor in momentum]

    def __call__(self, batch: Batch) -> Tensor:
        """Move the values of the batch's silos; the mean loss of each [m], penalty included."""
        whole, rows = self._silos.values, batch.rows
        values, context = rows_of(whole, rows), {name: tensor[rows] for name, tensor in self._context.items()}
        leaves = [tensor.detach().requires_grad_() for tensor in _of(values, self._moved)]
        for (part, name), leaf in zip(self._moved, leaves, strict=True):
            values[part][name] = leaf
        mean = _means(self._losses(values, context, batch.places), batch)
        if self._stage.penalty is not None:
            mean = mean + vmap(self._stage.penalty)(_parameters(self._silos.modules, values), context)
        gradients = torch.autograd.grad(mean.sum(), leaves, materialize_grads=True)
        velocity = [tensor[rows] for tensor in self._velocity]
        _apply(leaves, gradients, velocity, self._stage.optimiser)
        if isinstance(rows, Tensor):  # what changed were copies, not views; buffers changed in the call of the model
            changed = [*self._moved, *self._buffers]
            for own, new in zip(_of(whole, changed), _of(values, changed), strict=True):
                own[rows] = new.detach()
            for own, new in zip(self._velocity, velocity, strict=True):
                own[rows] = new
        return mean.detach().double()

    @torch.no_grad()
    def oddness(self, batch: Batch) -> Tensor:
        """By how much the losses of a batch that is filled up differ from those of its records alone."""
        row, length = batch.shortest
        one = slice(row, row + 1)
        of = rows_of(rows_of(self._silos.values, batch.rows), one)
        context = {name: tensor[batch.rows][one] for name, tensor in self._context.items()}
        alone = self._losses(of, context, batch.places[one, :length])
        filled = self._losses(of, context, batch.places[one])[:, :length]
        return (filled - alone).abs().max() / (1 + alone.abs().max())

    def _losses(self, values: Values, context: Tensors, places: Tensor) -> Tensor:
        def loss(values: Values, context: Tensors, x: Tensor, y: Tensor) -> Tensor:
            return self._stage.loss(parts_of(self._silos.modules, values), x, y, context)

        losses: Tensor = vmap(loss)(values, context, self._silos.x[places], self._silos.y[places])  # [m, L]
        return losses


def _means(losses: Tensor, batch: Batch) -> Tensor:
    """Each silo's mean [m] of its losses [m, L]."""
    if batch.lengths is None or batch.counts is None:
        return losses.mean(1)
    return torch.where(batch.counts, losses, 0).sum(1) / batch.lengths


def _of(values: Values, names: Names) -> list[Tensor]:
    return [values[part][name] for part, name in names]


def _parameters(modules: Modules, values: Values) -> Values:
    return {part: {name: values[part][name] for name, _ in m.named_parameters()} for part, m in modules.items()}


def _apply(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], velocity: list[Tensor], optimiser: Optimiser
) -> None:
    """Move the parameters [m, …] of each silo by one step of the optimiser's rule, in place."""
    if optimiser.rule != "sgd":
        mirror_step(parameters, gradients, optimiser)
    else:
        sgd_step(parameters, clipped_each(gradients, optimiser.clip), velocity, optimiser)


def clipped_each(gradients: Sequence[Tensor], limit: float | None) -> Sequence[Tensor]:
    """``training.clipped`` of each silo's gradients [m, …]."""
    if limit is None:
        return gradients
    squares = [gradient.double().square().reshape(len(gradient), -1).sum(1) for gradient in gradients]
    norm = torch.stack(squares).sum(0).sqrt()  # [m]
    factor = torch.where(norm <= limit, 1.0, limit / norm)
    return [g * factor.to(g.dtype).reshape(-1, *(1,) * (g.ndim - 1)) for g in gradients]
