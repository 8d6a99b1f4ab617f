import math

import pytest
import torch
from torch.distributions import MultivariateNormal
from torch.nn.functional import cross_entropy

from staddle.algorithms.methods.common import gaussian_classifier
from staddle.algorithms.methods.common.gaussian_classifier import (
    GRID,
    best_beta,
    estimates,
    halves_of,
    linear,
    priors_of,
)


def drawn(n, seed=0, classes=3, d=4):
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=rng)
    means = 2 * torch.randn(classes, d, generator=rng, dtype=torch.float64)
    return means[y] + torch.randn(n, d, generator=rng, dtype=torch.float64), y, means


def test_priors_by_hand():
    """3/4, 1/4 and 0, each with 1e-4 more, are 1.0003 together."""
    found = priors_of(torch.tensor([3, 1, 0]))
    assert found.tolist() == pytest.approx([0.7501 / 1.0003, 0.2501 / 1.0003, 0.0001 / 1.0003])
    assert priors_of(torch.tensor([0, 0])).tolist() == [0.5, 0.5]


def test_eq_1_by_hand():
    """Σ = 2 I stays as it is: w = μ / 2, b = log ½ - |μ|² / 4."""
    means = torch.tensor([[2.0, 0.0], [2.0, 4.0]]).double()
    weight, bias = linear(means, 2 * torch.eye(2).double(), torch.tensor([0.5, 0.5]).double())
    assert weight.tolist() == [[1, 0], [1, 2]]
    assert bias.tolist() == pytest.approx([math.log(0.5) - 1, math.log(0.5) - 5])


def test_eq_1_is_the_posterior_of_normal_classes():
    z, _, means = drawn(6)
    root = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    covariance, priors = root @ root.T + torch.eye(4), torch.tensor([0.2, 0.3, 0.5]).double()
    weight, bias = linear(means, covariance, priors)
    shrunk = (1 - 1e-4) * covariance + 1e-4 * covariance.trace() / 4 * torch.eye(4)
    joint = (
        torch.stack([MultivariateNormal(mean, shrunk).log_prob(z) for mean in means], dim=1)
        + priors.log()
    )
    assert torch.allclose((z @ weight.T + bias).softmax(1), joint.softmax(1))


def test_a_covariance_without_an_inverse_is_shrunk():
    weight, _ = linear(
        torch.ones(2, 3).double(),
        torch.diag(torch.tensor([3.0, 0, 0]).double()),
        torch.full((2,), 0.5),
    )
    assert bool(weight.isfinite().all())
    assert weight[0, 1].item() == pytest.approx(1e4)


def test_eq_3_by_hand():
    """Means 1 and 5, and the common 9 of a class of none.

    Scatter 1 + 1 + 0, over 2, and a ridge of 0.5.
    """
    z, y = torch.tensor([[0.0], [2.0], [5.0]]).double(), torch.tensor([0, 0, 1])
    means, covariance = estimates(z, y, torch.full((3, 1), 9.0).double(), 0.5)
    assert means.tolist() == [[1], [5], [9]]
    assert covariance.tolist() == [[1.5]]
    # of one record there is none but the ridge
    assert estimates(z[:1], y[:1], means, 2.0)[1].tolist() == [[2]]


def test_halves_by_hand():
    assert halves_of(torch.tensor([2, 0, 2, 2, 1, 0, 2])).tolist() == [0, 0, 1, 0, -1, 1, 1]


def slowly(z, y, common, priors, ridge):
    """Eq. 5 with each β tried as Eq. 4 has it."""
    halves, found = halves_of(y), {}
    for first in GRID:
        for second in GRID:
            total = 0.0
            for half in (0, 1):
                own, rest = halves == half, halves == 1 - half
                means, covariance = estimates(z[rest], y[rest], common[0], ridge)
                mixed = first * means + (1 - first) * common[0]
                weight, bias = linear(mixed, second * covariance + (1 - second) * common[1], priors)
                total += float(cross_entropy(z[own] @ weight.T + bias, y[own]))
            found[first, second] = total
    return found


@pytest.mark.parametrize("room", [1, 300, 10**6])
def test_eq_5_is_that_of_a_slow_search(monkeypatch, room):
    monkeypatch.setattr(gaussian_classifier, "NUMBERS_AT_ONCE", room)
    z, y, means = drawn(24)
    common = (means + 0.7, 3 * torch.eye(4).double())
    priors = priors_of(torch.bincount(y, minlength=3))
    found = slowly(z, y, common, priors, 1.0)
    two = tuple(best_beta(z, y, common, priors, 1.0, one=False).tolist())
    assert found[two] == pytest.approx(min(found.values()), abs=1e-8)
    assert 0 < two[0] < 1
    first, second = best_beta(z, y, common, priors, 1.0, one=True).tolist()
    assert first == second
    assert found[first, second] == pytest.approx(min(found[beta, beta] for beta in GRID), abs=1e-8)


def test_a_silo_trusts_its_own_records_where_the_others_are_wrong():
    z, y, means = drawn(40)
    priors = priors_of(torch.bincount(y, minlength=3))
    assert best_beta(z, y, (-means, torch.eye(4).double()), priors, 0.1, one=False)[0] == 1
    # of each class two, one in each half
    few = torch.cat([torch.nonzero(y == label)[:2, 0] for label in range(3)])
    assert best_beta(z[few], y[few], (means, torch.eye(4).double()), priors, 0.1, one=False)[0] < 1


def test_without_two_records_of_a_class_nothing_is_its_own():
    z, y, means = drawn(8)
    alone = torch.stack([torch.nonzero(y == label)[0, 0] for label in range(3)])
    found = best_beta(
        z[alone],
        y[alone],
        (means, torch.eye(4).double()),
        torch.full((3,), 1 / 3).double(),
        1.0,
        one=False,
    )
    assert found.tolist() == [0, 0]


def test_of_equally_good_ones_the_smallest_is_taken():
    """One class alone: with a prior of almost one its cross-entropy is the same for all."""
    z, y = torch.zeros(4, 1).double(), torch.zeros(4, dtype=torch.int64)
    common = (torch.tensor([[0.0], [1e3]]).double(), torch.eye(1).double())
    assert best_beta(
        z, y, common, torch.tensor([1.0, 1e-12]).double(), 1.0, one=False
    ).tolist() == [0, 0]
