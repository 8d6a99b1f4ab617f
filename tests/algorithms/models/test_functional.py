import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from staddle.algorithms.models.functional import BoundModule, called_with, on_trial, parameters_of


def line(slope, offset):
    module = nn.Linear(1, 1)
    with torch.no_grad():
        module.weight.fill_(slope)
        module.bias.fill_(offset)
    return module


@pytest.fixture(params=["module", "bound"])
def part(request):
    """2x + 1, as a module and as a function of values that stand for a module's own."""
    if request.param == "module":
        return line(2.0, 1.0)
    return BoundModule(
        line(9.0, 9.0), {"weight": torch.tensor([[2.0]]), "bias": torch.tensor([1.0])}
    )


def test_a_part_is_called_with_parameters_that_are_not_its_own(part):
    x = torch.tensor([[3.0]])
    assert part(x).item() == 7
    assert called_with(part, {"weight": torch.tensor([[10.0]])}, x).item() == 31
    expected = {"weight": 2, "bias": 1}
    assert {name: value.item() for name, value in parameters_of(part).items()} == expected
    assert part(x).item() == 7


def test_values_that_are_missing_are_the_modules_own():
    part = BoundModule(line(2.0, 1.0), {"bias": torch.tensor([5.0])})
    expected = {"weight": 2, "bias": 5}
    assert {name: value.item() for name, value in parameters_of(part).items()} == expected


def test_buffers_of_either_form_are_its_own_and_change():
    def fresh():
        module = nn.BatchNorm1d(1, momentum=1.0)
        return module, {name: value.clone() for name, value in module.state_dict().items()}

    x = torch.tensor([[1.0], [3.0]])
    (module, _), (template, values) = fresh(), fresh()
    scaled = {"weight": torch.tensor([2.0])}
    of_module = called_with(module, scaled, x)
    of_bound = called_with(BoundModule(template, values), scaled, x)
    assert torch.equal(of_module, of_bound)
    assert module.running_mean.item() == values["running_mean"].item() == 2
    assert template.running_mean.item() == 0


def test_on_trial_buffers_stay_as_they_are(part):
    module = nn.BatchNorm1d(1, momentum=1.0)
    x = torch.tensor([[1.0], [3.0]])
    values = {name: value.clone() for name, value in module.state_dict().items()}
    for one in (module, BoundModule(nn.BatchNorm1d(1, momentum=1.0), values)):
        assert torch.equal(on_trial(one)(x), module(x))
    assert values["running_mean"].item() == 0
    assert module.num_batches_tracked.item() == 2  # by its own calls
    assert on_trial(part)(torch.tensor([[3.0]])).item() == 7


@pytest.mark.parametrize("order", ["first", "second"])
def test_a_gradient_of_a_gradient_is_the_same_for_modules_and_for_silos_at_once(order):
    """f(w) = (w - 3)²; a step of 0.1 gives v = w - 0.2(w - 3).

    D f(v) / dw = 2(v - 3)·0.8, or without the 0.8.
    """

    def loss(part):
        def inner(parameters):
            return (called_with(part, parameters, torch.ones(1, 1)) - 3).square().sum()

        own = parameters_of(part)
        gradients = grad(inner)(own)
        if order == "first":
            gradients = {name: g.detach() for name, g in gradients.items()}
        return inner({name: value - 0.1 * gradients[name] for name, value in own.items()})

    module = nn.Linear(1, 1, bias=False)
    starts = torch.tensor([[[5.0]], [[1.0]]])
    expected = [
        2 * (w - 0.2 * (w - 3) - 3) * (0.8 if order == "second" else 1.0) for w in (5.0, 1.0)
    ]
    for start, value in zip(starts, expected, strict=True):
        module.weight.data = start.clone()
        (one,) = torch.autograd.grad(loss(module), [module.weight])
        assert one.item() == pytest.approx(value)
    leaves = starts.clone().requires_grad_()
    each = vmap(lambda weight: loss(BoundModule(module, {"weight": weight})))(leaves)
    (gradients,) = torch.autograd.grad(each.sum(), [leaves])
    assert gradients.flatten().tolist() == pytest.approx(expected)


def test_what_is_no_part_of_a_model_is_not_taken_for_one():
    with pytest.raises(TypeError, match="function is not a part of a model"):
        parameters_of(lambda x: x)
    with pytest.raises(TypeError, match="function is not a part of a model"):
        on_trial(lambda x: x)
    with pytest.raises(TypeError, match="function is not a part of a model"):
        called_with(lambda x: x, {}, torch.ones(1))
