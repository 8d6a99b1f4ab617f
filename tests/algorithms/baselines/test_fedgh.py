"""FedGH: its header in float64 by hand, and what leaves the silos."""

import numpy as np
import pytest
import torch
from support import softmax_oracle as oracle
from support.refusals import refused

from staddle.algorithms.baselines import fedgh
from staddle.algorithms.engines.simulation import simulate


def test_rounds_of_some_uneven_silos_are_its_equations(monkeypatch):
    """The features are pixels here; a job may not upload their means."""
    with refused("fedgh uploads means of features; an extractor without parameters would"):
        oracle.uneven("fedgh")[0].method()
    monkeypatch.setattr(fedgh, "check_features", lambda *_: None)
    job, shards = oracle.uneven("fedgh", {"server_lr": 0.02, "server_epochs": 2})
    theta = oracle.begun(job)
    for round_ in range(job.rounds):
        points = []
        for silo in job.cohort(round_):
            data = shards[silo][0]
            x, y = data.x.double().numpy().reshape(len(data), -1), data.y.numpy()
            points += [(x[y == s].mean(0), s) for s in range(3) if (y == s).any()]
        for mean, s in points * 2:
            theta = theta - 0.02 * oracle.gradient(theta, mean[None], np.array([s]))
    for state in simulate(job, shards).states.values():
        oracle.check_close(oracle.numbers(state.parts["classifier"]), theta)


def test_a_class_without_records_has_no_mean_and_moves_nothing(make_job):
    method = make_job("fedgh").method()
    means = torch.zeros(1, 3, method.means.tensors[0].shape[1])
    results = {"means": {"means": means, "held": torch.tensor([[0, 0, 0]])}}
    state = method.begin()
    after = method.combine(state, 0, ("a",), results).state
    assert all(torch.equal(after[name], value) for name, value in state.items())
    results["means"]["held"] = torch.tensor([[0, 1, 0]])
    bias = method.combine(state, 0, ("a",), results).state["classifier.bias"]
    assert bias[1] > state["classifier.bias"][1]


@pytest.mark.parametrize("extractors", [(), ("digits-cnn-a", "digits-cnn-b")])
def test_extractors_stay_and_headers_begin_alike(make_job, extractors):
    job = make_job("fedgh", {"extractors": list(extractors)}, {"name": "digits-cnn-a"})
    method = job.method()
    crossing = {
        spec.name for way in (method.up(0), method.down(0)) for p in way for spec in p.tensors
    }
    assert crossing == {"means", "held", "classifier.weight", "classifier.bias"}
    one, other = (method.modules(silo)["classifier"].weight for silo in "ab")
    assert torch.equal(one, other)
