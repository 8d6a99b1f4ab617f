"""APFL: each silo mixes a shared model and its own, in a proportion that it learns.

Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020, arXiv:2003.13461, Algorithm
1.

    (1) at silo i:           v̄_i = α_i v_i + (1 − α_i) w_i
    (2) on each batch:       w_i ← w_i − η ∇f_i(w_i),   from w_i = w^t
    (3) on the same batch:   v_i ← v_i − η ∇_v f_i(v̄_i) = v_i − η α_i ∇f_i(v̄_i),   v_i kept from
                             round to round
    (4) once a round:        α_i ← α_i − η ⟨∇f_i(v̄_i), v_i − w_i⟩, brought into [0, 1]
    (5) at the coordinator:  w^{t+1} ← Σ_{i ∈ U_t} γ_i w_i,   γ_i = n_i / Σ_{j ∈ U_t} n_j

w is the job's model; a silo predicts by v̄_i. (2) and (3) are one step on f_i(w_i) + f_i(α_i v_i +
(1 − α_i) w_i) with the second w_i held still, so the loss that is told is the sum of both. (2) and
(5) are FedAvg, whatever α is.

Where this differs from the paper:
- (4) is taken before a round's (2) and (3), where w_i = w^t, with the gradient over all records,
  and the model in evaluation mode; in the paper on a batch, in the authors' code on the first one
  of a round. The code also adds 0.02 α to the slope, and takes its gradients at v_i and w_i; here
  it is the derivative of f_i(v̄_i) by α_i.
- v̄ mixes parameters, as the paper says; the authors' code mixes the outputs of two models.
- (5) weighs by samples, as FedAvg here does; the paper weighs a cohort equally, as ``weights =
  "equal"``.
- v_i begins at the first w^t that a silo gets. α_i begins at ``alpha``, 0.5 as in the authors'
  code.
- Batch norm's running statistics are not mixed: those of w are of w, and v̄ has its own.

Wire list: ``model`` (whole model w, Sum weighted by n_i) up and down in every round. v_i and α_i
never leave.
"""

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import grad

from ..course import Change, Course, Facts, Parts, SiloState, Survey
from ..exchange.delivery import Results
from ..exchange.parts import Tensors
from ..methods.common.inner_steps import detached, logits_at, point_of
from ..methods.common.second_model import MODEL, begun, logits, names, not_begun, with_second_models
from ..methods.fedavg import FedAvg, FedAvgOptions

OWN = "own"  # v
MIXTURE = "mixture"  # α


class APFLOptions(FedAvgOptions):
    """Options of APFL."""

    alpha: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    """α in the beginning: 0 is the shared model, 1 the silo's own."""
    adaptive: Annotated[bool, Field(strict=True)] = True
    """If true, each silo learns its own α; if false, α stays as it is."""


class Mixture(nn.Module):
    """α, as a part of the state."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(alpha))

    def forward(self) -> Tensor:
        """α []."""
        return self.alpha


class APFL(FedAvg):
    """A mixture of a shared model and the silo's own."""

    name = "apfl"
    version = 1
    sums_steps = False
    options_model = APFLOptions
    product = "trained"
    options: APFLOptions

    @property
    def private_fault(self) -> str:
        """The gradient at v̄ cannot be taken by record, and no budget pays for a survey."""
        return (
            "it takes gradients at a mixture of two models, which cannot be told record by record"
        )

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """Both models, w and v, alike in the beginning, and α."""
        return {**with_second_models(self.setting, OWN), MIXTURE: Mixture(self.options.alpha)}

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """A mark that v has not begun."""
        return not_begun()

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """Logits [B, classes] of v̄."""
        return self.mixed(parts, parts[MIXTURE](), x)

    def mixed(self, parts: Parts, alpha: Tensor, x: Tensor) -> Tensor:
        """Logits [B, classes] of v̄, by which v and α are trained, and w is not.

        v̄ mixes parameters, as the paper says; its buffers are those of v.
        """
        own = {part: parts[name] for part, name in zip(MODEL, names(OWN), strict=True)}
        # w is held still: (3) moves only v, and (4) only α.
        v, w = point_of(own), detached(point_of(parts))
        between: dict[str, dict[str, Tensor]] = {}
        for part in MODEL:
            mine, shared = v[part], w[part]
            # (1)
            between[part] = {k: alpha * mine[k] + (1 - alpha) * shared[k] for k in mine}
        return logits_at(own, between, x)

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Replace w by the delivered model; v stays, or begins there."""
        return begun(super().deliver(state, delivered, facts), OWN)

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """α, then w and v together.

        With ``adaptive = false`` α stays, and nothing is surveyed.
        """
        # One stage for both models, as the paper takes (2) and (3) on the same batch.
        both = replace(self.stage(*MODEL, *names(OWN)), loss=self.both)
        if not self.options.adaptive:
            return (both,)
        # (4) comes first, where w_i = w^t (see the top of this file).
        return (Survey(self.slope), Change(self.adapted), both)

    def slope(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The derivative of the losses by α, of all records together.

        {"slope": []}: a sum over the batch's records, since a survey adds batches up; ``adapted``
        divides by the records.
        """

        def losses(alpha: Tensor) -> Tensor:
            return self.setting.task.losses(self.mixed(parts, alpha, x), y).sum()

        return {"slope": grad(losses)(parts[MIXTURE]())}

    def adapted(self, state: SiloState, facts: Facts) -> SiloState:
        """The state with the next α.

        It is cut to [0, 1], and keeps its dtype.
        """
        alpha = state.parts[MIXTURE]["alpha"]
        # The mean slope over all records; η is the job's learning rate.
        step = self.setting.optimiser.lr * facts.measured["slope"] / facts.samples
        after = (alpha - step.to(alpha.dtype)).clamp(0, 1)  # (4)
        return replace(state, parts={**state.parts, MIXTURE: {"alpha": after}})

    def both(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """The task's loss [B] of w and of v̄, added.

        Its gradient by w is that of (2), its gradient by v that of (3).
        """
        shared = self.setting.task.losses(logits(parts, x), y)  # (2)
        return shared + self.setting.task.losses(self.predict(parts, x), y)  # (3)
