"""FedNova against its equations in float64 by hand."""

import pytest
import torch
from support import softmax_oracle as oracle
from support.refusals import refused

from staddle.algorithms.course import Facts
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.methods.common.local_steps import gradients_in


def by_hand(job, shards, momentum, weighted=True):
    x = oracle.begun(job)
    for round_ in range(job.rounds):
        mean, far, whole = oracle.zeros(), 0.0, 0.0
        for silo in job.cohort(round_):
            y, steps = oracle.trained(job, shards, silo, round_, x, momentum=momentum)
            a = sum(momentum**j for k in range(steps) for j in range(steps - k))
            n = len(shards[silo][0]) if weighted else 1
            mean, far, whole = mean + (n / a) * (x - y), far + n * a, whole + n
        x = x - (far / whole) * ((1 / whole) * mean)
    return x


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("weights", ["samples", "equal"])
def test_rounds_of_some_uneven_silos_are_its_equations(momentum, weights):
    job, shards = oracle.uneven("fednova", {"weights": weights}, momentum=momentum, lr=0.1)
    x = by_hand(job, shards, momentum, weights == "samples")
    for state in simulate(job, shards).states.values():
        oracle.check_close(oracle.numbers(state.parts["classifier"]), x)


def test_it_is_fedavg_where_all_take_equally_many_steps_and_not_elsewhere(make_job, make_shards):
    def last(method, size):
        job = make_job(method, model=oracle.GLM, training={"batch_size": size})
        return simulate(job, make_shards(job)).states["a"].parts["classifier"]["weight"]

    assert torch.allclose(last("fednova", 64), last("fedavg", 64), atol=1e-6)
    assert not torch.allclose(last("fednova", 8), last("fedavg", 8), atol=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_are_counted_as_the_steps_add_them_up(make_job, momentum):
    """One parameter whose gradient is always 1 moves by η times their number."""
    setting = make_job(training={"momentum": momentum, "epochs": 3}).setting()
    velocity = moved = 0.0
    for _ in range(3 * 4):
        velocity = momentum * velocity + 1
        moved += velocity
    facts = Facts("a", 0, 30, torch.tensor([30]), steps=4, batch_size=8)
    assert gradients_in(setting, facts) == pytest.approx(moved)


def test_running_statistics_are_averaged_as_in_fedavg(make_job, make_shards):
    model = {"norm": "batch", "buffers": "global"}
    fields = {"rounds": 1, "training": {"batch_size": 64}}
    nova, average = (make_job(name, model=model, **fields) for name in ("fednova", "fedavg"))
    one, other = (simulate(job, make_shards(job)).states["a"] for job in (nova, average))
    for name, value in other.parts["extractor"].items():
        assert torch.allclose(one.parts["extractor"][name].double(), value.double(), atol=1e-5)


def test_other_optimisers_are_refused_with_what_to_write(make_job):
    with refused('fednova divides .* write training.optimiser = "sgd", or choose fedavg'):
        make_job("fednova", training={"optimiser": "adamw"}).method()
