"""FedNTD: FedAvg whose silos keep what the delivered model says about classes that a record is not.

Lee, Jeong, Shin, Bae, Yun, "Preservation of the global knowledge by not-true distillation in
federated learning", NeurIPS 2022, arXiv:2106.03097, Algorithm 1.

q̃_τ(c) is the softmax at temperature τ over the C − 1 logits of classes other than the record's y;
q̃_τ^g that of the delivered model w, q̃_τ^l that of the silo's w_k.

    (1) L_NTD = Σ_{c ≠ y} q̃_τ^g(c) log [q̃_τ^g(c) / q̃_τ^l(c)]
    (2) at silo k, E epochs:     w_k ← SGD(L_CE + β L_NTD),   from w_k = w
    (3) at the coordinator:      w ← Σ_k (n_k / n) w_k

Where this differs from the paper:
- (3) weighs by samples, as the authors' code does; ``weights = "equal"`` replaces n_k by 1.
- (1) is not multiplied by τ², as in the authors' code.
- w runs in evaluation mode, with the running statistics of batch norm that the silo then has.
- Defaults: β = 1 and τ = 1, those of the paper. With β = 0 this is FedAvg to the bit. With two
  classes (1) is zero.

Wire list: as FedAvg's, ``model`` (whole model, Sum weighted by n_k) up and down in every round. (1)
is computed at the silo from what came down anyway: nothing more crosses.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from ..course import Facts, Parts, SiloState, Stage
from ..exchange.delivery import Results
from ..exchange.parts import Tensors
from ..methods.common.losses import divergence
from ..methods.common.second_model import MODEL, logits, taken, with_second_models
from ..methods.fedavg import FedAvg, FedAvgOptions

GLOBAL = "delivered"  # w, frozen


class FedNTDOptions(FedAvgOptions):
    """Options of FedNTD."""

    beta: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 1.0
    """β, the weight of the distillation; 0 is FedAvg."""
    temperature: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    """τ of Eq. 1."""


class FedNTD(FedAvg):
    """FedAvg with distillation over the classes that a record is not."""

    name = "fedntd"
    version = 1
    sums_steps = False
    needs_classes = "distils the classes that a record is not"
    options_model = FedNTDOptions
    options: FedNTDOptions

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The model, and the frozen w."""
        return with_second_models(self.setting, GLOBAL)

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """w_k ← w, and w as it is."""
        new = super().deliver(state, delivered, facts)
        return SiloState({**new.parts, **taken(new.parts, GLOBAL)}, new.extra)

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Eq. 2."""
        # The frozen model is not trained, so the runner keeps it in evaluation mode.
        epochs, optimiser = self.setting.epochs, self.setting.optimiser
        return (Stage(MODEL, epochs, self.objective, optimiser),)

    def objective(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """L_CE + β L_NTD by record [B]."""
        own = logits(parts, x)
        supervised = self.setting.task.losses(own, y)
        # At β = 0 the second forward pass would be wasted.
        if not self.options.beta:
            return supervised
        others = self.others(y)
        known, learnt = (
            each.gather(1, others) / self.options.temperature
            for each in (logits(parts, x, GLOBAL), own)
        )
        return supervised + self.options.beta * divergence(known, learnt)  # (1), (2)

    def others(self, y: Tensor) -> Tensor:
        """The classes [B, C − 1] that each record is not."""
        # The classes after y, around the end: as many for each record, so that ``vmap`` can run it.
        classes = self.setting.outputs
        return (y[:, None] + torch.arange(1, classes, device=y.device)) % classes
