"""Convolutions of many silos at once: in as many groups as there are silos, as ``vmap`` has them,
or unfolded.

Unfolded, the patches of images are columns, and each silo has one product of matrices. Which is
faster depends on the device and the shapes; ``benchmarks/convolutions.py`` measures both.
"""

from collections.abc import Iterable
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

Form: TypeAlias = Literal["grouped", "unfolded"]


def unfold_all(modules: Iterable[nn.Module]) -> None:
    """Let convolutions be unfolded from now on.

    Those of several groups, or padded with other than zeros, stay.
    """
    for module in modules:
        for leaf in module.modules():
            if isinstance(leaf, nn.Conv2d) and can_unfold(leaf):
                leaf._conv_forward = partial(unfolded, leaf)  # type: ignore[method-assign] # noqa: SLF001 made for it


def can_unfold(convolution: nn.Conv2d) -> bool:
    """Whether ``unfolded`` gives what the convolution does."""
    padding = convolution.padding
    return (
        convolution.groups == 1
        and convolution.padding_mode == "zeros"
        and not isinstance(padding, str)
    )


def unfolded(convolution: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of x [B, I, H, W] with a weight [O, I, k, l]: [B, O, h, w], but for the last
    bits of sums.

    Its numbers lie in memory as [O, B, h, w].
    """
    # Autocast would cast the columns, which are k·l times as many numbers.
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    columns = patches(convolution, x)
    batch, height, width = columns.shape[3:]
    # One copy, of all silos; torch's own unfold launches one kernel for each image on a GPU.
    columns = columns.reshape(-1, batch * height * width)
    out = weight.flatten(1) @ columns
    if bias is not None:
        out = out + bias.to(out.dtype)[:, None]
    return out.reshape(len(weight), batch, height, width).transpose(0, 1)


def patches(convolution: nn.Conv2d, x: Tensor) -> Tensor:
    """What each output of the convolution of x [B, I, H, W] looks at: a view [I, k, l, B, h, w]."""
    dilation = convolution.dilation
    top, left = map(int, convolution.padding)
    if top or left:
        x = pad(x, (left, left, top, top))
    for axis, dilated, size, stride in zip(
        (2, 3), dilation, convolution.kernel_size, convolution.stride, strict=True
    ):
        x = x.unfold(axis, dilated * (size - 1) + 1, stride)
    return x[..., :: dilation[0], :: dilation[1]].permute(1, 4, 5, 0, 2, 3)
