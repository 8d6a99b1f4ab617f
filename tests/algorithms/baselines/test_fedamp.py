"""FedAMP against its equations in float64 by hand, with silos that are away."""

import numpy as np
import pytest
import torch
from support import softmax_oracle as oracle
from support.refusals import refused

from staddle.algorithms.engines.simulation import simulate


def flat(theta):
    return np.concatenate([theta.weight.reshape(-1), theta.bias])


def by_hand(job, shards, alpha, sigma, lam):
    models = {silo: oracle.begun(job) for silo in job.silos}
    apart, gave = {}, set()
    for round_ in range(job.rounds):
        cohort, after = job.cohort(round_), {}
        for silo in cohort:
            near = {j: d for (i, j), d in apart.items() if i == silo} if silo in gave else {}
            xi = {j: alpha / sigma * np.exp(-d / sigma) for j, d in near.items()}
            over = max(1.0, sum(xi.values()))
            u = (1 - sum(xi.values()) / over if over > 1 else 1 - sum(xi.values())) * models[silo]
            for j, weight in xi.items():
                u = u + (weight / over) * models[j]

            def pulled(theta, x, y, u=u):
                return oracle.gradient(theta, x, y) + (lam / alpha) * (theta - u)

            after[silo], _ = oracle.trained(job, shards, silo, round_, models[silo], own=pulled)
        models |= after
        gave |= set(cohort)
        for i in cohort:
            for j in set(cohort) - {i}:
                apart[i, j] = np.sum((flat(models[i]) - flat(models[j])) ** 2)
    return models


@pytest.mark.parametrize(
    ("alpha", "sigma", "lam"), [(0.1, 1.0, 0.1), (2.0, 3.0, 4.0)], ids=["near", "scaled to 1"]
)
def test_rounds_of_some_uneven_silos_are_its_equations(alpha, sigma, lam):
    options = {"alpha": alpha, "sigma": sigma, "lam": lam}
    job, shards = oracle.uneven("fedamp", options, lr=0.1)
    expected = by_hand(job, shards, **options)
    for silo, state in simulate(job, shards).states.items():
        oracle.check_close(oracle.numbers(state.parts["classifier"]), expected[silo])
    # the pull is not lost in the tolerance
    alone = simulate(oracle.uneven("local", lr=0.1)[0], shards).states["a"].parts["classifier"]
    assert abs(oracle.numbers(alone).weight - expected["a"].weight).max() > 1e-3


def test_weights_by_hand(make_job):
    method = make_job("fedamp", {"alpha": 0.5, "sigma": 2.0}).method()
    gram = torch.tensor([[[4.0, 1.0], [1.0, 2.0]]]).double()  # a distance of 4 + 2 − 2
    state = method.combine(method.begin(), 0, ("a", "c"), {"moved": {"gram": gram}}).state
    xi = 0.25 * np.exp(-2.0)
    assert method.weights(state, "a") == pytest.approx({"a": 1 - xi, "c": xi})
    assert method.weights(state, "b") == {"b": 1.0}
    assert method.deliveries(state, 1, "b") == ()
    (row,) = method.deliveries(state, 1, "c")
    assert row.weights == pytest.approx({"a": xi, "c": 1 - xi})


def test_a_sketch_crosses_where_it_is_shorter(make_job):
    for sketch, kind in ((16, "SKETCH"), (0, "WHOLE_MODEL"), (65_536, "WHOLE_MODEL")):
        _, compared = make_job("fedamp", {"sketch": sketch}).method().up(0)
        assert compared.kind.name == kind


def test_running_statistics_stay_and_a_job_that_says_otherwise_is_refused(make_job):
    model, _ = make_job("fedamp", model={"norm": "batch"}).method().up(0)
    assert not [spec.name for spec in model.tensors if "running" in spec.name]
    with refused("method 'fedamp' uploads no running statistics"):
        make_job("fedamp", model={"norm": "batch", "buffers": "global"}).method()
