"""The ``[metrics]`` table of a job file: test counts that cross, besides what every round has."""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)

from ...files.documents import Strict
from ...files.options import MOST_OPTIONS, Option, OptionName, read_options, written_options
from .counting import METRICS, Counting

LARGEST_TABLE = 1 << 16  # numbers: the coordinator keeps both models' tables of each round
# By part: the key that adds it.
KEYS = {
    "confusion": "confusion",
    "scores": "score_bins",
    "targets": "targets",
    "risks": "risk_bins",
    "torchmetrics": "torchmetrics",
}

Bins = Annotated[int, Field(strict=True, ge=0, le=1000)]
ClassName = Annotated[str, Field(pattern=r"^[A-Za-z]\w*$", max_length=64)]


class LibraryMetric(Strict):
    """A metric of ``torchmetrics.classification``, an entry of ``[[metrics.torchmetrics]]``."""

    name: ClassName
    """Its class, such as MulticlassCohenKappa."""
    options: Annotated[dict[OptionName, Option], Field(max_length=MOST_OPTIONS)] = Field(
        default_factory=dict
    )
    """Arguments of the class, besides the number of classes or labels."""
    title: ClassName | None = None
    """What it is called in results; default: its name."""

    @field_validator("options", mode="before")
    @classmethod
    def _read(cls, options: object) -> object:
        return read_options(options) if isinstance(options, Mapping) else options

    @field_serializer("options")
    def _written(self, options: dict[str, Option]) -> dict[str, Any]:
        return written_options(options)

    @property
    def called(self) -> str:
        """What it is called in results."""
        return self.title or self.name


class MetricsTable(Strict):
    """The [metrics] table.

    Whatever it adds is a part of its own, which a silo's policy has to allow.
    """

    confusion: Annotated[bool, Field(strict=True)] = False
    """In a classification, a matrix of test records by class and by the class that the model says.

    It gives sensitivity, specificity and F1 of each class, balanced accuracy and the majority
    baseline. It also shows how many test records of each class there are. With several labels, one
    such matrix per label.
    """
    score_bins: Bins = 0
    """Bins of a histogram of scores per class or label, for AUROC, AUPRC and calibration."""
    targets: Annotated[bool, Field(strict=True)] = False
    """In a regression, the sums of the targets and of their squares, for R²."""
    risk_bins: Bins = 0
    """In a survival task, bins of a table of risks by time, for the concordance index."""
    torchmetrics: Annotated[tuple[LibraryMetric, ...], Field(max_length=16)] = ()
    """With classes or labels, metrics of torchmetrics, whose states are counts."""

    @model_validator(mode="after")
    def _fit(self) -> "MetricsTable":
        # One bin would say nothing of scores.
        if lone := [key for key in ("score_bins", "risk_bins") if getattr(self, key) == 1]:
            raise ValueError(f"{lone[0]} = 1 tells no scores apart; write 64, or 0 for none")
        called = Counter(metric.called for metric in self.torchmetrics)
        if twice := sorted(called - Counter(set(called))):
            raise ValueError(f"torchmetrics has {twice[0]} twice; give one of them a title")
        return self

    @model_serializer(mode="wrap")
    def _written(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As older releases wrote it, where a job names no metric of a library."""
        written: dict[str, Any] = serialise(self)
        if not self.torchmetrics:
            written.pop("torchmetrics", None)
        return written

    @property
    def asked(self) -> frozenset[str]:
        """The keys that ask for something."""
        return frozenset(self.model_dump(exclude_defaults=True))


def size_fault(counting: Counting) -> str:
    """Why tables are too large to cross in each round, and what to do; empty if none is."""
    for part in counting.parts():
        numbers = max(spec.elements for spec in part.tensors)
        if part.name != METRICS and numbers > LARGEST_TABLE:
            shape = list(part.tensors[0].shape)
            return (
                f"metrics.{KEYS[part.name]} takes {numbers:,} numbers per model, {shape}, at most"
                f" {LARGEST_TABLE:,} may cross; take it out"
            )
    return ""
