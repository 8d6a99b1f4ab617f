import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state
from torch.nn import functional as F  # noqa: N812 torch's own name for it
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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
OF_ROWS = {
    "linear": lambda: nn.Linear(8, 5),
    "linear without a bias": lambda: nn.Linear(8, 5, bias=False),
    "batch norm": lambda: nn.BatchNorm1d(8),
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
@pytest.mark.parametrize("lies", ["records first", "channels first"])
@pytest.mark.parametrize("layer", OF_IMAGES)
def test_images_of_all_silos_at_once(layer, lies, train):
    x = torch.randn(SILOS, RECORDS, 4, 6, 8, dtype=torch.float64)
    if lies == "channels first":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    check(OF_IMAGES[layer], x, train)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("layer", OF_ROWS)
def test_rows_of_all_silos_at_once(layer, train):
    check(OF_ROWS[layer], torch.randn(SILOS, RECORDS, 8, dtype=torch.float64), train)


@pytest.mark.parametrize("form", ["grouped", "unfolded"])
@pytest.mark.parametrize("name", ["lenet5", "convnet-digits", "mobilenet-v2"])
def test_networks_of_all_silos_at_once(name, form):
    norm = "batch" if "batch" in NETWORKS[name].norms else NETWORKS[name].norms[0]
    shape = NETWORKS[name].default_input

    def make():
        network = nn.Sequential(
            *build(ModelOptions(name=name, classes=3, norm=norm, input=shape), 0).values()
        )
        if form == "unfolded":
            prepare([network], "unfolded", CPU, "float32")
        return network

    x = torch.randn(2, 3, *shape, dtype=torch.float64)
    torch.manual_seed(0)
    modules = [make().double() for _ in range(2)]
    parameters, buffers = stack_module_state(modules)
    out = over_silos(lambda values, x: functional_call(modules[0], values, x))(
        {**parameters, **buffers}, x
    )
    for silo, module in enumerate(modules):
        assert torch.allclose(out[silo], module(x[silo]), rtol=1e-9, atol=1e-9)


def test_a_derivative_within_keeps_the_rules_of_torch():
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.MaxPool2d(2)).double()
    values = {
        name: torch.stack([own.detach(), own.detach() + 1])
        for name, own in module.named_parameters()
    }
    x = torch.randn(2, 4, 2, 8, 8, dtype=torch.float64)

    def loss(values, x):
        return functional_call(module, values, x).sin().sum()

    found = over_silos(grad(loss))(values, x)
    for silo in range(2):
        alone = grad(loss)({name: own[silo] for name, own in values.items()}, x[silo])
        for name, own in alone.items():
            assert torch.allclose(found[name][silo], own, rtol=1e-10, atol=1e-12)


class CudaTypes(TorchDispatchMode):
    """The types that CUDA's batch norm takes, which a CPU does not mind."""

    def __init__(self):
        super().__init__()
        self.norms = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "batch_norm" in func._schema.name and "backward" not in func._schema.name:
            self.norms += 1
            kinds = {one.dtype for one in args[1:5] if isinstance(one, torch.Tensor)}
            assert kinds <= {torch.float32}, f"{func} with parameters or statistics of {kinds}"
        return func(*args, **(kwargs or {}))


class AutocastConvolutions(TorchFunctionMode):
    """Convolutions in bfloat16, which is so on a GPU within autocast, and not on a CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        named = kwargs or {}
        if func is F.conv2d:
            args = [
                one.bfloat16() if isinstance(one, torch.Tensor) and one.is_floating_point() else one
                for one in args
            ]
        return func(*args, **named)


@pytest.mark.parametrize("bias", [True, False])
def test_activations_stay_bfloat16_next_to_statistics_of_float32(bias):
    """vmap's own rules would give batch norm weights of bfloat16, which CUDA refuses."""
    kinds = []

    class Kind(nn.Module):
        def forward(self, x):
            kinds.append(x.dtype)
            return x

    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=bias), Kind(), nn.BatchNorm2d(4), Kind(), nn.ReLU(), nn.MaxPool2d(2)
    )
    parameters, buffers = stack_module_state([module, module])
    x = torch.randn(2, 5, 3, 8, 8)
    with CudaTypes() as types, AutocastConvolutions():
        out = over_silos(lambda values, x: functional_call(module, values, x))(
            {**parameters, **buffers}, x
        )
    assert types.norms == 1
    assert {*kinds, out.dtype} == {torch.bfloat16}
    assert buffers["2.running_var"].dtype == torch.float32
    torch.autograd.grad(out.float().sum(), [*parameters.values()])
