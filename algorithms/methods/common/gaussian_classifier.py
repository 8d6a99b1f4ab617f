"""Classes as normal distributions of one covariance: estimates, classifier and interpolation.

The equations are those of pFedFDA (algorithms/baselines/pfedfda.py): features z [n, d] with labels
y [n], means [C, d], a covariance [d, d] and priors [C], all in float64.
"""

from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ....errors import LocalError

EPSILON = 1e-4  # ε of Eq. 1, and what each class is given of the priors
GRID = tuple(step / 20 for step in range(21))  # candidates for β
NUMBERS_AT_ONCE = 2**22  # logits under several β, 32 MiB
ALIKE = 1e-9  # cross-entropies that differ by no more are equally good, however they were rounded

Gaussians: TypeAlias = tuple[Tensor, Tensor]  # means [C, d], covariance [d, d]


def priors_of(counts: Tensor) -> Tensor:
    """π [C] of class counts.

    They are float64, positive, and add up to 1; a class without records keeps a small share.
    """
    shares = counts.double() / counts.sum().clamp(min=1) + EPSILON
    return shares / shares.sum()


def linear(means: Tensor, covariance: Tensor, priors: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [C, d] and biases [C] of Eq. 1; LocalError for a covariance that has no inverse.

    ``means`` [C, d] and ``priors`` [C] are float64. Scores of features z [n, d] are z Wᵀ + b.
    """
    # Shrunk towards a multiple of the identity: few records leave a covariance without inverse.
    d = covariance.shape[0]
    shrunk = (1 - EPSILON) * covariance + EPSILON * covariance.trace() / d * torch.eye(
        d, dtype=covariance.dtype
    )
    solved, info = torch.linalg.solve_ex(shrunk, means.T)
    if int(info):
        raise LocalError("pfedfda: a covariance of features has no inverse; raise ridge")
    weight = solved.T
    return weight, priors.log() - (means * weight).sum(1) / 2  # (1)


def estimates(z: Tensor, y: Tensor, means: Tensor, ridge: float) -> Gaussians:
    """Eq. 3; classes without records have the given means.

    The result is float64, from features z [n, d] and labels y [n]. ``ridge`` is ρ.
    """
    counts = torch.bincount(y, minlength=len(means))[:, None]  # [C, 1]
    sums = torch.zeros_like(means).index_add_(0, y, z)
    own = torch.where(counts > 0, sums / counts.clamp(min=1), means)
    apart = z - own[y]
    # At n = 1 the scatter is 0, and n − 1 must not divide it.
    scatter = apart.T @ apart / max(len(y) - 1, 1)
    return own, scatter + ridge * torch.eye(z.shape[1], dtype=z.dtype)  # (3)


def best_beta(
    z: Tensor, y: Tensor, common: Gaussians, priors: Tensor, ridge: float, one: bool
) -> Tensor:
    """Eq. 5 over ``GRID``: β_μ and β_Σ [2], equal with ``one``; zeros if no class has two records.

    Ties go to the smallest β_Σ, and then to the smallest β_μ.
    """
    # Estimates come from one half, and their cross-entropy from the other: no record judges an
    # estimate that it is part of.
    halves = halves_of(y)
    if not bool((halves == 1).any()):
        return torch.zeros(2, dtype=torch.float64)
    tried = [(beta, (beta,) if one else GRID) for beta in GRID]  # β_Σ, and the β_μ next to it
    total = torch.zeros(len(GRID), len(tried[0][1]), dtype=torch.float64)
    for half in (0, 1):
        own, rest = halves == half, halves == 1 - half
        means, covariance = estimates(z[rest], y[rest], common[0], ridge)
        for row, (beta, others) in enumerate(tried):
            between = beta * covariance + (1 - beta) * common[1]  # (4)
            total[row] += losses(z[own], y[own], means, common[0], between, priors, others)
    # ``argmax`` of a mask gives its first True. Rows are in the order of β_Σ, so ties go as said.
    best = int((total <= total.min() + ALIKE).flatten().double().argmax())
    beta, others = tried[best // total.shape[1]]
    return torch.tensor([others[best % total.shape[1]], beta], dtype=torch.float64)  # (5)


def losses(
    z: Tensor,
    y: Tensor,
    own: Tensor,
    common: Tensor,
    covariance: Tensor,
    priors: Tensor,
    betas: tuple[float, ...],
) -> Tensor:
    """The cross-entropy of Eq. 1 by β_μ; its weights are interpolated as its means are."""
    # At one covariance, weights are linear in the means. So logits for each β are interpolated, and
    # need no further product with z.
    (weight, _), (other, _) = linear(own, covariance, priors), linear(common, covariance, priors)
    scores, others = z @ weight.T, z @ other.T  # [n, C]
    found, at_once = [], max(1, NUMBERS_AT_ONCE // scores.numel())
    for start in range(0, len(betas), at_once):
        beta = torch.tensor(betas[start : start + at_once], dtype=z.dtype)[:, None, None]
        # [b, C, d] (4)
        means, mixed = beta * own + (1 - beta) * common, beta * weight + (1 - beta) * other
        bias = priors.log() - (means * mixed).sum(2) / 2  # [b, C]
        logits = beta * scores + (1 - beta) * others + bias[:, None]  # [b, n, C]
        found.append(-logits.log_softmax(2)[:, torch.arange(len(y)), y].mean(1))
    return torch.cat(found)


def halves_of(y: Tensor) -> Tensor:
    """The half [n] of each record, 0 and 1 in turn within a class; -1 if alone in its class.

    Eq. 5 estimates on one half and evaluates on the other.
    """
    member = one_hot(y)  # [n, C]
    place = (member.cumsum(0) * member).sum(1) - 1  # [n]: how many of its class came before
    return torch.where(member.sum(0)[y] > 1, place % 2, -1)
