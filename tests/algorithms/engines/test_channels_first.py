import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state

from staddle.algorithms.engines.convolutions import prepare
from staddle.algorithms.engines.stacked_layers import over_silos
from staddle.algorithms.models.build import ModelOptions, build
from staddle.algorithms.models.registry import NETWORKS
from staddle.algorithms.numerics.devices import CPU

SILOS, RECORDS = 3, 4
OF_IMAGES = {
    "convolution": lambda: nn.Conv2d(4, 6, 3, 2, 1),
    "convolution without a bias": lambda: nn.Conv2d(4, 6, 3, bias=False),
    "convolution in groups": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "batch norm without statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "batch norm without weights": lambda: nn.BatchNorm2d(4, affine=False),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "max pool": lambda: nn.MaxPool2d(2),
    "average pool": lambda: nn.AvgPool2d(2),
    "adaptive pool": lambda: nn.AdaptiveAvgPool2d(1),
}


def both(make, x, train=True):
    """Outputs, gradients and buffers of silos at once, and of each by itself; in float64."""
    torch.manual_seed(0)
    modules = [make().double().train(train) for _ in range(SILOS)]
    for module in modules:
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    parameters, buffers = stack_module_state(modules)
    values = {**parameters, **buffers}
    leaves = [own for own in values.values() if own.requires_grad]
    own = x.clone().requires_grad_()
    out = over_silos(lambda values, x: functional_call(modules[0], values, x))(values, own)
    together = [out, *torch.autograd.grad(out.sin().sum(), [own, *leaves])]

    apart = []
    for silo, module in enumerate(modules):
        alone = x[silo].clone().requires_grad_()
        result = module(alone)
        apart.append(
            [result, *torch.autograd.grad(result.sin().sum(), [alone, *module.parameters()])]
        )
        assert all(
            torch.allclose(values[name][silo], buffer, rtol=1e-12)
            for name, buffer in module.named_buffers()
        )
    return together, [torch.stack(each) for each in zip(*apart, strict=True)]


def check(make, x, train=True):
    for one, other in zip(*both(make, x, train), strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("layer", OF_IMAGES)
def test_layers_take_what_unfolded_convolutions_leave(layer, train):
    """Activations that lie in memory channels first."""
    x = torch.randn(SILOS, RECORDS, 4, 6, 8, dtype=torch.float64)
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    check(OF_IMAGES[layer], x, train)


@pytest.mark.parametrize("form", ["grouped", "unfolded"])
@pytest.mark.parametrize("name", ["lenet5", "convnet-digits", "mobilenet-v2"])
def test_networks_of_all_silos_at_once(name, form):
    norm = "batch" if "batch" in NETWORKS[name].norms else NETWORKS[name].norms[0]
    shape = NETWORKS[name].default_input
    options = ModelOptions(name=name, classes=3, norm=norm, input=shape)
    torch.manual_seed(0)
    x = torch.randn(2, 3, *shape, dtype=torch.float64)
    modules = [nn.Sequential(*build(options, seed).values()).double() for seed in range(2)]
    if form == "unfolded":
        prepare(modules, "unfolded", CPU)
    parameters, buffers = stack_module_state(modules)
    run = over_silos(lambda values, x: functional_call(modules[0], values, x))
    out = run({**parameters, **buffers}, x)
    for silo, module in enumerate(modules):
        assert torch.allclose(out[silo], module(x[silo]), rtol=1e-9, atol=1e-9)
