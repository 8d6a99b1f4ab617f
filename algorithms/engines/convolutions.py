"""Convolutions of many silos at once: grouped, one group per silo, as ``vmap`` does; or unfolded.

Unfolded, the patches of images become columns, and each silo has one matrix product. Which form is
faster depends on the device and the shapes; ``benchmarks/convolutions.py`` measures both. In a
large network each silo's step is faster by itself, all in parallel (``in_parallel``).
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.nn.functional import pad

from ..numerics.devices import CPU, Precision, in_force

Form: TypeAlias = Literal["grouped", "unfolded", "parallel", "faster"]

IMAGE_CHANNELS = 3  # a convolution with at most this many channels takes a network's own input
FEW_CHANNELS, FEW_PLACES = 64, 16  # measured (docs/performance.md)
LARGE_BYTES = 2**20  # that a backward pass keeps of a record; measured, too


def in_parallel(form: Form, device: torch.device, precision: Precision, record_bytes: int) -> bool:
    """True if each silo's step is computed by itself, all in parallel.

    "faster" decides on a GPU by the bytes that a backward pass keeps of a record.
    """
    if form != "faster":
        return form == "parallel"
    # The kernels of a small network do not fill a GPU, even many at a time. Those of a large one
    # do, and cuDNN has none that computes the convolutions of several silos at once. In float32
    # unfolded convolutions are faster still.
    return device != CPU and precision != "float32" and record_bytes >= LARGE_BYTES


def prepare(modules: Iterable[nn.Module], form: Form, device: torch.device) -> None:
    """Let the convolutions of modules be computed in this form from now on.

    "faster" decides by shape on a GPU (``faster_unfolded``), and is "grouped" on a CPU.
    Convolutions of several groups, or padded with other than zeros, stay as they are. Modules are
    changed in place.
    """
    if form == "faster" and device == CPU:
        form = "grouped"
    if form in ("grouped", "parallel"):
        return
    for leaf in chain.from_iterable(module.modules() for module in modules):
        if not isinstance(leaf, nn.Conv2d) or not can_unfold(leaf):
            continue
        plain = leaf._conv_forward  # noqa: SLF001 it is made to be replaced
        own = partial(unfolded, leaf)
        if form == "faster":
            own = partial(_by_shape, leaf, plain)
        leaf._conv_forward = own  # type: ignore[method-assign] # noqa: SLF001


def _by_shape(
    leaf: nn.Conv2d,
    plain: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    # One silo by itself has nothing to group.
    if _functorch.is_batchedtensor(weight) and faster_unfolded(leaf, x):
        return unfolded(leaf, x, weight, bias)
    return plain(x, weight, bias)


def faster_unfolded(leaf: nn.Conv2d, x: Tensor) -> bool:
    """True if a GPU takes less time for the unfolded form of x [B, I, H, W], in the present type.

    Measured on an H200, ten silos with batches of 32, forward and backward (docs/performance.md).
    """
    # Grouped, cuDNN calls kernels for one silo after another. In float32 that is slower, except for
    # a network's own input. On tensor cores these kernels are so fast that unfolding pays only
    # where there are few columns, or few channels.
    if leaf.in_channels <= IMAGE_CHANNELS:
        return False
    if in_force(x.device) == "float32" or leaf.kernel_size == (1, 1):
        return True
    height, width = outputs(leaf, x.shape)
    return height * width <= FEW_PLACES or leaf.in_channels < FEW_CHANNELS


def outputs(leaf: nn.Conv2d, shape: torch.Size) -> tuple[int, int]:
    """Height and width of the convolution's output for x of this shape [B, I, H, W].

    Each is ⌊(size + 2·padding − dilation·(kernel − 1) − 1) / stride⌋ + 1, as in torch.
    """
    sizes: list[int] = []
    for axis, size in enumerate(shape[2:]):
        # A number: ``can_unfold`` excludes padding by name.
        padding = int(leaf.padding[axis])
        spread = leaf.dilation[axis] * (leaf.kernel_size[axis] - 1)
        sizes.append((size + 2 * padding - spread - 1) // leaf.stride[axis] + 1)
    height, width = sizes
    return height, width


def can_unfold(convolution: nn.Conv2d) -> bool:
    """True if ``unfolded`` computes what the convolution does.

    It does not for several groups, padding with other than zeros, or padding by name ("same").
    """
    form = (convolution.groups, convolution.padding_mode)
    return form == (1, "zeros") and not isinstance(convolution.padding, str)


def unfolded(convolution: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of x [B, I, H, W] with a weight [O, I, k, l]: [B, O, h, w].

    It equals torch's up to the last bits of sums. Its numbers lie in memory as [O, B, h, w].
    Stride, padding and dilation are those of ``convolution``.
    """
    # Autocast would cast the columns, which are k·l times as many numbers.
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    columns = patches(convolution, x)
    batch, height, width = columns.shape[3:]
    # One copy, of all silos; torch's own unfold launches one kernel for each image on a GPU.
    columns = columns.reshape(-1, batch * height * width)
    out = weight.flatten(1) @ columns
    # A float32 bias would turn a bfloat16 product into float32.
    if bias is not None:
        out = out + bias.to(out.dtype)[:, None]
    return out.reshape(len(weight), batch, height, width).transpose(0, 1)


def patches(convolution: nn.Conv2d, x: Tensor) -> Tensor:
    """The input of each output of the convolution of x [B, I, H, W]: a view [I, k, l, B, h, w]."""
    dilation = convolution.dilation
    top, left = map(int, convolution.padding)
    if top or left:
        # With zeros, the only padding that ``can_unfold`` allows.
        x = pad(x, (left, left, top, top))
    for axis, dilated, size, stride in zip(
        (2, 3), dilation, convolution.kernel_size, convolution.stride, strict=True
    ):
        # ``unfold`` gives a view; ``unfolded`` makes the only copy.
        x = x.unfold(axis, dilated * (size - 1) + 1, stride)
    # Windows span the dilated kernel; every ``dilation``-th place of them is an input.
    return x[..., :: dilation[0], :: dilation[1]].permute(1, 4, 5, 0, 2, 3)
