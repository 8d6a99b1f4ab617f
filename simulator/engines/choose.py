"""Chooses the engine that trains the silos.

On a GPU silos train stacked, or one by one. On a CPU there is one worker process per core; a single
worker is this process itself. A Ray cluster has one actor per core or GPU.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache, partial
from typing import Self

import torch

from ...algorithms.data.lazy import LazyRecords
from ...algorithms.engines.cuda_graphs import AsItIs, Graphs, way_on
from ...algorithms.engines.engine import Engine, Records, Serial
from ...algorithms.engines.simulation import nothing
from ...algorithms.engines.vmap_engine import Stacked
from ...algorithms.job.job import Job
from ...algorithms.models.build import draws_randomly, maps
from ...algorithms.numerics.devices import Precision, check_precision, find, gibibytes
from ...errors import LocalError
from .device import Device
from .pool import Crew, usable_cores
from .ray_engine import RayCrew


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
    """The engines for a device: "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:N".

    ``workers`` is for a CPU; left out, there is one per core. On a ``cluster`` "auto" is "cpu", and
    "cuda" takes one actor per GPU.
    """
    # whatever is chosen: with one thread the coordinator half sums in one order
    torch.set_num_threads(1)
    if cluster is not None:
        return _on_cluster(records, device, workers, gpu, cluster)
    if device == "auto":
        device = "cpu"
        # a number of workers means a CPU, even where there is a GPU
        if workers is None and torch.cuda.is_available():
            device = "cuda"

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
    return _on_gpu(records, device, gpu)


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

    # begun with the first job, if there is one: runs that are finished need no processes
    stack = ExitStack()
    crew = cache(lambda: stack.enter_context(Crew(records, count)))
    return Engines(
        where=f"{count} worker processes with one thread each",
        device="cpu",
        engine=lambda job: crew().engine(job),
        close=stack.close,
    )


def _on_gpu(records: Mapping[str, Records], device: str, gpu: OnGpu) -> Engines:
    cuda, precision = find(device), gpu.precision
    # Stacked silos need all records on the device.
    lazy = any(map(_lazy, records.values()))
    # Refuse it before the first run begins.
    check_precision(cuda, precision)

    def engine(job: Job) -> Engine:
        # Layers would draw other numbers if silos were stacked, and the same in each replayed step.
        if draws_randomly(job.model) or not maps(job.model) or not gpu.stacked or lazy:
            graphs = gpu.graphs and not draws_randomly(job.model)
            way = way_on(cuda, precision, graphs=graphs)
            return Serial(job, records, device=cuda, way=way)
        recorder: Graphs | AsItIs = AsItIs()
        # Replaying a recorded step costs less than launching its many small kernels.
        if gpu.graphs:
            recorder = Graphs(str(cuda))
        return Stacked(job, records, str(cuda), recorder=recorder, precision=precision)

    # ``where`` is for people; ``made_with`` stands in run.json, since the bits depend on it
    name = torch.cuda.get_device_name(cuda)
    # With the name of the GPU, since other models may round differently.
    where, made_with = [f"{name} ({cuda})"], [f"cuda ({name}, {gibibytes(cuda)} GiB)"]
    if gpu.stacked and not lazy:
        where.append("silos stacked")
    else:
        where.append("silos one by one")
        made_with.append("one by one")
    if precision != "float32":
        where.append(precision)
        made_with.append(precision)
    return Engines(", ".join(where), ", ".join(made_with), engine)


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
        # begun with the first job, if there is one
        stack = ExitStack()
        begun = cache(lambda: stack.enter_context(closing(crew(Serial))))
        return Engines(
            where=f"{where}, one thread an actor",
            device="cpu",
            engine=lambda job: begun().engine(job),
            close=stack.close,
        )

    # By what its GPUs are: other models may round differently.
    stacked = crew(partial(_on_one_gpu, gpu), "GPU")
    made_with: Device = stacked.ask(partial(_made_with, gpu))
    return Engines(f"{where}, {made_with}", made_with, stacked.engine, stacked.close)


def _on_one_gpu(gpu: OnGpu, job: Job, records: Mapping[str, Records]) -> Engine:
    """Runs in an actor, which sees the one GPU that it has."""
    return _on_gpu(records, "cuda", gpu).engine(job)


def _made_with(gpu: OnGpu) -> Device:
    return _on_gpu({}, "cuda", gpu).device
