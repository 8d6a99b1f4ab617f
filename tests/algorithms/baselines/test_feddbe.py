"""FedDBE against its equations in float64 by hand."""

import numpy as np
import pytest
import torch
from support import softmax_oracle as oracle
from support.refusals import refused
from support.whole_jobs import trained
from torch.nn.functional import cross_entropy

from staddle.algorithms.baselines import feddbe
from staddle.algorithms.course import SiloState
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.silo_round import local_round

MLP = {"name": "ppfl-mlp", "input": [1, 8, 8]}


def shifted(offset):
    """The gradient by the model and by the offset, which joins the pixels."""

    def gradient(theta, x, y):
        found = oracle.gradient(theta, x + offset[0], y)
        scores = (x + offset[0]) @ theta.weight.T + theta.bias
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        shares[np.arange(len(y)), y] -= 1
        # the model moves by the gradient at the offset of before
        offset[0] = offset[0] - 0.2 * (shares @ theta.weight).mean(0)
        return found

    return gradient


def test_rounds_of_some_uneven_silos_are_its_equations(monkeypatch):
    """The features are pixels here, and MR moves nothing; a job may not upload their means."""
    with refused("feddbe uploads means of features; an extractor without parameters would"):
        oracle.uneven("feddbe")[0].method()
    monkeypatch.setattr(feddbe, "check_features", lambda *_: None)
    job, shards = oracle.uneven("feddbe", fields={"rounds": 4})
    model, offsets = oracle.begun(job), {silo: [np.zeros(64)] for silo in job.silos}
    assert job.cohort(0) == job.silos
    for round_ in range(1, job.length):
        cohort, mean = job.cohort(round_), oracle.zeros()
        whole = sum(len(shards[silo][0]) for silo in cohort)
        for silo in cohort:
            own = shifted(offsets[silo])
            theta, _ = oracle.trained(job, shards, silo, round_, model, own=own)
            mean = mean + (len(shards[silo][0]) / whole) * theta
        model = mean
    simulation = trained(job, shards)
    seen = simulation.look()
    pixels = torch.cat([train.x.flatten(1) for train, _ in shards.values()]).double().mean(0)
    for silo in job.silos:
        delivered = seen[silo].delivered
        oracle.check_close(oracle.numbers(delivered.parts["classifier"]), model)
        found = delivered.parts["offset"]["values"].double().numpy()
        np.testing.assert_allclose(found, offsets[silo][0], atol=2e-5)
        assert torch.allclose(delivered.extra["mean"].double(), pixels, atol=1e-6)  # (2)


def test_round_0_trains_a_model_that_is_dropped(make_job, make_shards):
    job = make_job("feddbe", model=MLP)
    method, (train, test) = job.method(), make_shards(job)["a"]
    state = initial_state(method, "a")
    outcome = local_round(method, job, state, 0, {}, train, test, "a")
    for part, values in state.parts.items():
        for name, value in values.items():
            assert torch.equal(outcome.state.parts[part][name], value)
    still = method.setting.build()["extractor"](train.x).mean(0)
    sent = outcome.contributions["mean"].tensors["mean"]
    assert sent.shape == still.shape
    assert not torch.allclose(sent, still, atol=1e-3)  # of the trained one
    assert outcome.contributions["mean"].weight == len(train)


@pytest.mark.parametrize("kappa", [0.0, 40.0])
def test_one_step_by_hand(make_job, make_data, kappa):
    """One batch of all records: each number moves by its gradient of (3)."""
    training = {"lr": 0.1, "batch_size": 64}
    job, points = make_job("feddbe", {"kappa": kappa}, MLP, training), make_data(20)
    method = job.method()
    start = initial_state(method, "a")
    mean = torch.linspace(-1, 1, method.width)
    parts = {**start.parts, "offset": {"values": mean / 2}}
    outcome = local_round(method, job, SiloState(parts, {"mean": mean}), 1, {}, points, points, "a")
    model = {part: module.double() for part, module in method.setting.build().items()}
    offset = (mean.double() / 2).requires_grad_()
    features = model["extractor"](points.x.double())
    loss = cross_entropy(model["classifier"](features + offset), points.y)
    loss = loss + kappa * 0.5 * ((features.mean(0) - mean.double()) ** 2).mean()
    loss.backward()
    by_hand = {"offset": {"values": offset}}
    by_hand |= {part: dict(module.named_parameters()) for part, module in model.items()}
    for part, named in by_hand.items():
        for name, value in named.items():
            moved = value.detach() - 0.1 * value.grad
            assert torch.allclose(outcome.state.parts[part][name].double(), moved, atol=1e-6), name
