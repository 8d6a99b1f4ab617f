import pytest
import torch
from support.op_tape import Recorder
from torch import nn

from staddle.algorithms.engines import cuda_graphs
from staddle.algorithms.engines.cuda_graphs import Graphs, Replaying, way_on
from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.numerics.devices import CPU
from staddle.algorithms.training.loop import PLAIN, PlainStepper
from staddle.algorithms.training.silo_round import state_to_bytes

AS_CODE = {"membership_batches": True, "mixture": "logits", "double_exponential": True}
CASES = {
    "fedavg": ({}, {"norm": "batch", "buffers": "global"}),
    "fedkd": ({"mentor": "digits-cnn-a", "t_end": 0.9, "clip": 1.0}, {}),
    "fedaims": ({}, {"name": "convnet-digits", "norm": "batch"}),
    "per-fedavg": ({"alpha": 0.1}, {"norm": "batch"}),
    "per-fedavg, group norm": ({"alpha": 0.1}, {"norm": "group"}),
    "ppfl": (AS_CODE, {}),
}
MOMENTUM = {"epochs": 3, "momentum": 0.9, "lr": 0.05}


@pytest.fixture
def make(make_job, make_data):
    def build(case, rounds=2, **training):
        (options, model), training = CASES[case], {**MOMENTUM, **training}
        job = make_job(case.partition(",")[0], options, model, training, rounds=rounds)
        return job, {
            silo: Records(make_data(21 + i, i), make_data(7, i)) for i, silo in enumerate(job.silos)
        }

    return build


def played(job, engine):
    """States after all rounds, and the reports of each."""
    simulation = Simulation(job, engine)
    reports = [simulation.step().reports for _ in range(job.length)]
    return simulation.states, reports


def ended(job, engine):
    return played(job, engine)[0]


@pytest.mark.parametrize("case", [case for case in CASES if "group" not in case])
def test_replayed_steps_have_the_bits_of_others(make, monkeypatch, case):
    """Two shapes of batches, rates that change from round to round, momentum that begins anew with
    each stage.
    """
    monkeypatch.setattr(cuda_graphs, "WARM_CALLS", 1)  # so two epochs replay a step
    job, records = make(case, epochs=2, schedule={"kind": "exponential", "factor": 0.5})
    recorder = Recorder()
    (one, said), (other, told) = (
        played(job, Serial(job, records, way=way)) for way in (PLAIN, Replaying(recorder))
    )
    assert said == told
    for silo in job.silos:
        assert state_to_bytes(one[silo]) == state_to_bytes(other[silo]), silo
    assert recorder.replayed > recorder.recorded > 0


def test_large_models_are_not_recorded(make, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "SMALL_BYTES", 1000)
    job, records = make("fedavg")
    recorder = Recorder()
    ended(job, Serial(job, records, way=Replaying(recorder)))
    assert (recorder.warmed, recorder.recorded) == (0, 0)


def check_nearly(job, records, engines, least):
    """What a job ends in by other engines is close to what it ends in exactly, and not the same."""
    exact = ended(job, Serial(job, records))
    for engine in engines:
        ends = ended(job, engine)
        for silo in job.silos:
            one, other = exact[silo].flat, ends[silo].flat
            names = [name for name in one if "running" not in name]
            far = max(float((one[name] - other[name]).abs().max()) for name in names)
            assert least < far < 0.05, silo
            assert all(other[name].dtype == one[name].dtype for name in one)
            assert all(value.is_contiguous() for value in other.values())


@pytest.mark.parametrize("case", ["fedavg", "fedaims", "per-fedavg, group norm"])
def test_with_fewer_bits_it_is_nearly_the_same(make, case):
    """On the CPU, where products can be bfloat16 too: what stays is float32 and laid out as
    ever.
    """
    job, records = make(case, rounds=1, epochs=1)
    alone = Serial(job, records, way=PlainStepper("bf16"))
    check_nearly(job, records, (alone, Stacked(job, records, precision="bf16")), 1e-4)


@pytest.mark.parametrize(
    ("precision", "last"), [("float32", False), ("tf32", True), ("bf16", True)]
)
def test_with_fewer_bits_convolutions_lie_channels_last(precision, last):
    modules = {"part": nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv3d(2, 3, 3), nn.Linear(3, 1))}
    stage = type("Stage", (), {"trains": ("part",)})()
    PlainStepper(precision).begin(modules, stage)
    images, volumes, _ = modules["part"]
    assert images.weight.is_contiguous(memory_format=torch.channels_last) == last
    assert volumes.weight.is_contiguous(memory_format=torch.channels_last_3d) == last


def test_a_cpu_trains_plainly(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "Graphs", lambda device: f"graphs on {device}")
    plain = way_on(CPU, "tf32")
    assert (type(plain), plain._precision) == (PlainStepper, "float32")
    way = way_on(torch.device("cuda:1"), "tf32")
    assert (type(way), way._recorder, way._precision) == (Replaying, "graphs on cuda:1", "tf32")
    assert type(way_on(torch.device("cuda:1"), graphs=False)) is PlainStepper


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_replays_what_it_launches(make, case):
    job, records = make(case, schedule={"kind": "exponential", "factor": 0.5})
    gpu = torch.device("cuda:0")
    ends = [
        ended(job, Serial(job, records, device=gpu, way=way_on(gpu, graphs=graphs)))
        for graphs in (True, False)
    ]
    for silo in job.silos:
        one, other = (state_to_bytes(end[silo]) for end in ends)
        assert one == other, silo


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("case", ["fedavg", "fedaims", "per-fedavg, group norm"])
def test_a_gpu_multiplies_with_fewer_bits(make, case, precision):
    (job, records), gpu = make(case, rounds=1, epochs=1), torch.device("cuda:0")
    alone = Serial(job, records, device=gpu, way=way_on(gpu, precision))
    graphs = {"recorder": Graphs("cuda:0"), "precision": precision}
    check_nearly(job, records, (alone, Stacked(job, records, "cuda:0", **graphs)), 1e-5)
