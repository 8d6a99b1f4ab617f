"""Residual networks for series and for volumes, which differ in the dimensions of a record.

``series-resnet`` is for records [channels, length] or [channels, 1, length], such as signals of
several sensors: Wang, Yan and Oates, "Time series classification from scratch with deep neural
networks: a strong baseline", IJCNN 2017, section II; its kernel of 8, which has no middle, is 7
here. ``volume-resnet`` is for records [channels, depth, height, width], such as scans: a residual
network of 3x3x3 convolutions, as in Hara, Kataoka and Satoh, "Can spatiotemporal 3D CNNs retrace
the history of 2D CNNs and ImageNet?", CVPR 2018, with fewer channels by default.

Their features are means over all positions, so records of other lengths and sizes fit one model.
Norm "batch" keeps running statistics; norm "group" has at most eight groups.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, TypeAlias

from pydantic import Field
from torch import Tensor, nn

from ....files.documents import Real, Strict

Width: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=4096)]
Widths: TypeAlias = Annotated[tuple[Width, ...], Field(min_length=1, max_length=16)]
Few: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=32)]
Share: TypeAlias = Annotated[Real, Field(ge=0, lt=1)]
KERNELS = (7, 5, 3)  # of the three convolutions of a block for series
MOST_GROUPS = 8

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


class SeriesResnetOptions(Strict):
    """Further arguments of ``series_resnet``."""

    widths: Widths = (64, 128, 128)
    dropout: Share = 0.0


class VolumeResnetOptions(Strict):
    """Further arguments of ``volume_resnet``."""

    widths: Widths = (16, 32, 64)
    blocks: Few = 1
    dropout: Share = 0.0


class ResidualBlock(nn.Module):
    """Convolutions with norm and ReLU next to an identity, or to a convolution of one position.

    [B, inputs, …] → [B, outputs, …]; with a ``stride`` of 2 each side is halved. All convolutions
    pad, so a record may have any size.
    """

    def __init__(
        self,
        dimensions: int,
        inputs: int,
        outputs: int,
        kernels: Sequence[int],
        norm: str,
        stride: int = 1,
    ) -> None:
        super().__init__()
        layers: list[tuple[str, nn.Module]] = []
        channels, step = inputs, stride
        for number, kernel in enumerate(kernels, start=1):
            layers += [
                (f"conv{number}", convolution(dimensions, channels, outputs, kernel, step)),
                (f"norm{number}", normalisation(dimensions, outputs, norm)),
                (f"relu{number}", nn.ReLU()),
            ]
            channels, step = outputs, 1
        # The last ReLU comes after the sum.
        self.path = nn.Sequential(OrderedDict(layers[:-1]))
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                OrderedDict(
                    conv=convolution(dimensions, inputs, outputs, 1, stride),
                    norm=normalisation(dimensions, outputs, norm),
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        """One residual step."""
        return self.relu(self.path(x) + self.shortcut(x))  # type: ignore[no-any-return]


class Mean(nn.Module):
    """The mean over all positions of each channel: [B, channels, …] → [B, channels]."""

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        return x.flatten(2).mean(2)


def series_resnet(
    shape: Sequence[int],
    classes: int,
    norm: str,
    *,
    widths: Sequence[int] = (64, 128, 128),
    dropout: float = 0.0,
) -> dict[str, nn.Module]:
    """One block for each width, of kernels 7, 5 and 3; it has ``widths[-1]`` features."""
    blocks = [
        ResidualBlock(1, before, width, KERNELS, norm)
        for before, width in zip((shape[0], *widths), widths, strict=False)
    ]
    # [B, channels, 1, length] as readers of images write it
    return _network(blocks, widths, classes, dropout, nn.Flatten(2))


def volume_resnet(
    shape: Sequence[int],
    classes: int,
    norm: str,
    *,
    widths: Sequence[int] = (16, 32, 64),
    blocks: int = 1,
    dropout: float = 0.0,
) -> dict[str, nn.Module]:
    """A convolution, then ``blocks`` of two for each width; it has ``widths[-1]`` features.

    Each width but the first halves the sides.
    """
    stem = OrderedDict(
        conv=convolution(3, shape[0], widths[0], 3, 1),
        norm=normalisation(3, widths[0], norm),
        relu=nn.ReLU(),
    )
    steps: list[nn.Module] = [nn.Sequential(stem)]
    before = widths[0]
    for number, width in enumerate(widths):
        for place in range(blocks):
            stride = 2 if number and not place else 1
            steps.append(ResidualBlock(3, before, width, (3, 3), norm, stride))
            before = width
    return _network(steps, widths, classes, dropout, nn.Identity())


def _network(
    blocks: Sequence[nn.Module],
    widths: Sequence[int],
    classes: int,
    dropout: float,
    begin: nn.Module,
) -> dict[str, nn.Module]:
    named = [(f"block{number}", block) for number, block in enumerate(blocks, start=1)]
    last = [("mean", Mean()), ("drop", dropped(dropout))]
    layers = OrderedDict([("begin", begin), *named, *last])
    return {
        "extractor": nn.Sequential(layers),
        "classifier": nn.Linear(widths[-1], classes),
    }


def convolution(dimensions: int, inputs: int, outputs: int, kernel: int, stride: int) -> nn.Module:
    """A convolution that keeps the sides, or halves them with a ``stride`` of 2."""
    return CONVOLUTIONS[dimensions](inputs, outputs, kernel, stride, kernel // 2)


def normalisation(dimensions: int, channels: int, norm: str) -> nn.Module:
    """Norm layer of a block, an identity for "none"."""
    if norm == "batch":
        return BATCH_NORMS[dimensions](channels)
    if norm == "group":
        groups = max(g for g in range(1, MOST_GROUPS + 1) if channels % g == 0)
        return nn.GroupNorm(groups, channels)
    return nn.Identity()


def dropped(share: float) -> nn.Module:
    """Dropout of this share; an identity for 0, since a layer that draws binds the engines."""
    return nn.Dropout(share) if share else nn.Identity()
