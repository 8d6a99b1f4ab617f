from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn

from staddle.algorithms.course import Optimiser, Stage
from staddle.algorithms.engines.grouping import architecture, course


def net(width=4, stride=1, act=nn.ReLU, **more):
    layers = {"conv": nn.Conv2d(1, width, 3, stride), "act": act(), "norm": nn.BatchNorm2d(width)}
    layers |= more
    return {"extractor": nn.Sequential(OrderedDict(layers)), "classifier": nn.Linear(width, 2)}


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor(x) if callable(self.factor) else self.factor * x


def test_values_and_modes_do_not_tell_architectures_apart():
    one, other = net(), net()
    other["extractor"].eval()
    other["classifier"].weight.data.zero_()
    assert architecture(one) == architecture(other)
    assert hash(architecture(one)) == hash(architecture(other))
    assert architecture(net(scale=Scaled((2.0, "a", None)))) == architecture(
        net(scale=Scaled((2.0, "a", None)))
    )
    assert architecture(net(scale=Scaled(torch.relu))) == architecture(
        net(scale=Scaled(torch.relu))
    )


@pytest.mark.parametrize(
    "other",
    [
        net(5),
        net(stride=2),  # the same tensors
        net(act=nn.Tanh),
        net(scale=Scaled(2.0)),
        {"extractor": net()["extractor"], "head": net()["classifier"]},
        {**net(), "classifier": net()["classifier"].double()},
        {**net(), "classifier": nn.Linear(4, 2, bias=False)},
    ],
)
def test_what_computes_otherwise_is_another_architecture(other):
    assert architecture(other) != architecture(net())


@pytest.mark.parametrize(
    "made", [lambda: 1.0 + 1e-15, lambda: lambda x: x, lambda: torch.ones(1), lambda: float("nan")]
)
def test_what_may_differ_does(made):
    """Numbers in their last bit; tensors and functions made anew, which may hold anything."""
    given = made()
    assert architecture(net(scale=Scaled(given))) != architecture(net(scale=Scaled(1.0)))
    if not isinstance(given, float):
        assert architecture(net(scale=Scaled(given))) != architecture(net(scale=Scaled(made())))
        assert architecture(net(scale=Scaled(given))) == architecture(net(scale=Scaled(given)))


class Method:
    def loss(self, *_):
        return None

    def penalty(self, *_):
        return None


@dataclass(frozen=True)
class Limits:
    low: float


ONE, OTHER = Method(), Method()


def stage(loss=None, **more):
    context = {"rows": torch.zeros(2, 3), "lam": torch.tensor(0.5)}
    fields = {"trains": ("a",), "epochs": 2, "loss": loss or ONE.loss, "optimiser": Optimiser(0.1)}
    return Stage(**{**fields, **more}, context=context)


def test_stages_of_one_course_are_equal_but_for_the_values_of_their_contexts():
    other = replace(stage(), context={"lam": torch.tensor(0.7), "rows": torch.ones(2, 3)})
    assert course((stage(),)) == course((other,))
    made = [partial(ONE.loss, (1, 2), Limits(0.5), deep=True) for _ in range(2)]
    assert course((stage(made[0]),)) == course((stage(made[1]),))
    assert hash(course((stage(made[0]),))) == hash(course((stage(made[1]),)))


@pytest.mark.parametrize(
    "other",
    [
        stage(OTHER.loss),
        stage(ONE.penalty),
        stage(lambda *_: None),
        stage(partial(ONE.loss, 1)),
        stage(trains=("a", "b")),
        stage(epochs=3),
        stage(optimiser=Optimiser(0.2)),
        stage(optimiser=Optimiser(0.1, floor=0.1)),
        stage(penalty=ONE.penalty),
        stage(full_batch=True),
        stage(reads=()),
        stage(coupled=True),
        replace(stage(), context={"rows": torch.zeros(3, 2), "lam": torch.tensor(0.5)}),
        replace(stage(), context={"rows": torch.zeros(2, 3)}),
        replace(stage(), context={"rows": torch.zeros(2, 3), "lam": torch.tensor(0.5).double()}),
    ],
)
def test_what_trains_otherwise_is_another_course(other):
    assert course((other,)) != course((stage(),))
    assert course((stage(), other)) != course((stage(), stage()))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, True),
        (1, 1.0),
        ((1,), [1]),
        (Limits(1.0), Limits(2.0)),
        (torch.ones(1), torch.ones(1)),
        ("1", 1),
    ],
)
def test_losses_with_other_arguments_are_others(one, other):
    assert course((stage(partial(ONE.loss, one)),)) != course((stage(partial(ONE.loss, other)),))
    assert course((stage(partial(ONE.loss, of=one)),)) != course(
        (stage(partial(ONE.loss, of=other)),)
    )
