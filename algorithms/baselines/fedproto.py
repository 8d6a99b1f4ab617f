"""FedProto: silos share their classes' mean features, and draw their own features to those of all.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: federated prototype learning across heterogeneous
clients", AAAI 2022, arXiv:2105.00243, Algorithm 1. Equations in the order of the paper.

Silo i has an extractor f_i with features of width d, a classifier g_i, and n_ij training records
D_ij of class j:

    (3) C_i^j = Σ_{x in D_ij} f_i(x) / n_ij,  of the trained extractor
    (4) ŷ = argmin_j ‖f_i(x) - C^j‖
    (6) at the coordinator:  C^j ← Σ_i n_ij C_i^j / Σ_i n_ij, over the silos i of the round that
    hold class j
    (7) at silo i:           ℓ = ℓ_S(g_i(f_i(x)), y) + λ ℓ_R
    (8)                      ℓ_R = ‖f_i(x) - C^y‖² / d

Where this differs from the paper:
- Eq. 6 has one more factor, 1 / (number of holders of j), by which prototypes would shrink with
  each further silo. It is taken for a slip: the weights add up to 1 without it, and the authors'
  code has none. ``weights = "equal"``, each holder once, is the average of that code.
- Eq. 8 is that of the authors' code: record by record, the mean over the features. The paper has
  the distance between the silo's prototype and the common one.
- Prototypes are measured after training, in evaluation mode; in the authors' code they are means of
  the features that the records had during the last epoch, each under another model.
- A class that no silo of a round holds keeps its last prototype at the silos that have one. A class
  has none where the row is all zeros: ℓ_R leaves its records out and counts them as zero.
- Eq. 4 goes over all classes that have a prototype; the authors' code over those that the silo has
  records of. Before the first round is over, when no class has one, the classifier decides.
- ``predict = "classifier"`` lets g_i decide, the other figure that the authors' code prints.
- Silos of one architecture start from equal values; ``extractors`` names architectures that end in
  one width.
- Defaults: λ = 1, the paper's for MNIST and FEMNIST; it has 0.1 for CIFAR-10, whose extractors it
  takes pre-trained on ImageNet (``loadable``).

Wire list: ``prototypes`` ([C, d] for C classes, zeros for a class without; Sum class by class,
weighted by n_ij or 1) up and down in every round. No part of the model leaves. The coordinator sees
the prototypes of all and how many records each class has (with equal weights, how many holders); in
the clear also each silo's. A silo's model in the end is the one it trained last, next to the
prototypes delivered last. A blind job's ``clip_exponent`` must hold the features, which may be
above 8. No job of this method can be private: Eq. 3 sums features without noise.
"""

from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ...files.documents import Strict
from ..course import Course, Facts, Parts, SiloState, Survey
from ..exchange.delivery import Results
from ..exchange.parts import (
    DTYPES,
    LARGEST_WEIGHT,
    Contribution,
    Kind,
    Part,
    Sum,
    Tensors,
    TensorSpec,
)
from ..method import Method, Setting
from ..methods.common.heterogeneous import (
    Extractors,
    check_extractors,
    check_features,
    dealt,
    sketched,
)


class FedProtoOptions(Strict):
    """Options of FedProto."""

    lam: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 1.0
    """λ of Eq. 7."""
    predict: Literal["prototypes", "classifier"] = "prototypes"
    """The predictor: the nearest prototype (Eq. 4), or the silo's own classifier."""
    weights: Literal["samples", "equal"] = "samples"
    """A silo's weight in Eq. 6: its training records of the class, or 1 as in the authors' code.
    """
    extractors: Extractors = ()
    """Architectures dealt to the silos in turn, in job order.

    None: the job's model at each silo.
    """


class Prototypes(nn.Module):
    """The common prototypes [C, d] as a part of a model."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        # A buffer, so that no optimiser moves it.
        self.register_buffer("mean", torch.zeros(classes, width))
        self.mean: Tensor

    def forward(self, features: Tensor) -> Tensor:
        """Logits [B, C] of features [B, d]: ‖f‖² - ‖f - C^j‖²; the nearest is the largest."""
        # ‖f‖² cancels: 2 f·C^j − ‖C^j‖² remains.
        logits = 2 * features @ self.mean.T - self.mean.square().sum(1)
        # −∞, so that a class without prototype is never the nearest.
        return logits.masked_fill(~known(self.mean), float("-inf"))


class FedProto(Method):
    """Class prototypes are shared, models stay at the silos."""

    name = "fedproto"
    version = 1
    needs_classes = "averages features class by class"
    options_model = FedProtoOptions
    product = "delivered"
    loadable = ("extractor", "classifier")
    options: FedProtoOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        weight = self.header_rows()
        width = weight.shape[1]  # d
        check_extractors(self.name, self.options.extractors, setting, width)
        models = [setting.sketch(), *(sketched(name, setting) for name in self.options.extractors)]
        check_features(self.name, models)
        most = LARGEST_WEIGHT if self.options.weights == "samples" else 1.0
        mean = TensorSpec("mean", weight.dtype, (setting.outputs, width))
        self.prototypes = Part("prototypes", Kind.PROTOTYPES, Sum("ratio", most=most), (mean,))

    def up(self, round_: int) -> tuple[Part, ...]:
        """The silo's prototypes."""
        return (self.prototypes,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The averaged prototypes."""
        return (self.prototypes,)

    @property
    def private_fault(self) -> str:
        """Eq. 3 sums the features of all records."""
        return (
            "its prototypes sum the features of all records, for which no private job pays; choose"
            " fedaims"
        )

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The silo's own model, and the common prototypes."""
        model = dealt(self.options.extractors, self.setting, silo)
        return {**model, "prototypes": Prototypes(*self.prototypes.tensors[0].shape)}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """Logits of the nearest prototype, or of the classifier."""
        features = parts["extractor"](x)
        own = parts["classifier"](features)
        if self.options.predict == "classifier":
            return own
        near = parts["prototypes"](features)  # (4)
        # Before the first delivery no class has a prototype, so the classifier predicts.
        return torch.where((near > float("-inf")).any(1, keepdim=True), near, own)

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Take the delivered prototypes; a class without one keeps its last."""
        if "prototypes" not in delivered:
            return state
        mean, kept = delivered["prototypes"]["mean"], state.parts["prototypes"]["mean"]
        common = torch.where(known(mean)[:, None], mean, kept)
        return replace(state, parts={**state.parts, "prototypes": {"mean": common}})

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """Train the model, then measure its prototypes."""
        stage = self.stage("extractor", "classifier")
        # As context: a silo may keep prototypes that others lack, so values differ by silo.
        context = {"prototypes": state.parts["prototypes"]["mean"]}
        return (replace(stage, loss=self.objective, context=context), Survey(self.sums))

    def objective(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """ℓ by sample [B].

        ``context["prototypes"]`` [C, d] has zeros for classes without a prototype.
        """
        features = parts["extractor"](x)
        supervised = self.setting.task.losses(parts["classifier"](features), y)
        distance = (features - context["prototypes"][y]).square().mean(1)  # (8)
        # ``known`` drops the distance of records whose class has no prototype.
        return supervised + self.options.lam * distance * known(context["prototypes"])[y]  # (7)

    def sums(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Sums of the features by class: the numerator of Eq. 3."""
        member = one_hot(y, self.setting.outputs).double()  # [B, C]
        return {"sums": member.T @ parts["extractor"](x).double()}

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """Mean features by class; zeros, of weight 0, for a class without records.

        Rows [C, d] have weights [C]: the class's records, or 1 with ``weights = "equal"``.
        """
        (spec,), counts = self.prototypes.tensors, facts.class_counts.double()
        mean = facts.measured["sums"] / counts.clamp(min=1)[:, None]  # (3)
        weight = counts if self.options.weights == "samples" else (counts > 0).double()  # (6)
        return {"prototypes": Contribution({spec.name: mean.to(DTYPES[spec.dtype])}, weight)}


def known(prototypes: Tensor) -> Tensor:
    """Mask [C] of the classes that have a prototype."""
    return (prototypes != 0).any(1)
