"""FedAvgM: FedAvg, whose coordinator adds the mean of each round to a momentum.

Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated visual
classification", 2019, arXiv:1909.06335, section 4.3. Δ is the step of a round's mean.

    (1) at silo k, E epochs:    w_k ← SGD_k(w)
    (2) at the coordinator:     Δ ← Σ_k (n_k / n) w_k − w
    (3)                         v ← β v + Δ
    (4)                         w ← w + η v

Where this differs from the paper:
- The paper's Δ and v have the other sign, and its (4) has no η, as ``server_lr = 1``. With
  ``momentum = 0`` and ``server_lr = 1`` this is FedAvg up to rounding.
- β is 0.9 where it is left out; the paper takes the best of 0, 0.7, 0.9, 0.97, 0.99 and 0.997. The
  mean moves by up to Δ / (1 − β) in the end, so lower ``training.lr`` with a larger β.
- Batch norm's running statistics, where they cross, are averaged and take no step.

Wire list, the same in every round: ``model`` (whole model, Sum weighted by n_k) up, as FedAvg's;
``model-stepped`` down, w of (4). The coordinator sees no more than FedAvg's. What comes down is no
sum, so no tag protects it. The model of a silo in the end is the one delivered last.
"""

from ..methods.common.server_optimiser import MomentumOptions, ServerMomentum
from ..methods.fedavg import FedAvg, FedAvgOptions


class FedAvgMOptions(MomentumOptions, FedAvgOptions):
    """Options of FedAvgM."""


class FedAvgM(ServerMomentum, FedAvg):
    """FedAvg with momentum at the coordinator."""

    name = "fedavgm"
    version = 1
    options_model = FedAvgMOptions
    options: FedAvgMOptions
