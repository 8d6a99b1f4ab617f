"""Rounds of a softmax regression, slow and in float64, against which methods are compared.

Of Staddle it uses a job's cohorts, the order in which records are drawn, and the initial values.
Gradients, steps and means are written out here.
"""

from dataclasses import dataclass

import numpy as np
from support.jobs import make_job, make_shards

from staddle.algorithms.numerics.streams import permutation
from staddle.algorithms.training.silo_round import stage_stream

GLM = {"name": "glm", "input": [1, 8, 8], "norm": "none"}
SIZE = 8  # of a batch
SILOS = list("abcd")


def uneven(method, options=None, fields=None, model=None, **training):
    """A job of four silos, of which a round draws three, and their records: 11, 16, 21 and 26."""
    training = {"epochs": 2, "batch_size": SIZE, "lr": 0.2, **training}
    some = {"silos": SILOS, "participation": 0.75, "rounds": 5, **(fields or {})}
    job = make_job(method, options, model or GLM, training, **some)
    assert len({job.cohort(round_) for round_ in range(job.rounds)}) > 1
    return job, make_shards(job, 11)


@dataclass
class Theta:
    """Weight [C, d] and bias [C], with the arithmetic of vectors."""

    weight: np.ndarray
    bias: np.ndarray

    def __add__(self, other):
        return Theta(self.weight + other.weight, self.bias + other.bias)

    def __sub__(self, other):
        return self + -1.0 * other

    def __rmul__(self, factor):
        return Theta(factor * self.weight, factor * self.bias)

    def each(self, function, *others):
        """A function of the numbers of all."""
        return Theta(
            function(self.weight, *(other.weight for other in others)),
            function(self.bias, *(other.bias for other in others)),
        )


def zeros():
    return Theta(np.zeros((3, 64)), np.zeros(3))


def begun(job):
    """The initial model."""
    values = job.setting().build()["classifier"].state_dict()
    return Theta(values["weight"].double().numpy(), values["bias"].double().numpy())


def numbers(tensors, prefix=""):
    """A model among a state's tensors."""
    return Theta(
        tensors[f"{prefix}weight"].double().numpy(), tensors[f"{prefix}bias"].double().numpy()
    )


def gradient(theta, x, y):
    """Of the mean cross-entropy."""
    scores = x @ theta.weight.T + theta.bias
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    shares[np.arange(len(y)), y] -= 1
    return Theta(shares.T @ x / len(y), shares.mean(0))


def trained(
    job, shards, silo, round_, theta, lr=None, own=gradient, pull=None, momentum=0.0, number=0
):
    """A silo's model after its epochs from ``theta``, and how many steps they took.

    ``number`` is the place of the stage in its course.
    """
    velocity, steps = zeros(), 0
    lr = job.training.lr if lr is None else lr
    for x, y in batches(job, shards, silo, round_, number):
        step = own(theta, x, y)
        if pull is not None:
            step = step + pull
        velocity = momentum * velocity + step
        theta = theta - lr * velocity
        steps += 1
    return theta, steps


def batches(job, shards, silo, round_, number=0, epochs=None):
    """The pixels [B, 64] and classes [B] of each step of a stage, by all of its epochs."""
    data = shards[silo][0]
    x, y = data.x.double().numpy().reshape(len(data), -1), data.y.numpy()
    rng = stage_stream(job.method(), job, silo, round_, number)
    for _ in range(job.training.epochs if epochs is None else epochs):
        order = permutation(rng, len(y))
        for start in range(0, len(y), SIZE):
            batch = order[start : start + SIZE]
            yield x[batch], y[batch]


def check_close(found, expected, within=2e-5):
    """Every number, in view of float32."""
    for one, other in ((found.weight, expected.weight), (found.bias, expected.bias)):
        np.testing.assert_allclose(one, other, atol=within, rtol=0)
