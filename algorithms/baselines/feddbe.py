"""FedDBE: FedAvg with the domain bias eliminator, an offset of the features that a silo keeps.

Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, "Eliminating domain bias for federated learning in
representation space", NeurIPS 2023, arXiv:2311.14975, Algorithm 1.

θ is the extractor, φ the classifier, and z̄_i an offset of silo i's own, zeros at first.

    (1) before the rounds, at each silo i:  m_i = mean of f(x; θ_i) over its records, where θ_i is
                                            the initial model after the job's epochs
    (2) at the coordinator, once:           z̄_g = Σ_i n_i m_i / Σ_i n_i
    (3) at silo i, E epochs:                (θ, φ, z̄_i) ← SGD of L(φ(f(x; θ) + z̄_i)) + κ MR
    (4) of a batch b:                       MR = (1/d) Σ (1/2) (mean_{x ∈ b} f(x; θ) − z̄_g)²
    (5) at the coordinator:                 (θ, φ) ← Σ_i n_i (θ_i, φ_i) / Σ_i n_i

d is the number of features. A silo predicts by φ(f(x; θ) + z̄_i) with what was delivered last.

Where this differs from the paper:
- (4) takes a batch's own mean, as with the momentum of 1 that the paper has for most data sets.
- m_i of (1) is taken in one go after those epochs, in evaluation mode; the authors' code has the
  mean of the last batch. The model of (1) is dropped, as there.
- κ is tuned for each data set in the paper; 1 unless set.
- The classifier has to be linear, and the extractor one that is trained: means of records would
  leave otherwise. Where a model has outputs for each position of a record, features
  have an offset and a mean by channel.

Wire list:

=====  ====  ===========================================  ======================
round  way   part                                         exchange
=====  ====  ===========================================  ======================
0      up    ``mean``: m_i [d]                            Sum weighted by n_i
r ≥ 1  down  ``mean``: z̄_g [d]                            -
r ≥ 1  up    ``model``: θ_i and φ_i                       Sum weighted by n_i
r ≥ 2  down  ``model``: θ and φ                           -
=====  ====  ===========================================  ======================

Every silo takes part in round 0, which comes before those of the job. z̄_i never leaves. (1) is
surveyed without noise and MR couples the records of a batch, so a private job is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from ...files.documents import Strict
from ..course import Change, Course, Facts, Parts, SiloState, Survey
from ..exchange.delivery import Results
from ..exchange.parts import DTYPES, Contribution, Kind, Part, Sum, Tensors, TensorSpec
from ..method import Method, Setting
from ..methods.common.heterogeneous import check_features
from ..methods.common.second_model import MODEL

OFFSET = "offset"  # the part that is z̄_i


class FedDBEOptions(Strict):
    """Options of FedDBE."""

    kappa: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 1.0
    """κ, how strongly a batch's mean feature is held near that of all silos."""


class FeatureOffset(nn.Module):
    """Adds z̄_i [d] to features [B, d], or [B, d, …] by channel."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, z: Tensor) -> Tensor:
        """Features with the offset."""
        return z + self.values.view(-1, *(1,) * (z.ndim - 2))


class FedDBE(Method):
    """FedAvg with an offset of each silo's features, and features held near a common mean."""

    name = "feddbe"
    version = 1
    options_model = FedDBEOptions
    product = "delivered"
    census = True
    options: FedDBEOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        rows = self.header_rows(by_position=True)  # [C, d]
        check_features(self.name, [setting.sketch()])
        self.dtype, self.width = DTYPES[rows.dtype], rows.shape[1]
        spec = TensorSpec("mean", rows.dtype, (self.width,))
        self.mean = Part("mean", Kind.PROTOTYPES, Sum("mean"), (spec,))
        self.model = self.shared("model", Kind.WHOLE_MODEL, *MODEL)

    def up(self, round_: int) -> tuple[Part, ...]:
        """The mean feature in round 0, then the model."""
        return (self.model,) if round_ else (self.mean,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The common mean and the model; nothing in round 0."""
        return (self.mean, self.model) if round_ else ()

    @property
    def private_fault(self) -> str:
        """Eqs. 1 and 4."""
        return (
            "it surveys mean features without noise, and holds a batch's mean near theirs; choose"
            " fedavg"
        )

    # The silo half. ``extra`` holds m_i in round 0, and z̄_g from then on.

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The model, and z̄_i."""
        return {**self.setting.build(), OFFSET: FeatureOffset(self.width, self.dtype)}

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """Zeros in place of a mean."""
        return {"mean": torch.zeros(self.width, dtype=self.dtype)}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """Outputs of the model, of features with z̄_i."""
        return parts["classifier"](parts[OFFSET](parts["extractor"](x)))

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Take the model, and remember z̄_g."""
        taken = self.replaced(state, delivered, "model")
        return replace(taken, extra=dict(delivered.get("mean", state.extra)))

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """Eq. 1 in round 0, then Eq. 3."""
        if not facts.round:
            # z̄_i is zero and stays, so this is training without it.
            return (self.stage(*MODEL), Survey(self.features), Change(self.measured))
        stage = self.stage(*MODEL, OFFSET)
        # z̄_g is the same at all silos, but no constant of the job: context.
        return (replace(stage, loss=self.objective, context=state.extra, coupled=True),)

    def objective(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """Eq. 3 by record [B], of which each has all of κ MR."""
        features = parts["extractor"](x)
        losses = self.setting.task.losses(parts["classifier"](parts[OFFSET](features)), y)
        apart = by_channel(features).mean(0) - context["mean"]
        return losses + self.options.kappa * 0.5 * apart.square().mean()  # (3), (4)

    def features(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Sums of features [d], and how many were added up."""
        rows = by_channel(parts["extractor"](x)).double()
        return {"features": rows.sum(0), "rows": torch.ones(len(rows)).double().sum()}

    def measured(self, state: SiloState, facts: Facts) -> SiloState:
        """m_i, and the initial model again."""
        mean = (facts.measured["features"] / facts.measured["rows"]).to(self.dtype)  # (1)
        return replace(state, parts={**state.parts, **self.initial}, extra={"mean": mean})

    @cached_property
    def initial(self) -> Mapping[str, Tensors]:
        """The initial model's values by part."""
        modules = self.setting.build()
        return {part: dict(module.state_dict()) for part, module in modules.items()}

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """m_i, then the model."""
        tensors = self.flat(state, *MODEL) if facts.round else {"mean": state.extra["mean"]}
        part = "model" if facts.round else "mean"
        return {part: Contribution(tensors, float(facts.samples))}


def by_channel(z: Tensor) -> Tensor:
    """Features [B, d] as they are; those of positions [B, d, …] as a row for each [N, d]."""
    return z.movedim(1, -1).flatten(0, -2)
