"""FedAvg-FT: FedAvg, whose model each silo trains on for itself in the end.

Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage, "Federated evaluation of on-device
personalization", 2019, arXiv:1910.10252.

    (1), (2) FedAvg's rounds
    (3) at each silo k in the end:   w_k ← SGD_k(w) from the last averaged w, for some epochs

(3) is one round more, in which every silo takes part.

Where this differs from the paper: it searches learning rate and batch size of (3), and keeps w
where w_k is no better on held-out records. Here both are the job's, and each silo keeps w_k.
``tuning_epochs`` is 5 as where this is compared with FedBABU; ``weights`` are FedAvg's.

Wire list: FedAvg's, ``model`` (whole model, Sum weighted by n_k) up and down in every round that
trains; in the round that tunes nothing goes up but the metrics. Under differential privacy that
round is noised and paid for as others are.
"""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from ..course import Effort, Facts, SiloState, Stage
from ..exchange.parts import Contribution, Part
from ..methods.fedavg import FedAvg, FedAvgOptions


class FedAvgFTOptions(FedAvgOptions):
    """Options of FedAvg-FT."""

    tuning_epochs: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 5
    """Epochs for which each silo trains the model in the end."""


class FedAvgFT(FedAvg):
    """FedAvg, tuned in the end."""

    name = "fedavg-ft"
    version = 1
    product = "trained"
    tunes = True
    options_model = FedAvgFTOptions
    options: FedAvgFTOptions

    def up(self, round_: int) -> tuple[Part, ...]:
        """The whole model, while rounds train it."""
        return () if self.tuning(round_) else super().up(round_)

    def effort(self, round_: int) -> Effort:
        """The job's epochs, or those of tuning."""
        if self.tuning(round_):
            return Effort(epochs=self.options.tuning_epochs)
        return super().effort(round_)

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Train the whole model."""
        stage = self.stage("extractor", "classifier")
        if self.tuning(facts.round):
            stage = replace(stage, epochs=self.options.tuning_epochs)  # (3)
        return (stage,)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The trained model; nothing after tuning.

        A tuned model stays at its silo.
        """
        return {} if self.tuning(facts.round) else super().contribute(state, facts)
