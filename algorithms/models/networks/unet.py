"""A U-Net for images and volumes: outputs for each pixel, or voxel, of a record.

Ronneberger, Fischer and Brox, "U-Net: convolutional networks for biomedical image segmentation",
MICCAI 2015 (arXiv:1505.04597), section 2, as nnU-Net has it in 2-D and 3-D (Isensee et al., Nature
Methods 18, 2021): convolutions pad, so that the outputs have a record's own size, and those of
stride 2 stand in place of max-pooling. Going up, each position is repeated in place of an
up-convolution, which has the same bits in each run on a GPU.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ....files.documents import Strict
from .residual import Share, Widths, convolution, dropped, normalisation


class UnetOptions(Strict):
    """Further arguments of ``unet``."""

    widths: Widths = (16, 32, 64)
    dropout: Share = 0.0


class Up(nn.Module):
    """Twice the size: [B, C, …] and [B, D, …] of at most twice its sides → [B, C + D, …]."""

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Each position repeated along every side, cut to the size of ``skip``, and that."""
        for place, side in enumerate(skip.shape[2:], start=2):
            x = x.repeat_interleave(2, place).narrow(place, 0, side)
        return torch.cat([x, skip], 1)


class UnetBody(nn.Module):
    """Levels of two convolutions, down and up again: [B, channels, …] → [B, widths[0], …]."""

    def __init__(
        self, dimensions: int, channels: int, norm: str, widths: Sequence[int], dropout: float
    ) -> None:
        super().__init__()
        down, before = [], channels
        for level, width in enumerate(widths):
            down.append(_two(dimensions, before, width, norm, 2 if level else 1))
            before = width
        up = []
        for width in reversed(widths[:-1]):
            up.append(_two(dimensions, before + width, width, norm, 1))
            before = width
        self.down, self.up = nn.ModuleList(down), nn.ModuleList(up)
        self.join, self.drop = Up(), dropped(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """The features of each position."""
        passed = []
        for level in self.down:
            x = level(x)
            passed.append(x)
        x = self.drop(passed.pop())
        for level in self.up:
            x = level(self.join(x, passed.pop()))
        return x


def unet(
    shape: Sequence[int],
    classes: int,
    norm: str,
    *,
    widths: Sequence[int] = (16, 32, 64),
    dropout: float = 0.0,
) -> dict[str, nn.Module]:
    """A level for each width, each of half the sides; it has ``widths[0]`` features per position.

    ``dropout`` is of the lowest level.
    """
    dimensions = len(shape) - 1
    return {
        "extractor": UnetBody(dimensions, shape[0], norm, widths, dropout),
        "classifier": convolution(dimensions, widths[0], classes, 1, 1),
    }


def _two(dimensions: int, inputs: int, outputs: int, norm: str, stride: int) -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (before, step) in enumerate(((inputs, stride), (outputs, 1)), start=1):
        layers[f"conv{number}"] = convolution(dimensions, before, outputs, 3, step)
        layers[f"norm{number}"] = normalisation(dimensions, outputs, norm)
        layers[f"relu{number}"] = nn.ReLU()
    return nn.Sequential(layers)
