"""kNN-Per against a search of all records in float64 by hand."""

import numpy as np
import pytest
import torch
from support import softmax_oracle as oracle
from support.whole_jobs import trained

from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.training.silo_round import to_modules


def averaged(job, shards):
    x = oracle.begun(job)
    for round_ in range(job.rounds):
        cohort, mean = job.cohort(round_), oracle.zeros()
        whole = sum(len(shards[silo][0]) for silo in cohort)
        for silo in cohort:
            y, _ = oracle.trained(job, shards, silo, round_, x)
            mean = mean + (len(shards[silo][0]) / whole) * y
        x = mean
    return x


def by_hand(theta, train, test, k, share, scale):
    """(5) for each test record, by the pixels as features."""
    known, asked = (data.x.double().numpy().reshape(len(data), -1) for data in (train, test))
    found = []
    for z in asked:
        squared = ((known - z) ** 2).sum(1)
        nearest = sorted(range(len(known)), key=lambda i: squared[i])[:k]
        weights = np.exp(-squared[nearest] / (64 * scale))
        votes = np.zeros(3)
        for i, weight in zip(nearest, weights, strict=True):
            votes[int(train.y[i])] += weight / weights.sum()
        scores = np.exp(theta.weight @ z + theta.bias)
        found.append(share * votes + (1 - share) * scores / scores.sum())
    return np.array(found)


@pytest.mark.parametrize(
    ("k", "share", "scale"), [(10, 0.5, 1.0), (3, 0.8, 0.1), (40, 1.0, 1.0)],
    ids=["as in the paper", "few", "more than there are"],
)  # fmt: skip
def test_predictions_of_uneven_silos_are_its_equations(k, share, scale):
    options = {"neighbours": k, "share": share, "scale": scale}
    job, shards = oracle.uneven("knn-per", options, {"rounds": 2})
    end, theta = simulate(job, shards), averaged(job, shards)
    method = job.method()
    for silo, (train, test) in shards.items():
        modules = to_modules(method, silo, end.states[silo])
        found = method.predict(modules, test.x).exp()
        expected = by_hand(theta, train, test, k, share, scale)
        np.testing.assert_allclose(found.detach().numpy(), expected, atol=2e-5)


def test_while_the_store_is_empty_it_predicts_and_learns_as_fedavg(make_job, make_shards):
    ours, average = make_job("knn-per", rounds=2), make_job("fedavg", rounds=2)
    shards = make_shards(ours)
    one, other = (trained(job, shards, rounds=2) for job in (ours, average))
    method = ours.method()
    for silo in ours.silos:
        mine, theirs = one.states[silo], other.states[silo]
        for part, values in theirs.parts.items():
            assert all(torch.equal(mine.parts[part][name], value) for name, value in values.items())
        modules, x = to_modules(method, silo, mine), shards[silo][1].x
        plain = modules["classifier"](modules["extractor"](x)).softmax(1)
        assert torch.allclose(method.predict(modules, x).exp(), plain, atol=1e-6)


def test_a_store_that_is_too_small_has_other_records_at_each_silo_and_each_once(
    make_job, make_shards
):
    job = make_job("knn-per", {"capacity": 10}, rounds=1, model=oracle.GLM)
    shards = make_shards(job)
    for silo, state in simulate(job, shards).states.items():
        train, store = shards[silo][0], state.parts["store"]
        flat = train.x.flatten(1)
        places = [int((flat == row).all(1).nonzero()) for row in store["features"]]
        assert len(set(places)) == 10
        assert places != list(range(10))
        assert torch.equal(store["labels"], train.y[places])
