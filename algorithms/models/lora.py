"""Low-rank adapters (LoRA): the extractor stands still, small matrices next to its layers train.

Hu et al. (2022, arXiv:2106.09685), Eq. 3: a linear layer W x + b becomes W x + b + (α/r) B A x with
A [r, inputs] and B [outputs, r], where W and b do not move. A begins as drawn and B as 0, so the
model begins as it is without adapters. Other parameters of the extractor do not move either; the
classifier trains as a whole. As in FedIT (Zhang et al., 2024, arXiv:2305.05644), methods mix A and
B each on its own, so a mean of A and B is not the mean of the products B A.

What does not move becomes buffers under the names that it had. So it is in a silo's state, in
files of weights and in results, and it never crosses.
"""

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ...errors import LocalError
from ...files.documents import Strict
from ..numerics.frozen import FROZEN

MATRICES = ("lora_a", "lora_b")  # of an adapter
MOST_SHOWN = 8  # layers, in an error

Pattern = Annotated[str, Field(pattern=r"^[\w.*?]+$", max_length=255)]


class LoraOptions(Strict):
    """The [model.lora] table."""

    targets: Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=64)] = ("*",)
    """Patterns of the names of the extractor's layers, such as "encoder.*.query".

    Linear and convolutional layers get an adapter.
    """
    rank: Annotated[int, Field(strict=True, ge=1, le=4096)] = 8
    """r, at most the layer's own number of inputs and outputs."""
    alpha: Annotated[int, Field(strict=True, ge=1, le=65536)] = 16
    """α: what an adapter adds is multiplied by alpha / rank."""


class _Adapted(nn.Module):
    """A layer that stands still, and its adapter."""

    lora_a: Any  # of the layer's own type
    lora_b: Any
    scale: float

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 torch's name for it
        """The layer's output, and (α/r) B A x."""
        own: Tensor = super().forward(input)
        added: Tensor = self.lora_b(self.lora_a(input)) * self.scale
        return own + added


class _Linear(_Adapted, nn.Linear): ...


class _Conv1d(_Adapted, nn.Conv1d): ...


class _Conv2d(_Adapted, nn.Conv2d): ...


class _Conv3d(_Adapted, nn.Conv3d): ...


ADAPTED: Mapping[type[nn.Module], type[_Adapted]] = {
    nn.Linear: _Linear,
    nn.Conv1d: _Conv1d,
    nn.Conv2d: _Conv2d,
    nn.Conv3d: _Conv3d,
}


def adapt(extractor: nn.Module, options: LoraOptions, model: str) -> None:
    """Let the module's parameters stand still, and give its layers adapters, without values yet.

    The module is changed in place; LocalError where a pattern names no such layer.
    """
    # Layers of a derived type may not be called: their parent reads their weights.
    layers = {name: own for name, own in extractor.named_modules() if type(own) in ADAPTED}
    chosen: set[str] = set()
    for pattern in options.targets:
        if not (found := fnmatch.filter(layers, pattern)):
            shown = ", ".join([*layers][:MOST_SHOWN]) or "none"
            raise LocalError(
                f"model.lora.targets: {pattern!r} names no linear or convolutional layer of the"
                f" extractor of {model!r}; it has {shown}"
            )
        chosen.update(found)
    for layer in extractor.modules():
        _freeze(layer)
    for name in chosen:
        _add_adapter(layers[name], options)


def _freeze(layer: nn.Module) -> None:
    own = dict(layer.named_parameters(recurse=False))
    for name, parameter in own.items():
        delattr(layer, name)
        layer.register_buffer(name, parameter.detach())
    setattr(layer, FROZEN, frozenset(own))


def _add_adapter(layer: Any, options: LoraOptions) -> None:
    kind, weight = type(layer), layer.weight
    # More would add nothing to what the adapter can be.
    rank = min(options.rank, len(weight), weight[0].numel())
    with torch.device(weight.device):
        if kind is nn.Linear:
            layer.lora_a = nn.Linear(layer.in_features, rank, bias=False)
            layer.lora_b = nn.Linear(rank, layer.out_features, bias=False)
        else:
            # A has the layer's own kernel, and B one place, as in Hugging Face's PEFT. Both see all
            # channels, whatever the layer's groups.
            kernel = layer.kernel_size, layer.stride, layer.padding, layer.dilation
            mode = layer.padding_mode
            layer.lora_a = kind(layer.in_channels, rank, *kernel, bias=False, padding_mode=mode)
            layer.lora_b = kind(rank, layer.out_channels, 1, bias=False)
    layer.__class__ = ADAPTED[kind]
    layer.scale = options.alpha / options.rank


def adapters(module: nn.Module) -> Iterator[tuple[str, _Adapted]]:
    """The layers with adapters, by their names."""
    for name, layer in module.named_modules():
        if isinstance(layer, _Adapted):
            yield name, layer


def adapter_names(module: nn.Module) -> set[str]:
    """Names of the parameters of all adapters."""
    return {f"{name}.{own}.weight" for name, _ in adapters(module) for own in ("lora_a", "lora_b")}


@torch.no_grad()
def check_called(extractor: nn.Module, x: Tensor, model: str) -> None:
    """LocalError unless the module calls each layer with an adapter, in evaluation and in training.

    Some layers of torch read the weights of those within them, and so would pass by the adapters.
    """
    for training in (False, True):
        called: set[nn.Module] = set()
        extractor.train(training)
        # For all modules at once: layers with hooks of their own would call those within them.
        with register_module_forward_hook(lambda layer, *_, called=called: called.add(layer)):
            extractor(x)
        if passed := sorted(name for name, layer in adapters(extractor) if layer not in called):
            mode = {True: "in training", False: "in evaluation"}[training]
            raise LocalError(
                f"model.lora: {model!r} reads the weights of layer {passed[0]!r} without calling it"
                f" {mode}, so an adapter would do nothing; leave it out of targets, or have the"
                " model's code call its layers"
            )
