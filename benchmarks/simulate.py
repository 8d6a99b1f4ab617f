"""Measures how fast silos are simulated.

``python benchmarks/simulate.py [loop|methods|growth|engines …] [--quick]``

Records are random pixels of CIFAR-10's shape; LeNet-5 with batch norm, 5 epochs, batches of 32,
SGD; as many silos a round as one in ten. One run measures, on this machine's cores:

- *loop*: pFedSim, 100 silos with 500 records to train on and 100 to test on, half of the rounds in
  each of its phases. Ours (``Workers``: one worker process a core, a thread each) against
  plain_loop.py with torch's own number of threads, in each of its ways to keep records, all taking
  turns, round by round. Both evaluate each silo of the round before and after it trains, and take
  the same number of steps; all are told a round that is not counted first.
- *methods*: seconds a round of each method with the same silos, FedAIMS with the smallest model
  that it takes.
- *engines*: a round on a ``--device`` of silos stacked, in each form of convolutions (grouped,
  unfolded, each silo by itself in parallel), of silos one by one, and of the plain loop with the
  same network and the fastest way to keep records, in turn, all in one ``--precision``; a GPU
  replays our steps, one by one those of models up to 64 MiB. Records trained on a second, times the
  plain loop, what a GPU held at most or how far the process grew, and two shares of the time: what
  the network's multiplications alone would take at the rate of a large product of matrices on the
  same device (in float32), and what reading and writing the tensors of each of its operations
  alone would take at the rate of a large copy. On a CPU all have one thread. Let records fill their
  batches: before batch norm ours fills up the last one, which the plain loop leaves short.
- *growth*: pFedSim from 10 to 1,000 silos with 50 records to train on and 10 to test on.

Wall seconds a round (median), CPU seconds a round (mean, of all processes), and where memory
counts, what all processes hold together after the last round (PSS: what several share is counted
once).
"""

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from clock import extra_memory
from plain_loop import WAYS, PlainLoop, Way, normalised
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.cuda_graphs import Graphs, way_on
from staddle.algorithms.engines.engine import Engine, Records, Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.models.build import build
from staddle.algorithms.numerics.devices import (
    CPU,
    Precision,
    check_precision,
    exact,
    find,
    multiplying,
)
from staddle.simulator.engines.pool import Crew, usable_cores

EPOCHS, BATCH, LR, CLASSES = 5, 32, 0.01, 10
METHODS: Mapping[str, Mapping[str, Any]] = {
    "local": {},
    "fedavg": {},
    "fedper": {},
    "fedaims": {},
    "fedsimsup": {"tau_theta": EPOCHS},
    "fedssa": {},
    "pfedsim": {},
    "ppfl": {"lam": 0},
}


NETWORKS = [
    ("pfedsim", "lenet5"),
    ("fedsimsup", "lenet5"),
    ("fedssa", "lenet5"),
    ("ppfl", "lenet5"),
    ("fedaims", "convnet-4x128"),
    ("fedavg", "resnet18"),
]


@dataclass(frozen=True, eq=False)
class Population:
    """Pixels, labels and owners; the first records of each silo are to train, the rest to test."""

    silos: int
    train: int
    test: int
    pixels: Any = field(init=False)
    labels: Any = field(init=False)

    def __post_init__(self) -> None:
        rng, records = np.random.default_rng(0), self.silos * (self.train + self.test)
        object.__setattr__(
            self, "pixels", rng.integers(0, 256, (records, 32, 32, 3), dtype=np.uint8)
        )
        object.__setattr__(self, "labels", rng.integers(0, CLASSES, records))

    def sides(self) -> tuple[list[range], list[range]]:
        """Indices by silo."""
        each = self.train + self.test
        starts = [silo * each for silo in range(self.silos)]
        return [range(s, s + self.train) for s in starts], [
            range(s + self.train, s + each) for s in starts
        ]

    def records(self) -> dict[str, Records]:
        """The same as the simulator takes them."""
        x, y = normalised(self.pixels), torch.from_numpy(self.labels)
        return {
            name(silo): Records(
                *(Dataset(x[own.start : own.stop], y[own.start : own.stop]) for own in sides)
            )
            for silo, sides in enumerate(zip(*self.sides(), strict=True))
        }


def name(silo: int) -> str:
    """Of a silo, in job order."""
    return f"silo-{silo:04}"


def job_of(
    method: str,
    silos: int,
    rounds: int,
    epochs: int = EPOCHS,
    model: str | None = None,
    participation: float = 0.1,
) -> Job:
    """A share of the silos takes part in a round, and two at least."""
    document = {
        "version": 1,
        "name": "benchmark",
        "seed": 0,
        "rounds": rounds,
        "silos": [name(silo) for silo in range(silos)],
        "participation": max(participation, 2 / silos),
        "method": {"name": method, "options": METHODS[method]},
        "model": {
            "name": model or ("convnet-3x64" if method == "fedaims" else "lenet5"),
            "classes": CLASSES,
            "norm": "batch",
            "input": [3, 32, 32],
        },
        "training": {"epochs": epochs, "batch_size": BATCH, "lr": LR},
    }
    return Job.from_file(JobFile.model_validate(document), "benchmark")


@dataclass(eq=False)
class Timed:
    """Seconds of the rounds of one contender: of the wall, and of all its processes."""

    round: Callable[[int], object]
    threads: int
    pids: Sequence[int] = ()
    device: torch.device = CPU
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def run(self, number: int) -> None:
        """One round; the first is not counted."""
        torch.set_num_threads(self.threads)
        # What the one before has left to the GPU is not this one's, and what this one leaves is.
        synchronise(self.device)
        cpu, wall = self._cpu(), time.perf_counter()
        self.round(number)
        synchronise(self.device)
        if number:
            self.wall.append(time.perf_counter() - wall)
            self.cpu.append(self._cpu() - cpu)

    def _cpu(self) -> float:
        return time.process_time() + sum(map(cpu_seconds, self.pids))

    @property
    def median(self) -> float:
        """Wall seconds a round."""
        return statistics.median(self.wall)


def ours(crew: Crew, engine: Engine, job: Job) -> Timed:
    """A simulation of the job."""
    return ours_with(engine, job, crew.pids)


def ours_with(engine: Engine, job: Job, pids: Sequence[int]) -> Timed:
    """A simulation of the job; a census counts as no round."""
    simulation = Simulation(job, engine)
    while simulation.round < job.length - job.rounds:
        simulation.step()
    return Timed(lambda _: simulation.step(), 1, pids, engine.device)


def plain(
    population: Population,
    job: Job,
    way: Any,
    epochs: int = EPOCHS,
    threads: int = 1,
    device: str = "cpu",
    precision: Precision = "float32",
    *,
    captured: bool = False,
) -> tuple[PlainLoop, Timed]:
    """The plain loop with the same cohorts."""
    model = nn.Sequential()
    for part, module in build(job.model, job.seed).items():
        model.add_module(part, module)
    records = population.pixels, population.labels, *population.sides(), way
    constants = epochs, BATCH, LR, job.rounds // 2, device, precision
    loop = PlainLoop(model, *records, *constants, captured=captured)

    def run(number: int) -> None:
        loop.round(number, [job.silos.index(silo) for silo in job.cohort(number)])

    return loop, Timed(run, threads, device=torch.device(device))


Row = dict[str, str | float]


def measure_loop(options: argparse.Namespace) -> list[Row]:
    """One method against the plain loop."""
    population = Population(30, 200, 40) if options.quick else Population(100, 500, 100)
    rounds = 1 + (4 if options.quick else options.rounds)
    job = job_of("pfedsim", population.silos, rounds)
    tell(
        f"pFedSim, {population.silos} silos, {job.cohort_size} a round, {rounds - 1} rounds of"
        " each, in turn"
    )
    with Crew(population.records(), options.workers) as crew:
        contenders = {"ours": ours(crew, crew.engine(job), job)}
        contenders |= {
            f"plain, {way}": plain(population, job, way, threads=options.plain_threads)[1]
            for way in WAYS
        }
        for number in range(rounds):
            for one in contenders.values():
                one.run(number)
    rows: list[Row] = []
    for title, one in contenders.items():
        times, cpu = one.median / contenders["ours"].median, statistics.mean(one.cpu)
        rows.append(
            {"what": title, "s/round": one.median, "rounds/s": 1 / one.median, "cpu s/round": cpu}
        )
        rows[-1]["times ours"] = times
    return rows


def measure_methods(options: argparse.Namespace) -> list[Row]:
    """Each method in turn on the same processes."""
    population = Population(30, 100, 20) if options.quick else Population(100, 500, 100)
    rounds = 1 + (1 if options.quick else max(2, options.rounds // 2))
    tell(f"each method, {population.silos} silos, {rounds - 1} rounds of each")
    rows: list[Row] = []
    with Crew(population.records(), options.workers) as crew:
        for method in METHODS:
            job = job_of(method, population.silos, rounds)
            one = ours(crew, crew.engine(job), job)
            for number in range(rounds):
                one.run(number)
            rows.append(
                {"what": method, "s/round": one.median, "cpu s/round": statistics.mean(one.cpu)}
            )
    return rows


def measure_growth(options: argparse.Namespace) -> list[Row]:
    """One method with ever more silos."""
    rows: list[Row] = []
    rounds = 1 + (2 if options.quick else options.rounds)
    tell(f"pFedSim with more and more silos, {rounds - 1} rounds of each")
    for silos in (10, 50) if options.quick else (10, 30, 100, 300, 1000):
        job, population = job_of("pfedsim", silos, rounds), Population(silos, 50, 10)
        records = population.records()
        with Crew(records, options.workers) as crew:
            one = ours(crew, crew.engine(job), job)
            for number in range(rounds):
                one.run(number)
            held = sum(map(proportional, ("self", *crew.pids)))
        size = sum(side.x.nbytes for own in records.values() for side in (own.train, own.test))
        row = {
            "what": f"{silos} silos",
            "s/round": one.median,
            "ms/silo": one.median / job.cohort_size * 1e3,
        }
        rows.append(
            cast(
                Row,
                row
                | {
                    "cpu s/round": statistics.mean(one.cpu),
                    "MB": held / 1e6,
                    "MB data": size / 1e6,
                },
            )
        )
    return rows


def measure_engines(options: argparse.Namespace) -> list[Row]:
    """Each network with a method that takes it, on one device."""
    device = find(options.device)
    check_precision(device, options.precision)
    population = (
        Population(20, 96, 20) if options.quick else Population(options.silos, options.records, 100)
    )
    rounds = 1 + (2 if options.quick else options.rounds)
    peak, copied = multiplications(device, options.precision), copies(device)
    tell(
        f"engines on {title_of(device)}, {options.precision}, {population.silos} silos,"
        f" {rounds - 1} rounds of each, in turn"
    )
    tell(f"a large product of matrices: {peak / 1e12:.3g} TFLOP/s")
    tell(f"a large copy, read and written: {copied / 1e12:.3g} TB/s")
    rows: list[Row] = []
    chosen = [
        (method, network)
        for method, network in NETWORKS
        if options.network in (None, network) and options.method in (None, method)
    ]
    for method, network in chosen[:1] if options.quick else chosen:
        job = job_of(
            method,
            population.silos,
            rounds,
            model=network,
            participation=options.participation,
        )
        tell(f"{method} with {network}: {job.cohort_size} silos a round")
        rows += compared(job, population, device, options, peak, copied)
    return rows


def compared(
    job: Job,
    population: Population,
    device: torch.device,
    options: argparse.Namespace,
    peak: float,
    copied: float,
) -> list[Row]:
    """The rounds of one job by all contenders in turn.

    ``peak`` is in operations per second, ``copied`` in bytes per second.
    """
    contenders = contenders_of(job, population, device, options)
    held = dict.fromkeys(contenders, 0)
    rounds = job.rounds
    for number in range(rounds):
        for name, one in contenders.items():
            held[name] = max(held[name], most_held(device, one, number))
    samples = job.cohort_size * population.train * EPOCHS
    steps = job.cohort_size * -(-population.train // BATCH) * EPOCHS
    rows: list[Row] = []
    for name, one in contenders.items():
        row: Row = {
            "what": f"{job.method_name}, {job.model.name}, {name}",
            "s/round": one.median,
            "records/s": samples / one.median,
        }
        row["times plain"] = contenders["plain loop"].median / one.median
        row["share %"] = 100 * steps * flops(job) / peak / one.median
        row["bytes %"] = 100 * steps * traffic(job) / copied / one.median
        row["MB"] = held[name] / 1e6
        rows.append(row)
    return rows


def contenders_of(
    job: Job, population: Population, device: torch.device, options: argparse.Namespace
) -> dict[str, Timed]:
    """Our engines, and the plain loop with its records in memory, on the device, and captured."""
    records, bits, gpu = population.records(), options.precision, device.type == "cuda"
    contenders: dict[str, Timed] = {}
    for form in options.forms:
        recorder = Graphs(str(device)) if gpu else None
        engine = Stacked(
            job,
            records,
            str(device),
            recorder=recorder,
            precision=bits,
            convolutions=form,
        )
        contenders[f"stacked, {form}"] = ours_with(engine, job, ())
    one_by_one = Serial(job, records, device=device, way=way_on(device, bits))
    contenders["one by one"] = ours_with(one_by_one, job, ())

    plain_loops: list[tuple[str, Way, bool]] = [("plain loop", "tensors", False)]
    if gpu:
        plain_loops.append(("plain loop, records on the GPU", "resident", False))
        plain_loops.append(("plain loop, and captured", "resident", True))
    for title, way, captured in plain_loops:
        loop = plain(population, job, way, device=str(device), precision=bits, captured=captured)[1]
        loop.round = as_exact(loop.round, bits)
        contenders[title] = loop
    return contenders


def as_exact(run: Callable[[int], object], precision: Precision) -> Callable[[int], object]:
    """As exact as ours: torch's own convolutions on a GPU are TF32."""

    def running(number: int) -> None:
        with exact(), multiplying(precision):
            run(number)

    return running


def most_held(device: torch.device, one: Timed, number: int) -> int:
    """Run a round; the most bytes that the GPU held, or the growth of the process on a CPU.

    On a GPU, what other engines hold is included.
    """
    if device.type != "cuda":
        return extra_memory(lambda: one.run(number))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    one.run(number)
    return int(torch.cuda.max_memory_allocated(device))


def multiplications(device: torch.device, precision: Precision = "float32") -> float:
    """Floating-point operations a second of large products of matrices in a precision.

    On a GPU of ten products of 8192 by 8192 between two events, after three that are not counted;
    on a CPU the best of five of 2048 by 2048.
    """
    if device.type != "cuda":
        one, best = torch.randn(2048, 2048), float("inf")
        for _ in range(5):
            began = time.perf_counter()
            torch.mm(one, one)
            best = min(best, time.perf_counter() - began)
        return 2 * 2048**3 / best
    size, products = 8192, 10
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    one = torch.randn(size, size, device=device, dtype=dtype)
    out = torch.empty_like(one)
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with exact(), multiplying(precision):
        for _ in range(3):
            torch.mm(one, one, out=out)
        began.record()
        for _ in range(products):
            torch.mm(one, one, out=out)
        ended.record()
    torch.cuda.synchronize(device)
    return products * 2 * size**3 / (began.elapsed_time(ended) / 1e3)


def copies(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy of 4 GiB on a GPU, or 256 MiB on a CPU."""
    one = torch.ones(2**30 if device.type == "cuda" else 2**26, device=device)
    other, best = torch.empty_like(one), float("inf")
    for _ in range(5):
        synchronise(device)
        began = time.perf_counter()
        other.copy_(one)
        synchronise(device)
        best = min(best, time.perf_counter() - began)
    return 2 * one.nbytes / best


def flops(job: Job) -> float:
    """Of a step on one batch: forward and backward through the network alone."""
    with FlopCounterMode(display=False) as counter:
        step(job, "meta")
    return counter.get_total_flops()


class Traffic(TorchDispatchMode):
    """Bytes that operations read and write; a view reads and writes none."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The results of ``func``, counted."""
        results = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [t for t in tree_leaves((args, kwargs, results)) if isinstance(t, Tensor)]
            self.nbytes += sum(tensor.nbytes for tensor in tensors)
        return results


def traffic(job: Job) -> int:
    """Bytes of a step on one batch, forward and backward through the network alone, in float32."""
    with Traffic() as counter:
        step(job, "meta")
    return counter.nbytes


def step(job: Job, device: str) -> None:
    """One step's forward and backward pass."""
    model = nn.Sequential(*build(job.model, job.seed).values()).to(device)
    x = torch.zeros(BATCH, 3, 32, 32, device=device)
    y = torch.zeros(BATCH, dtype=torch.int64, device=device)
    nn.functional.cross_entropy(model(x), y).backward()


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def title_of(device: torch.device) -> str:
    """For people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU, one thread"


def cpu_seconds(pid: int) -> float:
    """Of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def proportional(pid: int | str) -> int:
    """Bytes that a process holds, its share of what it shares."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/PID/smaps_rollup has no Pss; this benchmark needs Linux")


TICKS = os.sysconf("SC_CLK_TCK")
PROCESSOR = Path("/proc/cpuinfo").read_text()
PARTS = {
    "loop": measure_loop,
    "methods": measure_methods,
    "growth": measure_growth,
    "engines": measure_engines,
}


def show(rows: list[Row]) -> None:
    """A table."""
    tell(f"  {'':<40}" + "".join(f"{column:>12}" for column in list(rows[0])[1:]))
    for row in rows:
        title, *values = row.values()
        tell(f"  {title:<40}" + "".join(f"{value:>12.3g}" for value in values))


def tell(line: str) -> None:
    """Print it at once."""
    print(line, flush=True)  # noqa: T201 its output is its purpose


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], help="what to measure; all but engines by default"
    )
    parser.add_argument("--rounds", type=int, default=10, help="counted rounds")
    parser.add_argument(
        "--workers",
        type=int,
        default=usable_cores(),
        help="worker processes; one a core by default",
    )
    own = torch.get_num_threads()
    parser.add_argument(
        "--plain-threads", type=int, default=own, help="of the plain loop; torch's own by default"
    )
    parser.add_argument("--device", default="cpu", help="of the engines: cpu, cuda or cuda:N")
    parser.add_argument("--silos", type=int, default=100, help="of the engines")
    parser.add_argument(
        "--records", type=int, default=512, help="of each silo, for the engines to train on"
    )
    parser.add_argument(
        "--participation", type=float, default=0.1, help="of the engines' silos in a round"
    )
    parser.add_argument("--network", help="for the engines, one of their networks; all by default")
    parser.add_argument("--method", choices=[*METHODS], help="of the engines; all by default")
    parser.add_argument(
        "--forms",
        nargs="*",
        choices=["grouped", "unfolded", "parallel", "faster"],
        default=["grouped", "unfolded", "parallel", "faster"],
        help="of convolutions in the stacked engine",
    )
    parser.add_argument(
        "--precision",
        choices=["float32", "tf32", "bf16"],
        default="float32",
        help="of the engines' steps",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a minute instead of a quarter of an hour"
    )
    parser.add_argument("--csv", type=Path, help="write the tables to this file too")
    return parser.parse_args(words)


def main() -> None:
    """Measure what the command line asks for."""
    options = parsed()
    model = next(
        line.partition(":")[2].strip()
        for line in PROCESSOR.splitlines()
        if line.startswith("model name")
    )
    tell(
        f"torch {torch.__version__}, {usable_cores()} cores of {model}, load"
        f" {os.getloadavg()[0]:.1f}"
    )
    found = {}
    for part in options.parts or ("loop", "methods", "growth"):
        found[part] = PARTS[part](options)
        show(found[part])
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            for part, rows in found.items():
                writer.writerows(
                    (part, row["what"], column, value)
                    for row in rows
                    for column, value in [*row.items()][1:]
                )


if __name__ == "__main__":
    sys.exit(main())
