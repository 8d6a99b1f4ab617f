"""One class per record: cross-entropy, and focal loss for classes that few records have."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import pydantic
import torch
from pydantic import Field
from torch import Tensor, nn

from ...files.documents import Real
from .class_counting import ClassCounting
from .metrics_table import MetricsTable
from .task import Task, chances_of, labels_fault, weights_fault

Weight = Annotated[Real, Field(gt=0)]


class Classification(Task):
    """``kind = "classification"``, the task of a job that names none; y is [N] int64."""

    has_classes: ClassVar[bool] = True
    outputs_key: ClassVar[Literal["classes", "outputs"]] = "classes"
    own_metrics: ClassVar[frozenset[str]] = frozenset({"confusion", "score_bins", "torchmetrics"})

    kind: Literal["classification"] = "classification"
    loss: Literal["cross-entropy", "focal"] = "cross-entropy"
    gamma: Annotated[Real, Field(ge=0)] | None = None
    """For focal: how much less records count that are right already; default: 2.

    A record's loss is (1 - p)^gamma times its cross-entropy (Lin et al., ICCV 2017, Eq. 4), where p
    is what the model gives its class.
    """
    label_smoothing: Annotated[Real, Field(ge=0, lt=1)] = 0.0
    """Share of a record's label that is spread over all classes."""
    class_weights: Annotated[tuple[Weight, ...], Field(max_length=100_000)] | None = None
    """By class, what the loss of its records is multiplied with; default: 1."""

    @pydantic.model_validator(mode="after")
    def _no_idle_key(self) -> "Classification":
        if self.gamma is not None and self.loss != "focal":
            raise ValueError('gamma does nothing without loss = "focal"; take it out')
        if self.label_smoothing and self.loss == "focal":
            raise ValueError("label_smoothing does nothing with a focal loss; take it out")
        return self

    def fault(self, outputs: int) -> str:
        """Weights that are not one per class."""
        return weights_fault("class_weights", self.class_weights, outputs)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy or focal loss; outputs are logits [B, C]."""
        losses = nn.functional.cross_entropy(
            outputs, y, reduction="none", label_smoothing=self.label_smoothing
        )
        if self.loss == "focal":
            gamma = 2.0 if self.gamma is None else self.gamma
            # p from the loss itself; 1 - p by expm1, since its digits are lost near p = 1. At 0 a
            # root would have no gradient.
            wrong = (-torch.expm1(-losses)).clamp(min=torch.finfo(losses.dtype).tiny)
            losses = wrong**gamma * losses
        if self.class_weights is not None:
            losses = losses * outputs.new_tensor(self.class_weights)[y]
        return losses

    def families(self, outputs: int) -> tuple[str, ...]:
        """Metrics of several classes, and of two."""
        return ("Multiclass", "Binary")[: 1 + (outputs == 2)]

    def probabilities(self, outputs: Tensor) -> Tensor:
        """The probability of each class."""
        return torch.softmax(outputs, dim=1)

    def answers(self, outputs: Tensor) -> Tensor:
        """The probability of each class."""
        return self.probabilities(outputs)

    def answer_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """The classes."""
        return chances_of(names)

    def cut_offs(self, outputs: int) -> int:
        """One of two classes: of more, the most likely one is called."""
        return int(outputs == 2)

    def compared(self, answers: Tensor) -> Tensor:
        """The probability of class 1."""
        return answers[:, 1:2]

    def truths(self, y: Tensor) -> Tensor:
        """Whether a record is of class 1."""
        return y[:, None] == 1

    def decisions(self, answers: Tensor, thresholds: Sequence[float] = ()) -> Tensor:
        """The class: with a threshold 1 from it on, else the most likely one."""
        if not thresholds:
            return answers.argmax(1)
        # In float64, as thresholds are chosen: float32 may round one to a value next to it.
        cuts = torch.tensor(thresholds, dtype=torch.float64, device=answers.device)
        return (self.compared(answers).double() >= cuts)[:, 0].long()

    def records_fault(self, y: Tensor, outputs: int) -> str:
        """A label that is no class, or y that are no labels."""
        return labels_fault(y, outputs)

    def counting(self, outputs: int, metrics: MetricsTable, *, noised: bool) -> ClassCounting:
        """Counts by class."""
        return ClassCounting(outputs, metrics.confusion, metrics.score_bins, noised)
