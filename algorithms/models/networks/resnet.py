"""The ConvNets and the ResNet-18 of FedAIMS: each block's features can be supervised.

The paper names its networks only; they are recovered from the sizes that its Tables 6 and 8 print,
to the last digit:

=================  ===============================================  =======  ==========
name               blocks                                           classes  parameters
=================  ===============================================  =======  ==========
``convnet-3x64``   3 x (conv 3x3 to 64, norm, ReLU, 2x2 max-pool)   47       77,935
``convnet-4x128``  4 x (conv 3x3 to 128, norm, ReLU, 2x2 max-pool)  10       448,650
``resnet18``       layer1 (with the stem) to layer4 of ResNet-18    100      11,220,132
                                                                    200      11,271,432
=================  ===============================================  =======  ==========

A block's feature is the mean of its output over height and width, [B, d_j]; the last block's is
what the classifier sees. Norm "batch" is batch norm without running statistics, in evaluation too
(as in FedBABU's code, from which the ConvNets come): nothing of it stays at a silo, but a record's
output depends on the records it is evaluated with. Norm "group" has four channels a group and at
most 32 groups. The ResNet has a 3x3 stem of stride 1 and no max-pool. No ReLU and no addition is in
place: per-sample gradients need their inputs. ``convnet-digits`` is for the 8x8 digits.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

MOST_GROUPS = 32
CHANNELS_PER_GROUP = 4


class Blocks(nn.Module):
    """An extractor in blocks: ``extractor(x)`` is the feature of the last one, [B, D].

    ``extractor(x, True)`` is the features of all blocks side by side, [B, d_1 + … + d_m];
    ``widths`` has the d_j.
    """

    def __init__(self, blocks: Sequence[nn.Module], widths: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.widths = tuple(widths)

    def forward(self, x: Tensor, every: bool = False) -> Tensor:
        """Feature of the last block, or of every block."""
        features: list[Tensor] = []
        for block in self.blocks:
            x = block(x)  # [B, d_j, h, w]
            features.append(x.mean((2, 3)))  # φ^j(x): [B, d_j]
        return torch.cat(features, dim=1) if every else features[-1]


class Residual(nn.Module):
    """Two 3x3 convolutions next to an identity, or to a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = normalisation(outputs, norm)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = normalisation(outputs, norm)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()  # one each: hooks count a module's calls
        # The sum needs equal shapes, so a 1x1 convolution adapts the input if they differ.
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(
                OrderedDict(conv=shortcut, norm=normalisation(outputs, norm))
            )

    def forward(self, x: Tensor) -> Tensor:
        """Residual step [B, inputs, h, w] → [B, outputs, h / stride, w / stride]."""
        y = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        return self.relu2(y + self.shortcut(x))  # type: ignore[no-any-return]


def normalisation(channels: int, norm: str) -> nn.Module:
    """Norm layer of a block, an identity for "none"."""
    # Without running statistics: the sizes that FedAIMS prints (Tables 6 and 8) have none.
    if norm == "batch":
        return nn.BatchNorm2d(channels, track_running_stats=False)
    if norm == "group":
        return nn.GroupNorm(min(MOST_GROUPS, channels // CHANNELS_PER_GROUP), channels)
    return nn.Identity()


def convnet(inputs: int, widths: Sequence[int], classes: int, norm: str) -> dict[str, nn.Module]:
    """A ConvNet with one block for each width."""
    blocks = [
        nn.Sequential(
            OrderedDict(
                conv=nn.Conv2d(before, width, 3, padding=1),
                norm=normalisation(width, norm),
                relu=nn.ReLU(),
                pool=nn.MaxPool2d(2),
            )
        )
        # A block's inputs are the outputs of the one before.
        for before, width in zip((inputs, *widths), widths, strict=False)
    ]
    return {"extractor": Blocks(blocks, widths), "classifier": nn.Linear(widths[-1], classes)}


def convnet_3x64(shape: tuple[int, int, int], classes: int, norm: str) -> dict[str, nn.Module]:
    """The paper's network for EMNIST."""
    return convnet(shape[0], (64, 64, 64), classes, norm)


def convnet_4x128(shape: tuple[int, int, int], classes: int, norm: str) -> dict[str, nn.Module]:
    """The paper's network for CIFAR-10."""
    return convnet(shape[0], (128, 128, 128, 128), classes, norm)


def convnet_digits(shape: tuple[int, int, int], classes: int, norm: str) -> dict[str, nn.Module]:
    """Three small blocks for 8x8 digits."""
    return convnet(shape[0], (16, 32, 32), classes, norm)


def resnet18(shape: tuple[int, int, int], classes: int, norm: str) -> dict[str, nn.Module]:
    """The paper's network for CIFAR-100 and Tiny ImageNet."""
    widths = (64, 128, 256, 512)
    blocks: list[nn.Module] = []
    # The first block keeps channels and size; each later one halves the size.
    for before, width in zip((64, *widths), widths, strict=False):
        stride = 1 if width == before else 2
        steps = [
            ("step1", Residual(before, width, stride, norm)),
            ("step2", Residual(width, width, 1, norm)),
        ]
        blocks.append(nn.Sequential(OrderedDict(steps)))
    stem = OrderedDict(
        conv=nn.Conv2d(shape[0], 64, 3, padding=1, bias=False),
        norm=normalisation(64, norm),
        relu=nn.ReLU(),
    )
    # FedAIMS has four blocks for ResNet-18, so the stem belongs to block 1.
    blocks[0] = nn.Sequential(OrderedDict(stem=nn.Sequential(stem), layer1=blocks[0]))
    return {"extractor": Blocks(blocks, widths), "classifier": nn.Linear(widths[-1], classes)}
