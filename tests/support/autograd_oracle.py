"""Rounds of a small perceptron in float64, whose gradients are torch's and all else is written out.

Of Staddle it uses what ``softmax_oracle`` does.
"""

import torch
from support import softmax_oracle

from staddle.algorithms.training.silo_round import to_modules

MLP = {"name": "ppfl-mlp", "input": [1, 8, 8]}


def begun(method, silo="a"):
    """A silo's initial values in float64, by ``part.tensor``."""
    found = {}
    for part, module in method.modules(silo).items():
        for name, value in module.state_dict().items():
            found[f"{part}.{name}"] = value.double()
    return found


def features(theta, x, part="extractor"):
    return (x @ theta[f"{part}.fc.weight"].T + theta[f"{part}.fc.bias"]).clamp(min=0)


def scores(theta, z, part="classifier"):
    return z @ theta[f"{part}.weight"].T + theta[f"{part}.bias"]


def cross_entropy(logits, y):
    """The mean over records, without torch's own."""
    shares = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    return -torch.log(shares[range(len(y)), y]).mean()


def layer_norm(a, theta, name):
    mean = a.mean(-1, keepdim=True)
    variance = ((a - mean) ** 2).mean(-1, keepdim=True)
    return (a - mean) / (variance + 1e-5) ** 0.5 * theta[f"{name}.weight"] + theta[f"{name}.bias"]


def trained(job, shards, silo, round_, theta, loss, parts):
    """The values after a silo's steps on ``loss(theta, x, y)``, of which these parts move."""
    theta = dict(theta)
    for x, y in softmax_oracle.batches(job, shards, silo, round_):
        moved = [name for name in theta if name.partition(".")[0] in parts]
        leaves = {name: theta[name].clone().requires_grad_() for name in moved}
        value = loss({**theta, **leaves}, torch.from_numpy(x), torch.from_numpy(y))
        slopes = torch.autograd.grad(value, list(leaves.values()))
        for name, slope in zip(moved, slopes, strict=True):
            theta[name] = theta[name] - job.training.lr * slope
    return theta


def outputs(method, silo, state, x):
    """What a silo's model answers, in float64."""
    made = method.predict(to_modules(method, silo, state), x)
    return made.detach().double()


def check_close(state, expected, within=2e-5):
    """Every tensor of a silo's state, in view of float32."""
    for name, value in expected.items():
        part, _, leaf = name.partition(".")
        found = state.parts[part][leaf].double()
        assert torch.allclose(found, value, atol=within, rtol=0), name
