"""The architectures that a job's [model] may name: a literal table.

Each is built as ``extractor`` and ``classifier``.

lenet5 is the LeNet-5 of pFedSim (Tan et al., 2023, Table 5, as its authors' code reads): conv 5x5
to 6 and to 16 channels, each with norm, ReLU and 2x2 max-pool, then 120 and 84 units. On 3x32x32
with norm "batch" and 10 classes: 456 + 12 + 2,416 + 32 + 48,120 + 10,164 = 61,200 parameters in the
extractor and 850 in the classifier; batch norm adds 44 numbers of running statistics and two counts
of batches. pfedsim-lenet5 is the same without the ReLU after the 84 units, as the authors' code had
it when the paper appeared. cnn-digits is a small network for the 8x8 digits.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import nn

from ...files.documents import Strict
from .networks.fedssa_cnn import digits_cnn, fedssa_cnn
from .networks.lenet import lenet, lenet_wide
from .networks.mlp import glm, ppfl_mlp
from .networks.mobilenet import mobilenet_v2
from .networks.residual import (
    SeriesResnetOptions,
    VolumeResnetOptions,
    series_resnet,
    volume_resnet,
)
from .networks.resnet import convnet_3x64, convnet_4x128, convnet_digits, resnet18
from .networks.tabular import MlpOptions, TabResnetOptions, mlp, tab_resnet
from .networks.text import TextTransformerOptions, text_transformer
from .networks.unet import UnetOptions, unet

Norm: TypeAlias = Literal["none", "batch", "group"]
# One record: channels, height, width; of a series channels, length; of a volume also the depth.
Shape: TypeAlias = tuple[int, ...]
Layers: TypeAlias = list[tuple[str, nn.Module]]

# channels → groups: three or four channels share one group's statistics
GROUPS = {6: 2, 16: 4, 32: 8}


@dataclass(frozen=True)
class Network:
    """One architecture: its default input, the inputs that it can take, and its parts.

    Initial values come from ``fill`` of build.py, not from ``build``.
    """

    default_input: Shape
    fault: Callable[[Shape], str]  # why it cannot take an input; empty if it can
    # (input, classes, norm, further arguments) → extractor and classifier
    build: Callable[..., dict[str, nn.Module]]
    norms: tuple[Norm, ...] = ("none", "batch", "group")
    # of a configurable network: further arguments of ``build``, by name, with their defaults
    options: type[Strict] | None = None
    dense: bool = False  # outputs for each position


def at_least(side: int) -> Callable[[Shape], str]:
    """A check for the smallest height and width.

    Its text follows the network's name in an error.
    """

    def fault(shape: Shape) -> str:
        if len(shape) != 3:
            return f"takes images [channels, height, width], not {list(shape)}"
        if min(shape[1:]) < side:
            return f"needs at least {side} x {side} pixels, not {list(shape)}"
        return ""

    return fault


def exactly(wanted: Shape) -> Callable[[Shape], str]:
    """A check for the one input that an architecture takes.

    Like ``at_least``, for networks of a fixed input.
    """
    return lambda shape: "" if shape == wanted else f"takes input {list(wanted)}, not {list(shape)}"


def any_shape(_: Shape) -> str:
    """No fault: the network flattens its records."""
    return ""


def series(shape: Shape) -> str:
    """Why a record is no series; a height of 1 is none, as some readers write it."""
    if len(shape) == 2 or (len(shape) == 3 and shape[1] == 1):
        return ""
    return f"takes records [channels, length] or [channels, 1, length], not {list(shape)}"


def volume(shape: Shape) -> str:
    """Why a record is no volume."""
    if len(shape) == 4:
        return ""
    return f"takes records [channels, depth, height, width], not {list(shape)}"


def image_or_volume(shape: Shape) -> str:
    """Why a record is neither an image nor a volume."""
    if len(shape) in (3, 4):
        return ""
    return f"takes [channels, height, width] or [channels, depth, height, width], not {list(shape)}"


def text(shape: Shape) -> str:
    """Why a record is no row of tokens."""
    return "" if len(shape) == 1 else f"takes texts [length], not {list(shape)}"


def lenet5(shape: Shape, classes: int, norm: Norm) -> dict[str, nn.Module]:
    """LeNet-5 as pFedSim has it, norms included.

    It has 84 features, and needs 16 pixels a side.
    """
    layers = [*_lenet5_layers(shape, norm), ("relu4", nn.ReLU())]
    return {"extractor": nn.Sequential(OrderedDict(layers)), "classifier": nn.Linear(84, classes)}


def pfedsim_lenet5(shape: Shape, classes: int, norm: Norm) -> dict[str, nn.Module]:
    """``lenet5`` without its last ReLU, so that its 84 features have both signs.

    So the authors' code of pFedSim has it (FL-bench, src/config/models.py, May 2023).
    """
    layers = _lenet5_layers(shape, norm)
    return {"extractor": nn.Sequential(OrderedDict(layers)), "classifier": nn.Linear(84, classes)}


def _lenet5_layers(shape: Shape, norm: Norm) -> Layers:
    channels, height, width = shape
    # Each 5x5 convolution takes 4 pixels off a side, and pooling halves the rest.
    pooled = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    return [
        *block(1, nn.Conv2d(channels, 6, 5), norm),
        *block(2, nn.Conv2d(6, 16, 5), norm),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(16 * pooled[0] * pooled[1], 120)),
        ("relu3", nn.ReLU()),
        ("fc2", nn.Linear(120, 84)),
    ]


def cnn_digits(_: Shape, classes: int, norm: Norm) -> dict[str, nn.Module]:
    """Two small convolutions for 8x8 digits.

    It has 64 features, and takes only [B, 1, 8, 8].
    """
    layers = [
        *block(1, nn.Conv2d(1, 16, 3, padding=1), norm),
        *block(2, nn.Conv2d(16, 32, 3, padding=1), norm),
        ("flatten", nn.Flatten()),
        # 8 pixels a side, pooled twice, are 2.
        ("fc1", nn.Linear(32 * 2 * 2, 64)),
        ("relu3", nn.ReLU()),
    ]
    return {"extractor": nn.Sequential(OrderedDict(layers)), "classifier": nn.Linear(64, classes)}


def block(number: int, conv: nn.Conv2d, norm: Norm) -> Layers:
    """Convolution, norm, ReLU, 2x2 max-pool.

    No ReLU is in place: per-sample gradients need its input.
    """
    channels = conv.out_channels
    norms: dict[str, Layers] = {
        "none": [],
        "batch": [(f"norm{number}", nn.BatchNorm2d(channels))],
        "group": [(f"norm{number}", nn.GroupNorm(GROUPS[channels], channels))],
    }
    return [
        (f"conv{number}", conv),
        *norms[norm],
        (f"relu{number}", nn.ReLU()),
        (f"pool{number}", nn.MaxPool2d(2)),
    ]


NETWORKS: dict[str, Network] = {
    "lenet5": Network((3, 32, 32), at_least(16), lenet5),  # 16 → conv 12 → pool 6 → conv 2 → pool 1
    "pfedsim-lenet5": Network((3, 32, 32), at_least(16), pfedsim_lenet5),
    "cnn-digits": Network((1, 8, 8), exactly((1, 8, 8)), cnn_digits),
    "glm": Network((1, 1, 150), any_shape, glm, ("none",)),
    "ppfl-mlp": Network((1, 28, 28), any_shape, ppfl_mlp, ("none",)),
    "fedssa-cnn-1": Network((3, 32, 32), at_least(16), fedssa_cnn(32, 2000), ("none",)),
    "fedssa-cnn-2": Network((3, 32, 32), at_least(16), fedssa_cnn(16, 2000), ("none",)),
    "fedssa-cnn-3": Network((3, 32, 32), at_least(16), fedssa_cnn(32, 1000), ("none",)),
    "fedssa-cnn-4": Network((3, 32, 32), at_least(16), fedssa_cnn(32, 800), ("none",)),
    "fedssa-cnn-5": Network((3, 32, 32), at_least(16), fedssa_cnn(32, 500), ("none",)),
    "digits-cnn-a": Network((1, 8, 8), at_least(4), digits_cnn((8, 16), ()), ("none",)),
    "digits-cnn-b": Network((1, 8, 8), at_least(4), digits_cnn((12, 24), (96,)), ("none",)),
    "digits-cnn-c": Network((1, 8, 8), at_least(4), digits_cnn((16,), ()), ("none",)),
    "fedsimsup-lenet": Network((3, 32, 32), at_least(16), lenet, ("none",)),
    "fedsimsup-lenet-wide": Network((3, 32, 32), at_least(16), lenet_wide, ("none",)),
    "convnet-3x64": Network((1, 28, 28), at_least(8), convnet_3x64, ("batch", "group")),
    "convnet-4x128": Network((3, 32, 32), at_least(16), convnet_4x128, ("batch", "group")),
    "convnet-digits": Network((1, 8, 8), exactly((1, 8, 8)), convnet_digits),
    "resnet18": Network((3, 32, 32), at_least(16), resnet18, ("batch", "group")),
    "mobilenet-v2": Network((3, 32, 32), at_least(32), mobilenet_v2, ("batch", "group")),
    "mlp": Network((1, 1, 150), any_shape, mlp, options=MlpOptions),
    "tab-resnet": Network((1, 1, 150), any_shape, tab_resnet, options=TabResnetOptions),
    "series-resnet": Network((12, 1000), series, series_resnet, options=SeriesResnetOptions),
    "volume-resnet": Network((1, 32, 32, 32), volume, volume_resnet, options=VolumeResnetOptions),
    "unet": Network((1, 64, 64), image_or_volume, unet, options=UnetOptions, dense=True),
    "text-transformer": Network(
        (128,), text, text_transformer, ("group",), options=TextTransformerOptions
    ),
}
