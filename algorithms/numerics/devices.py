"""Training device (CPU or one GPU) and numeric precision."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from ...errors import LocalError

# of training steps; parameters and losses are float32
Precision: TypeAlias = Literal["float32", "tf32", "bf16"]

CPU = torch.device("cpu")
CPU_ROOM = 4 * 2**30
# One part in so many. torch reserved 2.2 to 3.2 times what was taken at a time: recorded steps keep
# their memory to themselves, next to what is cached outside, and cuDNN and cuBLAS have workspaces.
GPU_SHARE = 4
# by axes: images and volumes as tensor cores read them
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# the first GPUs whose tensor cores take tf32 and bf16 (compute capability; NVIDIA Ampere)
TENSOR_CORES = (8, 0)
# The libraries that multiply float32 on a GPU. Each is set by its own name: a setting of one of
# them, by an earlier call or TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, overrides a setting of all.
FLOAT32_MULTIPLIERS: tuple[Any, ...] = (
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,  # type: ignore[attr-defined] # and their stubs lack it
    torch.backends.cudnn.rnn,
)


def find(name: str) -> torch.device:
    """The device "cpu", "cuda" or "cuda:N"; LocalError where this machine has none such.

    "cuda" means "cuda:0".
    """
    if name == "cpu":
        return CPU
    matched = re.fullmatch(r"cuda(:(\d+))?", name)
    if matched is None:
        raise LocalError(f"device {name!r}: no such device; choose cpu, cuda or cuda:N")
    index = int(matched[2] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        has = "no GPU that torch can use"
        if count:
            has = f"{count} GPUs, cuda:0 to cuda:{count - 1}"
        raise LocalError(f"device {name!r}: this machine has {has}; choose another device, or cpu")
    return torch.device("cuda", index)


def room(device: torch.device) -> int:
    """Bytes that a simulation plans with at a time.

    On a GPU it is a share of all memory, free or not.
    """
    # A share of all of a GPU's memory, not of what is free now: the same job must give the same
    # bits again.
    return CPU_ROOM if device.type != "cuda" else gibibytes(device) * 2**30 // GPU_SHARE


def gibibytes(gpu: torch.device) -> int:
    """The GPU's memory in whole GiB."""
    # Rounded: the number of silos that go at once depends on it, and so do the last bits of a run.
    return round(torch.cuda.get_device_properties(gpu).total_memory / 2**30)


def check_precision(device: torch.device, precision: Precision) -> None:
    """LocalError if the device cannot multiply at this precision; float32 always works."""
    if precision == "float32":
        return
    if device == CPU:
        raise LocalError(
            f"precision {precision!r} is for a GPU; leave it out on a CPU, which computes in"
            " float32"
        )
    if (found := torch.cuda.get_device_capability(device)) < TENSOR_CORES:
        raise LocalError(
            f"precision {precision!r}: {device} is of compute capability {found[0]}.{found[1]}, and"
            f" its tensor cores take it from {TENSOR_CORES[0]}.{TENSOR_CORES[1]} on; leave it out"
        )


@contextmanager
def exact() -> Iterator[None]:
    """Sums as exact as the tensors, and the same again in the next run.

    A GPU then multiplies float32 at full precision, cuDNN uses deterministic algorithms, and
    TorchScript is run as it is written.
    """
    # These settings belong to the whole process. So the first of several threads makes them and the
    # last one takes them back, even after an error: one that ended between would restore too early,
    # and another that began between would restore what is not the process's own.
    with _EXACT.lock:
        if not _EXACT.users:
            _EXACT.settings.enter_context(_exactly())
        _EXACT.users += 1
    # A method, a layer or torch itself may have code in TorchScript. That would be compiled after a
    # few calls, maybe in the middle of a recording, and sums would be rounded otherwise from then
    # on. This setting is one of each thread.
    uncompiled = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]
    try:
        with uncompiled:
            yield
    finally:
        with _EXACT.lock:
            _EXACT.users -= 1
            if not _EXACT.users:
                _EXACT.settings.close()


@dataclass
class _ExactSettings:
    """Who needs them, in all threads, and how they are taken back."""

    lock: AbstractContextManager[object] = field(default_factory=Lock)
    settings: ExitStack = field(default_factory=ExitStack)
    users: int = 0


_EXACT = _ExactSettings()


@contextmanager
def _exactly() -> Iterator[None]:
    # Without ``benchmark`` cuDNN chooses the same algorithm in each run.
    cudnn = torch.backends.cudnn
    before = cudnn.enabled, cudnn.deterministic, cudnn.benchmark
    try:
        cudnn.enabled, cudnn.deterministic, cudnn.benchmark = True, True, False
        with _float32_in("ieee"):
            yield
    finally:
        cudnn.enabled, cudnn.deterministic, cudnn.benchmark = before


@contextmanager
def _float32_in(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """A GPU multiplies float32 so, whatever an earlier call or the environment asked for."""
    before = [multiplier.fp32_precision for multiplier in FLOAT32_MULTIPLIERS]
    try:
        for multiplier in FLOAT32_MULTIPLIERS:
            multiplier.fp32_precision = precision
        yield
    finally:
        for multiplier, own in zip(FLOAT32_MULTIPLIERS, before, strict=True):
            multiplier.fp32_precision = own


def stacked(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tensors of the host [...] as one tensor [N, ...] on the device."""
    first = tensors[0]
    # All silos may have been delivered the same tensor: it crosses once.
    if len(tensors) > len(set(map(id, tensors))) == 1:
        return stacked([first], device).repeat(len(tensors), *(1,) * first.ndim)
    if device.type != "cuda":
        return torch.stack([*tensors]).to(device)
    # A GPU reads page-locked memory by itself, and the host need not wait for it.
    host = torch.empty((len(tensors), *first.shape), dtype=first.dtype, pin_memory=True)
    return torch.stack([*tensors], out=host).to(device, non_blocking=True)


def on_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors on the host: themselves where they lie there, else copies."""
    copies: list[Tensor] = []
    gpus: set[torch.device] = set()
    for tensor in tensors:
        if tensor.device.type != "cuda":
            copies.append(tensor.cpu())
            continue
        gpus.add(tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copies.append(host.copy_(tensor, non_blocking=True))
    # The copies have only begun; one wait serves them all.
    for gpu in gpus:
        torch.cuda.current_stream(gpu).synchronize()
    return copies


@contextmanager
def in_memory() -> Iterator[None]:
    """Raise LocalError where a GPU runs out of memory.

    Other errors pass through.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise LocalError(f"{error}; free memory of this GPU, or choose another device") from error


@contextmanager
def multiplying(precision: Precision) -> Iterator[None]:
    """Within ``exact``: a GPU multiplies float32 in TF32 (10 bits of mantissa) for "tf32".

    Other precisions change nothing. It holds for all threads, so a process trains one job at a
    time: a silo in several jobs trains each in a process of its own (silo/config.py).
    """
    if precision != "tf32":
        yield
        return
    with _float32_in("tf32"):
        yield


def channels_last(tensor: Tensor, precision: Precision) -> Tensor:
    """The same numbers, laid out in memory as convolutions of this precision take them fastest.

    For tensor cores ("tf32", "bf16") a tensor of four or five axes has its channels last, such as
    images [B, C, H, W] or a convolution's weight. Others are returned as they are.
    """
    if precision == "float32":
        return tensor
    return tensor.to(memory_format=CHANNELS_LAST.get(tensor.ndim, torch.preserve_format))


def in_force(device: torch.device) -> Precision:
    """The precision of the products that the device computes now (``casting``, ``multiplying``)."""
    if torch.is_autocast_enabled(device.type):
        return "bf16"
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return "tf32" if convolutions.fp32_precision == "tf32" else "float32"


def uncast(device: torch.device) -> AbstractContextManager[object]:
    """Within ``casting``: products in the type of the tensors.

    Not every layer has a second derivative in another type (``inner_steps.curvature_at``).
    """
    if device.type not in ("cpu", "cuda"):
        # Device "meta" has no autocast.
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def casting(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """For a forward pass: layers compute in bfloat16 for "bf16"; parameters and losses do not.

    Callers add losses up in float32 (``at_least_float32``).
    """
    if precision != "bf16":
        return nullcontext()
    # No cache of cast weights: a recorded step would find them at another address.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """Where the values of modules lie, all on one device; the processor where there are none."""
    tensors: Iterator[Tensor] = chain.from_iterable(
        chain(m.parameters(), m.buffers()) for m in modules
    )
    return next((tensor.device for tensor in tensors), CPU)
