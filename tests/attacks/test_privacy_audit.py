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

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import beta, binom
from torch import nn

from staddle.algorithms.course import Optimiser, Stage
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.job.privacy import SHARED, TRAINING, Spend
from staddle.algorithms.training import clipped_sum, dp_sgd
from staddle.algorithms.training.clipped_sum import ClippedSum
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


def p_value(right, claim, guesses=GUESSES, canaries=CANARIES):
    """How likely so many right guesses are at most, if training is (claim, δ)-DP."""
    b = binom(guesses, 1 / (1 + np.exp(-claim)))
    nearly = np.cumsum(b.pmf(np.arange(right - 1, -1, -1))) / np.arange(1, right + 1)
    return float(b.sf(right - 1) + 2 * canaries * DELTA * nearly.max(initial=0.0))


def lower_bound(right, *of):
    """The least ε, in hundredths, that so many right guesses do not contradict at 95 %."""
    return next(claim for claim in np.arange(0, 20, 0.01) if p_value(right, claim, *of) >= 0.05)


def right_of(score, inside, guesses):
    """Right guesses where canaries of the highest scores are said to be in, of the lowest out."""
    order, half = np.argsort(score, kind="stable"), guesses // 2
    return int(inside[order[-half:]].sum() + (~inside[order[:half]]).sum())


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
    return right_of(score.numpy(), placed.inside, GUESSES)


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


# Noise that silos share.

SILOS = 40
ALL_BUT_TWO = SILOS - 2  # dishonest: the most that a job may have
PLACES = 2000  # parameters, each of which is the whole gradient of one canary
GRADIENT = 3.0  # of a canary, in clips
OF_SHARES = GUESSES, PLACES


class Seeded(Randomness):
    """The numbers of a seed."""

    def __init__(self, rng):
        super().__init__(rng.bytes)


@cache
def shared_sigma(steps, epsilon=CLAIMED, delta=DELTA):
    """The least noise of so many steps on all records, for what is claimed."""
    return float(least_sigma(lambda sigma: [Spend(SHARED, sigma, "1", steps)], str(epsilon), delta))


def mechanism(sigma, dishonest, clip=1.0):
    return Mechanism(
        clip=clip,
        sigma=sigma,
        whole_sigma=sigma,
        q=1.0,
        divisor=1.0,
        physical_batch=512,
        honest=SILOS - dishonest,
    )


def linear(parts, x, y, context):
    """Its gradient is the record."""
    return parts["extractor"](x).squeeze(1)


def opened(rng, x, how, lost=0, loss=linear, **modules):
    """What a coordinator reads of a sum, in clips: one silo has records ``x``, the others none.

    The dishonest silos are in league with it, and have told it what they gave; so have ``lost``
    more, or they forgot their noise.
    """
    modules = modules or {"extractor": nn.Linear(x.shape[1], 1, bias=False)}
    (name,) = (f"extractor.{each}" for each, _ in modules["extractor"].named_parameters())
    stage = Stage(tuple(modules), 1, loss, Optimiser(1.0), summed=frozenset([name]))
    way = Private(how, lambda: Seeded(rng), lambda _: None)
    train(modules, stage, Dataset(x, torch.zeros(len(x))), 1, rng, way)
    total = way.summed[name].clone()
    for _ in range(how.honest - 1 - lost):
        empty = ClippedSum([total.shape], how.clip, how.sigma, shared=True)
        total += empty.shares(Seeded(rng), how.honest, [0])[0]
    return total.double().flatten().numpy() / 2.0**clipped_sum.SHARED_BITS


def coins(rng, number=PLACES):
    inside = rng.random(number) < 0.5
    return inside, GRADIENT * torch.eye(number)[inside]


def right_of_sum(how, lost=0):
    """One step in which half of the canaries are."""
    rng = np.random.default_rng(1)
    inside, records = coins(rng)
    return right_of(opened(rng, records, how, lost), inside, GUESSES)


@pytest.mark.parametrize("dishonest", [1, ALL_BUT_TWO])
def test_what_opens_of_noise_that_silos_share_stays_below_the_claim(dishonest):
    right = right_of_sum(mechanism(shared_sigma(1), dishonest))
    assert lower_bound(right, *OF_SHARES) < CLAIMED
    assert right > 120


def by_all_silos(sigma, units, honest):
    return round((sigma * units) ** 2 / SILOS)


def by_the_square(sigma, units, honest):
    return round((sigma * units / honest) ** 2)


@pytest.mark.parametrize(
    ("variance", "dishonest"), [(by_all_silos, ALL_BUT_TWO), (by_the_square, 1)]
)
@pytest.mark.control
def test_the_audit_finds_shares_of_a_wrong_scale(monkeypatch, variance, dishonest):
    monkeypatch.setattr(clipped_sum, "share_variance", variance)
    right = right_of_sum(mechanism(shared_sigma(1), dishonest))
    assert lower_bound(right, *OF_SHARES) > CLAIMED


@pytest.mark.control
def test_the_audit_finds_shares_that_are_not_there_and_gradients_that_are_not_cut():
    sigma = shared_sigma(1)
    how = mechanism(sigma, 1)
    right = right_of_sum(how, lost=how.honest - 2)
    assert lower_bound(right, *OF_SHARES) > CLAIMED
    # a clip of a thousand, with the noise of a clip of one
    right = right_of_sum(mechanism(sigma / 1000, ALL_BUT_TWO, 1000.0))
    assert lower_bound(right, *OF_SHARES) > CLAIMED


# One silo more, where two are honest.

RUNS, EACH = 60, 1000  # parameters in turn, of which the sums take little memory
NEAR, DELTA_NEAR = 2.0, 0.01  # where a run that is told by a threshold says the most


def bound_by_threshold(lost):
    """The least ε at δ that is not contradicted at 95 %, by sums with and without a canary."""
    rng, sigma = np.random.default_rng(2), shared_sigma(1, NEAR, DELTA_NEAR)
    how, sums, coin = mechanism(sigma, ALL_BUT_TWO), [], []
    for _ in range(RUNS):
        inside, records = coins(rng, EACH)
        sums.append(opened(rng, records, how, lost))
        coin.append(inside)
    # where a sum under half of the noise is e^ε times as likely with the canary as without it
    above, inside = np.concatenate(sums) > 0.5 + NEAR * sigma**2 / 2, np.concatenate(coin)
    found, false = above[inside], above[~inside]
    least = beta.ppf(0.025, found.sum(), len(found) - found.sum() + 1)
    most = beta.ppf(0.975, false.sum() + 1, len(false) - false.sum())
    return np.log((least - DELTA_NEAR) / most)


def test_what_opens_stays_below_the_claim_whatever_the_dishonest_know():
    assert 1.0 < bound_by_threshold(lost=0) < NEAR


@pytest.mark.control
def test_the_audit_finds_that_one_silo_more_left_out_its_share():
    assert bound_by_threshold(lost=1) > NEAR


# Sums in floating point.

CANARY_SUMS = 100  # sums of 23,553 records each, of which the first is a canary
GUESSES_OF_SUMS = 60


class InFloat32(ClippedSum):
    """Adds up records one after another, as they are."""

    def add(self, shares):
        scale = self._units / self._clip
        for total, share in zip(self._totals, shares, strict=True):
            added = np.add.accumulate(share.flatten(1).numpy(), dtype=np.float32)[-1]
            total.add_(torch.from_numpy(added).double().mul(scale).round().long())


def right_of_many_sums():
    """The first record takes a sum to where float32 loses the last 7,168, which it did not lose
    before: it moves the sum by 8 clips (tests/algorithms/training/test_clipped_sum.py).
    """
    rng, how = np.random.default_rng(3), mechanism(shared_sigma(1), ALL_BUT_TWO)
    how = replace(how, physical_batch=clipped_sum.MOST_ROWS)
    lost = -(2.0**-11) * (1 + 2.0**-20)
    records = torch.tensor([1.0] + [1.0] * 2**14 + [lost] * 7 * 1024)[:, None]
    inside = rng.random(CANARY_SUMS) < 0.5
    score = [opened(rng, records if each else records[1:], how)[0] for each in inside]
    return right_of(np.array(score), inside, GUESSES_OF_SUMS)


def test_sums_in_integers_stay_below_the_claim():
    assert lower_bound(right_of_many_sums(), GUESSES_OF_SUMS, CANARY_SUMS) < CLAIMED


@pytest.mark.control
def test_the_audit_finds_a_sum_in_float32(monkeypatch):
    monkeypatch.setattr(dp_sgd, "ClippedSum", InFloat32)
    assert lower_bound(right_of_many_sums(), GUESSES_OF_SUMS, CANARY_SUMS) > CLAIMED


# A part that stays, as FedPer's classifier.

KEPT, READERS = (
    100,
    200,
)  # parameters that stay, and records that read each of them in the next step
MANY = 200  # honest silos: a share of the noise is a fourteenth of it


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(KEPT))

    def forward(self, x):
        return x * self.weight


def both(parts, x, y, context):
    """A canary moves a parameter of the classifier, a reader one of the extractor by as much as
    that moved.
    """
    moving, reading = x.split(KEPT, 1)
    classifier = parts["classifier"]
    return (classifier(moving) + parts["extractor"](classifier(reading))).sum(1)


def right_of_what_stays():
    """Two steps: the first moves what stays at the silo, the second shows it in a sum."""
    rng, sigma = np.random.default_rng(4), shared_sigma(2)
    inside, canary = coins(rng, KEPT)
    readers = torch.eye(KEPT).repeat(READERS, 1)
    x = torch.cat(
        [
            nn.functional.pad(canary, (0, KEPT)),
            nn.functional.pad(readers, (KEPT, 0)),
        ]
    )
    # so far that a reader's gradient is seldom cut
    how = replace(mechanism(sigma, 1), divisor=4 * sigma, honest=MANY)
    parts = {"extractor": Scale(), "classifier": Scale()}
    opened(rng, x, how, loss=both, **parts)
    # a canary's step goes down
    score = -opened(rng, x, how, loss=both, **parts)
    return right_of(score, inside, GUESSES_OF_SUMS)


def test_what_later_sums_show_of_a_part_that_stays_stays_below_the_claim():
    right = right_of_what_stays()
    assert lower_bound(right, GUESSES_OF_SUMS, KEPT) < CLAIMED


@pytest.mark.control
def test_the_audit_finds_a_part_that_stays_under_a_share_of_the_noise(monkeypatch):
    whole = ClippedSum.noisy

    def share(self, random, places=None):
        own, self._sigma = self._sigma, self._sigma / MANY**0.5
        made = whole(self, random, places)
        self._sigma = own
        return made

    monkeypatch.setattr(ClippedSum, "noisy", share)
    right = right_of_what_stays()
    assert lower_bound(right, GUESSES_OF_SUMS, KEPT) > CLAIMED
