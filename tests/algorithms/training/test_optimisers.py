"""Steps of optimisers against torch.optim's, for one silo and for several at once."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from staddle.algorithms.course import Optimiser
from staddle.algorithms.training.optimisers import fresh_memory, move

SHAPES = ((4, 3), (3,), ())
CLASSES = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("momentum", "decay"), [(0, 0), (0.9, 0), (0, 0.01), (0.9, 5e-4)])
def test_sgd_step_is_torchs_sgd_bit_for_bit(momentum, decay, dtype):
    generator = torch.Generator().manual_seed(1)
    ours = [torch.randn(s, generator=generator, dtype=dtype) for s in ((4, 3), (3,))]
    theirs = [nn.Parameter(p.clone()) for p in ours]
    optimiser = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, weight_decay=decay)
    velocity, handed = [], []
    for _ in range(7):
        gradients = [torch.randn(p.shape, generator=generator, dtype=dtype) for p in ours]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        handed += [(g, g.clone()) for g in gradients]
        optimiser.step()
        move(ours, gradients, velocity, Optimiser(0.1, momentum, decay))
    assert all(torch.equal(gradient, copy) for gradient, copy in handed)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def drawn(generator, dtype=torch.float32):
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", ["adam", "adamw"])
@pytest.mark.parametrize(
    ("betas", "eps", "decay"), [((0.9, 0.999), 1e-8, 0), ((0.5, 0.7), 0.1, 0.2)]
)
def test_adam_is_torchs(rule, betas, eps, decay, dtype):
    """Seven steps, gradients from large to tiny, one zero, and one the same all the time."""
    generator = torch.Generator().manual_seed(1)
    ours = drawn(generator, dtype)
    theirs = [nn.Parameter(p.clone()) for p in ours]
    optimiser = CLASSES[rule](theirs, lr=0.1, betas=betas, eps=eps, weight_decay=decay)
    own = Optimiser(0.1, 0, decay, rule=rule, betas=betas, eps=eps)
    memory, handed = [], []
    for step in range(7):
        gradients = [g * 10.0 ** (2 - 2 * step) for g in drawn(generator, dtype)]
        gradients[1].zero_()
        gradients[2].fill_(0.5)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        handed += [(g, g.clone()) for g in gradients]
        optimiser.step()
        move(ours, gradients, memory, own)
    assert all(torch.equal(gradient, copy) for gradient, copy in handed)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12}
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.detach(), **{"atol": 1e-12, **tolerance})


@pytest.mark.parametrize("rule", ["adam", "adamw"])
def test_silos_at_once_each_count_their_own_steps(rule):
    """The second silo has no third step, and the rate is a tensor, as a recorded step reads it."""
    generator = torch.Generator().manual_seed(2)
    own = Optimiser(0.1, 0, 0.05, rule=rule)
    alone = [[p.clone() for p in drawn(generator)] for _ in range(3)]
    together = [torch.stack(column) for column in zip(*alone, strict=True)]
    memories, memory = [[], [], []], fresh_memory(together, own, (3,))
    assert memory[-1].shape == (3,)
    for step in range(5):
        lr = 0.1 / (step + 1)
        gradients = [drawn(generator) for _ in range(3)]
        here = [0, 2] if step == 2 else [0, 1, 2]
        for silo in here:
            move(alone[silo], gradients[silo], memories[silo], replace(own, lr=lr))
        stacked = [
            torch.stack(column) for column in zip(*(gradients[s] for s in here), strict=True)
        ]
        values, moments = [p[here] for p in together], [m[here] for m in memory]
        move(values, stacked, moments, own, torch.tensor(lr, dtype=torch.float64))
        for whole, new in zip([*together, *memory], [*values, *moments], strict=True):
            whole[here] = new
    assert memory[-1].tolist() == [5, 4, 5]
    for silo in range(3):
        for one, other in zip(together, alone[silo], strict=True):
            torch.testing.assert_close(one[silo], other, rtol=1e-5, atol=1e-6)


def test_memory_is_what_the_rule_remembers():
    parameters = drawn(torch.Generator().manual_seed(0))
    assert fresh_memory(parameters, Optimiser(0.1)) == []
    assert fresh_memory(parameters, Optimiser(0.1, 0.9, rule="mirror")) == []
    velocity = fresh_memory(parameters, Optimiser(0.1, 0.9))
    assert [v.shape for v in velocity] == [p.shape for p in parameters]
    assert len(fresh_memory(parameters, Optimiser(0.1, rule="adam"))) == 7
