"""Whole methods in float64: simulations, and what their oracles in algorithms/oracles are made of.

An oracle is a method's server and clients written out from its paper. Of Staddle it takes inputs
alone: who is drawn, the initial values, and the order of the records in each epoch.
"""

import numpy as np
import torch
from support.jobs import make_job
from support.softmax_oracle import batches

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation, check_population

SILOS = list("abcdef")
CLASSES = 4
MLP = {"name": "ppfl-mlp", "input": [1, 8, 8], "classes": CLASSES}
LINEAR = {"name": "glm", "input": [1, 8, 8], "norm": "none", "classes": CLASSES}
UNEVEN = {
    "a": (9, 0, 0, 2), "b": (3, 8, 0, 0), "c": (0, 5, 6, 0), "d": (0, 0, 7, 4), "e": (2, 1, 3, 1),
    "f": (0, 0, 0, 12),
}  # fmt: skip
ONE_CLASS = {
    "a": (7, 0, 0, 0), "b": (0, 9, 0, 0), "c": (0, 0, 6, 0), "d": (0, 0, 0, 8), "e": (5, 0, 0, 0),
    "f": (0, 0, 4, 0),
}  # fmt: skip
# training records by class, silo by silo
POPULATIONS = {
    "uneven classes": UNEVEN,
    "one class per silo": ONE_CLASS,
    "one record": {**UNEVEN, "e": (0, 1, 0, 0)},
    "all silos alike": dict.fromkeys(SILOS, (3, 2, 4, 3)),
}


class Doubles(Dataset):
    """Records in float64."""

    def __post_init__(self):
        pass

    def take(self, indices):
        return Doubles(self.x[indices], self.y[indices])


def records_of(by_class, seed):
    """Noise that is brighter the later the class."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.repeat(np.arange(CLASSES), by_class))
    x = 0.5 * rng.normal(size=(len(y), 1, 8, 8)) + y[:, None, None, None] / CLASSES
    return Doubles(torch.from_numpy(x), torch.from_numpy(y))


def shards_of(population):
    """Equal counts are equal records: silos that are alike hold the same."""
    test = records_of((1,) * CLASSES, 0)
    seeds = {own: sum(c * 13**k for k, c in enumerate(own)) for own in population.values()}
    return {silo: (records_of(own, seeds[own]), test) for silo, own in population.items()}


def job_of(method, options=None, model=MLP, rounds=6, **training):
    """Six silos, of which a round draws three; one at least is away in the first round."""
    fields = training.pop("fields", {"participation": 0.5})
    training = {"epochs": 2, "batch_size": 8, "lr": 0.1, **training}
    return make_job(method, options, model, training, silos=SILOS, rounds=rounds, **fields)


def simulated(job, shards):
    """The simulation after each of its rounds that trains, in float64."""
    records = {silo: Records(*sides) for silo, sides in shards.items()}
    check_population(job, records)
    simulation = Simulation(job, Serial(job, records))
    while simulation.round < job.length:
        simulation.step()
        if simulation.round > job.length - job.rounds:  # not the census
            yield simulation


def begun(job):
    """Initial values of all silos in float64, by ``part.tensor``."""
    method = job.method()
    return {
        silo: {
            f"{part}.{name}": value
            for part, module in method.modules(silo).items()
            for name, value in module.state_dict().items()
        }
        for silo in job.silos
    }


def of_parts(values, *parts):
    """The values of these parts."""
    return {name: value for name, value in values.items() if name.partition(".")[0] in parts}


def cross_entropies(logits, y):
    """Of each record, without torch's own."""
    largest = logits.max(1, keepdim=True).values.detach()
    whole = torch.exp(logits - largest).sum(1).log() + largest[:, 0]
    return whole - logits[range(len(y)), y]


def steps(job, shards, silo, round_, number=0, epochs=None):
    """Pictures [B, 1, 8, 8] and classes of each batch of a stage."""
    for x, y in batches(job, shards, silo, round_, number, epochs):
        yield torch.from_numpy(x).reshape(-1, 1, 8, 8), torch.from_numpy(y)


def descended(values, loss, drawn, parts, lr, momentum=0.0, decay=0.0, clip=None):
    """The values after SGD on ``loss(values, x, y)`` batch by batch, of which these parts move.

    A gradient whose norm over all these parts is above ``clip`` is cut to it.
    """
    values, velocity = dict(values), {}
    for x, y in drawn:
        leaves = {n: v.clone().requires_grad_() for n, v in of_parts(values, *parts).items()}
        value = loss({**values, **leaves}, x, y)
        slopes = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        norm = sum(float((slope**2).sum()) for slope in slopes) ** 0.5
        cut = clip / norm if clip and norm > clip else 1.0
        for name, slope in zip(leaves, slopes, strict=True):
            push = cut * slope + decay * values[name]
            velocity[name] = momentum * velocity.get(name, 0) + push
            values[name] = values[name] - lr * velocity[name]
    return values


def features(values, x):
    """The hidden layer of ``MLP``; records as they are where the model is ``LINEAR``."""
    x = x.flatten(1)
    if "extractor.fc.weight" not in values:
        return x
    return (x @ values["extractor.fc.weight"].T + values["extractor.fc.bias"]).clamp(min=0)


def check_same(state, expected, within=1e-8):
    """Every value of a silo's state is the oracle's, in float64."""
    found = {f"{part}.{name}": v for part, own in state.parts.items() for name, v in own.items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype == torch.float64
        assert torch.allclose(found[name], value, atol=within, rtol=0), name
