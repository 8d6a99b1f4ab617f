"""Differentially private local training: DP-SGD by Opacus's optimiser, in the place of ``training.PLAIN``.

Abadi et al., "Deep learning with differential privacy", 2016. A step draws each record by itself with probability q,
cuts each drawn record's gradient, of all parameters that the step moves together, to Euclidean norm C, and moves by

    (Σ min(1, C / ‖g_i‖) g_i + σ C z) / D,    z standard normal, D the divisor that stands for q times the records

The draw and z come from a cryptographic generator that the caller gives, fresh for each step: no seed of a job reaches
them. A step that draws nobody is taken too, on noise alone, and a record whose gradient is no number adds nothing. What
depends on parameters alone, a stage's penalty and the optimiser's rule, comes after the noise. The sum itself is in the
model's float32, whose rounding no bound reckons with.

Gradients by record come from Opacus's hooks where a stage trains modules that take a batch and whose layers Opacus
knows, else from ``torch.func`` (PPFL's membership vector has no batch). Both are of the same loss of one record.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.func import grad, vmap

from ..errors import LocalError
from .account import Random
from .functional import Bound
from .method import Stage
from .training import Modules, Step, apply, parameters_of

Gradients: TypeAlias = Callable[[Tensor, Tensor], float]  # fills grad_sample of all parameters, and gives Σ losses

LARGEST_LOSS = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Mechanism:
    """The numbers of DP-SGD, the same for all steps of a job; none of them depends on a record."""

    clip: float  # C
    sigma: float
    whole_sigma: float  # σ of a step on all records
    q: float
    divisor: float  # D
    physical_batch: int  # records whose gradients are in memory at a time

    @property
    def steps(self) -> int:
        """Steps of an epoch, ⌈1 / q⌉."""
        return ceil(1 / self.q)


class Private:
    """DP-SGD. A stage over all records draws all of them in its one step an epoch: q is 1, and D is that by q."""

    def __init__(self, mechanism: Mechanism, fresh: Callable[[], Random], charge: Callable[[bool], None]) -> None:
        """``charge`` is told before each step whether it draws all records; it raises where none is left to spend."""
        self._mechanism = mechanism
        self._fresh = fresh
        self._charge = charge
        self._random: Random | None = None
        self._release: Callable[[], None] = lambda: None  # of hooks on the modules of the stage before

    def batches(
        self, stage: Stage, records: int, batch_size: int, rng: np.random.Generator, wrap: bool
    ) -> Iterable[NDArray[np.int64]]:
        """The records of each step, drawn as it comes; neither ``batch_size`` nor ``rng`` has a part in it."""
        for _ in range(self.steps(stage, records, batch_size)):
            self._charge(stage.full_batch)
            self._random = self._fresh()
            yield np.arange(records) if stage.full_batch else self._random.drawn(records, self._mechanism.q)

    def steps(self, stage: Stage, records: int, batch_size: int) -> int:
        """Steps of an epoch."""
        return 1 if stage.full_batch else self._mechanism.steps

    def begin(self, modules: Modules, stage: Stage) -> Step:
        """The step on the records that were drawn; LocalError for a model that cannot be trained so."""
        for part in stage.trains:
            check(part, modules[part])
        self._release()
        how = self._mechanism
        if stage.full_batch:
            how = replace(how, sigma=how.whole_sigma, divisor=how.divisor / how.q)
        parameters = [p for part in stage.trains for p in modules[part].parameters()]
        optimiser = _Optimiser(_Rule(parameters, modules, stage), how, self._normal)
        gradients = self._by_hooks(modules, stage) if _hookable(modules, stage) else _by_function(modules, stage)

        def step(x: Tensor, y: Tensor) -> Tensor:
            total, pieces = 0.0, max(ceil(len(x) / how.physical_batch), 1)
            for number, (xs, ys) in enumerate(zip(x.chunk(pieces), y.chunk(pieces), strict=True), start=1):
                optimiser.zero_grad()
                total += gradients(xs, ys) if len(xs) else 0.0
                _fill(parameters, len(xs))
                _drop_unbounded(parameters)
                optimiser.signal_skip_step(number < pieces)
                optimiser.step()
            return torch.tensor(total / how.divisor, dtype=torch.float64)

        return step

    def _by_hooks(self, modules: Modules, stage: Stage) -> Gradients:
        hooked = [GradSampleHooks(modules[part], loss_reduction="sum") for part in stage.trains]

        def release() -> None:
            for hooks in hooked:
                hooks.cleanup()

        def gradients(x: Tensor, y: Tensor) -> float:
            losses = stage.loss(modules, x, y, stage.context)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Full backward hook is firing")  # the first layer's input is data
                torch.autograd.backward(losses.sum())
            return _total(losses)

        self._release = release
        return gradients

    def _normal(self, like: Tensor) -> Tensor:
        if self._random is None:
            raise LocalError("a private step without records of its own; this is a bug in Staddle")
        return torch.from_numpy(self._random.normal(like.numel())).reshape(like.shape)


class _Rule(torch.optim.Optimizer):
    """The job's own optimiser and the stage's penalty, on gradients that are noisy already."""

    def __init__(self, parameters: list[nn.Parameter], modules: Modules, stage: Stage) -> None:
        super().__init__(parameters, {})
        self._parameters, self._modules, self._stage = parameters, modules, stage
        self._velocity: list[Tensor] = []

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        if self._stage.penalty is not None:
            penalty = self._stage.penalty(parameters_of(self._modules), self._stage.context)
            added = torch.autograd.grad(penalty, self._parameters, materialize_grads=True)
            gradients = [one + other for one, other in zip(gradients, added, strict=True)]
        apply(self._parameters, gradients, self._velocity, self._stage.optimiser)


class _Optimiser(DPOptimizer):  # type: ignore[misc]
    """Opacus's, with noise that no seed makes again."""

    def __init__(self, rule: _Rule, how: Mechanism, normal: Callable[[Tensor], Tensor]) -> None:
        super().__init__(
            rule, noise_multiplier=how.sigma, max_grad_norm=how.clip, expected_batch_size=1, loss_reduction="sum"
        )
        self._normal, self._divisor = normal, how.divisor

    def add_noise(self) -> None:
        """Σ of the cut gradients plus noise, by the divisor.

        Noise is added in float64 and the sum rounded once: what float32 lacks of noise would tell what it is added to.
        """
        for p in self.params:
            total = p.summed_grad
            if self.noise_multiplier:
                noise = self._normal(total).mul_(self.noise_multiplier * self.max_grad_norm)
                total = noise.add_(total).to(total.dtype)
            p.grad = (total / self._divisor).view_as(p)


def check(part: str, module: nn.Module) -> None:
    """LocalError for a part in which a record's gradient depends on the other records of its batch."""
    if faults := ModuleValidator.validate(module, strict=False):
        raise LocalError(
            f"part {part!r} cannot be trained with differential privacy: {faults[0]}; choose a model with "
            'norm = "group", or without normalisation'
        )


def _hookable(modules: Modules, stage: Stage) -> bool:
    """Whether Opacus's hooks reach all parameters that a stage moves."""
    layers = [layer for part in stage.trains for layer in modules[part].modules()]
    own = [layer for layer in layers if any(True for _ in layer.parameters(recurse=False))]
    known = all(type(layer) in GradSampleHooks.GRAD_SAMPLERS for layer in own)
    return known and not any(getattr(layer, "functional", False) for layer in layers)


def _by_function(modules: Modules, stage: Stage) -> Gradients:
    """Record by record under ``vmap``: each part is called as a function of its parameters."""
    parameters = {part: dict(modules[part].named_parameters()) for part in stage.trains}
    values = {part: {name: p.detach() for name, p in named.items()} for part, named in parameters.items()}

    def loss(of: dict[str, dict[str, Tensor]], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        parts = {part: Bound(module, of.get(part, {})) for part, module in modules.items()}
        value = stage.loss(parts, x[None], y[None], stage.context)[0]
        return value, value

    each = vmap(grad(loss, has_aux=True), in_dims=(None, 0, 0))

    def gradients(x: Tensor, y: Tensor) -> float:
        found, losses = each(values, x, y)
        for part, named in parameters.items():
            for name, p in named.items():
                p.grad_sample = found[part][name].detach()  # type: ignore[attr-defined]
        return _total(losses)

    return gradients


def _total(losses: Tensor) -> float:
    """Σ of the losses that are numbers, each cut to what float32 holds: a sum without end would end the training."""
    known = losses.detach().double().nan_to_num(0.0, 0.0, 0.0)
    return float(known.clamp(-LARGEST_LOSS, LARGEST_LOSS).sum())


def _fill(parameters: list[nn.Parameter], records: int) -> None:
    """A parameter that no record reached has gradients of 0."""
    for p in parameters:
        if getattr(p, "grad_sample", None) is None:
            p.grad_sample = torch.zeros(records, *p.shape, dtype=p.dtype)  # type: ignore[attr-defined]


def _drop_unbounded(parameters: list[nn.Parameter]) -> None:
    """A record whose gradient is no number adds nothing: it would end the training, and so be seen."""
    samples: list[Tensor] = [p.grad_sample for p in parameters]  # type: ignore[attr-defined]
    bounded = torch.stack([gradient.unsqueeze(-1).flatten(1).sum(1) for gradient in samples]).sum(0).isfinite()  # [B]
    if not bounded.all():
        for gradient in samples:
            gradient[~bounded] = 0
