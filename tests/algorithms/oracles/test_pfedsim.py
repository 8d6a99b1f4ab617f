"""pFedSim, rounds of the whole method: Algorithm 2 and Eq. 2 to 4 of its paper in float64."""

from math import floor

import pytest
import torch
from support import whole_methods as whole

BOTH = ["extractor", "classifier"]
MOST = 1 - 1e-4  # a deviation: cosines are cut, since Eq. 3 has no bound as they go to 1
CODE_SELF = 9.210340371976182  # -log(1 - 0.9999), of the authors' code


def loss(values, x, y):
    logits = whole.features(values, x) @ values["classifier.weight"].T + values["classifier.bias"]
    return whole.cross_entropies(logits, y).mean()


def similarity(one, other, form):
    """Φ_ij of two classifiers: Eq. 3, or Eq. 2 below the logarithm as in the authors' code.

    No row is so short that ε would play a part.
    """
    cosines = []
    for own, theirs in zip(one, other, strict=True):
        cosines.append(float(own @ theirs / (own.norm() * theirs.norm())))
    if form == "mean":
        cosines = [sum(cosines) / len(cosines)]  # Eq. 2
    kept = torch.tensor([min(max(0.0, cosine), MOST) for cosine in cosines])
    return float(-torch.log(1 - kept).mean())  # Eq. 3


def rounds_by_hand(job, shards, form, own_weight, rho):
    """All silos' last trained models, and Φ, after each round."""
    trained, silos = whole.begun(job), job.silos
    shared = dict(trained["a"])  # ω and φ of the generalisation phase
    weights = own_weight * torch.eye(len(silos))  # Φ, the paper's identity times Φ_ii
    omega, phi = {}, {}
    for t in range(job.rounds):
        drawn = job.cohort(t)
        if t == floor(rho * job.rounds):
            # all silos begin the personalisation phase with the generalisation phase's model
            omega = {i: whole.of_parts(shared, "extractor") for i in silos}
            phi = {i: whole.of_parts(shared, "classifier") for i in silos}
        before = dict(omega)
        for number, i in enumerate(silos):
            if i not in drawn:
                continue
            start = shared
            if omega:
                row = weights[number]
                mixed = {
                    name: sum(row[n] * before[j][name] for n, j in enumerate(silos)) / row.sum()
                    for name in before[i]
                }  # Eq. 4
                start = {**mixed, **phi[i]}
            batches = whole.steps(job, shards, i, t)
            trained[i] = whole.descended(start, loss, batches, BOTH, job.training.lr)
            if omega:
                omega[i] = whole.of_parts(trained[i], "extractor")
                phi[i] = whole.of_parts(trained[i], "classifier")
        if not omega:
            records = {i: len(shards[i][0]) for i in drawn}
            for name in shared:
                total = sum(records[i] * trained[i][name] for i in drawn)
                shared = {**shared, name: total / sum(records.values())}  # FedAvg
        numbers = [silos.index(i) for i in drawn] if omega else []
        for a in numbers:
            for b in set(numbers) - {a}:
                rows = [phi[silos[n]]["classifier.weight"] for n in (a, b)]
                weights[a, b] = similarity(*rows, form)
        yield trained, weights


@pytest.mark.parametrize("population", whole.POPULATIONS.values(), ids=whole.POPULATIONS)
@pytest.mark.parametrize(
    ("form", "own_weight"), [("per_class", 1.0), ("mean", CODE_SELF)], ids=["the paper", "the code"]
)
def test_six_silos_are_algorithm_2(population, form, own_weight):
    check(population, form, own_weight, 0.25)


@pytest.mark.parametrize("rho", [0.0, 0.35])
def test_the_phase_changes_at_once_or_after_a_whole_number_of_rounds(rho):
    check(whole.UNEVEN, "mean", CODE_SELF, rho)


def check(population, form, own_weight, rho):
    """Eight rounds, of which each draws three of the six silos."""
    job = whole.job_of("pfedsim", {"similarity": form, "rho": rho}, rounds=8)
    shards = whole.shards_of(population)
    by_hand = rounds_by_hand(job, shards, form, own_weight, rho)
    for simulation, (trained, weights) in zip(whole.simulated(job, shards), by_hand, strict=True):
        for silo, state in simulation.states.items():
            whole.check_same(state, trained[silo])
        found = simulation.coordinator["weights"]
        assert torch.allclose(found, weights.clone().fill_diagonal_(0), atol=1e-8, rtol=0)
    assert weights.fill_diagonal_(0).count_nonzero() > 6
