"""Texts of made-up tokens, whose class one token shows."""

import torch

from staddle.algorithms.data.dataset import Dataset


def texts(count, seed=0, length=12):
    """Texts of several lengths, in which the fourth token is that of the class."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (count,), generator=draw)
    x = torch.randint(1, 20, (count, length), generator=draw)
    x[:, 3] = 20 + y
    x[torch.arange(length) >= torch.randint(5, length + 1, (count, 1), generator=draw)] = 0
    return Dataset(x.float(), y)
