"""Ditto: a model of each silo's own, held near the one that all average.

Li, Hu, Beirami, Smith, "Ditto: Fair and robust federated learning through personalization", ICML
2021, arXiv:2012.04221, Algorithm 1.

    (1) at silo k:           w_k ← SGD_k(w^t; E_w epochs),   from w_k = w^t
    (2) at silo k:           v_k ← v_k − η (∇F_k(v_k) + λ (v_k − w^t)),   E_v epochs, v_k kept from
                             round to round
    (3) at the coordinator:  w^{t+1} ← Σ_{k ∈ S_t} (n_k / m_t) w_k,   m_t = Σ_{k ∈ S_t} n_k

w is the job's model, v_k the silo's own; a silo predicts by v_k. So (1) and (3) are FedAvg,
whatever λ is.

Where this differs from the paper:
- E_w + E_v are the job's epochs unless options say otherwise, E_v the smaller half; a job of one
  epoch takes one for each. The paper counts steps of each model, and as many for both.
- (3) weighs by samples, as FedAvg here does; the paper weighs the silos of a cohort equally, as
  ``weights = "equal"``.
- v_k begins at the first w^t that a silo gets; in the paper at any v_k^0. With all silos in each
  round that is w^0.
- λ is one number of the job, 1 unless set, as in the commands that the authors give; the paper also
  lets each silo choose its own from a few by records held out.
- Batches of (1) and (2) are drawn apart. Robust ways to average instead of (3) are left out.
- ‖v − w‖ is taken over parameters; batch norm's running statistics are none, and each model has its
  own.

Wire list: as FedAvg's, ``model`` (whole model, Sum weighted by n_k) up and down in every round. v_k
never leaves. Under differential privacy (2) is paid for like (1), so that test counts may be told;
the pull to w^t comes after the noise.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from ...files.documents import Strict
from ..course import Course, Effort, Facts, Parts, SiloState
from ..exchange.delivery import Results
from ..exchange.parts import Tensors
from ..method import Setting
from ..methods.common.losses import centre, proximal
from ..methods.common.second_model import (
    MODEL,
    begun,
    logits,
    names,
    not_begun,
    taken,
    with_second_models,
)
from ..methods.fedavg import FedAvg, FedAvgOptions

OWN = "own"  # v


Epochs = Annotated[int, Field(strict=True, ge=1, le=10_000)]


class DittoOptions(FedAvgOptions):
    """Options of Ditto."""

    lam: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 1.0
    """λ, how strongly v is held near w; 0 is local training."""
    model_epochs: Epochs | None = None
    """E_w, epochs of the model that is averaged; default: those of the job that E_v leaves."""
    own_epochs: Epochs | None = None
    """E_v, epochs of the silo's own; default: half of the job's, or those that E_w leaves."""


class Ditto(FedAvg):
    """A model of each silo's own, held near the averaged one."""

    name = "ditto"
    version = 2  # 2: the epochs of both models add up to the job's by default
    sums_steps = False
    options_model = DittoOptions
    product = "trained"
    options: DittoOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        model, own = self.options.model_epochs, self.options.own_epochs
        if own is None:
            own = max(1, setting.epochs // 2) if model is None else self.epochs_left(model)
        self.model_epochs = self.epochs_left(own) if model is None else model
        self.own_epochs = own

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """Both models, w and v, alike in the beginning."""
        return with_second_models(self.setting, OWN)

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """A mark that v has not begun."""
        return not_begun()

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """Logits of v."""
        return logits(parts, x, OWN)

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Replace w by the delivered model; v stays, or begins there."""
        return begun(super().deliver(state, delivered, facts), OWN)

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """Train w as FedAvg does, then v near the delivered w.

        (2) adds the penalty (λ/2) ‖v − w^t‖² over parameters; with λ = 0 there is none.
        """
        # Two stages with disjoint reads: v must not reach w, which leaves the silo.
        common = self.stage(*MODEL)
        common = replace(common, epochs=self.model_epochs, loss=self.common, reads=())  # (1)
        own = replace(self.stage(*names(OWN)), epochs=self.own_epochs, reads=())  # (2)
        if self.options.lam:
            # w^t as delivered: v is pulled towards it, not towards the trained w.
            near = centre(taken(state.parts, OWN))
            # A penalty, not a loss: it depends on no record, so DP-SGD adds it without noise.
            own = replace(own, penalty=partial(proximal, self.options.lam), context=near)
        return (common, own)

    def effort(self, round_: int) -> Effort:
        """The epochs of both models.

        In a private job (2) has noise too, since test counts of v leave the silo.
        """
        return Effort(epochs=self.model_epochs + self.own_epochs)

    def common(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """The task's loss [B] of w."""
        return self.setting.task.losses(logits(parts, x), y)
