"""FedPAC's weights for mixing silos' classifiers (Eq. 6 of algorithms/baselines/fedpac.py)."""

import numpy as np
from numpy.typing import NDArray

from ....errors import LocalError

SMALLEST_WEIGHT = 1e-3


def points_of(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """Points [m, m] with these inner products.

    Row i is the point of silo i. A rotation of all points would do as well: only distances between
    them count.
    """
    # Rounding may have left eigenvalues below 0, which have no root.
    values, vectors = np.linalg.eigh((gram + gram.T) / 2)
    points: NDArray[np.float64] = vectors * np.sqrt(values.clip(min=0))
    return points


def best_weights(
    points: NDArray[np.float64], variances: NDArray[np.float64], own: int
) -> NDArray[np.float64]:
    """α [m] of Eq. 6 for silo ``own``, from points [m, d] in place of the h, and the V [m].

    The objective is ‖Rα‖² with the matrix R of the code. The β ≥ 0 that minimises ‖Rβ‖² + (Σβ - 1)²
    is a multiple of α: for β = s·α the best s leaves ‖Rα‖² / (1 + ‖Rα‖²), which grows with ‖Rα‖².
    So a least-squares problem with β ≥ 0 solves Eq. 6 exactly.
    """
    from scipy.optimize import nnls  # noqa: PLC0415 - a third of a second of import that other methods do not need

    root = np.vstack([np.diag(np.sqrt(variances)), (points[own] - points).T])  # R [m + d, m]
    system = np.vstack([root, np.ones(len(points))])
    try:
        found, _ = nnls(system, np.append(np.zeros(len(root)), 1.0), maxiter=100 * len(points))
    except RuntimeError as error:  # no answer in so many steps
        raise LocalError(f"fedpac: no weights for a silo with these features: {error}") from error
    alpha: NDArray[np.float64] = found / found.sum()
    # As in the authors' code: small weights are dropped, so that unlike silos are not mixed.
    alpha[alpha <= SMALLEST_WEIGHT] = 0
    alpha /= alpha.sum()
    return alpha
