"""Convolutions of many silos at once: in as many groups as there are silos, as ``vmap`` has them,
or unfolded.

Unfolded, the patches of images are columns, and each silo has one product of matrices. Which is
faster depends on the device and the shapes; ``benchmarks/convolutions.py`` measures both.
"""

from collections.abc import Iterable
from functools import partial
from typing import Literal, TypeAlias

from torch import Tensor, nn
from torch.nn.functional import unfold

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
    """The convolution of x [B, I, H, W] with a weight [O, I, k, l]: [B, O, …, …], but for the last
    bits of sums.
    """
    kernel, dilation = convolution.kernel_size, convolution.dilation
    padding, stride = convolution.padding, convolution.stride
    columns = unfold(x, kernel, dilation, padding, stride)  # type: ignore[arg-type] # [B, I·k·l, places]
    batch, rows, places = columns.shape
    out = weight.flatten(1) @ columns.transpose(0, 1).reshape(rows, batch * places)
    if bias is not None:
        out = out + bias.to(out.dtype)[:, None]  # else bfloat16 would end here
    height, width = (
        (size + 2 * int(padding[i]) - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
        for i, size in enumerate(x.shape[-2:])
    )
    return out.reshape(len(weight), batch, height, width).transpose(0, 1)
