"""FedNTD against its equations in float64 by hand."""

import numpy as np
import pytest
import torch
from support import softmax_oracle as oracle

from staddle.algorithms.engines.simulation import simulate


def softmax(scores):
    shares = np.exp(scores - scores.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def distilling(known, beta, temperature):
    """The gradient of L_CE + β L_NTD, where ``known`` is the delivered model."""

    def gradient(theta, x, y):
        rows, classes = np.arange(len(y)), 3
        others = np.array([[c for c in range(classes) if c != label] for label in y])
        scores, taught = (x @ m.weight.T + m.bias for m in (theta, known))
        pull = np.zeros_like(scores)
        # of KL(q_g ‖ softmax(s / τ)) by s: (softmax(s / τ) − q_g) / τ
        own, aim = (np.take_along_axis(s, others, 1) / temperature for s in (scores, taught))
        np.put_along_axis(pull, others, (softmax(own) - softmax(aim)) / temperature, 1)
        error = softmax(scores)
        error[rows, y] -= 1
        error += beta * pull
        return oracle.Theta(error.T @ x / len(y), error.mean(0))

    return gradient


@pytest.mark.parametrize(("beta", "temperature"), [(1.0, 1.0), (3.0, 2.0)])
def test_rounds_of_some_uneven_silos_are_its_equations(beta, temperature):
    job, shards = oracle.uneven("fedntd", {"beta": beta, "temperature": temperature})
    x = oracle.begun(job)
    for round_ in range(job.rounds):
        cohort, mean = job.cohort(round_), oracle.zeros()
        whole = sum(len(shards[silo][0]) for silo in cohort)
        own = distilling(x, beta, temperature)
        for silo in cohort:
            y, _ = oracle.trained(job, shards, silo, round_, x, own=own)
            mean = mean + (len(shards[silo][0]) / whole) * y
        x = mean
    for state in simulate(job, shards).states.values():
        oracle.check_close(oracle.numbers(state.parts["classifier"]), x)


def test_the_frozen_model_is_the_delivered_one_and_without_beta_it_is_fedavg(make_job, make_shards):
    ours, average = make_job("fedntd", {"beta": 0.0}), make_job("fedavg")
    one, other = (simulate(job, make_shards(job)).states["b"] for job in (ours, average))
    for part, values in other.parts.items():
        for name, value in values.items():
            assert torch.equal(one.parts[part][name], value)
            assert torch.equal(one.parts[f"delivered_{part}"][name], value)


def test_the_classes_that_a_record_is_not_are_all_others_once(make_job):
    method = make_job("fedntd", model={"classes": 4}).method()
    found = method.others(torch.tensor([0, 3, 2]))
    assert [sorted(row) for row in found.tolist()] == [[1, 2, 3], [0, 1, 2], [0, 1, 3]]
