"""By hand on the model of two_rows.py; batch norm by differences."""

from math import log

import pytest
import torch
from support.two_row_model import HALF, ONE, line, values_of
from torch import nn
from torch.func import vmap

from staddle.algorithms.methods.common.inner_steps import (
    curvature_at,
    detached,
    gradient_at,
    losses_at,
    point_of,
    sloped,
    stepped,
)
from staddle.algorithms.models.functional import BoundModule
from staddle.algorithms.tasks.classification import Classification

TASK = Classification()


def at(*rows):
    return {"extractor": {}, "classifier": {"weight": torch.tensor(rows)[:, None]}}


def rows_of(point):
    return point["classifier"]["weight"].flatten().tolist()


@pytest.mark.parametrize("form", ["module", "bound"])
def test_losses_gradient_and_curvature_by_hand(form):
    parts = line(5.0, 6.0)
    if form == "bound":
        parts = {
            name: BoundModule(parts[name], values) for name, values in values_of(parts).items()
        }
    assert losses_at(TASK, parts, at(HALF, -HALF), *ONE).tolist() == pytest.approx([log(4 / 3)])
    two = torch.ones(2, 1), torch.tensor([0, 1])
    assert losses_at(TASK, parts, at(HALF, -HALF), *two).tolist() == pytest.approx(
        [log(4 / 3), log(4)]
    )
    assert rows_of(gradient_at(TASK, parts, at(HALF, -HALF), *ONE)) == pytest.approx(
        [-1 / 4, 1 / 4]
    )
    # the mean of -1/4, 3/4
    assert rows_of(gradient_at(TASK, parts, at(HALF, -HALF), *two)) == pytest.approx(
        [1 / 4, -1 / 4]
    )
    assert rows_of(curvature_at(TASK, parts, at(0.0, 0.0), at(3.0, 1.0), *ONE)) == pytest.approx(
        [1 / 2, -1 / 2]
    )
    assert rows_of(point_of(parts)) == [5, 6]


def test_steps_and_slopes():
    assert rows_of(stepped(at(1.0, 2.0), at(4.0, -2.0), 0.5)) == [-1, 3]
    point = at(1.0, 2.0)
    weight = point["classifier"]["weight"].requires_grad_()
    zero = sloped(point, at(7.0, 8.0))
    assert zero.item() == 0
    assert torch.autograd.grad(zero, [weight])[0].flatten().tolist() == [7, 8]
    assert not detached(point)["classifier"]["weight"].requires_grad


def normed():
    torch.manual_seed(0)
    extractor = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten())
    return {"extractor": extractor.double(), "classifier": nn.Linear(8, 3).double()}


def test_gradients_change_no_running_statistics_and_losses_do():
    parts, (x, y) = normed(), (torch.randn(4, 1, 4, 4).double(), torch.tensor([0, 1, 2, 0]))
    buffers = parts["extractor"][1]
    curvature_at(
        TASK, parts, (here := detached(point_of(parts))), gradient_at(TASK, parts, here, x, y), x, y
    )
    assert buffers.running_mean.tolist() == [0, 0]
    losses_at(TASK, parts, here, x, y)
    assert buffers.num_batches_tracked.item() == 1
    assert buffers.running_mean.abs().min() > 0


def test_curvature_through_batch_norm_is_that_of_differences_for_silos_at_once_too():
    parts, (x, y) = normed(), (torch.randn(4, 1, 4, 4).double(), torch.tensor([0, 1, 2, 0]))
    here = detached(point_of(parts))
    way = gradient_at(TASK, parts, here, x, y)

    def flat(point):
        return torch.cat([value.flatten() for of in point.values() for value in of.values()])

    ahead, back = (
        flat(gradient_at(TASK, parts, stepped(here, way, -sign * 1e-5), x, y)) for sign in (1, -1)
    )
    one = flat(curvature_at(TASK, parts, here, way, x, y))
    assert torch.allclose(one, (ahead - back) / 2e-5, atol=1e-8)

    def of_silo(values, x):
        bound = {name: BoundModule(part, values[name]) for name, part in parts.items()}
        at = {name: {key: values[name][key] for key in here[name]} for name in here}
        return curvature_at(TASK, bound, at, way, x, y)

    stacked = {
        name: {k: torch.stack([v.detach()] * 2) for k, v in p.state_dict().items()}
        for name, p in parts.items()
    }
    both = vmap(of_silo)(stacked, torch.stack([x, 2 * x]))
    assert torch.allclose(
        flat({p: {k: v[0] for k, v in of.items()} for p, of in both.items()}), one, atol=1e-12
    )
