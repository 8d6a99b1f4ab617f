"""What would fail on a GPU, seen on torch's device "meta", which has no numbers: tensors of the
host among its own.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OneDevice(TorchDispatchMode):
    """No operation is of tensors on several devices.

    Within a step, none brings a tensor from one to another.
    """

    def __init__(self):
        super().__init__()
        self.within = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        moves = not self.within and func in (
            torch.ops.aten._to_copy.default,
            torch.ops.aten.copy_.default,
        )
        if not moves:
            tensors = [
                t for t in tree_leaves((args, kwargs, results)) if isinstance(t, torch.Tensor)
            ]
            devices = {t.device.type for t in tensors if t.ndim}
            assert len(devices) < 2, f"{func} of tensors on {devices}"
            assert not self.within or devices != {"cpu"}, f"{func} makes a tensor on the host"
        return results
