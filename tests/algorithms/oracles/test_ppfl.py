"""PPFL, rounds of the whole method: Algorithms 1 and O1 of its paper in float64.

The Laplacian is the dense one over silos, where the package has sums over classes.
"""

import pytest
import torch
from support import whole_methods as whole

K, FLOOR, RATE = 3, 0.05, 2.0
HIDDEN = {"canonical": "mlp", "hidden": 12}


def answer(u, z):
    """u_k(z): one linear layer, or two with a ReLU between them."""
    if "fc1.weight" in u:
        hidden = (z @ u["fc1.weight"].T + u["fc1.bias"]).clamp(min=0)
        return hidden @ u["fc2.weight"].T + u["fc2.bias"]
    return z @ u["weight"].T + u["bias"]


def scores(values, x, mixture):
    """Log-probabilities of Eq. 7, the logits of its deep form, or those of Eq. 8."""
    z, c = whole.features(values, x), values["membership.c"]
    models = []
    for k in range(K):
        begin = f"canonical.{k}."
        names = [name for name in values if name.startswith(begin)]
        models.append({name.removeprefix(begin): values[name] for name in names})
    if mixture == "parameters":
        u = {name: sum(c[k] * models[k][name] for k in range(K)) for name in models[0]}
        return answer(u, z)
    answers = [answer(u, z) for u in models]
    if mixture == "logits":
        return sum(c[k] * answers[k] for k in range(K))
    return torch.log(sum(c[k] * torch.softmax(answers[k], 1) for k in range(K)))


def loss_of(mixture):
    """Logarithms of probabilities stay as they are in a cross-entropy: they are normalised."""
    return lambda values, x, y: whole.cross_entropies(scores(values, x, mixture), y).mean()


def affinity_of(shards):
    """W of the cosines of label frequencies, and the degrees, D = diag(W 1)."""
    counts = [torch.bincount(data.y, minlength=4).double() for data, _ in shards.values()]
    h = torch.stack([own / own.norm() for own in counts])
    affinity = h @ h.T
    return affinity, affinity.sum(1)


def stepped(values, loss, drawn, rate, degree, others):
    """Eq. 14 on the gradient of Eq. 13, batch by batch; entries are kept away from 0 (Remark 3.2).

    ``degree`` is λ d_i, ``others`` λ Σ_j w_ij c_j^t; C^t stays until all of a round have stepped.
    """
    point = values["membership.c"]
    for x, y in drawn:
        c = point.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss({**values, "membership.c": c}, x, y), c)
        moved = point * torch.exp(-rate * (slope + 2 * (degree * point - others)))
        excess = (moved / moved.sum() - FLOOR).clamp(min=0)
        point = FLOOR + (1 - K * FLOOR) * excess / excess.sum()
    return {**values, "membership.c": point}


def rounds_by_hand(job, shards, form, blocks):
    """v, U and c_i of all silos after each round."""
    values, silos = whole.begun(job), job.silos
    by_variant = {"ppfl1": form.get("mixture", "probabilities"), "ppfl2": "parameters"}
    loss, training = loss_of(by_variant[form["variant"]]), job.training
    affinity, degrees = affinity_of(shards)
    lam = form["lam"] / (degrees.mean() if form["lam_scale"] == "mean_degree" else 1)
    for t in range(job.rounds):
        moving, drawn = blocks(t), job.cohort(t)
        together = torch.stack([values[i]["membership.c"] for i in silos])  # C^t
        others = affinity @ together
        for i in drawn if "c" in moving else ():
            steps = [(shards[i][0].x, shards[i][0].y)]
            if form.get("membership_batches"):
                steps = whole.steps(job, shards, i, t, moving.index("c"))
            n, rate = silos.index(i), form["membership_lr"]
            values[i] = stepped(values[i], loss, steps, rate, lam * degrees[n], lam * others[n])
        if "theta" not in moving:
            yield values
            continue
        for i in drawn:
            batches = whole.steps(job, shards, i, t, moving.index("theta"))
            ours = (["extractor", "canonical"], training.lr, training.momentum)
            values[i] = whole.descended(values[i], loss, batches, *ours, training.weight_decay)
        theta = whole.of_parts(values["a"], "extractor", "canonical")
        mean = {name: sum(values[i][name] for i in drawn) / len(drawn) for name in theta}  # Eq. 12
        values = {i: {**values[i], **mean} for i in silos}
        yield values


def check(population, form, model=whole.MLP, rounds=6, blocks=None, **training):
    """Memberships move far in six rounds at the rates of ``form``."""
    ours = {"models": K, "floor": FLOOR, "membership_lr": RATE, "lam_scale": "literal", **form}
    # where λ is positive all silos take part in every round, as in the paper
    training["fields"] = {"participation": 1.0 if form["lam"] else 0.5}
    job, shards = whole.job_of("ppfl", ours, model, rounds, **training), whole.shards_of(population)
    by_hand = rounds_by_hand(job, shards, ours, blocks or (lambda _: ("c", "theta")))
    for simulation, values in zip(whole.simulated(job, shards), by_hand, strict=True):
        for silo, seen in simulation.look().items():
            whole.check_same(seen.delivered, values[silo])


@pytest.mark.parametrize("population", whole.POPULATIONS.values(), ids=whole.POPULATIONS)
@pytest.mark.parametrize(
    ("form", "model"),
    [
        ({"variant": "ppfl1", "lam": 0.3}, whole.MLP),
        ({"variant": "ppfl2", "lam": 1.5, "lam_scale": "mean_degree"}, whole.LINEAR),
    ],
    ids=["ppfl1 with a shared extractor", "ppfl2 on records as they are"],
)
def test_six_silos_are_algorithm_o1(population, form, model):
    check(population, form, model)


@pytest.mark.parametrize("population", whole.POPULATIONS.values(), ids=whole.POPULATIONS)
def test_without_coupling_three_silos_of_six_are_algorithm_o1(population):
    check(population, {"variant": "ppfl1", "lam": 0.0})


@pytest.mark.parametrize("population", whole.POPULATIONS.values(), ids=whole.POPULATIONS)
def test_six_silos_are_algorithm_1_block_by_block(population):
    """Which block a round draws is an input."""
    form = {"variant": "ppfl1", "lam": 0.3, "schedule": "rbcd"}
    blocks = whole.job_of("ppfl", form, fields={"participation": 1.0}).method().blocks
    assert {blocks(t) for t in range(8)} == {("c",), ("theta",)}
    check(population, form, whole.LINEAR, 8, blocks)


@pytest.mark.parametrize(
    ("form", "model"),
    [
        ({"variant": "ppfl1", "lam": 0.3}, whole.LINEAR),
        ({"variant": "ppfl1", "lam": 0.0, "mixture": "logits"}, whole.MLP),
        ({"variant": "ppfl1", "lam": 0.3, "mixture": "logits", **HIDDEN}, whole.LINEAR),
        ({"variant": "ppfl2", "lam": 0.3, **HIDDEN}, whole.LINEAR),
    ],
    ids=["synthetic", "three silos on logits", "perceptrons on logits", "perceptrons by ppfl2"],
)
def test_the_authors_order_and_batches_are_their_code(form, model):
    """θ before c in each round, both by epochs of batches, on the paper's L and by one exp.

    The code's c step of a round is the first of the next one here, and the last one is left out.
    """
    code = {"schedule": "theta_then_c", "membership_batches": True, "membership_lr": 0.5}
    blocks = lambda t: ("c", "theta") if t else ("theta",)
    training = {"momentum": 0.9, "weight_decay": 5e-4}
    check(whole.UNEVEN, {**code, **form}, model, 4, blocks, **training)
