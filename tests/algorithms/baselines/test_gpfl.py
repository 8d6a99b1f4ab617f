"""GPFL against its equations in float64 by hand."""

import pytest
import torch
from support import autograd_oracle as oracle
from support.softmax_oracle import uneven
from support.whole_jobs import trained

from staddle.algorithms.method import initial_state

SHARED = ("extractor", "valve", "embeddings")


def valve(theta, f, condition):
    """Eqs. 1 and 2."""

    def made(name):
        a = theta[f"valve.{name}.weight"] @ condition + theta[f"valve.{name}.bias"]
        return oracle.layer_norm(a.clamp(min=0), theta, f"valve.{name}_norm")

    return ((made("gamma") + 1) * f + made("beta")).clamp(min=0)


def personal(theta, f):
    return oracle.scores(theta, valve(theta, f, theta["frozen.own"]))


def cosines(one, rows):
    lengths = (one**2).sum(1, keepdim=True) ** 0.5 * (rows**2).sum(1) ** 0.5
    return one @ rows.T / lengths


def objective(lam, mu):
    """Eq. 6."""

    def loss(theta, x, y):
        f, frozen = oracle.features(theta, x), theta["frozen.rows"]
        guided = valve(theta, f, sum(frozen) / len(frozen))
        angle = oracle.cross_entropy(cosines(guided, theta["embeddings.rows"]), y)
        apart = [
            ((own - frozen[int(u)]) ** 2).sum() ** 0.5 for own, u in zip(guided, y, strict=True)
        ]
        decayed = [v for n, v in theta.items() if n.startswith(("valve.", "embeddings."))]
        squares = sum((value**2).sum() for value in decayed)
        whole = oracle.cross_entropy(personal(theta, f), y) + angle
        return whole + lam * sum(apart) / len(y) + mu / 2 * squares

    return loss


def delivered(own, common, y):
    """Eq. 0."""
    theta = {**own, **common}
    rows = theta["embeddings.rows"]
    mean = sum(rows[int(u)] for u in y) / len(y)
    return theta | {"frozen.rows": rows, "frozen.own": mean}


def test_rounds_of_some_uneven_silos_are_its_equations():
    options = {"lam": 0.3, "mu": 0.05}
    job, shards = uneven("gpfl", options, {"rounds": 3}, oracle.MLP)
    silos = {silo: oracle.begun(job.method(), silo) for silo in job.silos}
    common, moving = {}, (*SHARED, "classifier")
    for round_ in range(job.rounds):
        cohort, sums = job.cohort(round_), {}
        whole = sum(len(shards[silo][0]) for silo in cohort)
        for silo in cohort:
            theta = delivered(silos[silo], common, shards[silo][0].y)
            loss = objective(**options)
            silos[silo] = oracle.trained(job, shards, silo, round_, theta, loss, moving)
            for name, value in silos[silo].items():
                if name.partition(".")[0] in SHARED:
                    sums[name] = sums.get(name, 0) + len(shards[silo][0]) / whole * value  # (7)
        common = sums
    for silo, seen in trained(job, shards).look().items():
        theta = delivered(silos[silo], common, shards[silo][0].y)
        oracle.check_close(seen.delivered, theta)
        x = shards[silo][1].x
        by_hand = personal(theta, oracle.features(theta, x.double().flatten(1)))
        found = oracle.outputs(job.method(), silo, seen.delivered, x)
        assert torch.allclose(found, by_hand, atol=1e-3)


def test_features_at_their_embedding_are_held_and_move_nothing(make_job):
    """The length of a difference of zero has no slope."""
    method = make_job("gpfl", {"lam": 1.0}).method()
    modules = method.modules("a")
    with torch.no_grad():
        modules["frozen"].rows.zero_()
        for part in ("extractor", "valve"):
            for value in modules[part].parameters():
                value.zero_()
    loss = method.objective(modules, torch.ones(2, 1, 8, 8), torch.tensor([0, 1]), {})
    loss.sum().backward()
    slopes = [v.grad for m in modules.values() for v in m.parameters() if v.grad is not None]
    assert slopes
    assert all(slope.isfinite().all() for slope in slopes)


def test_embeddings_begin_alike_and_with_a_variance_of_one(make_job):
    method = make_job("gpfl", model={"classes": 10}).method()
    one, other = (initial_state(method, silo).parts for silo in "ab")
    rows = one["embeddings"]["rows"]
    assert torch.equal(rows, other["embeddings"]["rows"])
    assert float(rows.var()) == pytest.approx(1, abs=0.1)
    assert torch.equal(one["frozen"]["rows"], rows)
