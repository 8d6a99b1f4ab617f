"""FedSSA, rounds of the whole method: Algorithm 1 and Eq. 3 to 6 of its paper in float64."""

from math import cos, pi

import pytest
import torch
from support import whole_methods as whole

MU_0, T_STABLE = 0.5, 4


def loss(values, x, y):
    logits = whole.features(values, x) @ values["classifier.weight"].T + values["classifier.bias"]
    return whole.cross_entropies(logits, y).mean()


def rounds_by_hand(job, shards):
    """All silos' models and the global header, weights [C, d] and biases [C], after each round."""
    values = whole.begun(job)
    seen = {silo: torch.bincount(data.y, minlength=4) > 0 for silo, (data, _) in shards.items()}
    # a reading: at first the global header is the common initial one
    header = whole.of_parts(values["a"], "classifier")
    for t in range(job.rounds):
        mu = MU_0 * cos(t * pi / (2 * T_STABLE)) if t < T_STABLE else 0.0
        for k in job.cohort(t):
            fused = {}
            for name, rows in header.items():
                fused[name] = values[k][name].clone()
                fused[name][seen[k]] = (rows + mu * values[k][name])[seen[k]]  # Eq. 4
            start = {**values[k], **fused}  # Eq. 5
            drawn = whole.steps(job, shards, k, t)
            parts = ["extractor", "classifier"]
            values[k] = whole.descended(start, loss, drawn, parts, job.training.lr)  # Eq. 6
        header = {name: rows.clone() for name, rows in header.items()}
        for s in range(whole.CLASSES):
            holders = [k for k in job.cohort(t) if seen[k][s]]
            for name in header if holders else ():
                header[name][s] = sum(values[k][name][s] for k in holders) / len(holders)  # Eq. 3
        yield values, header


@pytest.mark.parametrize("population", whole.POPULATIONS.values(), ids=whole.POPULATIONS)
def test_six_silos_are_algorithm_1(population):
    job = whole.job_of("fedssa", {"mu_0": MU_0, "t_stable": T_STABLE})
    shards = whole.shards_of(population)
    by_hand = rounds_by_hand(job, shards)
    for simulation, (values, header) in zip(whole.simulated(job, shards), by_hand, strict=True):
        for silo, state in simulation.states.items():
            whole.check_same(state, values[silo])
        rows = torch.cat([header["classifier.weight"], header["classifier.bias"][:, None]], 1)
        assert torch.allclose(simulation.coordinator["rows"], rows, atol=1e-8, rtol=0)
