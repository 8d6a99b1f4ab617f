"""A step of the stacked engine, compiled by torch.compile: a contender of first_gpu_run.py.

The step is traced into a graph of torch's operations, its gradients and its update included. The
graph is compiled, by Triton on a GPU and by g++ on a CPU, and then recorded and replayed as the
engine's own step is. ``docs/performance.md`` has what that gains.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from staddle.algorithms.engines import vmap_training
from staddle.algorithms.engines.cuda_graphs import Recorder, Replayed, Run

BACKEND = "inductor"  # of torch.compile


class CompiledStep:
    """What ``Replayed`` is, of a compiled function; its first call is traced, and counts."""

    def __init__(self, run: Run, recorder: Recorder) -> None:
        self._run, self._recorder = run, recorder
        self._replayed: Replayed | None = None

    def __call__(self, *given: Tensor) -> Tensor:
        """The function's result, which the next call may overwrite."""
        if self._replayed is not None:
            return self._replayed(*given)
        found: list[Tensor] = []

        def traced(*given: Tensor) -> Tensor:
            found.append(self._run(*given))
            return found[0]

        graph = make_fx(traced)(*given)
        self._replayed = Replayed(torch.compile(graph, backend=BACKEND), self._recorder)
        return found[0]

    def forget(self) -> None:
        """Drop the graph and its recording; no call follows."""
        self._replayed = None


@contextmanager
def compiled() -> Iterator[None]:
    """Steps that engines begin within it are compiled."""
    own = vmap_training.Replayed
    vmap_training.Replayed = CompiledStep  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        vmap_training.Replayed = own  # type: ignore[misc]
