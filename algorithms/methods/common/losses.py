"""The term that holds a model near another one while it trains.

What one model learns from another's predictions.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...exchange.parts import Tensors


def proximal(strength: float, parameters: Mapping[str, Tensors], context: Tensors) -> Tensor:
    """(strength / 2) ‖θ − c‖² over all parameters θ; ``context`` holds c, as ``centre`` made it."""
    squares = [
        (tensor - context[f"{part}.{name}"]).square().sum()
        for part, tensors in parameters.items()
        for name, tensor in tensors.items()
    ]
    return strength / 2 * torch.stack(squares).sum()


def centre(parts: Mapping[str, Tensors]) -> dict[str, Tensor]:
    """The values of parts, named ``part.tensor``."""
    return {
        f"{part}.{name}": value
        for part, tensors in parts.items()
        for name, value in tensors.items()
    }


def divergence(target: Tensor, logits: Tensor) -> Tensor:
    """KL(target ‖ prediction) by record [B], of logits [B, C].

    No gradient goes through the target.
    """
    aim, own = target.detach().log_softmax(1), logits.log_softmax(1)
    return (aim.exp() * (aim - own)).sum(1)
