"""One step of each rule by which parameters move, in place; the rules are those of ``Optimiser``.

Parameters may be those of one silo, or [m, …] of several at once: then gradients are clipped silo
by silo (engines/vmap_training.py), and ``count`` of Adam is [m], since a silo that has no batch in
a step stands still. What a rule remembers from step to step is a list of tensors, the *memory*.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..course import Optimiser


def fresh_memory(
    parameters: Sequence[Tensor], optimiser: Optimiser, silos: tuple[int, ...] = ()
) -> list[Tensor]:
    """The memory before the first step, zeros; ``silos`` is (S,) where the parameters are of S."""
    if optimiser.rule in ("adam", "adamw"):
        # First and second moments, and the number of steps, by which both are corrected.
        count = torch.zeros(silos, dtype=torch.float64, device=parameters[0].device)
        return [*map(torch.zeros_like, [*parameters, *parameters]), count]
    if optimiser.rule == "sgd" and optimiser.momentum:
        return list(map(torch.zeros_like, parameters))
    return []


def move(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    memory: list[Tensor],
    optimiser: Optimiser,
    rate: Tensor | None = None,
) -> None:
    """Move the parameters by one step of the optimiser's rule, in place.

    An empty ``memory`` is filled in the first step. ``rate`` [] on the parameters' device replaces
    the optimiser's own: a recorded CUDA graph reads it again in each replay.
    """
    match optimiser.rule:
        case "sgd":
            sgd_step(parameters, gradients, memory, optimiser, rate)
        case "adam" | "adamw":
            if not memory:
                memory.extend(fresh_memory(parameters, optimiser))
            adam_step(parameters, gradients, memory, optimiser, rate)
        case "mirror" | "mirror-double-exponential":
            mirror_step(parameters, gradients, optimiser, rate)


@torch.no_grad()
def sgd_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    velocity: list[Tensor],
    optimiser: Optimiser,
    rate: Tensor | None = None,
) -> None:
    """One step of SGD in place; ``velocity`` is empty before the first step of a stage."""
    # One call for all tensors: on a GPU the calls, not the arithmetic, take the time.
    moved, updates = list(parameters), list(gradients)
    if optimiser.weight_decay:
        updates = list(torch._foreach_add(updates, moved, alpha=optimiser.weight_decay))  # noqa: SLF001 g + weight_decay·θ
    if optimiser.momentum:
        if velocity:
            torch._foreach_mul_(velocity, optimiser.momentum)
            torch._foreach_add_(velocity, updates)  # v ← momentum·v + g
        else:
            velocity.extend(update.clone() for update in updates)
        updates = velocity

    if rate is None:
        torch._foreach_add_(moved, updates, alpha=-optimiser.lr)  # θ ← θ − lr·v
    else:
        torch._foreach_sub_(moved, torch._foreach_mul(updates, rate.to(moved[0].dtype)))  # noqa: SLF001 as above

    if optimiser.within is not None:
        # For weights that must stay in a range, such as FedALA's in 0 … 1.
        least, most = optimiser.within
        torch._foreach_clamp_min_(moved, least)
        torch._foreach_clamp_max_(moved, most)


def clipped(gradients: Sequence[Tensor], limit: float | None) -> Sequence[Tensor]:
    """The gradients, scaled down together where their common Euclidean norm is above ``limit``.

    The norm is computed in float64. Without a ``limit`` they stay as they are.
    """
    if limit is None:
        return gradients
    norm = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()
    # no number of the host, which would wait for the device
    factor = torch.where(norm <= limit, 1.0, limit / norm)
    return [gradient * factor.to(gradient.dtype) for gradient in gradients]


@torch.no_grad()
def mirror_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    optimiser: Optimiser,
    rate: Tensor | None = None,
) -> None:
    """One entropic mirror step in place on points of a simplex (last axis); they stay on it.

    θ ← θ·exp(−lr·g) / Σ. Then entries below ``floor`` are raised to it, since an exact zero never
    recovers, and what is above the floor is scaled so that the sum is one. ``rate`` is as in
    ``move``.
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        lr = optimiser.lr if rate is None else rate
        descent = -lr * gradient.double()
        # The authors' code of PPFL exponentiates twice: c·exp(exp(−lr·g)).
        if optimiser.rule == "mirror-double-exponential":
            descent = descent.exp()
        # ``softmax`` of logarithms divides by the sum without overflow.
        point = torch.softmax(parameter.double().log() + descent, dim=-1)
        above = (point - optimiser.floor).clamp(min=0)
        free = 1 - optimiser.floor * point.shape[-1]
        parameter.copy_(optimiser.floor + above * (free / above.sum(-1, keepdim=True)))


@torch.no_grad()
def adam_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    memory: Sequence[Tensor],
    optimiser: Optimiser,
    rate: Tensor | None = None,
) -> None:
    """One step of Adam in place (Kingma and Ba, ICLR 2015, Algorithm 1), as torch.optim has it.

    ``adamw`` decays weights apart from the gradient (Loshchilov and Hutter, ICLR 2019). ``memory``
    is that of ``fresh_memory``.
    """
    tensors = len(parameters)
    first, second, count = list(memory[:tensors]), list(memory[tensors:-1]), memory[-1]
    moved, updates = list(parameters), list(gradients)
    lr = optimiser.lr if rate is None else rate
    beta1, beta2 = optimiser.betas
    if optimiser.weight_decay and optimiser.rule == "adam":
        updates = list(torch._foreach_add(updates, moved, alpha=optimiser.weight_decay))  # noqa: SLF001 g + weight_decay·θ
    elif optimiser.weight_decay:
        kept = 1 - lr * optimiser.weight_decay
        torch._foreach_mul_(moved, kept if isinstance(kept, float) else _like(kept, moved))

    torch._foreach_lerp_(first, updates, 1 - beta1)  # m ← β₁·m + (1 − β₁)·g
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, updates, updates, 1 - beta2)  # v ← β₂·v + (1 − β₂)·g²

    # Corrections of both moments, which began at zero; [] or [m].
    count.add_(1)
    small, large = 1 - beta1**count, 1 - beta2**count
    divisors = list(torch._foreach_sqrt(second))  # noqa: SLF001 as above
    torch._foreach_div_(divisors, _like(large.sqrt(), divisors))
    torch._foreach_add_(divisors, optimiser.eps)
    steps = list(torch._foreach_div(first, divisors))  # noqa: SLF001 as above
    torch._foreach_mul_(steps, _like(lr / small, steps))
    torch._foreach_sub_(moved, steps)


def _like(factor: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A factor [] or [m] for each tensor, in its dtype and on its device, to be broadcast."""
    return [
        factor.to(tensor).view(-1, *[1] * (tensor.ndim - 1)) if factor.ndim else factor.to(tensor)
        for tensor in tensors
    ]
