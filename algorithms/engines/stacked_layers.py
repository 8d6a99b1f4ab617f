"""Layers of many silos at once: channels lie side by side, and one call computes all silos.

``vmap`` has rules of its own for these layers, which cost passes over the activations: batch norm
is computed without weights and biases, which follow as a product and a sum, and pooling copies its
input. In bfloat16 these rules fail on a GPU (batch norm with running statistics of float32), or
they add biases of float32, and every layer that follows computes in float32.

A convolution of many silos returns [B, S·C, H, W], and the layers here take activations as they lie
so. ``autocast`` sees each of them as it sees torch's own where silos train one by one.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.func import vmap
from torch.nn import functional as F  # noqa: N812 torch's own name for it
from torch.overrides import TorchFunctionMode

T = TypeVar("T")
Layer: TypeAlias = Callable[..., Tensor]


def over_silos(function: Callable[..., T]) -> Callable[..., T]:
    """``vmap`` over silos of a function that may call these layers.

    The first axis of each argument and of the result is the silo.
    """

    def layered(*args: object) -> T:
        with _StackedLayers():
            return function(*args)

    mapped: Callable[..., T] = vmap(layered)
    return mapped


class _StackedLayers(TorchFunctionMode):
    """Calls the layers of this file in place of torch's."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The result of ``func``, or of the layer that replaces it."""
        named: Mapping[str, Any] = kwargs or {}
        if func not in LAYERS or not args:
            return func(*args, **named)
        layer, dimensions = LAYERS[func]
        if args[0].ndim in dimensions and _stacked(*args, *named.values()):
            return layer(*args, **named)
        # torch's own layer, such as for a derivative inside ``vmap``.
        return _in_one_type(func, *args, **named)


def _stacked(*arguments: object) -> bool:
    """True if ``vmap`` alone is on, and each tensor has a value for each silo."""
    # A derivative within ``vmap`` keeps torch's rules, since ordinary autograd does not see it.
    stack = _functorch.get_interpreter_stack() or []
    if [on.key() for on in stack] != [_functorch.TransformType.Vmap]:
        return False
    return all(map(_functorch.is_batchedtensor, _tensors(arguments)))


def _tensors(arguments: Iterable[object]) -> list[Tensor]:
    return [one for one in arguments if isinstance(one, Tensor)]


def _in_one_type(func: Layer, x: Tensor, *args: Any, **named: Any) -> Tensor:
    """Torch's own layer."""
    # Batch norm computes in the type of its statistics: under ``vmap`` a GPU takes no other.
    tensors = _tensors((*args, *named.values()))
    if func is not F.batch_norm or not tensors:
        return func(x, *args, **named)
    return func(x.to(tensors[0].dtype), *args, **named).to(x.dtype)


def _side_by_side(
    layer: Layer, x: Tensor, *parameters: Tensor | None, changed: tuple[Tensor | None, ...] = ()
) -> Tensor:
    """The output of ``layer(S, x, *changed, *parameters)``, which is called once.

    The layer receives x as [B, S·C, …] and the others as [S·C, …]. ``changed`` are views, so what
    the layer writes into them stays.
    """
    interpreter = retrieve_current_functorch_interpreter()
    silos, level = interpreter.batch_size(), interpreter.level()  # type: ignore[attr-defined] # vmap's
    # Below ``vmap``'s level the silos are an ordinary axis of each tensor.
    with interpreter.lower():
        flat = _of_all(x, 1).flatten(1, 2)
        kept = _each_of_all(changed, lambda tensor: tensor.view(-1))
        rest = _each_of_all(parameters, lambda tensor: tensor.flatten(0, 1))
        out = layer(silos, flat, *kept, *rest)
        # The output has S groups of equally many channels, side by side.
        apart = out.view(len(out), silos, -1, *out.shape[2:])
    return _functorch._add_batch_dim(apart, 1, level)  # noqa: SLF001 as vmap does it


def _of_all(tensor: Tensor, dim: int) -> Tensor:
    """The values of all silos, moved to lie along this dimension."""
    own, lies = _functorch.get_unwrapped(tensor), _functorch.maybe_get_bdim(tensor)
    return own if lies == dim else own.movedim(lies, dim)


def _each_of_all(
    tensors: Iterable[Tensor | None], flat: Callable[[Tensor], Tensor]
) -> list[Tensor | None]:
    return [None if tensor is None else flat(_of_all(tensor, 0)) for tensor in tensors]


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    def layer(silos: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # One group per silo, so that output channels see only their silo's input channels.
        return F.conv2d(x, weight, bias, stride, padding, dilation, silos * groups)

    return _side_by_side(layer, x, weight, bias)


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch norm; activations may be bfloat16 while parameters and statistics are float32."""

    def norm(
        x: Tensor,
        mean: Tensor | None,
        variance: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        return F.batch_norm(x, mean, variance, weight, bias, training, momentum, eps)

    def layer(_: int, x: Tensor, *named: Tensor | None) -> Tensor:
        if not _channels_first(x):
            return norm(x, *named)
        # Statistics are over all numbers of a channel, however these are divided among records.
        own = x.transpose(0, 1)
        out = norm(own.flatten(1)[None], *named)
        return out.view(own.shape).transpose(0, 1)

    return _side_by_side(layer, x, weight, bias, changed=(running_mean, running_var))


def _group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Group norm, which ``autocast`` computes in float32; activations keep their type."""

    def layer(silos: int, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.group_norm(x, silos * num_groups, weight, bias, eps).to(x.dtype)

    return _side_by_side(layer, x, weight, bias)


def _pooling(pool: Layer) -> Layer:
    def pooled(x: Tensor, *options: Any, **named: Any) -> Tensor:
        def layer(_: int, x: Tensor) -> Tensor:
            if not _channels_first(x):
                return pool(x, *options, **named)
            # Each channel of each record is pooled on its own, so either axis may come first.
            return pool(x.transpose(0, 1), *options, **named).transpose(0, 1)

        return _side_by_side(layer, x)

    return pooled


def _channels_first(x: Tensor) -> bool:
    """True if x [B, C, …] lies in memory as [C, B, …], as unfolded convolutions leave it.

    A kernel that wants [B, C, …] would copy it.
    """
    return x.transpose(0, 1).is_contiguous() and not x.is_contiguous()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One batched product for all silos, bias included."""
    if bias is None:
        return F.linear(x, weight)
    interpreter = retrieve_current_functorch_interpreter()
    with interpreter.lower():
        # Logits and features keep the bias's type: losses in bfloat16 would be too coarse.
        own = _of_all(bias, 0)[:, None]
        out = torch.baddbmm(own, _of_all(x, 0), _of_all(weight, 0).mT).to(bias.dtype)
    return _functorch._add_batch_dim(out, 0, interpreter.level())  # noqa: SLF001 as vmap does it


# by function of torch: its replacement, and the dimensions that one silo's activations may have
LAYERS: Mapping[Callable[..., Any], tuple[Layer, tuple[int, ...]]] = {
    F.conv2d: (_convolution, (4,)),
    F.batch_norm: (_batch_norm, (2, 3, 4)),
    F.group_norm: (_group_norm, (2, 3, 4)),
    F.linear: (_linear, (2,)),
    F.max_pool2d: (_pooling(F.max_pool2d), (4,)),
    F.avg_pool2d: (_pooling(F.avg_pool2d), (4,)),
    F.adaptive_avg_pool2d: (_pooling(F.adaptive_avg_pool2d), (4,)),
}
