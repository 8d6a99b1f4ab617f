from math import log

import pytest
import torch
from support.banded_records import banded, banded_shards
from support.whole_jobs import check_states, trained
from torch import nn

from staddle.algorithms.course import Facts
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.method import initial_state

SMALL = {"name": "digits-cnn-c", "input": [1, 8, 8]}


def stage_of(make_job, counts=(1, 3, 0), **options):
    method = make_job("fedrod", options).method()
    (stage,) = method.stages(
        initial_state(method, "a"), Facts("a", 0, sum(counts), torch.tensor(counts))
    )
    return stage


def parts():
    """z = x, generic logits 0, personalized (log 2, 0, 0) at z = (1, 2): their weights (2, -1) are
    orthogonal to it.
    """
    made = {"extractor": nn.Linear(2, 2)}
    made |= {header: nn.Linear(2, 3) for header in ("classifier", "personal")}
    with torch.no_grad():
        for module in made.values():
            module.weight.zero_()
            module.bias.zero_()
        made["extractor"].weight.copy_(torch.eye(2))
        made["personal"].weight.copy_(
            torch.tensor([[2.0, -1.0]] * 3) * torch.tensor([[1.0], [2.0], [3.0]])
        )
        made["personal"].bias[0] = log(2)
    return made


X, Y = torch.tensor([[1.0, 2.0]]), torch.tensor([0])


@pytest.mark.parametrize(
    ("gamma", "balanced"),
    [(1, 1.386294), (2, 2.302585), (0, 1.098612)],  # -log of 1/(1 + 3 + 0), 1/(1 + 9 + 0) and 1/3
)
def test_eqs_1_and_2_by_hand(make_job, gamma, balanced):
    """ℓ^P = -log(2 / (2 + 1 + 1)) = log 2."""
    stage = stage_of(make_job, gamma=gamma)
    assert stage.loss(parts(), X, Y, stage.context).tolist() == pytest.approx(
        [balanced + 0.693147], abs=1e-5
    )


def test_each_loss_moves_its_own_parts(make_job):
    """∂ℓ^BSM/∂b = (1/4, 3/4, 0) - (1, 0, 0); ∂ℓ^P/∂b_m = (1/2, 1/4, 1/4) - (1, 0, 0).

    W = 0 passes none on to θ.
    """
    stage, made = stage_of(make_job), parts()
    stage.loss(made, X, Y, stage.context).sum().backward()
    assert made["classifier"].bias.grad.tolist() == pytest.approx([-0.75, 0.75, 0], abs=1e-6)
    assert made["classifier"].weight.grad.flatten().tolist() == pytest.approx(
        [-0.75, -1.5, 0.75, 1.5, 0, 0], abs=1e-6
    )
    assert made["personal"].bias.grad.tolist() == pytest.approx([-0.5, 0.25, 0.25], abs=1e-6)
    assert made["extractor"].weight.grad.tolist() == [[0, 0], [0, 0]]


def test_a_record_of_a_class_that_seems_absent_has_a_finite_loss(make_job):
    stage, made = stage_of(make_job, counts=(0, 5, 0)), parts()
    loss = stage.loss(made, X, Y, stage.context)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert made["classifier"].bias.grad.abs().max() <= 1


def test_a_prediction_adds_both_headers(make_job):
    made = parts()
    with torch.no_grad():
        made["classifier"].bias.copy_(torch.tensor([0.0, 0.5, 0.0]))
    logits = make_job("fedrod").method().predict(made, X)
    assert logits.tolist() == [pytest.approx([log(2), 0.5, 0], abs=1e-6)]  # log 2 = 0.69


def test_without_gamma_the_generic_model_is_fedavgs_to_the_bit(make_job):
    training = {"momentum": 0.9, "weight_decay": 1e-3}
    jobs = [
        make_job(*given, SMALL, training) for given in (("fedrod", {"gamma": 0}), ("fedavg", {}))
    ]
    mine, theirs = (trained(job, banded_shards(job.silos), 2).states for job in jobs)
    check_states(mine, theirs)


def test_the_generic_row_of_a_class_that_a_silo_lacks_stays(make_job):
    """Under cross-entropy each record pushes it down."""
    shards = {"a": (banded([0, 1] * 8, 1),) * 2, **banded_shards("bc")}
    moved = {}
    for gamma in (0, 1):
        job = make_job("fedrod", {"gamma": gamma}, SMALL)
        before = initial_state(job.method(), "a").parts
        after = trained(job, shards, 1).states["a"].parts
        moved[gamma] = (
            (after["classifier"]["weight"] - before["classifier"]["weight"]).norm(dim=1).tolist()
        )
        assert after["personal"]["bias"][2] < before["personal"]["bias"][2]
    assert moved[1][2] < 1e-7
    assert min(moved[0]) > 1e-3
    assert min(moved[1][:2]) > 1e-3


def test_the_headers_part(make_job):
    model = {**SMALL, "name": "cnn-digits", "norm": "group"}
    job = make_job("fedrod", {}, model, {"epochs": 2}, rounds=3)
    result = simulate(job, banded_shards(job.silos))
    assert min(result.scores("trained").values()) > 0.9
    assert len({state.parts["personal"]["bias"][0].item() for state in result.states.values()}) == 3


def test_which_classes_a_silo_has_is_for_the_personalized_header(make_job):
    """Of records without content, of which 8 in 10 are of one class of the silo's own."""
    found = {}
    for method in ("fedavg", "fedrod"):
        job = make_job(method, {}, {"name": "glm", "input": [1, 8, 8]}, {"epochs": 3}, rounds=3)
        shards = banded_shards(job.silos, 30, mostly=0.8)
        blank = {
            silo: tuple(Dataset(0 * part.x, part.y) for part in sides)
            for silo, sides in shards.items()
        }
        found[method] = list(simulate(job, blank).scores(job.method().product).values())
    assert min(found["fedrod"]) > 0.8
    # all the same class, another one's
    assert sorted(found["fedavg"])[:2] == pytest.approx([0.1, 0.1], abs=0.05)
