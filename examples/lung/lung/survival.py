"""Survival with a metric of its own: the Brier score at a horizon.

The Brier score is the mean squared difference between the predicted probability of being alive at
the horizon and what came, 1 or 0, over the patients of whom that is known.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from staddle.algorithms.tasks.survival import DiscreteSurvival


class LungSurvival(DiscreteSurvival):
    """Staddle's survival task, whose keys it has; ``horizon`` is one of ``cuts``."""

    kind: Literal["lung-survival"] = "lung-survival"
    horizon: Annotated[float, Field(gt=0)] = 730.0

    def fault(self, outputs: int) -> str:
        """What is wrong with the table, in a sentence; empty if nothing is."""
        if self.horizon not in self.cuts:
            return f"task.horizon = {self.horizon:g} is none of task.cuts; add it there"
        return super().fault(outputs)

    @property
    def value_names(self) -> tuple[str, ...]:
        """Names of the numbers that each record has, whose sums leave the silo."""
        return (*super().value_names, "known", "brier")

    def values(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Numbers from 0 to 1 of each record."""
        alive = self.log_survival(outputs)[:, self.cuts.index(self.horizon)].exp()
        beyond, died = y[:, 0] > self.horizon, y[:, 1] > 0
        known = (beyond | died).to(alive.dtype)
        squared = torch.square(alive - beyond.to(alive.dtype))
        return {**super().values(outputs, y), "known": known, "brier": known * squared}

    def measures(self, means: Mapping[str, float]) -> dict[str, Any]:
        """What the means of these numbers say."""
        found = dict(super().measures(means))
        if means["known"] > 0:
            found["brier"] = means["brier"] / means["known"]
        return found
