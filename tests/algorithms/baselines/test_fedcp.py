"""FedCP against its equations in float64 by hand."""

import pytest
import torch
from support import autograd_oracle as oracle
from support.softmax_oracle import uneven
from support.whole_jobs import trained

from staddle.algorithms.baselines.fedcp import PolicyNetwork, by_record, discrepancy
from staddle.algorithms.method import initial_state

SHARED = ("extractor", "classifier", "policy")


def separated(theta, h):
    """Eqs. 2 to 4."""
    v = theta["vector.values"]
    c = h * v / (v**2).sum() ** 0.5
    a = c @ theta["policy.linear.weight"].T + theta["policy.linear.bias"]
    a = torch.exp(oracle.layer_norm(a, theta, "policy.norm").clamp(min=0))
    common, own = a[:, : len(v)], a[:, len(v) :]
    r = common / (common + own)
    s = own / (common + own)
    return oracle.scores(theta, r * h) + oracle.scores(theta, s * h, "personal")


def mmd(one, other):
    """Pair by pair."""

    def kernel(u, v):
        apart = ((u[:, None] - v) ** 2).sum(2)
        return sum(torch.exp(-apart / (2 * tau)) for tau in (10, 15, 20, 50))

    return (kernel(one, one) + kernel(other, other) - 2 * kernel(one, other)).mean()


def objective(lam):
    """Eq. 5."""

    def loss(theta, x, y):
        h = oracle.features(theta, x)
        apart = mmd(h, oracle.features(theta, x, "delivered"))
        return oracle.cross_entropy(separated(theta, h), y) + lam * apart

    return loss


def delivered(own, common):
    """A silo's values with those of all, what it freezes, and Eq. 1."""
    theta = {**own, **common}
    frozen = {name: value for name, value in theta.items() if name.startswith("extractor.")}
    theta |= {name.replace("extractor", "delivered"): value for name, value in frozen.items()}
    return theta | {"vector.values": sum(theta["personal.weight"])}


def contributed(theta):
    """Eq. 6."""
    sent = {name: value for name, value in theta.items() if name.partition(".")[0] in SHARED}
    for name in ("weight", "bias"):
        both = theta[f"classifier.{name}"] + theta[f"personal.{name}"]
        sent[f"classifier.{name}"] = both / 2
    return sent


@pytest.mark.parametrize("lam", [0.0, 5.0])
def test_rounds_of_some_uneven_silos_are_its_equations(lam):
    job, shards = uneven("fedcp", {"lam": lam}, {"rounds": 3}, oracle.MLP)
    silos = {silo: oracle.begun(job.method(), silo) for silo in job.silos}
    common, moving = {}, ("extractor", "policy", "personal")
    for round_ in range(job.rounds):
        cohort, sums = job.cohort(round_), {}
        whole = sum(len(shards[silo][0]) for silo in cohort)
        for silo in cohort:
            theta = delivered(silos[silo], common)
            theta = oracle.trained(job, shards, silo, round_, theta, objective(lam), moving)
            silos[silo], weight = theta, len(shards[silo][0]) / whole
            for name, value in contributed(theta).items():
                sums[name] = sums.get(name, 0) + weight * value  # (7)
        common = sums
    simulation = trained(job, shards)
    for silo, seen in simulation.look().items():
        theta = delivered(silos[silo], common)
        oracle.check_close(seen.delivered, theta)
        x = shards[silo][1].x
        by_hand = separated(theta, oracle.features(theta, x.double().flatten(1)))
        found = oracle.outputs(job.method(), silo, seen.delivered, x)
        assert torch.allclose(found, by_hand, atol=1e-3)


def test_a_silo_begins_with_its_head_as_that_of_all(make_job):
    state = initial_state(make_job("fedcp").method(), "a").parts
    for name, value in state["classifier"].items():
        assert torch.equal(state["personal"][name], value)
    assert torch.equal(state["vector"]["values"], state["personal"]["weight"].sum(0))


def test_each_position_has_a_policy_and_the_shares_add_up_to_one():
    torch.manual_seed(1)
    network, c = PolicyNetwork(5, torch.float32), torch.randn(2, 5, 3, 4)
    r = network(c)
    assert r.shape == c.shape
    assert torch.allclose(r[1, :, 2, 3], network(c[1:, :, 2, 3])[0], atol=1e-6)
    rest = PolicyNetwork(5, torch.float32)
    order = [*range(5, 10), *range(5)]  # the other half of the softmax
    values = {
        name: value[order] if value.ndim else value for name, value in network.state_dict().items()
    }
    rest.load_state_dict(values)
    assert torch.allclose(r + rest(c), torch.ones_like(r), atol=1e-6)


def test_the_discrepancy_of_equal_features_is_nothing_and_moves_nothing():
    h = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    apart = discrepancy(h, h.detach())
    (slope,) = torch.autograd.grad(apart, h)
    assert apart.item() == pytest.approx(0, abs=1e-6)
    assert slope.abs().max() < 1e-6
    assert discrepancy(h, h + 3).item() > 0.5
    maps = torch.arange(24.0).reshape(1, 2, 3, 4)
    assert by_record(maps).tolist() == [[5.5, 17.5]]
