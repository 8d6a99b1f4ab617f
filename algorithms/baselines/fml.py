"""FML: a meme model that crosses and a personalised one that stays, which learn from each other.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu, "Federated mutual learning", 2020,
arXiv:2006.16765.

p_m(x) and p_p(x) are what meme and personalised model predict, CE cross-entropy with the label:

    (1)  L_personal = α CE(p_p, y) + (1 − α) KL(p_m ‖ p_p)
    (2)  L_meme     = β CE(p_m, y) + (1 − β) KL(p_p ‖ p_m)
    (3)  at the coordinator:  meme ← Σ_k n_k meme_k / Σ_k n_k

In Eqs. 1 and 2 the other model's prediction is a target: no gradient goes through it. The meme
model is the job's; the option ``personal`` names the architecture of the other.

Where this differs from the paper:
- One optimiser steps on L_personal + L_meme, batch by batch, which is what two would do. In the
  authors' code that of the personalised model keeps its momentum from round to round; here none
  outlives a round.
- Sums run over the round's cohort and are weighted by samples; the code counts each silo once, all
  of them.
- The personalised model starts from values of its own, the same at each silo. Were it equal to the
  meme model, both would stay equal where α = β until the first average comes down. In the code each
  silo draws its own.
- A named architecture has no normalisation where it has such a form, otherwise one by groups.
- ``alpha`` and ``beta`` are 0.5 where they are left out, as in the code.

Wire list: ``meme`` (whole model, Sum weighted by samples) up and down in every round. The
personalised model never leaves, but what the meme model learned from it does; under differential
privacy both are noised together. Predictions are the personalised model's, and a silo's model in
the end is the one that it trained last.
"""

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from ...files.documents import Strict
from ..course import Facts, Parts, SiloState, Stage
from ..exchange.parts import Contribution, Kind, Part, Tensors
from ..method import Method, Setting
from ..methods.common.losses import divergence
from ..methods.common.second_model import MODEL, check_other, logits, names, with_other_model

PERSONAL = "personal"

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class FMLOptions(Strict):
    """Options of FML."""

    alpha: Share = 0.5
    """α, the weight of labels for the personalised model; 1 trains it without the meme model."""
    beta: Share = 0.5
    """β, the weight of labels for the meme model; 1 is FedAvg."""
    personal: str | None = None
    """Architecture of the personalised model; left out, the job's."""


class FML(Method):
    """A meme model and a personalised one that learn from each other."""

    name = "fml"
    version = 1
    needs_classes = "compares what two models say of classes"
    options_model = FMLOptions
    options: FMLOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        check_other("fml: personal", self.options.personal, setting)
        self.meme = self.shared("meme", Kind.WHOLE_MODEL, *MODEL)

    def up(self, round_: int) -> tuple[Part, ...]:
        """The meme model."""
        return (self.meme,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The averaged meme model."""
        return (self.meme,)

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The meme model and the personalised one."""
        # Own initial values: two equal models would at first teach each other nothing.
        return with_other_model(self.setting, PERSONAL, self.options.personal, "fml")

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """Logits of the personalised model."""
        return logits(parts, x, PERSONAL)

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Both models together."""
        setting = self.setting
        # One stage, since each model learns from the other on the same batch.
        return (Stage((*MODEL, *names(PERSONAL)), setting.epochs, self.mutual, setting.optimiser),)

    def mutual(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """L_personal + L_meme by record [B].

        Each model is the other's target; no gradient goes through a target.
        """
        meme, personal = logits(parts, x), logits(parts, x, PERSONAL)
        alpha, beta = self.options.alpha, self.options.beta
        by_labels = self.setting.task.losses(personal, y)
        one = alpha * by_labels + (1 - alpha) * divergence(meme, personal)  # (1)
        one = one + beta * self.setting.task.losses(meme, y)
        return one + (1 - beta) * divergence(personal, meme)  # (2)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The meme model, weighted by samples."""
        return {"meme": Contribution(self.flat(state, *MODEL), float(facts.samples))}  # (3)
