"""How many bytes of tensors there are at most while something runs, as an allocator would count
them.
"""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held(TorchDispatchMode):
    """Of tensors that an operation made meanwhile; what a kernel takes for itself is not seen."""

    def __init__(self):
        super().__init__()
        self.most, self._there = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                ref = StorageWeakRef(storage)
                if storage.nbytes() and (
                    ref.cdata not in self._there or self._there[ref.cdata][0].expired()
                ):
                    self._there[ref.cdata] = ref, storage.nbytes()
        self._there = {key: held for key, held in self._there.items() if not held[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._there.values()))
        return results
