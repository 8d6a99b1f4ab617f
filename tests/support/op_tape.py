"""A recorder as a GPU's, on the CPU: what ran is taken down operation by operation, and replayed
without Python.

As with a CUDA graph each operation has the tensors that it was recorded with, at their places, and
numbers stay what they were then. Unlike there, recording does compute: the replay that follows it
has nothing to do.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")


def waits(func):
    """Whether the host would wait for the device."""
    return func._schema.name.removeprefix("aten::") in WAITS


class _Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not waits(func), f"{func} waits for the device"
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, results))
        return results

    def play(self):
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, results in self.calls:
                again = func(*args, **kwargs)
                for there, here in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if isinstance(there, Tensor) and there.data_ptr() != here.data_ptr():
                        there.copy_(here)


class Recorder:
    def __init__(self):
        self.warmed = self.recorded = self.replayed = self.branches = 0

    def warm(self, run):
        self.warmed += 1
        return run()

    def record(self, run):
        self.recorded += 1
        with _Tape() as tape:
            run()
        fresh = [True]

        def replay():
            self.replayed += 1
            if fresh:
                fresh.clear()
            else:
                tape.play()

        return replay

    def parallel(self, runs):
        self.branches += len(runs)
        return [run() for run in runs]
