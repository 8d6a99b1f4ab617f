"""Layers of all silos in one call: against one silo after another, and what they cost."""

import pytest
import torch
from support.cuda_autocast import as_on_a_gpu
from support.step_cost import Cost
from torch import nn
from torch.func import functional_call, grad, vmap

from staddle.algorithms.course import Optimiser, Stage
from staddle.algorithms.engines import stacked_layers, vmap_training
from staddle.algorithms.engines.convolutions import prepare
from staddle.algorithms.engines.cuda_graphs import AsItIs
from staddle.algorithms.engines.stacked_layers import over_silos
from staddle.algorithms.engines.vmap_training import Bench, Silos, train
from staddle.algorithms.models.registry import NETWORKS
from staddle.algorithms.numerics.devices import CPU

SILOS, BATCH = 3, 4
IMAGE, ROW, SERIES = (6, 7, 5), (6,), (6, 7)  # one record
LAYERS = {
    "convolution": (lambda: nn.Conv2d(6, 4, 3, 2, 1), IMAGE),
    "convolution without bias": (lambda: nn.Conv2d(6, 4, (3, 2), bias=False), IMAGE),
    "convolution in groups": (lambda: nn.Conv2d(6, 9, 3, groups=3, dilation=2), IMAGE),
    "convolution, same": (lambda: nn.Conv2d(6, 4, 3, padding="same"), IMAGE),
    "convolution, reflected": (
        lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"),
        IMAGE,
    ),
    "batch norm": (lambda: nn.BatchNorm2d(6), IMAGE),
    "batch norm, momentum": (lambda: nn.BatchNorm2d(6, eps=0.1, momentum=0.7), IMAGE),
    "batch norm, untracked": (lambda: nn.BatchNorm2d(6, track_running_stats=False), IMAGE),
    "batch norm, not affine": (lambda: nn.BatchNorm2d(6, affine=False), IMAGE),
    "batch norm of rows": (lambda: nn.BatchNorm1d(6), ROW),
    "batch norm of series": (lambda: nn.BatchNorm1d(6), SERIES),
    "group norm": (lambda: nn.GroupNorm(3, 6, eps=0.1), IMAGE),
    "group norm, not affine": (lambda: nn.GroupNorm(2, 6, affine=False), IMAGE),
    "group norm of rows": (lambda: nn.GroupNorm(3, 6), ROW),
    "max pool": (lambda: nn.MaxPool2d(2, ceil_mode=True), IMAGE),
    "max pool, overlapping": (lambda: nn.MaxPool2d(3, 1, 1, 2), IMAGE),
    "average pool": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), IMAGE),
    "mean": (lambda: nn.AdaptiveAvgPool2d(1), IMAGE),
    "adaptive pool": (lambda: nn.AdaptiveAvgPool2d((2, 3)), IMAGE),
    "linear": (lambda: nn.Linear(6, 4), ROW),
    "linear without bias": (lambda: nn.Linear(6, 4, bias=False), ROW),
    "linear of series": (lambda: nn.Linear(7, 4), SERIES),
}


def values_of(module, dtype=torch.float64):
    """Of each silo others, by name [S, …]."""
    generator, values = torch.Generator().manual_seed(1), {}
    for name, own in module.state_dict().items():
        if not own.is_floating_point():
            values[name] = torch.arange(SILOS)
            continue
        noise = torch.rand(SILOS, *own.shape, generator=generator, dtype=torch.float64) + 0.5
        values[name] = noise.to(dtype)
        if name in dict(module.named_parameters()):
            values[name].requires_grad_()
    return values


def one_by_one(run):
    """``over_silos`` without any of it."""
    return lambda values, x: torch.stack(
        [run({n: t[silo] for n, t in values.items()}, own) for silo, own in enumerate(x)]
    )


def ends(over, module, record, dim=0):
    """The output, the gradients, and the buffers after the call."""
    values = values_of(module)
    lies = [SILOS, BATCH, *record]
    if dim:
        lies[:2] = lies[1::-1]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(lies, generator=generator, dtype=torch.float64, requires_grad=True)
    out = over(lambda values, x: functional_call(module, values, x))(
        values, x.transpose(0, 1) if dim else x
    )
    leaves = [x, *(t for t in values.values() if t.requires_grad)]
    gradients = torch.autograd.grad(out.sin().sum(), leaves)
    return [out, *gradients, *(t for t in values.values() if not t.requires_grad)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_of_all_is_that_of_each(layer, dim, training):
    """Output, gradients and running statistics, wherever the silos' axis lies; the same again."""
    build, record = LAYERS[layer]
    module = build().train(training)
    one, all_, again = (
        ends(over, module, record, dim) for over in (one_by_one, over_silos, over_silos)
    )
    for alone, stacked, rerun in zip(one, all_, again, strict=True):
        assert torch.allclose(alone.double(), stacked.double(), rtol=1e-12, atol=1e-12)
        assert torch.equal(stacked, rerun)


@pytest.mark.parametrize(
    ("module", "record"),
    [
        (nn.Conv2d(6, 4, 3), IMAGE),
        (nn.MaxPool2d(2), IMAGE),
        (nn.AvgPool2d(2), IMAGE),
        (nn.AdaptiveAvgPool2d(2), IMAGE),
    ],
)
def test_records_without_a_batch_keep_torchs_rules(module, record):
    values, x = values_of(module), torch.randn(SILOS, *record, dtype=torch.float64)
    run = lambda values, x: functional_call(module, values, x)
    assert torch.equal(over_silos(run)(values, x), vmap(run)(values, x))


@pytest.mark.parametrize(
    "layer", ["convolution", "batch norm, untracked", "group norm", "max pool", "linear"]
)
def test_derivatives_within_keep_torchs_rules(layer, monkeypatch):
    """Inside ``grad`` no layer of this module is called, of whatever is its input; and none where
    silos share a tensor.
    """
    build, record = LAYERS[layer]
    module = build()
    values = {name: t.detach() for name, t in values_of(module).items()}
    x = torch.randn(SILOS, BATCH, *record, dtype=torch.float64)

    def slope(values, x):
        return grad(lambda x: functional_call(module, values, x).sin().sum())(x)

    def scaled(values, x):
        return grad(lambda factor: (factor * functional_call(module, values, x)).sum())(x.sum())

    def shared(values, x):
        return functional_call(module, values, everyones)

    everyones = x[0]
    runs = (slope, scaled, shared)
    wanted = [vmap(run)(values, x) for run in runs]
    monkeypatch.setattr(
        stacked_layers, "retrieve_current_functorch_interpreter", lambda: pytest.fail("called")
    )
    for run, want in zip(runs, wanted, strict=True):
        assert torch.equal(over_silos(run)(values, x), want)


# Networks.


def cross_entropy(parts, x, y, context):
    logits = parts["classifier"](parts["extractor"](x))
    return nn.functional.cross_entropy(logits, y, reduction="none")


STAGE = Stage(("extractor", "classifier"), 1, cross_entropy, Optimiser(0.1))


def silos_of(network, norm, shape, batch, device="cpu"):
    """Silos of one network, of which each has one batch."""
    modules = NETWORKS[network].build(shape, 10, norm)
    values = {
        part: {name: torch.stack([t] * SILOS).to(device) for name, t in m.state_dict().items()}
        for part, m in modules.items()
    }
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SILOS * batch, *shape, generator=generator)
    y = torch.arange(SILOS * batch) % 10
    modules = {part: module.to("meta") for part, module in modules.items()}
    return Silos(modules, values, x.to(device), y.to(device))


def trained(silos, precision="float32", steps=(1, 1, 1)):
    """The losses of a stage of so many steps by silo, on the same batch again and again."""
    batch = len(silos.x) // SILOS
    own = [torch.arange(batch).numpy() + batch * silo for silo in range(SILOS)]
    pieces = [[rows] * count for rows, count in zip(own, steps, strict=True)]
    return train(silos, STAGE, {}, pieces, Bench(AsItIs(), precision)).losses


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
def test_silos_that_sit_out_a_step_stand_still(norm, monkeypatch):
    """Parameters and running statistics of silos of one, three and two steps, by one engine and by
    torch's own rules.
    """
    made = []
    for over in (over_silos, vmap):
        monkeypatch.setattr(vmap_training, "over_silos", over)
        torch.manual_seed(0)
        silos = silos_of("cnn-digits", norm, (1, 8, 8), 5)
        losses = trained(silos, steps=(3, 2, 1))
        made.append((losses, silos.values))
    (losses, values), (wanted, others) = made
    assert torch.allclose(losses, wanted, rtol=1e-5, equal_nan=True)
    for part, named in values.items():
        for name, tensor in named.items():
            assert torch.allclose(tensor, others[part][name], rtol=1e-4, atol=1e-5), name
    if norm == "batch":
        assert values["extractor"]["norm1.num_batches_tracked"].tolist() == [3, 2, 1]


@pytest.mark.parametrize("form", ["grouped", "unfolded"])
@pytest.mark.parametrize(
    ("network", "norm"),
    [
        (network, norm)
        for network in ("cnn-digits", "resnet18", "mobilenet-v2")
        for norm in NETWORKS[network].norms
    ],
)
def test_activations_stay_bfloat16_from_layer_to_layer(network, norm, form):
    """With a GPU's rules for what is cast; statistics, gradients and losses stay float32."""
    shape = (3, 16, 16) if network == "resnet18" else NETWORKS[network].default_input
    silos, types = silos_of(network, norm, shape, 2), {}
    if form == "unfolded":
        prepare(silos.modules.values(), "unfolded", CPU)
    for name, leaf in silos.modules["extractor"].named_modules():
        if not list(leaf.children()):
            leaf.register_forward_hook(
                lambda leaf, _, out, name=name: types.update({name: (type(leaf), out.dtype)})
            )
    before = {name: t.clone() for name, t in silos.values["extractor"].items()}
    with as_on_a_gpu():
        losses = trained(silos, "bf16", (1, 1, 1))
    assert losses.isfinite().all()
    of_images = [of for leaf, of in types.values() if leaf is not nn.Linear]
    if network == "cnn-digits":  # what follows its linear layer is small
        of_images = [of for name, (_, of) in types.items() if name < "fc1" or "pool" in name]
    assert set(of_images) == {torch.bfloat16}
    after = silos.values["extractor"]
    assert all(after[name].dtype == own.dtype for name, own in before.items())
    assert not any(torch.equal(after[name], own) for name, own in before.items() if own.ndim > 2)


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
def test_bfloat16_is_nearly_float32(norm):
    made = []
    for precision in ("float32", "bf16"):
        torch.manual_seed(0)
        silos = silos_of("cnn-digits", norm, (1, 8, 8), 8)
        with as_on_a_gpu():
            losses = trained(silos, precision)
        made.append((losses, silos.values))
    (losses, exact), (coarse, values) = made
    assert 0 < float((losses - coarse).abs().max()) < 0.05
    for part, named in exact.items():
        for name, tensor in named.items():
            assert torch.allclose(tensor.double(), values[part][name].double(), atol=0.02), name


def test_batch_norm_within_a_derivative_takes_bfloat16():
    """As Per-FedAvg calls it: under ``grad`` within ``vmap``."""
    module = nn.Sequential(nn.Conv2d(6, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    values = {name: t.detach() for name, t in values_of(module, torch.float32).items()}
    x = torch.randn(SILOS, BATCH, *IMAGE, generator=torch.Generator().manual_seed(3))

    def slope(values, x):
        def total(weight):
            kept = {name: t.clone() for name, t in values.items()}
            return functional_call(module, {**kept, "0.weight": weight}, x).sin().float().mean()

        return grad(total)(values["0.weight"])

    exact = over_silos(slope)(values, x)
    with as_on_a_gpu(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        coarse = over_silos(slope)(values, x)
    assert 0 < float((exact - coarse).norm() / exact.norm()) < 0.2


# Kernels, and megabytes read and written, of one step of three silos with 32 records each: with
# vmap's own rules, and at most with these layers.
COSTS = {
    ("lenet5", "none"): ((73, 57.0), (60, 44.8)),
    ("lenet5", "batch"): ((95, 95.8), (66, 56.9)),
    ("convnet-4x128", "batch"): ((122, 2350.5), (71, 1215.4)),
    ("convnet-4x128", "group"): ((118, 2484.3), (71, 1215.5)),
    ("resnet18", "batch"): ((330, 7713.7), (168, 5118.4)),
    ("resnet18", "group"): ((349, 9167.4), (168, 5119.0)),
    ("mobilenet-v2", "batch"): ((803, 1548.0), (386, 972.6)),
}


@pytest.mark.parametrize(("network", "norm"), COSTS)
def test_a_step_costs_no_more(network, norm):
    """On torch's device "meta", where kernels are launched that compute nothing."""
    silos = silos_of(network, norm, (3, 32, 32), 32, "meta")
    step = vmap_training._Step(silos, STAGE, {}, AsItIs(), "float32")
    step.take(silos, STAGE, {})
    places = torch.empty(SILOS, 32, dtype=torch.int64, device="meta")
    with Cost() as cost:
        step._move(slice(0, SILOS), places, None)
    kernels, megabytes = COSTS[network, norm][1]
    assert cost.kernels <= kernels
    assert cost.nbytes / 1e6 <= megabytes


def test_gradients_lie_as_their_parameters_do(monkeypatch):
    """Else ``torch._foreach_*`` launch a kernel for each tensor on a GPU, in place of one."""
    seen = []
    apply = vmap_training._apply
    monkeypatch.setattr(
        vmap_training, "_apply", lambda *given: seen.extend(given[1]) or apply(*given)
    )
    silos = silos_of("lenet5", "batch", (3, 32, 32), 4)
    step = vmap_training._Step(silos, STAGE, {}, AsItIs(), "float32")
    step.take(silos, STAGE, {})
    step._move(slice(0, SILOS), torch.arange(SILOS * 4).view(SILOS, 4), None)
    assert len(seen) == 14
    assert all(gradient.is_contiguous() for gradient in seen)
