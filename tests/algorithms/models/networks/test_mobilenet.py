import pytest
import torch
from opacus import GradSampleModule
from opacus.validators import ModuleValidator
from support.refusals import refused
from torch import nn

from staddle.algorithms.models.build import ModelOptions, build, input_shape, sketch
from staddle.algorithms.models.torchvision_import import torchvision


def options(norm="batch", classes=10, **fields):
    return ModelOptions(name="mobilenet-v2", classes=classes, norm=norm, **fields)


def count(tensors):
    return sum(tensor.numel() for tensor in tensors)


@pytest.mark.parametrize(("norm", "statistics"), [("batch", 34_112), ("group", 0)])
@pytest.mark.parametrize("classes", [10, 62])
def test_sizes_are_those_of_ppfls_shared_extractor_and_a_linear_head(norm, statistics, classes):
    parts = sketch(options(norm, classes))
    assert count(parts["extractor"].parameters()) == 2_223_872
    assert count(b for b in parts["extractor"].buffers() if b.is_floating_point()) == statistics
    assert count(parts["classifier"].parameters()) == 1280 * classes + classes


def test_ppfl_sends_the_features_and_three_heads(make_job):
    job = make_job(
        "ppfl", {"models": 3}, model={"name": "mobilenet-v2", "classes": 10, "norm": "batch"}
    )
    model = job.up(0)[0]
    assert sum(spec.elements for spec in model.tensors) == 2_223_872 + 38_430


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("shape", [None, (1, 32, 40), (4, 64, 32)])
def test_it_runs_forward_and_backward(norm, shape):
    chosen = options(norm, 4, input=shape)
    parts = build(chosen, 1)
    logits = parts["classifier"](parts["extractor"](torch.randn(2, *input_shape(chosen))))
    assert logits.shape == (2, 4)
    logits.square().sum().backward()
    assert all(
        p.grad is not None and bool(p.grad.isfinite().all())
        for m in parts.values()
        for p in m.parameters()
    )
    layers = list(parts["extractor"].modules())
    assert sum(isinstance(layer, nn.ReLU6) for layer in layers) == 35
    assert not any(
        getattr(layer, "inplace", False) or isinstance(layer, nn.Dropout) for layer in layers
    )


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_it_computes_what_torchvisions_own_does(norm):
    parts = build(options(norm), 3)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in parts["extractor"].state_dict().items():
        # of a norm: at first ones and zeros, which show nothing
        if tensor.is_floating_point() and tensor.dim() == 1:
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + ("mean" not in name))
    groups = {} if norm == "batch" else {"norm_layer": lambda channels: nn.GroupNorm(8, channels)}
    theirs = torchvision("models", "this test").mobilenet_v2(num_classes=10, **groups)
    values = dict(parts["extractor"].state_dict())
    values |= {f"classifier.1.{name}": t for name, t in parts["classifier"].state_dict().items()}
    theirs.load_state_dict(values, strict=True)
    x = torch.randn(3, 3, 64, 64, generator=generator)
    with torch.no_grad():
        logits = parts["classifier"].eval()(parts["extractor"].eval()(x))
        assert torch.equal(logits, theirs.eval()(x))
    assert logits.std() > 0


def test_the_group_form_has_the_gradients_of_each_record():
    parts = build(options("group", 3), 5)
    model = nn.Sequential(parts["extractor"], parts["classifier"]).double()
    assert ModuleValidator.validate(model, strict=False) == []
    batch = build(options("batch", 3), 5)
    assert ModuleValidator.validate(nn.Sequential(*batch.values()), strict=False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 32, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 2])
    alone = []
    for i in range(2):
        loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        alone.append(torch.autograd.grad(loss, list(model.parameters())))
    hooked = GradSampleModule(model, loss_reduction="sum")
    nn.functional.cross_entropy(hooked(x), y, reduction="sum").backward()
    for parameter, *one_by_one in zip(model.parameters(), *alone, strict=True):
        assert torch.allclose(parameter.grad_sample, torch.stack(one_by_one), atol=1e-9)


def test_methods_take_it_or_say_why_not(make_job):
    model = {"name": "mobilenet-v2", "norm": "batch"}
    with refused("method 'fedaims' supervises the blocks of a model"):
        make_job("fedaims", model=model).document()
    method = make_job("fedssa", {"extractors": ["mobilenet-v2"]}, model=model).method()
    # dealt out by name alone, it has norm "group"
    assert not list(method.modules("a")["extractor"].buffers())
    with refused("'mobilenet-v2' ends in 1280 units, the job's model in 84"):
        make_job("fedssa", {"extractors": ["mobilenet-v2"]}, model={"name": "lenet5"}).document()
