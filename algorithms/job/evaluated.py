"""What a job's evaluation counts, read from its document's tables without the rest of the job.

For readers of sums, who need neither the method nor the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pydantic
from pydantic import Field

from ...errors import LocalError
from ..tasks.counting import Counting, ScoreForm
from ..tasks.metrics_table import MetricsTable, size_fault
from ..tasks.registry import TASKS, TaskTable
from .torchmetrics_counting import counted, installed

EVALUATION = ("task", "model", "metrics", "privacy")  # tables of a job that say what is counted
MODEL_KEYS = ("classes", "outputs", "class_names")


@dataclass(frozen=True)
class Evaluated:
    """How to read a job's sums; names of classes where the job has them."""

    counting: Counting
    class_names: tuple[str, ...] = ()


class _Model(pydantic.BaseModel):
    classes: int | None = Field(default=None, ge=2, le=100_000)
    outputs: int = Field(default=1, ge=1, le=100_000)
    class_names: tuple[str, ...] | None = None


class _Evaluation(pydantic.BaseModel):
    task: TaskTable
    model: _Model
    metrics: MetricsTable
    noised: bool


def evaluation_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a job's document that ``evaluated`` reads."""
    # Documents of earlier releases lack some of these.
    model = document.get("model")
    if not isinstance(model, Mapping):
        model = {}
    return {
        "task": document.get("task", {"kind": "classification"}),
        "model": {key: model[key] for key in MODEL_KEYS if model.get(key) is not None},
        "metrics": document.get("metrics", {}),
        "noised": document.get("privacy") is not None,
    }


def evaluated(evaluation: object) -> Evaluated | None:
    """How to read a job's sums, from its ``evaluation_of``.

    None for the task of an installed package, whose code is not imported to read sums, and for
    metrics of torchmetrics where it is not installed. LocalError for anything else that is no such
    object.
    """
    match evaluation:
        case {"metrics": {"torchmetrics": [_, *_]}} if not installed():
            return None
        case {"task": {"kind": str(kind)}} if kind not in TASKS:
            return None
    return _read(evaluation)


def form_of(document: Mapping[str, Any]) -> ScoreForm:
    """By what models of a job are compared, which may be of an installed package.

    LocalError for a document that does not say so.
    """
    return _read(evaluation_of(document)).counting.score


def _read(evaluation: object) -> Evaluated:
    try:
        read = _Evaluation.model_validate(evaluation)
        outputs, names = read.model.classes or read.model.outputs, read.model.class_names or ()
        counting = counted(read.task, outputs, read.metrics, noised=read.noised)
    except (ValueError, LocalError) as error:
        raise LocalError(f"the job does not say what is evaluated: {error}") from error
    faults = [read.task.fault(outputs), size_fault(counting)]
    if names and len(names) != outputs:
        faults.append(f"{len(names)} names for {outputs} classes")
    for fault in filter(None, faults):
        raise LocalError(f"the job does not say what is evaluated: {fault}")
    return Evaluated(counting, names)
