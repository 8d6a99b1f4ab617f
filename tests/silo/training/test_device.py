from types import SimpleNamespace

import pytest
import torch

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines import cuda_graphs
from staddle.algorithms.engines.cuda_graphs import Replaying
from staddle.algorithms.models.build import ModelOptions
from staddle.algorithms.numerics.devices import CPU
from staddle.algorithms.numerics.streams import stream
from staddle.algorithms.training.loop import PlainStepper
from staddle.errors import LocalError
from staddle.silo.training.trainer import TrainingDevice

from ..conftest import records

MIXED = {"name": "mixed", "classes": 3, "head": ["fc"], "input": [1, 8, 8]}
PLAIN_MODEL = ModelOptions(name="cnn-digits", classes=3)


def admitted(digest="a", privacy=None, model=PLAIN_MODEL, blind=False):
    job = SimpleNamespace(digest=digest, name=f"job-{digest}", privacy=privacy, model=model)
    job.security = SimpleNamespace(required=blind)
    return SimpleNamespace(job=job, train=records(30), test=records(10))


def given(here):
    return here.device, type(here.way), here.train, here.test


@pytest.fixture
def gpu(monkeypatch):
    """One GPU with memory for so many sides; what was taken to it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(cuda_graphs, "Graphs", lambda device: f"graphs on {device}")
    taken, room = [], [100]

    def to(data, device):
        if len(taken) >= room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        taken.append((len(data), str(device)))
        return Dataset(data.x + 1, data.y)

    monkeypatch.setattr(Dataset, "to", to)
    return SimpleNamespace(taken=taken, room=room)


def test_the_processor_takes_records_as_they_are_and_a_private_job_stays_there(gpu):
    one = admitted()
    assert given(TrainingDevice().of(one)) == (CPU, PlainStepper, one.train, one.test)
    assert gpu.taken == []
    one = admitted(privacy=object())
    device, *rest = given(TrainingDevice("cuda", "bf16").of(one))
    assert (device, *rest) == (CPU, PlainStepper, one.train, one.test)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_blind_jobs_training_draws_is_hidden_from_whoever_knows_the_job(gpu, device):
    of_job = stream(0, "a", 1, "draw/0")
    assert TrainingDevice(device).of(admitted()).way.draws(of_job) is of_job
    way = TrainingDevice(device).of(admitted(blind=True)).way
    assert len({way.draws(of_job).bit_generator.random_raw() for _ in range(3)}) == 3


def test_a_gpu_holds_the_records_of_one_job(gpu):
    place, one, other = TrainingDevice("cuda"), admitted("a"), admitted("b")
    here = place.of(one)
    assert (str(here.device), len(here.train), len(here.test)) == ("cuda:0", 30, 10)
    assert place.of(one) is here
    assert gpu.taken == [(30, "cuda:0"), (10, "cuda:0")]
    assert place.of(other).way is not here.way  # its graphs and their memory are its own
    place.of(one)
    assert len(gpu.taken) == 6
    place.of(admitted("a"))  # the same job, whose records were read again
    assert len(gpu.taken) == 8


def test_how_a_gpu_trains(gpu):
    way = TrainingDevice("cuda", "bf16").of(admitted()).way
    assert isinstance(way, Replaying)
    assert (way._recorder, way._precision) == ("graphs on cuda:0", "bf16")
    way = TrainingDevice("cuda", graphs=False).of(admitted()).way
    assert (type(way), way._precision) == (PlainStepper, "float32")
    dropping = ModelOptions(**MIXED, options={"dropout": 0.5})
    way = TrainingDevice("cuda", "bf16").of(admitted(model=dropping)).way
    assert (type(way), way._precision) == (PlainStepper, "bf16")  # no step is replayed
    with pytest.raises(LocalError, match=r"precision 'bf16' is for a GPU"):
        TrainingDevice("cpu", "bf16")


def test_records_that_do_not_fit_stay_on_the_host(gpu, caplog):
    gpu.room[0] = 1
    place, one = TrainingDevice("cuda"), admitted()
    device, _, *sides = given(place.of(one))
    assert (str(device), sides) == ("cuda:0", [one.train, one.test])
    (said,) = [record for record in caplog.records if record.message == "records.host"]
    assert said.fields["job"] == "job-a"
    assert "out of memory" in said.fields["why"]
    place.of(one)
    assert len(caplog.records) == 1  # once a job


def test_a_gpu_that_is_not_there():
    with pytest.raises(LocalError, match="'cuda:7': this machine has"):
        TrainingDevice("cuda:7")
