"""FedYogi: FedAdam, whose second moment changes no faster than the round's step is long.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated optimization",
ICLR 2021, arXiv:2003.00295, Algorithm 2.

    (1) to (3), (5)  FedAdam's
    (4)              v ← v − (1 − β₂) Δ² sign(v − Δ²)

Where this differs from the paper, its options and its wire list: as FedAdam.
"""

from ..methods.common.server_optimiser import AdaptiveOptions, ServerYogi
from ..methods.fedavg import FedAvg, FedAvgOptions


class FedYogiOptions(AdaptiveOptions, FedAvgOptions):
    """Options of FedYogi."""


class FedYogi(ServerYogi, FedAvg):
    """FedAvg with Yogi at the coordinator."""

    name = "fedyogi"
    version = 1
    options_model = FedYogiOptions
    options: FedYogiOptions
