"""FedAvg: one model for all silos, averaged each round.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks
from decentralized data", AISTATS 2017, arXiv:1602.05629, Algorithm 1.

    (1) at silo k, E epochs in batches of B:  w ← w - η ∇ℓ(w; b)
    (2) at the coordinator, cohort S_t:       w_{t+1} ← Σ_{k ∈ S_t} (n_k / m_t) w^k_{t+1},  m_t =
                                              Σ_{k ∈ S_t} n_k

Where this differs from the paper:
- ``weights = "equal"`` replaces n_k by 1, for jobs in which the sample counts must stay at the
  silos;
- batch norm's running statistics are no parameters: they stay at each silo, unless ``model.buffers
  = "global"``.

Wire list: ``model`` (whole model, Sum weighted by n_k) up and down in every round. The model of a
silo in the end is the one delivered last.
"""

from dataclasses import replace
from typing import Literal

from ...files.documents import Strict
from ..course import Course, Facts, SiloState
from ..exchange.parts import Contribution, Kind, Part, Sum
from ..method import Method, Setting


class FedAvgOptions(Strict):
    """Options of FedAvg."""

    weights: Literal["samples", "equal"] = "samples"
    """A silo's weight: its training records, or 1."""


class FedAvg(Method):
    """One model for all silos, averaged each round."""

    name = "fedavg"
    version = 1
    sums_steps = True
    options_model = FedAvgOptions
    product: Literal["delivered", "trained"] = "delivered"
    options: FedAvgOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        self.model = self.shared("model", Kind.WHOLE_MODEL, "extractor", "classifier")
        # The weight is 1 for each silo, whatever bounds a blind job has for weights by records.
        if self.options.weights == "equal":
            self.model = replace(self.model, exchange=Sum("mean", most=1.0))

    def up(self, round_: int) -> tuple[Part, ...]:
        """The whole model.

        Its tensors are named ``part.parameter``.
        """
        return (self.model,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The averaged model; nothing was published before the first round."""
        return (self.model,)

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """Train the whole model.

        It takes the job's epochs and optimiser.
        """
        return (self.stage("extractor", "classifier"),)  # (1)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The trained model with its weight: the base publishes the mean that the Sum computes."""
        weight = 1.0
        if self.options.weights == "samples":
            weight = float(facts.samples)
        return {"model": Contribution(self.flat(state, "extractor", "classifier"), weight)}  # (2)
