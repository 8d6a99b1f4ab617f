"""The ``[metrics]`` table of a job file: test counts that cross, besides how many are right."""

from typing import Annotated

from pydantic import Field, model_validator

from ...files.documents import Strict
from ..evaluation.counting import Counting

LARGEST_TABLE = 1 << 16  # numbers: the coordinator keeps both models' tables of each round


class MetricsTable(Strict):
    """The [metrics] table.

    Whatever it adds is a part of its own, which a silo's policy has to allow.
    """

    confusion: Annotated[bool, Field(strict=True)] = False
    """A matrix of test records by class and by the class that the model says.

    It gives sensitivity, specificity and F1 of each class, balanced accuracy and the majority
    baseline. It also shows how many test records of each class there are.
    """
    score_bins: Annotated[int, Field(strict=True, ge=0, le=1000)] = 0
    """Bins of a histogram of scores per class, for AUROC, AUPRC and calibration; 0 for none."""

    @model_validator(mode="after")
    def _fit(self) -> "MetricsTable":
        # One bin would say nothing of scores.
        if self.score_bins == 1:
            raise ValueError("score_bins = 1 tells no scores apart; write 64, or 0 for none")
        return self

    def counting(self, classes: int, *, noised: bool) -> Counting:
        """What evaluation counts in a job with so many classes; a private one is ``noised``."""
        return Counting(classes, self.confusion, self.score_bins, noised)


def size_fault(counting: Counting) -> str:
    """Why tables are too large to cross in each round, and what to do; empty if none is."""
    for part in counting.parts():
        numbers = part.tensors[0].elements
        if numbers > LARGEST_TABLE:
            key = {"confusion": "confusion", "scores": "score_bins"}[part.name]
            return (
                f"metrics.{key} takes {numbers:,} numbers per model with"
                f" {counting.classes:,} classes, at most {LARGEST_TABLE:,} may cross; take it out"
            )
    return ""
