import concurrent.futures
import hashlib
import socket

import pydantic
import pytest
import torch
from support.refusals import refused
from torch import nn

from staddle.algorithms.models.build import ModelOptions, build, initialise, input_shape, sketch
from staddle.algorithms.models.registry import NETWORKS


def count(module):
    return sum(p.numel() for p in module.parameters())


def fingerprint(parts):
    digest = hashlib.sha256()
    for module in parts.values():
        for name, tensor in module.state_dict().items():
            digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def test_lenet5_with_batch_norm_has_the_parameters_of_the_papers_table():
    parts = build(ModelOptions(name="lenet5", classes=10, norm="batch"), 0)
    assert count(parts["extractor"]) == 61_200
    assert count(parts["classifier"]) == 850
    assert sum(b.numel() for b in parts["extractor"].buffers()) == 46
    assert count(build(ModelOptions(name="lenet5", classes=10), 0)["extractor"]) == 61_200 - 44


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
@pytest.mark.parametrize("shape", [None, (1, 28, 28)])
def test_pfedsim_s_lenet5_of_its_paper_is_lenet5_without_the_last_relu(norm, shape):
    """The same values, names and other layers; features of both signs."""
    lenet, theirs = (
        build(ModelOptions(name=name, classes=10, norm=norm, input=shape), 4)
        for name in ("lenet5", "pfedsim-lenet5")
    )
    layers, others = (list(parts["extractor"].named_children()) for parts in (lenet, theirs))
    assert [name for name, _ in layers] == [*(name for name, _ in others), "relu4"]
    assert others[-1][0] == "fc2"
    assert fingerprint(lenet) == fingerprint(theirs)
    x = torch.randn(5, *(shape or (3, 32, 32)), generator=torch.Generator().manual_seed(0))
    features = theirs["extractor"](x)
    assert features.shape == (5, 84)
    assert features.min() < 0 < features.max()
    assert torch.equal(features.relu(), lenet["extractor"](x))
    assert torch.equal(theirs["classifier"](features.relu()), lenet["classifier"](features.relu()))


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [("lenet5", None), ("lenet5", (1, 28, 28)), ("lenet5", (3, 16, 33)), ("cnn-digits", None)],
)
def test_models_run_forward_and_backward(name, shape, norm):
    options = ModelOptions(name=name, classes=4, norm=norm, input=shape)
    parts = build(options, 1)
    logits = parts["classifier"](parts["extractor"](torch.randn(5, *input_shape(options))))
    assert logits.shape == (5, 4)
    logits.sum().backward()
    assert isinstance(parts["classifier"], nn.Linear)
    assert not any(getattr(m, "inplace", False) for m in parts["extractor"].modules())


def facts(tensor):
    return type(tensor), tensor.shape, tensor.dtype, tensor.device.type, tensor.requires_grad


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_done_to_one_sketch_is_not_done_to_the_next(name):
    """The networks are laid out once and copied."""
    norm = NETWORKS[name].norms[-1]
    options = ModelOptions(name=name, classes=4, norm=norm)
    with torch.device("meta"):
        shape = input_shape(options)
        built = nn.ModuleDict(NETWORKS[name].build(shape, 4, norm))
    one, other = nn.ModuleDict(sketch(options)), nn.ModuleDict(sketch(options))
    assert str(one) == str(other) == str(built)
    mine, theirs, wanted = (m.state_dict(keep_vars=True) for m in (one, other, built))
    assert list(mine) == list(theirs) == list(wanted)
    for key, value in wanted.items():
        assert mine[key] is not theirs[key]
        assert facts(mine[key]) == facts(theirs[key]) == facts(value), key
    for module in one.modules():
        module.register_forward_hook(lambda *_: None)
        module.register_parameter("more", nn.Parameter(torch.empty(1)))
        module.eval()
    untouched = nn.ModuleDict(sketch(options))
    for module in (*other.modules(), *untouched.modules()):
        assert not module._forward_hooks
        assert not hasattr(module, "more")
        assert module.training


def test_sketches_are_of_the_default_dtype_of_now():
    options = ModelOptions(name="cnn-digits", classes=4)
    dtypes = []
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            dtypes += {tensor.dtype for tensor in sketch(options)["extractor"].parameters()}
        finally:
            torch.set_default_dtype(torch.float32)
    assert dtypes == [torch.float64, torch.float32]


def test_group_norm_has_its_own_groups():
    layers = dict(
        build(ModelOptions(name="lenet5", classes=10, norm="group"), 0)[
            "extractor"
        ].named_children()
    )
    assert [layers[f"norm{i}"].num_groups for i in (1, 2)] == [2, 4]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"name": "lenet5", "class_names": ("a", "b")}, "model.class_names has 2 names, model.c"),
        ({"name": "lenet5", "classes": 2, "class_names": ("a", "a")}, "both named 'a'"),
        ({"name": "lenet5", "classes": 2, "class_names": ("a", 1)}, "class_names"),
        ({"name": "cnn-digits", "input": (1, 28, 28)}, "model 'cnn-digits' takes input"),
        ({"name": "lenet5", "input": (3, 15, 32)}, "at least 16 x 16"),
        ({"name": "lenet5", "classes": 1}, "classes"),
        ({"name": "glm", "input": (4096, 4096, 1), "classes": 16},
            "has 268,435,472 parameters; lower input,"),
        ({"name": "glm", "input": (4096, 4096, 4096), "classes": 100_000},
            "268,435,456 are the most"),
        ({"name": "resnet"}, "lenet5"),
        ({"name": "lenet5", "buffers": "shared"}, "buffers"),
        ({"name": "lenet5", "buffers": "global"},
            "'lenet5' with norm 'none' keeps no running statistics; leave buffers"),
        ({"name": "lenet5", "buffers": "global", "norm": "group"},
            "norm 'group' keeps no running statistics"),
        ({"name": "convnet-3x64", "buffers": "global", "norm": "batch"},
            "norm 'batch' keeps no running statistics"),
        ({"name": "mobilenet-v2"}, "'mobilenet-v2' has norm batch or group, not 'none'"),
        ({"name": "mobilenet-v2", "norm": "batch", "input": (3, 32, 31)}, "at least 32 x 32"),
        ({"name": "mobilenet-v2", "norm": "group", "buffers": "global"},
            "keeps no running statistics"),
    ],
)  # fmt: skip
def test_options_that_make_no_model_are_refused(fields, complaint):
    with pytest.raises(pydantic.ValidationError, match=complaint):
        ModelOptions(**{"classes": 10, **fields})


@pytest.mark.parametrize(
    ("name", "pin"),
    [
        ("lenet5", "307beffd187f599c954f1e9d16030cbd7ecbcd7cf50b23d7853b4cd78e966b63"),
        ("mobilenet-v2", "1488a75553c7aaf1bc077b4a48ed2632c84782dd4f7a91c8e828a6e3a13aa2bb"),
    ],
)
def test_initial_values_are_pinned_and_need_no_generator_and_no_network(monkeypatch, name, pin):
    options = ModelOptions(name=name, classes=10, norm="batch")
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("a connection"))
    prints, untouched = set(), torch.get_rng_state()
    for seed in (0, 1):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        prints.add(fingerprint(build(options, 7)))
        assert torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(untouched)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        prints |= set(pool.map(lambda _: fingerprint(build(options, 7)), range(4)))
    torch.set_num_threads(2)
    prints.add(fingerprint(build(options, 7)))
    assert prints == {pin}
    assert fingerprint(build(options, 8)) not in prints


def test_initial_values_fill_the_interval_of_their_fan_in():
    parts = build(ModelOptions(name="lenet5", classes=10, norm="batch"), 3)
    for name, fan_in in [("conv1", 75), ("conv2", 150), ("fc1", 400), ("fc2", 120)]:
        layer = dict(parts["extractor"].named_children())[name]
        for tensor in (layer.weight, layer.bias):
            assert tensor.abs().max() <= fan_in**-0.5
        assert layer.weight.abs().max() > 0.95 * fan_in**-0.5
        assert layer.weight.var().item() == pytest.approx(1 / (3 * fan_in), rel=0.2)
    norm = dict(parts["extractor"].named_children())["norm1"]
    assert norm.weight.tolist() == [1] * 6
    assert norm.bias.tolist() == norm.running_mean.tolist() == [0] * 6
    assert norm.running_var.tolist() == [1] * 6


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ReLU()
        self.scale = nn.Parameter(torch.ones(1))


def test_a_module_whose_tensors_no_rule_fills_is_refused():
    with refused("model: Odd '' holds tensors that no rule initialises; put them into layers"):
        initialise(Odd(), 0, "extractor")


@pytest.mark.parametrize("layer", [nn.Bilinear(1, 2, 3), nn.LSTM(2, 3), nn.Conv3d(1, 2, 3)])
def test_a_layer_of_torchs_resets_itself_by_the_jobs_streams(layer):
    """Each layer by a stream of its own, and torch's generator is left alone."""
    before, found = torch.get_rng_state(), []
    for seed, prefix in ((0, "extractor"), (0, "extractor"), (1, "extractor"), (0, "head")):
        initialise(layer, seed, prefix)
        found.append(torch.cat([tensor.flatten() for tensor in layer.parameters()]).clone())
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])
