"""SCAFFOLD against Algorithm 1 in float64 by hand, and what must hold of c in any job."""

import pytest
import torch
from support import softmax_oracle as oracle
from support.refusals import refused
from support.whole_jobs import trained

from staddle.algorithms.course import Facts
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import Sum
from staddle.algorithms.method import initial_state

SLOWER = {"kind": "exponential", "factor": 0.8}


def by_hand(job, shards, momentum=0.0, global_lr=1.0, factor=1.0):
    """x, c and all c_i after each round in turn."""
    x, c, own = oracle.begun(job), oracle.zeros(), {silo: oracle.zeros() for silo in job.silos}
    for round_ in range(job.rounds):
        models, changes = [], []
        lr = job.training.lr * factor**round_
        for silo in job.cohort(round_):
            pull = c - own[silo]
            y, steps = oracle.trained(
                job, shards, silo, round_, x, lr, pull=pull, momentum=momentum
            )
            # each gradient of step k is in the velocities of that step and all later ones
            gradients = sum(momentum**j for k in range(steps) for j in range(steps - k))
            after = own[silo] - c + (1 / (gradients * lr)) * (x - y)
            models.append(y - x)
            changes.append(after - own[silo])
            own[silo] = after
        many = len(models)
        x = x + (global_lr / many) * sum(models, oracle.zeros())
        c = c + (1 / len(job.silos)) * sum(changes, oracle.zeros())
    return x, c, own


@pytest.mark.parametrize(
    ("options", "training", "hand"),
    [
        ({}, {}, {}),
        ({"global_lr": 0.5}, {}, {"global_lr": 0.5}),
        ({}, {"momentum": 0.5, "lr": 0.1}, {"momentum": 0.5}),
        ({}, {"schedule": SLOWER}, {"factor": 0.8}),
    ],
    ids=["as in the paper", "a global rate", "momentum", "a schedule"],
)
def test_rounds_of_some_uneven_silos_are_algorithm_1(options, training, hand):
    job, shards = oracle.uneven("scaffold", options, **training)
    x, c, own = by_hand(job, shards, **hand)
    end = simulate(job, shards)
    for silo, state in end.states.items():
        oracle.check_close(oracle.numbers(state.parts["classifier"]), x)
        oracle.check_close(oracle.numbers(state.extra, "own.classifier."), own[silo])
    oracle.check_close(oracle.numbers(end.coordinator, "control.classifier."), c)
    assert max(abs(c.bias)) > 1e-3


@pytest.mark.parametrize("buffers", ["local", "global"])
def test_c_is_the_mean_of_all_silos_whoever_took_part(make_job, make_shards, buffers):
    model = {"norm": "batch", "buffers": buffers}
    job = make_job("scaffold", {}, model, silos=list("abcde"), participation=0.4, rounds=5)
    simulation = trained(job, make_shards(job))
    for name, c in simulation.coordinator.items():
        own = name.replace("control.", "own.")
        of_all = torch.stack([state.extra[own] for state in simulation.states.values()])
        assert torch.allclose(c, of_all.mean(0), atol=1e-6), name
        assert "running" not in name
    assert simulation.coordinator["control.classifier.bias"].abs().max() > 1e-3


def test_a_round_that_does_not_count_leaves_the_silos_variate_as_it_was(make_job, make_shards):
    """``contribute`` returns a new state, and changes nothing of the one that it is given."""
    method = make_job("scaffold").method()
    state = initial_state(method, "a")
    moved = {name: value + 1 for name, value in state.parts["classifier"].items()}
    after = method.contribute(
        type(state)({**state.parts, "classifier": moved}, state.extra),
        Facts("a", 0, 5, torch.tensor([2, 2, 1]), steps=2, lr=0.1),
    )
    assert state.extra["own.classifier.bias"].tolist() == [0.0] * 3
    # (x − y) / (K η) = −1 / (2 · 0.1)
    assert after.state.extra["own.classifier.bias"].tolist() == [pytest.approx(-5.0)] * 3
    change = after.contributions["control"].tensors["control.classifier.bias"]
    assert change.tolist() == [pytest.approx(-5.0)] * 3


def test_both_sums_count_each_silo_once(make_job):
    model, control = make_job("scaffold").method().up(2)
    assert model.exchange == control.exchange == Sum("mean", 1.0)
    security = {"secure_aggregation": "required", "weights": "public"}
    security["counts"] = dict.fromkeys("abcd", 9)
    with refused("part 'model' counts each silo once"):
        make_job("scaffold", silos=list("abcd"), min_cohort=3, security=security).document()


def test_other_optimisers_are_refused_with_what_to_write(make_job):
    with refused('scaffold divides .* write training.optimiser = "sgd", or choose fedavg'):
        make_job("scaffold", training={"optimiser": "adam"}).method()
