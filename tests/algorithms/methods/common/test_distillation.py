import math

import pytest
import torch

from staddle.algorithms.methods.common.losses import divergence


def test_divergence_by_hand():
    """KL((½, ½) ‖ (¼, ¾)) = ½ log 2 + ½ log ⅔; of equal ones nothing."""
    target = torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log()
    own = torch.tensor([[0.25, 0.75], [0.1, 0.9]]).log()
    by_hand = [0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.0]
    assert divergence(target, own).tolist() == pytest.approx(by_hand, abs=1e-6)
