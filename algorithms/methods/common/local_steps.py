"""What a silo's steps of SGD make of its gradients, for methods that divide by them.

After τ steps of momentum ρ and learning rate η a model has moved by −η Σ_k a_k g_k, where g_k is
the gradient of step k, with weight decay, clip and penalty, and

    a_k = (1 − ρ^{τ−k}) / (1 − ρ),   k = 0 … τ − 1

so by η ‖a‖₁ times a mean of gradients (Wang et al., NeurIPS 2020, section 4).
"""

from ....errors import LocalError
from ...course import Facts
from ...method import Setting


def check_sgd(method: str, setting: Setting) -> None:
    """LocalError where the job's optimiser is not SGD, whose steps alone are sums of gradients."""
    if setting.optimiser.rule != "sgd":
        raise LocalError(
            f"{method} divides a silo's update by its steps, which add up gradients for SGD alone;"
            f" training.optimiser = {setting.optimiser.rule!r}: write"
            ' training.optimiser = "sgd", or choose fedavg'
        )


def gradients_in(setting: Setting, facts: Facts) -> float:
    """‖a‖₁ of a round's training, the number of gradients that it adds up.

    It is the number of steps where the job has no momentum.
    """
    steps, momentum = setting.epochs * facts.steps, setting.optimiser.momentum
    # Σ (1 − ρ^j) / (1 − ρ) over j = 1 … τ
    powers = momentum * (1 - momentum**steps) / (1 - momentum)
    return (steps - powers) / (1 - momentum)
