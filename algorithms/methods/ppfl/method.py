"""PPFL: every silo's model is its own mixture of canonical models that all silos share.

Di, Yang, Ye, Chang, "PPFL: a personalized federated learning framework for heterogeneous
population", arXiv:2310.14337, Section 2, Algorithms 1 and O1. The copy that this was written from
has lost its formulae. Those below are a reconstruction, from the text around them and the authors'
code; their numbers are the paper's.

θ = (v, U) with a shared extractor v and canonical models U = (u_1 … u_K) of the classifier's kind;
c_i, a point of the simplex, is the membership vector of silo i; h_i are its label proportions
divided by their Euclidean norm.

    (4)  min_{θ, C} Σ_i f_i(v, U, c_i) + (λ/2) Σ_ij w_ij ‖c_i − c_j‖²,   w_ij = h_i·h_j
    (5), (6)  Σ_k c_ik = 1, c_ik ≥ 0
    (7)  PPFL1: ŷ = Σ_k c_ik softmax(u_k(z))                    (8)  PPFL2: ŷ = softmax(u(z)), u =
                                                                     Σ_k c_ik u_k
    (11) θ_i ← θ_i − η ∇f_i(θ_i), E epochs                      (12) θ ← Σ_i a_i θ_i / Σ_i a_i
    (13) G_i(c | C^t) = f_i(θ, c) + λ (d_i ‖c‖² − 2 c·Σ_j w_ij c_j^t) ≥ F up to a constant, d_i =
    Σ_j w_ij
    (14) c_i ← c_i exp(−η_c g_i) / Σ,   g_i = ∇_c G_i = ∇_c f_i + 2 λ [L C^t]_i at c_i^t,   L = D −
                                        W

After (14) entries below a floor are raised to it (Remark 3.2).

W has rank C at most, so d_i = Σ_c h_ic b_c and Σ_j w_ij c_j = Σ_c h_ic M_c with the class sums b_c
= Σ_j h_jc and M_c = Σ_j h_jc c_j: the Laplacian costs one sum of C(K+1) numbers, and neither c_i
nor the proportions leave a silo.

Readings, where the paper leaves a choice:
- PPFL1 mixes probabilities, the values after the last non-linearity (Eq. 7). ``mixture = "logits"``
  mixes scores before it, as the deep form of the paper's figure; for linear canonical models that
  is PPFL2, as in the authors' code.
- Both learning rates fall where the job's ``training.schedule`` says so, in the paper's experiments
  to a tenth after T/2 and again after 3T/4 rounds.
- A silo keeps the averaged θ with its own c_i.
- Schedules. "alternating" is Algorithm O1: c, then θ; it is the default, since each of its rounds
  moves both. "theta_then_c" is the authors' code: it moves c on the averaged θ, which here happens
  where that θ arrives, so round 0 moves θ alone and the code's last c step is missing. "rbcd" is
  Algorithm 1, one block per round, drawn from a public stream of the job.
- ``no_affinity`` (gradient λ D C: the code has no −W and no factor 2) and ``double_exponential`` (c
  exp(exp(−η_c g))) are quirks of the authors' code, ``membership_batches`` (mini-batch mirror steps
  for E epochs) its way to step.

Deviations:
- Eq. 11 runs for E epochs with the job's optimiser; the paper counts τ plain steps. The gradient of
  u_k holds c_ik, at first 1/K. So canonical models learn K times slower at the rate that suits
  FedAvg, and may not have found the groups when the rate falls. K times that rate finds them on
  the synthetic set (docs/results.md).
- The last iterate is kept, not one drawn by Eq. 10.
- λ is divided by the mean degree Σ_i d_i / N, since d_i grows with N; ``lam_scale = "literal"``
  takes it as it stands.
- The class sums run over the silos of the round before: who stayed away pulls no one. All C^0 are
  equal, so L C^0 = 0. Eq. 12 is over the cohort too, in all rounds; in Algorithms 1 and O1 all
  silos take part.

For security:
- h_i comes from training records only; the authors' code counts the test records too.
- c_i and the proportions leave no silo, as the class sums above allow; what these sums tell is
  below.

Wire list ("rbcd": ``model`` in rounds of θ only, ``coupling`` in rounds of c only; no ``coupling``
where λ = 0):

==============  ====  ============================================  ================================
part            way   tensors                                       exchange
==============  ====  ============================================  ================================
``model``       up    v and U                                       Sum, weights equal or by samples
``model``       down  v and U                                       -
``coupling``    up    ``b`` [C], ``m`` [C, K], ``silos`` [] (1      Sum, total
                      from each)
``coupling``    down  the three sums                                -
``membership``  up    ``c`` [K], only with ``release_membership``   Each
==============  ====  ============================================  ================================

h_i is the same in every round, so whoever sees ``b`` over two sets of silos that differ by one has
that silo's label proportions, and about its c_i. λ > 0 is therefore refused where a round draws
some of the silos only. One that drops out of a round of a job with all silos is missing in that
round's sums all the same, and these are delivered to every silo: ``min_cohort`` = the number of
silos ends the job instead, λ = 0 has no such sums. Where the exchanges run in the clear, the
coordinator sees h_i as it is. In a blind job a class that few silos have is in no class sum, as if
nobody had it (algorithms/job/class_census.py): it pulls nobody.

Under differential privacy θ and c_i are both noised, since each one's gradients pass through the
other: a step of c_i on all records at once has noise of its own (algorithms/job/privacy.py), and
h_i is of the noisy class counts of the job.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ....errors import LocalError
from ....files.documents import Strict
from ...course import Effort, Facts, Optimiser, Parts, SiloState, Stage
from ...exchange.delivery import Combined, CoordinatorState, Results
from ...exchange.parts import Contribution, Each, Kind, Part, Sum, Tensors, TensorSpec
from ...method import Method, Setting
from ...numerics.streams import stream, uniform
from ...tasks.classification import Classification
from .canonical import Membership, Mixture, canonical

Real = Annotated[float, Field(allow_inf_nan=False)]


class PPFLOptions(Strict):
    """Options of PPFL. K, λ and η_c vary by data set in the paper.

    The defaults are not from the paper.
    """

    variant: Literal["ppfl1", "ppfl2"] = "ppfl1"
    """PPFL1 mixes what the canonical models answer, PPFL2 their parameters."""
    mixture: Literal["probabilities", "logits"] = "probabilities"
    """The outputs that PPFL1 mixes."""
    models: Annotated[int, Field(strict=True, ge=1, le=64)] = 3
    """K."""
    canonical: Literal["linear", "mlp"] = "linear"
    """The form of a canonical model, on the features of the extractor."""
    hidden: Annotated[int, Field(strict=True, ge=1, le=65_536)] = 128
    """Hidden units of an "mlp" (the paper's MNIST model)."""
    schedule: Literal["alternating", "theta_then_c", "rbcd"] = "alternating"
    """When the models θ and the memberships c step."""
    p_theta: Annotated[Real, Field(gt=0, lt=1)] = 0.5
    """Probability of a θ round under "rbcd" (not from the paper)."""
    membership_lr: Annotated[Real, Field(gt=0)] = 0.5
    """η_c (the code's value for CIFAR-10)."""
    membership_batches: bool = False
    """True if a membership steps batch by batch as in the code, not once on all records."""
    floor: Annotated[Real, Field(gt=0, lt=1)] = 1e-4
    """Smallest entry of c_i (not from the paper)."""
    lam: Annotated[Real, Field(ge=0)] = 0.01
    """λ; the authors' 1e-5, literal, couples next to nothing where silos are few.

    0 where not all silos are drawn in every round.
    """
    lam_scale: Literal["mean_degree", "literal"] = "mean_degree"
    """λ is divided by the mean degree of the silos' graph, or taken as it stands."""
    weights: Literal["equal", "samples"] = "equal"
    """a_i of Eq. 12 (equal as in the code)."""
    release_membership: Literal["never", "last", "always"] = "never"
    """Rounds in which the coordinator sees each c_i."""
    no_affinity: bool = False
    """True if the gradient is λ D C as in the authors' code, without the silos' affinities."""
    double_exponential: bool = False
    """True if a membership steps as in the authors' code, by c exp(exp(−η_c g))."""


class PPFL(Method):
    """A silo's own mixture of shared canonical models."""

    name = "ppfl"
    version = 1
    needs_classes = "mixes what models say of classes"
    options_model = PPFLOptions
    published = MappingProxyType({"lam": 1e-5, "lam_scale": "literal"})
    product = "delivered"
    options: PPFLOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        # K and C are the paper's letters.
        K, C = self.options.models, setting.outputs
        # Its likelihood is not computed from logits, as the task's other losses are.
        if self.mixture == "probabilities" and setting.task != Classification():
            raise LocalError(
                "ppfl: a mixture of probabilities has the plain cross-entropy; leave [task] as it"
                ' is by default, or set mixture = "logits"'
            )
        # c adds up to 1, so K floors must stay below it.
        if self.options.floor * K >= 1:
            raise LocalError(
                f"ppfl: floor = {self.options.floor} times models = {K} must stay below 1; lower"
                " the floor"
            )
        if self.options.mixture == "logits" and self.options.variant == "ppfl2":
            raise LocalError(
                'ppfl: mixture = "logits" is for variant "ppfl1"; "ppfl2" mixes parameters; leave'
                " it out"
            )
        # h_i does not change, so sums over changing cohorts reveal it (security rule 1).
        if self.options.lam > 0 and setting.cohort_size < len(setting.silos):
            raise LocalError(
                f"ppfl: lam = {self.options.lam} where {setting.cohort_size} of"
                f" {len(setting.silos)} silos are drawn per round: class sums over changing cohorts"
                " tell the label proportions of one silo; set lam = 0, or participation = 1.0 (or"
                f" min_cohort = {len(setting.silos)}) to draw all"
            )
        classifier = setting.sketch()["classifier"]
        if not isinstance(classifier, nn.Linear):
            raise LocalError(
                "ppfl: canonical models stand for a Linear classifier, not"
                f" {type(classifier).__name__}"
            )
        self.width = classifier.in_features
        self.template = self.crossing({"extractor": setting.sketch()["extractor"], **self._mixed()})
        # If the extractor has no parameters, only U crosses.
        self.theta = tuple(part for part in ("extractor", "canonical") if self.template[part])
        kind = Kind.WHOLE_MODEL if "extractor" in self.theta else Kind.CANONICAL_MODELS
        self.model = self.shared("model", kind, *self.theta)
        # The weight is 1 for each silo, whatever bounds a blind job has for weights by records.
        if self.options.weights == "equal":
            self.model = replace(self.model, exchange=Sum("mean", most=1.0))
        # The class sums b_c and M_c, and the number of silos in them.
        sums = (("b", (C,)), ("m", (C, K)), ("silos", ()))
        specs = tuple(TensorSpec(name, "float64", shape) for name, shape in sums)
        self.coupling = Part("coupling", Kind.MEMBERSHIP, Sum("total"), specs)
        self.membership = Part("membership", Kind.MEMBERSHIP, Each(), self.template["membership"])

    @property
    def mixture(self) -> Mixture:
        """The outputs or parameters that the membership vector mixes."""
        return "parameters" if self.options.variant == "ppfl2" else self.options.mixture

    def blocks(self, round_: int) -> tuple[str, ...]:
        """The blocks that move in a round, in order."""
        if self.options.schedule == "rbcd":
            # Algorithm 1 draws the block; the stream is public, so every silo knows the draw.
            draw = uniform(stream(self.setting.seed, "", round_, "ppfl/block"), (), 0, 1).item()
            return ("theta",) if draw < self.options.p_theta else ("c",)
        if self.options.schedule == "theta_then_c" and round_ == 0:
            return ("theta",)
        return ("c", "theta")

    def up(self, round_: int) -> tuple[Part, ...]:
        """θ and the class sums, each where its block moves, and c_i where it is released."""
        blocks = self.blocks(round_)
        parts = []
        if "theta" in blocks:
            parts.append(self.model)
        # Algorithm 1 moves one block per round: where c stands still, the class sums are the same.
        if self.options.lam and (self.options.schedule != "rbcd" or "c" in blocks):
            parts.append(self.coupling)
        if self._releases(round_):
            parts.append(self.membership)
        return tuple(parts)

    def _releases(self, round_: int) -> bool:
        last = round_ == self.setting.rounds - 1
        return {"never": False, "last": last, "always": True}[self.options.release_membership]

    def down(self, round_: int) -> tuple[Part, ...]:
        """θ and the sums of the class memberships."""
        return (self.model, self.coupling) if self.options.lam else (self.model,)

    def by_class(self, round_: int) -> tuple[str, ...]:
        """The class sums: of a class that one silo alone has, they are its h and c."""
        return tuple(part.name for part in self.up(round_) if part == self.coupling)

    # The silo half.

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The job's extractor, K canonical models instead of its classifier, and the membership."""
        return {"extractor": self.setting.build()["extractor"], **self._mixed()}

    def _mixed(self) -> dict[str, nn.Module]:
        # Without ``hidden``, canonical models are linear.
        hidden = None
        if self.options.canonical == "mlp":
            hidden = self.options.hidden
        sizes = (self.options.models, self.width, self.setting.outputs, hidden)
        return {
            "canonical": canonical(*sizes, self.mixture, self.setting.seed, "canonical"),
            "membership": Membership(self.options.models),
        }

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """No silo in the class sums yet."""
        # Zero sums: degree and pull of the first round are 0.
        return {
            spec.name: torch.zeros(spec.shape, dtype=torch.float64)
            for spec in self.coupling.tensors
        }

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """Eq. 7 (log-probabilities [B, C]) or Eq. 8 (logits [B, C])."""
        return parts["canonical"](parts["extractor"](x), parts["membership"]())

    def loss(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """The task's losses [B].

        PPFL1's mixture of probabilities is normalised as it stands: its log-likelihood takes no
        second log-softmax.
        """
        scores = self.predict(parts, x)
        if self.mixture == "probabilities":
            return nn.functional.nll_loss(scores, y, reduction="none")
        return self.setting.task.losses(scores, y)

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """θ replaces the silo's own; the class sums are kept for the Laplacian.

        If no class sums came down, the last ones stay.
        """
        fresh = self.replaced(state, delivered, "model")
        return SiloState(fresh.parts, {**state.extra, **delivered.get("coupling", {})})

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """The blocks of this round."""
        made = {"c": self.membership_stage(state, facts), "theta": self.theta_stage()}
        return tuple(made[block] for block in self.blocks(facts.round))

    def effort(self, round_: int) -> Effort:
        """A step on all records for the membership, or its epochs; then θ's epochs."""
        blocks, batches = self.blocks(round_), self.options.membership_batches
        # ``Effort`` counts steps on all records apart from epochs of batches.
        moves_theta, moves_c = "theta" in blocks, "c" in blocks
        epochs = self.setting.epochs * (moves_theta + (moves_c and batches))
        return Effort(epochs=epochs, whole=int(moves_c and not batches))

    def theta_stage(self) -> Stage:
        """Eq. 11: v and U by the job's optimiser, c_i fixed.

        It has no penalty, since the coupling of Eq. 13 concerns only c.
        """
        return Stage(self.theta, self.setting.epochs, self.loss, self.setting.optimiser)

    def membership_stage(self, state: SiloState, facts: Facts) -> Stage:
        """Eq. 14: one mirror step on the gradient over all records, θ fixed.

        ``membership_batches`` takes mini-batch steps for the job's epochs, as the authors' code
        does. The penalty is this silo's share of Eq. 13.
        """
        # "mirror" is Eq. 14; the other rule is a quirk of the authors' code.
        rule: Literal["mirror", "mirror-double-exponential"] = "mirror"
        if self.options.double_exponential:
            rule = "mirror-double-exponential"
        optimiser = Optimiser(self.options.membership_lr, rule=rule, floor=self.options.floor)
        h, b = proportions(facts.class_counts), state.extra["b"]
        # From class sums, since W has rank C at most: no other silo's c_j is needed.
        degree, pull = h @ b, h @ state.extra["m"]  # d_i, Σ_j w_ij c_j [K]
        lam = self._lam(state)
        # The authors' code has the gradient λ D C: no −W, and not the factor 2 of Eq. 13.
        if self.options.no_affinity:
            pull, lam = torch.zeros_like(pull), lam / 2
        context = {"degree": degree, "pull": pull, "lam": torch.tensor(lam, dtype=torch.float64)}
        whole = not self.options.membership_batches
        epochs = 1 if whole else self.setting.epochs
        # At λ = 0 the penalty would only cost time.
        penalty = self.penalty if lam else None
        return Stage(
            ("membership",), epochs, self.loss, optimiser, penalty, context, full_batch=whole
        )

    def _lam(self, state: SiloState) -> float:
        """λ as it enters Eq. 13; 0 under "mean_degree" before there are any class sums.

        Divided by the mean degree, λ means the same for any number of silos.
        """
        lam, b = self.options.lam, state.extra["b"]
        if self.options.lam_scale == "literal":
            return lam
        # Before the first class sums the mean degree is 0, which cannot divide.
        if not b.any():
            return 0.0
        # d_i grows with N, and Σ_i d_i / N = ‖b‖² / N is the mean degree.
        return lam * float(state.extra["silos"] / b.square().sum())

    def penalty(self, parameters: Mapping[str, Tensors], context: Tensors) -> Tensor:
        """λ times silo i's share of Eq. 13."""
        c = parameters["membership"]["c"].double()
        return context["lam"] * coupling_term(c, context["degree"], context["pull"])

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The parts that this round's wire list names.

        ``coupling`` holds h_i, h_i c_iᵀ and the number 1. In the clear the coordinator sees all of
        it.
        """
        c, h = state.parts["membership"]["c"], proportions(facts.class_counts)
        sums = {
            "b": h,
            "m": torch.outer(h, c.double()),
            "silos": torch.ones((), dtype=torch.float64),
        }
        # a_i of Eq. 12.
        weight = float(facts.samples) if self.options.weights == "samples" else 1.0
        contributions = {
            "model": Contribution(self.flat(state, *self.theta), weight),  # Eq. 12
            "coupling": Contribution(sums),
            "membership": Contribution({"c": c}),
        }
        return self.for_round(contributions, facts.round)

    # The coordinator half: ``memberships`` [N, K] holds what was released, rows of zeros for silos
    # that gave none.

    def begin(self) -> CoordinatorState:
        """No membership released; no state at all where none ever is."""
        if self.options.release_membership == "never":
            return {}
        return {"memberships": torch.zeros(len(self.setting.silos), self.options.models)}

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Publish the sums, and keep the memberships that were released."""
        combined = super().combine(state, round_, cohort, results)
        if "membership" not in results:
            return combined
        rows = state["memberships"].clone()
        # Silos that were away keep the row that they released before.
        rows[self.numbers(cohort)] = results["membership"]["c"]
        return Combined({"memberships": rows}, combined.published)


def proportions(class_counts: Tensor) -> Tensor:
    """h: label counts divided by their Euclidean norm [C], so that h_i·h_j is the cosine of two
    silos' labels.
    """
    counts = class_counts.double()
    # If no class of a silo is shown, counts are zeros: clamped, h is 0 and not NaN.
    return counts / counts.square().sum().sqrt().clamp(min=1.0)


def coupling_term(c: Tensor, degree: Tensor, pull: Tensor) -> Tensor:
    """Silo i's share of Eq. 13 without λ: d_i ‖c‖² − 2 c·Σ_j w_ij c_j^t.

    Its gradient at c_i^t is 2 [L C^t]_i, in which silo i's own share of the sums cancels.
    """
    value: Tensor = degree * c.square().sum() - 2 * c @ pull
    return value
