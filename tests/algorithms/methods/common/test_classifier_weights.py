from itertools import combinations

import numpy as np
import pytest
from support.refusals import refused

from staddle.algorithms.methods.common.classifier_weights import best_weights, points_of


def test_eq_6_by_hand():
    """(1 - a)² V_0 + a² (V_1 + D) is least at a = V_0 / (V_0 + V_1 + D).

    Here D = ‖(1, 0) - (0, 1)‖² = 2.
    """
    points, variances = np.eye(2), np.array([1.0, 3.0])
    assert best_weights(points, variances, 0) == pytest.approx([5 / 6, 1 / 6])
    assert best_weights(points, variances, 1) == pytest.approx([3 / 6, 3 / 6])
    for size in (1e-9, 1e9):  # of the features, which is no matter
        assert best_weights(size * points, size**2 * variances, 0) == pytest.approx([5 / 6, 1 / 6])
    assert best_weights(np.ones((3, 1)), np.ones(3), 1) == pytest.approx([1 / 3] * 3)  # all alike
    assert best_weights(1e2 * np.eye(3), np.ones(3), 1).tolist() == [0, 1, 0]  # below 1e-3: dropped
    assert best_weights(np.ones((2, 1)), np.zeros(2), 0).sum() == pytest.approx(1)


@pytest.mark.parametrize("size", [1e3, 1e30, 1e150])
def test_one_silos_numbers_do_not_spoil_those_of_others(size):
    points = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, size]])
    for variances in (np.array([1.0, 3.0, 1.0]), np.array([1.0, 3.0, size**2])):
        assert best_weights(points, variances, 0) == pytest.approx([5 / 6, 1 / 6, 0], abs=1e-5)
        gram = points @ points.T
        assert best_weights(points_of(gram), variances, 0) == pytest.approx(
            [5 / 6, 1 / 6, 0], abs=1e-5
        )


def test_points_have_the_inner_products():
    h = np.random.default_rng(0).normal(size=(4, 2))
    points = points_of(h @ h.T)  # of rank 2, so that rounding leaves some eigenvalues below 0
    assert points @ points.T == pytest.approx(h @ h.T)


def slowly(gram, variances, own):
    """Eq. 6 by trying every set of silos: on it the minimum with Σα = 1 is a linear system.

    The best that is ≥ 0.
    """
    m = len(gram)
    p = np.array(
        [
            [gram[own, own] - gram[own, j] - gram[own, k] + gram[j, k] for k in range(m)]
            for j in range(m)
        ]
    )
    p += np.diag(variances)
    found = []
    for size in range(1, m + 1):
        for chosen in map(list, combinations(range(m), size)):
            alpha = np.zeros(m)
            alpha[chosen] = np.linalg.solve(p[np.ix_(chosen, chosen)], np.ones(size))
            alpha /= alpha.sum()
            if alpha.min() >= -1e-12:
                found.append((alpha @ p @ alpha, alpha))
    return min(found, key=lambda each: each[0])[1]


def test_eq_6_is_that_of_a_slow_search():
    rng = np.random.default_rng(0)
    for m in (2, 3, 5, 6):
        for scale in (1e-3, 1.0, 30.0):
            h, variances = scale * rng.normal(size=(m, 7)), scale**2 * rng.uniform(0.05, 3, m)
            for own in range(m):
                fast = best_weights(points_of(h @ h.T), variances, own)
                slow = slowly(h @ h.T, variances, own)
                assert fast == pytest.approx(slow, abs=2e-3)
                assert fast == pytest.approx(
                    best_weights(h + rng.normal(size=7), variances, own), abs=1e-6
                )


def test_weights_that_are_not_found_are_an_error_of_ours(monkeypatch):
    def endless(*args, **more):
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr("scipy.optimize.nnls", endless)
    with refused(r"no weights for a silo .*: Maximum number of iterations"):
        best_weights(np.eye(3), np.ones(3), 0)
