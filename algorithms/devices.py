"""On what models are trained: this machine's processor, or one of its GPUs."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from ..errors import LocalError

CPU = torch.device("cpu")


def find(name: str) -> torch.device:
    """The device "cpu", "cuda" or "cuda:N"; LocalError where this machine has none such."""
    if name == "cpu":
        return CPU
    given = re.fullmatch(r"cuda(:(\d+))?", name)
    if given is None:
        raise LocalError(f"device {name!r}: no such device; choose cpu, cuda or cuda:N")
    index, found = int(given[2] or 0), torch.cuda.device_count()
    if index >= found:
        has = f"{found} GPUs, cuda:0 to cuda:{found - 1}" if found else "no GPU that torch can use"
        raise LocalError(f"device {name!r}: this machine has {has}; choose another device, or cpu")
    return torch.device("cuda", index)


@contextmanager
def exact() -> Iterator[None]:
    """Sums as exact as the tensors, and the same again in the next run."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False, fp32_precision="ieee"):
        yield


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """Where the values of modules lie, all on one device; the processor where there are none."""
    tensors: Iterator[Tensor] = chain.from_iterable(chain(m.parameters(), m.buffers()) for m in modules)
    return next((tensor.device for tensor in tensors), CPU)
