"""Losses between two models: a proximal term, and the divergence of their predictions."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...exchange.parts import Tensors


def proximal(strength: float, parameters: Mapping[str, Tensors], context: Tensors) -> Tensor:
    """(strength / 2) ‖θ − c‖² over all parameters θ; ``context`` holds c, as ``centre`` made it.

    Its gradient is strength · (θ − c).
    """
    named = centre(parameters)
    squares = [(tensor - context[name]).square().sum() for name, tensor in named.items()]
    return strength / 2 * torch.stack(squares).sum()


def centre(parts: Mapping[str, Tensors]) -> dict[str, Tensor]:
    """The values of parts, named ``part.tensor``.

    They are not copies: of modules they would change with training, of a state they do not.
    """
    found: dict[str, Tensor] = {}
    for part, tensors in parts.items():
        for name, value in tensors.items():
            found[f"{part}.{name}"] = value
    return found


def divergence(target: Tensor, logits: Tensor) -> Tensor:
    """KL(target ‖ prediction) by record [B], of logits [B, C].

    No gradient goes through the target, so the loss moves only the model of ``logits``: FML and
    FedKD call it once for each of their two models.
    """
    aim, own = target.detach().log_softmax(1), logits.log_softmax(1)
    return (aim.exp() * (aim - own)).sum(1)
