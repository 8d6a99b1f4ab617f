"""Chooses the engine that trains the silos.

On a GPU silos train stacked, or one by one. On a CPU there is one worker process per core; a single
worker is this process itself.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch

from ...algorithms.engines.cuda_graphs import AsItIs, Graphs, way_on
from ...algorithms.engines.engine import Engine, Records, Serial
from ...algorithms.engines.simulation import nothing
from ...algorithms.engines.vmap_engine import Stacked
from ...algorithms.job.job import Job
from ...algorithms.numerics.devices import Precision, check_precision, find, gibibytes
from ...errors import LocalError
from .device import Device
from .pool import Crew, usable_cores


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

    Each of them is refused on a CPU, where it has no meaning.
    """

    graphs: bool = True
    stacked: bool = True
    precision: Precision = "float32"


def choose(
    records: Mapping[str, Records],
    device: str = "auto",
    workers: int | None = None,
    gpu: OnGpu = OnGpu(),
) -> Engines:
    """The engines for a device: "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:N".

    ``workers`` is for a CPU; left out, there is one per core.
    """
    # whatever is chosen: with one thread the coordinator half sums in one order
    torch.set_num_threads(1)
    if device == "auto":
        # A machine without a GPU is no reason to refuse a file that asks for none.
        device = "cpu"
        # a number of workers means a CPU, even where there is a GPU
        if workers is None and torch.cuda.is_available():
            device = "cuda"

    if device == "cpu":
        _check_cpu(gpu)
        # One thread per worker, so more workers than cores would only wait for one another.
        if workers is None:
            workers = usable_cores()
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


def _on_cpu(records: Mapping[str, Records], workers: int) -> Engines:
    if workers < 1:
        raise LocalError(
            f"workers = {workers}; give 1 or more, or leave it out for {usable_cores()}, one a core"
        )
    # A worker trains one silo at a time: more of them than silos would stay idle.
    count = min(workers, len(records))
    # Without a second process the records need not be held twice.
    if count == 1:
        return Engines("this process, one thread", "cpu", lambda job: Serial(job, records))

    # begun with the first job, if there is one: runs that are finished need no processes
    stack = ExitStack()
    crew = cache(lambda: stack.enter_context(Crew(records, count)))
    return Engines(
        where=f"{count} worker processes, a thread each",
        device="cpu",
        engine=lambda job: crew().engine(job),
        close=stack.close,
    )


def _on_gpu(records: Mapping[str, Records], device: str, gpu: OnGpu) -> Engines:
    cuda, precision = find(device), gpu.precision
    # Refused before the first run, and not in the middle of it.
    check_precision(cuda, precision)

    def engine(job: Job) -> Engine:
        # For methods and models that cannot be stacked.
        if not gpu.stacked:
            way = way_on(cuda, precision, graphs=gpu.graphs)
            return Serial(job, records, device=cuda, way=way)
        recorder: Graphs | AsItIs = AsItIs()
        # Recorded once and replayed: a step of many small kernels costs less to launch.
        if gpu.graphs:
            recorder = Graphs(str(cuda))
        return Stacked(job, records, str(cuda), recorder=recorder, precision=precision)

    # ``where`` is for people; ``made_with`` stands in run.json, since the bits depend on it
    name = torch.cuda.get_device_name(cuda)
    # The name of the GPU, since another one may round differently.
    where, made_with = [f"{name} ({cuda})"], [f"cuda ({name}, {gibibytes(cuda)} GiB)"]
    if gpu.stacked:
        where.append("silos stacked")
    else:
        where.append("silos one by one")
        made_with.append("one by one")
    if precision != "float32":
        where.append(precision)
        made_with.append(precision)
    return Engines(", ".join(where), ", ".join(made_with), engine)
