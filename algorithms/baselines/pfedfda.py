"""pFedFDA: a generative classifier of class means and one covariance.

It is interpolated between silo and federation.

Mclaughlin, Su, "Personalized federated learning via feature distribution adaptation", NeurIPS 2024,
arXiv:2411.00329, Algorithm 1; read next to the authors' code, which the equations follow where the
paper leaves the exact form open. The mathematics of Eqs. 1, 3 and 5 are in
algorithms/methods/common/gaussian_classifier.py.

Features z [d] of class k are taken as normal with mean μ_k [d] and a covariance Σ [d, d] that all
classes share. Silo i has n_i records, n_ik of class k; π_ik is n_ik / n_i + 1e-4, scaled to add up
to one.

    (1) logits of z under (μ, Σ, π):  z·w_k + b_k,  w_k = Σ'⁻¹ μ_k,  b_k = log π_k - ½ μ_k·w_k,
        Σ' = (1 - ε) Σ + ε (tr Σ / d) I with ε = 1e-4
    (2) at silo i:  θ_i ← SGD(cross-entropy of Eq. 1 under the global (μ, Σ) and π_i, which are
    held)
    (3) then, of the features z of its records by θ_i:  μ_ik their mean where n_ik > 0, else the
                                                        global μ_k;
        Σ_i = Σ_z (z - μ_iy)(z - μ_iy)ᵀ / (n_i - 1) + ρ I
    (4) μ̂_i = β_μ μ_i + (1 - β_μ) μ,   Σ̂_i = β_Σ Σ_i + (1 - β_Σ) Σ
    (5) β_i minimises over [0, 1] the cross-entropy of each half of the records under Eq. 4 with Eq.
    3 of the other half
    (6) at the coordinator, weighted by n_i:  θ ← mean of θ_i,   μ ← mean of μ̂_i,   Σ ← mean of
                                                                 Σ̂_i
    (7) in the end every silo does (3) to (5) once more with the delivered θ, and classifies by (1)
    of (μ̂_i, Σ̂_i, π_i)

Where this differs from the paper:
- Features are those of the trained extractor, in evaluation mode. The code takes them batch by
  batch while it trains.
- ρ = 1, ``ridge``, is what the authors' code and so its figures have; a small constant seems to be
  meant, but then the logits of Eq. 1 are far larger, and training diverges.
- The halves of Eq. 5 are, of each class, every other record in their order; the code draws them. A
  class of one record takes no part, and β_i is 0 where no other is left.
- Eq. 5 is minimised over steps of 0.05, so that rounding moves no β; the code takes up to 10 steps
  of L-BFGS from 0.5.
- For μ, Eq. 6 crosses as β_μ (μ_ik - μ_k) of the classes that a silo holds; it is nought for the
  others. So a blind job can leave out rows that few silos hold (algorithms/job/class_census.py);
  such a class keeps its initial mean, as does one that nobody holds. Whoever counts as a holder
  gives a row: the code takes the global mean for classes of one or two records.
- Initial means are uniform in [0, 1) and Σ is I, as in the code.
- Batch norm's running statistics stay at each silo, unless ``model.buffers = "global"``.

The gradients of Eq. 2 grow with the means, which follow the features: a learning rate that other
methods stand may let both grow without bounds. The authors' code has 0.01 with momentum 0.5.

Wire list (C classes, width d), the same in every round but the last, in which nothing is given:

==============  ====  =======================================  ===============================
part            way   tensors                                  exchange
==============  ====  =======================================  ===============================
``extractor``   both  θ                                        Sum, weighted by samples
``covariance``  both  Σ̂_i; down: Σ [d, d]                      Sum, weighted by samples
``changes``     up    β_μ (μ_i - μ) [C, d]                     Sum row by row, by samples or 0
``records``     up    n_i                                      Sum, total
``means``       down  μ [C, d]                                 -
==============  ====  =======================================  ===============================

What is of one silo stays there: β_i, its own μ_i and Σ_i, and the classifier, which neither crosses
nor is trained. In the clear, the weights of ``changes`` tell the coordinator which classes a silo
holds. A silo's model in the end is the one of Eq. 7. The features are surveyed without noise, so
such a job cannot be private.
"""

from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from ...errors import LocalError, PeerError
from ...files.documents import Strict
from ..course import Change, Course, Facts, Parts, SiloState, Survey
from ..exchange.delivery import Combined, CoordinatorState, Results
from ..exchange.parts import DTYPES, WEIGHT, Contribution, Kind, Part, Sum, TensorSpec, all_finite
from ..method import Method, Setting
from ..methods.common.gaussian_classifier import best_beta, estimates, linear, priors_of
from ..numerics.streams import stream, uniform


class PFedFDAOptions(Strict):
    """Options of pFedFDA."""

    interpolation: Literal["two", "one"] = "two"
    """Means and covariance have a β each, or one in common."""
    ridge: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    """ρ of Eq. 3."""


class PFedFDA(Method):
    """A shared extractor below classifiers that follow from interpolated means and covariances."""

    name = "pfedfda"
    version = 1
    needs_classes = "estimates how features of each class are distributed"
    options_model = PFedFDAOptions
    options: PFedFDAOptions
    tunes = True

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        # Eq. 1 sets the classifier: one weight row and one bias per class.
        header = self.header_rows(bias=True)
        rows, dtype = header.shape, header.dtype  # [C, d]
        self.dtype = DTYPES[dtype]
        self.extractor = self.shared("extractor", Kind.BACKBONE, "extractor")
        square = TensorSpec("covariance", dtype, (rows[1], rows[1]))
        self.covariance = Part("covariance", Kind.PROTOTYPES, Sum("mean"), (square,))
        change = TensorSpec("change", dtype, rows)
        self.changes = Part("changes", Kind.PROTOTYPES, Sum("ratio"), (change,))
        # Summed apart from the weights, since Eq. 6 divides by the records of all silos.
        count = TensorSpec("records", "int64", (), 0.0)
        self.records = Part("records", Kind.COUNTS, Sum("total"), (count,))
        self.means = Part("means", Kind.PROTOTYPES, Sum("mean"), (TensorSpec("mean", dtype, rows),))

    def up(self, round_: int) -> tuple[Part, ...]:
        """The extractor and the interpolated statistics; nothing in the end."""
        if self.tuning(round_):
            return ()
        return (self.extractor, self.covariance, self.changes, self.records)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The extractor and the global statistics."""
        return (self.extractor, self.covariance, self.means)

    @property
    def private_fault(self) -> str:
        """Eqs. 3 and 5 read each record's features."""
        return (
            "its means, covariances and β are those of features that are surveyed without noise;"
            " choose fedper"
        )

    # The silo half. ``extra`` holds the global ``means`` and ``covariance``; what this silo
    # contributes, ``change`` and ``adapted``; its ``priors`` [C], and ``beta`` [2]: β_μ and β_Σ.

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """The initial global statistics, and equal priors."""
        means, classes = self.initial_means(), self.setting.outputs
        # The identity, as in the authors' code.
        covariance = torch.eye(means.shape[1], dtype=self.dtype)
        return {
            "means": means,
            "covariance": covariance,
            "change": torch.zeros_like(means),
            "adapted": covariance.clone(),
            "priors": torch.full((classes,), 1 / classes, dtype=torch.float64),
            "beta": torch.zeros(2, dtype=torch.float64),
        }

    def initial_means(self) -> Tensor:
        """The means [C, d] that all silos and the coordinator begin with."""
        (spec,) = self.means.tensors
        # Drawn from a stream of the job, so that all silos start with the same means.
        drawn = uniform(stream(self.setting.seed, "", 0, "init/pfedfda/means"), spec.shape, 0, 1)
        return torch.from_numpy(drawn).to(self.dtype)

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Take the extractor and statistics; the classifier follows from the statistics."""
        taken = self.replaced(state, delivered, "extractor")
        extra = dict(taken.extra)
        if "means" in delivered:
            extra["means"] = delivered["means"]["mean"]
        if "covariance" in delivered:
            extra["covariance"] = delivered["covariance"]["covariance"]
        fresh = replace(taken, extra=extra)
        # If the delivered covariance has no inverse, the coordinator is at fault, not this silo.
        try:
            return self.classifying(fresh, extra["means"], extra["covariance"])
        except LocalError as error:
            raise PeerError(
                "coordinator", f"the delivered covariance cannot be used: {error}"
            ) from error

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """Train under the global statistics, then adapt them; in the end adapt them alone."""
        # Rows, not sums: Eq. 5 needs each record's features.
        adapt = (Survey(self.features, rows=True), Change(self.adapt))
        if self.tuning(facts.round):
            return adapt
        # Training (2) keeps the classifier fixed, so it is set first.
        return (Change(self.begin_round), self.stage("extractor"), *adapt)  # (2)

    def begin_round(self, state: SiloState, facts: Facts) -> SiloState:
        """The classifier of Eq. 2."""
        extra = {**state.extra, "priors": priors_of(facts.class_counts)}
        return self.classifying(replace(state, extra=extra), extra["means"], extra["covariance"])

    def features(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The features [B, d], and the labels."""
        return {"features": parts["extractor"](x), "labels": y}

    def adapt(self, state: SiloState, facts: Facts) -> SiloState:
        """Eqs. 3 to 5, and the classifier that follows.

        It computes in float64 and stores in the job's dtype. LocalError for features that are not
        finite.
        """
        # A survey returns float64, even for labels.
        z, y = facts.measured["features"], facts.measured["labels"].long()
        if not all_finite(z):
            raise LocalError(
                "pfedfda: features of the trained extractor are not finite; training has diverged,"
                " lower training.lr"
            )
        means, covariance = state.extra["means"].double(), state.extra["covariance"].double()
        priors = priors_of(facts.class_counts)
        ridge, in_common = self.options.ridge, self.options.interpolation == "one"
        beta = best_beta(z, y, (means, covariance), priors, ridge, in_common)  # (5)
        own_means, own_covariance = estimates(z, y, means, ridge)  # (3)
        # β_μ (μ_ik - μ_k): zero for a class without records, whose own mean is the global one.
        change = beta[0] * (own_means - means)
        adapted = beta[1] * own_covariance + (1 - beta[1]) * covariance  # (4)
        # The dtype in which they cross.
        given = {"change": change.to(self.dtype), "adapted": adapted.to(self.dtype)}
        extra = {**state.extra, **given, "priors": priors, "beta": beta}
        return self.classifying(replace(state, extra=extra), means + change, adapted)

    def classifying(self, state: SiloState, means: Tensor, covariance: Tensor) -> SiloState:
        """The state with the classifier of Eq. 1.

        LocalError if the covariance has no inverse.
        """
        weight, bias = linear(means.double(), covariance.double(), state.extra["priors"])
        classifier = {"weight": weight.to(self.dtype), "bias": bias.to(self.dtype)}
        return replace(state, parts={**state.parts, "classifier": classifier})

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The extractor and the interpolated statistics, by samples; nothing when tuning.

        ``changes`` [C, d] has one weight per class: n_i if the silo holds the class, else 0.
        """
        if self.tuning(facts.round):
            return {}
        weight = float(facts.samples)
        return {
            "extractor": Contribution(self.flat(state, "extractor"), weight),
            "covariance": Contribution({"covariance": state.extra["adapted"]}, weight),
            "changes": Contribution(
                {"change": state.extra["change"]}, weight * (facts.class_counts > 0).double()
            ),
            "records": Contribution({"records": torch.tensor(facts.samples)}),
        }

    # The coordinator half. ``means`` [C, d] are the global ones.

    def begin(self) -> CoordinatorState:
        """The initial means."""
        return {"means": self.initial_means()}

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Eq. 6 for μ: with the mean change of those that give a row, and n of them, μ + change · n
        / Σ_i n_i.
        """
        if self.tuning(round_):
            return Combined(state)
        # The mean over holders times their share of all records is the mean over all.
        share = results["changes"][WEIGHT] / results["records"]["records"].clamp(min=1)  # [C]
        change = results["changes"]["change"].double() * share[:, None]
        means = state["means"] + change.to(self.dtype)  # (6)
        # The sums of changes and records stay at the coordinator: means come down in their place.
        published = super().combine(state, round_, cohort, results).published
        down = {
            name: tensors
            for name, tensors in published.items()
            if name in ("extractor", "covariance")
        }
        return Combined({"means": means}, {**down, "means": {"mean": means}})
