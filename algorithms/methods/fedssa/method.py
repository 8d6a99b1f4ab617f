"""FedSSA: classifier rows averaged class by class among silos of different architectures.

Yi, Yu, Shi, Wang, Liu, Cui, Li, "FedSSA: semantic similarity-based aggregation for efficient
model-heterogeneous personalized federated learning", 2024, arXiv:2312.09006, Algorithm 1.

A model is a feature extractor φ_k of the silo's own architecture and a header θ_k, equal in shape
everywhere, with one row θ_k^s per class s: d weights and a bias. S_k are the classes of which silo
k has training records.

    (3) at the coordinator:  θ^s ← (1/|K_s|) Σ_{k ∈ K_s} θ_k^s,   K_s the silos of the round that
                                                                  hold s
    (4) at silo k, round t:  θ_k^s ← θ^s + μ_t θ_k^s for s ∈ S_k;   θ_k^s stays for s ∉ S_k
        μ_t = μ_0 cos(t π / (2 T_stable)) for t < T_stable, 0 afterwards
    (5), (6)                 φ_k and all of θ_k are trained on the silo's records

Eq. 4 is a sum and not an average: while μ_t > 0, rows of seen classes grow by about 1 + μ_t per
round, held back by training alone. With μ_0 = 0.5 the growth is up to 2-fold for T_stable = 2,
266-fold for 20 and 2.2e5-fold for 45, and the gradients of the extractor grow with it: give a
T_stable well below the number of rounds, and a ``clip`` or a small learning rate.

Readings, where the paper leaves a choice:
- Round 0 of Algorithm 1 fuses θ^{-1} and θ_k^{-1}, which it does not define. Both are the common
  initial header here, as in the authors' code, so seen rows start at 1 + μ_0 times theirs.
- Rows carry their bias, as in the authors' code; the paper counts C x d numbers. Only the last
  layer is the header (section 4.1, the code), where section 3.2 speaks of two layers.
- A class that no silo of the round holds keeps its last global row; the paper leaves it open.
- Silos of one architecture start from equal values, and all from one header; the paper says
  "randomly". In the authors' code silos of one architecture share their live tensors, an error that
  is not copied.
- ``stale_inclusive``, off by default, is the average of the authors' code: over the last header of
  each silo that holds the class, also of those away in this round. A silo counts from its first
  round on (in the code all do from the start, with their initial header). It takes running totals
  of differences, so that sums suffice.
- Defaults: μ_0 = 0.5 and T_stable = 20 are those of the paper's Figure 3, which names no best
  values.

The paper's ablations (Tables 4 and 5) are options, by its names for the two halves:

- ``m1 = false`` averages all rows over all silos of the round, each counted once, whether or not
  they hold the class: the whole header, as LG-FedAvg has it. With M2 that is case B of Table 4.
- ``m2 = "seen"`` replaces the rows of seen classes, θ_k^s ← θ^s: case B of Table 5. μ_0 = 0 does
  the same, and stays for jobs that have it. ``m2 = "all"`` replaces every row, case A. A row that
  no silo held yet, or that is withheld, stays the silo's own.

Deviations: none by default.

For security:
- Every silo sends all C rows, those of unseen classes as zeros under a weight of 0, and gets the
  whole header, so the traffic does not depend on the classes that it holds (the paper's section 4.3
  allows it).
- ``min_holders``, not from the paper: with fewer holders a class is withheld, so that no silo's row
  is published alone; its silos keep their own row. The default, 1, is the paper's. In a blind job
  the rows of such a class are not even summed, by ``security.min_holders`` in its place
  (algorithms/job/class_census.py).

Training as published, for the job file ([P] the paper, [C] the authors' code)::

    [P]  lr = 0.01,  epochs 1 or 10, batch_size 64 to 512, 100 or 500 rounds; no momentum is stated
    [C]  lr = 0.005, momentum = 0.9, weight_decay = 5e-5, batch_size = 512, epochs = 10 (25 if
         heterogeneous), and
         options = { clip = 50.0, mu_0 = 0.5, t_stable = 45 }, t_stable = 2 if heterogeneous,
         stale_inclusive = true

Wire list (C classes, width d), the same in every round:

=====  ====  ==========================================  ===========================================
stale  way   part                                        exchange
=====  ====  ==========================================  ===========================================
no     up    ``rows``: [C, d+1]                          Sum row by row, weighted by presence (0 or
                                                         1)
yes    up    ``deltas``: rows [C, d+1] and presence      Sum, total
             [C], less what the running totals hold of
             this silo
both   down  ``header``: rows [C, d+1], status [C]       -
=====  ====  ==========================================  ===========================================

With ``m1 = false`` the sum of ``rows`` is one mean, and presence is 1 everywhere: no size, weight
or zero that crosses depends on classes, and holders are not counted. In a blind job silos decline
it: a silo that lacks a class keeps its row near the common beginning, so the mean shows the row of
a single holder.

Besides the sums of rows, the coordinator learns the number of holders of each class; in the clear
also which classes each silo holds. A presence above 1 is refused, so no silo stands for several of
``min_holders``; stale-inclusive that holds for the change in one round, not for the sum over
rounds. A silo's model in the end is the one it trained last.

Under differential privacy S_k are the classes of which there seem to be records by the noisy counts
of the job, and the extractor is noised with the header, though it never leaves: the header's
gradients pass through it.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import cos, pi
from types import MappingProxyType
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ....errors import LocalError
from ....files.documents import Strict
from ...course import Facts, SiloState, Stage
from ...exchange.delivery import Combined, CoordinatorState, Results
from ...exchange.parts import WEIGHT, Contribution, Kind, Part, Sum, TensorSpec
from ...method import Method, Setting
from ..common.heterogeneous import Extractors, check_extractors, dealt

# Status of a class: too few holders so far, or its row is an average; 0: no holder.
WITHHELD, PUBLISHED = 1, 2
FORMS: Mapping[bool, Literal["mean", "ratio"]] = {True: "ratio", False: "mean"}  # by m1


class FedSSAOptions(Strict):
    """Options of FedSSA."""

    mu_0: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    """μ_0; 0 replaces the rows of seen classes at once (case B of the paper's Table 5)."""
    t_stable: Annotated[int, Field(strict=True, ge=0, le=1_000_000)] = 20
    """T_stable, in rounds of the job."""
    m1: bool = True
    """M1 of Table 4: average a row over the silos that hold its class; without it, over all."""
    m2: Literal["fuse", "seen", "all"] = "fuse"
    """M2 of Table 5: Eq. 4; or replace the rows of the classes seen (case B), or all (case A)."""
    stale_inclusive: bool = False
    """Average over the last rows of all silos that ever gave, not over those of the round."""
    extractors: Extractors = ()
    """Architectures dealt to the silos in turn, in job order.

    None: the job's model at each silo.
    """
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Largest Euclidean norm of a batch's gradient; the authors' code has 50."""
    min_holders: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 1
    """Fewest silos that hold the class of a published row; not from the paper."""

    @model_validator(mode="after")
    def _no_idle_key(self) -> "FedSSAOptions":
        # Not by what was written: a signed document has all keys.
        mu_0, t_stable = (type(self).model_fields[key].default for key in ("mu_0", "t_stable"))
        if self.m2 != "fuse" and (self.mu_0, self.t_stable) != (mu_0, t_stable):
            raise ValueError(
                f"mu_0 and t_stable do nothing with m2 = {self.m2!r}, which fuses nothing;"
                " take them out"
            )
        if not self.m1 and self.min_holders > 1:
            raise ValueError(
                "min_holders counts the silos that hold a class, and m1 = false averages over all;"
                " leave min_holders out"
            )
        return self


class FedSSA(Method):
    """Classifier rows averaged class by class; extractors never leave and may differ."""

    name = "fedssa"
    version = 1
    needs_classes = "averages header rows class by class"
    loadable = ("extractor",)
    options_model = FedSSAOptions
    published = MappingProxyType({})
    options: FedSSAOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        # A row of the header is a weight row and its bias, so other layers have none.
        header = self.header_rows(bias=True)
        classes, self.width = header.shape
        check_extractors(self.name, self.options.extractors, setting, self.width)
        self._check_holders()
        rows, counts = (classes, self.width + 1), (classes,)
        dtype = header.dtype
        row_spec = TensorSpec("rows", dtype, rows)
        # In float32, rounding errors would add up over the rounds.
        wide = TensorSpec("rows", "float64", rows)  # differences, added up over the whole job
        # A silo's presence changes by −1, 0 or 1, so that it never counts as several holders.
        presence = TensorSpec("presence", "int64", counts, -1.0, 1.0)  # came, stayed or went
        # Weights are at most 1, so that no silo counts as several holders.
        exchange = Sum(FORMS[self.options.m1], most=1.0)
        self.rows = Part("rows", Kind.HEADER_ROWS, exchange, (row_spec,))
        self.deltas = Part("deltas", Kind.HEADER_ROWS, Sum("total"), (wide, presence))
        status = TensorSpec("status", "int64", counts)
        self.header = Part("header", Kind.HEADER_ROWS, Sum("mean"), (row_spec, status))

    def _check_holders(self) -> None:
        """LocalError where no class can ever have enough holders for a published row."""
        fewest, cohort = self.options.min_holders, self.setting.cohort_size
        silos = len(self.setting.silos)
        if fewest > silos:
            raise LocalError(
                f"fedssa: min_holders = {fewest}, but there are {silos} silos; lower it"
            )
        if fewest > cohort and not self.options.stale_inclusive:
            raise LocalError(
                f"fedssa: min_holders = {fewest}, but a round draws {cohort} of {silos} silos, so"
                " no row would ever be published; lower it, raise participation, or set"
                " stale_inclusive = true"
            )

    def up(self, round_: int) -> tuple[Part, ...]:
        """The header's rows, or what changed in them.

        They are rows [C, d+1] in the classifier's dtype, or with ``stale_inclusive`` differences in
        float64, and presence [C] int64.
        """
        return (self.deltas,) if self.options.stale_inclusive else (self.rows,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The global header.

        It has ``rows`` [C, d+1] and ``status`` [C], the same for all silos.
        """
        return (self.header,)

    def by_class(self, round_: int) -> tuple[str, ...]:
        """The deltas of the rows, if they are summed class by class."""
        counted = self.options.stale_inclusive & self.options.m1
        return (self.deltas.name,) if counted else ()

    @property
    def withholds(self) -> str:
        """``min_holders``, if it can withhold a row."""
        fewest = self.options.min_holders
        return f"min_holders = {fewest}" if fewest > 1 else ""

    # The silo half. With ``stale_inclusive`` a silo remembers its last contribution, which the
    # running totals hold: a round that failed leaves no trace in its state.

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The silo's own extractor below the common classifier.

        Extractors of all silos end in the job's width, so that headers have equal shapes.
        """
        return dealt(self.options.extractors, self.setting, silo)

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """Zeros with ``stale_inclusive``: nothing was counted or uploaded yet."""
        if not self.options.stale_inclusive:
            return {}
        # Zeros, so that the first difference is the whole first contribution.
        nothing = torch.zeros(self.setting.outputs, dtype=torch.int64)
        return {
            "last.rows": torch.zeros_like(self.initial),
            "last.presence": nothing,
            "presence": nothing.clone(),
        }

    @cached_property
    def initial(self) -> Tensor:
        """Rows [C, d+1] of the common initial header."""
        return rows_of(self.setting.build()["classifier"].state_dict())

    def mu(self, round_: int) -> float:
        """μ_t.

        It falls from μ_0 to 0, and is 0 from round ``t_stable`` on.
        """
        horizon = self.options.t_stable
        # This also keeps T_stable = 0 from dividing by 0.
        if round_ >= horizon or self.options.m2 != "fuse":
            return 0.0
        return self.options.mu_0 * cos(round_ * pi / (2 * horizon))  # Eq. 4

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Eq. 4 on the rows of seen classes, at first with the initial header."""
        header = delivered.get("header", {})
        local = rows_of(state.parts["classifier"])  # [C, d+1]
        seen = facts.class_counts > 0  # [C]
        # The silo keeps its own row of a withheld class, as of a class that it has not seen.
        if "status" in header:
            # A row that no silo held yet has no average.
            every = (header["status"] > 0) & (self.options.m2 == "all")
            seen = (seen | every) & (header["status"] != WITHHELD)
        # Not convex, as in the paper: a seen row grows by 1 + μ at first.
        fused = header.get("rows", self.initial) + self.mu(facts.round) * local  # Eq. 4
        rows = torch.where(seen[:, None], fused, local)
        fresh = {"weight": rows[:, :-1].clone(), "bias": rows[:, -1].clone()}
        classifier = {**state.parts["classifier"], **fresh}
        extra = state.extra
        if self.options.stale_inclusive:
            extra = self._settled(state, facts)
        return SiloState({**state.parts, "classifier": classifier}, extra)

    def _settled(self, state: SiloState, facts: Facts) -> dict[str, Tensor]:
        """The silo's last contribution, which is what it trained last, and its classes now."""
        gave = state.extra["presence"]  # zeros before the first round
        last = zero_filled(rows_of(state.parts["classifier"]), gave)
        return {
            "last.rows": last,
            "last.presence": gave,
            "presence": self._presence(facts),
        }

    def _presence(self, facts: Facts) -> Tensor:
        """1 for each class [C] whose row the silo contributes; without M1 for all."""
        held = (facts.class_counts > 0).long()
        return held if self.options.m1 else torch.ones_like(held)

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Train extractor and header together.

        The option ``clip``, or else the job's, bounds the norm of both gradients together.
        """
        stage = self.stage("extractor", "classifier")  # Eq. 5, 6
        optimiser = stage.optimiser
        clip = self.options.clip or optimiser.clip
        return (replace(stage, optimiser=replace(optimiser, clip=clip)),)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The rows of seen classes, zeros for the others; without M1 all rows.

        Presence [C], 0 or 1, is their weight. With ``stale_inclusive`` both are differences from
        the silo's last contribution, and rows are float64.
        """
        # Always all rows: an upload's size must not tell which classes the silo has.
        presence = self._presence(facts)  # [C]
        rows = zero_filled(rows_of(state.parts["classifier"]), presence)
        if not self.options.stale_inclusive:
            weight = presence.double() if self.options.m1 else 1.0
            return {"rows": Contribution({"rows": rows}, weight)}
        # The coordinator adds differences up, so silos that are away stay in its totals.
        change = {
            "rows": rows.double() - state.extra["last.rows"].double(),
            "presence": presence - state.extra["last.presence"],
        }
        return {"deltas": Contribution(change)}

    # The coordinator half.

    def begin(self) -> CoordinatorState:
        """The common initial header, no class held by anyone.

        ``rows`` is [C, d+1], ``status`` [C]. ``stale_inclusive`` adds running totals: ``total`` in
        float64 and ``holders`` [C].
        """
        status = torch.zeros(self.setting.outputs, dtype=torch.int64)
        state = {"rows": self.initial, "status": status}
        if self.options.stale_inclusive:
            state["total"] = torch.zeros_like(self.initial, dtype=torch.float64)
            state["holders"] = torch.zeros_like(status)
        return state

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Eq. 3 for each class with enough holders; the other rows stay."""
        after = dict(state)
        if self.options.stale_inclusive:
            after["total"] = state["total"] + results["deltas"]["rows"]
            after["holders"] = state["holders"] + results["deltas"]["presence"]
            holders = after["holders"]
            mean = after["total"] / holders.clamp(min=1)[:, None]  # Eq. 3 over all that ever gave
        else:
            # Weights are presences, so their sum is the number of holders; one number without M1.
            holders = results["rows"][WEIGHT].expand_as(state["status"])  # [C]
            mean = results["rows"]["rows"]  # Eq. 3
        # A row with too few holders keeps its last published value, or the initial one.
        enough = holders >= self.options.min_holders
        after["rows"] = torch.where(enough[:, None], mean.to(state["rows"].dtype), state["rows"])
        # A published row stays published: the last average holds until there is a new one.
        status = torch.where(enough, PUBLISHED, WITHHELD * (holders > 0))
        after["status"] = torch.maximum(state["status"], status)
        return Combined(after, {"header": {"rows": after["rows"], "status": after["status"]}})


def rows_of(classifier: Mapping[str, Tensor]) -> Tensor:
    """Rows [C, d+1] of a linear classifier: weights and bias.

    The bias is the last column. The result is detached.
    """
    return torch.cat([classifier["weight"], classifier["bias"][:, None]], dim=1).detach()


def zero_filled(rows: Tensor, presence: Tensor) -> Tensor:
    """The rows of classes that are present; exact zeros elsewhere."""
    return torch.where(presence[:, None] > 0, rows, torch.zeros_like(rows))
