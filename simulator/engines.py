"""Which engine trains the silos here: stacked on a GPU, on a CPU one worker process a core, or one in this process."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch

from ..algorithms.devices import find
from ..algorithms.engine import Engine, Records, Serial
from ..algorithms.job import Job
from ..algorithms.replay import AsItIs, Graphs
from ..algorithms.simulation import nothing
from ..algorithms.stacked_round import Stacked
from ..errors import LocalError
from .identity import Device
from .workers import Crew, usable_cores


@dataclass(frozen=True, eq=False)
class Engines:
    """Makes the engine of one job after another over the same records; ``where`` says to people what trains.

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


def choose(
    records: Mapping[str, Records], device: str = "auto", workers: int | None = None, *, graphs: bool = True
) -> Engines:
    """The engines for a device: "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:N".

    ``workers`` is for a CPU; left out, one a core. ``graphs`` is for a GPU: whether it replays recorded steps. Whatever
    is chosen, this process computes with one thread from now on: what the coordinator half sums has one order then.
    """
    torch.set_num_threads(1)
    if device == "cpu" or (device == "auto" and (workers is not None or not torch.cuda.is_available())):
        if not graphs:
            raise LocalError("--no-graphs: a CPU has no CUDA graphs; leave it out, or choose --device cuda")
        return _on_cpu(records, usable_cores() if workers is None else workers)
    if workers is not None:
        raise LocalError(f"{workers} workers on device {device!r}: workers are for a CPU; leave one of the two out")
    return _on_gpu(records, "cuda" if device == "auto" else device, graphs)


def _on_cpu(records: Mapping[str, Records], workers: int) -> Engines:
    if workers < 1:
        raise LocalError(f"workers = {workers}; give 1 or more, or leave it out for {usable_cores()}, one a core")
    count = min(workers, len(records))
    if count == 1:
        return Engines("this process, one thread", "cpu", lambda job: Serial(job, records))
    stack = ExitStack()
    crew = cache(lambda: stack.enter_context(Crew(records, count)))  # begun with the first job, if there is one
    return Engines(f"{count} worker processes, a thread each", "cpu", lambda job: crew().engine(job), stack.close)


def _on_gpu(records: Mapping[str, Records], device: str, graphs: bool) -> Engines:
    place = str(find(device))
    where = f"{torch.cuda.get_device_name(place)} ({place}), silos stacked"

    def engine(job: Job) -> Engine:
        return Stacked(job, records, place, recorder=Graphs(place) if graphs else AsItIs())

    return Engines(where, "cuda", engine)
