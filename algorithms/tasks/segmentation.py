"""A class for each pixel of an image, or voxel of a volume, such as organs in a scan.

The loss is cross-entropy plus a soft Dice loss, as in nnU-Net (Isensee et al., Nature Methods 18,
2021, "Training"). What is measured is the Dice score of each class but 0, which is the background:
2 |A ∩ B| / (|A| + |B|) of the called and the true positions of a record, and of that the mean over
the records in which the class is true or called.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ...files.documents import Real
from .counting import Said, ScoreForm
from .measures import share
from .metrics_table import MetricsTable
from .task import Task, chances_of, first, named_array, weights_fault
from .value_counting import ValueCounting

Weight = Annotated[Real, Field(gt=0)]
MOST_CLASSES = 256  # y is of 8 bits
# Positions that are added to called and true ones: of a class that is nowhere, nothing to nothing
# is a good answer.
SMOOTH = 1.0
DICE = ScoreForm("dice", "Dice score", "one class everywhere")


class Segmentation(Task):
    """``kind = "segmentation"``; y is [N, height, width] or [N, depth, height, width] uint8.

    Other whole numbers will do, but take more memory.
    """

    outputs_key: ClassVar[Literal["classes", "outputs"]] = "classes"
    dense: ClassVar[bool] = True

    kind: Literal["segmentation"] = "segmentation"
    loss: Literal["dice-cross-entropy", "cross-entropy"] = "dice-cross-entropy"
    class_weights: Annotated[tuple[Weight, ...], Field(max_length=MOST_CLASSES)] | None = None
    """By class, what the cross-entropy of its positions is multiplied with; default: 1."""

    def fault(self, outputs: int) -> str:
        """More classes than y can name, or weights that are not one per class."""
        if outputs > MOST_CLASSES:
            return f"a segmentation has at most {MOST_CLASSES} classes, the model {outputs}"
        return weights_fault("class_weights", self.class_weights, outputs)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean over the positions; outputs are logits [B, C, …], y is [B, …]."""
        outputs = outputs.flatten(2)  # [B, C, positions]
        numbers = torch.arange(outputs.shape[1], device=y.device)
        true = y.flatten(1)[:, None] == numbers[:, None]
        logs = torch.log_softmax(outputs, 1)
        # Not by index: on a GPU the gradients of that would be added up in any order.
        entropies = -torch.where(true, logs, 0)
        if self.class_weights is not None:
            entropies = entropies * outputs.new_tensor(self.class_weights)[:, None]
        losses = entropies.sum(1).mean(1)
        if self.loss == "cross-entropy":
            return losses
        shares, own = logs.exp()[:, 1:], true[:, 1:].to(outputs.dtype)
        both, sizes = (shares * own).sum(2), shares.sum(2) + own.sum(2)  # [B, C - 1]
        return losses + 1 - ((2 * both + SMOOTH) / (sizes + SMOOTH)).mean(1)

    def records_fault(self, y: Tensor, outputs: int) -> str:
        """Another dtype or shape, or a number that is no class."""
        if y.dtype.is_floating_point or y.ndim not in (3, 4):
            return (
                f"y is {named_array(y.dtype, tuple(y.shape[1:]))}, the job's task takes uint8 [N,"
                " height, width] or [N, depth, height, width]: for each position the number of its"
                " class"
            )
        # In eight bits 256 would be 0.
        if (wrong := (y < 0) | (y > outputs - 1)).any():
            return (
                f"record {first(wrong)} has a class outside 0 to {outputs - 1} somewhere, which the"
                " job's model does not know; correct it, say in data.values what masks have for the"
                " classes, or have the operator correct model.classes"
            )
        return ""

    def answers(self, outputs: Tensor) -> Tensor:
        """The probability of each class at each position [B, C, …]."""
        return torch.softmax(outputs, dim=1)

    def answer_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """The classes."""
        return chances_of(names)

    def decisions(self, answers: Tensor, thresholds: Sequence[float] = ()) -> Tensor:
        """The most likely class of each position [B, …]."""
        return answers.argmax(1)

    def strata(self, y: Tensor) -> Tensor:
        """The class but 0 that most of a record's positions have; 0 for none."""
        classes = range(1, int(y.max()) + 1 if len(y) else 1)
        sizes = [(y == one).flatten(1).sum(1) for one in classes]
        found = torch.stack([y.new_zeros(len(y), dtype=torch.int64), *sizes], 1)
        return found.argmax(1)

    def counting(self, outputs: int, metrics: MetricsTable, *, noised: bool) -> ValueCounting:
        """Sums of Dice scores."""
        return ValueCounting(DiceScores(outputs, noised), noised=noised)


@dataclass(frozen=True)
class DiceScores:
    """What evaluation counts (value_counting.py): by class its Dice scores, and how many."""

    classes: int
    noised: bool = False

    @property
    def score(self) -> ScoreForm:
        """The mean over the classes but 0 that are judged."""
        return DICE

    @property
    def value_names(self) -> tuple[str, ...]:
        """Of each class but 0 the score, and whether a record has one."""
        return tuple(f"{name}{one}" for one in self._judged for name in ("dice", "judged"))

    @property
    def fact_names(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def _judged(self) -> range:
        return range(1, self.classes)

    def values(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Scores [B], and 1 where a record has the class or is said to; 0 for both elsewhere."""
        called, true = outputs.argmax(1).flatten(1), y.flatten(1)
        found = {}
        for one in self._judged:
            says, has = called == one, true == one
            sizes = says.sum(1) + has.sum(1)
            both = (says & has).sum(1).double()
            found[f"dice{one}"] = 2 * both / sizes.clamp(min=1)
            found[f"judged{one}"] = (sizes > 0).double()
        return found

    def facts(self, y: Tensor) -> dict[str, Tensor]:
        """None."""
        return {}

    def measures(self, means: Mapping[str, float]) -> Said:
        """The score, and that of each class that is judged somewhere.

        Where none is, there was nothing to find, and nothing was found: 1. Noised, each class
        counts by how often it is judged: noise alone would give a class without records any score.
        """
        judged = {one: means[f"judged{one}"] for one in self._judged if means[f"judged{one}"] > 0}
        if not judged:
            return {"dice": 1.0}
        scores = {one: share(means[f"dice{one}"] / own) for one, own in judged.items()}
        weights = [*judged.values()] if self.noised else None
        mean = float(np.average([*scores.values()], weights=weights))
        return {"dice": mean, **{f"dice_class_{one}": own for one, own in scores.items()}}

    def baseline(self, y: NDArray[Any]) -> float:
        """The score of the best answer that calls all positions of all records one class."""
        rows = y.reshape(len(y), -1)
        sizes = np.stack([(rows == one).sum(1) for one in self._judged])  # [C - 1, N]
        held = int(sizes.any(1).sum())
        # Class 0 everywhere finds nothing, which is right only where there is nothing.
        scores = [float(not held)]
        for own in sizes:
            dice = (2 * own / (rows.shape[1] + own)).mean()
            scores.append(float(dice) / (held + (not own.any())))
        return max(scores)
