from dataclasses import replace

import numpy as np
import pytest
import torch
from one_device import OneDevice
from torch import nn

from staddle.algorithms.devices import CPU, device_of, find
from staddle.algorithms.engine import Records, Serial
from staddle.algorithms.local_round import facts_of, local_round, look, to_modules
from staddle.algorithms.method import Stage, initial_state
from staddle.algorithms.simulation import Simulation
from staddle.algorithms.training import evaluate, measure, train
from staddle.errors import LocalError

META = torch.device("meta")


def no_numbers():
    """Where a number is asked for, which is the first time that a GPU would be waited for."""
    return pytest.raises((NotImplementedError, RuntimeError), match="meta tensor")


@pytest.mark.parametrize(
    ("name", "gpus", "text"),
    [
        ("cuda", 0, r"'cuda': this machine has no GPU that torch can use; choose another device, or cpu"),
        ("cuda:2", 2, r"'cuda:2': this machine has 2 GPUs, cuda:0 to cuda:1; choose"),
        ("cuda:x", 1, r"'cuda:x': no such device; choose cpu, cuda or cuda:N"),
        ("mps", 1, r"'mps': no such device"),
    ],
)
def test_a_device_that_is_not_there(monkeypatch, name, gpus, text):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(LocalError, match=text):
        find(name)


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(find(name)) for name in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda:0", "cuda:1"]
    assert device_of([nn.ReLU(), nn.BatchNorm1d(2, affine=False, device="meta")]) == META  # a buffer counts
    assert device_of([nn.ReLU()]) == device_of([]) == CPU


@pytest.mark.parametrize("method", ["fedprox", "fedssa", "ppfl", "pfedfda", "fedaims"])
@pytest.mark.parametrize("resident", [True, False])
def test_all_tensors_go_to_the_device(make_job, make_data, method, resident):
    """A silo's stages, measurements and evaluation, with its records there, or brought batch by batch."""
    job = make_job(method, model={"name": "convnet-digits", "norm": "group"} if method == "fedaims" else {})
    method, here = job.method(), make_data(20)
    data = here.to(META) if resident else here
    state = initial_state(method, "a")
    measured = measure(method.measure, to_modules(method, "a", state), here)
    facts = replace(facts_of(job, "a", 0, here), measured=measured)
    modules = to_modules(method, "a", state, META)
    assert device_of(modules.values()) == META
    with OneDevice(), no_numbers():
        evaluate(method, modules, data)
    for stage in method.stages(state, facts):
        if isinstance(stage, Stage):
            steps = []
            with OneDevice(), no_numbers():  # at the end of the first epoch, and not before
                train(modules, stage, data, 8, np.random.default_rng(0), progress=lambda of=steps: of.append(None))
            assert len(steps) == (1 if stage.full_batch else 3)
    if measured:
        with OneDevice(), no_numbers():
            measure(method.measure, modules, data)


def test_what_is_there_is_not_copied(make_data):
    data = make_data(5)
    assert data.to(CPU) is data
    there = data.to(META)
    assert (there.x.device, there.y.device, len(there)) == (META, META, 5)
    assert there.to(META) is there
    records = Records(data, data, None).to(META)
    assert (records.train.x.device, records.validation) == (META, None)


def test_private_jobs_stay_on_the_host(make_job, make_data):
    job, data = make_job(), make_data(9)
    state = initial_state(job.method(), "a")
    for run in (
        lambda: local_round(job.method(), job, state, 0, {}, data, data, "a", private=object(), device=META),
        lambda: look(job.method(), job, 0, state, {}, data, data, "a", private=object(), device=META),
    ):
        with pytest.raises(LocalError, match="is private and was given to meta"):
            run()


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
    for silo in job.silos:
        one, other = (end[silo].flat for end in ends)
        assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)
        assert {tensor.device for tensor in other.values()} == {CPU}
