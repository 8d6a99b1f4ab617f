"""Layers compute with pieces of weights what they compute with the weights."""

import pytest
import torch
from support.pieces import Played
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, vmap

from staddle.algorithms.numerics.ranks import ALONE
from staddle.algorithms.numerics.sharded_weight import LEAST, ShardedWeight, sharded

LAYERS = {
    "linear": (nn.Linear(200, 97), (5, 7, 200)),
    "linear without bias": (nn.Linear(200, 97, bias=False), (5, 200)),
    "convolution": (nn.Conv1d(60, 70, 5, padding=2), (3, 60, 11)),
    "image": (nn.Conv2d(40, 50, 3, stride=2), (3, 40, 9, 9)),
    "tokens": (nn.Embedding(400, 50), (4, 11)),
}


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def computed(layer, weight, x):
    """Output and the gradient of what came in, which went through a small layer before."""
    adapter = torch.full(x.shape[-1:], 1.5, requires_grad=True)
    come = x.long().abs() if isinstance(layer, nn.Embedding) else x * adapter
    out = functional_call(layer, {"weight": weight}, (come,)).float() * adapter.sum()
    return out, *torch.autograd.grad(out.square().sum(), adapter)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_the_same_bits(name, bf16):
    """Also its gradient, and where layers compute in bfloat16."""
    layer, shape = LAYERS[name]
    layer.requires_grad_(False)
    ranks, x = Played(rank=1), drawn(*shape)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False):
        expected = computed(layer, layer.weight.detach(), x)
        found = computed(layer, ranks.shard(layer.weight), x)
    assert all(map(torch.equal, found, expected))
    assert ranks.numbers


def test_nothing_keeps_a_whole_weight_for_the_backward_pass():
    ranks, kept = Played(), []
    weight = ranks.shard(drawn(200, 97))
    x = drawn(5, 97).requires_grad_()
    with saved_tensors_hooks(lambda own: kept.append(own) or own, lambda own: own):
        out = nn.functional.linear(x, weight)
    assert [type(own) for own in kept if own.numel() == weight.numel()] == [ShardedWeight]
    assert ranks.numbers == [1]
    out.sum().backward()
    assert ranks.numbers == [1, 1]


def test_a_piece_is_an_equal_share():
    """60,000 numbers and one by three: zeros fill up the last piece."""
    weight = drawn(60_001)
    pieces = [Played(rank).shard(weight).piece.values for rank in range(3)]
    assert [len(own) for own in pieces] == [20_001] * 3
    assert torch.equal(torch.cat(pieces)[:60_001], weight)
    assert torch.cat(pieces)[60_001:].tolist() == [0, 0]


def test_a_small_weight_and_one_of_a_process_alone_stay_whole():
    """They are copies: of mapped files, which end with the order."""
    small = drawn(LEAST - 1)
    for found in (Played().shard(small), sharded(small, ALONE, 1)):
        assert type(found) is torch.Tensor
        assert torch.equal(found, small)
        assert found.data_ptr() != small.data_ptr()


def test_gradients_record_by_record_go_through():
    """As of methods that differentiate by ``torch.func``."""
    weight, adapter, x = drawn(150, 150), drawn(150, 150), drawn(4, 150)

    def loss(adapter, x, weight):
        return nn.functional.linear(x @ adapter, weight).square().sum()

    each = vmap(grad(loss), (None, 0, None))
    assert torch.equal(each(adapter, x, Played().shard(weight)), each(adapter, x, weight))


def test_views_and_types_stay_in_pieces():
    weight = drawn(150, 151)
    found = Played().shard(weight)
    for own in (found.T, found.detach(), found.double(), found.to("cpu", copy=True), found[3:]):
        assert isinstance(own, ShardedWeight)
        assert len(own.piece.values) == 150 * 151 / 3
    assert torch.equal(found.T[:, 3:].double() + 0, weight.T[:, 3:].double())
    assert torch.equal(found.split(100)[1], weight[100:])


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.mul_(2),
        lambda weight: torch._foreach_mul_([weight], 2),
        lambda weight: torch.mul(drawn(150, 150), 2, out=weight),
    ],
)
def test_nobody_writes_to_a_piece(write):
    with pytest.raises(TypeError, match="would write to a weight that stands still"):
        write(Played().shard(drawn(150, 150)))


def test_what_is_computed_from_a_piece_is_written_elsewhere():
    ranks, weight, found = Played(), drawn(150, 150), torch.empty(150, 150)
    torch.mul(ranks.shard(weight), 2, out=found)
    assert torch.equal(found, 2 * weight)
