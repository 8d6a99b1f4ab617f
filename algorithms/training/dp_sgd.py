"""Differentially private local training: DP-SGD, in the place of ``training.PLAIN``.

Abadi et al., "Deep learning with differential privacy", 2016. A step draws each record by itself
with probability q, cuts each drawn record's gradient, of all parameters that the step moves
together, to Euclidean norm C, and moves by

    (Σ min(1, C / ‖g_i‖) g_i + σ C z) / D,  z standard normal, D the divisor that stands for q times
                                            the records

The draw and z come from a cryptographic generator that the caller gives, fresh for each step, and
what layers such as dropout draw in secret: no seed of a job reaches them. A step that draws
nobody is taken too, on noise alone, and a record whose gradient is no number adds nothing. What
depends on parameters alone, a stage's penalty and the optimiser's rule, comes after the noise.
Gradients are in the model's float32, cut and added up as integers: clipped_sum.py says why one
record so moves the sum by C at most.

Gradients by record come from Opacus's hooks where a stage trains modules that take a batch and
whose layers Opacus knows, else from ``torch.func`` (PPFL's membership vector has no batch). Both
are of the same loss of one record. Calls all have ``physical_batch`` rows, so that what one record
gives does not depend on how many others are drawn.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.func import grad, vmap

from ...errors import LocalError
from ..course import Stage
from ..data.dataset import in_calls
from ..models.foreign import traits_of
from ..models.functional import BoundModule
from ..models.tied import OWNERS
from ..numerics.ranks import ALONE, Ranks
from ..numerics.streams import secret_stream
from .accountant import Random
from .clipped_sum import ClippedSum
from .loop import Modules, Step, parameters_of
from .optimisers import clipped, move

# losses [B]; by parameter [B, …]
Gradients: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, list[Tensor]]]

# Losses are cut to this: an infinite sum would end training, which would reveal a record.
LARGEST_LOSS = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Mechanism:
    """The numbers of DP-SGD, the same for all steps of a job; none of them depends on a record.

    ``clip`` is a Euclidean norm; ``sigma`` and ``whole_sigma`` are multiples of it.
    """

    clip: float  # C
    sigma: float
    whole_sigma: float  # σ of a step on all records
    q: float
    divisor: float  # D
    physical_batch: int  # rows of a call: records whose gradients are in memory at a time
    honest: int = 1  # silos whose shares are the noise of a step, where they share it
    local_rate: float = 1.0  # of lr, for all that is not summed

    @property
    def steps(self) -> int:
        """Steps of an epoch, ⌈1 / q⌉.

        An epoch then draws each record once on average, if 1 / q is whole.
        """
        return ceil(1 / self.q)


class Private:
    """DP-SGD. A stage over all records has one step per epoch, which takes all of them.

    In that step q is 1, and the divisor is D / q. It is a ``Stepper`` of one silo, for one round.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        fresh: Callable[[], Random],
        charge: Callable[[Stage], None],
        ranks: Ranks = ALONE,
    ) -> None:
        """``charge`` is called before each step, with its stage.

        It raises ExhaustedError where nothing is left to spend. Each of ``ranks`` clips its share
        of the records; the noise is that of one process.
        """
        self._ranks = ranks
        # of the last step of a stage with shared noise, by parameter
        self.summed: dict[str, Tensor] = {}
        self._mechanism = mechanism
        self._fresh = fresh
        self._charge = charge
        self._random: Random | None = None
        # of hooks on the modules of the stage before
        self._release: Callable[[], None] = lambda: None

    def batches(
        self, stage: Stage, records: int, batch_size: int, rng: np.random.Generator, wrap: bool
    ) -> Iterable[NDArray[np.int64]]:
        """Indices of each step's records, drawn when the step is about to be taken.

        ``batch_size`` and ``rng`` are ignored: the draw comes from the fresh generator.
        """
        for _ in range(self.steps(stage, records, batch_size)):
            # The charge comes first: where nothing is left to spend, no record is drawn.
            self._charge(stage)
            # A fresh generator for the draw and the noise of this step.
            self._random = self._fresh()
            if stage.full_batch:
                # q is 1 here, so the noise is ``whole_sigma``.
                yield np.arange(records)
            else:
                yield self._random.drawn(records, self._mechanism.q)

    def steps(self, stage: Stage, records: int, batch_size: int) -> int:
        """Steps of an epoch.

        It depends on q, not on the number of records, which is not public.
        """
        return 1 if stage.full_batch or stage.summed else self._mechanism.steps

    def draws(self, of_job: np.random.Generator) -> np.random.Generator:
        """In secret: layers draw by a record's row in a call, and augmentation by its place.

        Whoever knew what each row draws could tell from a step's sum that a record moved the others
        by a row, and so changed what each of them gives: no clip bounds that. Rows that draw alike
        and in secret make the sum one of a mixture, whatever record is added.
        """
        return secret_stream()

    def begin(self, modules: Modules, stage: Stage) -> Step:
        """The private step on the records of a batch.

        It returns the sum of the drawn records' losses over D, which stays at the silo. LocalError
        for a model that cannot be trained with differential privacy.
        """
        for part in stage.trains:
            check(part, modules[part])

        # Hooks of the stage before would run in this one's backward pass as well.
        self._release()
        how = self._mechanism
        if stage.full_batch:
            how = replace(how, sigma=how.whole_sigma, divisor=how.divisor / how.q)
        if _hookable(modules, stage):
            gradients = self._by_hooks(modules, stage)
        else:
            gradients = _by_function(modules, stage)
        ranks = self._ranks
        apart = False  # checked in the first step, which knows the form of a record
        named = _named(modules, stage)
        shapes = [p.shape for _, p in named]
        # What the silos sum stays as it came down, the rest moves here.
        places = {name: at for at, (name, _) in enumerate(named)}
        summed = sorted(stage.summed, key=places.__getitem__)
        given = [places[name] for name in summed]
        kept = sorted(set(places.values()).difference(given))
        optimiser = replace(stage.optimiser, lr=stage.optimiser.lr * how.local_rate)
        slower = replace(stage, optimiser=optimiser)
        rule = _Rule([named[at][1] for at in kept], modules, slower)

        def step(x: Tensor, y: Tensor) -> Tensor:
            nonlocal apart
            if self._random is None:
                raise LocalError(
                    "a private step without records of its own; this is a bug in Staddle"
                )
            if not apart:
                check_apart(modules, stage, x, y)
                apart = True

            # Rows that fill up a call are not records: their gradients must not be added.
            moved = ClippedSum(shapes, how.clip, how.sigma, shared=bool(summed))
            total, own = torch.zeros((), dtype=torch.float64), slice(ranks.rank, None, ranks.size)
            for xs, ys, records in in_calls(x[own], y[own], how.physical_batch):
                losses, found = gradients(xs, ys)
                moved.add([gradient[:records] for gradient in found])
                # Their losses must not count either.
                total += _total(losses[:records])
            moved.join(ranks)
            ranks.add([total])

            # Penalty and optimiser come after the noise: they are computed from a release alone,
            # and so cost nothing.
            if kept:
                noisy = moved.noisy(self._random, kept)
                moves = zip(noisy, kept, strict=True)
                rule([(each / how.divisor).to(named[at][1].dtype) for each, at in moves])
            shares = moved.shares(self._random, how.honest, given)
            self.summed = dict(zip(summed, shares, strict=True))
            # By D, like the update: the number of drawn records is not public.
            return total / how.divisor

        return step

    def _by_hooks(self, modules: Modules, stage: Stage) -> Gradients:
        # "sum", since a mean would divide each record's gradient by the size of the call.
        hooked = [GradSampleHooks(modules[part], loss_reduction="sum") for part in stage.trains]

        def release() -> None:
            for hooks in hooked:
                hooks.cleanup()

        parameters = [p for _, p in _named(modules, stage)]

        def gradients(x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
            # The hooks add to what stands there, and the records before have been counted.
            for p in parameters:
                p.grad = p.grad_sample = None  # type: ignore[attr-defined]
            losses = stage.loss(modules, x, y, stage.context)
            with warnings.catch_warnings():
                # the first layer's input is data
                warnings.filterwarnings("ignore", "Full backward hook is firing")
                torch.autograd.backward(losses.sum())
            return losses.detach(), [_given(p, len(x)) for p in parameters]

        self._release = release
        return gradients


class _Rule:
    """The job's own optimiser and the stage's penalty, on gradients that are noisy already."""

    def __init__(self, parameters: list[nn.Parameter], modules: Modules, stage: Stage) -> None:
        self._parameters, self._modules, self._stage = parameters, modules, stage
        self._memory: list[Tensor] = []

    def __call__(self, gradients: list[Tensor]) -> None:
        # The penalty depends on parameters alone, so its gradient needs neither clip nor noise.
        if self._stage.penalty is not None:
            penalty = self._stage.penalty(parameters_of(self._modules), self._stage.context)
            # Parameters that the penalty does not reach get gradient 0.
            added = torch.autograd.grad(penalty, self._parameters, materialize_grads=True)
            gradients = [one + other for one, other in zip(gradients, added, strict=True)]
        optimiser = self._stage.optimiser
        updates = clipped(gradients, optimiser.clip)
        move(self._parameters, updates, self._memory, optimiser)


def _named(modules: Modules, stage: Stage) -> list[tuple[str, nn.Parameter]]:
    """The parameters of which a stage takes gradients, named ``part.parameter``."""
    return [
        (f"{part}.{name}", p)
        for part in stage.trains
        for name, p in modules[part].named_parameters()
    ]


def check(part: str, module: nn.Module) -> None:
    """LocalError for a part in which a record's gradient depends on others of its batch."""
    if faults := ModuleValidator.validate(module, strict=False):
        raise LocalError(
            f"part {part!r} cannot be trained with differential privacy: {faults[0]}; choose a"
            ' model with norm = "group", or without normalisation'
        )


@torch.no_grad()
def check_apart(modules: Modules, stage: Stage, like: Tensor, truth: Tensor) -> None:
    """LocalError where a record's loss depends on another one of its batch.

    The check uses two made-up records of the form of ``like`` and ``truth``, each [B, …], never a
    silo's own. It finds what couples all records, such as their mean, in well-meant code.
    """
    # All values differ, so that a mean over records would show.
    pair = torch.linspace(-1, 1, 2 * like.shape[1:].numel(), dtype=like.dtype)
    # Ones: a survival time of 0 has no loss at all, and would hide what couples.
    pair, labels = pair.reshape(2, *like.shape[1:]), truth.new_ones(2, *truth.shape[1:])
    # The first record is the same in both pairs, and so must be its loss.
    alone = []
    for other in (pair, torch.stack([pair[0], -2 * pair[1]])):
        # Both times dropout draws the same, and training continues as if nothing had been drawn.
        with torch.random.fork_rng(devices=[]):
            # NaN does not equal itself, so it is replaced.
            alone.append(stage.loss(modules, other, labels, stage.context)[0].nan_to_num())
    if not torch.equal(*alone):
        raise LocalError(
            f"in a stage that trains {', '.join(stage.trains)} the loss of a record depends on"
            " another one of its batch; so one moves the gradients of others, which no clip"
            " bounds: no private job can train so"
        )


def _hookable(modules: Modules, stage: Stage) -> bool:
    """True if Opacus's hooks reach all parameters that a stage moves, and may be relied on."""
    if traits_of(modules).alone:
        return False
    for layer in chain.from_iterable(modules[part].modules() for part in stage.trains):
        # Such a layer's parameters are used without a call of it, so no hook runs.
        if getattr(layer, "functional", False):
            return False
        # Nor would the hooks see what such a layer does with a parameter of another.
        if getattr(layer, OWNERS, None):
            return False
        # Opacus has no per-sample gradients for the parameters of other types of layers.
        owns = next(layer.parameters(recurse=False), None) is not None
        if owns and type(layer) not in GradSampleHooks.GRAD_SAMPLERS:
            return False
    return True


def _by_function(modules: Modules, stage: Stage) -> Gradients:
    """Record by record under ``vmap``: each part is called as a function of its parameters."""
    names: list[tuple[str, str]] = []
    values: dict[str, dict[str, Tensor]] = {}
    for part in stage.trains:
        values[part] = {}
        for name, parameter in modules[part].named_parameters():
            values[part][name] = parameter.detach()
            names.append((part, name))

    def loss(of: dict[str, dict[str, Tensor]], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        parts = {part: BoundModule(module, of.get(part, {})) for part, module in modules.items()}
        # The method's loss takes batches, so the record becomes a batch of one.
        value = stage.loss(parts, x[None], y[None], stage.context)[0]
        return value, value

    # Layers that draw, such as dropout, draw for each record.
    each = vmap(grad(loss, has_aux=True), in_dims=(None, 0, 0), randomness="different")

    def gradients(x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        found, losses = each(values, x, y)
        return losses, [found[part][name] for part, name in names]

    return gradients


def _total(losses: Tensor) -> float:
    """Σ of the finite losses, each cut to what float32 holds.

    An infinite sum would end the training, and so tell of one record.
    """
    known = losses.detach().double().nan_to_num(0.0, 0.0, 0.0)
    return float(known.clamp(-LARGEST_LOSS, LARGEST_LOSS).sum())


def _given(p: nn.Parameter, rows: int) -> Tensor:
    """The gradients by record that Opacus's hooks left at a parameter; 0 where none reached it."""
    found: Tensor | None = getattr(p, "grad_sample", None)
    if found is not None:
        return found
    return torch.zeros((), dtype=p.dtype).expand(rows, *p.shape)
