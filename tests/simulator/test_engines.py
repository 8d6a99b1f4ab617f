import pytest
import torch

from staddle.algorithms.replay import AsItIs
from staddle.errors import LocalError
from staddle.simulator import engines
from staddle.simulator.engines import choose


class Crew:
    made = 0

    def __init__(self, records, count):
        self.count, self.closed = count, False
        Crew.made += 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def engine(self, job):
        return self, job

    def close(self):
        self.closed = True


class Stacked:
    def __init__(self, job, records, device, recorder):
        self.made_with, self.recorder = (job, records, device), recorder


RECORDS = dict.fromkeys("abcde")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Four cores and no GPU; a call gives it some."""
    before = torch.get_num_threads()
    monkeypatch.setattr(engines, "Crew", Crew)
    monkeypatch.setattr(engines, "Stacked", Stacked)
    monkeypatch.setattr(engines, "Graphs", lambda device: f"graphs on {device}")
    monkeypatch.setattr(engines, "usable_cores", lambda: 4)

    def gpus(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")

    gpus(0)
    yield gpus
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("device", "workers", "count"), [("auto", None, 4), ("cpu", None, 4), ("cpu", 2, 2), ("auto", 9, 5)]
)
def test_a_cpu_has_one_worker_a_core_and_no_more_than_silos(device, workers, count):
    torch.set_num_threads(2)
    before = Crew.made
    with choose(RECORDS, device, workers) as found:
        assert Crew.made == before  # no process before there is a job
        crew, job = found.engine("job")
        assert found.engine("another") == (crew, "another")
        assert (crew.count, job, crew.closed) == (count, "job", False)
        assert (found.where, found.device) == (f"{count} worker processes, a thread each", "cpu")
        assert torch.get_num_threads() == 1
    assert crew.closed


def test_one_worker_is_this_process_at_one_thread(machine, monkeypatch):
    monkeypatch.setattr(engines, "Serial", lambda job, records: ("serial", job, records))
    with choose(RECORDS, "cpu", 1) as found:
        assert found.engine("job") == ("serial", "job", RECORDS)
    machine(1)
    assert choose(RECORDS, "auto", 1).where == "this process, one thread"


@pytest.mark.parametrize(("device", "index"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_has_silos_stacked(machine, device, index):
    machine(2)
    found = choose(RECORDS, device)
    engine = found.engine("job")
    assert (engine.made_with, engine.recorder) == (("job", RECORDS, f"cuda:{index}"), f"graphs on cuda:{index}")
    assert isinstance(choose(RECORDS, device, graphs=False).engine("job").recorder, AsItIs)
    assert (found.where, found.device) == (f"GPU cuda:{index} (cuda:{index}), silos stacked", "cuda")
    found.close()


@pytest.mark.parametrize(
    ("device", "workers", "gpus", "text"),
    [
        ("cpu", 0, 0, r"workers = 0; give 1 or more, or leave it out for 4"),
        ("cuda", None, 0, r"'cuda': this machine has no GPU that torch can use; choose another device, or cpu"),
        ("cuda:2", None, 2, r"'cuda:2': this machine has 2 GPUs, cuda:0 to cuda:1; choose"),
        ("tpu", None, 1, r"'tpu': no such device; choose cpu, cuda or cuda:N"),
        ("cuda:0", 2, 1, r"2 workers on device 'cuda:0': workers are for a CPU"),
    ],
)
def test_what_is_not_there_is_refused(machine, device, workers, gpus, text):
    machine(gpus)
    with pytest.raises(LocalError, match=text):
        choose(RECORDS, device, workers)


@pytest.mark.parametrize(("device", "workers", "gpus"), [("cpu", None, 1), ("auto", None, 0), ("auto", 2, 1)])
def test_only_a_gpu_goes_without_graphs(machine, device, workers, gpus):
    machine(gpus)
    with pytest.raises(LocalError, match="--no-graphs: a CPU has no CUDA graphs"):
        choose(RECORDS, device, workers, graphs=False)
