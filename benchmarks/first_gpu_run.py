"""What a first half hour on a GPU has to settle, in one command.

``python benchmarks/first_gpu_run.py FOLDER [--seconds 540] [--part PART …] [--small]``

Parts, each in a process of its own, since an error of CUDA ends the process that made it:

- *card*: the rates of large products of matrices in each precision, and of a copy;
- *tests*: the tests that take a GPU;
- *smoke-PRECISION*: two rounds of FedAvg with each network of the catalog, stacked and one by one,
  launched and replayed as CUDA graphs. Replayed is to be the same bits as launched, and stacked
  and one by one are to agree (in float32, also with this machine's processor);
- *convolutions*: convolutions.py;
- *engines-NETWORK*: ``simulate.py engines``, each network with the method that it is for, and
  *many*: LeNet-5 with a hundred silos at once;
- *parallel*: a step of each network, all silos in one call, with each form of convolutions and with
  the one that is chosen by shape, and each silo by itself in parallel;
- *one-call*: one_call.py, FedAIMS's silos in one call and in one per supervised block;
- *compiled-NETWORK*: a step as the engine has it, and compiled by torch.compile
  (compiled_step.py): whether both compute the same, and how long each takes;
- *profile-NETWORK*: how long each part of a round takes, which kernels it launches, and what the
  host does in it;
- *memory-NETWORK*: what the engine reckons silos take, what they took, and what torch reserved
  for that.

Parts before the timed ones run at once. What a part found is in FOLDER/PART.json, its output in
FOLDER/PART.log, and FOLDER/report.md has all; a part that has found something is not run again, so
a second call goes on where the time was up. Nothing is downloaded. With ``--device cpu`` and
``--small`` all but the GPU's own parts, and the largest networks, run to their end on a CPU.
"""

import argparse
import cProfile
import io
import json
import os
import pstats
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import compiled_step
import simulate
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines import convolutions, vmap_engine
from staddle.algorithms.engines import simulation as simulation_module
from staddle.algorithms.engines.cuda_graphs import STREAMS, AsItIs, Graphs, Recorder, way_on
from staddle.algorithms.engines.engine import Engine, Records, Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.models.registry import NETWORKS
from staddle.algorithms.numerics.devices import (
    CPU,
    GPU_SHARE,
    Precision,
    exact,
    find,
    multiplying,
)
from staddle.errors import LocalError
from staddle.simulator.engines.pool import usable_cores

PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "lenet5": {"method": "pfedsim", "silos": 100, "records": 512, "rounds": 2},
    "convnet-4x128": {"silos": 20, "records": 128, "rounds": 2, "participation": 0.5},
    "resnet18": {"silos": 20, "records": 128, "rounds": 2, "participation": 0.5},
    "many": {
        "network": "lenet5",
        "method": "pfedsim",
        "silos": 100,
        "records": 64,
        "rounds": 2,
        "participation": 1.0,
    },
}
# by how much a parameter may differ between engines, of the largest of its tensor
AGREE: Mapping[Precision, float] = {"float32": 1e-3, "tf32": 3e-2, "bf16": 2e-1}
# trained in parallel: more silos than there are streams, so that two share one
SEVERAL = ("convnet-4x128", "resnet18", "mobilenet-v2", "series-resnet", "volume-resnet")
# the order of sums changes its float32 gradients by a third, on a CPU too: nothing to compare
DRIFTS = ("mobilenet-v2",)
# where to look next, by what a fault says
SEE: Mapping[str, str] = {
    "bits differ when replayed": "what a step reads at an address that changes; part tests",
    "stacked and one by one disagree": "engines/stacked_layers.py, convolutions.py; part tests",
    "GPU and CPU disagree": "whether TF32 is on: numerics/devices.py, exact",
    "cannot be recorded": "what waits for the GPU in the step; simulate with --no-graphs",
    "compiled, a step": "compiled_step.py; no product code compiles",
    "torch reserved more": "numerics/devices.py, GPU_SHARE; engines/vmap_engine.py, COPIES",
}
LARGER = ("lenet5", "convnet-4x128", "resnet18")  # each with larger layers than the one before
LONGEST = 400  # seconds of one part

Row: TypeAlias = dict[str, str | float]
Part: TypeAlias = Callable[[argparse.Namespace], list[Row]]


def card(options: argparse.Namespace) -> list[Row]:
    """The rates that bound everything else."""
    device = find(options.device)
    rows: list[Row] = []
    for precision in PRECISIONS if device.type == "cuda" else PRECISIONS[:1]:
        rate = simulate.multiplications(device, precision)
        rows.append({"what": f"product of matrices, {precision}", "TFLOP/s": rate / 1e12})
    if device.type == "cuda":
        rows.append({"what": "copy, read and written", "TB/s": simulate.copies(device) / 1e12})
    rows.append({"what": f"torch {torch.__version__}, {simulate.title_of(device)}"})
    return rows


def gpu_tests(options: argparse.Namespace) -> list[Row]:
    """The tests that take a GPU, in an order that finds causes: steps first, then engines."""
    root = Path(__file__).resolve().parents[1]
    files = [
        "tests/algorithms/engines/test_cuda_graphs.py",
        "tests/algorithms/numerics/test_devices.py",
        "tests/algorithms/engines/test_cuda_graph_step.py",
        "tests/algorithms/engines/test_vmap_training.py",
        "tests/algorithms/engines/test_vmap_engine.py",
    ]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", "gpu"]
    # A GPU has room for several small tests; a machine of few cores has not.
    processes = min(8, usable_cores() // 2)
    if processes > 1 and find_spec("xdist"):
        command += ["-n", str(processes)]
    lines: list[str] = []
    with (
        subprocess.Popen(  # noqa: S603 our own tests
            [*command, "--tb=short", *files[: 2 if options.small else None]],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as ran
    ):
        for line in ran.stdout or ():
            tell(line.rstrip())
            lines.append(line)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+)", "".join(lines), re.MULTILINE)
    last = [line.strip() for line in lines if line.strip()][-1:]
    rows: list[Row] = [{"what": " ".join(last) or "pytest said nothing", "exit": ran.returncode}]
    rows += ({"what": "a test", "fault": name} for name in failed)
    return rows


def smoke_job(network: str, rounds: int = 2, silos: int = 3, batch: int = 8) -> Job:
    """FedAvg; batches are full and equal, so that all are replayed."""
    norms = NETWORKS[network].norms
    document = {
        "version": 1,
        "name": "smoke",
        "seed": 0,
        "rounds": rounds,
        "silos": [f"silo-{silo}" for silo in range(silos)],
        "method": {"name": "fedavg"},
        "model": {
            "name": network,
            "classes": 10,
            "norm": "batch" if "batch" in norms else norms[0],
            "input": list(NETWORKS[network].default_input),
        },
        "task": {"kind": "segmentation" if NETWORKS[network].dense else "classification"},
        "training": {"epochs": 2, "batch_size": batch, "lr": 0.0001},
    }
    return Job.from_file(JobFile.model_validate(document), "smoke")


def smoke_records(job: Job, records: int = 24) -> dict[str, Records]:
    """Random records: so many of each silo to train on, 8 to test on."""
    generator = torch.Generator().manual_seed(0)
    shape = NETWORKS[job.model.name].default_input

    def drawn(count: int) -> Dataset:
        x = torch.randn(count, *shape, generator=generator)
        sides = shape[1:] if job.task.dense else ()
        return Dataset(x, torch.randint(0, 10, (count, *sides), generator=generator))

    return {silo: Records(drawn(records), drawn(8)) for silo in job.silos}


def trained(job: Job, engine: Engine) -> dict[str, Tensor]:
    """All tensors of all silos after the job's rounds."""
    simulation = Simulation(job, engine)
    while simulation.round < job.length:
        simulation.step()
    tensors = ends(simulation)
    engine.close()
    return tensors


def ends(simulation: Simulation) -> dict[str, Tensor]:
    """All tensors of all silos."""
    tensors: dict[str, Tensor] = {}
    for silo, state in simulation.states.items():
        for part, named in state.parts.items():
            for name, tensor in named.items():
                tensors[f"{silo} {part} {name}"] = tensor
    return tensors


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference of two models, as a share of the largest number of its tensor.

    Where there is no number, it is infinite.
    """
    most = 0.0
    for name, tensor in one.items():
        if not tensor.is_floating_point():
            continue
        scale = float(tensor.abs().max().clamp(min=1e-2))
        far = float((tensor - other[name]).abs().max()) / scale
        most = max(most, far if far == far else float("inf"))  # noqa: PLR0124 NaN
    return most


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether all tensors are the same numbers."""
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def smoke(options: argparse.Namespace, precision: Precision) -> list[Row]:
    """Each network of the catalog in a precision."""
    networks = options.network or ([*NETWORKS] if not options.small else ["lenet5", "cnn-digits"])
    rows: list[Row] = []
    for network in networks:
        began = time.perf_counter()
        try:
            row = smoke_network(network, precision, find(options.device))
        except (LocalError, RuntimeError) as error:
            row = {"fault": " ".join(str(error).split())[:500]}
        row = {"what": network, **row, "seconds": time.perf_counter() - began}
        tell(json.dumps(row))
        rows.append(row)
    return rows


def smoke_network(network: str, precision: Precision, device: torch.device) -> Row:
    """What engines made of it; ``fault`` where they differ or one failed."""
    job = smoke_job(network, silos=STREAMS + 2 if network in SEVERAL else 3)
    records, gpu = smoke_records(job), device.type == "cuda"

    def stacked(recorder: Recorder) -> Stacked:
        return Stacked(job, records, str(device), recorder=recorder, precision=precision)

    def serial(*, graphs: bool) -> Serial:
        way = way_on(device, precision, graphs=graphs)
        return Serial(job, records, device=device, way=way)

    row: Row = {}
    faults: list[str] = []
    made: dict[str, dict[str, Tensor]] = {}
    contenders: dict[str, Callable[[], Engine]] = {
        "stacked": lambda: stacked(AsItIs()),
        "one by one": lambda: serial(graphs=False),
    }
    if gpu:
        contenders["stacked, replayed"] = lambda: stacked(Graphs(str(device)))
        contenders["one by one, replayed"] = lambda: serial(graphs=True)
    for name, engine in contenders.items():
        try:
            made[name] = trained(job, engine())
        except (LocalError, RuntimeError) as error:
            faults.append(f"{name}: {' '.join(str(error).split())[:300]}")
    for name in ("stacked", "one by one"):
        replayed = f"{name}, replayed"
        if name in made and replayed in made and not same_bits(made[name], made[replayed]):
            faults.append(f"{name}: bits differ when replayed")
    if "stacked" in made and "one by one" in made:
        row["stacked, one by one"] = apart(made["one by one"], made["stacked"])
        if network not in DRIFTS and row["stacked, one by one"] > AGREE[precision]:
            faults.append("stacked and one by one disagree")
    if gpu and precision == "float32" and "one by one" in made:
        row["GPU, CPU"] = apart(trained(job, Serial(job, records)), made["one by one"])
        if network not in DRIFTS and row["GPU, CPU"] > AGREE[precision]:
            faults.append("GPU and CPU disagree")
    if faults:
        row["fault"] = "; ".join(faults)
    return row


def convolution_forms(options: argparse.Namespace) -> list[Row]:
    """The tables of convolutions.py, line by line."""
    script = Path(__file__).with_name("convolutions.py")
    rows: list[Row] = []
    for precision in PRECISIONS if find(options.device) != CPU else PRECISIONS[:1]:
        command = [sys.executable, str(script), "--device", options.device]
        command += ["--precision", precision, "--repeats", "2" if options.small else "10"]
        if options.small:
            command += ["--network", "lenet5"]
        rows += ({"what": line} for line in lines_of(command))
    return rows


def one_call(options: argparse.Namespace) -> list[Row]:
    """The table of one_call.py, line by line."""
    script = Path(__file__).with_name("one_call.py")
    command = [sys.executable, str(script), "--device", options.device]
    if options.small:
        command += ["--silos", "4", "--records", "8", "--rounds", "2", "--network", "convnet-3x64"]
    return [{"what": line} for line in lines_of(command)]


def lines_of(command: Sequence[str]) -> list[str]:
    """The output of a benchmark."""
    ran = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 our own
    tell(ran.stdout + ran.stderr)
    if ran.returncode:
        raise LocalError(f"{command[1]} ended with {ran.returncode}: {ran.stderr[-500:]}")
    return ran.stdout.splitlines()


def engines(options: argparse.Namespace, name: str) -> list[Row]:
    """``simulate.py engines`` with one network, in each precision."""
    sizes = dict(ENGINES[name])
    if options.small:
        sizes |= {"silos": 4, "records": 32, "rounds": 1}
    gpu = find(options.device).type == "cuda"
    rows: list[Row] = []
    for precision in options.precision if gpu else PRECISIONS[:1]:
        wanted = simulate.parsed(["engines", "--device", options.device])
        # The forms are compared by *parallel*.
        chosen = {"network": name, **sizes, "precision": precision, "forms": ["faster"]}
        vars(wanted).update(chosen)
        try:
            found = simulate.measure_engines(wanted)
        except (LocalError, RuntimeError) as error:
            found = [{"what": name, "fault": " ".join(str(error).split())[:500]}]
        rows += ({"precision": precision, **row} for row in found)
        tell(json.dumps(rows[-len(found) :], indent=1))
    return rows


def parallel(options: argparse.Namespace) -> list[Row]:
    """Milliseconds of a silo's step in each network, of ten silos at once."""
    device, gpu = find(options.device), find(options.device).type == "cuda"
    networks = options.network or ([*NETWORKS] if not options.small else ["cnn-digits"])
    rows: list[Row] = []
    for network in networks:
        silos, size = (10, 64) if not options.small else (2, 16)
        job = smoke_job(network, 3, silos, 32)
        records = smoke_records(job, size)
        for precision in options.precision if gpu else PRECISIONS[:1]:
            row: Row = {"what": f"{network}, {precision}"}
            for form in ("grouped", "unfolded", "faster", "parallel"):
                recorder = Graphs(str(device)) if gpu else None
                with in_one_call():
                    engine = Stacked(job, records, str(device), None, recorder, precision, form)
                    took, _ = stepped(job, engine, size)
                row["by shape" if form == "faster" else form] = took
            tell(json.dumps(row))
            rows.append(row)
    return rows


def stepped(job: Job, engine: Stacked, size: int) -> tuple[float, dict[str, Tensor]]:
    """Milliseconds of a silo's step in the third round, and the silos' tensors after it.

    Each silo has ``size`` records. The engine is closed.
    """
    simulation = Simulation(job, engine)
    simulation.step()
    simulation.step()
    took = seconds_of(simulation, engine.device)["train"]
    engine.close()
    steps = job.training.epochs * -(-size // job.training.batch_size)
    return 1e3 * took / steps / len(job.silos), ends(simulation)


def compiled(options: argparse.Namespace, network: str) -> list[Row]:
    """A step as it is and compiled, ten silos at once; ``fault`` where they differ."""
    device, gpu = find(options.device), find(options.device).type == "cuda"
    silos, size = (10, 64) if not options.small else (2, 16)
    job = smoke_job(network, 3, silos, 32)
    records = smoke_records(job, size)
    rows: list[Row] = []
    for precision in options.precision if gpu else PRECISIONS[:1]:
        row: Row = {"what": f"{network}, {precision}"}
        found: list[dict[str, Tensor]] = []
        for name, steps in (("as it is", nullcontext), ("compiled", compiled_step.compiled)):
            began = time.perf_counter()
            recorder = Graphs(str(device)) if gpu else None
            with in_one_call(), steps():
                engine = Stacked(job, records, str(device), None, recorder, precision)
                row[f"{name}, ms"], tensors = stepped(job, engine, size)
            row[f"{name}, s in all"] = time.perf_counter() - began
            found.append(tensors)
        row["apart"] = apart(*found)
        if network not in DRIFTS and row["apart"] > AGREE[precision]:
            row["fault"] = "compiled, a step computes something else"
        tell(json.dumps(row))
        rows.append(row)
    return rows


@contextmanager
def in_one_call() -> Iterator[None]:
    """Large networks train in one call too, unless their form is "parallel"."""
    least = convolutions.LARGE_BYTES
    convolutions.LARGE_BYTES = sys.maxsize
    try:
        yield
    finally:
        convolutions.LARGE_BYTES = least


def seconds_of(simulation: Simulation, device: torch.device) -> dict[str, float]:
    """Seconds of a round: the whole, and its parts by the function that each runs in."""
    places: list[tuple[Any, str]] = [
        (simulation_module, "deliver_all"),
        (Stacked, "_silos"),
        (Stacked, "_counts"),
        (Stacked, "_surveyed"),
        (vmap_engine, "train"),
        (vmap_engine, "on_host"),
        (simulation_module, "close_round"),
    ]
    spent = dict.fromkeys(("round", *(name for _, name in places)), 0.0)

    def timed(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def running(*args: Any, **named: Any) -> Any:
            simulate.synchronise(device)
            began = time.perf_counter()
            found = run(*args, **named)
            simulate.synchronise(device)
            spent[name] += time.perf_counter() - began
            return found

        return running

    own = {name: getattr(owner, name) for owner, name in places}
    for owner, name in places:
        setattr(owner, name, timed(name, own[name]))
    try:
        timed("round", simulation.step)()
    finally:
        for owner, name in places:
            setattr(owner, name, own[name])
    return spent


def profiled(options: argparse.Namespace, name: str) -> list[Row]:
    """A round: seconds of its parts, its kernels, and the functions that take the host's time."""
    device, gpu = find(options.device), find(options.device).type == "cuda"
    sizes = ENGINES[name] | ({"silos": 4, "records": 32} if options.small else {})
    population = simulate.Population(sizes["silos"], sizes["records"], 100)
    network = sizes.get("network", name)
    method = next(method for method, own in simulate.NETWORKS if own == network)
    share = sizes.get("participation", 0.1)
    job = simulate.job_of(method, population.silos, 8, model=network, participation=share)
    rows: list[Row] = []
    for precision in options.precision if gpu else PRECISIONS[:1]:
        recorder = Graphs(str(device)) if gpu else None
        records = population.records()
        engine = Stacked(job, records, str(device), recorder=recorder, precision=precision)
        simulation = Simulation(job, engine)
        # Past the middle of a job each method does all that it ever does.
        while simulation.round < job.length - job.rounds // 2 + 1:
            simulation.step()
        seconds = seconds_of(simulation, device)
        rows.append({"what": f"{name}, {precision}", **seconds})
        lines = [f"{precision}, a round's kernels", *kernels_of(simulation, device)]
        lines += [f"{precision}, a round's Python", *python_of(simulation, device)]
        engine.close()
        tell("\n".join(lines))
        rows += ({"what": line} for line in lines)
    return rows


def kernels_of(simulation: Simulation, device: torch.device) -> list[str]:
    """A table of what a round launches, those that take longest first."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as kernels:
        simulation.step()
        simulate.synchronise(device)
    sort = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table = kernels.key_averages().table(sort_by=sort, row_limit=30, max_name_column_width=90)
    return table.splitlines()


def python_of(simulation: Simulation, device: torch.device) -> list[str]:
    """A table of the functions that a round spends time in on the host."""
    host = cProfile.Profile()
    began = time.perf_counter()
    host.enable()
    simulation.step()
    simulate.synchronise(device)
    host.disable()
    text = io.StringIO()
    pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(25)
    lines = [line for line in text.getvalue().splitlines() if line.strip()]
    return [f"a round under cProfile: {time.perf_counter() - began:.4f} s", *lines]


def memory(options: argparse.Namespace, network: str) -> list[Row]:
    """What a round takes of a GPU, next to what the engine reckons before it takes it.

    What torch reserved is what the process took of the GPU: also what graphs keep for themselves,
    and the workspaces of cuDNN and cuBLAS. No other engine was in the process.
    """
    device = find(options.device)
    silos = 4 if options.small else 20
    population = simulate.Population(silos, 64, 20)
    job = simulate.job_of("fedavg", silos, 3, epochs=1, model=network, participation=1.0)
    recorder = Graphs(str(device)) if device.type == "cuda" else None
    engine = Stacked(job, population.records(), str(device), recorder=recorder)
    simulation = Simulation(job, engine)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    simulation.step()
    simulation.step()
    row: Row = {"what": f"{network}, {silos} silos"}
    row["reckoned MB"] = silos * engine.silo_bytes(job.silos[0]) / 1e6
    if device.type == "cuda":
        row["allocated MB"] = (torch.cuda.max_memory_allocated(device) - before) / 1e6
        row["reserved MB"] = torch.cuda.max_memory_reserved(device) / 1e6
        row |= too_much(row["reckoned MB"], row["reserved MB"])
    return [row]


def too_much(reckoned: float, reserved: float) -> dict[str, str]:
    """A fault where silos that are reckoned to fit into the engine's share of a GPU would not."""
    if reserved <= GPU_SHARE * reckoned:
        return {}
    return {"fault": f"torch reserved more than {GPU_SHARE} times what the engine reckons"}


PARTS: dict[str, Part] = {
    "card": card,
    "tests": gpu_tests,
    **{
        f"smoke-{precision}": lambda options, precision=precision: smoke(options, precision)
        for precision in PRECISIONS
    },
    **{f"profile-{name}": lambda options, name=name: profiled(options, name) for name in ENGINES},
    **{f"engines-{name}": lambda options, name=name: engines(options, name) for name in ENGINES},
    "parallel": parallel,
    **{f"compiled-{name}": lambda options, name=name: compiled(options, name) for name in LARGER},
    "convolutions": convolution_forms,
    "one-call": one_call,
    **{f"memory-{name}": lambda options, name=name: memory(options, name) for name in LARGER},
}
AT_ONCE = ("tests", *(f"smoke-{precision}" for precision in PRECISIONS))
SLOW = ("resnet18", "convnet-4x128")  # parts of these networks take minutes on a CPU
ON_A_GPU = ("smoke-tf32", "smoke-bf16")


def tell(line: str) -> None:
    """Print it at once."""
    print(line, flush=True)  # noqa: T201 its output is its purpose


def run_one(options: argparse.Namespace) -> None:
    """Run a part in this process, and keep what it found."""
    began = time.perf_counter()
    with exact_by_default():
        rows = PARTS[options.one](options)
    found = {"rows": rows, "seconds": time.perf_counter() - began}
    (options.folder / f"{options.one}.json").write_text(json.dumps(found, indent=1))


@contextmanager
def exact_by_default() -> Iterator[None]:
    """Nothing outside the engines multiplies in TF32 either."""
    with exact(), multiplying("float32"):
        yield


def begin(options: argparse.Namespace, part: str) -> subprocess.Popen[bytes]:
    """A part in a process of its own, which writes to a log."""
    command = [sys.executable, __file__, str(options.folder), "--one", part]
    command += ["--device", options.device, *(["--small"] if options.small else [])]
    command += ["--precision", *options.precision, "--network", *options.network]
    # Processes that run at once share the cores; threads that spin for them cost minutes.
    threads = max(1, usable_cores() // (len(AT_ONCE) if part in AT_ONCE else 1))
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with (options.folder / f"{part}.log").open("wb") as log:
        return subprocess.Popen(  # noqa: S603 this file
            command, stdout=log, stderr=log, env=variables, start_new_session=True
        )


def wait(
    options: argparse.Namespace, part: str, process: subprocess.Popen[bytes], s: float
) -> None:
    """Wait until a part ends or its time is up, and say which."""
    try:
        code = process.wait(max(1.0, s))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it began, such as pytest
        process.wait()
        tell(f"{part}: ended after its time")
        return
    tell(f"{part}: exit {code}")
    report(options.folder)


def report(folder: Path) -> None:
    """All that was found, and what failed first."""
    faults, sections = list[str](), list[str]()
    for part in PARTS:
        file, log = folder / f"{part}.json", folder / f"{part}.log"
        if not file.exists():
            if log.exists():
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                faults.append(f"{part}: found nothing; its log ends: {''.join(last)[:300]}")
            continue
        found = json.loads(file.read_text())
        sections.append(f"## {part} ({found['seconds']:.0f} s)\n")
        for row in found["rows"]:
            values = [f"{key} {shown(value)}" for key, value in row.items() if key != "what"]
            sections.append(f"    {row.get('what', '')}  {' | '.join(values)}")
            if "fault" in row:
                faults.append(f"{part}, {row.get('what', '')}: {row['fault']}")
        sections.append("")
    verdict = [f"- {fault}{see(fault)}" for fault in faults] or ["- none"]
    head = ["# First run on a GPU", "", "## Faults", "", *verdict, ""]
    (folder / "report.md").write_text("\n".join([*head, *sections]))


def see(fault: str) -> str:
    """Where to look next; nothing for a fault that is not known."""
    return "".join(f"; see {place}" for said, place in SEE.items() if said in fault)


def shown(value: str | float) -> str:
    """A value in a table."""
    return value if isinstance(value, str) else f"{value:.4g}"


def main() -> None:
    """Read the command line, and run the parts that have found nothing yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of what is found; made if it is not there")
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N")
    parser.add_argument("--seconds", type=float, default=540, help="begin no part after these")
    parser.add_argument("--part", action="append", choices=[*PARTS], help="these parts alone")
    parser.add_argument(
        "--network", nargs="*", choices=[*NETWORKS], default=[], help="of smoke; all by default"
    )
    parser.add_argument(
        "--precision", nargs="*", choices=PRECISIONS, default=PRECISIONS, help="of the engines"
    )
    parser.add_argument("--small", action="store_true", help="the small form, as on a CPU")
    parser.add_argument("--one", choices=[*PARTS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.one:
        run_one(options)
        return
    ends = time.monotonic() + options.seconds
    left = [
        part for part in options.part or PARTS if not (options.folder / f"{part}.json").exists()
    ]
    if find(options.device) == CPU:
        left = [part for part in left if part not in ON_A_GPU]
    if options.small:
        left = [part for part in left if not part.endswith(SLOW)]
    if options.seconds <= 0:
        left = []
    at_once = {part: begin(options, part) for part in left if part in AT_ONCE}
    for part, process in at_once.items():
        wait(options, part, process, min(LONGEST, ends - time.monotonic()))
    for part in left:
        if part not in at_once and time.monotonic() < ends:
            wait(options, part, begin(options, part), min(LONGEST, ends - time.monotonic()))
    report(options.folder)
    tell((options.folder / "report.md").read_text())


if __name__ == "__main__":
    sys.exit(main())
