"""Per-FedAvg: a shared model that is good after a step of each silo's own.

Fallah, Mokhtari, Ozdaglar, "Personalized federated learning with theoretical guarantees: a
model-agnostic meta-learning approach", NeurIPS 2020, arXiv:2002.07948, Algorithm 1. A silo
minimises F_i(w) = f_i(w − α ∇f_i(w)):

    (1) on each batch:       w̃ = w_i − α ∇f_i(w_i; D)
    (2) on the same batch:   w_i ← w_i − β (I − α ∇²f_i(w_i; D'')) ∇f_i(w̃; D'),   from w_i = w^t
    (3) at the coordinator:  w^{t+1} ← Σ_{i ∈ A_t} γ_i w_i,   γ_i = n_i / Σ_{j ∈ A_t} n_j
    (4) in the end:          θ_i = w^K − α ∇f_i(w^K; batch), on each batch in turn

w is the job's model, β its ``lr`` and K its rounds. One more round, for all silos, is (4); by θ_i a
silo predicts.

Where this differs from the paper:
- D and D' are the halves of a batch, D the larger one of an odd number, and D'' is D; in the paper
  three batches. Fewer than four records are not halved: D and D' are all of them, since batch norm
  cannot train on one.
- ``variant = "hf"`` takes the product with the Hessian in (2) exactly, by forward-mode
  differentiation; the paper's Per-FedAvg (HF) takes a difference of two gradients for it. "fo"
  leaves the Hessian out, as Per-FedAvg (FO).
- The τ local steps are the batches of the job's epochs. (4) is ``tuning_epochs`` of such steps, so
  that all records count; the paper takes one step on one batch.
- (3) weighs by samples, as FedAvg here does; the paper weighs a cohort equally, as ``weights =
  "equal"``.
- α = 0.01 is the paper's, whose β is 0.001.
- (1) uses a batch's own statistics in batch norm, and leaves the running ones to (2).

Wire list: ``model`` (whole model w, Sum weighted by n_i) up and down in every round but the last
one, in which it only comes down. θ_i never leaves.
"""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from ..course import Facts, Optimiser, Parts, SiloState, Stage
from ..exchange.parts import Tensors
from ..methods.common.inner_steps import (
    curvature_at,
    detached,
    gradient_at,
    losses_at,
    point_of,
    sloped,
    stepped,
)
from ..methods.common.second_model import MODEL
from .fedavg_ft import FedAvgFT, FedAvgFTOptions

FEWEST_HALVED = 4


class PerFedAvgOptions(FedAvgFTOptions):
    """Options of Per-FedAvg."""

    alpha: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 0.01
    """α, the learning rate of a silo's own steps."""
    variant: Literal["hf", "fo"] = "hf"
    """The outer step includes the second derivatives of the inner one, "hf", or not, "fo"."""
    tuning_epochs: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 1
    """Epochs of a silo's own steps in the end."""


class PerFedAvg(FedAvgFT):
    """A shared model that is good after a step of each silo's own."""

    name = "per-fedavg"
    version = 1
    sums_steps = False
    options_model = PerFedAvgOptions
    options: PerFedAvgOptions

    @property
    def private_fault(self) -> str:
        """Step (1) is taken on half a batch."""
        return (
            "its inner step is taken on half a batch, in which a record moves the gradients of"
            " others"
        )

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Steps (1) and (2) on each batch; in the last round (4)."""
        if self.tuning(facts.round):
            # (4) takes steps of α, not of the job's learning rate.
            own = Optimiser(self.options.alpha)
            return (Stage(MODEL, self.options.tuning_epochs, self.task_loss, own),)
        # Coupled: records of the inner half move the gradient of the outer half.
        return (replace(self.stage(*MODEL), loss=self.meta, coupled=True),)

    def meta(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """F_i(w) of a batch, at each of its records [B].

        The value is f_i(w̃) on the outer half, the gradient by w that of (2).
        """
        # Steps (1) and (2) take different records where the batch has enough for both.
        inner, outer = slice(None), slice(None)
        if len(x) >= FEWEST_HALVED:
            half = (len(x) + 1) // 2
            inner, outer = slice(half), slice(half, None)
        # Detached: only ``sloped`` below gives the loss a gradient.
        w, alpha, task = point_of(parts), self.options.alpha, self.setting.task
        still = detached(w)
        after = stepped(still, gradient_at(task, parts, still, x[inner], y[inner]), alpha)  # (1)
        direction = gradient_at(task, parts, after, x[outer], y[outer])
        if self.options.variant == "hf":
            # (I − α ∇²f) ∇f, with the inner half's Hessian at w and the outer half's gradient.
            curvature = curvature_at(task, parts, still, direction, x[inner], y[inner])
            direction = stepped(direction, curvature, alpha)  # (2)

        # The runner takes the mean over the batch of a loss [B]: so the batch's value stands at
        # each record, and its gradient by w is the direction.
        value = losses_at(task, parts, after, x[outer], y[outer]).mean() + sloped(w, direction)
        return value.expand(len(x))
