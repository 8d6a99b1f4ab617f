"""Counts what FedAIMS's silos cost in one call, and in a call for each supervised block.

``python benchmarks/one_call.py [--silos 20] [--records 64] [--epochs 1] [--rounds 3]
[--network convnet-4x128] [--form faster] [--device cpu]``

Both train all silos in every round with batches of 64, SGD with momentum and weight decay. Prints
how many operations the training of the last round launches, how many megabytes these read and write
(a view does neither), and the median seconds of the training in rounds after the first, in which no
adapter trains. On a GPU these are replayed as CUDA graphs. Then how far apart both ended, since a
library may compute other numbers of silos in another order.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from simulate import Traffic, synchronise
from torch import Tensor

from staddle.algorithms.course import Stage
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines import vmap_engine
from staddle.algorithms.engines.cuda_graphs import Graphs
from staddle.algorithms.engines.engine import Records
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.methods.fedaims.method import FedAIMS
from staddle.algorithms.models.build import input_shape
from staddle.algorithms.numerics.devices import find

CLASSES, BATCH, TESTED = 10, 64, 10
SMALLEST = 1e-12  # of what a difference is divided by; a tensor may be all zeros
FREE = ("detach", "_unsafe_view", "empty", "empty_like", "new_empty", "new_empty_strided")


class Launches(Traffic):
    """Operations as well as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The results of ``func``, counted."""
        self.count += not func.is_view and func.__name__.partition(".")[0] not in FREE
        return super().__torch_dispatch__(func, types, args, kwargs)


def job_of(given: argparse.Namespace) -> Job:
    """The paper's training, with all silos in every round."""
    document = {
        "version": 1,
        "name": "one-call",
        "seed": 0,
        "rounds": given.rounds,
        "silos": [f"silo-{silo:02}" for silo in range(given.silos)],
        "method": {"name": "fedaims"},
        "model": {
            "name": given.network,
            "classes": CLASSES,
            "norm": "batch",
            "input": [3, 32, 32],
        },
        "training": {
            "epochs": given.epochs,
            "batch_size": BATCH,
            "weight_decay": 1e-4,
            "lr": 0.1,
            "momentum": 0.9,
        },
    }
    return Job.from_file(JobFile.model_validate(document), "benchmark")


def records_of(job: Job, records: int) -> dict[str, Records]:
    """Random pixels."""
    generator = torch.Generator().manual_seed(0)

    def side(count: int) -> Dataset:
        x = torch.randn(count, *input_shape(job.model), generator=generator)
        return Dataset(x, torch.randint(0, CLASSES, (count,), generator=generator))

    return {silo: Records(side(records), side(TESTED)) for silo in job.silos}


@contextmanager
def in_groups() -> Iterator[None]:
    """Silos that supervise different blocks train in different calls."""
    own = FedAIMS.stages

    def stages(*given: Any) -> tuple[Stage, ...]:
        return tuple(replace(stage, aligned=None) for stage in own(*given))

    FedAIMS.stages = stages  # type: ignore[method-assign]
    try:
        yield
    finally:
        FedAIMS.stages = own  # type: ignore[method-assign]


def played(
    job: Job, given: argparse.Namespace, *, counted: bool
) -> tuple[list[str], dict[str, Tensor]]:
    """What rounds after the first cost, for the table, and the silos' tensors in the end."""
    device = find(given.device)
    # A replay calls no operation that could be counted. All silos go at once, also where a planned
    # share of the memory is smaller.
    recorder = Graphs(str(device)) if device.type == "cuda" and not counted else None
    engine = Stacked(
        job,
        records_of(job, given.records),
        str(device),
        given.silos,
        recorder,
        "float32",
        given.form,
    )
    own, counter, seconds = vmap_engine.train, Launches(), [0.0]

    def train(*arguments: Any) -> Any:
        synchronise(device)
        began = time.perf_counter()
        with counter if counted else nullcontext():
            trained = own(*arguments)
        synchronise(device)
        seconds[-1] += time.perf_counter() - began
        return trained

    vmap_engine.train = train
    try:
        simulation = Simulation(job, engine)
        for _ in range(job.rounds):
            # The last round counts: the first trains no adapter, and steps are begun before it.
            counter.count = counter.nbytes = 0
            seconds.append(0.0)
            simulation.step()
    finally:
        vmap_engine.train = own
        engine.close()
    cost = [f"{statistics.median(seconds[2:]):.2f}"]
    if counted:
        cost = [f"{counter.count:,}", f"{counter.nbytes / 1e6:,.0f}"]
    states = simulation.states
    return cost, {
        f"{silo} {name}": t for silo in job.silos for name, t in states[silo].flat.items()
    }


def main() -> None:
    """Print a line per form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--silos", type=int, default=20)
    parser.add_argument("--records", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--network", default="convnet-4x128")
    parser.add_argument("--form", default="faster", choices=("faster", "grouped", "unfolded"))
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    job = job_of(given)
    sys.stdout.write(f"{'form':<12}{'launches':>10}{'MB':>12}{'s':>8}\n")
    ends: list[dict[str, Tensor]] = []
    for form, within in (("groups", in_groups), ("one call", nullcontext)):
        with within():
            (launches, megabytes), _ = played(job, given, counted=True)
            (seconds,), states = played(job, given, counted=False)
        ends.append(states)
        sys.stdout.write(f"{form:<12}{launches:>10}{megabytes:>12}{seconds:>8}\n")
    one, other = ends
    far = max(
        float((one[name] - other[name]).abs().max() / one[name].abs().max().clamp(min=SMALLEST))
        for name in one
    )
    sys.stdout.write(f"apart by {far:.1g} of a tensor's largest number at most\n")


if __name__ == "__main__":
    main()
