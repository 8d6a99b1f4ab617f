"""The local loop for many silos at once: values lie along a first axis, one call computes for all.

The modules are of one architecture, the stages of one course (grouping.py). Silos do not meet: a
silo's loss depends on its own values alone, so the gradient of the sum of all mean losses holds the
gradient of each silo, and one backward pass computes all of them. Large networks have a pass for
each silo instead, in parallel (convolutions.in_parallel). In a step in which a silo has no
batch, its parameters, momentum and buffers stand still. So each silo ends with what
``training.loop`` computes for it, up to the last bits of floating-point sums.

Modules hold no values, they lie on torch's device "meta"; and nothing waits for the device between
two steps.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from operator import itemgetter
from typing import Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from ...errors import LocalError
from ..course import Augment, Optimiser, Parts, Stage
from ..exchange.parts import Tensors, nbytes_of
from ..models.functional import BoundModule, mapped
from ..numerics.devices import Precision, casting, channels_last, multiplying
from ..numerics.torch_draws import drawing
from ..training.loop import Modules, at_least_float32, batch_norms
from ..training.optimisers import fresh_memory, move
from .cuda_graphs import Recorder, Replayed
from .grouping import paced_alike
from .stacked_layers import over_silos
from .vmap_batches import Batch, Pieces, Rows, Staged, counting, together

Values: TypeAlias = dict[str, dict[str, Tensor]]  # by part and name, [S, …] each
Names: TypeAlias = Sequence[tuple[str, str]]  # (part, name)

MOST_STEPS, MOST_BYTES = 64, 2 * 2**30  # that a bench keeps, next to the step in use
# A step is recorded for about so many numbers of silos, not for each: recordings take memory.
GRAINS = 8
_CONTEXT = ""  # the name of a stage's context next to the parts
# A filled-up batch may change losses by so much of the largest: longer sums round otherwise.
TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Silos:
    """The values of S silos of one architecture, and the records of all silos of a job.

    The records are x [N, …] and y [N]. Values are [S, …], on the same device.
    """

    modules: Modules
    values: Values
    x: Tensor
    y: Tensor
    parallel: bool = False  # each silo's step is computed by itself (convolutions.in_parallel)

    @property
    def count(self) -> int:
        """S."""
        return len(next(_leaves(self.values)))


def parts_of(modules: Modules, values: Mapping[str, Mapping[str, Tensor]]) -> Parts:
    """The parts of one silo as a method calls them.

    ``values`` are those of one silo, as inside ``vmap``.
    """
    return {part: BoundModule(module, values[part]) for part, module in modules.items()}


def rows_of(values: Values, rows: Rows) -> Values:
    """The values of some silos.

    They are views for a slice, copies for a tensor of indices.
    """
    return mapped(values, lambda tensor: tensor[rows])


def _leaves(values: Values) -> Iterator[Tensor]:
    return chain.from_iterable(named.values() for named in values.values())


def couples(modules: Modules) -> bool:
    """True if a record's output depends on the others of its batch, in the modules' modes.

    That is so for batch norm in training mode, or without running statistics.
    """
    norms = batch_norms(modules)
    return any(norm.training or norm.running_mean is None for norm in norms)


@dataclass(frozen=True, eq=False)
class Trained:
    """The loss of each batch [steps, S] in float64, NaN where a silo has no batch.

    ``oddness`` [] says how much filling up a batch changed the losses of the batch's own records;
    None where no batch was filled up.
    """

    losses: Tensor
    oddness: Tensor | None


def train(
    silos: Silos,
    stage: Stage,
    context: Tensors,
    pieces: Sequence[Pieces],
    bench: "Bench",
    draws: Sequence[np.random.Generator] = (),
) -> Trained:
    """Run one stage in place.

    ``context`` [S, …] replaces the stage's own context; ``pieces`` are each silo's batches, and
    ``draws`` what augmentation draws by. The caller checks the losses and the oddness, so that
    nothing here waits for the device.
    """
    modules, device = silos.modules, silos.x.device
    for part, module in modules.items():
        # In training mode, batch norm and dropout of parts that are only read would act.
        module.train(part in stage.trains)
    batches = together(pieces, stage.coupled or couples(modules), device)
    # NaN for silos that have no batch at a step.
    losses = torch.full(
        (max(map(len, pieces)), silos.count), torch.nan, dtype=torch.float64, device=device
    )
    oddness = None
    calls: Iterable[Batch] = batches
    if stage.augment is not None:
        changed = partial(_augmented, silos, stage.augment, draws)
        staged = bench.staged(silos, max((batch.places.numel() for batch in batches), default=0))
        # Each call is made when it is its turn: the records of one are there at a time.
        calls = (staged.filled(batch, changed, pieces) for batch in batches)
        silos = replace(silos, x=staged.x, y=staged.y)
    with bench.step(silos, stage, context) as step:
        for batch in calls:
            # Checked once per stage: a method whose loss couples the records of a batch does so in
            # every batch.
            if oddness is None and batch.lengths is not None:
                oddness = step.oddness(batch)
            losses[batch.step, batch.rows] = step(batch)
    return Trained(losses, oddness)


def _augmented(
    silos: Silos,
    augment: Augment,
    draws: Sequence[np.random.Generator],
    silo: int,
    places: NDArray[np.int64],
) -> tuple[Tensor, Tensor]:
    """A silo's records at some places, changed as where silos train one by one."""
    index = torch.from_numpy(places).to(silos.x.device)
    with drawing(draws[silo]):
        return augment(silos.x[index], silos.y[index])


def check_odd(oddness: Tensor | None) -> None:
    """LocalError where a record's loss depends on its batch and the stage does not say so."""
    if oddness is not None and float(oddness) > TOLERANCE:
        raise LocalError(
            "the loss of a record depends on the batch that it is in, and the stage does not say"
            " that it is coupled; this is a bug in the method"
        )


class Bench:
    """Keeps steps, whose tensors stay where they are, so that CUDA graphs can replay them.

    The engine has one for all rounds of a job.
    """

    def __init__(self, recorder: Recorder, precision: Precision = "float32") -> None:
        self._recorder = recorder
        self._precision: Precision = precision
        self._steps: OrderedDict[Hashable, _Step] = OrderedDict()
        self._staged: Staged | None = None

    def staged(self, silos: Silos, records: int) -> Staged:
        """Room for so many records of a call, at the same addresses in all rounds."""
        if self._staged is None or len(self._staged.x) < records:
            # Recordings refer to the addresses of before.
            self.clear()
            self._staged = Staged.like(silos.x, silos.y, records)
        return self._staged

    def step(self, silos: Silos, stage: Stage, context: Tensors) -> "_Step":
        """The step for such stages and models; it holds these silos' values during a stage."""
        # By identity: the engine keeps one set of modules per architecture.
        models = tuple((part, id(module)) for part, module in silos.modules.items())
        key = models, paced_alike(stage)
        step = self._steps.pop(key, None)
        # Its tensors are too short for these silos, and recordings refer to their addresses.
        if step is not None and step.room < silos.count:
            step.forget()
            step = None
        if step is None:
            step = _Step(silos, stage, context, self._recorder, self._precision)
        self._steps[key] = step  # the step used last is the last one to be dropped
        while self._too_many():
            self._steps.popitem(last=False)[1].forget()
        step.take(silos, stage, context)
        return step

    def _too_many(self) -> bool:
        if len(self._steps) == 1:  # the step in use
            return False
        held = sum(step.held for step in self._steps.values())
        return len(self._steps) > MOST_STEPS or held > MOST_BYTES

    def clear(self) -> None:
        """Drop all steps.

        Their memory goes back to torch's cache.
        """
        while self._steps:
            self._steps.popitem()[1].forget()


class _Step:
    """The step on one batch of each silo; it holds the silos' values for the time of a stage.

    A CUDA graph replays on the same addresses, so tensors that outlive a step are allocated once.
    """

    def __init__(
        self, silos: Silos, stage: Stage, context: Tensors, recorder: Recorder, precision: Precision
    ) -> None:
        self._modules, self._x, self._y, self._stage = silos.modules, silos.x, silos.y, stage
        self._parallel = silos.parallel
        # Clones have addresses of their own, which outlive the stage.
        self._values = mapped(silos.values, Tensor.clone)
        self._context = _copies(context)
        # A tensor, which a recorded step reads: a schedule then needs no new recording.
        self._rate = torch.empty((), dtype=torch.float64, device=silos.x.device)
        self._moved: list[tuple[str, str]] = []  # (part, name) of what a step moves
        self._buffers: list[tuple[str, str]] = []
        for part in stage.trains:
            module = self._modules[part]
            self._moved += ((part, name) for name, _ in module.named_parameters())
            self._buffers += ((part, name) for name, _ in module.named_buffers())
        moved = _of(self._values, self._moved)
        self._memory = fresh_memory(moved, stage.optimiser, (silos.count,))
        self.room, self._recorder, self._precision = silos.count, recorder, precision
        self._known: dict[Hashable, Replayed] = {}
        self._guest: Silos | None = None
        self._count = 0  # of the guest
        kept = (*_leaves(self._values), *self._memory)
        self.held = nbytes_of(kept)

    def forget(self) -> None:
        """Drop all recordings."""
        # They refer to this step in a cycle, and the device's memory must not wait until the
        # garbage collector finds it.
        while self._known:
            self._known.popitem()[1].forget()

    def take(self, silos: Silos, stage: Stage, context: Tensors) -> None:
        """Begin with the values of these silos, and nothing remembered."""
        self._guest, self._count, rows = silos, silos.count, slice(0, silos.count)
        for own, tensor in self._paired(silos):
            own[rows] = tensor
        for name, tensor in context.items():
            self._context[name][rows] = tensor
        # Each stage starts without momentum or moments, as in ``training.loop``.
        for tensor in self._memory:
            tensor.zero_()
        self._rate.fill_(stage.optimiser.lr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Copy the values back to the silos; after an error they have those of before."""
        guest, self._guest = self._guest, None
        if guest is not None and error is None:
            for own, tensor in self._paired(guest):
                tensor.copy_(own[: guest.count])

    def _paired(self, silos: Silos) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor of this step with the silos' tensor of the same name."""
        for part, named in silos.values.items():
            for name, tensor in named.items():
                yield self._values[part][name], tensor

    def __call__(self, batch: Batch) -> Tensor:
        """Move the values of the batch's silos; the mean loss of each [m], penalty included.

        The step is recorded where the silos are the first ones, for their number rounded up.
        """
        if not isinstance(batch.rows, slice):
            return self._move(batch.rows, batch.places, batch.lengths)

        # Rounding up depends on the number of silos alone, not on earlier stages: a resumed run
        # calls the same kernels, and so computes the same bits.
        m, places, lengths = len(batch.places), batch.places, batch.lengths
        grain = max(1, self._count // GRAINS)
        more = min(-(-m // grain) * grain, self._count) - m
        inputs = [_lengthened(places, more)]
        if lengths is not None:
            inputs.append(_lengthened(lengths, more))
        if more:
            # The mask is False for the rows that only fill up.
            inputs.append(torch.arange(m + more, device=places.device) < m)

        filled, masked = lengths is not None, bool(more)
        key = m + more, places.shape[1], filled, masked
        if key not in self._known:
            self._known[key] = Replayed(partial(self._first, filled, masked), self._recorder)
        return self._known[key](*inputs)[:m]

    def _first(self, filled: bool, masked: bool, places: Tensor, *rest: Tensor) -> Tensor:
        lengths = rest[0] if filled else None
        alive = rest[-1] if masked else None
        return self._move(slice(0, len(places)), places, lengths, alive)

    def _move(
        self, rows: Rows, places: Tensor, lengths: Tensor | None, alive: Tensor | None = None
    ) -> Tensor:
        """Move the values of some rows; rows that are not ``alive`` [m] stay as they are."""
        in_place = isinstance(rows, slice) and alive is None
        values = rows_of(self._values, rows)
        changing = [*self._moved, *self._buffers]
        # Rows by index, or with a mask, are computed on copies and written back at the end.
        if not in_place:
            for part, name in changing:
                values[part][name] = values[part][name].clone()

        leaves = _with_leaves(values, self._moved)
        mean, gradients = self._gradients(values, rows, places, lengths, leaves)

        # Gradients of linear layers come transposed; without this, each tensor would be updated by
        # a kernel of its own instead of all by one.
        updates = list(map(Tensor.contiguous, gradients))
        # It is copied only now: next to the activations it would raise the peak.
        memory = list(map(itemgetter(rows), self._memory))
        if not in_place:
            memory = list(map(Tensor.clone, memory))
        _apply(leaves, updates, memory, self._stage.optimiser, self._rate)
        if not in_place:
            _put(_of(self._values, changing), _of(values, changing), rows, alive)
            _put(self._memory, memory, rows, alive)
        return mean.detach().double()

    def _gradients(
        self,
        values: Values,
        rows: Rows,
        places: Tensor,
        lengths: Tensor | None,
        leaves: Sequence[Tensor],
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The mean loss of each silo [m], penalty included, and its gradients by the leaves."""
        context = {name: tensor[rows] for name, tensor in self._context.items()}
        with multiplying(self._precision):
            if self._parallel:
                return self._each_gradient(values, context, places, lengths)
            with casting(self._x.device, self._precision):
                losses = self._losses(values, context, places)
            mean = _means(at_least_float32(losses), lengths)
            if self._stage.penalty is not None:
                # A penalty depends on no record, so it is added once per silo.
                mean = mean + vmap(self._stage.penalty)(_parameters(self._modules, values), context)
            # Each mean depends on one silo's values alone, so the sum's gradient is that of each.
            return mean, torch.autograd.grad(mean.sum(), leaves, materialize_grads=True)

    def _each_gradient(
        self, values: Values, context: Tensors, places: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """``_gradients``, each silo's by itself, all in parallel."""

        def gradient(own: Values, places: Tensor, length: Tensor | None) -> list[Tensor]:
            context = own.pop(_CONTEXT)
            leaves = _with_leaves(own, self._moved)
            with casting(self._x.device, self._precision):
                parts = parts_of(self._modules, own)
                x = channels_last(self._x[places], self._precision)
                losses = self._stage.loss(parts, x, self._y[places], context)
            mean = _means(at_least_float32(losses)[None], length)[0]
            if self._stage.penalty is not None:
                mean = mean + self._stage.penalty(_parameters(self._modules, own), context)
            return [mean, *torch.autograd.grad(mean, leaves, materialize_grads=True)]

        own = _each({**values, _CONTEXT: context}, len(places))
        each = repeat(None) if lengths is None else lengths[:, None]
        runs = list(map(partial, repeat(gradient), own, places, each))
        mean, *gradients = map(torch.stack, zip(*self._recorder.parallel(runs), strict=True))
        return mean, gradients

    @torch.no_grad()
    def oddness(self, batch: Batch) -> Tensor:
        """How much filling up the batch changes the losses of its shortest silo's own records."""
        # The shortest silo is filled up most, so it shows the largest effect.
        row, length = batch.shortest
        # One silo is enough, since all have the same loss.
        one = slice(row, row + 1)
        of = rows_of(rows_of(self._values, batch.rows), one)
        context = {name: tensor[batch.rows][one] for name, tensor in self._context.items()}
        alone = self._losses(of, context, batch.places[one, :length])
        filled = self._losses(of, context, batch.places[one])[:, :length]
        # 1 is added so that rounding of tiny losses does not look large.
        return (filled - alone).abs().max() / (1 + alone.abs().max())

    def _losses(self, values: Values, context: Tensors, places: Tensor) -> Tensor:
        def loss(values: Values, context: Tensors, x: Tensor, y: Tensor) -> Tensor:
            return self._stage.loss(parts_of(self._modules, values), x, y, context)

        return over_silos(loss)(values, context, self._x[places], self._y[places])  # [m, L]


def _each(values: Mapping[str, Tensors], count: int) -> list[Values]:
    """The values of each of so many silos, as views."""
    return [mapped(values, itemgetter(silo)) for silo in range(count)]


def _put(whole: Sequence[Tensor], new: Sequence[Tensor], rows: Rows, alive: Tensor | None) -> None:
    """Write the new values of some rows into the whole, except rows that are not alive."""
    for own, tensor in zip(whole, new, strict=True):
        moved = tensor.detach()
        if alive is not None:
            moved = torch.where(_column(alive, moved), moved, own[rows])
        own[rows] = moved


def _column(each: Tensor, like: Tensor) -> Tensor:
    """One value per silo [m] in the shape [m, 1, …] that goes with ``like`` [m, …]."""
    return each.reshape(-1, *(1,) * (like.ndim - 1))


def _lengthened(rows: Tensor, more: int) -> Tensor:
    """Rows [m, …] with the first of them again, so many times."""
    if not more:
        return rows
    return torch.cat([rows, rows[:1].expand(more, *rows.shape[1:])])


def _means(losses: Tensor, lengths: Tensor | None) -> Tensor:
    """Each silo's mean [m] of its losses [m, L], of which the first ``lengths`` [m] count."""
    if lengths is None:
        return losses.mean(1)
    # Records that only fill up count neither in the sum nor in the divisor.
    return torch.where(counting(lengths, losses.shape[1]), losses, 0).sum(1) / lengths


def _copies(tensors: Tensors) -> dict[str, Tensor]:
    return mapped({_CONTEXT: tensors}, Tensor.clone)[_CONTEXT]


def _of(values: Values, names: Names) -> list[Tensor]:
    return [values[part][name] for part, name in names]


def _with_leaves(values: Values, names: Names) -> list[Tensor]:
    """Put leaves of autograd in the place of these values, and return them."""
    leaves: list[Tensor] = []
    for part, name in names:
        leaf = values[part][name].detach().requires_grad_()
        values[part][name] = leaf
        leaves.append(leaf)
    return leaves


def _parameters(modules: Modules, values: Values) -> Values:
    return {
        part: {name: values[part][name] for name, _ in m.named_parameters()}
        for part, m in modules.items()
    }


def _apply(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    memory: list[Tensor],
    optimiser: Optimiser,
    rate: Tensor,
) -> None:
    """Move the parameters [m, …] of each silo by one step of the optimiser's rule, in place."""
    move(parameters, clipped_each(gradients, optimiser.clip), memory, optimiser, rate)


def clipped_each(gradients: Sequence[Tensor], limit: float | None) -> Sequence[Tensor]:
    """``training.clipped`` of each silo's gradients [m, …]."""
    if limit is None:
        return gradients
    # In float64, as in ``training.loop.clipped``.
    squares = [
        gradient.double().square().reshape(len(gradient), -1).sum(1) for gradient in gradients
    ]
    norm = torch.stack(squares).sum(0).sqrt()  # [m]
    factor = torch.where(norm <= limit, 1.0, limit / norm)
    return [g * _column(factor.to(g.dtype), g) for g in gradients]
