"""What a device launches, and how many bytes it reads and writes, as its operations tell."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FREE = ("detach", "_unsafe_view", "empty", "empty_like", "new_empty", "new_empty_strided")


class Cost(TorchDispatchMode):
    """Views cost nothing; each other operation is a kernel that reads and writes its tensors."""

    def __init__(self):
        super().__init__()
        self.kernels = self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name.removeprefix("aten::") not in FREE:
            self.kernels += 1
            tensors = [t for t in tree_leaves((args, kwargs, results)) if isinstance(t, Tensor)]
            self.nbytes += sum(t.nbytes for t in tensors)
        return results
