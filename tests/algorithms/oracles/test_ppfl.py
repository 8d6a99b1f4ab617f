"""PPFL, rounds of the whole method: Algorithms 1 and O1 of its paper in float64.

The Laplacian is the dense one over silos, where the package has sums over classes.
"""

import pytest
import torch
from support import whole_methods as whole

K, FLOOR, RATE = 3, 0.05, 2.0


def scores(values, x, variant):
    """Log-probabilities of Eq. 7, or logits of Eq. 8."""
    z, c = whole.features(values, x), values["membership.c"]
    weights = [values[f"canonical.{k}.weight"] for k in range(K)]
    biases = [values[f"canonical.{k}.bias"] for k in range(K)]
    if variant == "ppfl2":
        u = sum(c[k] * weights[k] for k in range(K))
        return z @ u.T + sum(c[k] * biases[k] for k in range(K))
    answers = [torch.softmax(z @ weights[k].T + biases[k], 1) for k in range(K)]
    return torch.log(sum(c[k] * answers[k] for k in range(K)))


def loss_of(variant):
    """Logarithms of probabilities stay as they are in a cross-entropy: they are normalised."""
    return lambda values, x, y: whole.cross_entropies(scores(values, x, variant), y).mean()


def laplacian_of(shards):
    """L = D - W of the cosines of label frequencies, and the mean degree."""
    counts = [torch.bincount(data.y, minlength=4).double() for data, _ in shards.values()]
    h = torch.stack([own / own.norm() for own in counts])
    affinity = h @ h.T
    degrees = affinity.sum(1)
    return torch.diag(degrees) - affinity, degrees.mean()


def stepped(values, loss, data, pull):
    """Eq. 14: one mirror step on all records; entries are kept away from 0 (Remark 3.2)."""
    c = values["membership.c"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss({**values, "membership.c": c}, data.x, data.y), c)
    moved = c.detach() * torch.exp(-RATE * (slope + pull))
    excess = (moved / moved.sum() - FLOOR).clamp(min=0)
    return {**values, "membership.c": FLOOR + (1 - K * FLOOR) * excess / excess.sum()}


def rounds_by_hand(job, shards, variant, lam, scale, blocks):
    """v, U and c_i of all silos after each round."""
    values, loss, silos = whole.begun(job), loss_of(variant), job.silos
    laplacian, degree = laplacian_of(shards)
    lam = lam / degree if scale == "mean_degree" else lam
    for t in range(job.rounds):
        moving, drawn = blocks(t), job.cohort(t)
        together = torch.stack([values[i]["membership.c"] for i in silos])  # C^t
        pull = 2 * lam * laplacian @ together  # of Eq. 13 at C^t
        if "c" in moving:
            for i in drawn:
                own = pull[silos.index(i)]
                values[i] = stepped(values[i], loss, shards[i][0], own)
        if "theta" not in moving:
            yield values
            continue
        for i in drawn:
            batches = whole.steps(job, shards, i, t, moving.index("theta"))
            parts = ["extractor", "canonical"]
            values[i] = whole.descended(values[i], loss, batches, parts, job.training.lr)  # Eq. 11
        theta = whole.of_parts(values["a"], "extractor", "canonical")
        mean = {name: sum(values[i][name] for i in drawn) / len(drawn) for name in theta}  # Eq. 12
        values = {i: {**values[i], **mean} for i in silos}
        yield values


def check(job, population, variant, lam, scale, blocks=lambda _: ("c", "theta")):
    shards = whole.shards_of(population)
    by_hand = rounds_by_hand(job, shards, variant, lam, scale, blocks)
    for simulation, values in zip(whole.simulated(job, shards), by_hand, strict=True):
        for silo, seen in simulation.look().items():
            whole.check_same(seen.delivered, values[silo])


def options_of(variant, lam, scale, **more):
    """Rates at which memberships move far in six rounds."""
    ours = {"variant": variant, "lam": lam, "lam_scale": scale, "membership_lr": RATE}
    return {**ours, "models": K, "floor": FLOOR, **more}


@pytest.mark.parametrize("population", whole.POPULATIONS.values(), ids=whole.POPULATIONS)
@pytest.mark.parametrize(
    ("variant", "model", "lam", "scale"),
    [
        ("ppfl1", whole.MLP, 0.3, "literal"),
        ("ppfl2", whole.LINEAR, 1.5, "mean_degree"),
    ],
    ids=["ppfl1 with a shared extractor", "ppfl2 on records as they are"],
)
def test_six_silos_are_algorithm_o1(population, variant, model, lam, scale):
    """All silos take part in every round, as in the paper."""
    everyone = {"participation": 1.0}
    job = whole.job_of("ppfl", options_of(variant, lam, scale), model, fields=everyone)
    check(job, population, variant, lam, scale)


@pytest.mark.parametrize("population", whole.POPULATIONS.values(), ids=whole.POPULATIONS)
def test_without_coupling_three_silos_of_six_are_algorithm_o1(population):
    job = whole.job_of("ppfl", options_of("ppfl1", 0.0, "literal"))
    check(job, population, "ppfl1", 0.0, "literal")


@pytest.mark.parametrize("population", whole.POPULATIONS.values(), ids=whole.POPULATIONS)
def test_six_silos_are_algorithm_1_block_by_block(population):
    """Which block a round draws is an input."""
    ours = options_of("ppfl1", 0.3, "literal", schedule="rbcd")
    job = whole.job_of("ppfl", ours, whole.LINEAR, 8, fields={"participation": 1.0})
    method = job.method()
    assert {method.blocks(t) for t in range(8)} == {("c",), ("theta",)}
    check(job, population, "ppfl1", 0.3, "literal", method.blocks)
