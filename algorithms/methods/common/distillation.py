"""What one model learns from another's predictions."""

from torch import Tensor


def divergence(target: Tensor, logits: Tensor) -> Tensor:
    """KL(target ‖ prediction) by record [B], of logits [B, C]; no gradient goes through the target."""
    aim, own = target.detach().log_softmax(1), logits.log_softmax(1)
    return (aim.exp() * (aim - own)).sum(1)
