"""Classes as normal distributions of one covariance: estimates, the linear classifier that follows, an interpolation.

The equations are those of pFedFDA (pfedfda.py): features z [n, d] with labels y [n], means [C, d], a covariance [d, d]
and priors [C], all in float64.
"""

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

EPSILON = 1e-4  # ε of Eq. 1, and what each class is given of the priors
FEWEST = 2  # records of a class, beyond which it has a mean of its own

Gaussians: TypeAlias = tuple[Tensor, Tensor]  # means [C, d], covariance [d, d]


def priors_of(counts: Tensor) -> Tensor:
    """π [C] of class counts."""
    shares = counts.double() / counts.sum().clamp(min=1) + EPSILON
    return shares / shares.sum()


def linear(means: Tensor, covariance: Tensor, priors: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [C, d] and biases [C] of Eq. 1."""
    d = covariance.shape[0]
    shrunk = (1 - EPSILON) * covariance + EPSILON * covariance.trace() / d * torch.eye(d, dtype=covariance.dtype)
    weight = torch.linalg.solve(shrunk, means.T).T
    return weight, priors.log() - (means * weight).sum(1) / 2  # (1)


def estimates(z: Tensor, y: Tensor, means: Tensor, ridge: float) -> Gaussians:
    """Eq. 3; classes of few records have the given means."""
    counts = torch.bincount(y, minlength=len(means))[:, None]  # [C, 1]
    sums = torch.zeros_like(means).index_add_(0, y, z)
    own = torch.where(counts > FEWEST, sums / counts.clamp(min=1), means)
    apart = z - own[y]
    scatter = apart.T @ apart / max(len(y) - 1, 1)
    return own, scatter + ridge * torch.eye(z.shape[1], dtype=z.dtype)  # (3)


def mixed(own: Gaussians, common: Gaussians, beta: Tensor) -> Gaussians:
    """Eq. 4, of β_μ and β_Σ [2]."""
    means, covariance = (b * mine + (1 - b) * theirs for b, mine, theirs in zip(beta, own, common, strict=True))
    return means, covariance  # (4)


def best_beta(z: Tensor, y: Tensor, common: Gaussians, priors: Tensor, ridge: float, one: bool) -> Tensor:
    """Eq. 5: β_μ and β_Σ [2], with ``one`` the same; zeros where no class has two records."""
    halves = halves_of(y)
    folds = [(halves == half, halves == 1 - half) for half in (0, 1)]
    if not bool(folds[1][0].any()):
        return torch.zeros(2, dtype=torch.float64)
    own = [estimates(z[rest], y[rest], common[0], ridge) for _, rest in folds]

    def loss(numbers: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        free = torch.from_numpy(numbers).requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for (half, _), estimated in zip(folds, own, strict=True):
            weight, bias = linear(*mixed(estimated, common, free.expand(2)), priors)
            total = total + cross_entropy(z[half] @ weight.T + bias, y[half])
        (gradient,) = torch.autograd.grad(total, [free])
        return float(total.detach()), gradient.numpy()

    count = 1 if one else 2
    found = minimize(loss, np.full(count, 0.5), jac=True, method="L-BFGS-B", bounds=[(0, 1)] * count)
    return torch.from_numpy(found.x).expand(2).clone()  # (5)


def halves_of(y: Tensor) -> Tensor:
    """Which half [n] each record is of, 0 or 1, of each class in turn; -1 where it is alone in its class."""
    member = one_hot(y)  # [n, C]
    place = (member.cumsum(0) * member).sum(1) - 1  # [n]: how many of its class came before
    return torch.where(member.sum(0)[y] > 1, place % 2, -1)
