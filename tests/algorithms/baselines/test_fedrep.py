from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from staddle.algorithms.course import Effort
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.method import initial_state
from staddle.algorithms.numerics.streams import stream
from staddle.algorithms.training.loop import train
from staddle.algorithms.training.silo_round import facts_of, local_round


def stages_of(job):
    method = job.method()
    data = Dataset(torch.zeros(1, 1, 8, 8), torch.tensor([0]))
    return method.stages(initial_state(method, "a"), facts_of(job, "a", 0, data))


def test_the_head_first_then_the_extractor_under_it_by_hand(make_job):
    """(1), (2) with numbers h = 1 and φ = 2, the loss h φ, lr 0.5, τ = 2, E = 1.

    h goes down by 0.5 φ = 1 twice: 0, then -1. Then φ goes down by 0.5 h = -0.5: 2.5. The other way
    round it were 1.5, and trained together 2 − 0.5 = 1.5 after the first step.
    """
    job = make_job("fedrep", {"head_epochs": 2}, training={"lr": 0.5})
    model = {"extractor": nn.Linear(1, 1, bias=False), "classifier": nn.Linear(1, 1, bias=False)}
    nn.init.constant_(model["extractor"].weight, 2.0)
    nn.init.constant_(model["classifier"].weight, 1.0)

    def loss(parts, x, *_):
        return parts["classifier"](parts["extractor"](x))[:, 0]

    data, seen = Dataset(torch.ones(1, 1), torch.tensor([0])), []
    for stage in stages_of(job):
        train(model, replace(stage, loss=loss), data, 1, stream(0, "a", 0, "train/0"))
        seen.append((model["classifier"].weight.item(), model["extractor"].weight.item()))
    assert seen == [(-1.0, 2.0), (-1.0, 2.5)]


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({}, [2, 1]),
        ({"head_epochs": 4, "extractor_epochs": 1}, [4, 1]),
        ({"extractor_epochs": 2}, [1, 2]),
        ({"head_epochs": 1}, [1, 2]),
        ({"head_epochs": 10}, [10, 1]),
    ],
)
def test_its_epochs(make_job, options, epochs):
    """They add up to the job's unless both are given, or one leaves nothing for the other."""
    job = make_job("fedrep", options, training={"epochs": 3})
    stages = stages_of(job)
    assert [stage.epochs for stage in stages] == epochs
    assert [stage.trains for stage in stages] == [("classifier",), ("extractor",)]
    assert job.method().effort(0) == Effort(epochs=sum(epochs))


def test_each_silo_keeps_its_head(make_job, make_shards):
    job = make_job("fedrep", {"head_epochs": 2}, rounds=2)
    assert job.up(0) == make_job("fedper").up(0)
    result = simulate(job, make_shards(job))
    heads = {state.parts["classifier"]["weight"].sum().item() for state in result.states.values()}
    assert len(heads) == 3


def test_a_silo_contributes_its_extractor_with_its_samples(make_job, make_data):
    job, data = make_job("fedrep", {"head_epochs": 1}), (make_data(20), make_data(5, 1))
    method = job.method()
    outcome = local_round(method, job, initial_state(method, "a"), 0, {}, *data, "a")
    contribution = outcome.contributions["extractor"]
    assert contribution.weight == 20.0
    assert_close(contribution.tensors, method.flat(outcome.state, "extractor"), atol=0, rtol=0)


def test_running_statistics_move_while_the_extractor_trains_alone(make_job, make_data):
    """τ = 2 and E = 2 epochs of ceil(20 / 8) = 3 batches: 6 batches are counted, not 12."""
    job = make_job("fedrep", {"head_epochs": 2}, {"norm": "batch"}, {"epochs": 4})
    method = job.method()
    outcome = local_round(
        method, job, initial_state(method, "a"), 0, {}, make_data(20), make_data(5, 1), "a"
    )
    assert outcome.state.parts["extractor"]["norm1.num_batches_tracked"].item() == 6
