"""pFedSim: feature extractors mixed among silos whose classifiers agree.

Tan, Zhou, Liu, Wang, Yu, "pFedSim: similarity-aware model aggregation towards personalized
federated learning", 2023, arXiv:2305.15706, Algorithm 2.

A model is θ = φ ∘ ω with feature extractor ω and classifier φ of rows φ_c, one per class. Φ is the
paper's similarity matrix, ``weights`` of the coordinator's state; φ is the classifier alone. T_g =
floor(ρ T) rounds of FedAvg (generalisation) are followed by rounds in which only ω travels
(personalisation):

    (2) sim(φ_i, φ_j) = (1/C) Σ_c cos(φ_{i,c}, φ_{j,c})
    (3) Φ_ij = -(1/C) Σ_c log[1 - max(0, φ_{i,c}·φ_{j,c} / (‖φ_{i,c}‖ ‖φ_{j,c}‖ + ε))],  Φ = I
        before the first pair
    (4) ω_i ← Σ_j Φ_ij ω_j / Σ_j Φ_ij over all silos j with their last ω_j,   φ_i ← φ_i

Readings, where the paper leaves a choice:
- The bias of the classifier takes no part in the similarity (as in the code).
- A silo without a neighbour of positive weight keeps its own extractor, as in the code; Eq. 4 says
  the same. So a silo that has not given an extractor since the phase changed is in no sum: Φ is 0
  between it and all others until both gave in one round. It starts from the last generalisation
  model when it first trains.
- Batch norm's weight and bias are parameters of ω. Its running statistics follow the job's
  ``model.buffers``: "local" ones stay at each silo in both phases, as in the authors' code of the
  paper's time; "global" ones are averaged and mixed with ω, as that code does by default today.

Deviations, of which ``published`` takes back the first two:
- ``similarity = "mean"``, the default, is the form of the authors' code and published figures: (3')
  Φ_ij = -log[1 - max(0, sim(φ_i, φ_j))], clamp and log after the mean over classes. It also
  discloses less: one number per pair. ``similarity = "per_class"`` is Eq. 3 as printed, one number
  per pair and class.
- ``self_weight`` is Φ_ii. Left out it is 9.2103 = -log(1 - 0.9999) for "mean" (the code's value)
  and 1 for "per_class" (the paper's identity matrix).
- Cosines are cut to at most 1 - 1e-4 before the log. Right after the generalisation phase all
  classifiers are nearly equal, cos → 1 and Eq. 3 has no bound; cut, no neighbour weighs more than
  9.2103.
- ε = 1e-8 stands at the norm and not at the product of norms.

For security:
- Rows cross as unit vectors φ_c / max(‖φ_c‖, ε), so that the coordinator sees cosines only.

With ``security.mix = "directed"`` Eq. 4 has another form. Rows are mixed by sums for one silo each,
which take weights that are known before the round, over what is given in it
(security/blind/directed_mix.py):

- Φ is one round old. Extractors of round t are mixed by the likeness of the rounds before t; the
  plain form takes in round t's too.
- Eq. 4 is over the silos that gave in round t alone. Where a round draws some of the silos, the
  last extractors of the others take no part.
- The first round of the phase gives no extractor: no pair was compared, Φ = I, and each silo keeps
  its own. Nobody gets a row for its first round of the phase, either.
- The row is over the others. A silo keeps the part Φ_ii / Σ_j Φ_ij of its own extractor, which
  leaves it in no row.
- A row that leans on one silo for more than half, or on few, is not made (security rules 4 and
  5), and that silo keeps its own extractor.
- The specification of a round names the weights of all its rows, so each silo of the round reads
  who is like whom.

On ten silos of the digits this form costs 0.1 to 0.5 points of accuracy, where seeds differ by 2 to
4, and five times the bytes of one upload (benchmarks/directed_rows.py; figures in
docs/threat-model.md).

Wire list:

===============  ====  =========================================================  ===============
phase            way   part                                                       exchange
===============  ====  =========================================================  ===============
generalisation   up    ``model``: ω and φ                                         Sum, weighted
                                                                                  by samples
generalisation   down  ``model``                                                  -
personalisation  up    ``extractor``: ω                                           Mix
personalisation  up    ``rows``: [1, C·d] for "mean", [C, d] for "per_class"      Gram
personalisation  down  ``extractor``: the silo's row of Eq. 4                     -
personalisation  down  ``model``: once, to a silo that has not trained in it yet  -
===============  ====  =========================================================  ===============

Directed, ``extractor`` goes up from the second round of the phase on, and comes down as mail
(``method.Post``).

A silo's model in the end is the one it trained last, as in the authors' evaluation. Under
differential privacy both parts are noised together in both phases, and the rows, computed of what
was, have no noise of their own.
"""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from math import floor, log
from types import MappingProxyType
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from ...errors import LocalError
from ...files.documents import Strict
from ..course import Facts, SiloState, Stage
from ..exchange.delivery import (
    KEEP,
    Combined,
    CoordinatorState,
    Delivery,
    Latest,
    Mail,
    Post,
    Results,
    Row,
    positive_weights,
)
from ..exchange.parts import MIX_BITS, Contribution, Gram, Kind, Mix, Part, TensorSpec, own_weight
from ..method import Method, Setting

# A floor for each norm, not for the product of two (see the top of this file).
EPSILON = 1e-8  # ε of Eq. 3
# Φ of Eq. 3 grows without bound as cos → 1.
LARGEST_COSINE = 1 - 1e-4
CODE_SELF_WEIGHT = -log(1 - 0.9999)  # 9.2103
PAPER_SELF_WEIGHT = 1.0
LARGEST_WEIGHT = -log(1 - LARGEST_COSINE)  # of a neighbour: 9.2103
SHARE_TOLERANCE = 1e-6  # by which a part of 1 may miss its bound: float64 of two machines


class PFedSimOptions(Strict):
    """Options of pFedSim."""

    rho: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    """Share of the rounds that the generalisation phase takes."""
    similarity: Literal["mean", "per_class"] = "mean"
    """One number per pair of silos, as in the authors' code, or per pair and class, as in Eq. 3.

    They tell the coordinator of the labels, in a blind job too. From "per_class" it reads which
    silo holds which class (AUC 0.97 to 1.00), from "mean" less: which silos have similar shares of
    labels (rank correlation 0.5 to 0.87).
    """
    self_weight: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = None
    """Φ_ii; left out, 9.2103 for "mean" and 1 for "per_class"."""


class PFedSim(Method):
    """Extractors mixed among silos whose classifiers agree."""

    name = "pfedsim"
    version = 1
    sums_steps = True
    options_model = PFedSimOptions
    published = MappingProxyType({"similarity": "per_class"})
    options: PFedSimOptions
    addressed = ("extractor",)
    directed_for = "members"

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        # ρ as it is written: 0.29·100 is 29, in floats 28.999…
        rho = Fraction(str(self.options.rho))
        self.warmup = floor(rho * setting.rounds)  # T_g
        if setting.cohort_size == 1 and self.warmup < setting.rounds:
            raise LocalError(
                f"pfedsim: a round draws 1 of {len(setting.silos)} silos, so no two are ever"
                " compared and no extractor is mixed; raise participation or min_cohort so that 2"
                " are drawn, or set rho = 1"
            )
        weight = self.header_rows(by_position=True)
        classes, width = weight.shape
        rows = (1, classes * width) if self.options.similarity == "mean" else (classes, width)
        self.model = self.shared("model", Kind.WHOLE_MODEL, "extractor", "classifier")
        self.extractor = Part("extractor", Kind.BACKBONE, Mix(), self.flat_specs("extractor"))
        # A directed row comes down as mail, with the share k that the silo keeps of its own.
        self.mail = replace(self.extractor, tensors=(*self.extractor.tensors, KEEP))
        self.rows = Part(
            "rows", Kind.CLASSIFIER_ROWS, Gram(), (TensorSpec("rows", weight.dtype, rows),)
        )

    @property
    def self_weight(self) -> float:
        """Φ_ii."""
        if self.options.self_weight is not None:
            return self.options.self_weight
        return CODE_SELF_WEIGHT if self.options.similarity == "mean" else PAPER_SELF_WEIGHT

    def up(self, round_: int) -> tuple[Part, ...]:
        """The model in the generalisation phase, then extractor and classifier rows."""
        if round_ < self.warmup:
            return (self.model,)
        # Directed rows take weights from the rounds before; at first no pair has been compared.
        if self.setting.directed and round_ == self.warmup:
            return (self.rows,)
        return (self.extractor, self.rows)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The model until the phase changes; then the mixed extractor, or a newcomer's model."""
        model = (self.model,) if self.warmup else ()
        # A mixture needs a round before it in which extractors went up.
        if round_ <= self.warmup + self.setting.directed:
            return model
        return (self.mail if self.setting.directed else self.extractor, *model)

    # The silo half.

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """The delivery replaces the silo's own values; a directed row is mixed with them."""
        mailed = delivered.get("extractor", {}) if self.setting.directed else {}
        if not mailed:
            return super().deliver(state, delivered, facts)
        taken = self.replaced(state, delivered, "model")
        return self.mailed(taken, mailed, "extractor")  # Eq. 4

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """ClientUpdate of Algorithm 2: both parts together, in both phases."""
        return (self.stage("extractor", "classifier"),)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The model for FedAvg, or the extractor for Eq. 4 and the classifier rows for Eq. 3."""
        if facts.round < self.warmup:
            model = self.flat(state, "extractor", "classifier")
            return {"model": Contribution(model, float(facts.samples))}

        # Unit vectors: the coordinator needs cosines, and norms would tell it more.
        rows = state.parts["classifier"]["weight"].double().flatten(1)  # [C, d]
        unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=EPSILON)
        if self.options.similarity == "mean":
            # ⟨v_i, v_j⟩ = (1/C) Σ_c cos_c: Eq. 2 in one product
            unit = (unit / len(unit) ** 0.5).reshape(1, -1)
        (spec,) = self.rows.tensors
        contributions = {
            "extractor": Contribution(self.flat(state, "extractor")),
            "rows": Contribution({spec.name: unit.to(state.parts["classifier"]["weight"].dtype)}),
        }
        return self.for_round(contributions, facts.round)

    # The coordinator half. ``weights`` holds Φ of Eq. 3, 0 for pairs that never trained in the same
    # round; ``gave`` marks the silos that have trained in the personalisation phase.

    def begin(self) -> CoordinatorState:
        """No pair seen; the diagonal is not stored, it is ``self_weight``.

        ``weights`` is [N, N] in float64, ``gave`` [N] int64.
        """
        n = len(self.setting.silos)
        return {
            "weights": torch.zeros(n, n, dtype=torch.float64),
            "gave": torch.zeros(n, dtype=torch.int64),
        }

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """FedAvg, then new similarities for the pairs of this cohort; older entries stay."""
        if round_ < self.warmup:
            return super().combine(state, round_, cohort, results)
        # ``index`` are the rows and columns of this cohort.
        index = torch.tensor(self.numbers(cohort))
        weights, gave = state["weights"].clone(), state["gave"].clone()
        weights[index[:, None], index] = self.similarities(results["rows"]["gram"])
        # ``weights`` puts ``self_weight`` on the diagonal; no cosine belongs there.
        weights.fill_diagonal_(0)
        gave[index] = 1
        combined = Combined({"weights": weights, "gave": gave})
        # Directed sums take weights that were known before the round: those of the old state.
        if self.setting.directed and self.extractor in self.up(round_):
            return replace(combined, posts=self._posts(state, cohort))
        return combined

    def _posts(self, state: CoordinatorState, cohort: tuple[str, ...]) -> tuple[Post, ...]:
        """Eq. 4 over this round's cohort, by the weights that were known before it."""
        posts = []
        for silo in cohort:
            weights = self.member_weights(state, silo)
            # The row has only the others: the silo adds its own extractor by ``keep``.
            others = {other: weights.get(other, 0.0) for other in cohort if other != silo}
            if not any(others.values()):
                continue  # no neighbour: Eq. 4 gives ω_i, which the silo has
            own = own_weight(weights.get(silo, 0.0), others.values())
            if own < 1 << MIX_BITS:  # else nothing of the others is left
                posts.append(Post("extractor", silo, {**others, silo: 0.0}, keep=own / 2**MIX_BITS))
        return tuple(posts)

    def similarities(self, gram: Tensor) -> Tensor:
        """Φ of a cohort of n silos [n, n], from inner products [groups, n, n].

        There is one group for "mean", and one per class for "per_class".
        """
        # Norms are 1 from an honest silo; a longer vector must not make it likelier to be mixed.
        norms = gram.diagonal(dim1=1, dim2=2).clamp(min=EPSILON**2).sqrt()
        # Cut before the log: Eq. 3 has no bound as cos → 1, where classifiers still are equal.
        cosines = (gram / (norms[:, :, None] * norms[:, None, :])).clamp(0, LARGEST_COSINE)
        # Eq. 3; Eq. 3' where one group has the mean cosines of Eq. 2
        return -torch.log(1 - cosines).mean(0)

    def weights(self, state: CoordinatorState, silo: str) -> dict[str, float]:
        """Φ_ij of one silo i for the silos j of positive weight, itself included, in job order.

        The silo's own weight is ``self_weight``.
        """
        here = self.number(silo)
        row = state["weights"][here].clone()
        row[here] = self.self_weight
        return positive_weights(self.setting.silos, row)

    def member_weights(self, state: CoordinatorState, recipient: str) -> dict[str, float]:
        """Φ_ij of one silo i, itself included, as the rounds so far have it."""
        return self.weights(state, recipient)

    def mail_fault(self, round_: int, silo: str, shares: Mapping[str, float], keep: float) -> str:
        """Check ``keep``: Φ_ii follows from the options, and no Φ_ij is above 9.2103.

        Similarities are known to the coordinator alone; shares that are too unequal are refused
        elsewhere.
        """
        own = self.self_weight
        # No Φ_ij is above 9.2103, so the others add up to at most 9.2103 / (the largest share).
        least = own / (own + LARGEST_WEIGHT / max(shares.values()))
        most = 1.0 if own else 0.0
        if least - SHARE_TOLERANCE <= keep <= most + SHARE_TOLERANCE:
            return ""
        return (
            f"says keep = {keep:.6f} of round {round_}, by self_weight = {own:g} it is {least:.6f}"
            f" to {most:g}"
        )

    def deliveries(self, state: CoordinatorState, round_: int, silo: str) -> tuple[Delivery, ...]:
        """Eq. 4 for a silo that has trained in this phase, else the last generalisation model."""
        # Its extractor is not in Eq. 4 before it has trained in this phase.
        if not state["gave"][self.number(silo)]:
            return (Latest("model"),) if self.warmup else ()
        if self.setting.directed:
            return (Mail("extractor"),) if self.mail in self.down(round_) else ()
        weights = self.weights(state, silo)
        if not weights.keys() - {silo}:
            return ()  # no neighbour: Σ_j Φ_ij ω_j / Σ_j Φ_ij = ω_i, which the silo has
        return (Row("extractor", weights),)  # Eq. 4
