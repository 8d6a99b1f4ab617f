"""Chooses the engine that trains the silos.

On a GPU silos train stacked, or one by one. On a CPU there is one worker process per core, and on
several GPUs one per GPU; a single worker is this process itself. A Ray cluster has one actor per
core or GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Protocol, Self

import torch

from ...algorithms.data.lazy import LazyRecords
from ...algorithms.engines.cuda_graphs import AsItIs, Graphs, way_on
from ...algorithms.engines.engine import Engine, Records, Serial
from ...algorithms.engines.simulation import nothing
from ...algorithms.engines.vmap_engine import Stacked
from ...algorithms.job.job import Job
from ...algorithms.models.build import draws_randomly, maps
from ...algorithms.numerics.devices import CPU, Precision, check_precision, find, gibibytes
from ...errors import LocalError
from .device import Device
from .pool import Crew, usable_cores
from .ray_engine import RayCrew
from .shared_memory import SHARED


@dataclass(frozen=True, eq=False)
class Engines:
    """Makes the engine of one job after another over the same records.

    ``where`` says to people what trains. End it with ``close``, or use it as a context manager.
    """

    where: str
    device: Device
    engine: Callable[[Job], Engine]
    close: Callable[[], None] = nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class OnGpu:
    """Options of a GPU: replay recorded steps, train silos at once, number of bits.

    Any value but the default is refused on a CPU.
    """

    graphs: bool = True
    stacked: bool = True
    precision: Precision = "float32"


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster by its address, such as ``10.0.0.5:6379``; None: one on this machine alone."""

    address: str | None = None


def choose(
    records: Mapping[str, Records],
    device: str = "auto",
    workers: int | None = None,
    gpu: OnGpu = OnGpu(),
    cluster: Cluster | None = None,
) -> Engines:
    """The engines for a device.

    That is "auto" (a GPU where there is one), "cpu", "cuda" (all GPUs of the first one's model),
    "cuda:N", or several of these, such as "cuda:0,cuda:1". ``workers`` is for a CPU; left out,
    there is one per core. On a ``cluster`` "auto" is "cpu", and "cuda" takes one actor per GPU.
    """
    # whatever is chosen: with one thread the coordinator half sums in one order
    torch.set_num_threads(1)
    if cluster is not None:
        return _on_cluster(records, device, workers, gpu, cluster)
    if device == "auto":
        device = "cpu"
        # a number of workers means a CPU, even where there is a GPU
        if workers is None and torch.cuda.is_available():
            # One GPU: others may be somebody else's, and a small run gains nothing by more.
            device = "cuda:0"

    if device == "cpu":
        _check_cpu(gpu)
        # Workers have one thread each, so more of them than cores gain nothing.
        if workers is None:
            workers = 1 if any(map(_lazy, records.values())) else usable_cores()
        return _on_cpu(records, workers)
    if workers is not None:
        raise LocalError(
            f"{workers} workers on device {device!r}: workers are for a CPU; leave one of the"
            " two out"
        )
    return _on_gpus(records, _gpus(device, records), gpu)


def _check_cpu(gpu: OnGpu) -> None:
    # rejected, not ignored: who asks for bf16 would take the results for those of bf16
    wrong = []
    if not gpu.graphs:
        wrong.append("--no-graphs")
    if not gpu.stacked:
        wrong.append("--one-by-one")
    if gpu.precision != "float32":
        wrong.append(f"--precision {gpu.precision}")
    if wrong:
        raise LocalError(
            f"{' and '.join(wrong)}: for a GPU alone, a CPU trains silos one by one in float32;"
            " leave it out, or choose --device cuda"
        )


def _lazy(own: Records) -> bool:
    return any(isinstance(side.x, LazyRecords) for side in own.sides)


def _on_cpu(records: Mapping[str, Records], workers: int) -> Engines:
    if workers < 1:
        raise LocalError(
            f"workers = {workers}; give 1 or more, or leave it out for {usable_cores()}, one a core"
        )
    if workers > 1 and any(map(_lazy, records.values())):
        raise LocalError(
            f"--workers {workers}: silos whose records are read when they are used (data.lazy)"
            " train one after another; leave --workers out, and set data.workers, which read"
        )
    # A worker trains one silo at a time, so more workers than silos would stay idle.
    count = min(workers, len(records))
    # One worker: train in this process, without a copy of the records.
    if count == 1:
        return Engines("this process, one thread", "cpu", lambda job: Serial(job, records))

    where = f"{count} worker processes with one thread each"
    return _begun_late(where, "cpu", lambda: Crew(records, [Serial] * count))


class _MakesEngines(Protocol):
    """A crew, of processes or of actors."""

    def engine(self, job: Job) -> Engine: ...

    def close(self) -> None: ...


def _begun_late(where: str, device: Device, begin: Callable[[], _MakesEngines]) -> Engines:
    """The engines of a crew that begins with the first job: finished runs need no processes."""
    stack = ExitStack()
    crew = cache(lambda: stack.enter_context(closing(begin())))
    return Engines(where, device, lambda job: crew().engine(job), stack.close)


def _gpus(device: str, records: Mapping[str, Records]) -> list[torch.device]:
    """The GPUs that an option names, at most one per silo.

    LocalError where one is not there, or they are not of one model.
    """
    found = list(map(find, device.split(",")))
    several = len(found) > 1
    if CPU in found or len({*found}) < len(found):
        raise LocalError(
            f"--device {device}: several devices are GPUs, each named once, such as cuda:0,cuda:1;"
            " on a CPU --workers says how many processes train"
        )
    kinds = {gpu: _kind(gpu) for gpu in found}
    if len({*kinds.values()}) > 1:
        raise LocalError(
            f"--device {device}: these are {' and '.join(sorted({*kinds.values()}))}, which may"
            " round differently; name GPUs of one model"
        )
    lazy = any(map(_lazy, records.values()))
    if several and lazy:
        raise LocalError(
            f"--device {device}: silos whose records are read when they are used (data.lazy) train"
            " one after another; name one GPU"
        )
    # Windows cannot share records between processes.
    if device == "cuda" and SHARED and not lazy:
        there = (torch.device("cuda", number) for number in range(torch.cuda.device_count()))
        found = [gpu for gpu in there if _kind(gpu) == kinds[found[0]]]
    return found[: max(1, len(records))]


def _kind(gpu: torch.device) -> str:
    return f"{torch.cuda.get_device_name(gpu)}, {gibibytes(gpu)} GiB"


def _on_gpus(records: Mapping[str, Records], gpus: Sequence[torch.device], gpu: OnGpu) -> Engines:
    """One engine in this process, or one per GPU in a process of its own."""
    cuda, precision = gpus[0], gpu.precision
    # Stacked silos need all records on the device.
    if any(map(_lazy, records.values())):
        gpu = replace(gpu, stacked=False)
    # Refuse it before the first run begins.
    check_precision(cuda, precision)

    # ``where`` is for people; ``made_with`` stands in run.json, since the bits depend on it
    name = torch.cuda.get_device_name(cuda)
    # With the name of the GPU, since other models may round differently.
    where, made_with = [f"{name} ({', '.join(map(str, gpus))})"], [f"cuda ({_kind(cuda)})"]
    where.append("silos stacked" if gpu.stacked else "silos one by one")
    # Stacked, the last bits may depend on which silos go at once.
    if gpu.stacked and len(gpus) > 1:
        made_with.append(f"on {len(gpus)} GPUs")
    if not gpu.stacked:
        made_with.append("one by one")
    if precision != "float32":
        where.append(precision)
        made_with.append(precision)
    shown, device = ", ".join(where), ", ".join(made_with)
    if len(gpus) == 1:
        return Engines(shown, device, partial(_on_one, gpu, str(cuda), records=records))
    makers = [partial(_in_worker, gpu, str(each)) for each in gpus]
    return _begun_late(shown, device, lambda: Crew(records, makers, partial(_stacks, gpu), "GPUs"))


def _stacks(gpu: OnGpu, job: Job) -> bool:
    """Whether the silos of a job train at once."""
    # Layers would draw other numbers if silos were stacked, and the same in each replayed step.
    return gpu.stacked and maps(job.model) and not draws_randomly(job.model)


def _on_one(gpu: OnGpu, cuda: str, job: Job, records: Mapping[str, Records]) -> Engine:
    """The engine of a job on one GPU."""
    if not _stacks(gpu, job):
        device, graphs = torch.device(cuda), gpu.graphs and not draws_randomly(job.model)
        way = way_on(device, gpu.precision, graphs=graphs)
        return Serial(job, records, device=device, way=way)
    recorder: Graphs | AsItIs = AsItIs()
    # Replaying a recorded step costs less than launching its many small kernels.
    if gpu.graphs:
        recorder = Graphs(cuda)
    return Stacked(job, records, cuda, recorder=recorder, precision=gpu.precision)


def _in_worker(gpu: OnGpu, cuda: str, job: Job, records: Mapping[str, Records]) -> Engine:
    """Runs in a worker process, which has one GPU of several."""
    # Else what names no device would take memory of the first GPU, from each process.
    torch.cuda.set_device(cuda)
    return _on_one(gpu, cuda, job, records)


def _on_cluster(
    records: Mapping[str, Records],
    device: str,
    workers: int | None,
    gpu: OnGpu,
    cluster: Cluster,
) -> Engines:
    if any(map(_lazy, records.values())):
        raise LocalError(
            "--engine ray: silos whose records are read when they are used (data.lazy) train in"
            " this process; leave it out"
        )
    if device not in ("auto", "cpu", "cuda"):
        raise LocalError(f"--device {device}: Ray deals the GPUs out; choose cpu or cuda")
    crew = partial(RayCrew, records, address=cluster.address, count=workers)
    where = f"Ray {'on this machine' if cluster.address is None else f'at {cluster.address}'}"
    if device != "cuda":
        _check_cpu(gpu)
        shown = f"{where}, one thread an actor"
        return _begun_late(shown, "cpu", lambda: crew(Serial))

    # By what its GPUs are: other models may round differently.
    stacked = crew(partial(_on_one_gpu, gpu), "GPU")
    made_with: Device = stacked.ask(partial(_made_with, gpu))
    return Engines(f"{where}, {made_with}", made_with, stacked.engine, stacked.close)


def _on_one_gpu(gpu: OnGpu, job: Job, records: Mapping[str, Records]) -> Engine:
    """Runs in an actor, which sees the one GPU that it has."""
    return _on_gpus(records, [find("cuda")], gpu).engine(job)


def _made_with(gpu: OnGpu) -> Device:
    return _on_gpus({}, [find("cuda")], gpu).device
