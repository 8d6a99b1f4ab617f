"""FedSimSup: a private supervisor, and an inter-learning model that learns while its silo is away.

Liu, Li, Liu, Jin, Lyu, Wu, Yu, "Personalized federated learning under local supervision", Algorithm
1.

Silo i holds an inter-learning model θ_i (the job's [model], the same architecture everywhere) and a
supervisor s_i of any architecture, which never leaves. In round t = 1..T the K silos of N(t) train,
the others are away:

    (3)  logits_i(x) = q_{θ_i}(x) + q_{s_i}(x), one cross-entropy over the sum
    (4)  s_i ← SGD over τ_s epochs, θ_i frozen;   (5) then θ_i ← SGD over τ_θ epochs, s_i frozen
    (6)  θ_i^{t+1} = θ_i^t
         for i in N(t)
    (7)  θ_i^{t+1} = (1 − α_i^t) θ_i^t + α_i^t Σ_j s_ij θ_j^t / Σ_j s_ij, sums over j in N(t)
         for i not in N(t)
    (8)  α_i^t = λ_i^t β^t
    (9)  λ_i^t = M / (M + K m_i), M = Σ_j m_j over N(t), m the training records
    (10) β^t = 1 for t < C T^γ, else (C T^γ / t)²

and s_ij is the cosine of the two silos' label proportions.

Readings, where the paper leaves a choice:
- Where Σ_j s_ij = 0 (no label in common) the paper divides by zero. Here θ_i stays; ``unmatched``
  of the coordinator's state counts such rounds silo by silo, those that fewer than three silos
  completed included, and in a blind job those whose row would show one silo too much of another.
- N(t), M and K are those that completed the round and the census; who missed the census neither
  learns nor teaches. m and the proportions are of the training records.
- All θ_i start equal (Algorithm 1 does not say); averaging independently initialised networks
  destroys them. The supervisors start apart.
- Sizes of θ and s, τ_s, τ_θ, rates and batch sizes are not in the paper's text; the defaults here
  are not from it. τ_s + τ_θ are the job's epochs unless options say otherwise: τ_s is 1, τ_θ the
  rest, at least 1.
- θ's buffers (running statistics, where the job's model has batch norm) stay at each silo; with
  ``model.buffers = "global"`` they belong to θ in Eq. 7.
- The ablation of Fig. 3, a direct average as in FedAvg in place of Eq. 7, is ``similarity =
  "samples"`` (s_ij = m_j; no proportions leave) with ``alpha = "one"``.

Deviations, each of which an option takes back unless it says otherwise:
- ``schedule = "paper"`` is C = 40, γ = 3/7 (the paper's best pair), under which β stays 1 in any
  job of fewer than 637 rounds. ``schedule = "scaled"``, the default, keeps C T^γ at the same share
  of the job as in the paper's 1,000 rounds: C = 40 (T/1000)^(1 − γ), so decay begins at 0.772 T and
  β^T = 0.596 for every T, and T = 1000 is the paper.
- Supervisors of several architectures are assigned in turn by job order; in the paper each silo
  draws one. No option draws.
- The paper's Transformer is pre-trained. No such weights exist here: ours (supervisors.py) is small
  and trains from scratch, so the paper's FedSimSup-T is no yardstick for it. A silo that has
  weights for its supervisor names their file in its own configuration (``[[weights]]``); a job
  holds no paths.

For security:
- Participation that cannot work is refused. Where all silos train in every round, Eq. 6 alone
  applies and nothing is ever exchanged; with K < 3 an absent silo would get next to a copy of one
  silo's model. A round that fewer than three silos complete posts nothing. One participant alone
  with labels in common is still the whole row. The paper has no such bounds: ``cohorts = "any"``
  takes them away, in a simulation. With K = 1 an absent silo then gets the very model of another.
- θ_i lives at its silo, where the paper's server holds all: an absent silo applies its rounds of
  Eq. 7 in one step.
- Where the job is blind it declares m, and for "labels" the class counts, of all silos: the census
  gives metrics alone.
- With ``security.mix = "directed"`` s_ij is made whole over the silos that are drawn: where some of
  these do not complete the round, the row is over the others by the same numbers. Who is drawn and
  lost has no row of that round.

Wire list:

=======  ====  =========================================================================  ========
round    way   part                                                                       exchange
=======  ====  =========================================================================  ========
0        up    ``census``: samples [], with similarity "labels" also proportions [C];     Each
               nothing where the job declares them
1..T     up    ``theta``: θ_i after training                                              Mix
2..T+1   down  ``theta`` with ``@keep``: Eq. 7 over all rounds since the silo last gave   -
=======  ====  =========================================================================  ========

So in the clear the coordinator sees every θ_j, label proportions and sample count. Blind, it sees
none of the θ_j. Since the cosine has rank C, Eq. 7 also follows from C class sums B_c = Σ_j h_jc
θ_j (h_j: proportions of length one) that silos alone would read. They are not used: where class
counts are declared, as cohorts that vary demand, they hide nothing that the mix shows, give each
silo C combinations of the K models in place of one row, and take C times the bytes; where they are
secret, sums over cohorts that vary tell them to whoever reads these, silos too, and a fixed cohort
of all silos exchanges nothing (Eq. 6).

A silo's model in the end is the one delivered last: all silos are evaluated after the last round's
Eq. 7. For a participant of the last round that is the model it trained. Under differential privacy
both passes count, τ_s + τ_θ epochs, and the supervisor is clipped and noised too: θ's gradients
pass through it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from operator import mul
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor, nn

from ....errors import LocalError
from ....files.documents import Strict
from ...course import Effort, Facts, Parts, SiloState, Stage
from ...exchange.delivery import (
    KEEP,
    Combined,
    CoordinatorState,
    Delivery,
    Mail,
    Post,
    Results,
    positive_weights,
)
from ...exchange.parts import Contribution, Each, Kind, Mix, Part, Tensors, TensorSpec
from ...method import Method, Setting
from .supervisors import build_supervisor, supervisor_fault

# The paper's best pair (C, γ) and its number of rounds T; ``scaled_c`` fits C to other T.
PAPER_C, PAPER_GAMMA, PAPER_ROUNDS = 40.0, 3 / 7, 1000
FEWEST = 3  # participants whose mean an absent silo may get, unless the job allows any number
# Shares may differ by so much: rows have integer weights of 32 bits, and two machines two float64.
SHARE_TOLERANCE = 1e-6
PROPORTIONS_TOLERANCE = 1e-6  # bound on how far a silo's label proportions miss a sum of one

Supervisor: TypeAlias = Literal["lenet", "lenet-wide", "cnn", "transformer", "mlp"]
Epochs: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=10_000)]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class FedSimSupOptions(Strict):
    """Options of FedSimSup; only ``schedule = "paper"`` holds values from the paper."""

    supervisor: Annotated[tuple[Supervisor, ...], BeforeValidator(_listed), Field(min_length=1)] = (
        "lenet",
    )
    """One architecture, or several that are assigned to the silos in turn, in job order."""
    tau_s: Epochs = 1
    """Epochs on the supervisor, τ_s."""
    tau_theta: Epochs | None = None
    """Epochs on the inter-learning model, τ_θ; default: the job's epochs that τ_s leaves."""
    schedule: Literal["scaled", "paper"] = "scaled"
    """C and γ of Eq. 10; the paper's own never decay in a job of fewer than 637 rounds."""
    c: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    """C of Eq. 10, together with ``gamma`` instead of the schedule's own pair."""
    gamma: Annotated[float, Field(gt=0, lt=0.5, allow_inf_nan=False)] | None = None
    """γ of Eq. 10; Theorem 1 wants it below one half."""
    similarity: Literal["labels", "samples"] = "labels"
    """s_ij: the cosine of label proportions, or m_j as in FedAvg."""
    cohorts: Literal["safe", "any"] = "safe"
    """Rounds of three silos or more, but not of all; or of any number, as the paper allows."""
    alpha: Literal["eq8", "one"] = "eq8"
    """α of Eq. 7: of Eq. 8, or 1, by which an absent silo keeps nothing of its own model."""

    @model_validator(mode="after")
    def _pair(self) -> "FedSimSupOptions":
        if (self.c is None) != (self.gamma is None):
            raise ValueError(
                "c and gamma go together: give both, or neither for the schedule's own"
            )
        if self.c is not None and self.schedule == "paper":
            raise ValueError(
                'schedule = "paper" has its own c and gamma; leave them out, or the schedule'
            )
        return self


class FedSimSup(Method):
    """A private supervisor, and a model that learns from similar silos while its own is away."""

    name = "fedsimsup"
    version = 2  # 2: τ_s + τ_θ are the job's epochs by default
    needs_classes = "compares what models say of classes"
    by_rounds = "lets mixing decay after a share of the rounds"
    options_model = FedSimSupOptions
    published = MappingProxyType({"schedule": "paper"})
    options: FedSimSupOptions
    product = "delivered"
    addressed = ("theta",)
    loadable = ("supervisor",)
    census = True
    directed_for = "away"

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        # A job that declares counts is blind, and needs no census of them.
        self.declared, any_number = bool(setting.counts), self.options.cohorts == "any"
        if any_number and self.declared:
            raise LocalError(
                'method fedsimsup: cohorts = "any" would show silos each other\'s models, and a'
                " blind job hides them; take it out"
            )
        # With all silos in each round only Eq. 6 applies, and nothing is exchanged.
        fault = participation_fault(setting.cohort_size, len(setting.silos))
        if fault and not any_number:
            raise LocalError(f"method fedsimsup: {fault}")
        self.fewest = {"safe": FEWEST, "any": 1}[self.options.cohorts]
        for name in self.options.supervisor:
            if fault := supervisor_fault(name, setting.input):
                raise LocalError(f"method fedsimsup: supervisor {name!r} {fault}")
        # Both passes together take the job's epochs, as the stages of other methods do.
        self.tau_theta = self.options.tau_theta or self.epochs_left(self.options.tau_s)
        self.labels = self.options.similarity == "labels"
        census = [TensorSpec("samples", "int64", ())]
        if self.labels:
            census.insert(0, TensorSpec("proportions", "float64", (setting.outputs,)))
        # ``Each``, since Eqs. 7 to 9 need every silo's own numbers.
        self.facts = Part("census", Kind.COUNTS, Each(), tuple(census))
        # θ is the job's whole model, without the supervisor.
        specs = self.flat_specs("extractor", "classifier")
        self.theta = Part("theta", Kind.INTER_LEARNING_MODEL, Mix(), specs)
        # Mail comes down with the factor k of θ ← k·θ + m.
        self.mail = replace(self.theta, tensors=(*self.theta.tensors, KEEP))

    def up(self, round_: int) -> tuple[Part, ...]:
        """The census, then θ; nothing in the census where the job declares its facts."""
        if round_:
            return (self.theta,)
        return () if self.declared else (self.facts,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The mail of Eq. 7 for rounds in which the silo was away, once a round has trained.

        Round 1 is the first that trains, so mail can come down from round 2 on.
        """
        return (self.mail,) if round_ > 1 else ()

    @property
    def compares_labels(self) -> bool:
        """s_ij is a cosine of label proportions.

        With ``similarity = "samples"`` no labels are compared.
        """
        return self.labels

    @property
    def simulated_only(self) -> str:
        """With ``cohorts = "any"``: no policy could tell such rounds from others."""
        if self.options.cohorts == "safe":
            return ""
        return 'cohorts = "any" is for simulations, since a silo may get the very model of another'

    # The silo half.

    def supervisor(self, silo: str) -> str:
        """The architecture of a silo's supervisor.

        Architectures are dealt in turn, in job order.
        """
        names = self.options.supervisor
        return names[self.setting.silos.index(silo) % len(names)]

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """θ in its two parts, equal at all silos, and the silo's own supervisor."""
        s = self.setting
        # The silo's name is in the stream, so supervisors start with different values.
        supervisor = build_supervisor(self.supervisor(silo), s.input, s.outputs, s.seed, silo)
        return {**s.build(), "supervisor": supervisor}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """The sum of the two models' logits."""
        return parts["classifier"](parts["extractor"](x)) + parts["supervisor"](x)  # Eq. 3

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Apply Eq. 7 for all rounds since this silo last contributed: θ ← k·θ + m, in float64.

        The supervisor stays as it is.
        """
        if "theta" not in delivered:
            return state  # Eq. 6, or nobody alike
        return self.mailed(state, delivered["theta"], "extractor", "classifier")  # Eq. 7

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """The supervisor under a frozen θ, then θ under a frozen supervisor; none in the census."""
        if facts.round == 0:
            return ()
        # One loss for both stages: Eq. 3 adds the logits, and the frozen model's are constant.
        loss, optimiser = self.task_loss, self.setting.optimiser
        return (
            Stage(("supervisor",), self.options.tau_s, loss, optimiser),  # Eq. 4, 11
            Stage(("extractor", "classifier"), self.tau_theta, loss, optimiser),  # Eq. 5, 12
        )

    def effort(self, round_: int) -> Effort:
        """Both passes count; nothing in the census.

        A private job pays for τ_s + τ_θ epochs per round (security rule 23).
        """
        if round_ == 0:
            return Effort()
        return Effort(epochs=self.options.tau_s + self.tau_theta)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The census, or θ; the supervisor is in no contribution.

        The census has ``samples`` [] int64 and with "labels" ``proportions`` [C] float64.
        """
        if facts.round:
            return {"theta": Contribution(self.flat(state, "extractor", "classifier"))}
        if self.declared:
            return {}
        census = {"samples": torch.tensor(facts.samples, dtype=torch.int64)}
        if self.labels:
            census["proportions"] = facts.class_counts.double() / facts.samples
        return {"census": Contribution(census)}

    # The coordinator half. ``samples`` is 0 for a silo that missed the census or gave nonsense: it
    # learns from nobody and nobody from it. ``unmatched`` counts the rounds a silo was away and
    # found nobody alike.

    def begin(self) -> CoordinatorState:
        """The job's declarations in the form of a census; zeros for a job without them."""
        silos, n = self.setting.silos, len(self.setting.silos)
        samples, unmatched = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
        shares = torch.zeros(n, self.setting.outputs, dtype=torch.float64)
        if self.declared:
            samples = torch.tensor([self.setting.counts[silo] for silo in silos])
        if self.declared and self.labels:
            by_class = torch.tensor([self.setting.class_counts[silo] for silo in silos])
            # Declared class counts add up to the declared records, so shares add up to 1.
            shares = by_class.double() / samples[:, None]
        state = {"samples": samples, "unmatched": unmatched}
        if self.labels:
            state["proportions"] = shares
        return state

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Keep the census; afterwards post Eq. 7 to every silo that was away.

        Round 0 is the census. An absent silo gets no post if fewer than ``fewest`` silos took part
        or none is similar to it; ``unmatched`` counts these rounds.
        """
        if round_ == 0:
            if self.declared:
                return Combined(state)
            return Combined(self._censused(state, cohort, results["census"]))

        samples = dict(zip(self.setting.silos, state["samples"].tolist(), strict=True))
        # A silo that missed the census has no m_j, and takes no part.
        contributors = [silo for silo in cohort if samples[silo] > 0]
        posts, unmatched = [], []
        for silo in self.setting.silos:
            if silo in cohort:
                continue  # Eq. 6
            # Stays empty if the silo has nobody to learn from; it then counts as unmatched.
            weights: dict[str, float] = {}
            # A row over fewer would be next to a copy of one silo's model.
            if samples[silo] > 0 and len(contributors) >= self.fewest:
                weights = self._alike(state, silo, contributors)
            if not weights:
                unmatched.append(silo)
                continue
            posts.append(self.mixed(round_, silo, samples, contributors, weights))
        return Combined(self.unposted(state, tuple(unmatched)), posts=tuple(posts))

    # Eq. 7 to 10 with the paper's letters: the silos of N(t) took part in round t, K of them with M
    # training records together; silo i, with m_i records, was away.

    def mixed(
        self, t: int, i: str, m: Mapping[str, int], N: Sequence[str], s_i: Mapping[str, float]
    ) -> Post:
        """θ_i ← (1 − α_i) θ_i + α_i Σ_j s_ij θ_j / Σ_j s_ij, as mail for silo i.

        The exchange divides the positive ``s_i`` by their sum.
        """
        M, K = sum(m[j] for j in N), len(N)
        return Post("theta", i, s_i, keep=1 - self.alpha(t, M, K, m[i]))  # Eq. 7

    def alpha(self, t: int, M: float, K: int, m_i: int) -> float:
        """α_i^t; 1 where the job asks for a direct average.

        λ_i is 1/2 if the silo has as many records as the participants on average.
        """
        lambda_i = M / (M + K * m_i)  # Eq. 9
        return 1.0 if self.options.alpha == "one" else lambda_i * self.beta(t)  # Eq. 8

    def beta(self, t: int) -> float:
        """β^t by the job's C, γ and T."""
        T = self.setting.rounds
        C = PAPER_C if self.options.schedule == "paper" else scaled_c(T)
        return beta(t, T, self.options.c or C, self.options.gamma or PAPER_GAMMA)  # Eq. 10

    def unposted(self, state: CoordinatorState, silos: tuple[str, ...]) -> CoordinatorState:
        """Count a silo for which no row was made as one that is similar to nobody.

        In a blind job no row is made that would show too much of one silo.
        """
        unmatched = state["unmatched"].clone()
        unmatched[self.numbers(silos)] += 1
        return {**state, "unmatched": unmatched}

    def deliveries(self, state: CoordinatorState, round_: int, silo: str) -> tuple[Delivery, ...]:
        """The mail that was posted to this silo.

        A silo without mail gets nothing.
        """
        return (Mail("theta"),) if self.down(round_) else ()

    def similarities(
        self, state: CoordinatorState, silo: str, contributors: list[str]
    ) -> dict[str, float]:
        """The positive s_ij of one silo i over the participants j."""
        own, others = self.number(silo), self.numbers(contributors)
        if self.labels:
            # ``normalize`` leaves zeros as they are: a silo that missed the census gets cosine 0.
            unit = nn.functional.normalize(state["proportions"], dim=1)  # [n, C]
            row = unit[others] @ unit[own]  # cosines
        else:
            # The ablation of Fig. 3: s_ij = m_j, plain averaging.
            row = state["samples"][others].double()
        return positive_weights(contributors, row)

    def declared_similarities(self, silo: str, contributors: Sequence[str]) -> dict[str, float]:
        """The positive s_ij by the job's declarations."""
        # Whole numbers and one root give the same bits on every machine: silos compute the row
        # again and compare it with the coordinator's.
        counts, by_class = self.setting.counts, self.setting.class_counts
        if not self.labels:
            return {contributor: float(counts[contributor]) for contributor in contributors}
        own = by_class[silo]
        found: dict[str, float] = {}
        for contributor in contributors:
            other = by_class[contributor]
            # Without a label in common the product is 0, and the silo is not in the row.
            if product := _dot(own, other):
                found[contributor] = product / sqrt(_dot(own, own) * _dot(other, other))
        return found

    def row_weights(self, round_: int, recipient: str) -> Mapping[str, float]:
        """s_ij over the silos that are drawn for the round.

        They are empty in the census, and in a job that declares no counts.
        """
        if not self.declared or round_ == 0:
            return {}
        return self.declared_similarities(recipient, self.setting.drawn(round_))

    def _alike(
        self, state: CoordinatorState, silo: str, contributors: list[str]
    ) -> dict[str, float]:
        if self.declared:
            return self.declared_similarities(silo, contributors)
        return self.similarities(state, silo, contributors)

    def mail_fault(self, round_: int, silo: str, shares: Mapping[str, float], keep: float) -> str:
        """Check mail by Eq. 7 to 10, computed again from the counts that the job declares."""
        if not self.declared:
            return ""
        others = [other for other in self.setting.silos if other != silo]
        alike = self.declared_similarities(silo, others)
        if strange := sorted(shares.keys() - alike.keys()):
            return f"mixes {', '.join(strange)}, which have nothing in common with {silo!r}"
        if fault := _share_fault(shares, alike):
            return fault

        # Participants with no label in common count in M and K, but are in no row: so the silo does
        # not know which of them took part, and ``keep`` only as a range.
        counts = self.setting.counts
        unlike = [counts[other] for other in others if other not in alike]
        means = mean_range([counts[contributor] for contributor in shares], unlike)
        # α depends on M / K alone and grows with it: the smallest mean gives the largest ``keep``.
        most, least = (1 - self.alpha(round_, mean, 1, counts[silo]) for mean in means)
        if least - SHARE_TOLERANCE <= keep <= most + SHARE_TOLERANCE:
            return ""
        return (
            f"says keep = {keep:.6f} of round {round_}, by the declared counts it is {least:.6f} to"
            f" {most:.6f}"
        )

    def _censused(
        self, state: CoordinatorState, cohort: tuple[str, ...], census: Tensors
    ) -> CoordinatorState:
        index = torch.tensor(self.numbers(cohort))
        # Without records there are no proportions, and no weight.
        sane = census["samples"] > 0
        kept = {name: tensor.clone() for name, tensor in state.items()}
        if self.labels:
            # A census comes from outside: only proportions have the cosines of Eq. 7.
            shares = census["proportions"]
            sane &= ((shares >= 0) & shares.isfinite()).all(1)
            # Rounding may make the sum of proportions miss 1.
            sane &= (shares.sum(1) - 1).abs() <= PROPORTIONS_TOLERANCE
            kept["proportions"][index] = torch.where(sane[:, None], shares, 0.0)
        kept["samples"][index] = torch.where(sane, census["samples"], 0)
        return kept


def participation_fault(cohort: int, silos: int) -> str:
    """Why a cohort of this size among so many silos cannot work; empty if it can.

    The text says which keys of the job to change.
    """
    if cohort >= silos:
        return (
            f"all {silos} silos train in every round, so none is ever away and nothing would be"
            f" exchanged (Eq. 6, 7); with {FEWEST + 1} silos or more, lower participation or"
            f" min_cohort so that at least {FEWEST} train"
        )
    if cohort < FEWEST:
        return (
            f"{cohort} of {silos} silos train in a round, an absent silo would get next to a copy"
            f" of one model; raise participation, or min_cohort to {FEWEST}; a simulation may say"
            ' cohorts = "any"'
        )
    return ""


def scaled_c(rounds: int) -> float:
    """C = 40 (T/1000)^(1 − γ), γ = 3/7, so that C T^γ = 0.772 T as at the paper's T = 1000.

    ``rounds`` is T, the number of rounds that train.
    """
    share: float = (rounds / PAPER_ROUNDS) ** (1 - PAPER_GAMMA)
    return PAPER_C * share


def beta(t: float, T: int, C: float, gamma: float) -> float:
    """β^t for t = 1..T: above 0 and at most 1."""
    onset: float = C * T**gamma
    return 1.0 if t < onset else (onset / t) ** 2  # Eq. 10


def _dot(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(map(mul, one, other))


def mean_range(counts: list[int], others: list[int]) -> tuple[float, float]:
    """The least and the most that a mean can be over ``counts`` and any of the others."""
    # The extremes add the smallest others, or the largest, one after another.
    means = []
    for ordered in (sorted(others), sorted(others, reverse=True)):
        total = sum(counts)
        means.append(total / len(counts))
        for number, count in enumerate(ordered, len(counts) + 1):
            total += count
            means.append(total / number)
    return min(means), max(means)


def _share_fault(shares: Mapping[str, float], alike: Mapping[str, float]) -> str:
    """A fault in the shares s_ij / Σ_j s_ij of a row (Eq. 7), or ""."""
    # ``shares`` names only the silos that took part, so s_ij is normalised over them.
    whole = sum(alike[contributor] for contributor in shares)
    for contributor, share in shares.items():
        expected = alike[contributor] / whole
        if abs(share - expected) > SHARE_TOLERANCE:
            return (
                f"gives {contributor!r} a share of {share:.6f}, by the declared counts it has"
                f" {expected:.6f}"
            )
    return ""
