"""The task contract: what is true of a record, the loss of an answer, and what evaluation counts.

A task is one class, whose fields are the keys of a job's [task] table besides ``kind``. Methods
never look at what is true of a record: they ask the task for losses. Those that need classes say so
(``Method.needs_classes``).
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from ...errors import LocalError
from ...files.documents import Strict
from .counting import Counting
from .metrics_table import MetricsTable


class Task(Strict):
    """Base of all tasks; ``outputs`` is how many numbers the model gives for a record."""

    # every task declares its own Literal; a field here would come first in errors
    if TYPE_CHECKING:
        kind: str

    version: ClassVar[int] = 1
    """Raised when losses or counts change: it enters the job's method digest."""
    has_classes: ClassVar[bool] = False
    """True if what is true of a record is one of the model's classes, [N] int64."""
    dense: ClassVar[bool] = False
    """True if outputs are [B, outputs, …], for each position of a record [channels, …]."""
    outputs_key: ClassVar[Literal["classes", "outputs"]] = "outputs"
    """The key of [model] that says how many outputs there are; classes can have names."""
    own_metrics: ClassVar[frozenset[str]] = frozenset()
    """Keys of [metrics] that add something in this task."""

    def fault(self, outputs: int) -> str:
        """Why a model with so many outputs cannot do this task; empty if it can."""
        return ""

    @abstractmethod
    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Losses [B] of the model's outputs [B, outputs]; y [B, …] is what is true.

        Outputs are [B, outputs, …] of a ``dense`` task.

        It can run under ``torch.vmap``, and treats each record by itself.
        """

    @abstractmethod
    def records_fault(self, y: Tensor, outputs: int) -> str:
        """Why these records cannot be what the task is about; empty if they can.

        It shows at most one record's number, and no value.
        """

    def range_fault(self, y: Tensor) -> str:
        """Why too much of what is true of the records is outside what a job declares.

        It shows no value of a record. In private jobs it is not asked.
        """
        return ""

    @abstractmethod
    def counting(self, outputs: int, metrics: MetricsTable, *, noised: bool) -> Counting:
        """What evaluation counts; the numbers of a private job are ``noised``."""

    def families(self, outputs: int) -> tuple[str, ...]:
        """What names of metrics of torchmetrics begin with, if they take ``probabilities``."""
        return ()

    def probabilities(self, outputs: Tensor) -> Tensor:
        """What metrics of torchmetrics take, [B, outputs]; it runs under ``torch.vmap``.

        LocalError in a task without ``families``.
        """
        raise LocalError(
            f"the task {self.kind} says no probabilities for torchmetrics; leave"
            " metrics.torchmetrics out"
        )

    # What a trained model says of a record.

    def answers(self, outputs: Tensor) -> Tensor:
        """What a reader is told, [B, answers]: by default the outputs themselves.

        [B, answers, …] in a ``dense`` task.
        """
        return outputs

    def answer_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """The columns of ``answers``; ``names`` are those of the outputs, or their numbers."""
        return tuple(f"output {name}" for name in names)

    def cut_offs(self, outputs: int) -> int:
        """How many thresholds turn answers into decisions; none by default."""
        return 0

    def compared(self, answers: Tensor) -> Tensor:
        """What is compared with thresholds, [B, cut_offs]; LocalError in tasks without any."""
        raise LocalError(f"the task {self.kind} has no thresholds")

    def truths(self, y: Tensor) -> Tensor:
        """Whether each of ``compared`` is true of a record, [B, cut_offs] bool."""
        raise LocalError(f"the task {self.kind} has no thresholds")

    def decisions(self, answers: Tensor, thresholds: Sequence[float] = ()) -> Tensor | None:
        """Class numbers [B, …], or 0 and 1 per label [B, L]; None where there is no decision.

        Without thresholds it is what evaluation counts: the class with the largest output.
        """
        return None

    def strata(self, y: Tensor) -> Tensor:
        """By record, the number of what a partition by label deals out alike, [N] int64."""
        return y

    def range_advice(self, y: Tensor) -> str:
        """What the silo's own people should know of what is true of the records; maybe nothing."""
        return ""


# Not of the task: noise is drawn for a histogram in which each record is once.
def histogram(task: Task, y: Tensor, outputs: int) -> Tensor:
    """Records by class, [classes] int64; in tasks without classes all records, [1]."""
    if task.has_classes:
        return torch.bincount(y, minlength=outputs)
    return torch.tensor([len(y)])


def cells(task: Task, outputs: int) -> int:
    """Numbers of ``histogram``."""
    return outputs if task.has_classes else 1


def labels_fault(y: Tensor, outputs: int) -> str:
    """Why these are not class numbers [N] from 0 on; empty if they are."""
    what = "a class number per record (data.label of a CSV table)"
    if fault := shape_fault(y, torch.int64, (), what):
        return fault
    outside = y[(y < 0) | (y >= outputs)]
    if not len(outside):
        return ""
    label = int(outside[0])
    return (
        f"label {label} in {int((outside == label).sum())} of {len(y)} records, the job's model"
        f" knows classes 0 to {outputs - 1}; number the classes from 0, or have the operator"
        " correct model.classes"
    )


def chances_of(names: Sequence[str]) -> tuple[str, ...]:
    """Columns of probabilities, by the names of what is probable."""
    return tuple(f"p({name})" for name in names)


def weights_fault(key: str, weights: tuple[float, ...] | None, outputs: int) -> str:
    """Why these are not one weight per output; empty if they are, or there are none."""
    if weights is None or len(weights) == outputs:
        return ""
    return (
        f"task.{key} has {len(weights)} numbers, and the model {outputs} outputs; give one per"
        " output"
    )


def first(wrong: Tensor) -> int:
    """The number of the first record that is ``wrong`` [N, …]."""
    return int(torch.nonzero(wrong.reshape(len(wrong), -1).any(1))[0])


def shape_fault(y: Tensor, dtype: torch.dtype, shape: tuple[int, ...], what: str) -> str:
    """Why y is not of this dtype and shape [N, …]; empty if it is."""
    found = tuple(y.shape[1:])
    if y.dtype == dtype and found == shape:
        return ""
    wanted = named_array(dtype, shape)
    return f"y is {named_array(y.dtype, found)}, the job's task takes {wanted}: {what}"


def named_array(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Dtype and shape of an array with a row per record, such as float32 [N, 2]."""
    return f"{str(dtype).removeprefix('torch.')} [{', '.join(map(str, ('N', *shape)))}]"
