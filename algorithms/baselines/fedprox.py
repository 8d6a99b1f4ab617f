"""FedProx: FedAvg whose local training is pulled back to the model that came down.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous networks",
MLSys 2020, arXiv:1812.06127, Algorithm 2.

    (1) at silo k:                       w_k ≈ argmin_w h_k(w; w^t),   h_k(w; w^t) = F_k(w) + (μ/2)
                                         ‖w − w^t‖²
    (2) at the coordinator, cohort S_t:  w^{t+1} ← Σ_{k ∈ S_t} (n_k / m_t) w_k,   m_t = Σ_{k ∈ S_t}
                                         n_k

F_k is the mean loss over the silo's records, w^t the model that it begins the round with.

Where this differs from the paper:
- (1) is solved inexactly by the job's epochs of SGD, the same at every silo; the paper lets silos
  differ in how far they get (γ-inexactness), as stragglers do.
- A cohort is drawn evenly and weighted by samples, as in the authors' code; the paper draws silo k
  with probability n_k / n and weighs equally, which ``weights = "equal"`` does for cohorts that are
  drawn evenly.
- ``mu`` has no default in the paper, which takes the best of 0.001, 0.01, 0.1 and 1 for each data
  set; 1 is that of most of its data sets.
- ‖w − w^t‖ is taken over parameters; batch norm's running statistics are none.

Wire list: as FedAvg's, ``model`` (whole model, Sum weighted by n_k) up and down in every round. The
term is computed at the silo from what came down anyway: nothing more crosses. Under differential
privacy it comes after the noise, since it depends on no record.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from torch import Tensor

from ..course import Facts, SiloState, Stage
from ..exchange.parts import Tensors
from ..methods.common.losses import proximal
from ..methods.fedavg import FedAvg, FedAvgOptions


class FedProxOptions(FedAvgOptions):
    """Options of FedProx."""

    mu: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 1.0
    """μ, the strength of the pull towards the delivered model; 0 is FedAvg."""


class FedProx(FedAvg):
    """FedAvg with a proximal term."""

    name = "fedprox"
    version = 1
    sums_steps = False
    options_model = FedProxOptions
    options: FedProxOptions

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Train the whole model, with w^t as it is before training in the stage's context."""
        stage = self.stage("extractor", "classifier")
        # μ = 0 is FedAvg to the bit, without a penalty to compute.
        if not self.options.mu:
            return (stage,)
        # A penalty, not a loss: it depends on no record, so DP-SGD adds it without noise.
        # (1)
        return (replace(stage, penalty=self.proximal, context=self.flat(state, *stage.trains)),)

    def proximal(self, parameters: Mapping[str, Tensors], context: Tensors) -> Tensor:
        """(μ/2) ‖w − w^t‖² over all parameters."""
        return proximal(self.options.mu, parameters, context)
