"""FedRoD: one generic model trained as if classes were balanced, with a private header on top.

Chen, Chao, "On bridging generic and personalized federated learning for image classification", ICLR
2022, arXiv:2107.00778, Algorithm 1, with the linear personalized header.

A record's feature is z = f(x; θ), its generic logits g^G(z) = W z + b and its personalized ones
g^P(z) = W_m z + b_m. Silo m has N_{m,c} training records of class c:

    (1) ℓ^BSM = -log [ N_{m,y}^γ exp(g^G_y) / Σ_c N_{m,c}^γ exp(g^G_c) ]
        balanced softmax
    (2) ℓ^P   = -log softmax(g^G(z) + g^P(z))_y, by W_m and b_m alone: z and g^G are taken as
              constants
    (3) at silo m, E epochs: θ, W and b by ℓ^BSM, W_m and b_m by ℓ^P
    (4) at the coordinator:  (θ, W, b) ← Σ_{m in the cohort} (n_m / Σ n) (θ_m, W_m^G, b_m^G)
    (5) a silo's prediction: argmax_c g^G_c(z) + g^P_c(z)

θ is the ``extractor``, (W, b) the ``classifier``, (W_m, b_m) the part ``personal``.

Where this differs from the paper:
- Of its variants this is the linear one with balanced softmax: no hypernetwork makes the
  personalized headers, and γ is not learnt.
- The personalized header starts as the generic one. Where the paper starts it is open.
- Both losses are one sum per batch with one optimiser, so a batch moves both headers from the same
  features.
- A class without records counts as 1e-12 records. In the clear that is 0 to the last digits; under
  differential privacy, where the counts are noisy, it keeps the loss of a record finite whose class
  seems absent.
- Only the personalized predictions are reported; the generic model is what comes down, (θ, W, b).
- With γ = 0 the generic model is FedAvg's to the bit.

Wire list: ``model`` (whole model: extractor and generic header, Sum weighted by samples) up and
down in every round; the coordinator sees what FedAvg's does. The personalized header never leaves,
nor do the class counts. A silo's model in the end is the one it trained last. Under differential
privacy all three parts are cut and noised together.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from ...files.documents import Strict
from ..course import Facts, Parts, SiloState, Stage
from ..exchange.parts import Contribution, Kind, Part, Tensors
from ..method import Method, Setting

ABSENT = 1e-12  # records of a class that has none


class FedRoDOptions(Strict):
    """Options of FedRoD."""

    gamma: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 1.0
    """γ of Eq. 1; 0 trains the generic model as FedAvg does."""


class FedRoD(Method):
    """A generic model by balanced softmax, a private header on top."""

    name = "fedrod"
    version = 1
    sums_steps = True
    needs_classes = "balances the loss by class"
    options_model = FedRoDOptions
    options: FedRoDOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        self.model = self.shared("model", Kind.WHOLE_MODEL, "extractor", "classifier")

    def up(self, round_: int) -> tuple[Part, ...]:
        """Extractor and generic header."""
        return (self.model,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The averaged extractor and generic header."""
        return (self.model,)

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The generic model and the personalized header."""
        # Built again from the same streams, so both headers start with equal values.
        return {**self.setting.build(), "personal": self.setting.build()["classifier"]}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """Generic and personalized logits together."""
        features = parts["extractor"](x)
        return parts["classifier"](features) + parts["personal"](features)  # (5)

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Train all three parts in one stage, each by its own loss."""
        # γ log N_c; a class without records counts as ``ABSENT``, so that the logarithm is finite.
        counts = facts.class_counts.to(torch.get_default_dtype())
        prior = self.options.gamma * counts.clamp(min=ABSENT).log()  # [C]
        stage = Stage(
            ("extractor", "classifier", "personal"),
            self.setting.epochs,
            self.objective,
            self.setting.optimiser,
            context={"prior": prior},
        )
        return (stage,)  # (3)

    def objective(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """ℓ^BSM + ℓ^P by sample [B].

        ``context["prior"]`` [C] is γ log N_c.
        """
        features = parts["extractor"](x)
        generic = parts["classifier"](features)  # [B, C]
        balanced = self.setting.task.losses(generic + context["prior"], y)  # (1)
        # Detached: ℓ^P trains the personalized header alone, the rest stays generic.
        personalized = generic.detach() + parts["personal"](features.detach())
        return balanced + self.setting.task.losses(personalized, y)  # (2)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """Extractor and generic header, weighted by samples."""
        model = self.flat(state, "extractor", "classifier")
        return {"model": Contribution(model, float(facts.samples))}  # (4)
