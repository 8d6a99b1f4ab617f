"""Networks whose sizes a job chooses: for tables, series and volumes."""

import pytest
import torch
from support.engines import check_engines_agree
from support.jobs import make_data, make_job
from support.refusals import refused
from torch import nn
from torch.nn import functional

from staddle.algorithms.job.job import Job
from staddle.algorithms.models.build import (
    ModelOptions,
    build,
    couples_records,
    draws_randomly,
    has_batch_norm,
    start_digest,
)
from staddle.algorithms.models.registry import NETWORKS
from staddle.files.documents import canonical_json, parse_json, validate

SHAPES = {
    "mlp": (1, 1, 9),
    "tab-resnet": (9,),
    "series-resnet": (2, 11),
    "volume-resnet": (1, 5, 6, 7),
}
SMALL = {
    "mlp": {"widths": [7, 5]}, "tab-resnet": {"width": 5, "hidden": 7},
    "series-resnet": {"widths": [4, 6]}, "volume-resnet": {"widths": [4, 8], "blocks": 2},
}  # fmt: skip


def options(name, **changes):
    fields = {"name": name, "classes": 3, "input": SHAPES[name], "options": SMALL[name]}
    return validate({**fields, **changes}, ModelOptions, "job.toml")


def made(name, seed=7, **changes):
    parts = build(options(name, **changes), seed)
    for module in parts.values():
        module.eval()
    return parts


def records(name, n=6):
    return make_data(n, shape=SHAPES[name]).x


@torch.no_grad()
def test_a_perceptron_by_hand():
    parts, x = made("mlp", norm="group"), records("mlp")
    own = parts["extractor"]
    y = x.flatten(1)
    for number in (1, 2):
        fc = getattr(own, f"fc{number}")
        y = y @ fc.weight.T + fc.bias
        # one group over all features is a layer norm, which begins as an identity
        y = (y - y.mean(1, keepdim=True)) / (y.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        y = y.clamp(min=0)
    torch.testing.assert_close(own(x), y)
    assert parts["classifier"].weight.shape == (3, 5)


@torch.no_grad()
def test_a_residual_network_for_tables_by_hand():
    parts, x = made("tab-resnet", norm="batch"), records("tab-resnet")
    own = parts["extractor"]

    # in evaluation, with statistics that begin at 0 and 1
    def norm(y):
        return y / (1 + 1e-5) ** 0.5

    y = own.fc(x)
    for block in (own.block1, own.block2):
        y = y + block.fc2(block.fc1(norm(y)).clamp(min=0))
    torch.testing.assert_close(own(x), norm(y).clamp(min=0))
    assert len([layer for layer in own.modules() if isinstance(layer, nn.BatchNorm1d)]) == 3


@torch.no_grad()
def test_a_residual_network_for_series_by_hand():
    parts, x = made("series-resnet"), records("series-resnet")
    y = x
    for block in (parts["extractor"].block1, parts["extractor"].block2):
        path, short = block.path, block.shortcut.conv
        z = y
        for number, (before, after) in enumerate([(3, 3), (2, 2), (1, 1)], start=1):
            conv = getattr(path, f"conv{number}")
            z = functional.conv1d(functional.pad(z, (before, after)), conv.weight, conv.bias)
            z = z.clamp(min=0) if number < 3 else z
        y = (z + functional.conv1d(y, short.weight, short.bias)).clamp(min=0)
    torch.testing.assert_close(parts["extractor"](x), y.mean(2))


@torch.no_grad()
def test_a_series_may_have_a_height_of_one():
    short, tall = (made("series-resnet", input=shape) for shape in ((2, 11), (2, 1, 11)))
    x = records("series-resnet")
    assert torch.equal(short["extractor"](x), tall["extractor"](x.unsqueeze(2)))


@torch.no_grad()
def test_a_residual_network_for_volumes_by_hand():
    parts, x = made("volume-resnet"), records("volume-resnet")
    stem, *blocks = list(parts["extractor"].children())[1:6]
    y = functional.conv3d(x, stem.conv.weight, stem.conv.bias, padding=1).clamp(min=0)
    sides = []
    for block in blocks:
        one, two = block.path.conv1, block.path.conv2
        z = functional.conv3d(y, one.weight, one.bias, one.stride, padding=1).clamp(min=0)
        z = functional.conv3d(z, two.weight, two.bias, padding=1)
        if not isinstance(block.shortcut, nn.Identity):
            short = block.shortcut.conv
            y = functional.conv3d(y, short.weight, short.bias, short.stride)
        y = (z + y).clamp(min=0)
        sides.append(list(y.shape[1:]))
    assert sides == [[4, 5, 6, 7], [4, 5, 6, 7], [8, 3, 3, 4], [8, 3, 3, 4]]
    torch.testing.assert_close(parts["extractor"](x), y.mean((2, 3, 4)))


@pytest.mark.parametrize("name", SHAPES)
def test_what_a_job_leaves_out_has_its_default_and_one_spelling(name):
    defaults = NETWORKS[name].options().model_dump()
    short = make_job("fedper", model={"name": name, "input": SHAPES[name]})
    first = next(iter(defaults))
    long = make_job("fedper", model={"name": name, "input": SHAPES[name], "options": defaults})
    part = {"name": name, "input": SHAPES[name], "options": {first: defaults[first]}}
    assert short == long == make_job("fedper", model=part)
    assert short.digest == long.digest
    document = short.document()
    assert document["model"]["options"]["dropout"] == {"decimal": "0.0"}
    assert document["model"]["options"].keys() == defaults.keys()
    assert "head" not in document["model"]
    wire = parse_json(canonical_json(document), "wire")
    assert Job.from_document(wire, "wire", (), federated=False) == short
    # its values follow from the streams, whatever torch's release
    assert start_digest(short.model, 7) == ""
    assert "start" not in document


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("mlp", {"options": {"width": 3}}, "unknown key 'width'; did you mean 'widths'?"),
        ("mlp", {"options": {"widths": []}}, "of mlp: widths: "),
        ("mlp", {"options": {"widths": [0]}}, "of mlp: widths.0 = 0: "),
        ("mlp", {"options": {"widths": [4097]}}, "of mlp: widths.0 = 4097: "),
        ("mlp", {"options": {"widths": 64}}, "of mlp: widths = 64: "),
        ("mlp", {"options": {"widths": [64.0]}}, "of mlp: widths.0 = 64.0: give a whole number"),
        ("mlp", {"options": {"dropout": 1.0}}, "of mlp: dropout = 1.0: "),
        ("mlp", {"options": {"dropout": True}}, "of mlp: dropout = True: give a number, not true"),
        ("mlp", {"head": "fc"}, "model 'mlp' is of Staddle's own table, whose head is known"),
        ("mlp", {"options": {"widths": [4096] * 16 + [1] * 9}}, "of mlp: widths: "),
        (
            "tab-resnet",
            {"options": {"width": 4096, "hidden": 4096, "blocks": 9}},
            "has 302,116,867 parameters; lower input, classes or outputs, 268,435,456 are",
        ),
        ("series-resnet", {"input": [1, 2, 3]}, r"takes records \[channels, length\] or .*, not"),
        ("volume-resnet", {"input": [1, 8, 8]}, r"takes records \[channels, depth, height, wid"),
        ("mlp", {"input": [1] * 5}, "input"),
        ("mlp", {"input": [4096] * 4}, "a record of over 68,719,476,736 numbers; lower it"),
        ("mlp", {"input": []}, "input"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(name, changes, why):
    with refused(why):
        options(name, **changes)


def test_other_networks_of_the_table_have_no_options():
    with refused("model 'lenet5' has no options; leave model.options out"):
        validate({"name": "lenet5", "classes": 3, "options": {"a": 1}}, ModelOptions, "job.toml")
    for shape in ([150], [1, 2, 3, 4]):
        with refused(r"model 'lenet5' takes images \[channels, height, width\], not "):
            validate({"name": "lenet5", "classes": 3, "input": shape}, ModelOptions, "job.toml")


@pytest.mark.parametrize("name", SHAPES)
def test_dropout_draws_and_is_nothing_at_zero(name):
    assert not draws_randomly(options(name))
    dropping = options(name, options={**SMALL[name], "dropout": 0.5})
    assert draws_randomly(dropping)
    parts = build(dropping, 7)
    x = records(name)
    parts["extractor"].train()
    assert not torch.equal(parts["extractor"](x), parts["extractor"](x))
    parts["extractor"].eval()
    assert torch.equal(parts["extractor"](x), made(name)["extractor"](x))


@pytest.mark.parametrize("name", SHAPES)
def test_only_batch_norm_couples_records(name):
    for norm in ("none", "batch", "group"):
        found = options(name, norm=norm)
        assert has_batch_norm(found) == couples_records(found) == (norm == "batch")
        parts = build(found, 7)
        parts["extractor"].train()
        x = records(name)
        alone = torch.cat([parts["extractor"](x[i : i + 2]) for i in range(0, 6, 2)])
        same = torch.allclose(parts["extractor"](x), alone, atol=1e-6)
        assert same == (norm != "batch")


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", SHAPES)
def test_silos_at_once_train_as_one_by_one(name, norm):
    model = {"name": name, "norm": norm, "input": SHAPES[name], "options": SMALL[name]}
    job = make_job("fedavg", model=model, rounds=2)
    shards = {
        silo: tuple(make_data(n, i, shape=SHAPES[name]) for n in (24, 12))
        for i, silo in enumerate(job.silos)
    }
    alone = check_engines_agree(job, shards)
    for silo in job.silos:
        begun = build(job.model, 7)["extractor"].state_dict()
        trained = alone.states[silo].parts["extractor"]
        assert any(not torch.equal(begun[key], trained[key]) for key in begun)
