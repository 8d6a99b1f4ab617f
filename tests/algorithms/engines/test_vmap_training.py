import pytest
import torch
from torch import nn

from staddle.algorithms.course import Optimiser, Stage
from staddle.algorithms.engines.cuda_graphs import AsItIs
from staddle.algorithms.engines.vmap_training import Bench, Silos, clipped_each, train
from staddle.algorithms.training.optimisers import clipped


def test_gradients_are_cut_silo_by_silo():
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(5, *shape, generator=generator) * 3 for shape in ((4, 3), (3,), ())]
    gradients = [
        g * torch.tensor([0, 0.1, 1, 10, 1e20]).reshape(5, *(1,) * (g.ndim - 1)) for g in gradients
    ]
    each = clipped_each(gradients, 2.0)
    for silo in range(5):
        for one, other in zip(each, clipped([g[silo] for g in gradients], 2.0), strict=True):
            assert torch.allclose(one[silo], other, rtol=1e-6)
    assert clipped_each(gradients, None) is gradients


def cross_entropy(parts, x, y, context):
    return nn.functional.cross_entropy(parts["model"](x), y, reduction="none")


@pytest.mark.parametrize("optimiser", [Optimiser(0.1, 0.9, 0.1), Optimiser(0.1, clip=0.5)])
def test_a_silo_whose_numbers_are_none_spoils_no_other(optimiser):
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    values = {"weight": torch.randn(3, 3, 4), "bias": torch.zeros(3, 3)}
    stage = Stage(("model",), 1, cross_entropy, optimiser)

    def after(x):
        made = {"model": {name: tensor.clone() for name, tensor in values.items()}}
        pieces = [[torch.arange(8).numpy()[i::4] for i in range(steps)] for steps in (4, 3, 2)]
        own = [[piece + 8 * silo for piece in batches] for silo, batches in enumerate(pieces)]
        silos = Silos({"model": nn.Linear(4, 3).to("meta")}, made, x.repeat(3, 1), y.repeat(3))
        silos.x[8:16] *= float("inf") if x is broken else 1.0
        return train(silos, stage, {}, own, Bench(AsItIs())).losses, made["model"]

    broken = x.clone()
    (losses, good), (spoilt, bad) = after(x), after(broken)
    assert losses.isfinite().int().tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert spoilt[:, 1].isfinite().sum() == 0
    for silo in (0, 2):
        assert torch.equal(losses[:, silo].nan_to_num(), spoilt[:, silo].nan_to_num())
        assert all(torch.equal(good[name][silo], bad[name][silo]) for name in good)
