"""FedSimSup, rounds of the whole method: Algorithm 1 and Eq. 3 to 12 of its paper in float64."""

import pytest
import torch
from support import whole_methods as whole

TAU_S, TAU_THETA = 1, 2
SCALED = (40 * (6 / 1000) ** (4 / 7), 3 / 7)  # C and γ of six rounds by default
THETA = ("extractor", "classifier")


def logits(values, x):
    """Eq. 3: the inter-learning model and the supervisor side by side."""
    inner = x.flatten(1) @ values["supervisor.extractor.fc1.weight"].T
    inner = (inner + values["supervisor.extractor.fc1.bias"]).clamp(min=0)
    supervisor = inner @ values["supervisor.classifier.weight"].T
    supervisor = supervisor + values["supervisor.classifier.bias"]
    theta = whole.features(values, x) @ values["classifier.weight"].T + values["classifier.bias"]
    return theta + supervisor


def loss(values, x, y):
    return whole.cross_entropies(logits(values, x), y).mean()


def rounds_by_hand(job, shards, c, gamma, direct=False):
    """θ_i and s_i of all silos after each round t = 1..T.

    ``direct`` is the average of FedAvg in place of Eq. 7, by the ablation of Fig. 3.
    """
    values, lr = whole.begun(job), job.training.lr
    counts = {
        silo: torch.bincount(data.y, minlength=4).double() for silo, (data, _) in shards.items()
    }
    m = {silo: float(own.sum()) for silo, own in counts.items()}
    share = {silo: own / own.sum() for silo, own in counts.items()}
    for t in range(1, job.rounds + 1):
        drawn = job.cohort(t)
        for i in drawn:
            first = whole.steps(job, shards, i, t, 0, TAU_S)
            values[i] = whole.descended(values[i], loss, first, ["supervisor"], lr)  # Eq. 4, 11
            then = whole.steps(job, shards, i, t, 1, TAU_THETA)
            values[i] = whole.descended(values[i], loss, then, THETA, lr)  # Eq. 5, 12; Eq. 6
        many, total = len(drawn), sum(m[j] for j in drawn)
        limit = c * job.rounds**gamma
        beta = 1.0 if t < limit else (limit / t) ** 2  # Eq. 10
        after = dict(values)
        for i in set(job.silos) - set(drawn):
            alike = {
                j: float(share[i] @ share[j] / (share[i].norm() * share[j].norm())) for j in drawn
            }
            alike = {j: m[j] for j in drawn} if direct else alike
            if not sum(alike.values()):
                continue  # a reading: Eq. 7 divides by zero
            alpha = 1.0 if direct else total / (total + many * m[i]) * beta  # Eq. 8, 9
            after[i] = dict(values[i])
            for name in whole.of_parts(values[i], *THETA):
                others = sum(alike[j] * values[j][name] for j in drawn) / sum(alike.values())
                after[i][name] = (1 - alpha) * values[i][name] + alpha * others  # Eq. 7
        values = after
        yield values


def check(population, options, c, gamma, direct=False, drawn=3):
    """Six rounds, of which each draws so many of the six silos."""
    epochs = {"tau_s": TAU_S, "tau_theta": TAU_THETA, "supervisor": "mlp"}
    fields = {"participation": drawn / 6, "min_cohort": min(drawn, 2)}
    job = whole.job_of("fedsimsup", {**epochs, **options}, fields=fields)
    assert {len(job.cohort(t)) for t in range(1, job.length)} == {drawn}
    shards = whole.shards_of(population)
    by_hand = rounds_by_hand(job, shards, c, gamma, direct)
    for simulation, expected in zip(whole.simulated(job, shards), by_hand, strict=True):
        for silo, seen in simulation.look().items():
            whole.check_same(seen.delivered, expected[silo])


@pytest.mark.parametrize("population", whole.POPULATIONS.values(), ids=whole.POPULATIONS)
@pytest.mark.parametrize(
    ("options", "c", "gamma"),
    [({}, *SCALED), ({"c": 1.0, "gamma": 0.25}, 1.0, 0.25)],
    ids=["the default schedule", "an early decay"],
)
def test_six_silos_are_algorithm_1(population, options, c, gamma):
    check(population, options, c, gamma)


def test_the_papers_schedule_does_not_decay_in_six_rounds():
    check(whole.UNEVEN, {"schedule": "paper"}, 40, 3 / 7)


@pytest.mark.parametrize("drawn", [1, 2, 6])
def test_rounds_of_any_number_of_silos_are_algorithm_1(drawn):
    check(whole.UNEVEN, {"cohorts": "any"}, *SCALED, drawn=drawn)


def test_the_ablation_averages_directly():
    check(whole.UNEVEN, {"similarity": "samples", "alpha": "one"}, *SCALED, direct=True)
