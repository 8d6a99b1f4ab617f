from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.meta_device import OneDevice
from support.refusals import refused
from support.whole_jobs import check_tensors
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from staddle.algorithms.course import Stage
from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.method import initial_state
from staddle.algorithms.numerics.devices import (
    CPU,
    casting,
    check_precision,
    device_of,
    exact,
    find,
    multiplying,
    on_host,
    room,
    stacked,
    uncast,
)
from staddle.algorithms.training.loop import evaluate, measure, train
from staddle.algorithms.training.silo_round import facts_of, local_round, look, to_modules

META = torch.device("meta")


def no_numbers():
    """Where a number is asked for, which is the first time that a GPU would be waited for."""
    return pytest.raises((NotImplementedError, RuntimeError), match="meta tensor")


@pytest.mark.parametrize(
    ("name", "gpus", "text"),
    [
        ("cuda", 0,
            r"'cuda': this machine has no GPU that torch can use; choose another device, or cpu"),
        ("cuda:2", 2, r"'cuda:2': this machine has 2 GPUs, cuda:0 to cuda:1; choose"),
        ("cuda:x", 1, r"'cuda:x': no such device; choose cpu, cuda or cuda:N"),
        ("mps", 1, r"'mps': no such device"),
    ],
)  # fmt: skip
def test_a_device_that_is_not_there(monkeypatch, name, gpus, text):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with refused(text):
        find(name)


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(find(name)) for name in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda:0", "cuda:1"]
    # a buffer counts
    assert device_of([nn.ReLU(), nn.BatchNorm1d(2, affine=False, device="meta")]) == META
    assert device_of([nn.ReLU()]) == device_of([]) == CPU


def test_a_gpu_gives_a_share_of_its_memory(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30)
    )
    assert room(torch.device("cuda:1")) == 20 * 2**30
    assert room(CPU) == 4 * 2**30


def test_precisions(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: (8, 0) if device.index else (7, 5)
    )
    for precision in ("float32", "tf32", "bf16"):
        check_precision(torch.device("cuda:1"), precision)
    check_precision(CPU, "float32")
    with refused(r"'tf32' is for a GPU; leave it out on a CPU"):
        check_precision(CPU, "tf32")
    with refused(r"'bf16': cuda:0 is of compute capability 7\.5, .* from 8\.0 on"):
        check_precision(torch.device("cuda:0"), "bf16")


def test_products_are_rounded_where_that_is_asked_for_and_nowhere_else():
    def flags():
        return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision

    with exact():
        for precision in ("float32", "bf16"):
            with multiplying(precision):
                assert flags() == ("ieee", "ieee")
        with multiplying("tf32"):
            assert flags() == ("tf32", "tf32")
            assert torch.backends.cudnn.deterministic
        assert flags() == ("ieee", "ieee")


def test_the_first_to_need_exact_sums_may_end_before_the_last():
    """As silos of several jobs do in threads of one process."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.conv.fp32_precision
    assert before != (True, "ieee")
    first, second = exact(), exact()
    with ThreadPoolExecutor(1) as other:
        first.__enter__()
        other.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        assert (cudnn.deterministic, cudnn.conv.fp32_precision) == (True, "ieee")
        other.submit(second.__exit__, None, None, None).result()
    assert (cudnn.deterministic, cudnn.conv.fp32_precision) == before


def test_torchscript_is_computed_alike_in_each_call():
    """Else its first call counts what can be compiled, and a later one compiles it."""
    counted = []
    for steps in (nullcontext(), exact()):
        scripted = torch.jit.CompilationUnit("def f(x):\n  return (x * 2 + 1).sin()\n").f
        with steps:
            scripted(torch.ones(3))
            counted.append("prim::profile" in str(torch.jit.last_executed_optimized_graph()))
    assert counted == [True, False]
    assert torch._C._get_graph_executor_optimize()


@pytest.mark.parametrize("by", ["matmul", "conv", "legacy"])
def test_nothing_is_rounded_though_an_earlier_call_asked_for_it(by):
    """And it is as before afterwards."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    try:
        if by == "legacy":
            torch.set_float32_matmul_precision("high")
        else:
            {"matmul": matmul, "conv": conv}[by].fp32_precision = "tf32"
        asked = matmul.fp32_precision, conv.fp32_precision
        assert "tf32" in asked
        with exact():
            assert (matmul.fp32_precision, conv.fp32_precision) == ("ieee", "ieee")
            with multiplying("tf32"):
                assert (matmul.fp32_precision, conv.fp32_precision) == ("tf32", "tf32")
        assert (matmul.fp32_precision, conv.fp32_precision) == asked
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision, conv.fp32_precision = before


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("float32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16)],
)
def test_layers_return_the_type_of_the_precision(precision, dtype):
    a, b = torch.rand(3, 4), torch.rand(4, 2)
    with casting(CPU, precision):
        assert (a @ b).dtype == dtype
        with uncast(CPU):
            assert (a @ b).dtype == torch.float32
        assert (a @ b).dtype == dtype


@pytest.mark.parametrize("method", ["fedprox", "fedssa", "ppfl", "pfedfda", "fedaims"])
@pytest.mark.parametrize("resident", [True, False])
def test_all_tensors_go_to_the_device(make_job, make_data, method, resident):
    """A silo's stages, measurements and evaluation, with its records there, or brought batch by
    batch.
    """
    model = {"name": "convnet-digits", "norm": "group"} if method == "fedaims" else {}
    job = make_job(method, model=model)
    method, here = job.method(), make_data(20)
    data = here.to(META) if resident else here
    state = initial_state(method, "a")
    measured = measure(method.measure, to_modules(method, "a", state), here)
    facts = replace(facts_of(job, "a", 0, here), measured=measured)
    modules = to_modules(method, "a", state, META)
    assert device_of(modules.values()) == META
    # Marks are brought to the host in the end, and not before.
    with OneDevice(), pytest.raises(NotImplementedError, match="Cannot copy out of meta"):
        evaluate(method, modules, data, job.counting)
    for stage in method.stages(state, facts):
        if isinstance(stage, Stage):
            steps = []
            with OneDevice(), no_numbers():  # at the end of the first epoch, and not before
                rng, tick = np.random.default_rng(0), lambda of=steps: of.append(None)
                train(modules, stage, data, 8, rng, progress=tick)
            assert len(steps) == (1 if stage.full_batch else 3)
    if measured:
        with OneDevice(), no_numbers():
            measure(method.measure, modules, data)


class Brought(TorchDispatchMode):
    """How often something is brought from the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            self.count += args[0].device == CPU and results.device == META
        return results


def test_the_places_of_an_epoch_are_brought_at_once(make_job, make_data):
    job, data = make_job(), make_data(20).to(META)
    method = job.method()
    state = initial_state(method, "a")
    modules = to_modules(method, "a", state, META)
    (stage,) = method.stages(state, facts_of(job, "a", 0, make_data(20)))
    steps = []
    with Brought() as brought, no_numbers():
        train(
            modules, stage, data, 8, np.random.default_rng(0), progress=lambda: steps.append(None)
        )
    assert len(steps) == 3
    assert brought.count == 1


def test_what_is_there_is_not_copied(make_data):
    data = make_data(5)
    assert data.to(CPU) is data
    there = data.to(META)
    assert (there.x.device, there.y.device, len(there)) == (META, META, 5)
    assert there.to(META) is there
    records = Records(data, data, None).to(META)
    assert (records.train.x.device, records.validation) == (META, None)


def test_too_little_memory_is_said(make_job, make_data, monkeypatch):
    def greedy(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    job, data = make_job(), make_data(9)
    monkeypatch.setattr("staddle.algorithms.training.silo_round.evaluate", greedy)
    method, state = job.method(), initial_state(job.method(), "a")
    said = r"CUDA out of memory\. .*; free memory of this GPU, or choose another device"
    with refused(said):
        local_round(method, job, state, 0, {}, data, data, "a")
    with refused(said):
        look(method, job, 0, state, {}, data, data, "a")


def test_private_jobs_stay_on_the_host(make_job, make_data):
    job, data = make_job(), make_data(9)
    method, state = job.method(), initial_state(job.method(), "a")
    there = {"private": object(), "device": META}
    with refused("is private and was given to meta"):
        local_round(method, job, state, 0, {}, data, data, "a", **there)
    with refused("is private and was given to meta"):
        look(method, job, 0, state, {}, data, data, "a", **there)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
@pytest.mark.parametrize("method", ["fedavg", "fedssa", "ppfl"])
def test_a_gpu_gives_the_same(make_job, make_shards, method):
    job = make_job(method)
    records = {silo: Records(*sides) for silo, sides in make_shards(job).items()}
    ends = []
    for device in (CPU, torch.device("cuda:0")):
        simulation = Simulation(job, Serial(job, records, device=device))
        simulation.step()
        ends.append(simulation.states)
    for silo, state in ends[0].items():
        check_tensors(ends[1][silo].flat, state.flat, 1e-5)
        assert {tensor.device for tensor in ends[1][silo].flat.values()} == {CPU}


NUMBERS = [torch.arange(6.0).reshape(2, 3) + n for n in range(4)]


def test_tensors_of_the_host_stay_there():
    assert all(one is other for one, other in zip(on_host(NUMBERS), NUMBERS, strict=True))
    assert torch.equal(stacked(NUMBERS, CPU), torch.stack(NUMBERS))


def test_a_tensor_that_all_share_is_sent_once(monkeypatch):
    sent, stack, one = [], torch.stack, torch.arange(6.0).reshape(2, 3)
    monkeypatch.setattr(torch, "stack", lambda given: sent.append(len(given)) or stack(given))
    apart = stacked([one, one.clone(), one], CPU)
    same = stacked([one, one, one], CPU)
    assert sent == [3, 1]
    assert torch.equal(same, apart)
    same[0] += 1
    assert torch.equal(same[1], one)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
def test_a_gpu_takes_tensors_and_gives_them_back():
    """Many, so that a copy that is read before it has ended, or memory that is used again before it
    was read, shows.
    """
    large = [torch.full((2**20,), float(n)) for n in range(24)]
    sent = [stacked([one, one.clone()], torch.device("cuda:0")) for one in large]
    back = on_host(value.neg() for value in sent)
    for one, other in zip(large, back, strict=True):
        assert torch.equal(other, -torch.stack([one, one]))
    mixed = on_host([torch.tensor(7, device="cuda:0"), torch.tensor(8)])
    assert [int(value) for value in mixed] == [7, 8]
