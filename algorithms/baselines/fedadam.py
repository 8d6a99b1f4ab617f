"""FedAdam: FedAvg, whose coordinator moves by Adam on the mean of each round.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated optimization",
ICLR 2021, arXiv:2003.00295, Algorithm 2. All products and roots are number by number.

    (1) at silo i of S, E epochs:  x_i ← SGD_i(x)
    (2) at the coordinator:        Δ ← Σ_{i ∈ S} (n_i / n) x_i − x
    (3)                            m ← β₁ m + (1 − β₁) Δ
    (4)                            v ← β₂ v + (1 − β₂) Δ²
    (5)                            x ← x + η m / (√v + τ)

m is 0 and v is τ² before the first round.

Where this differs from the paper:
- Δ weighs by samples, as the paper's experiments do; ``weights = "equal"`` is its Algorithm 2.
- The paper asks for v ≥ τ² at first; it is τ² here.
- The paper tunes η and the silos' lr for each data set, and takes β₁ = 0.9, β₂ = 0.99 and τ = 0.001
  for most. ``server_lr`` is 0.01 where it is left out.
- Batch norm's running statistics, where they cross, are averaged and take no step.

Wire list, the same in every round: ``model`` (whole model, Sum weighted by n_i) up, as FedAvg's;
``model-stepped`` down, x of (5). The coordinator sees no more than FedAvg's. What comes down is no
sum, so no tag protects it. The model of a silo in the end is the one delivered last.
"""

from ..methods.common.server_optimiser import AdaptiveOptions, ServerAdam
from ..methods.fedavg import FedAvg, FedAvgOptions


class FedAdamOptions(AdaptiveOptions, FedAvgOptions):
    """Options of FedAdam."""


class FedAdam(ServerAdam, FedAvg):
    """FedAvg with Adam at the coordinator."""

    name = "fedadam"
    version = 1
    options_model = FedAdamOptions
    options: FedAdamOptions
