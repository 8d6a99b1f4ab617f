"""An empirical lower bound on what private training gives away, by canaries.

It stays below the claimed ε.

Steinke, Nasr, Jagielski, "Privacy auditing with one (1) training run", NeurIPS 2023. Each of m
canaries is a training record or not, by a coin of its own. Whoever sees the trained model guesses
of r canaries whether they were. If training is (ε, δ)-DP, then the number of right guesses W is
about as large as a sum of r coins of e^ε / (1 + e^ε) each::

    P[W >= v] <= P[B >= v] + 2 m δ max over i of P[v > B >= v - i] / i  B ~ Binomial(r, e^ε / (1 +
                                                                        e^ε))

and the least ε that makes what was seen no rarer than one in twenty is the bound, at 95 %. The
attack is strong: each canary has a feature that no other record has, a wrong label, and a gradient
of nine clips, and the guess is read off the weights of its feature in the trained model.

Of 200 guesses 185 must be right for a bound above the claimed ε = 2. Each guess is right with
probability 0.68 of the real mechanism (in 300 trainings 117 to 155 right, deviation 6.5) and above
0.98 of each broken one (in 60 trainings of each never below 195). By the binomial tails either is
on the wrong side of 185 in less than one of 10^9 runs, and the attack sees nothing, that is 110
right or less of the real one, in less than one of 10^4.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import nn

from staddle.algorithms.course import Optimiser, Stage
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.job.privacy import TRAINING, Spend
from staddle.algorithms.training.dp_sgd import Mechanism, Private
from staddle.algorithms.training.loop import train
from staddle.security.dp.noise import Randomness
from staddle.security.dp.noise_planner import least_sigma
from staddle.security.dp.rdp import cost

pytestmark = pytest.mark.actor("coordinator")

CLAIMED, DELTA = 2.0, 1e-5
CANARIES, GUESSES = 1000, 200
ORDINARY, FEATURES, CLASSES = 100, 16, 4
Q, EPOCHS = 0.2, 8
STEPS = round(EPOCHS / Q)
SCALE = 10.0  # of a canary's feature
EXPECTED = ORDINARY + CANARIES / 2


def p_value(right, claim):
    """How likely so many right guesses are at most, if training is (claim, δ)-DP."""
    b = binom(GUESSES, 1 / (1 + np.exp(-claim)))
    nearly = np.cumsum(b.pmf(np.arange(right - 1, -1, -1))) / np.arange(1, right + 1)
    return float(b.sf(right - 1) + 2 * CANARIES * DELTA * nearly.max(initial=0.0))


def lower_bound(right):
    """The least ε, in hundredths, that so many right guesses do not contradict at 95 %."""
    return next(claim for claim in np.arange(0, 20, 0.01) if p_value(right, claim) >= 0.05)


@dataclass(frozen=True)
class Canaries:
    """The records that are trained on, the canaries' coins, and their labels."""

    records: Dataset
    inside: np.ndarray
    labels: torch.Tensor


def canaries(rng):
    inside = rng.random(CANARIES) < 0.5
    x = torch.zeros(ORDINARY + CANARIES, FEATURES + CANARIES)
    y = torch.from_numpy(rng.integers(0, CLASSES, len(x)))
    x[:ORDINARY, :FEATURES] = (
        torch.from_numpy(rng.normal(size=(ORDINARY, FEATURES))) + y[:ORDINARY, None]
    )
    x[ORDINARY:, FEATURES:] = SCALE * torch.eye(CANARIES)
    kept = np.concatenate([np.ones(ORDINARY, bool), inside])
    return Canaries(Dataset(x[kept], y[kept]), inside, y[ORDINARY:])


def cross_entropy(parts, x, y, context):
    return nn.functional.cross_entropy(parts["classifier"](x), y, reduction="none")


def right_guesses(rng, sigma, clip=1.0, fresh=Randomness):
    """Train once, guess of the canaries learnt most and least that they were in and were not.

    Count what is right.
    """
    placed = canaries(rng)
    model = nn.Linear(FEATURES + CANARIES, CLASSES)
    nn.init.zeros_(model.weight)
    how = Mechanism(
        clip=clip, sigma=sigma, whole_sigma=sigma, q=Q, divisor=Q * EXPECTED, physical_batch=1000
    )
    way = Private(how, fresh, lambda _: None)
    stage = Stage(("classifier",), EPOCHS, cross_entropy, Optimiser(0.1))
    train({"classifier": model}, stage, placed.records, 1, rng, way)
    learnt = model.weight.detach()[:, FEATURES:]  # [classes, m]
    score = learnt[placed.labels, torch.arange(CANARIES)] - learnt.mean(0)
    order = np.argsort(score.numpy(), kind="stable")
    half = GUESSES // 2
    return int(placed.inside[order[-half:]].sum() + (~placed.inside[order[:half]]).sum())


def all_steps(sigma):
    return [Spend(TRAINING, sigma, str(Q), STEPS)]


@cache
def claimed_sigma():
    """The least noise for what is claimed, which takes a second to find."""
    return float(least_sigma(all_steps, str(CLAIMED), DELTA))


class Everybody(Randomness):
    """Draws all records in each step, though a fifth was paid for."""

    def drawn(self, records, q):
        return np.arange(records)


def test_what_private_training_gives_away_stays_below_the_claim():
    assert 0.99 * CLAIMED < cost(all_steps(str(claimed_sigma())), DELTA) <= CLAIMED
    right = right_guesses(np.random.default_rng(0), claimed_sigma())
    assert lower_bound(right) < CLAIMED
    assert right > 110  # a guess in the dark is right in half of the cases


BROKEN = {  # the share of the noise, and what else is wrong
    "no noise": (0, {}),
    "a tenth of the noise": (1 / 10, {}),
    "the noise of clip 1, but none is cut": (1 / 1000, {"clip": 1000.0}),
    "all records in each step": (1, {"fresh": Everybody}),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.control
def test_the_audit_finds_a_broken_mechanism(case):
    share, changes = BROKEN[case]
    right = right_guesses(np.random.default_rng(0), share * claimed_sigma(), **changes)
    assert lower_bound(right) > CLAIMED


@pytest.mark.control
def test_the_bound_of_guesses_that_are_all_right():
    """Then P[B >= r] = (e^ε / (1 + e^ε))^r, and δ = 1e-5 takes next to nothing off."""
    q = 0.05 ** (1 / GUESSES)
    assert lower_bound(GUESSES) == pytest.approx(np.log(q / (1 - q)), abs=0.1)
    assert lower_bound(GUESSES // 2) == 0.0
