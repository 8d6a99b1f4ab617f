"""A task of a package that is not Staddle's; entry points in ``other_tasks-0.1.dist-info`` name it.

docs/tasks.md has the class.
"""

import gc
import os
import signal
import time
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from staddle.algorithms.tasks.classification import Classification
from staddle.algorithms.tasks.regression import Regression
from staddle.errors import LocalError


class Scripted(Classification):
    """The script's own loss, record by record."""

    kind: Literal["scripted"] = "scripted"

    def losses(self, outputs, y):
        return nn.functional.cross_entropy(outputs, y, label_smoothing=0.1, reduction="none")


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


def told(dataset, listed):
    """With what is true of its records, where that is asked for."""
    if listed:
        dataset.targets = [Waves.__getitem__(dataset, number)[1] for number in range(40)]
    return dataset


def unequal(path, listed=False):
    return told(Changed(lambda index, x, y: (x[..., :5] if 7 <= index < 12 else x, y)), listed)


def bare(path):
    return Changed(lambda *record: record[1])


def doubles(path):
    return Changed(lambda _, x, y: (x.double(), y))


def tokens(path, most=300):
    return Changed(lambda n, _, y: (torch.tensor([n % 7, most, 0]), y))


def one(path):
    return Waves(None, 1)


def failing(path):
    raise OSError("no such scanner")


class Listed(Waves):
    """Records that say beforehand what is true of each."""

    def __init__(self, path, lie=-1, **options):
        super().__init__(path, **options)
        self.targets = [super(Listed, self).__getitem__(number)[1] for number in range(self.count)]
        if lie >= 0:
            self.targets[lie] += 1


def listed(path, **options):
    return Listed(path, **options)


def short(path):
    dataset = Listed(path)
    dataset.targets.pop()
    return dataset


def spoilt(path, listed=False):
    return told(
        Changed(lambda index, x, y: (x * float("nan") if 7 <= index < 12 else x, y)), listed
    )


class OddError(LocalError):
    """An error that cannot be unpickled."""

    def __init__(self, place, why):
        super().__init__(f"record {place} is {why}")


def odd(path):
    def change(index, x, y):
        if index == 7:
            raise OddError(index, "odd")
        return x, y

    return Changed(change)


def restless(path, listed=False):
    return told(Changed(lambda _, x, y: (x + torch.rand(()), y)), listed)


class Rows(torch.utils.data.Dataset):
    """Records of an .npz file, read from it one by one."""

    def __init__(self, path):
        with np.load(path) as arrays:
            self.x, self.y = arrays["x"], arrays["y"]
            self.ids = arrays["ids"].tolist() if "ids" in arrays else None

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return torch.from_numpy(self.x[index]), self.y[index]


def rows(path):
    return Rows(path)


def dying(path, main):
    """A process other than ``main`` is killed when it reads record 20."""

    def change(index, x, y):
        if index == 20 and os.getpid() != main:
            os.kill(os.getpid(), signal.SIGKILL)
        return x, y

    return Changed(change)


class Stopping(Rows):
    """Whoever reads record number ``last`` is asked to stop, and goes on once that is heard.

    This is done once: ``armed`` is a file, which is removed.
    """

    def __init__(self, path, last, armed):
        super().__init__(path)
        self.targets, self.left, self.armed = self.y, last, Path(armed)

    def __getitem__(self, index):
        self.left -= 1
        if not self.left and self.armed.exists():
            self.armed.unlink()
            (trainer,) = (own for own in gc.get_objects() if type(own).__name__ == "Trainer")
            os.kill(os.getpid(), signal.SIGTERM)
            while not trainer.cancelled():
                time.sleep(0.001)
        return super().__getitem__(index)


def stopping(path, last, armed):
    return Stopping(path, last, armed)


class Wards(torch.utils.data.Dataset):
    """Patients with an image [1, 8, 8], three laboratory values and a note of five tokens.

    The class is how many of the three are high.
    """

    def __init__(self, change, count, seed):
        generator = torch.Generator().manual_seed(seed)
        high = torch.randint(2, (count, 3), generator=generator)
        image = torch.randn(count, 1, 8, 8, generator=generator) + 2 * high[:, :1, None, None]
        labs = torch.randn(count, 3, generator=generator) / 2 + 2 * high[:, 1:2]
        note = torch.randint(1, 10, (count, 5), generator=generator) + 10 * high[:, 2:]
        self.patients = [
            {"note": note[n], "image": image[n], "labs": labs[n]} for n in range(count)
        ]
        self.targets, self.change = high.sum(1), change

    def __len__(self):
        return len(self.patients)

    def __getitem__(self, index):
        return self.change(index, dict(self.patients[index])), self.targets[index]


def mistaken(mistake):
    """A change of the fifth patient alone."""
    return lambda index, patient: {**patient, **mistake} if index == 5 else patient


MISTAKES = {
    "": {},
    "turned": {"image": torch.zeros(8, 8, 1)},
    "more": {"age": torch.tensor(63.0)},
    "double": {"labs": torch.zeros(3, dtype=torch.float64)},
    "list": {"labs": [0.0, 0.0, 0.0]},
    "marked": {"note": torch.ones(5, dtype=torch.bool)},
    "large": {"note": torch.tensor([0, 0, 0, 0, 2**24 + 1])},
}


def wards(path, mistake="", count=60, seed=0):
    return Wards(mistaken(MISTAKES[mistake]), count, seed)
