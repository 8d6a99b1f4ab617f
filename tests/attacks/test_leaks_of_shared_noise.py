"""A coordinator hands silos a model that is made to leak, in a private job whose silos share the
noise of what they sum. One silo is in league with it, and takes its own part off the sum.

The measure is how many of the others' records come out above 25 dB. Without noise the same reading
of the same sum has to find many. No policy bounds the delivery.
"""

import numpy as np
import pytest
import torch
from support import leaky_models
from support.jobs import make_job

from staddle.algorithms.data.dataset import digits
from staddle.algorithms.job.privacy import signed_sigma, spends_by_sigma
from staddle.algorithms.job.shared_steps import STEPS
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.accountant import Counts, MemoryAccount, PrivateSilo
from staddle.algorithms.training.silo_round import local_round
from staddle.security.blind.plan import simulated
from staddle.security.dp.noise import Randomness
from staddle.security.dp.noise_planner import overspent

pytestmark = pytest.mark.actor("coordinator")

HONEST, ALLY, EACH, CLASSES = ("a", "b", "c"), "d", 24, 10
PRIVACY = {"epsilon": 8.0, "delta": 1e-5, "sample_rate": 1.0, "sigma": "1.2", "noise": "shared"}


class Seeded(Randomness):
    """The numbers of a seed."""

    def __init__(self, rng):
        super().__init__(rng.bytes)


class Noiseless(Seeded):
    """No noise of the sums."""

    def discrete_gaussian(self, count, variance):
        return np.zeros(count, np.int64)


def leaking_job(layer):
    return make_job(
        "fedavg",
        model=layer.model,
        silos=[*HONEST, ALLY],
        rounds=2,
        min_cohort=3,
        privacy=PRIVACY,
        security={"secure_aggregation": "required"},
    )


def opened(job, trap, records, fresh):
    """Of the round that trains on the trap: the sum of all silos without what the ally gave."""
    rng = np.random.default_rng(5)
    method, given = job.method(), {}
    for silo in job.silos:
        account = MemoryAccount(job)
        # Exact, as if they had been released with little noise: a dozen records have no other.
        account.keep_counts(Counts(torch.bincount(records[silo].y, minlength=CLASSES), 0))
        private = PrivateSilo(account, lambda: fresh(rng))
        own = records[silo], records[silo], silo
        state, down = initial_state(method, silo), {"model": trap}
        found = local_round(method, job, state, 1, down, *own, private=private).contributions
        given[silo] = found[STEPS].tensors
    part = next(part for part in job.up(1) if part.name == STEPS)
    total = simulated(job).collect(part, job.silos, lambda silo, name: given[silo][name])
    return {name: total[name] - given[ALLY][name] for name in trap}


@pytest.mark.parametrize(("kind", "least"), [("dense", 20), ("convolved", 5)])
@pytest.mark.parametrize("fresh", [Seeded, pytest.param(Noiseless, marks=pytest.mark.control)])
def test_a_coordinator_with_an_ally_reads_a_sum_of_a_trap(kind, least, fresh):
    layer = leaky_models.LAYERS[kind]
    job = leaking_job(layer)
    assert not overspent(spends_by_sigma(job), signed_sigma(job), 8, 1e-5)
    places = [np.arange(EACH * at, EACH * (at + 1)) for at in range(len(job.silos))]
    records = dict(zip(job.silos, map(digits().take, places), strict=True))
    parts = initial_state(job.method(), ALLY).parts
    trap = layer.bins(
        {f"{part}.{name}": value for part, held in parts.items() for name, value in held.items()}
    )

    # a step down the sum, of which the quotients are the same whatever its length
    step = opened(job, trap, records, fresh)
    after = {name: value.double() - step[name].double() for name, value in trap.items()}
    every = torch.cat([records[silo].x for silo in HONEST])
    count = len(layer.read(trap, after, every, bins=True))
    if fresh is Noiseless:
        assert count > least, f"{count} of {len(every)} were read: the attack does not work"
    else:
        assert count == 0, f"{count} of {len(every)} records were read"
