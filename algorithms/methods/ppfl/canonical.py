"""PPFL's own modules: K canonical models side by side, the membership vector that mixes them, and
the plain GLM.

A canonical model u_k is a Linear(d, C), or an MLP d → hidden → C with one ReLU. The shapes of an
MLP on 784 inputs with 128 hidden units and ten classes are (784 + 1)·128 + (128 + 1)·10 = 100,480 +
1,290 numbers.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from ...models.build import fill
from ...numerics.streams import Seed

Mixture: TypeAlias = Literal["probabilities", "logits", "parameters"]


class Canonical(nn.ModuleList):
    """K modules of one shape; called with features z [B, d] and a membership c [K] it gives class
    scores [B, C].

    "probabilities": log Σ_k c_k softmax(u_k(z)); "logits": Σ_k c_k u_k(z); "parameters": the module
    whose parameters are Σ_k c_k u_k. Holds parameters only: buffers cannot be mixed.
    """

    def __init__(self, models: list[nn.Module], mixture: Mixture) -> None:
        super().__init__(models)
        self.mixture = mixture
        self.functional = mixture == "parameters"  # no batch passes through the layers themselves

    def forward(self, z: Tensor, c: Tensor) -> Tensor:
        """Class scores [B, C] of the mixture."""
        if self.mixture == "parameters":
            return interpolated(self, z, c)
        # Eq. 7 mixes the answers; for linear models mixed logits would be Eq. 8.
        outputs = torch.stack([model(z) for model in self])  # [K, B, C]
        if self.mixture == "logits":
            return torch.einsum("k,kbc->bc", c, outputs)
        # log Σ_k c_k p_k, computed from logarithms, so that small p_k do not underflow.
        return torch.logsumexp(torch.log_softmax(outputs, -1) + c.log()[:, None, None], 0)


def interpolated(models: nn.ModuleList, z: Tensor, c: Tensor) -> Tensor:
    """Output [B, C] of the one module with parameters Σ_k c_k u_k.

    It can be differentiated by c and by each u_k.
    """
    each = [dict(model.named_parameters()) for model in models]
    # Each parameter is stacked [K, …], and weighted over the first axis.
    mixed = {name: torch.tensordot(c, torch.stack([u[name] for u in each]), 1) for name in each[0]}
    output: Tensor = torch.func.functional_call(models[0], mixed, (z,))
    return output


class Membership(nn.Module):
    """A point c [K] of the simplex, at 1/K first; called without arguments it gives c.

    The mirror rule of ``Optimiser`` keeps it there.
    """

    functional = True  # no batch passes through it

    def __init__(self, models: int) -> None:
        super().__init__()
        # c_i^0 = 1/K, as in section O4.3 of the paper.
        self.c = nn.Parameter(torch.full((models,), 1 / models))

    def forward(self) -> Tensor:
        """The membership vector [K]."""
        return self.c


def canonical(
    models: int,
    width: int,
    classes: int,
    hidden: int | None,
    mixture: Mixture,
    seed: Seed,
    prefix: str,
) -> Canonical:
    """K canonical models, each from its own streams; with ``hidden`` they are MLPs."""
    build: Callable[[], nn.Module]
    if hidden is None:
        build = lambda: nn.Linear(width, classes)  # noqa: E731
    else:
        build = lambda: nn.Sequential(  # noqa: E731
            OrderedDict(
                fc1=nn.Linear(width, hidden), relu=nn.ReLU(), fc2=nn.Linear(hidden, classes)
            )
        )
    with torch.device("meta"):  # construction draws nothing from torch's generator
        made = Canonical([build() for _ in range(models)], mixture)
    # One stream per parameter name: the K models differ, and are the same at every silo.
    fill(made, seed, prefix)
    return made
