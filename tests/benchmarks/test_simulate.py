import sys
from pathlib import Path

import pytest
import torch

from staddle.algorithms.engines.engine import Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.training import loop as training

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(
    not BENCHMARKS.is_dir(), reason="the wheel's tests run without the repository"
)


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import simulate  # noqa: PLC0415 it is there in a checkout only

        yield simulate
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def population(benchmark):
    return benchmark.Population(3, 40, 5)


@pytest.mark.parametrize("way", ["images", "normalised", "tensors", "resident"])
def test_both_train_the_same_steps_and_test_on_the_same_records(
    benchmark, population, monkeypatch, way
):
    job = benchmark.job_of("pfedsim", population.silos, 2, epochs=1)
    loop, _ = benchmark.plain(population, job, way, epochs=1)
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


def test_the_records_are_the_same_in_every_way(benchmark, population):
    job, ours = benchmark.job_of("pfedsim", population.silos, 2), population.records()
    for way in benchmark.WAYS:
        loop, _ = benchmark.plain(population, job, way)
        for client, silo in enumerate(job.silos):
            for side, own in ((loop._train, ours[silo].train), (loop._test, ours[silo].test)):
                x, y = zip(*side[client], strict=True)
                assert torch.allclose(torch.stack(x), own.x, atol=1e-6)
                assert list(y) == own.y.tolist()


def test_the_operations_of_a_step_by_hand(benchmark):
    """Convolutions and layers of LeNet-5: once forward, and backward once for weights and once for
    what came in.
    """
    first, others = 6 * 28 * 28 * 75, 16 * 10 * 10 * 150 + 400 * 120 + 120 * 84 + 84 * 10
    assert benchmark.flops(benchmark.job_of("pfedsim", 3, 2)) == 2 * 32 * (2 * first + 3 * others)


def test_engines_are_told_side_by_side(benchmark, monkeypatch):
    small = benchmark.Population(3, 40, 5)
    monkeypatch.setattr(benchmark, "Population", lambda *_: small)
    options = benchmark.parsed(["engines", "--quick", "--rounds", "1"])
    rows = benchmark.measure_engines(options)
    told = [f"stacked, {form}" for form in ("grouped", "unfolded", "faster")]
    told += ["one by one", "plain loop"]
    assert [row["what"].removeprefix("pfedsim, lenet5, ") for row in rows] == told
    assert rows[-1]["times plain"] == 1
    assert all(row["records/s"] > 0 and 0 < row["share %"] < 100 and row["MB"] >= 0 for row in rows)


def test_the_records_on_a_device_are_the_same(benchmark, population):
    job, ours = benchmark.job_of("pfedsim", population.silos, 2), population.records()
    loop, _ = benchmark.plain(population, job, "resident")
    for client, silo in enumerate(job.silos):
        for side, own in ((loop._train, ours[silo].train), (loop._test, ours[silo].test)):
            taken = [*loop._batches(side[client], shuffle=False)]
            assert torch.equal(torch.cat([x for x, _ in taken]), own.x)
            assert torch.equal(torch.cat([y for _, y in taken]), own.y)
        order = torch.cat([y for _, y in loop._batches(loop._train[client], shuffle=True)])
        assert order.tolist() != ours[silo].train.y.tolist()
        assert sorted(order.tolist()) == sorted(ours[silo].train.y.tolist())


def test_the_plain_loop_is_as_exact_as_ours(benchmark):
    seen = []
    for precision, wanted in (("float32", "ieee"), ("tf32", "tf32")):
        benchmark.as_exact(
            lambda _: seen.append(torch.backends.cudnn.conv.fp32_precision), precision
        )(0)
        assert seen[-1] == wanted
