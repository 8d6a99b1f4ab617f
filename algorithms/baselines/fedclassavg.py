"""FedClassAvg: averaged classifiers above private extractors.

The extractors learn to tell classes apart by contrast.

Jang, Ha, Jung, Yoon, "FedClassAvg: local representation learning for personalized federated
learning on heterogeneous neural networks", ICPP 2022, arXiv:2210.14226, Algorithm 1.

Silo k has an extractor F_k of its own architecture and a classifier C_k; C is the one delivered.
Each of the B records of a batch is taken in two views, of features f_i = F_k(x_i), i = 1…2B, and
z_i = f_i / ‖f_i‖. P(i) are the other views in the batch of the class of i, so at least the other
view of the same record:

    (1) ℓ_CL = mean over the views i of  -(1/|P(i)|) Σ_{p in P(i)} log [ exp(z_i·z_p/τ) / Σ_{a ≠ i}
    exp(z_i·z_a/τ) ]
    (2) ℓ_CE = cross-entropy of C_k(F_k(x)) on the first view
    (3) ℓ_R  = ½ Σ over the tensors of the classifier of the mean square of C_k - C
    (4) at silo k, from C_k ← C, E epochs:   ℓ = κ ℓ_CL + ℓ_CE + ρ ℓ_R
    (5) at the coordinator:                  C ← Σ_{k in the cohort} (n_k / Σ n) C_k

Where this differs from the paper:
- The views are the record as it is and its mirror image, left to right; the authors' code draws two
  random crops, flips and colours. A job's augmentation changes both alike, before. ``view =
  "same"`` takes the record twice, for records that are no pictures.
- Features are brought to length 1 and τ = 0.07, as supervised contrast has it (Khosla et al., 2020,
  arXiv:2004.11362). Not copied: the authors' code leaves their length, sets τ = 100 and multiplies
  the loss by 100 / 0.07, and trains by Adam at a learning rate of 1e-4.
- ℓ_R is that of the authors' code, with its ρ = 0.1; there the first batch of a round is without.
  Whether the paper's is the same is open.
- κ is not from the paper: ``contrast = 0`` is its ablation without ℓ_CL, ``rho = 0`` the one
  without ℓ_R. With both 0 it is LG-FedAvg of one layer, to the bit.
- In the authors' code silos train one epoch before the first classifier comes down; here they begin
  with a common one.
- What is averaged is the last layer, as in the authors' code, where all extractors end in 512
  units.
- ``extractors`` names architectures that end in one width; silos of one architecture start from
  equal values.

Wire list: ``classifier`` (header rows, Sum weighted by n_k) up and down in every round. Extractors
never leave. The coordinator sees the average of the classifiers; in the clear also each silo's. A
silo's model in the end is the one it trained last. With contrast a record's loss depends on the
others of its batch, so such a job cannot be private.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from ...files.documents import Strict
from ..course import Facts, Parts, SiloState, Stage
from ..exchange.parts import Contribution, Kind, Part, Tensors
from ..method import Method, Setting
from ..methods.common.heterogeneous import Extractors, check_extractors, dealt


class FedClassAvgOptions(Strict):
    """Options of FedClassAvg."""

    contrast: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 1.0
    """κ of Eq. 4, the weight of the contrast; 0 leaves it out."""
    temperature: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 0.07
    """τ of Eq. 1."""
    rho: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.1
    """ρ of Eq. 4."""
    view: Literal["mirrored", "same"] = "mirrored"
    """The second view of a record: its mirror image, or itself."""
    extractors: Extractors = ()
    """Architectures dealt to the silos in turn, in job order.

    None: the job's model at each silo.
    """


class FedClassAvg(Method):
    """Classifiers averaged, extractors kept and trained by contrast."""

    name = "fedclassavg"
    version = 1
    needs_classes = "draws records of a class together"
    options_model = FedClassAvgOptions
    loadable = ("extractor",)
    options: FedClassAvgOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        # Any model will do where all silos have the job's.
        if self.options.extractors:
            width = self.header_rows().shape[1]
            check_extractors(self.name, self.options.extractors, setting, width)
        self.classifier = self.shared("classifier", Kind.HEADER_ROWS, "classifier")

    def up(self, round_: int) -> tuple[Part, ...]:
        """The classifier."""
        return (self.classifier,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The averaged classifier."""
        return (self.classifier,)

    @property
    def private_fault(self) -> str:
        """Eq. 1 compares the records of a batch."""
        if self.options.contrast:
            return (
                f"contrast = {self.options.contrast:g} lets a record move the gradients of others;"
                " set it to 0"
            )
        return ""

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The silo's own extractor below the common classifier."""
        return dealt(self.options.extractors, self.setting, silo)

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Train extractor and classifier together."""
        stage = self.stage("extractor", "classifier")  # (4)
        # Coupled: Eq. 1 compares a record with the others of its batch.
        if self.options.contrast:
            stage = replace(stage, loss=self.objective, coupled=True)
        if self.options.rho:
            # C
            stage = replace(stage, penalty=self.proximal, context=dict(state.parts["classifier"]))
        return (stage,)

    def objective(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """κ ℓ_CL + ℓ_CE by record [B].

        ``x`` is [B, channels, height, width]; the option ``view`` says what its second view is.
        """
        # The last axis is the width, so the flip is from left to right.
        other = x.flip(-1) if self.options.view == "mirrored" else x
        features = parts["extractor"](torch.cat([x, other]))  # [2B, d]
        # (2)
        # Cross-entropy takes only the first view, as Eq. 2 has it.
        supervised = self.setting.task.losses(parts["classifier"](features[: len(y)]), y)
        contrast = contrasted(features, torch.cat([y, y]), self.options.temperature)  # [2B]
        # ℓ_CL is a mean over 2B views, so each of a record's two counts half.
        return supervised + self.options.contrast * contrast.reshape(2, -1).mean(0)

    def proximal(self, parameters: Mapping[str, Tensors], context: Tensors) -> Tensor:
        """ρ ℓ_R.

        It is ρ/2 times the sum, over the classifier's tensors, of the mean square of C_k − C.
        ``context`` holds C.
        """
        own = parameters["classifier"]
        squares = [(own[name] - common).square().mean() for name, common in context.items()]
        return self.options.rho / 2 * torch.stack(squares).sum()  # (3)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The trained classifier, weighted by samples."""
        # (5)
        return {"classifier": Contribution(self.flat(state, "classifier"), float(facts.samples))}


def contrasted(features: Tensor, y: Tensor, temperature: float) -> Tensor:
    """Supervised contrast [V] of views with features [V, d] and classes [V].

    Each view has another one of its class.
    """
    # z has length 1, so inner products are cosines.
    z = normalize(features, dim=1)
    itself = torch.eye(len(y), dtype=torch.bool, device=y.device)
    alike = (y[:, None] == y) & ~itself  # P(i)
    likeness = z @ z.T / temperature
    # The sum of Eq. 1 is over a ≠ i.
    log_share = likeness - likeness.masked_fill(itself, float("-inf")).logsumexp(1, keepdim=True)
    # The other view of the same record is in P(i), so this never divides by 0.
    return -(log_share * alike).sum(1) / alike.sum(1)  # (1)
