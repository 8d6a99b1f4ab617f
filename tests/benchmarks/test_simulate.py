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
    taken, apply = [], training.apply
    monkeypatch.setattr(training, "apply", lambda *step: taken.append(1) or apply(*step))
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
    drawn = torch.randn  # the rate of products of smaller matrices, which takes no seconds
    monkeypatch.setattr(torch, "randn", lambda *size: drawn(*(min(n, 128) for n in size)))
    rows = program.measure_engines(program.parsed(["engines", "--quick", "--rounds", "1"]))
    told = [f"stacked, {form}" for form in ("grouped", "unfolded", "faster")]
    told += ["one by one", "plain loop"]
    assert [row["what"].removeprefix("pfedsim, lenet5, ") for row in rows] == told
    assert rows[-1]["times plain"] == 1
    assert all(row["records/s"] > 0 and 0 < row["share %"] < 100 and row["MB"] >= 0 for row in rows)


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
