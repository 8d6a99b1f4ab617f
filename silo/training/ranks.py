"""The processes that torchrun starts for one order, joined by torch.distributed.

On CPUs they add up by gloo, on GPUs by NCCL. Neither encrypts or asks who is there: whoever reaches
the network between them reads gradients, and the noise of a private job, and may join. So where all
are on one machine, they meet in a file of the order's folder, and listen on its loopback interface
alone.

Each process has the whole order; with ``shard`` it holds but a piece of each weight that stands
still (algorithms/numerics/sharded_weight.py). They share the batches that are trained on
(algorithms/training/data_parallel.py, dp_sgd.py). Everything else, such as evaluations, each
computes whole, and the outcome is that of process 0.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ...algorithms.numerics.ranks import ALONE, Ranks
from ...algorithms.training.accountant import Random
from ...errors import LocalError

MEETING = "ranks"  # the file of an order in which the processes of one machine meet
# torch 2.13 gave it another name.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def launched() -> int:
    """How many processes there are of this launch, by the variables that torchrun sets."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_device(device: str) -> str:
    """The device of this process: each of a launch takes the next GPU of its machine."""
    kind, _, first = device.partition(":")
    if kind == "cpu" or launched() == 1:
        return device
    return f"{kind}:{int(first or 0) + int(os.environ.get('LOCAL_RANK', '0'))}"


@contextmanager
def joined(folder: Path, device: str) -> Iterator[Ranks]:
    """The processes of this launch for the order in a folder; or this one alone.

    To be called where it trains: torch has a GPU of its own per thread.
    """
    size = launched()
    if size == 1:
        yield ALONE
        return
    backends = "gloo"
    if device != "cpu":
        # Private jobs train on the CPU.
        backends = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        os.environ.update(GLOO_SOCKET_IFNAME=LOOPBACK, NCCL_SOCKET_IFNAME=LOOPBACK)
        store = dist.FileStore(str(folder / MEETING), size)  # type: ignore[attr-defined]
        dist.init_process_group(
            backends, store=store, rank=int(os.environ["RANK"]), world_size=size
        )
    else:
        dist.init_process_group(backends)
    yield ProcessRanks()
    # Not after an error: NCCL would wait for the others, which wait for this one.
    dist.destroy_process_group()


class ProcessRanks:
    """The processes of torch.distributed's default group: ``Ranks``."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._gathers = 0  # tells which wholes were gathered, in which order

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum; one message for all of a type."""
        self._check_gathers()
        for dtype in {tensor.dtype: None for tensor in tensors}:
            own = [tensor for tensor in tensors if tensor.dtype == dtype]
            together = torch.cat([tensor.reshape(-1) for tensor in own])
            _told(dist.all_reduce, together)
            pieces = torch.split(together, [tensor.numel() for tensor in own])
            for tensor, piece in zip(own, pieces, strict=True):
                tensor.copy_(piece.reshape(tensor.shape))

    def _check_gathers(self) -> None:
        """LocalError where another process has gathered other weights: it got pieces of several."""
        if not self._gathers:
            return
        own = self._gathers % 2**32
        total = torch.tensor([own])
        _told(dist.all_reduce, total)
        if int(total) != self.size * own:
            raise LocalError(
                "the processes of this round have used other weights than one another, as a model"
                " does whose layers depend on the records; set training.shard = false"
            )

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum; its gradient is that of all processes, too."""
        return summed(tensor)

    def gathered(self, piece: Tensor, number: int) -> Tensor:
        """The pieces [n] of all processes, one after another; ``number`` is that of the whole."""
        self._gathers = hash((self._gathers, number))  # of integers it is the same everywhere
        whole = piece.new_empty(self.size * len(piece))
        _told(ALL_GATHER, whole, piece)
        return whole

    def from_first(self, values: Tensor) -> Tensor:
        """The values of process 0, in place of all others'."""
        _told(dist.broadcast, values, 0)
        return values


def _told(tell: Callable[..., object], *what: object) -> None:
    """Exchange tensors with all others; LocalError where one of them is gone."""
    try:
        tell(*what)
    except RuntimeError as error:
        raise LocalError(
            "another process of this round has ended, as Linux ends one where memory runs out;"
            f" lower the batch size, or free memory: {str(error).splitlines()[0]}"
        ) from error


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        found = tensor.contiguous().clone()
        _told(dist.all_reduce, found)
        return found

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        # Each process has a loss of its own, and the sum is in all of them.
        return summed(gradient)


def summed(tensor: Tensor) -> Tensor:
    """The sum over all processes, through which gradients flow back."""
    made: Tensor = _Summed.apply(tensor)  # type: ignore[no-untyped-call]
    return made


class FirstsRandom:
    """The random numbers of one step: process 0 draws them once, and tells the others."""

    def __init__(self, ranks: ProcessRanks, fresh: Callable[[], Random]) -> None:
        """``fresh`` makes a generator, at process 0 alone."""
        self._ranks = ranks
        self._own = fresh() if ranks.rank == 0 else None

    def normal(self, count: int) -> NDArray[np.float64]:
        """Normal numbers [count]."""
        return self._drawn(count, torch.float64, lambda own: own.normal(count))

    def discrete_gaussian(self, count: int, variance: int) -> NDArray[np.int64]:
        """Discrete Gaussians [count]."""
        return self._drawn(count, torch.int64, lambda own: own.discrete_gaussian(count, variance))

    def drawn(self, records: int, q: float) -> NDArray[np.int64]:
        """Indices of the records of a step."""

        # As many numbers whoever is drawn, so that all know how many come.
        def mask(own: Random) -> NDArray[np.uint8]:
            found = np.zeros(records, np.uint8)
            found[own.drawn(records, q)] = 1
            return found

        return np.flatnonzero(self._drawn(records, torch.uint8, mask))

    def _drawn(
        self, count: int, dtype: torch.dtype, draw: Callable[[Random], NDArray[Any]]
    ) -> NDArray[Any]:
        values = torch.zeros(count, dtype=dtype)
        if self._own is not None:
            values = torch.from_numpy(draw(self._own))
        return self._ranks.from_first(values).numpy()
