"""Models of a package that is not Staddle's, as its people would write them; entry points in
``other_models-0.1.dist-info`` name them.
"""

import torch
from torch import nn


class Mixed(nn.Module):
    """Layers of many kinds for images [B, 1, 8, 8], whose rows are read as a sequence."""

    def __init__(self, outputs, width=16, dropout=0.0):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))  # no layer resets it
        self.norm = nn.InstanceNorm2d(1, affine=True)
        self.rows = nn.GRU(8, width, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.slide = nn.Conv1d(width, width, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(width, outputs)

    def forward(self, x):
        x = self.norm(x).squeeze(1) * self.scale
        x, _ = self.rows(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.relu(self.slide(x.transpose(1, 2)))
        return self.fc(self.drop(x.mean(2)))


def mixed(shape, outputs, width=16, dropout=0.0):
    if shape != (1, 8, 8):
        raise ValueError(f"needs (1, 8, 8), not {shape}")
    return Mixed(outputs, width, dropout)


def normed(shape, outputs):
    """With batch norm, and a head of several layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(shape[1] * shape[2], 12), nn.BatchNorm1d(12), nn.ReLU(),
        nn.Linear(12, outputs),
    )  # fmt: skip


class Softened(nn.Module):
    """Something runs after what looks like the head."""

    def __init__(self, outputs):
        super().__init__()
        self.trunk = nn.Flatten()
        self.fc = nn.Linear(64, outputs)

    def forward(self, x):
        return self.fc(self.trunk(x)).softmax(1)


class Tied(nn.Module):
    def __init__(self, outputs, across):
        super().__init__()
        self.one, self.two, self.fc = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, outputs)
        (self.fc if across else self.two).weight = self.one.weight

    def forward(self, x):
        return self.fc(self.two(self.one(x.flatten(1))))


def softened(shape, outputs):
    return Softened(outputs)


def tied(shape, outputs, across=False):
    return Tied(outputs, across)


def double(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs)).double()


def text(shape, outputs):
    return "a model"


def pair(shape, outputs):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, outputs)

        def forward(self, x):
            return self.fc(x.flatten(1)), x

    return Pair()


NUMBER = 3
