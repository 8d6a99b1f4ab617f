from types import SimpleNamespace

import pytest
import torch

from staddle.algorithms.engines.engine import Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.training import loop as training


@pytest.fixture(scope="module")
def population(program):
    return program.Population(3, 40, 5)


@pytest.mark.parametrize("way", ["images", "normalised", "tensors", "resident"])
def test_both_train_and_test_on_the_same_records(program, population, monkeypatch, way):
    job = program.job_of("pfedsim", population.silos, 2, epochs=1)
    loop, _ = program.plain(population, job, way, epochs=1)
    taken, move = [], training.move
    monkeypatch.setattr(training, "move", lambda *step: taken.append(1) or move(*step))
    simulation = Simulation(job, Serial(job, population.records()))
    for number in range(2):
        cohort = job.cohort(number)
        assert len(cohort) == 2
        right = loop.round(number, [job.silos.index(silo) for silo in cohort])
        reports = simulation.step().reports.values()
        assert len(taken) == loop.steps == (number + 1) * 2 * 2
        assert sum(report.tested for report in reports) == 10
        assert all(0 <= count <= 10 for count in right)


def test_the_records_are_the_same_in_every_way(program, population):
    job, ours = program.job_of("pfedsim", population.silos, 2), population.records()
    for way in program.WAYS:
        loop, _ = program.plain(population, job, way)
        for client, silo in enumerate(job.silos):
            for side, own in ((loop._train, ours[silo].train), (loop._test, ours[silo].test)):
                x, y = zip(*side[client], strict=True)
                assert torch.allclose(torch.stack(x), own.x, atol=1e-6)
                assert list(y) == own.y.tolist()


def test_the_operations_of_a_step_by_hand(program):
    """Each layer of LeNet-5: once forward, and backward once for weights and once for its input."""
    first, others = 6 * 28 * 28 * 75, 16 * 10 * 10 * 150 + 400 * 120 + 120 * 84 + 84 * 10
    assert program.flops(program.job_of("pfedsim", 3, 2)) == 2 * 32 * (2 * first + 3 * others)


def test_engines_are_told_side_by_side(program, monkeypatch):
    small = program.Population(3, 40, 5)
    monkeypatch.setattr(program, "Population", lambda *_: small)
    monkeypatch.setattr(program, "multiplications", lambda device, _: {"cpu": 1e11}[device.type])
    monkeypatch.setattr(program, "copies", lambda _: 1e9)
    rows = program.measure_engines(program.parsed(["engines", "--quick", "--rounds", "1"]))
    told = [f"stacked, {form}" for form in ("grouped", "unfolded", "parallel", "faster")]
    told += ["one by one", "plain loop"]
    assert [row["what"].removeprefix("pfedsim, lenet5, ") for row in rows] == told
    assert rows[-1]["times plain"] == 1
    assert all(row["records/s"] > 0 and row["MB"] >= 0 for row in rows)
    job = program.job_of("pfedsim", 3, 2)
    work = program.flops(job) * job.cohort_size * 2 * program.EPOCHS  # of two batches each
    for row in rows:
        assert row["share %"] * row["s/round"] == pytest.approx(100 * work / 1e11)
        # a millisecond per megabyte
        moved = program.traffic(job) * job.cohort_size * 2 * program.EPOCHS
        assert row["bytes %"] * row["s/round"] == pytest.approx(100 * moved / 1e9)


def test_the_bytes_of_operations_by_hand(program):
    x = torch.zeros(4, 5, device="meta")
    with program.Traffic() as counter:
        (x.T @ x).add_(1)
    assert counter.nbytes == 4 * (20 + 20 + 25 + 25 + 25)


def test_a_round_is_timed_from_an_idle_device_to_an_idle_device(program, monkeypatch):
    told, device = [], torch.device("cuda:0")
    monkeypatch.setattr(program, "synchronise", lambda device: told.append(str(device)))
    clock = SimpleNamespace(perf_counter=lambda: told.append("clock") or 0.0)
    monkeypatch.setattr(program, "time", SimpleNamespace(process_time=lambda: 0.0, **vars(clock)))
    program.Timed(lambda _: told.append("round"), 1, (), device).run(1)
    assert told == ["cuda:0", "clock", "round", "cuda:0", "clock"]


def test_the_best_of_five_products_is_the_rate(program, monkeypatch):
    clock = iter([0.0, 2.0, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 9.0, 9.75])
    monkeypatch.setattr(program, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    products = []
    monkeypatch.setattr(torch, "mm", lambda *pair: products.append([each.shape for each in pair]))
    assert program.multiplications(torch.device("cpu")) == 2 * 2048**3 / 0.5
    assert products == [[(2048, 2048)] * 2] * 5


def test_the_records_on_a_device_are_the_same(program, population):
    job, ours = program.job_of("pfedsim", population.silos, 2), population.records()
    loop, _ = program.plain(population, job, "resident")
    for client, silo in enumerate(job.silos):
        for side, own in ((loop._train, ours[silo].train), (loop._test, ours[silo].test)):
            taken = [*loop._batches(side[client], shuffle=False)]
            assert torch.equal(torch.cat([x for x, _ in taken]), own.x)
            assert torch.equal(torch.cat([y for _, y in taken]), own.y)
        order = torch.cat([y for _, y in loop._batches(loop._train[client], shuffle=True)])
        assert order.tolist() != ours[silo].train.y.tolist()
        assert sorted(order.tolist()) == sorted(ours[silo].train.y.tolist())


def test_the_plain_loop_is_as_exact_as_ours(program):
    seen = []
    for precision, wanted in (("float32", "ieee"), ("tf32", "tf32")):
        program.as_exact(
            lambda _: seen.append(torch.backends.cudnn.conv.fp32_precision), precision
        )(0)
        assert seen[-1] == wanted
