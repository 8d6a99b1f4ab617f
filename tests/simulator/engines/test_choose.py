import pickle
from types import SimpleNamespace

import pytest
import torch
from support.refusals import refused

from staddle.algorithms.data.lazy import LazyRecords
from staddle.algorithms.engines import cuda_graphs
from staddle.algorithms.engines.cuda_graphs import AsItIs, Replaying
from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.training.loop import PlainStepper
from staddle.simulator.engines import choose as engines
from staddle.simulator.engines.choose import Cluster, OnGpu, choose


class Crew:
    made = 0

    def __init__(self, records, makers, *more):
        self.makers, self.more, self.closed = makers, more, False
        Crew.made += 1

    def engine(self, job):
        return self, job

    def close(self):
        self.closed = True


class Stacked:
    def __init__(self, job, records, device, recorder, precision):
        self.made_with, self.recorder, self.precision = (job, records, device), recorder, precision


SIDE = SimpleNamespace(x=torch.zeros(2, 1))
RECORDS = dict.fromkeys("abcde", Records(SIDE, SIDE))
JOB, DROPPING, RECURRENT, AUGMENTING = (
    SimpleNamespace(draws=own or draws, model=SimpleNamespace(draws=draws, maps=maps))
    for own, draws, maps in (
        (False, False, True),
        (False, True, True),
        (False, False, False),
        (True, False, True),
    )
)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Four cores and no GPU; a call gives it some."""
    before = torch.get_num_threads()
    monkeypatch.setattr(engines, "Crew", Crew)
    monkeypatch.setattr(engines, "Stacked", Stacked)
    monkeypatch.setattr(engines, "Graphs", lambda device: f"graphs on {device}")
    monkeypatch.setattr(cuda_graphs, "Graphs", lambda device: f"graphs on {device}")
    monkeypatch.setattr(engines, "usable_cores", lambda: 4)
    monkeypatch.setattr(engines, "draws_randomly", lambda model: model.draws)
    monkeypatch.setattr(engines, "maps", lambda model: model.maps)

    def gpus(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
        memory = SimpleNamespace(total_memory=79.65 * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index else (7, 5)
        )

    gpus(0)
    yield gpus
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("device", "workers", "count"),
    [("auto", None, 4), ("cpu", None, 4), ("cpu", 2, 2), ("auto", 9, 5)],
)
def test_a_cpu_has_one_worker_a_core_and_no_more_than_silos(device, workers, count):
    torch.set_num_threads(2)
    before = Crew.made
    with choose(RECORDS, device, workers) as found:
        assert Crew.made == before  # no process before there is a job
        crew, job = found.engine(JOB)
        assert found.engine("another") == (crew, "another")
        assert (crew.makers, job, crew.closed) == ([Serial] * count, JOB, False)
        assert (found.where, found.device) == (
            f"{count} worker processes with one thread each",
            "cpu",
        )
        assert torch.get_num_threads() == 1
    assert crew.closed


def test_one_worker_is_this_process_at_one_thread(machine, monkeypatch):
    monkeypatch.setattr(engines, "Serial", lambda job, records: ("serial", job, records))
    with choose(RECORDS, "cpu", 1) as found:
        assert found.engine(JOB) == ("serial", JOB, RECORDS)
    machine(1)
    assert choose(RECORDS, "auto", 1).where == "this process, one thread"


def test_lazy_records_are_read_for_one_silo_after_another(machine, monkeypatch):
    lazy = SimpleNamespace(x=LazyRecords.of(list, 2, (1,), 0, "the set", str))
    records = {**RECORDS, "b": Records(SIDE, lazy)}
    assert choose(records).where == "this process, one thread"
    assert choose(records, workers=1).where == "this process, one thread"
    with refused(
        r"--workers 2: silos whose records are read when they are used .* set data\.workers"
    ):
        choose(records, workers=2)
    machine(1)
    monkeypatch.setattr(engines, "Serial", lambda job, held, device, way: (job, held, device, way))
    found = choose(records)
    assert found.where == "GPU cuda:0 (cuda:0), silos one by one"
    assert found.engine(JOB)[1] is records


@pytest.mark.parametrize(("device", "index"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_has_silos_stacked(machine, device, index):
    machine(2)
    found = choose(RECORDS, device)
    engine = found.engine(JOB)
    assert engine.made_with == (JOB, RECORDS, f"cuda:{index}")
    assert (engine.recorder, engine.precision) == (f"graphs on cuda:{index}", "float32")
    assert isinstance(choose(RECORDS, device, gpu=OnGpu(graphs=False)).engine(JOB).recorder, AsItIs)
    assert found.where == f"GPU cuda:{index} (cuda:{index}), silos stacked"
    assert found.device == f"cuda (GPU cuda:{index}, 80 GiB)"
    found.close()


@pytest.mark.parametrize(
    ("device", "workers", "gpus", "text"),
    [
        ("cpu", 0, 0, r"workers = 0; give 1 or more, or leave it out for 4"),
        ("cuda", None, 0,
            r"'cuda': this machine has no GPU that torch can use; choose another device, or cpu"),
        ("cuda:2", None, 2, r"'cuda:2': this machine has 2 GPUs, cuda:0 to cuda:1; choose"),
        ("tpu", None, 1, r"'tpu': no such device; choose cpu, cuda or cuda:N"),
        ("cuda:0", 2, 1, r"2 workers on device 'cuda:0': workers are for a CPU"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused(machine, device, workers, gpus, text):
    machine(gpus)
    with refused(text):
        choose(RECORDS, device, workers)


@pytest.fixture
def alike(machine, monkeypatch):
    """GPUs of one model, but for the last."""

    def gpus(count):
        machine(count + 1)
        names = {torch.device("cuda", number): "GPU A" for number in range(count)}
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: names.get(gpu, "GPU B"))

    return gpus


@pytest.mark.parametrize(
    ("device", "numbers"),
    [("cuda", [0, 1, 2]), ("cuda:2,cuda:0", [2, 0]), ("cuda:1", [1]), ("auto", [0])],
)
def test_several_gpus_have_a_worker_each_with_its_share_stacked(
    alike, monkeypatch, device, numbers
):
    """Silos whose layers draw are given one by one: the bits depend on no deal."""
    alike(3)
    before, on = Crew.made, []
    monkeypatch.setattr(torch.cuda, "set_device", on.append)
    monkeypatch.setattr(engines, "Serial", lambda job, r, device, **_: (job, r, str(device)))
    with choose(RECORDS, device, gpu=OnGpu(precision="float32")) as found:
        names = [f"cuda:{number}" for number in numbers]
        assert found.where == f"GPU A ({', '.join(names)}), silos stacked"
        many = f", on {len(names)} GPUs" if len(names) > 1 else ""
        assert found.device == f"cuda (GPU A, 80 GiB){many}"
        assert Crew.made == before  # no process before there is a job
        if len(names) == 1:
            assert found.engine(JOB).made_with == (JOB, RECORDS, *names)
            return
        crew, job = found.engine(JOB)
        stacks, have = crew.more
        assert (job, stacks(JOB), stacks(DROPPING), stacks(RECURRENT)) == (JOB, True, False, False)
        assert have == "GPUs"
        made = [make(JOB, RECORDS).made_with for make in pickle.loads(pickle.dumps(crew.makers))]
        assert made == [(JOB, RECORDS, name) for name in names]
        assert on == names
        assert crew.makers[0](DROPPING, RECORDS) == (DROPPING, RECORDS, names[0])
    assert crew.closed


def test_no_more_gpus_than_silos_and_one_where_processes_cannot_share_records(alike, monkeypatch):
    alike(9)
    assert choose(RECORDS, "cuda").device == "cuda (GPU A, 80 GiB), on 5 GPUs"
    one_by_one = choose(RECORDS, "cuda", gpu=OnGpu(stacked=False))
    assert one_by_one.device == "cuda (GPU A, 80 GiB), one by one"
    assert one_by_one.engine(JOB)[0].more[0](JOB) is False
    lazy = SimpleNamespace(x=LazyRecords.of(list, 2, (1,), 0, "the set", str))
    assert choose({**RECORDS, "b": Records(SIDE, lazy)}, "cuda").where.startswith("GPU A (cuda:0),")
    with refused(r"cuda:0,cuda:1: silos whose records are read .* one after another; name one GPU"):
        choose({**RECORDS, "b": Records(SIDE, lazy)}, "cuda:0,cuda:1")
    monkeypatch.setattr(engines, "SHARED", False)
    assert choose(RECORDS, "cuda").device == "cuda (GPU A, 80 GiB)"


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("cpu,cpu", "--device cpu,cpu: several devices are GPUs, each named once, .* --workers"),
        ("cuda:0,cuda:0", "cuda:0,cuda:0: several devices are GPUs, each named once"),
        ("cuda,cpu", "--device cuda,cpu: several devices are GPUs"),
        ("cuda:0,cuda:3", "these are GPU A, 80 GiB and GPU B, 80 GiB, which may round differently"),
        ("cuda:0,cuda:4", "'cuda:4': this machine has 4 GPUs"),
        ("cuda:0,", "'': no such device"),
    ],
)  # fmt: skip
def test_several_devices_are_gpus_of_one_model(alike, device, text):
    alike(3)
    with refused(text):
        choose(RECORDS, device)


def test_a_gpu_trains_silos_one_by_one_where_that_is_asked_for(machine, monkeypatch):
    machine(2)
    monkeypatch.setattr(engines, "Serial", lambda job, r, device, way: (job, r, str(device), way))
    found = choose(RECORDS, "cuda:1", gpu=OnGpu(stacked=False))
    assert found.where == "GPU cuda:1 (cuda:1), silos one by one"
    assert found.device == "cuda (GPU cuda:1, 80 GiB), one by one"
    *given, way = found.engine(JOB)
    assert given == [JOB, RECORDS, "cuda:1"]
    assert isinstance(way, Replaying)
    assert (way._recorder, way._precision) == ("graphs on cuda:1", "float32")
    found = choose(RECORDS, "cuda:1", gpu=OnGpu(stacked=False, graphs=False, precision="tf32"))
    assert found.where == "GPU cuda:1 (cuda:1), silos one by one, tf32"
    assert found.device == "cuda (GPU cuda:1, 80 GiB), one by one, tf32"
    way = found.engine(JOB)[-1]
    assert (type(way), way._precision) == (PlainStepper, "tf32")


def test_silos_whose_layers_draw_train_one_by_one_and_no_step_is_replayed(machine, monkeypatch):
    """Stacked they would draw other numbers, and a recorded step draws the same ones again."""
    machine(2)
    monkeypatch.setattr(engines, "Serial", lambda job, r, device, way: (job, r, str(device), way))
    *given, way = choose(RECORDS, "cuda:1").engine(DROPPING)
    assert given == [DROPPING, RECORDS, "cuda:1"]
    assert (type(way), way._precision) == (PlainStepper, "float32")


def test_silos_that_cannot_be_stacked_train_one_by_one_and_steps_are_replayed(machine, monkeypatch):
    machine(2)
    monkeypatch.setattr(engines, "Serial", lambda job, *_, way, **__: (job, way))
    job, way = choose(RECORDS, "cuda:1").engine(RECURRENT)
    assert (job, way._recorder) == (RECURRENT, "graphs on cuda:1")


def test_silos_that_augment_are_stacked(machine):
    machine(2)
    assert isinstance(choose(RECORDS, "cuda:1").engine(AUGMENTING), Stacked)


def test_fewer_bits_where_they_are_asked_for_and_the_gpu_has_them(machine):
    machine(2)
    found = choose(RECORDS, "cuda:1", gpu=OnGpu(precision="bf16"))
    assert found.where == "GPU cuda:1 (cuda:1), silos stacked, bf16"
    assert found.device == "cuda (GPU cuda:1, 80 GiB), bf16"
    assert found.engine(JOB).precision == "bf16"
    with refused(r"'tf32': cuda:0 is of compute capability 7\.5, .* from 8\.0 on; leave it out"):
        choose(RECORDS, "cuda:0", gpu=OnGpu(precision="tf32"))


@pytest.mark.parametrize(
    ("device", "workers", "gpus"), [("cpu", None, 1), ("auto", None, 0), ("auto", 2, 1)]
)
@pytest.mark.parametrize(
    ("gpu", "text"),
    [
        (OnGpu(graphs=False), "^--no-graphs: for a GPU alone"),
        (OnGpu(stacked=False, precision="bf16"),
            "^--one-by-one and --precision bf16: for a GPU alone"),
    ],
)  # fmt: skip
def test_a_cpu_has_none_of_what_is_for_a_gpu(machine, device, workers, gpus, gpu, text):
    machine(gpus)
    with refused(text):
        choose(RECORDS, device, workers, gpu)


def test_a_cluster_has_actors_with_a_core_or_a_gpu_each(machine, monkeypatch):
    made = []

    class FakeRayCrew:
        def __init__(self, records, make, resource="CPU", address=None, count=None):
            self.options = (records, make, resource, address, count)
            made.append(self)

        def ask(self, question):
            return question()

        def engine(self, job):
            return self, job

        def close(self):
            made.remove(self)

    monkeypatch.setattr(engines, "RayCrew", FakeRayCrew)
    with choose(RECORDS, "auto", 3, cluster=Cluster("head:6379")) as found:
        assert made == []  # no connection before there is a job
        crew, job = found.engine(JOB)
        assert found.engine("another") == (crew, "another")
        assert (job, crew.options) == (JOB, (RECORDS, Serial, "CPU", "head:6379", 3))
        assert (found.where, found.device) == ("Ray at head:6379, one thread an actor", "cpu")
    assert made == []

    machine(1)
    with choose(RECORDS, "cuda", cluster=Cluster()) as found:
        crew, _ = found.engine(JOB)
        _, make, *others = crew.options
        assert others == ["GPU", None, None]
        assert make(JOB, RECORDS).made_with == (JOB, RECORDS, "cuda:0")
        assert found.device == "cuda (GPU cuda:0, 80 GiB)"
        assert found.where == f"Ray on this machine, {found.device}"
    assert made == []

    with refused("--device cuda:1: Ray deals the GPUs out"):
        choose(RECORDS, "cuda:1", cluster=Cluster())
    with refused("--no-graphs: for a GPU alone"):
        choose(RECORDS, "cpu", gpu=OnGpu(graphs=False), cluster=Cluster())
    lazy = SimpleNamespace(x=LazyRecords.of(list, 2, (1,), 0, "the set", str))
    with refused("--engine ray: silos whose records are read when they are used"):
        choose({**RECORDS, "b": Records(SIDE, lazy)}, cluster=Cluster())
