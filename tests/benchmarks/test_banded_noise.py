import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy


def test_the_error_of_a_small_strategy_by_hand(program):
    # C = [[0.8, 0], [0.6, 1]], its inverse [[1.25, 0], [-0.75, 1]], their sums [1.25, 0], [0.5, 1]
    made = program.banded(torch.tensor([1, 0.75], dtype=torch.float64), 2)
    assert made.flatten().tolist() == pytest.approx([0.8, 0, 0.6, 1])
    assert program.error(made).item() == pytest.approx((1.25**2 + 0.5**2 + 1) / 2)


def test_a_record_s_columns_have_norm_1_and_do_not_overlap(program):
    made = program.strategy(12, 3)
    mine = made[:, 1::3]
    torch.testing.assert_close(mine.T @ mine, torch.eye(4, dtype=torch.float64))
    # less noise in the sums than independent noise leaves
    assert program.error(made) < 0.7 * program.error(program.strategy(12, 1))


def test_rows_of_noise_are_those_of_the_inverse(program):
    plan = program.Plan(epochs=3, q=0.25, bands=3)
    noise = program.Noise(plan, 5, torch.Generator().manual_seed(0))
    rows = np.stack([noise.row().numpy() for _ in range(plan.steps)])
    random = torch.Generator().manual_seed(0)
    fresh = np.stack([torch.randn(5, generator=random).numpy() for _ in range(plan.steps)])
    inverse = np.linalg.inv(program.strategy(12, 3).numpy())
    np.testing.assert_allclose(rows, inverse @ fresh, atol=1e-5)


def test_two_bands_cost_what_half_the_steps_at_twice_the_rate_cost(program):
    once, twice = program.Plan(4, 0.1, 2), program.Plan(4, 0.2, 1)
    assert once.sigma("4", 1e-5) == twice.sigma("4", 1e-5)


def test_clipped_gradients_are_those_of_each_record(program):
    random = torch.Generator().manual_seed(0)
    network = program.Network(6, random)
    x, y = torch.randn(8, 6, generator=random) * 2, torch.arange(8)
    expected = [torch.zeros_like(weight) for weight in network.weights]
    for one, label in zip(x, y, strict=True):
        weights = [weight.clone().requires_grad_() for weight in network.weights]
        logits = torch.tanh(one @ weights[0].T + weights[1]) @ weights[2].T + weights[3]
        found = torch.autograd.grad(cross_entropy(logits, label), weights)
        norm = sum(part.square().sum() for part in found).sqrt()
        for total, part in zip(expected, found, strict=True):
            total.add_(part / norm.clamp(min=1))
    for found, total in zip(network.clipped_sum(x, y), expected, strict=True):
        torch.testing.assert_close(found, total)
