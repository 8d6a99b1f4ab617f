from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.method import initial_state
from staddle.algorithms.numerics.streams import stream
from staddle.algorithms.training.loop import train
from staddle.algorithms.training.silo_round import facts_of, state_to_bytes, to_modules


def stage_of(job, state, silo="a", round_=0):
    (stage,) = job.method().stages(
        state, facts_of(job, silo, round_, Dataset(torch.zeros(1, 1, 8, 8), torch.tensor([0])))
    )
    return stage


def test_two_steps_worked_by_hand(make_job):
    """(1) with one number w from w^t = 3 and F(w) = 2w, lr 0.5, μ 0.4: each step takes 0.5 (2 + 0.4
    (w − 3)) away.

    The first: 0.5 · 2 = 1, so w = 2. The second: 0.5 (2 + 0.4 (−1)) = 0.8, so w = 1.2. Without the
    term it is 1.
    """
    job = make_job("fedprox", {"mu": 0.4}, training={"lr": 0.5, "batch_size": 1})
    model = {"extractor": nn.Linear(1, 1, bias=False), "classifier": nn.Identity()}
    nn.init.constant_(model["extractor"].weight, 3.0)
    proximal = job.method().proximal
    stage = replace(
        stage_of(job, initial_state(job.method(), "a")),
        trains=("extractor",),
        loss=lambda parts, x, *_: parts["extractor"](x)[:, 0],
        context={"extractor.weight": torch.tensor([[3.0]])},
    )
    assert stage.penalty == proximal
    data = Dataset(torch.tensor([[2.0], [2.0]]), torch.tensor([0, 0]))  # two batches of one record
    train(model, stage, data, 1, stream(0, "a", 0, "train/0"))
    assert model["extractor"].weight.item() == pytest.approx(1.2)


def test_the_term_is_half_mu_times_the_squared_distance_over_all_parameters(make_job):
    """Of the classifier's three biases, 1, 2 and 3 away, and one extractor weight, 4 away: μ/2 ·
    30.
    """
    job = make_job("fedprox", {"mu": 0.2}, {"norm": "batch", "buffers": "global"})
    state = initial_state(job.method(), "a")
    stage, modules = stage_of(job, state), to_modules(job.method(), "a", state)
    with torch.no_grad():
        modules["classifier"].bias += torch.tensor([1.0, -2.0, 3.0])
        modules["extractor"].fc1.weight[0, 0] += 4
        modules["extractor"].norm1.running_mean += 100  # no parameter
    parameters = {part: dict(module.named_parameters()) for part, module in modules.items()}
    assert stage.penalty(parameters, stage.context).item() == pytest.approx(0.1 * 30, rel=1e-5)


def test_it_is_pulled_to_what_came_down(make_job):
    job = make_job("fedprox")
    method, state = job.method(), initial_state(job.method(), "a")
    flat = method.flat(state, "extractor", "classifier")
    came = {name: value + 1 for name, value in flat.items()}
    context = stage_of(job, method.deliver(state, {"model": came}, None)).context
    assert_close(context, came, atol=0, rtol=0)


@pytest.mark.parametrize("options", [{}, {"weights": "equal"}])
def test_at_mu_0_it_is_fedavg_bit_for_bit(make_job, make_shards, options):
    job, other = make_job("fedprox", {"mu": 0, **options}), make_job("fedavg", options)
    one, two = simulate(job, make_shards(job)), simulate(other, make_shards(other))
    assert one.history == two.history
    for silo in job.silos:
        assert state_to_bytes(one.states[silo]) == state_to_bytes(two.states[silo])


def test_the_larger_mu_the_less_a_model_moves(make_job, make_shards):
    def moved(mu):
        job = make_job("fedprox", {"mu": mu}, rounds=1, training={"epochs": 3})
        start = initial_state(job.method(), "a").flat
        end = simulate(job, make_shards(job)).states["a"].flat
        return sum(float((end[name] - start[name]).square().sum()) for name in start)

    distances = [moved(mu) for mu in (0, 0.5, 3)]
    assert distances == sorted(distances, reverse=True)
    assert distances[2] < 0.5 * distances[0]
