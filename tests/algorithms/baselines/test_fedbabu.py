from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.method import initial_state
from staddle.algorithms.numerics.streams import stream
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.algorithms.training.loop import train
from staddle.algorithms.training.silo_round import facts_of, local_round

MIB = 2**20
ONE = Dataset(torch.ones(1, 1), torch.tensor([0]))


def product(parts, x, *_):
    return parts["classifier"](parts["extractor"](x))[:, 0]


@pytest.mark.parametrize(
    ("tuned", "wanted"), [("head", (2.75, 0.5)), ("body", (3.0, -1.0)), ("full", (2.75, -1.0))]
)
def test_one_step_of_each_worked_by_hand(make_job, tuned, wanted):
    """The loss h φ of a head h = 3 and a body φ = 2, lr 0.5.

    A round takes 0.5 h = 1.5 off the body alone: 0.5.

    Then tuning: the head falls by 0.5 φ = 0.25 to 2.75 under φ = 0.5, the body by 1.5 to -1, or
    both at once.
    """
    options = {"tuned": tuned, "tuning_epochs": 1}
    job, seen = make_job("fedbabu", options, training={"lr": 0.5}, rounds=1), []
    modules = {part: torch.nn.Linear(1, 1, bias=False) for part in ("extractor", "classifier")}
    torch.nn.init.constant_(modules["classifier"].weight, 3.0)
    torch.nn.init.constant_(modules["extractor"].weight, 2.0)
    for round_ in (0, 1):
        facts = facts_of(job, "a", round_, ONE)
        (stage,) = job.method().stages(initial_state(job.method(), "a"), facts)
        train(modules, replace(stage, loss=product), ONE, 1, stream(0, "a", 0, "train/0"))
        seen.append((modules["classifier"].weight.item(), modules["extractor"].weight.item()))
    assert seen == [(3.0, 0.5), wanted]


def test_its_rounds(make_job):
    job = make_job("fedbabu", rounds=2, participation=0.34, min_cohort=1, training={"epochs": 3})
    assert job.length == 3
    assert [len(job.cohort(round_)) for round_ in range(3)] == [1, 1, 3]
    assert [job.method().effort(round_).epochs for round_ in range(3)] == [3, 3, 5]


@pytest.mark.parametrize(
    ("name", "shape", "classes", "printed"),
    [
        ("convnet-3x64", (1, 28, 28), 47, "0.57"),
        ("convnet-4x128", (3, 32, 32), 10, "3.41"),
        ("resnet18", (3, 32, 32), 100, "85.21"),
    ],
)
def test_what_crosses_is_what_fedaims_counts_in_its_table_6(
    make_job, name, shape, classes, printed
):
    """The extractor up and down, in MB; its networks are those of test_fedaims.py."""
    job = make_job(
        "fedbabu", model={"name": name, "input": shape, "classes": classes, "norm": "group"}
    )
    assert f"{2 * sum(spec.nbytes for spec in job.up(0)[0].tensors) / MIB:.2f}" == printed


def test_a_silo_contributes_its_extractor(make_job, make_data):
    """It adds its sample count, and gives nothing in a round in which it only tunes."""
    job = make_job("fedbabu", rounds=1)
    method, data = job.method(), (make_data(20), make_data(5, 1))
    first = local_round(method, job, initial_state(method, "a"), 0, {}, *data, "a")
    contribution = first.contributions["extractor"]
    assert contribution.weight == 20.0
    assert_close(contribution.tensors, method.flat(first.state, "extractor"), atol=0, rtol=0)
    tuned = local_round(method, job, first.state, 1, {}, *data, "a")
    assert tuned.contributions.keys() == {RIGHT.name}


def test_the_head_is_the_common_random_one_until_it_is_tuned(make_job, make_shards):
    job = make_job("fedbabu", rounds=2, model={"norm": "batch"})
    start = initial_state(job.method(), "b").flat
    result = simulate(job, make_shards(job))
    head = "part/classifier/weight"
    # each has its own
    assert len({state.flat[head].sum().item() for state in result.states.values()}) == 3
    job.method().product = "delivered"  # what came down last beside the head as it was tuned
    delivered = simulate(job, make_shards(job)).states
    body = "part/extractor/conv1.weight"
    assert len({state.flat[body].sum().item() for state in delivered.values()}) == 1
    # tuning left the body as it came
    assert torch.equal(result.states["b"].flat[body], delivered["b"].flat[body])
    assert not torch.equal(start[body], delivered["b"].flat[body])
    untouched = make_job("fedbabu", {"tuned": "body"}, rounds=2)
    assert torch.equal(
        simulate(untouched, make_shards(untouched)).states["b"].flat[head], start[head]
    )


def test_tuning_helps(make_job, make_shards):
    job = make_job("fedbabu", training={"epochs": 2}, silos=list("abcd"), rounds=3)
    last = [reports[-2] for reports in simulate(job, make_shards(job)).history.values()]
    assert sum(r.trained.correct for r in last) >= sum(r.delivered.correct for r in last)
