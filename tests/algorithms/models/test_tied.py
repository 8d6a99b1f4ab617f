"""Tied weights: one owner, one value, one gradient."""

import copy

import pytest
import torch
from pydantic import ValidationError
from support.engines import check_engines_agree
from support.jobs import make_job, make_shards
from support.refusals import refused
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from staddle.algorithms.course import Optimiser, Stage
from staddle.algorithms.models.build import build
from staddle.algorithms.models.tied import strays, tie
from staddle.algorithms.training.dp_sgd import _by_function, _hookable

TIED = {"name": "tied", "classes": 3, "head": "fc", "input": [1, 8, 8]}


class Net(nn.Module):
    """An embedding whose weight is a linear layer's too, twice."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 5)
        self.inner = nn.Sequential(nn.Linear(5, 9, bias=False), nn.Linear(9, 9))
        self.last = nn.Linear(5, 9, bias=False)
        self.inner[0].weight = self.last.weight = self.words.weight

    def forward(self, x):
        y = self.words(x).mean(1)
        return self.inner(y) + self.last(y)


def nets():
    """The same network as torch has it, and tied."""
    torch.manual_seed(1)
    plain = Net()
    own = copy.deepcopy(plain)
    tie(own, "model 'net'")
    return plain, own


def test_a_tied_parameter_has_one_name_and_computes_the_same():
    plain, own = nets()
    assert list(plain.state_dict()) == [
        "words.weight", "inner.0.weight", "inner.1.weight", "inner.1.bias", "last.weight"
    ]  # fmt: skip
    assert list(own.state_dict()) == ["words.weight", "inner.1.weight", "inner.1.bias"]
    assert dict(own.named_parameters()).keys() == own.state_dict().keys()
    x = torch.arange(8).reshape(4, 2)
    assert torch.equal(plain(x), own(x))
    assert own.last.weight is own.inner[0].weight is own.words.weight
    assert "Linear(in_features=5, out_features=9, bias=False)" in repr(own)


def test_its_gradient_is_the_sum_over_its_uses():
    plain, own = nets()
    x = torch.arange(8).reshape(4, 2)
    for net in (plain, own):
        net(x).square().sum().backward()
    assert torch.equal(plain.words.weight.grad, own.words.weight.grad)


def test_other_values_reach_every_use():
    plain, own = nets()
    x = torch.arange(8).reshape(4, 2)
    values = {name: torch.full_like(tensor, 0.25) for name, tensor in own.state_dict().items()}
    plain.load_state_dict(values, strict=False)
    assert torch.equal(functional_call(own, values, (x,)), plain(x))
    own.load_state_dict(values)
    assert torch.equal(own(x), plain(x))


def test_a_copy_is_tied_to_itself():
    _, own = nets()
    other = copy.deepcopy(own)
    nn.init.zeros_(own.words.weight)
    assert other.last.weight is other.words.weight
    assert not other.words.weight.eq(0).any()


def test_whose_owner_is_elsewhere_is_named():
    _, own = nets()
    assert strays(own) == []
    assert strays(own.inner) == ["0.weight"]
    assert strays(own.last) == ["weight"]
    assert strays(own.words) == []


class Borrowing(nn.Module):
    """A layer that stands here, and within another layer too."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.none = nn.Linear(5, 5), nn.Linear(5, 2), None
        self.outer = nn.Module()
        self.outer.inner = self.first
        self.register_module("unused", None)
        self.outer.register_module("unused", None)

    def forward(self, x):
        return self.last(self.outer.inner(self.first(x)))


def test_a_layer_in_two_places_stays_in_the_first():
    plain = Borrowing()
    own = copy.deepcopy(plain)
    tie(own, "model 'net'")
    assert list(plain.state_dict())[-2:] == ["outer.inner.weight", "outer.inner.bias"]
    assert list(own.state_dict()) == ["first.weight", "first.bias", "last.weight", "last.bias"]
    x, other = torch.ones(3, 5), copy.deepcopy(own)
    assert other.outer.inner is other.first is not own.first
    values = {name: torch.full_like(tensor, 0.25) for name, tensor in own.state_dict().items()}
    plain.load_state_dict(values, strict=False)
    assert torch.equal(functional_call(other, values, (x,)), plain(x))
    assert strays(own) == []
    assert strays(own.outer) == ["inner"]


def test_layers_of_a_list_stay_where_they_are():
    """The list goes through them."""
    layer = nn.Linear(5, 5)
    net = nn.Sequential(layer, layer)
    tie(net, "model 'net'")
    assert len(net) == 2


def test_a_recurrent_layer_may_own_and_not_borrow():
    net = nn.ModuleList([nn.GRU(3, 4), nn.GRU(3, 4)])
    net[1].weight_hh_l0 = net[0].weight_hh_l0
    with refused(
        "model 'net': recurrent layer '1' shares 'weight_hh_l0' with another layer, which do"
    ):
        tie(net, "model 'net'")


def test_it_begins_once_and_crosses_once():
    job = make_job("fedavg", model=TIED)
    names = [
        tensor["name"]
        for part in job.document()["schema"][0]["up"]
        for tensor in part["tensors"]
        if "weight" in tensor["name"]
    ]
    assert [name for name in names if "two" in name] == []
    assert len([name for name in names if "one" in name]) == 1
    # as a linear layer of that name begins
    one = build(job.model, 7)["extractor"].one.weight
    assert one.abs().max() <= 64**-0.5


def test_a_layer_in_two_places_crosses_once():
    job = make_job("fedavg", model={**TIED, "name": "twice"})
    names = [tensor["name"] for tensor in job.document()["schema"][0]["up"][0]["tensors"]]
    assert [name for name in names if "one" in name or "two" in name] == [
        "extractor.one.weight", "extractor.one.bias"
    ]  # fmt: skip


def test_parts_that_would_share_are_one_with_all_of_it_in_the_head():
    """Such as an embedding that is the output layer's weight too."""
    shared = {**TIED, "classes": 64, "options": {"across": True}}
    with pytest.raises(ValidationError, match=r"in model\.head all layers that share it, or none"):
        make_job("fedavg", model=shared)
    job = make_job("fedavg", model={**shared, "input": [64], "head": ["one", "two", "fc"]})
    parts = build(job.model, 7)
    assert list(parts["classifier"].state_dict()) == [
        "one.weight", "one.bias", "two.weight", "two.bias", "fc.bias"
    ]  # fmt: skip
    assert not parts["extractor"].state_dict()


@pytest.mark.parametrize("name", ["tied", "twice"])
@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedssa", "pfedsim"])
def test_silos_train_it_alone_and_at_once(method, name):
    job = make_job(method, model={**TIED, "name": name}, rounds=2)
    check_engines_agree(job, make_shards(job))


def test_a_private_job_clips_its_whole_gradient():
    """Hooks see a layer's own parameters alone, and one of another would be left out."""
    _, own = nets()
    parts = {"extractor": own.inner[:1], "classifier": nn.Linear(9, 3)}
    parts["extractor"].insert(0, nn.Flatten())
    # as in Net: the linear layer has no parameter of its own
    parts["extractor"].insert(0, own.words)
    x, y = torch.arange(6).reshape(6, 1), torch.tensor([0, 1, 2, 0, 1, 2])
    stage = Stage(("extractor", "classifier"), 1, cross_entropy, Optimiser(1.0))
    assert not _hookable(parts, stage)
    _, found = _by_function(parts, stage)(x, y)
    assert [parameter.shape for parameter in chain_of(parts)] == [(9, 5), (3, 9), (3,)]
    cross_entropy(parts, x, y, {}).sum().backward()
    for each, parameter in zip(found, chain_of(parts), strict=True):
        torch.testing.assert_close(each.sum(0), parameter.grad)


def cross_entropy(parts, x, y, _):
    return functional.cross_entropy(parts["classifier"](parts["extractor"](x)), y, reduction="none")


def chain_of(parts):
    return [parameter for module in parts.values() for parameter in module.parameters()]
