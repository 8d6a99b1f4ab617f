"""Time until an event, by hazards in discrete intervals.

The job cuts time into intervals (0, c_1], (c_1, c_2], …, (c_{T-1}, c_T]. Output k is the logit of
the hazard h_k: how likely a record that reached interval k has its event there. The loss is the
negative log-likelihood (Gensheimer, Narasimhan, "A scalable discrete-time survival model for neural
networks", PeerJ 2019, Eqs. 2 and 3); with e the interval of a record's time::

    event       -log h_e - Σ_{k<e} log(1 - h_k)
    last seen   -Σ_{k<e} log(1 - h_k), and of its own interval, too, past the interval's middle
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import pydantic
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from ...files.documents import Real
from .counting import Said, ScoreForm
from .metrics_table import MetricsTable
from .risk_counting import C_INDEX, RiskCounting
from .task import Task, first, shape_fault

LOSS = "loss"
LARGEST_LOSS = 32.0  # nats, as evaluation counts it: a probability of 1e-14


class DiscreteSurvival(Task):
    """``kind = "survival"``; y is [N, 2] float32: time, and 1 for an event or 0 for last seen."""

    own_metrics: ClassVar[frozenset[str]] = frozenset({"risk_bins"})

    kind: Literal["survival"] = "survival"
    cuts: Annotated[tuple[Annotated[Real, Field(gt=0)], ...], Field(min_length=1, max_length=256)]
    """Ends of the intervals, in order, in the unit of the times."""

    @pydantic.field_validator("cuts")
    @classmethod
    def _rising(cls, cuts: tuple[float, ...]) -> tuple[float, ...]:
        for before, after in pairwise(cuts):
            if after <= before:
                raise ValueError(f"{after:g} follows {before:g}; give the ends in order")
        return cuts

    def fault(self, outputs: int) -> str:
        """Outputs that are not one per interval."""
        if outputs != len(self.cuts):
            return (
                f"task.cuts has {len(self.cuts)} intervals, and the model {outputs} outputs; write"
                f" model.outputs = {len(self.cuts)}"
            )
        return ""

    def interval(self, time: Tensor) -> Tensor:
        """The interval of each time [B]: 0 … T - 1, or T for what is after all of them."""
        # By comparisons, which ``vmap`` can do; (a, b] holds b.
        return (time[:, None] > time.new_tensor(self.cuts)).sum(1)

    def log_survival(self, outputs: Tensor) -> Tensor:
        """Logarithm of the probability of no event up to the end of each interval [B, T]."""
        return nn.functional.logsigmoid(-outputs).cumsum(1)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Negative log-likelihood; outputs are logits of hazards [B, T]."""
        time, event = y[:, 0], y[:, 1] > 0
        cuts = time.new_tensor(self.cuts)
        starts = torch.cat([cuts.new_zeros(1), cuts[:-1]])
        # Which intervals a record got through, by the rule of each kind.
        ends = torch.where(event[:, None], cuts, (starts + cuts) / 2)  # [B, T]
        through = time[:, None] > ends
        here = (time[:, None] > starts) & (time[:, None] <= cuts) & event[:, None]
        losses = -nn.functional.logsigmoid(-outputs) * through
        return (losses - nn.functional.logsigmoid(outputs) * here).sum(1)

    def range_advice(self, y: Tensor) -> str:
        """That all times are in one interval."""
        if len(set(self.interval(y[:, 0]).tolist())) == 1:
            return "all times are in one interval of the job's task.cuts; are they in another unit?"
        return ""

    def answers(self, outputs: Tensor) -> Tensor:
        """The probability of no event up to the end of each interval [B, T]."""
        return self.log_survival(outputs).exp()

    def answer_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """The ends of the intervals."""
        return tuple(f"survival({cut:g})" for cut in self.cuts)

    def strata(self, y: Tensor) -> Tensor:
        """Records with an event, 1, and those last seen without, 0."""
        return y[:, 1].long()

    def records_fault(self, y: Tensor, outputs: int) -> str:
        """No times, times that are not above 0, or events other than 0 and 1."""
        if fault := shape_fault(
            y, torch.float32, (2,), "time, and 1 for an event or 0 (data.survival of a CSV table)"
        ):
            return fault
        wrong = ~(y[:, 0].isfinite() & (y[:, 0] > 0))
        if wrong.any():
            return (
                f"the time of record {first(wrong)} is not a number above 0; correct it, or name"
                " the column of the times first"
            )
        wrong = (y[:, 1] != 0) & (y[:, 1] != 1)
        if wrong.any():
            return f"the event of record {first(wrong)} is neither 0 nor 1; correct it"
        return ""

    def counting(self, outputs: int, metrics: MetricsTable, *, noised: bool) -> RiskCounting:
        """Sums of losses, and the table of risks."""
        return RiskCounting(self, metrics.risk_bins, noised)

    # What evaluation counts (value_counting.py).

    @property
    def score(self) -> ScoreForm:
        """Concordance index."""
        return ScoreForm(C_INDEX, "C-index", "the same risk for all")

    @property
    def value_names(self) -> tuple[str, ...]:
        """The loss."""
        return (LOSS,)

    @property
    def fact_names(self) -> tuple[str, ...]:
        """Nothing: events by interval are in the table of risks."""
        return ()

    def values(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Losses as shares of LARGEST_LOSS."""
        return {LOSS: self.losses(outputs, y) / LARGEST_LOSS}

    def facts(self, y: Tensor) -> dict[str, Tensor]:
        """None."""
        return {}

    def measures(self, means: Mapping[str, float]) -> Said:
        """The mean loss, in nats."""
        return {LOSS: means[LOSS] * LARGEST_LOSS}

    def baseline(self, y: NDArray[Any]) -> float:
        """The concordance index of ties alone."""
        return 0.5
