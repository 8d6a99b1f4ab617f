"""One number per record, such as days in hospital: squared, absolute or Huber loss.

The job declares the range of the number. The model's output is (y - center) / scale, by default -1
at the lower end of the range and 1 at the upper one, so that learning rates do not depend on the
unit. Errors are counted as shares of the range, at most 1, so one record changes any sum by a known
amount.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pydantic
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from ...files.documents import Real
from .counting import Said, ScoreForm
from .metrics_table import MetricsTable
from .task import Task, first, shape_fault
from .value_counting import TARGETS, UNIT, ValueCounting

ABSOLUTE, SQUARED = "absolute", "squared"  # errors
TARGET, TARGET_SQUARED = "target", "target_squared"
LARGEST_MISS = 0.05  # share of the records whose target may be outside the range
MAE = "mae"
TINIEST, LARGEST = 1e-30, 1e30  # of a range, so that squares of its numbers are numbers, too


class Regression(Task):
    """``kind = "regression"``; y is [N] float32."""

    own_metrics: ClassVar[frozenset[str]] = frozenset({TARGETS})

    kind: Literal["regression"] = "regression"
    range: Annotated[tuple[Real, ...], Field(min_length=2, max_length=2)]
    """The least and the largest number that a record may have."""
    unit: Annotated[str, Field(max_length=64)] = ""
    loss: Literal["mse", "mae", "huber"] = "mse"
    delta: Annotated[Real, Field(gt=0)] | None = None
    """For huber, in the model's scale: where the loss turns to the absolute one; default: 1."""
    center: Real | None = None
    """What the output 0 stands for; default: the middle of the range."""
    scale: Annotated[Real, Field(gt=0)] | None = None
    """What an output that is larger by 1 adds; default: half the range."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "Regression":
        low, high = self.range
        if not low < high:
            raise ValueError(f"range = [{low:g}, {high:g}]: give the least number first")
        if not all(TINIEST < abs(value) < LARGEST for value in (high - low, self.affine[1])):
            raise ValueError("range or scale is beyond what float32 can hold; choose another unit")
        if self.delta is not None and self.loss != "huber":
            raise ValueError('delta does nothing without loss = "huber"; take it out')
        return self

    @property
    def affine(self) -> tuple[float, float]:
        """Center and scale: a number is center + scale · output."""
        low, high = self.range
        center = (low + high) / 2 if self.center is None else self.center
        return center, (high - low) / 2 if self.scale is None else self.scale

    def fault(self, outputs: int) -> str:
        """More than one output."""
        if outputs != 1:
            return f"a regression has one output, the model {outputs}; write model.outputs = 1"
        return ""

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of outputs [B, 1], in the model's scale: (y - center) / scale."""
        center, scale = self.affine
        wanted = (y - center) / scale
        match self.loss:
            case "mse":
                return nn.functional.mse_loss(outputs[:, 0], wanted, reduction="none")
            case "mae":
                return nn.functional.l1_loss(outputs[:, 0], wanted, reduction="none")
            case "huber":
                delta = 1.0 if self.delta is None else self.delta
                return nn.functional.huber_loss(
                    outputs[:, 0], wanted, reduction="none", delta=delta
                )

    def records_fault(self, y: Tensor, outputs: int) -> str:
        """Another dtype or shape, or a number that is not finite."""
        if fault := shape_fault(
            y, torch.float32, (), "a number per record (data.target of a CSV table)"
        ):
            return fault
        if not y.isfinite().all():
            record = first(~y.isfinite())
            return f"the target of record {record} is NaN or beyond float32; clean it first"
        return ""

    def answers(self, outputs: Tensor) -> Tensor:
        """The number itself, in its unit [B, 1]."""
        center, scale = self.affine
        return outputs * scale + center

    def answer_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """One column, with the unit."""
        return (f"value ({self.unit})" if self.unit else "value",)

    def strata(self, y: Tensor) -> Tensor:
        """Tenths of the records by target: 0 has the lowest."""
        ranks = torch.argsort(torch.argsort(y, stable=True), stable=True)
        return ranks * 10 // max(len(y), 1)

    def range_fault(self, y: Tensor) -> str:
        """Too many targets outside the range."""
        low, high = self.range
        missed = self._missed(y)
        # Never by a single record: an operator could find it by the ranges of several jobs.
        if missed <= max(LARGEST_MISS * len(y), 1):
            return ""
        unit = f" {self.unit}" if self.unit else ""
        return (
            f"{missed} of {len(y)} targets are outside {low:g} to {high:g}{unit}, the range that"
            " the job declares; is it another unit?"
        )

    def range_advice(self, y: Tensor) -> str:
        """How many targets are outside the range."""
        if missed := self._missed(y):
            return (
                f"target: {missed} of {len(y)} records are outside the range that the job declares;"
                " correct them, or leave them out"
            )
        return ""

    def _missed(self, y: Tensor) -> int:
        low, high = self.range
        return int(((y < low) | (y > high)).sum())

    def counting(self, outputs: int, metrics: MetricsTable, *, noised: bool) -> ValueCounting:
        """Sums of errors, and of targets where [metrics] asks for them."""
        return ValueCounting(self, metrics.targets, noised)

    # What evaluation counts (value_counting.py).

    @property
    def score(self) -> ScoreForm:
        """Mean absolute error, in the target's unit."""
        return ScoreForm(
            MAE, "MAE", "always the silo's median", share=False, higher=False, unit=self.unit
        )

    @property
    def value_names(self) -> tuple[str, ...]:
        """Absolute and squared errors."""
        return ABSOLUTE, SQUARED

    @property
    def fact_names(self) -> tuple[str, ...]:
        """Targets and their squares."""
        return TARGET, TARGET_SQUARED

    @property
    def _width(self) -> float:
        return self.range[1] - self.range[0]

    def values(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Errors as shares of the range, at most 1, and their squares."""
        center, scale = self.affine
        # In float64: float32 has few digits left of a number far from zero in a small range.
        error = (outputs[:, 0].double() * scale + center - y.double()).abs() / self._width
        # NaN is counted as 1, too.
        share = torch.nan_to_num(error, nan=1.0).clamp(max=1)
        return {ABSOLUTE: share, SQUARED: share.square()}

    def facts(self, y: Tensor) -> dict[str, Tensor]:
        """Targets as shares of the range, and their squares."""
        share = ((y.double() - self.range[0]) / self._width).clamp(0, 1)
        return {TARGET: share, TARGET_SQUARED: share.square()}

    def measures(self, means: Mapping[str, float]) -> Said:
        """MAE and RMSE, and R² where the targets are known and differ."""
        said: Said = {
            MAE: means[ABSOLUTE] * self._width,
            "rmse": means[SQUARED] ** 0.5 * self._width,
        }
        if TARGET in means:
            variance = means[TARGET_SQUARED] - means[TARGET] ** 2
            # Sums are rounded to units, and a silo's targets may all be one.
            if variance > 4 / UNIT:
                said["r2"] = 1 - means[SQUARED] / variance
        return said

    def baseline(self, y: NDArray[Any]) -> float:
        """The mean absolute error of the records' own median."""
        low, high = self.range
        known = np.clip(y.astype(np.float64), low, high)
        return float(np.abs(known - np.median(known)).mean())
