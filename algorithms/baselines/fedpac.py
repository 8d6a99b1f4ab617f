"""FedPAC: features aligned to common class prototypes, and mixed classifiers.

Each silo's data determine the weights by which classifiers are mixed.

Xu, Tong, Huang, "Personalized federated learning with feature alignment and classifier
collaboration", ICLR 2023, arXiv:2306.11867, Algorithm 1; read next to the authors' code.

A model is a feature extractor θ below a classifier φ_i. Silo i has n_i records, n_ik of class k,
p_ik = n_ik / n_i; f(x) are the d features of a record, c_k is the global prototype of class k.

    (1) at silo i, of the model as delivered:  h_ik = p_ik · mean of f(x) over class k,
                                               V_i = [(1/n_i) Σ_x ‖f(x)‖² - Σ_k ‖h_ik‖²] / n_i
    (2) then φ_i ← SGD(cross-entropy) with θ held, for E_φ epochs of learning rate η_φ
    (3) then θ_i ← SGD(cross-entropy + λ · (1/n_i) Σ_x (1/d) ‖f(x) - c_y‖²) with φ_i held, for
    E_θ epochs
    (4) then ĉ_ik = mean of f(x) over class k, by the trained extractor
    (5) at the coordinator:  θ ← Σ_i n_i θ_i / Σ_i n_i,   c_k ← Σ_i n_ik ĉ_ik / Σ_i n_ik
    (6) α_i = argmin over the simplex of Σ_j α_j² V_j + Σ_jl α_j α_l Σ_k ⟨h_ik - h_jk, h_ik - h_lk⟩,
        φ_i ← Σ_j α_ij φ_j

With G the inner products of the h, ⟨h_i - h_j, h_i - h_l⟩ = G_ii - G_ij - G_il + G_jl: the
coordinator needs no h. Only their differences count, so c_k / C is first taken off each h_ik, which
then has entries of both signs.

Where this differs from the paper:
- ``variances = "pooled"``, not from the paper, takes V_j = v / n_j with v the mean of n_j V_j over
  the silos of the round, a sum, and n_j as a blind job declares it, or the mean count where none is
  declared. The paper's V_j of each silo has no blind form. Nor have vectors without negative
  entries, as features mostly are, so that classifiers are then mixed only once there are
  prototypes: none is given in round 0.
- Eq. 6 is solved exactly (algorithms/methods/common/classifier_weights.py), the authors' code calls
  a general solver. Weights up to 1e-3 are dropped as there, so that hardly alike silos are not
  mixed.
- Only silos of one round are compared. One that was away since keeps its α, over what each silo
  contributed last.
- A class that nobody held in the last round has no prototype, and its records no term in Eq. 3; the
  code falls back on the silo's own prototype.
- E_φ + E_θ are the job's epochs unless options say otherwise: E_φ is 1, E_θ the rest, at least 1.
  In the paper E_φ comes on top of the epochs that the other methods take.
- Both stages take the job's momentum and weight decay, 0.5 and 5e-4 in the code, where the
  extractor's lr is 0.01.
- Batch norm's running statistics stay at each silo, unless ``model.buffers = "global"``.

Wire list (C classes, width d), the same in every round, but for round 0 if "pooled": the last three
are not given then:

==============  ====  ===========================================  ================================
part            way   tensors                                      exchange
==============  ====  ===========================================  ================================
``extractor``   both  θ                                            Sum, weighted by samples
``prototypes``  both  [C, d]                                       Sum row by row, by class counts
``classifier``  both  φ_i; down: the silo's row of Eq. 6           Mix
``vectors``     up    [1, C·d]: the h_ik - c_k / C, end to end     Gram
``variance``    up    one number: V_i, or n_i V_i / d if "pooled"  Each, or Sum weighted by samples
==============  ====  ===========================================  ================================

With ``variances = "each"`` the method is refused under ``secure_aggregation = "required"``. Blind
or not, the Gram shows the coordinator which silos are alike: features of one class are near one
another in all silos, so it is roughly that of the class shares, each class scaled by its
prototype's length. A silo's model in the end is the one it trained last. The prototypes are
surveyed after training, without noise, so such a job cannot be private.
"""

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn.functional import one_hot

from ...errors import LocalError
from ...files.documents import Strict
from ..course import Course, Facts, Parts, SiloState, Survey
from ..exchange.delivery import (
    Combined,
    CoordinatorState,
    Delivery,
    Latest,
    Results,
    Row,
    positive_weights,
)
from ..exchange.parts import (
    DTYPES,
    WEIGHT,
    Contribution,
    Each,
    Gram,
    Kind,
    Mix,
    Part,
    Sum,
    Tensors,
    TensorSpec,
)
from ..method import Method, Setting
from ..methods.common.classifier_weights import best_weights, points_of


class FedPACOptions(Strict):
    """Options of FedPAC."""

    lam: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 1.0
    """λ of Eq. 3."""
    classifier_epochs: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 1
    """E_φ of Eq. 2."""
    extractor_epochs: Annotated[int, Field(strict=True, ge=1, le=10_000)] | None = None
    """E_θ of Eq. 3; default: the job's epochs that E_φ leaves."""
    classifier_lr: Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)] = 0.1
    """η_φ of Eq. 2."""
    variances: Literal["each", "pooled"] = "each"
    """V of Eq. 6: of each silo as in the paper, or of all together, which a blind job can sum."""


class FedPAC(Method):
    """A shared extractor, aligned to prototypes, below classifiers mixed for each silo."""

    name = "fedpac"
    version = 2  # 2: the epochs of both stages add up to the job's by default
    needs_classes = "averages features class by class"
    options_model = FedPACOptions
    options: FedPACOptions
    addressed = ("classifier",)

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        # Eq. 6 mixes classifiers of silos that it has compared in one round.
        if setting.cohort_size == 1:
            raise LocalError(
                f"fedpac: a round draws 1 of {len(setting.silos)} silos, so no two are ever"
                " compared and no classifier is mixed; raise participation or min_cohort so that 2"
                " are drawn"
            )
        weight = self.header_rows()
        classes, self.width = weight.shape
        self.extractor = self.shared("extractor", Kind.BACKBONE, "extractor")
        rows = TensorSpec("mean", weight.dtype, (classes, self.width))
        self.prototypes = Part("prototypes", Kind.PROTOTYPES, Sum("ratio"), (rows,))
        self.classifier = Part("classifier", Kind.HEADER_ROWS, Mix(), self.flat_specs("classifier"))
        vector = TensorSpec("h", weight.dtype, (1, classes * self.width))
        self.vectors = Part("vectors", Kind.PROTOTYPES, Gram(), (vector,))
        self.pooled = self.options.variances == "pooled"
        # Variances are at least 0; both ends check this bound.
        number = TensorSpec("v", "float64", (), 0.0)
        exchange = Sum("mean") if self.pooled else Each()
        self.variance = Part("variance", Kind.PROTOTYPES, exchange, (number,))

    def up(self, round_: int) -> tuple[Part, ...]:
        """Extractor and prototypes; the classifier, and the terms of its weights."""
        shared = (self.extractor, self.prototypes)
        # Before there are prototypes, vectors have no negative entries, and so no blind form.
        if self.pooled and round_ == 0:
            return shared
        return (*shared, self.classifier, self.vectors, self.variance)

    def down(self, round_: int) -> tuple[Part, ...]:
        """Extractor and prototypes, and the silo's own mixture of classifiers."""
        return (self.extractor, self.prototypes, self.classifier)

    @property
    def private_fault(self) -> str:
        """Eq. 4 reads the records after training."""
        return (
            "its prototypes are those of the trained extractor, surveyed without noise; choose"
            " fedper"
        )

    # The silo half. ``extra`` holds the global prototypes [C, d], zeros where there is none.

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """No prototype."""
        (spec,) = self.prototypes.tensors
        return {"prototypes": torch.zeros(spec.shape, dtype=DTYPES[spec.dtype])}

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """The extractor and the mixed classifier into the model, the prototypes into ``extra``."""
        taken = self.replaced(state, delivered, "extractor", "classifier")
        # If none came down, the silo keeps its last prototypes.
        prototypes = delivered.get("prototypes", {"mean": state.extra["prototypes"]})["mean"]
        return replace(taken, extra={"prototypes": prototypes})

    def measure(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Sums of features by class [C, d] and of their squares, by the delivered model (Eq. 1).

        They are {"sums": [C, d], "squares": []} in float64; ``contribute`` computes h_ik and V_i.
        """
        features = parts["extractor"](x).double()  # [B, d]
        return {"sums": self.class_sums(features, y), "squares": features.square().sum()}

    def survey(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The sums by class by the trained extractor: for Eq. 4."""
        return {"trained": self.class_sums(parts["extractor"](x).double(), y)}

    def class_sums(self, features: Tensor, y: Tensor) -> Tensor:
        """Sums of features by class [C, d]."""
        return one_hot(y, self.setting.outputs).to(features.dtype).T @ features

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """Train the classifier, then the extractor, and measure the records."""
        classifier, extractor = self.stage("classifier"), self.stage("extractor")
        epochs = self.options.extractor_epochs
        if epochs is None:
            epochs = self.epochs_left(self.options.classifier_epochs)
        # η_φ of (2); (3) takes the job's learning rate.
        optimiser = replace(classifier.optimiser, lr=self.options.classifier_lr)
        context = {"prototypes": state.extra["prototypes"]}
        return (
            replace(classifier, epochs=self.options.classifier_epochs, optimiser=optimiser),  # (2)
            replace(extractor, epochs=epochs, loss=self.aligned, context=context),  # (3)
            Survey(self.survey),
        )

    def aligned(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """Eq. 3 by sample [B].

        ``context["prototypes"]`` is [C, d].
        """
        features = parts["extractor"](x)  # [B, d]
        prototypes = context["prototypes"][y]  # [B, d]
        # A row of zeros means that the class has no prototype: its records get no distance.
        known = (prototypes != 0).any(1)  # [B]
        apart = torch.where(known, (features - prototypes).square().mean(1), 0)
        supervised = self.setting.task.losses(parts["classifier"](features), y)
        return supervised + self.options.lam * apart

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """Model and prototypes, and Eq. 1.

        ``vectors`` is [1, C·d] and ``variance`` one number. Prototypes have the class counts [C] as
        weights.
        """
        counts, n = facts.class_counts.double(), facts.samples
        (rows,), (vector,) = self.prototypes.tensors, self.vectors.tensors
        means = facts.measured["trained"] / counts.clamp(min=1)[:, None]  # (4)
        h = facts.measured["sums"] / n  # [C, d] (1): p_k · sum_k / n_k
        # c_k / C is taken off each h: only differences count, and entries then have both signs.
        vectors = h - state.extra["prototypes"].double() / len(h)
        # n V of (1); not below 0 by rounding
        spread = (facts.measured["squares"] / n - h.square().sum()).clamp(min=0)
        variance = Contribution({"v": spread / n})
        if self.pooled:
            # Divided by d it has the size of one feature's variance, and so fits a blind sum.
            variance = Contribution({"v": spread / self.width}, float(n))
        contributions = {
            "extractor": Contribution(self.flat(state, "extractor"), float(n)),
            "prototypes": Contribution({rows.name: means.to(DTYPES[rows.dtype])}, counts),
            "classifier": Contribution(self.flat(state, "classifier")),
            "vectors": Contribution(
                {vector.name: vectors.reshape(vector.shape).to(DTYPES[vector.dtype])}
            ),
            "variance": variance,
        }
        return self.for_round(contributions, facts.round)

    # The coordinator half. ``alpha`` [n, n] has the last weights of each silo; a row of zeros
    # before the first.

    def begin(self) -> CoordinatorState:
        """No weights."""
        n = len(self.setting.silos)
        return {"alpha": torch.zeros(n, n, dtype=torch.float64)}

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Eq. 5 by the exchanges; Eq. 6 for the silos of this round."""
        combined = super().combine(state, round_, cohort, results)
        # A round without vectors keeps the last α.
        if self.vectors not in self.up(round_):
            return combined
        variances = self.variances(cohort, results["variance"])
        # Points with the same inner products as the vectors: Eq. 6 needs only differences.
        points = points_of(results["vectors"]["gram"][0].numpy())
        alpha = state["alpha"].clone()
        here = self.numbers(cohort)
        for own, silo in enumerate(here):
            # A new row: silos that are not in this round have no share in it.
            alpha[silo] = 0
            alpha[silo, here] = torch.from_numpy(best_weights(points, variances, own))  # (6)
        return replace(combined, state={"alpha": alpha})

    def variances(self, cohort: tuple[str, ...], found: Tensors) -> NDArray[np.float64]:
        """V of Eq. 6 by silo of the round [m].

        With "pooled" the mean of n_j V_j is divided by each silo's declared records, or by the mean
        count if none are declared.
        """
        if not self.pooled:
            return found["v"].numpy()
        mean = float(found[WEIGHT]) / len(cohort)
        counts = np.array([self.setting.counts.get(silo, mean) for silo in cohort], np.float64)
        return float(found["v"]) * self.width / counts

    def deliveries(self, state: CoordinatorState, round_: int, silo: str) -> tuple[Delivery, ...]:
        """Extractor and prototypes, and a row for a silo that is mixed with others."""
        weights = positive_weights(self.setting.silos, state["alpha"][self.number(silo)])
        # A row of the silo alone would give its own classifier back.
        mixed = (Row("classifier", weights),) if weights.keys() - {silo} else ()
        return (Latest("extractor"), Latest("prototypes"), *mixed)
