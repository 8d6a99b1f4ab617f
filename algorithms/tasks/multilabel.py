"""Several labels per record, each there or not, such as findings in an image."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ...files.documents import Real
from .label_counting import LabelCounting
from .metrics_table import MetricsTable
from .task import Task, chances_of, first, shape_fault, weights_fault

Weight = Annotated[Real, Field(gt=0)]
HALF = 0.5  # a logit of 0, from which on evaluation counts a label as called


class Multilabel(Task):
    """``kind = "multilabel"``; y is [N, classes] int64 of 0 and 1."""

    outputs_key: ClassVar[Literal["classes", "outputs"]] = "classes"
    own_metrics: ClassVar[frozenset[str]] = frozenset({"confusion", "score_bins", "torchmetrics"})

    kind: Literal["multilabel"] = "multilabel"
    positive_weights: Annotated[tuple[Weight, ...], Field(max_length=100_000)] | None = None
    """By label, what the loss of records that have it is multiplied with; default: 1."""

    def fault(self, outputs: int) -> str:
        """Weights that are not one per label."""
        return weights_fault("positive_weights", self.positive_weights, outputs)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Binary cross-entropy, the mean over the labels; outputs are logits [B, L]."""
        weights = None
        if self.positive_weights is not None:
            weights = outputs.new_tensor(self.positive_weights)
        return nn.functional.binary_cross_entropy_with_logits(
            outputs, y.to(outputs.dtype), reduction="none", pos_weight=weights
        ).mean(1)

    def families(self, outputs: int) -> tuple[str, ...]:
        """Metrics of labels."""
        return ("Multilabel",)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """The probability of each label."""
        return torch.sigmoid(outputs)

    def answers(self, outputs: Tensor) -> Tensor:
        """The probability of each label."""
        return self.probabilities(outputs)

    def answer_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """The labels."""
        return chances_of(names)

    def cut_offs(self, outputs: int) -> int:
        """One per label."""
        return outputs

    def compared(self, answers: Tensor) -> Tensor:
        """The probabilities."""
        return answers

    def truths(self, y: Tensor) -> Tensor:
        """Whether a record has each label."""
        return y == 1

    def decisions(self, answers: Tensor, thresholds: Sequence[float] = ()) -> Tensor:
        """Which labels a record has: those from their threshold on, which is 0.5 by default."""
        # In float64, as thresholds are chosen: float32 may round one to a value next to it.
        cuts = torch.tensor(thresholds or (HALF,), dtype=torch.float64, device=answers.device)
        return (answers.double() >= cuts).long()

    def strata(self, y: Tensor) -> Tensor:
        """The first label that a record has, from 1 on; 0 for none."""
        return torch.where(y.any(1), y.argmax(1) + 1, 0)

    def records_fault(self, y: Tensor, outputs: int) -> str:
        """No labels, or labels other than 0 and 1."""
        if fault := shape_fault(
            y, torch.int64, (outputs,), "0 or 1 per label (data.labels of a CSV table)"
        ):
            return fault
        wrong = (y != 0) & (y != 1)
        if wrong.any():
            return f"record {first(wrong)} has a label that is neither 0 nor 1; correct it"
        return ""

    def counting(self, outputs: int, metrics: MetricsTable, *, noised: bool) -> LabelCounting:
        """Counts by label."""
        return LabelCounting(outputs, metrics.confusion, metrics.score_bins, noised)
