"""Low-rank adapters (LoRA): the extractor stands still, small matrices next to its layers train.

Hu et al. (2022, arXiv:2106.09685), Eq. 3: a linear layer W x + b becomes W x + b + (α/r) B A x with
A [r, inputs] and B [outputs, r], where W and b do not move. A begins as drawn and B as 0, so the
model begins as it is without adapters. Other parameters of the extractor do not move either; the
classifier trains as a whole. As in FedIT (Zhang et al., 2024, arXiv:2305.05644), methods mix A and
B each on its own, so a mean of A and B is not the mean of the products B A.

What does not move becomes buffers under the names that it had. So it is in a silo's state, in
files of weights and in results, and it never crosses.
"""

import copy
import fnmatch
import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ...errors import LocalError
from ...files.documents import Strict
from ..numerics.frozen import FROZEN
from ..numerics.streams import stream
from ..numerics.torch_draws import drawing

MATRICES = ("lora_a", "lora_b")  # of an adapter
MOST_SHOWN = 8  # layers, in an error

Pattern = Annotated[str, Field(pattern=r"^[\w.*?]+$", max_length=255)]


class LoraOptions(Strict):
    """The [model.lora] table."""

    targets: Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=64)] = ("*",)
    """Patterns of the names of the extractor's layers, such as "encoder.*.query".

    Linear and convolutional layers get an adapter, where it is smaller than they are; those with
    groups get none.
    """
    rank: Annotated[int, Field(strict=True, ge=1, le=4096)] = 8
    """r, rows of A and columns of B."""
    alpha: Annotated[int, Field(strict=True, ge=1, le=65536)] = 16
    """α: what an adapter adds is multiplied by alpha / rank."""

    @property
    def scale(self) -> float:
        """α/r."""
        return self.alpha / self.rank


class _Adapted(nn.Module):
    """A layer that stands still, and its adapter."""

    lora_a: Any  # of the layer's own type
    lora_b: Any
    lora_scale: float  # α/r

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 torch's name for it
        """The layer's output, and (α/r) B A x."""
        own: Tensor = super().forward(input)
        added: Tensor = self.lora_b(self.lora_a(input)) * self.lora_scale
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
    """Let the module's parameters stand still, and give its layers adapters, with values of 0.

    The module is changed in place; LocalError where a pattern names no layer that can have one.
    """
    layers = {name: own for name, own in extractor.named_modules() if _adaptable(own, options.rank)}
    chosen: set[str] = set()
    for pattern in options.targets:
        if not (found := set(filter(re.compile(fnmatch.translate(pattern)).match, layers))):
            shown = ", ".join([*layers][:MOST_SHOWN]) or "none"
            raise LocalError(
                f"model.lora.targets: {pattern!r} names no linear or convolutional layer of the"
                f" extractor of {model!r} that is larger than an adapter of rank {options.rank}; it"
                f" has {shown}"
            )
        chosen |= found
    for layer in extractor.modules():
        _freeze(layer)
    for name in chosen:
        _add_adapter(layers[name], options)


def _adaptable(layer: Any, rank: int) -> bool:
    """True if an adapter of the layer is one, and smaller than the layer."""
    # Layers of a derived type may not be called: their parent reads their weights.
    taken = any(map(partial(hasattr, layer), (*MATRICES, "lora_scale")))
    if type(layer) not in ADAPTED or getattr(layer, "groups", 1) > 1 or taken:
        return False
    outputs, inputs = len(layer.weight), layer.weight[0].numel()
    return bool(rank * (outputs + inputs) < outputs * inputs)


def _freeze(layer: nn.Module) -> None:
    own = dict(layer.named_parameters(recurse=False))
    for name, parameter in own.items():
        delattr(layer, name)
        layer.register_buffer(name, parameter.detach())
    setattr(layer, FROZEN, frozenset(own))


def _add_adapter(layer: Any, options: LoraOptions) -> None:
    kind, weight, rank = type(layer), layer.weight, options.rank
    # On "meta" construction draws nothing from torch's generator, which others may be using.
    with torch.device("meta"):
        if kind is nn.Linear:
            layer.lora_a = nn.Linear(layer.in_features, rank, bias=False)
            layer.lora_b = nn.Linear(rank, layer.out_features, bias=False)
        else:
            # A has the layer's own kernel, and B one place, as in Hugging Face's PEFT.
            kernel = layer.kernel_size, layer.stride, layer.padding, layer.dilation
            mode = layer.padding_mode
            layer.lora_a = kind(layer.in_channels, rank, *kernel, bias=False, padding_mode=mode)
            layer.lora_b = kind(rank, layer.out_channels, 1, bias=False)
    for matrix in (layer.lora_a, layer.lora_b):
        matrix._apply(lambda own: torch.zeros(own.shape, dtype=own.dtype, device=weight.device))  # noqa: SLF001 as in build.fill
    layer.__class__ = ADAPTED[kind]
    layer.lora_scale = options.scale


def computed(tensors: Mapping[str, Tensor], options: LoraOptions | None) -> Mapping[str, Tensor]:
    """A part's values, in which layers have the weights that they compute with, W + (α/r) B A.

    What has no adapter stays, and so does a value without the others of its layer. Each is made
    when it is read: all of them together would be a second model.
    """
    return tensors if options is None else _Computed(tensors, options.scale)


class _Computed(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor], scale: float) -> None:
        self._tensors, self._scale = tensors, scale
        layers = {name.removesuffix("lora_a.weight") for name in tensors}.difference(tensors)
        # by the name of a weight, those of its B and A
        self._added = {
            f"{layer}weight": (f"{layer}lora_b.weight", f"{layer}lora_a.weight")
            for layer in layers
            if {f"{layer}weight", f"{layer}lora_b.weight"} <= tensors.keys()
        }
        matrices = set(chain.from_iterable(self._added.values()))
        self._names = [name for name in tensors if name not in matrices]

    def __getitem__(self, name: str) -> Tensor:
        value = self._tensors[name]
        if name not in self._added:
            return value
        b, a = (self._tensors[own] for own in self._added[name])
        added = torch.einsum("or,r...->o...", b.flatten(1), a)
        return value + self._scale * added

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def adapters(module: nn.Module) -> Iterator[tuple[str, _Adapted]]:
    """The layers with adapters, by their names."""
    for name, layer in module.named_modules():
        if isinstance(layer, _Adapted):
            yield name, layer


def adapter_names(module: nn.Module) -> set[str]:
    """Names of the parameters of all adapters."""
    return {f"{name}.{own}.weight" for name, _ in adapters(module) for own in ("lora_a", "lora_b")}


def check_adapters(plain: nn.Module, options: LoraOptions, x: Tensor, model: str) -> None:
    """LocalError unless the module computes with adapters what it did, and each of them counts.

    Some layers of torch read the weights of those within them, and pass by their adapters. ``x``
    are two records; ``plain`` is the module without adapters.
    """
    adapted = copy.deepcopy(plain)
    adapt(adapted, options, model)
    for training in (False, True):
        plain.train(training)
        adapted.train(training)
        called: set[nn.Module] = set()
        with torch.no_grad():
            expected = _drawn_alike(plain, x)
            # For all modules at once: with hooks of its own torch would call a layer that it else
            # passes by.
            with register_module_forward_hook(lambda own, *_, called=called: called.add(own)):
                found = _drawn_alike(adapted, x)
        if passed := sorted(name for name, own in adapters(adapted) if own.lora_a not in called):
            raise LocalError(
                f"model.lora: {model!r} reads the weights of layer {passed[0]!r} without calling"
                " it, as nn.TransformerEncoderLayer does, so an adapter would do nothing; name"
                " other layers in model.lora.targets"
            )
        # Near, since torch takes other ways through some layers whose parameters stand still.
        if not torch.allclose(expected, found, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise LocalError(
                f"model.lora: the code of {model!r} computes something else once its parameters"
                " are buffers, or its layers have adapters; leave model.lora out"
            )


def _drawn_alike(module: nn.Module, x: Tensor) -> Tensor:
    with drawing(stream(0, "", 0, "check")):
        found: Tensor = module(x)
    return found
