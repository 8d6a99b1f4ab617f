"""A GPU's autocast on the CPU: there convolutions without bias, and group norm, are in its lists.

``vmap`` calls ``aten::convolution``, which a GPU computes in bfloat16 and the CPU's list leaves
out; and a GPU computes group norm in float32.
"""

from contextlib import contextmanager

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard


def _cast(op, dtype):
    def call(*args):
        with _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)):
            return op(*(a.to(dtype) if isinstance(a, torch.Tensor) else a for a in args))

    return call


@contextmanager
def as_on_a_gpu():
    library = torch.library.Library("aten", "IMPL")
    rules = {
        "convolution": (torch.ops.aten.convolution.default, torch.bfloat16),
        "group_norm": (torch.ops.aten.group_norm.default, torch.float32),
    }
    try:
        for name, rule in rules.items():
            library.impl(name, _cast(*rule), "AutocastCPU")
        yield
    finally:
        library._destroy()
