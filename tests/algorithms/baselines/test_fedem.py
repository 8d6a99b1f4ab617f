"""FedEM against its equations in float64 by hand."""

import numpy as np
import torch
from support import softmax_oracle as oracle

from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.training.silo_round import to_modules


def probabilities(theta, x):
    scores = x @ theta.weight.T + theta.bias
    shares = np.exp(scores - scores.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def likelihoods(models, x, y):
    """exp(−ℓ) [M, n]: what each model says of each record's class."""
    return np.stack([probabilities(theta, x)[np.arange(len(y)), y] for theta in models])


def weighted(model, frozen, pi):
    """The gradient of (3) by one model, where q is of the frozen ones."""

    def gradient(theta, x, y):
        joint = pi[:, None] * likelihoods(frozen, x, y)
        q = (joint / joint.sum(0))[model]
        error = probabilities(theta, x)
        error[np.arange(len(y)), y] -= 1
        error *= q[:, None]
        return oracle.Theta(error.T @ x / len(y), error.mean(0))

    return gradient


def by_hand(job, shards, count):
    method = job.method()
    built = method.modules("a")
    models = [oracle.numbers(built[f"{p}classifier"].state_dict()) for p in method.prefixes]
    pi = {silo: np.full(count, 1 / count) for silo in job.silos}
    for round_ in range(job.rounds):
        cohort, means = job.cohort(round_), [oracle.zeros() for _ in models]
        whole = sum(len(shards[silo][0]) for silo in cohort)
        for silo in cohort:
            data = shards[silo][0]
            x, y = data.x.double().numpy().reshape(len(data), -1), data.y.numpy()
            # the models share the batches of the stage, and move apart from one another
            for m, start in enumerate(models):
                own = weighted(m, models, pi[silo])
                theta, _ = trained(job, shards, silo, round_, start, own)
                means[m] = means[m] + (len(data) / whole) * theta
            joint = pi[silo][:, None] * likelihoods(models, x, y)
            pi[silo] = (joint / joint.sum(0)).mean(1)
        models = means
    return models, pi


def trained(job, shards, silo, round_, start, own):
    """Of three steps of the course the third trains."""
    return oracle.trained(job, shards, silo, round_, start, own=own, number=2)


def test_rounds_of_some_uneven_silos_are_its_equations():
    job, shards = oracle.uneven("fedem", {"models": 3})
    models, pi = by_hand(job, shards, 3)
    method, end = job.method(), simulate(job, shards)
    for silo, state in end.states.items():
        for prefix, theta in zip(method.prefixes, models, strict=True):
            oracle.check_close(oracle.numbers(state.parts[f"{prefix}classifier"]), theta)
        shares = state.parts["mixture"]["shares"].double().numpy()
        np.testing.assert_allclose(shares, pi[silo], atol=1e-5)
        x = shards[silo][1].x
        found = method.predict(to_modules(method, silo, state), x).exp().detach().double().numpy()
        flat = x.double().numpy().reshape(len(x), -1)
        each = [probabilities(theta, flat) for theta in models]
        mixed = np.tensordot(pi[silo], each, 1)
        np.testing.assert_allclose(found, mixed, atol=2e-5)
    assert max(np.ptp(each) for each in pi.values()) > 0.01


def test_models_begin_apart_and_cross_under_names_of_their_own(make_job):
    method = make_job("fedem").method()
    built = method.modules("a")
    first, second = (built[f"{prefix}classifier"].weight for prefix in method.prefixes[:2])
    assert not torch.equal(first, second)
    (part,) = method.up(0)
    assert len({spec.name for spec in part.tensors}) == len(part.tensors)
    average = make_job("fedavg").method().model
    assert len(part.tensors) == 3 * len(average.tensors)
    assert part.tensors[: len(average.tensors)] == average.tensors
