"""The models of a job: two parts, ``extractor`` and ``classifier``, equal at every silo before the first round.

lenet5 is the LeNet-5 of pFedSim (Tan et al., 2023, Table 5, as its authors' code reads): conv 5x5 to 6 and to 16
channels, each with norm, ReLU and 2x2 max-pool, then 120 and 84 units. On 3x32x32 with norm "batch" and 10 classes:
456 + 12 + 2,416 + 32 + 48,120 + 10,164 = 61,200 parameters in the extractor and 850 in the classifier; batch norm
adds 46 numbers of running statistics, which never leave a silo. cnn-digits is a small network for the 8x8 digits.

Initial values are not torch's: Linear and Conv weights and biases are U(-1/sqrt(fan_in), 1/sqrt(fan_in)) from the
job's own streams, so neither the torch release nor its global generator changes them, nor are they changed by us.
"""

from collections import OrderedDict
from typing import Annotated, Literal

import pydantic
import torch
from pydantic import Field
from torch import nn

from ..errors import LocalError
from ..files import Strict
from .streams import stream, uniform

MODEL_VERSION = 1  # raised when a model of this file changes: it enters the job's model digest
GROUPS = {6: 2, 16: 4, 32: 8}  # channels → groups: three or four channels share one group's statistics
LENET_SMALLEST = 16  # 16 → conv 12 → pool 6 → conv 2 → pool 1; anything smaller leaves no pixel
DEFAULT_INPUT = {"lenet5": (3, 32, 32), "cnn-digits": (1, 8, 8)}

Size = Annotated[int, Field(strict=True, ge=1, le=4096)]
Shape = tuple[int, int, int]


class ModelOptions(Strict):
    """The [model] table of a job file."""

    name: Literal["lenet5", "cnn-digits"]
    classes: Annotated[int, Field(strict=True, ge=2, le=100_000)]
    norm: Literal["none", "batch", "group"] = "none"
    input: tuple[Size, Size, Size] | None = None
    """Channels, height, width; left out, the model's own: [3, 32, 32] for lenet5, [1, 8, 8] for cnn-digits."""

    @pydantic.model_validator(mode="after")
    def _input_fits(self) -> "ModelOptions":
        shape = input_shape(self)
        if self.name == "cnn-digits" and shape != DEFAULT_INPUT[self.name]:
            raise ValueError(f"cnn-digits takes input [1, 8, 8], not {list(shape)}; remove the key or use lenet5")
        if self.name == "lenet5" and min(shape[1:]) < LENET_SMALLEST:
            raise ValueError(f"lenet5 needs at least {LENET_SMALLEST} x {LENET_SMALLEST} pixels, not {list(shape)}")
        return self


def input_shape(options: ModelOptions) -> Shape:
    """Channels, height and width of one record."""
    return options.input or DEFAULT_INPUT[options.name]


def build(options: ModelOptions, seed: int) -> dict[str, nn.Module]:
    """A freshly initialised model by part; the same options and seed give the same bits everywhere."""
    with torch.device("meta"):  # construction draws nothing from torch's generator
        parts = _lenet5(options) if options.name == "lenet5" else _cnn_digits(options)
    for part, module in parts.items():
        module.to_empty(device="cpu")
        initialise(module, seed, part)
    return parts


@torch.no_grad()
def initialise(module: nn.Module, seed: int, prefix: str) -> None:
    """Fill a module's parameters and buffers from the streams ``init/<prefix>.<name>``; norms start as identities."""
    for name, leaf in module.named_modules():
        if any(True for _ in leaf.children()):
            if leaf._parameters or leaf._buffers:  # noqa: SLF001 - torch has no public name for a module's own tensors
                raise LocalError(f"model: {type(leaf).__name__} {name!r} holds tensors beside its submodules")
        elif isinstance(leaf, nn.Linear | nn.Conv2d):
            bound = leaf.weight[0].numel() ** -0.5  # fan_in = inputs of one unit
            for leaf_name, tensor in leaf.named_parameters():
                full_name = ".".join(filter(None, (prefix, name, leaf_name)))
                values = uniform(stream(seed, "", 0, f"init/{full_name}"), tensor.shape, -bound, bound)
                tensor.copy_(torch.from_numpy(values))
        elif isinstance(leaf, nn.BatchNorm2d | nn.GroupNorm):
            leaf.reset_parameters()  # weight 1, bias 0, running mean 0, running variance 1: nothing random
        elif any(True for _ in leaf.parameters()) or any(True for _ in leaf.buffers()):
            raise LocalError(f"model: no initialisation is defined for {type(leaf).__name__} {name!r}; add it here")


def _lenet5(options: ModelOptions) -> dict[str, nn.Module]:
    channels, height, width = input_shape(options)
    pooled = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    layers = [
        *_block(1, nn.Conv2d(channels, 6, 5), options.norm),
        *_block(2, nn.Conv2d(6, 16, 5), options.norm),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(16 * pooled[0] * pooled[1], 120)),
        ("relu3", nn.ReLU()),
        ("fc2", nn.Linear(120, 84)),
        ("relu4", nn.ReLU()),
    ]
    return {"extractor": nn.Sequential(OrderedDict(layers)), "classifier": nn.Linear(84, options.classes)}


def _cnn_digits(options: ModelOptions) -> dict[str, nn.Module]:
    layers = [
        *_block(1, nn.Conv2d(1, 16, 3, padding=1), options.norm),
        *_block(2, nn.Conv2d(16, 32, 3, padding=1), options.norm),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(32 * 2 * 2, 64)),
        ("relu3", nn.ReLU()),
    ]
    return {"extractor": nn.Sequential(OrderedDict(layers)), "classifier": nn.Linear(64, options.classes)}


def _block(number: int, conv: nn.Conv2d, norm: str) -> list[tuple[str, nn.Module]]:
    """Convolution, norm, ReLU, 2x2 max-pool. No ReLU is in place: per-sample gradients need its input."""
    channels = conv.out_channels
    norms: dict[str, list[tuple[str, nn.Module]]] = {
        "none": [],
        "batch": [(f"norm{number}", nn.BatchNorm2d(channels))],
        "group": [(f"norm{number}", nn.GroupNorm(GROUPS[channels], channels))],
    }
    return [(f"conv{number}", conv), *norms[norm], (f"relu{number}", nn.ReLU()), (f"pool{number}", nn.MaxPool2d(2))]
