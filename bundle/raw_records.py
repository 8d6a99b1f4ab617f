"""Preprocessing as a module: records as they were measured → records as a model takes them.

A table's row becomes one number per feature, [B, features] float32: a number in its unit, NaN where
it is missing, and a category by its place in the contract's list. Images are pixels of 0 … 1,
[B, channels, height, width]. Other records have no other form.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from math import nan
from typing import Any

import torch
from torch import Tensor, nn

from ..algorithms.data.features import Feature
from ..algorithms.data.options import SCALES, DataTable, Pixels
from ..algorithms.data.sources.formats.table import Table
from ..algorithms.job.job import Job
from ..algorithms.models.build import input_shape
from .making import trial_records


@dataclass(frozen=True, eq=False)
class RawForm:
    """The form of raw records: what its numbers are, some of them, and the same as a model takes
    them, which a reader of the contract made.

    ``inputs`` are for programs: a dictionary per feature of a table, or one for the whole record.
    """

    inputs: tuple[dict[str, Any], ...]
    module: nn.Module
    raw: Tensor
    ready: Tensor


def raw_form(contract: DataTable, job: Job) -> RawForm:
    """The form of a contract's records."""
    if isinstance(contract, Table):
        return _of_table(contract, job)
    x = trial_records(job)
    if isinstance(contract, Pixels):
        pixels = (x + 1) / 2
        ready = contract.normalised(pixels.clone(), "made-up images")
        inputs = _as_a_whole("pixels from 0 to 1", job)
        return RawForm(inputs, NormalisedPixels(contract, len(x[0])), pixels, ready)
    return RawForm(_as_a_whole("as the model takes it", job), nn.Identity(), x, x)


def _as_a_whole(what: str, job: Job) -> tuple[dict[str, Any], ...]:
    return ({"record": what, "shape": list(input_shape(job.model))},)


class NormalisedPixels(nn.Module):
    """(pixel - mean) / std per channel, of pixels as the contract counts them."""

    mean: Tensor
    std: Tensor

    def __init__(self, contract: Pixels, channels: int) -> None:
        super().__init__()
        self.scale = SCALES[contract.pixels]
        for name in ("mean", "std"):
            values = torch.tensor(getattr(contract, name)).expand(channels).clone()
            self.register_buffer(name, values)

    def forward(self, x: Tensor) -> Tensor:
        """Pixels [B, channels, …] of 0 … 1."""
        sides = (1, -1, *[1] * (x.ndim - 2))
        return (self.scale * x - self.mean.reshape(sides)) / self.std.reshape(sides)


class TableColumns(nn.Module):
    """The numbers of a row as a record [1, 1, numbers]."""

    stand_in: Tensor
    center: Tensor
    scale: Tensor
    reach: Tensor

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.sizes = [len(table.categories.get(name, ())) for name in table.features]
        constants: Mapping[str, list[float]] = {
            "stand_in": [_stand_in(table, name) for name in table.features],
            "center": [table.center.get(name, 0.0) for name in table.features],
            "scale": [table.scale.get(name, 1.0) for name in table.features],
            "reach": [table.reach(name) for name in table.features],
        }
        for name, values in constants.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Rows [B, features]."""
        values = x.double()
        values = torch.where(values.isnan(), self.stand_in, values)
        numbers = (values - self.center) / self.scale
        # By comparisons: a clamp would make a number of NaN.
        numbers = torch.where(numbers > self.reach, self.reach, numbers)
        numbers = torch.where(numbers < -self.reach, -self.reach, numbers)
        columns = [
            _one_hot(values[:, place, None], size) if size else numbers[:, place, None]
            for place, size in enumerate(self.sizes)
        ]
        return torch.cat(columns, 1).float()[:, None, None]


def _one_hot(values: Tensor, size: int) -> Tensor:
    """Categories [B, 1] as [B, size]; NaN for what is none, so that no answer comes of it."""
    hot = values == torch.arange(size)
    return torch.where(hot.any(1, keepdim=True), hot.double(), nan)


def _stand_in(table: Table, name: str) -> float:
    value = table.missing.get(name, nan)
    return float(table.categories[name].index(value)) if isinstance(value, str) else value


def _of_table(table: Table, job: Job) -> RawForm:
    rows = [[_made_up(table, name, row) for name in table.features] for row in range(3)]
    texts = [map(_text, repeat(table), table.features, row) for row in rows]
    cells = [dict(zip(table.features, own, strict=True)) for own in texts]
    # Of dates the raw form has the days.
    plain = table.model_copy(update={"decimal": ".", "dates": {}})
    (found,) = plain.of_cells(enumerate(cells), len(rows))
    return RawForm(_columns(table, job), TableColumns(table), torch.tensor(rows), found.x)


def _columns(table: Table, job: Job) -> tuple[dict[str, Any], ...]:
    """What each number is, in order: its name, unit and range, its categories and constants."""
    # The job has the ranges, and the units that a silo need not repeat.
    agreed = {own.name: _stated(own) for own in job.features}
    # A number or a category, or null where none may be missing.
    missing = {name: {"missing": table.missing.get(name)} for name in table.features}
    return tuple(
        {**agreed.get(own.name, {}), **_stated(own), **missing[own.name]} for own in table.declared
    )


def _stated(feature: Feature) -> dict[str, Any]:
    return feature.model_dump(mode="json", exclude_defaults=True)


def _made_up(table: Table, name: str, row: int) -> float:
    """Values around what is subtracted, another category per row, and something that is missing."""
    if row == 2 and name in table.missing:
        return nan
    if known := table.categories.get(name):
        return float(row % len(known))
    return table.center.get(name, 0.0) + (row - 1) * table.scale.get(name, 1.0)


def _text(table: Table, name: str, value: float) -> str:
    """A cell of a file, as a point writes numbers."""
    if value != value:  # noqa: PLR0124 - NaN
        return table.marks(name)[0]
    if known := table.categories.get(name):
        return known[int(value)]
    return repr(float(torch.tensor(value)))
