"""pFedMe: a shared model whose loss is what a silo's own model can reach near it.

Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS 2020,
arXiv:2006.08848, Algorithm 1. A silo minimises the Moreau envelope F_i of its loss f_i:

    (1) F_i(w) = min_θ f_i(θ) + (λ/2) ‖θ − w‖²,   ∇F_i(w) = λ (w − θ̃_i(w)),   θ̃_i(w) the θ of the
                                                                               least value
    (2) θ̃ by K steps on a batch, from θ = w:   θ ← θ − η_p (∇f_i(θ; batch) + λ (θ − w))
    (3) at silo i, on each batch:              w_i ← w_i − η λ (w_i − θ̃),   from w_i = w^t
    (4) at the coordinator, cohort S:          w^{t+1} ← (1 − β) w^t + β Σ_{i ∈ S} γ_i w_i,   γ_i =
                                               n_i / Σ_{j ∈ S} n_j

w is the job's model and η its ``lr``. The silo's own model is θ_i = θ̃_i(w_i); by it a silo
predicts.

Where this differs from the paper:
- The local rounds R are the batches of the job's epochs, so that all records have a part; the paper
  draws R batches.
- θ_i is found once a round, after w_i: K steps (2) with the gradient over all records, the model in
  evaluation mode. The paper keeps the θ̃ of the last batch, which a few odd records can spoil. As
  delivered, θ_i is w, as in the code.
- (2) takes its K steps whatever the accuracy; the paper stops where the gradient is small, its code
  after K steps. The code also continues from the θ̃ of the batch before, and adds 0.001 θ to the
  gradient.
- Momentum and weight decay of the job move w alone.
- (4) weighs by samples, as the code does; the paper weighs equally, as ``weights = "equal"``. Each
  silo mixes before it gives, (1 − β) w^t + β w_i: the mean is the same, and the coordinator keeps
  no model.
- λ = 15, K = 5 and β = 1 are those of the authors' commands. Their η_p of 0.09 or 0.1 is for models
  of one or two layers, and diverged on convolutions here; 0.01 is the default of their optimiser.
- β mixes parameters alone, no running statistics.
- Steps (2) use a batch's own statistics in batch norm, and leave the running ones to the value of
  F_i.

Wire list: ``model`` (whole model w, Sum weighted by n_i) up and down in every round. θ_i never
leaves.
"""

from dataclasses import replace
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from ...errors import LocalError
from ...files.documents import Strict
from ..course import Change, Course, Facts, Parts, SiloState, Survey
from ..exchange.delivery import Results
from ..exchange.parts import Contribution, Tensors
from ..method import Setting, specs_of_parameters
from ..methods.common.inner_steps import detached, gradient_at, losses_at, point_of, stepped
from ..methods.common.losses import centre, proximal
from ..methods.common.second_model import MODEL, logits, names, taken, with_second_models
from ..methods.fedavg import FedAvg, FedAvgOptions

OWN = "own"  # θ
START = "start."  # before the names of w^t in a silo's ``extra``


class PFedMeOptions(FedAvgOptions):
    """Options of pFedMe."""

    lam: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 15.0
    """λ, how strongly θ is held near w."""
    steps: Annotated[int, Field(strict=True, ge=1, le=1000)] = 5
    """K, the steps to θ̃ on each batch."""
    personal_lr: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 0.01
    """η_p, the learning rate of θ."""
    beta: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    """β, how far the shared model goes to the mean of the silos' models, or beyond it."""


class PFedMe(FedAvg):
    """A shared model whose loss is what a silo's own model can reach near it."""

    name = "pfedme"
    version = 1
    sums_steps = False
    options_model = PFedMeOptions
    product = "trained"
    options: PFedMeOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        self.sketch = setting.sketch()
        self.parameters: set[str] = set()
        for part, module in self.sketch.items():
            self.parameters |= {f"{part}.{spec.name}" for spec in specs_of_parameters(module)}
        pull = self.options.lam * self.options.personal_lr
        # Each step's pull multiplies θ − w by 1 − λ η_p, which does not shrink it if λ η_p ≥ 2.
        if pull >= 2:
            raise LocalError(
                f"pfedme: lam · personal_lr = {self.options.lam:g} · {self.options.personal_lr:g} ="
                f" {pull:g}, and at 2 or more each step towards θ overshoots w;"
                " lower one of them"
            )

    @property
    def private_fault(self) -> str:
        """Steps (2) are taken on a batch."""
        return (
            "its inner steps are taken on a whole batch, in which a record moves the gradients of"
            " others"
        )

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """Both models, w and θ, alike in the beginning."""
        return with_second_models(self.setting, OWN)

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """Logits of θ."""
        return logits(parts, x, OWN)

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Let w and θ begin at the delivered w."""
        state = self.near(super().deliver(state, delivered, facts), facts)
        # At β = 1 Eq. 4 needs no w^t, so the state does not keep it.
        if self.options.beta == 1:
            return state
        # (4) mixes w^t with the trained w.
        start = self.flat(state, *MODEL)
        return replace(state, extra={START + name: value for name, value in start.items()})

    def near(self, state: SiloState, facts: Facts) -> SiloState:
        """θ begins at w."""
        return replace(state, parts={**state.parts, **taken(state.parts, OWN)})

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """Train w down its Moreau envelope, then θ near the trained w."""
        # Coupled: each record's loss is taken at θ̃, which depends on the whole batch.
        shared = replace(self.stage(*MODEL), loss=self.envelope, reads=(), coupled=True)
        # Each of the K steps needs the gradient over all records, hence a survey before each.
        steps = (Survey(self.slope), Change(self.moved)) * self.options.steps
        return (shared, Change(self.near), *steps)

    def envelope(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """F_i(w) of a batch, at each of its records [B].

        Its gradient is that of (1), since θ̃ is held still.
        """
        w, lam = point_of(parts), self.options.lam
        still = near = detached(w)
        for _ in range(self.options.steps):
            slope = gradient_at(self.setting.task, parts, near, x, y)
            pulled: dict[str, dict[str, Tensor]] = {}
            for part, named in near.items():
                pull, begun = slope[part], still[part]
                # ∇f + λ (θ − w), the gradient by θ of the minimised value in (1).
                pulled[part] = {k: pull[k] + lam * (value - begun[k]) for k, value in named.items()}
            near = stepped(near, pulled, self.options.personal_lr)  # (2)
        return losses_at(self.setting.task, parts, near, x, y) + proximal(
            lam, w, centre(near)
        )  # (1), (3)

    def slope(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The gradient of the records' losses at θ, all together."""
        own = {part: parts[name] for part, name in zip(MODEL, names(OWN), strict=True)}
        # Times B: surveys add up, and the gradient is that of a batch's mean.
        slopes = centre(gradient_at(self.setting.task, own, detached(point_of(own)), x, y))
        return {name: len(x) * slope for name, slope in slopes.items()}

    def moved(self, state: SiloState, facts: Facts) -> SiloState:
        """The state after one of the steps to θ_i, with the gradient over all records.

        ``facts.measured`` holds, by parameter, the sum of the records' gradients at θ.
        """
        parts, lam, lr = dict(state.parts), self.options.lam, self.options.personal_lr
        for own, shared in zip(names(OWN), MODEL, strict=True):
            named = dict(parts[own])
            # Only parameters have gradients; running statistics stay.
            for spec in specs_of_parameters(self.sketch[shared]):
                near, w = named[spec.name], parts[shared][spec.name]
                slope = (facts.measured[f"{shared}.{spec.name}"] / facts.samples).to(near.dtype)
                named[spec.name] = near - lr * (slope + lam * (near - w))  # (2)
            parts[own] = named
        return replace(state, parts=parts)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """w, mixed with w^t by β.

        Running statistics are those of w, whatever β is.
        """
        contribution, beta = super().contribute(state, facts)["model"], self.options.beta
        if beta == 1:
            return {"model": contribution}
        mixed = dict(contribution.tensors)
        # Parameters alone: an extrapolated running variance could be negative.
        for name in self.parameters:
            # Mixed here: the mean of these is Eq. 4, and the coordinator need not keep w^t.
            mixed[name] = (1 - beta) * state.extra[START + name] + beta * mixed[name]
        return {"model": replace(contribution, tensors=mixed)}  # (4)
