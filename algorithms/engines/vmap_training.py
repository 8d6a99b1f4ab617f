"""The local loop for many silos at once: their values lie along a first axis, and each call of the
model is of all.

The modules are of one architecture, the stages of one course (grouping.py). Silos do not meet: the
losses of each are its own, so the gradient of the sum of their means is each one's own, and one
backward pass gives all. In a step at which a silo has no batch its parameters, momentum and buffers
stand still. So each silo gets what ``training`` gives it, but for the last bits of floating-point
sums.

Modules hold no values, they lie on torch's device "meta"; and nothing waits for the device between
two steps.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import LocalError
from ..course import Optimiser, Parts, Stage
from ..exchange.parts import Tensors
from ..models.functional import BoundModule
from ..numerics.devices import Precision, casting, multiplying
from ..training.loop import Modules, at_least_float32, mirror_step, sgd_step
from .cuda_graphs import Recorder, Replayed
from .grouping import paced_alike
from .stacked_layers import over_silos
from .vmap_batches import Batch, Pieces, Rows, counting, together

Values: TypeAlias = dict[str, dict[str, Tensor]]  # by part and name, [S, …] each
Names: TypeAlias = Sequence[tuple[str, str]]  # (part, name)

MOST_STEPS, MOST_BYTES = 64, 2 * 2**30  # that a bench keeps, the step at hand aside
GRAINS = 8  # numbers of silos of which a step is recorded, about
TOLERANCE = 1e-3  # by which losses may differ, of the largest, where the batch is filled up


@dataclass(frozen=True, eq=False)
class Silos:
    """The values of S silos of one architecture, and the records x [N, …], y [N] of all silos of a
    job.
    """

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
    return {part: BoundModule(module, values[part]) for part, module in modules.items()}


def rows_of(values: Values, rows: Rows) -> Values:
    """The values of some silos."""
    return {
        part: {name: tensor[rows] for name, tensor in named.items()}
        for part, named in values.items()
    }


def couples(modules: Modules) -> bool:
    """Whether a record's output depends on the others of its batch, in the modes that the modules
    are in.
    """
    leaves = (
        leaf
        for module in modules.values()
        for leaf in module.modules()
        if isinstance(leaf, _BatchNorm)
    )
    return any(leaf.training or leaf.running_mean is None for leaf in leaves)


@dataclass(frozen=True, eq=False)
class Trained:
    """The loss of each batch [steps, S] in float64, NaN where a silo has none.

    ``oddness`` [] is there where batches were filled up: by how much that changed the losses of a
    batch's own records.
    """

    losses: Tensor
    oddness: Tensor | None


def train(
    silos: Silos, stage: Stage, context: Tensors, pieces: Sequence[Pieces], bench: "Bench"
) -> Trained:
    """Run one stage in place; ``context`` [S, …] stands for the stage's own, ``pieces`` are each
    silo's batches.
    """
    modules, device = silos.modules, silos.x.device
    for part, module in modules.items():
        module.train(part in stage.trains)
    batches = together(pieces, stage.coupled or couples(modules), device)
    losses = torch.full(
        (max(map(len, pieces)), silos.count), torch.nan, dtype=torch.float64, device=device
    )
    oddness = None
    with bench.step(silos, stage, context) as step:
        for batch in batches:
            if oddness is None and batch.lengths is not None:
                oddness = step.oddness(batch)
            losses[batch.step, batch.rows] = step(batch)
    return Trained(losses, oddness)


def check_odd(oddness: Tensor | None) -> None:
    """LocalError where a record's loss depends on its batch and the stage does not say so."""
    if oddness is not None and float(oddness) > TOLERANCE:
        raise LocalError(
            "the loss of a record depends on the batch that it is in, and the stage does not say"
            " that it is coupled; this is a bug in the method"
        )


class Bench:
    """Steps on places that stay, so that they can be recorded.

    The engine's, for all rounds of a job.
    """

    def __init__(self, recorder: Recorder, precision: Precision = "float32") -> None:
        self._recorder = recorder
        self._precision: Precision = precision
        self._steps: OrderedDict[Hashable, _Step] = OrderedDict()

    def step(self, silos: Silos, stage: Stage, context: Tensors) -> "_Step":
        """The one of such stages and models.

        It holds the values of these silos for the time of a stage.
        """
        key = (
            tuple((part, id(module)) for part, module in silos.modules.items()),
            paced_alike(stage),
        )
        step = self._steps.pop(key, None)
        if step is None or step.room < silos.count:
            if step is not None:
                step.forget()
            step = _Step(silos, stage, context, self._recorder, self._precision)
        self._steps[key] = step  # the last one used is the last one to go
        while len(self._steps) > 1 and (len(self._steps) > MOST_STEPS or self._held() > MOST_BYTES):
            self._steps.popitem(last=False)[1].forget()
        step.take(silos, stage, context)
        return step

    def clear(self) -> None:
        """Keep none."""
        while self._steps:
            self._steps.popitem()[1].forget()

    def _held(self) -> int:
        return sum(step.held for step in self._steps.values())


class _Step:
    """The step on one batch of each of some silos, whose values lie here in between.

    What outlives a step is here.
    """

    def __init__(
        self, silos: Silos, stage: Stage, context: Tensors, recorder: Recorder, precision: Precision
    ) -> None:
        self._modules, self._x, self._y, self._stage = silos.modules, silos.x, silos.y, stage
        self._values = {part: _copies(named) for part, named in silos.values.items()}
        self._context = _copies(context)
        self._rate = torch.empty((), dtype=torch.float64, device=silos.x.device)
        self._moved: list[tuple[str, str]] = []  # (part, name) of what a step moves
        self._buffers: list[tuple[str, str]] = []
        for part in stage.trains:
            module = self._modules[part]
            self._moved += ((part, name) for name, _ in module.named_parameters())
            self._buffers += ((part, name) for name, _ in module.named_buffers())
        momentum = _of(self._values, self._moved) if stage.optimiser.momentum else []
        self._velocity = [torch.zeros_like(tensor) for tensor in momentum]
        self.room, self._recorder, self._precision = silos.count, recorder, precision
        self._known: dict[Hashable, Replayed] = {}
        self._guest: Silos | None = None
        self._count = 0  # of the guest
        kept = [
            *(tensor for named in self._values.values() for tensor in named.values()),
            *self._velocity,
        ]
        self.held = sum(tensor.nbytes for tensor in kept)

    def forget(self) -> None:
        """Keep nothing recorded: it refers to this step, and a device's memory waits for no
        collector of garbage.
        """
        while self._known:
            self._known.popitem()[1].forget()

    def take(self, silos: Silos, stage: Stage, context: Tensors) -> None:
        """Begin with the values of these silos, without momentum."""
        self._guest, self._count, rows = silos, silos.count, slice(0, silos.count)
        for part, named in silos.values.items():
            for name, tensor in named.items():
                self._values[part][name][rows] = tensor
        for name, tensor in context.items():
            self._context[name][rows] = tensor
        for tensor in self._velocity:
            tensor.zero_()
        self._rate.fill_(stage.optimiser.lr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Give the silos their values."""
        guest, self._guest = self._guest, None
        if guest is not None:
            for part, named in guest.values.items():
                for name, tensor in named.items():
                    tensor.copy_(self._values[part][name][: guest.count])

    def __call__(self, batch: Batch) -> Tensor:
        """Move the values of the batch's silos; the mean loss of each [m], penalty included.

        Recorded where the silos are the first ones, their number rounded up; how far depends on no
        earlier stage.
        """
        if not isinstance(batch.rows, slice):
            return self._move(batch.rows, batch.places, batch.lengths)
        m, places, lengths = len(batch.places), batch.places, batch.lengths
        grain = max(1, self._count // GRAINS)
        more = min(-(-m // grain) * grain, self._count) - m
        given = [places]
        if more:
            given = [torch.cat([places, places[:1].expand(more, -1)])]
        if lengths is not None:
            given.append(torch.cat([lengths, lengths[:1].expand(more)]))
        if more:
            given.append(torch.arange(m + more, device=places.device) < m)
        key = m + more, places.shape[1], lengths is not None, bool(more)
        if key not in self._known:
            self._known[key] = Replayed(
                partial(self._first, lengths is not None, bool(more)), self._recorder
            )
        return self._known[key](*given)[:m]

    def _first(self, filled: bool, masked: bool, places: Tensor, *rest: Tensor) -> Tensor:
        lengths, alive = rest[0] if filled else None, rest[-1] if masked else None
        return self._move(slice(0, len(places)), places, lengths, alive)

    def _move(
        self, rows: Rows, places: Tensor, lengths: Tensor | None, alive: Tensor | None = None
    ) -> Tensor:
        """Of rows that are not ``alive`` [m] nothing changes."""
        whole, views = self._values, isinstance(rows, slice) and alive is None
        values, context = (
            rows_of(whole, rows),
            {name: tensor[rows] for name, tensor in self._context.items()},
        )
        if alive is not None:
            for part, name in self._buffers:
                values[part][name] = values[part][name].clone()
        leaves = [
            (t if views else t.clone()).detach().requires_grad_() for t in _of(values, self._moved)
        ]
        for (part, name), leaf in zip(self._moved, leaves, strict=True):
            values[part][name] = leaf
        with multiplying(self._precision):
            with casting(self._x.device, self._precision):
                losses = self._losses(values, context, places)
            mean = _means(at_least_float32(losses), lengths)
            if self._stage.penalty is not None:
                mean = mean + vmap(self._stage.penalty)(_parameters(self._modules, values), context)
            gradients = torch.autograd.grad(mean.sum(), leaves, materialize_grads=True)
        # Those of linear layers come transposed, and then each tensor is updated by a kernel of its
        # own instead of all by one.
        updates = [gradient.contiguous() for gradient in gradients]
        velocity = [tensor[rows] if views else tensor[rows].clone() for tensor in self._velocity]
        _apply(leaves, updates, velocity, self._stage.optimiser, self._rate)
        if not views:  # what changed were copies; buffers changed in the call of the model
            changed = [*self._moved, *self._buffers]
            _put(_of(whole, changed), _of(values, changed), rows, alive)
            _put(self._velocity, velocity, rows, alive)
        return mean.detach().double()

    @torch.no_grad()
    def oddness(self, batch: Batch) -> Tensor:
        """By how much the losses of a batch that is filled up differ from those of its records
        alone.
        """
        row, length = batch.shortest
        one = slice(row, row + 1)
        of = rows_of(rows_of(self._values, batch.rows), one)
        context = {name: tensor[batch.rows][one] for name, tensor in self._context.items()}
        alone = self._losses(of, context, batch.places[one, :length])
        filled = self._losses(of, context, batch.places[one])[:, :length]
        return (filled - alone).abs().max() / (1 + alone.abs().max())

    def _losses(self, values: Values, context: Tensors, places: Tensor) -> Tensor:
        def loss(values: Values, context: Tensors, x: Tensor, y: Tensor) -> Tensor:
            return self._stage.loss(parts_of(self._modules, values), x, y, context)

        return over_silos(loss)(values, context, self._x[places], self._y[places])  # [m, L]


def _put(whole: Sequence[Tensor], new: Sequence[Tensor], rows: Rows, alive: Tensor | None) -> None:
    """Lay the new values of some rows where the whole is, those that are not alive aside."""
    for own, tensor in zip(whole, new, strict=True):
        given = tensor.detach()
        if alive is not None:
            given = torch.where(alive.reshape(-1, *(1,) * (given.ndim - 1)), given, own[rows])
        own[rows] = given


def _means(losses: Tensor, lengths: Tensor | None) -> Tensor:
    """Each silo's mean [m] of its losses [m, L], of which the first ``lengths`` [m] count."""
    if lengths is None:
        return losses.mean(1)
    return torch.where(counting(lengths, losses.shape[1]), losses, 0).sum(1) / lengths


def _copies(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _of(values: Values, names: Names) -> list[Tensor]:
    return [values[part][name] for part, name in names]


def _parameters(modules: Modules, values: Values) -> Values:
    return {
        part: {name: values[part][name] for name, _ in m.named_parameters()}
        for part, m in modules.items()
    }


def _apply(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    velocity: list[Tensor],
    optimiser: Optimiser,
    rate: Tensor,
) -> None:
    """Move the parameters [m, …] of each silo by one step of the optimiser's rule, in place."""
    if optimiser.rule != "sgd":
        mirror_step(parameters, gradients, optimiser, rate)
    else:
        sgd_step(parameters, clipped_each(gradients, optimiser.clip), velocity, optimiser, rate)


def clipped_each(gradients: Sequence[Tensor], limit: float | None) -> Sequence[Tensor]:
    """``training.clipped`` of each silo's gradients [m, …]."""
    if limit is None:
        return gradients
    squares = [
        gradient.double().square().reshape(len(gradient), -1).sum(1) for gradient in gradients
    ]
    norm = torch.stack(squares).sum(0).sqrt()  # [m]
    factor = torch.where(norm <= limit, 1.0, limit / norm)
    return [g * factor.to(g.dtype).reshape(-1, *(1,) * (g.ndim - 1)) for g in gradients]
