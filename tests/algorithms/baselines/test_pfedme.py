from dataclasses import replace
from math import exp, log

import pytest
import torch
from support.refusals import refused
from support.two_row_model import (
    HALF,
    LINEAR,
    ONE,
    gradient_of,
    line,
    played,
    same_model,
    values_of,
)
from support.whole_jobs import check_tensors

from staddle.algorithms.course import Change, Facts, SiloState, Survey
from staddle.algorithms.method import initial_state
from staddle.algorithms.methods.common.second_model import MODEL

FACTS = Facts("a", 1, 1, torch.tensor([1, 0, 0]))


@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_the_envelope_and_its_gradient_by_hand(make_job, lam):
    """With η_p = ln 3 = 2a the first step goes from w = (0, 0) to θ = (a, -a): F = ln 4/3 + λ/2 (a²
    + a²).

    There the gradient is (-1/4, 1/4) and the pull λ (a, -a): the second goes to b = a - 2a (-1/4 +
    λ a), and -b. The gradient of F is λ (w - θ).
    """
    for steps, away in ((1, HALF), (2, HALF - 2 * HALF * (-1 / 4 + lam * HALF))):
        method = make_job("pfedme", {"lam": lam, "steps": steps, "personal_lr": 2 * HALF}).method()
        parts = line(0.0, 0.0)
        losses = method.envelope(parts, *ONE, {})
        loss = log(4 / 3) if steps == 1 else log(1 + exp(-2 * away))
        assert losses.tolist() == pytest.approx([loss + lam * away**2])
        assert gradient_of(losses, parts["classifier"]) == pytest.approx([-lam * away, lam * away])


def test_a_step_of_theta_by_hand(make_job):
    """From θ = (0, 0) beside w = (2, -2), with η_p = 1 and λ = 1/2: gradient (-1/2, 1/2), pull (-1,
    1).

    So of two such records; the sketch of the job's model is in place of its own, since the names
    are the same.
    """
    method = make_job(
        "pfedme", {"lam": 0.5, "personal_lr": 1.0, "steps": 3}, training={"momentum": 0.9}
    ).method()
    shared, near, *steps = method.stages(initial_state(method, "a"), FACTS)
    assert (shared.trains, shared.optimiser.momentum, shared.coupled) == (MODEL, 0.9, True)
    assert [type(step) for step in (near, *steps)] == [Change, *[Survey, Change] * 3]
    parts = {**line(2.0, -2.0), **line(0.0, 0.0, name="own_")}
    with torch.no_grad():
        sums = steps[0].measure(parts, torch.ones(2, 1), torch.tensor([0, 0]))
    facts, method.sketch = Facts("a", 1, 2, torch.tensor([2, 0, 0]), sums), line(0.0, 0.0)
    after = steps[1].change(SiloState(values_of(parts)), facts)
    assert after.parts["own_classifier"]["weight"].flatten().tolist() == pytest.approx([1.5, -1.5])
    assert after.parts["classifier"]["weight"].flatten().tolist() == [2, -2]


def test_theta_begins_at_w_as_it_has_become_and_is_delivered_as_w(make_job):
    method = make_job("pfedme").method()
    state = initial_state(method, "a")
    came = {"model": {name: value + 1 for name, value in method.flat(state, *MODEL).items()}}
    state = method.deliver(state, came, FACTS)
    assert torch.equal(state.parts["own_classifier"]["bias"], came["model"]["classifier.bias"])
    moved = replace(state, parts={**state.parts, "classifier": {"bias": torch.zeros(3)}})
    assert method.near(moved, FACTS).parts["own_classifier"]["bias"].tolist() == [0, 0, 0]
    parts = {**line(1.0, 0.0, 0.0), **line(0.0, 0.0, 1.0, name="own_")}
    assert method.predict(parts, ONE[0]).tolist() == [[0, 0, 1]]


def test_beta_mixes_parameters_with_those_that_came_down(make_job):
    """β = 3: three times what it has become, less twice what came.

    Running statistics as they are.
    """
    method = make_job("pfedme", {"beta": 3.0}, {"norm": "batch", "buffers": "global"}).method()
    state = initial_state(method, "a")
    came = {name: torch.full_like(v, 2.0) for name, v in method.flat(state, *MODEL).items()}
    state = method.deliver(state, {"model": came}, FACTS)
    become = {
        part: {k: torch.full_like(v, 5.0) for k, v in state.parts[part].items()} for part in MODEL
    }
    given = method.contribute(replace(state, parts={**state.parts, **become}), FACTS)[
        "model"
    ].tensors
    assert given.keys() == came.keys()
    for name, value in given.items():
        assert value.unique().tolist() == [5 if "running" in name else 3 * 5 - 2 * 2]


def test_beta_moves_the_shared_model_part_of_the_way(make_job, make_shards):
    jobs = [make_job("pfedme", {"beta": beta}, LINEAR, rounds=1) for beta in (1.0, 0.25)]
    (_, whole), (_, part) = (played(job, make_shards(job)) for job in jobs)
    start = initial_state(jobs[0].method(), "a")
    for name, value in jobs[0].method().flat(start, *MODEL).items():
        module, _, leaf = name.partition(".")
        mixed = 0.75 * value + 0.25 * whole["a"].parts[module][leaf]
        assert torch.allclose(part["a"].parts[module][leaf], mixed, atol=1e-6)


def test_with_one_step_of_1_over_lambda_w_is_that_of_fedavg(make_job, make_shards):
    """Then λ (w - θ̃) = λ η_p ∇f(w) is the gradient at w itself."""
    training, options = {"momentum": 0.9, "weight_decay": 1e-3}, {"steps": 1, "lam": 8.0}
    averages = make_job("fedavg", {}, LINEAR, training, rounds=2)
    job = make_job("pfedme", {**options, "personal_lr": 0.125}, LINEAR, training, rounds=2)
    (_, one), (_, other) = played(averages, make_shards(averages)), played(job, make_shards(job))
    assert not same_model(one["a"], initial_state(job.method(), "a"))
    check_tensors(other["a"].parts, one["a"].parts, 1e-5)


def test_steps_that_go_too_far_are_refused(make_job):
    make_job("pfedme", {"lam": 15, "personal_lr": 0.13}).method()
    with refused(r"lam · personal_lr = 20 · 0.1 = 2, and at 2 or more .*; lower one of them"):
        make_job("pfedme", {"lam": 20, "personal_lr": 0.1}).method()


def test_inner_steps_leave_running_statistics_to_the_envelope(make_job, make_shards):
    job = make_job("pfedme", {}, {"norm": "batch"}, rounds=1)
    states, _ = played(job, make_shards(job))
    assert states["a"].parts["extractor"]["norm1.num_batches_tracked"] == 3  # batches of 24 records
    assert states["a"].parts["own_extractor"]["norm1.num_batches_tracked"] == 3  # as w
