"""Which engine trains the silos here: stacked on a GPU, or one by one there.

On a CPU one worker process a core.

Where there is one worker it is this process.
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

    ``where`` says to people what trains.

    Ended with ``close``, or as a context manager.
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
    """What is for a GPU alone: whether it replays recorded steps, whether it trains silos at once,
    and in what bits.
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

    ``workers`` is for a CPU; left out, one a core. Whatever is chosen, this process computes with
    one thread from now on: what the coordinator half sums has one order then.
    """
    torch.set_num_threads(1)
    if device == "cpu" or (
        device == "auto" and (workers is not None or not torch.cuda.is_available())
    ):
        _check_cpu(gpu)
        return _on_cpu(records, usable_cores() if workers is None else workers)
    if workers is not None:
        raise LocalError(
            f"{workers} workers on device {device!r}: workers are for a CPU; leave one of the"
            " two out"
        )
    return _on_gpu(records, "cuda" if device == "auto" else device, gpu)


def _check_cpu(gpu: OnGpu) -> None:
    given = {
        "--no-graphs": not gpu.graphs,
        "--one-by-one": not gpu.stacked,
        f"--precision {gpu.precision}": gpu.precision != "float32",
    }
    if wrong := [option for option, there in given.items() if there]:
        raise LocalError(
            f"{' and '.join(wrong)}: for a GPU alone, a CPU trains silos one by one in float32;"
            " leave it out, or choose --device cuda"
        )


def _on_cpu(records: Mapping[str, Records], workers: int) -> Engines:
    if workers < 1:
        raise LocalError(
            f"workers = {workers}; give 1 or more, or leave it out for {usable_cores()}, one a core"
        )
    count = min(workers, len(records))
    if count == 1:
        return Engines("this process, one thread", "cpu", lambda job: Serial(job, records))
    stack = ExitStack()
    # begun with the first job, if there is one
    crew = cache(lambda: stack.enter_context(Crew(records, count)))
    return Engines(
        f"{count} worker processes, a thread each",
        "cpu",
        lambda job: crew().engine(job),
        stack.close,
    )


def _on_gpu(records: Mapping[str, Records], device: str, gpu: OnGpu) -> Engines:
    place, precision = find(device), gpu.precision
    check_precision(place, precision)

    def engine(job: Job) -> Engine:
        if not gpu.stacked:
            return Serial(
                job, records, device=place, way=way_on(place, precision, graphs=gpu.graphs)
            )
        recorder = Graphs(str(place)) if gpu.graphs else AsItIs()
        return Stacked(job, records, str(place), recorder=recorder, precision=precision)

    name = torch.cuda.get_device_name(place)
    where = [f"{name} ({place})", "silos stacked" if gpu.stacked else "silos one by one"]
    kind = f"cuda ({name}, {gibibytes(place)} GiB)"
    made_with = [kind] if gpu.stacked else [kind, "one by one"]
    if precision != "float32":
        where, made_with = [*where, precision], [*made_with, precision]
    return Engines(", ".join(where), ", ".join(made_with), engine)
