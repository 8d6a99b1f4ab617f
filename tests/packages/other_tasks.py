"""A task of a package that is not Staddle's; entry points in ``other_tasks-0.1.dist-info`` name it.

docs/tasks.md has the class.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field

from staddle.algorithms.tasks.classification import Classification
from staddle.algorithms.tasks.regression import Regression


class Quantile(Regression):
    """The number below which a share ``level`` of records lies, by the pinball loss."""

    kind: Literal["quantile"] = "quantile"
    level: Annotated[float, Field(gt=0, lt=1)] = 0.9

    def losses(self, outputs, y):
        center, scale = self.affine
        above = (y - center) / scale - outputs[:, 0]
        return torch.maximum(self.level * above, (self.level - 1) * above)

    @property
    def value_names(self):
        return (*super().value_names, "covered")

    def values(self, outputs, y):
        center, scale = self.affine
        covered = y <= outputs[:, 0] * scale + center
        return {**super().values(outputs, y), "covered": covered.double()}

    def measures(self, means):
        return {**super().measures(means), "coverage": means["covered"]}


class Careless(Classification):
    """A classification that looks at no label."""

    kind: Literal["careless"] = "careless"

    def records_fault(self, y, outputs):
        return ""


class Failing(Regression):
    """Code that fails, each time in another way."""

    kind: Literal["failing"] = "failing"
    where: str

    def records_fault(self, y, outputs):
        if self.where == "records":
            raise KeyError("y")
        return ""

    def counting(self, outputs, metrics, *, noised):
        if self.where == "counting":
            raise ZeroDivisionError("nothing to count")
        return super().counting(outputs, metrics, noised=noised)

    def measures(self, means):
        return {**super().measures(means), "mae": float("nan")}


NUMBER = 3


class Waves(torch.utils.data.Dataset):
    """Records [1, 1, 6] and a number each, made as they are read."""

    def __init__(self, path, count=40, shift=0.0):
        self.path, self.count, self.shift = path, count, shift
        self.ids = [f"wave {number}" for number in range(count)]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError(index)
        x = torch.sin(torch.arange(6.0) * (index + 1) / 7 + self.shift)
        return x[None, None], float(x.sum() + 20)


def waves(path, **options):
    return Waves(path, **options)


class Changed(Waves):
    """Records that ``change`` makes of others."""

    def __init__(self, change, says=40):
        super().__init__(None)
        self.change, self.says = change, says

    def __len__(self):
        return self.says

    def __getitem__(self, index):
        return self.change(index, *super().__getitem__(index))


def unequal(path):
    return Changed(lambda index, x, y: (x if index < 7 else x[..., :5], y))


def bare(path):
    return Changed(lambda *record: record[1])


def doubles(path):
    return Changed(lambda _, x, y: (x.double(), y))


def one(path):
    return Waves(None, 1)


def failing(path):
    raise OSError("no such scanner")
