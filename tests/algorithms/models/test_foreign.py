"""Models from outside the table: torchvision's, and those of the package in tests/packages."""

import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.engines import check_engines_agree
from support.jobs import make_data, make_job, make_shards
from support.other_tasks import SIDES
from support.other_tasks import shards as other_shards
from support.refusals import refused
from torch import nn

from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.job.job import Job
from staddle.algorithms.models import foreign
from staddle.algorithms.models.build import (
    ModelOptions,
    build,
    couples_records,
    draws_randomly,
    has_batch_norm,
    initialise,
    maps,
    sketch,
    start_digest,
    wanted,
)
from staddle.algorithms.models.torchvision_import import torchvision
from staddle.algorithms.training.dp_sgd import _hookable
from staddle.algorithms.training.loop import train
from staddle.files.documents import canonical_json, parse_json, validate

PRIVATE = {"epsilon": 8.0, "delta": 1e-5, "sample_rate": 0.1}
MIXED = {"name": "mixed", "classes": 3, "head": "fc", "input": [1, 8, 8]}


def options(**changes):
    return validate({**MIXED, **changes}, ModelOptions, "job.toml")


def values(parts):
    return {
        f"{part}.{name}": tensor
        for part, module in parts.items()
        for name, tensor in module.state_dict().items()
    }


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def test_its_parts_are_its_head_and_the_rest_under_the_modules_own_names():
    parts = build(options(), 7)
    whole = foreign.builder("mixed")((1, 8, 8), 3)
    named = {name: f"classifier.{name.removeprefix('fc.')}" for name in ("fc.weight", "fc.bias")}
    own = {named.get(name, f"extractor.{name}"): t for name, t in whole.state_dict().items()}
    assert values(parts).keys() == own.keys()
    # with the values of the parts, the whole module gives what they give
    found = values(parts)
    whole.load_state_dict(
        {name: found[named.get(name, f"extractor.{name}")] for name in whole.state_dict()}
    )
    x = make_data(5).x
    whole.eval(), parts["extractor"].eval()
    assert torch.equal(whole(x), parts["classifier"](parts["extractor"](x)))


def test_the_same_seed_gives_the_same_values_and_torchs_generator_is_left_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = values(build(options(), 7))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert same(first, values(build(options(), 7)))
    other = values(build(options(), 8))
    drawn = {name for name in first if not torch.equal(first[name], other[name])}
    # norms begin as identities, and attention's biases at zero
    assert {"extractor.scale", "extractor.rows.weight_ih_l0", "extractor.slide.bias",
            "extractor.attention.in_proj_weight", "classifier.weight"} <= drawn  # fmt: skip
    assert {"extractor.norm.weight", "extractor.attention.in_proj_bias"}.isdisjoint(drawn)


def test_known_layers_begin_as_in_the_table_and_others_by_their_own_rule():
    found = values(build(options(), 7))
    linear = nn.Linear(16, 3)
    initialise(linear, 7, "classifier")
    assert torch.equal(found["classifier.weight"], linear.weight)
    # torch's own rule of a GRU: uniform within ±1/sqrt(hidden)
    rows = torch.cat([t.flatten() for name, t in found.items() if ".rows." in name])
    assert 0.2 < rows.abs().max() <= 0.25


def test_a_sketch_has_no_values_and_is_nobody_elses():
    one, other = sketch(options()), sketch(options())
    assert {tensor.device.type for tensor in values(one).values()} == {"meta"}
    one["extractor"].rows = nn.Identity()
    assert isinstance(other["extractor"].rows, nn.GRU)


def test_a_head_may_be_several_submodules_in_the_order_in_which_they_run():
    several = options(name="normed", head=["2", "3", "4"])
    parts = build(several, 7)
    assert [type(layer) for layer in parts["classifier"]] == [nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert parts["extractor"](make_data(5).x).shape == (5, 12)
    assert has_batch_norm(several)
    assert not has_batch_norm(options())


def test_a_nested_head_has_a_dotted_name():
    found = options(name="torchvision:mobilenet_v3_small", head="classifier.3", input=[3, 32, 32])
    parts = build(found, 7)
    assert values(parts).keys() >= {"classifier.weight", "extractor.classifier.0.weight"}
    assert isinstance(parts["extractor"].classifier[3], nn.Identity)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"name": "mixd"}, r"no such model; did you mean 'mixed'\? known: lenet5, "),
        ({"name": "torchvision:resnet"}, "unknown model 'torchvision:resnet'; torchvision.models"),
        ({"head": None}, r"model.head is missing; .* the last ones with parameters are 'attention"),
        ({"head": "fcc"}, r"model.head = 'fcc': unknown submodule of 'mixed'; .* 'slide', 'fc'"),
        ({"head": "slide"}, "does not take two records|does not give the output"),
        ({"head": ["fc", "drop"], "options": {"dropout": 0.5}}, "fc then drop, after the layers"),
        ({"norm": "group"}, "has the norm of its own code; leave norm out"),
        ({"input": [1, 8, 9]}, r"cannot be made: needs \(1, 8, 8\), not \(1, 8, 9\)"),
        ({"options": {"depth": 3}}, "cannot be made: .*unexpected keyword argument 'depth'"),
        ({"options": {"dropout": float("nan")}}, "dropout = nan; give a finite number"),
        ({"name": "softened"}, "fc, after the layers before it does not give the output of the"),
        (
            {"name": "twice", "options": {"listed": True}},
            r"extractor has 'one\.1\.weight', which is 'extractor\.one\.0\.weight' too; in two",
        ),
        (
            {"name": "twice", "head": ["two", "fc"]},
            "its classifier has 'two.weight', which is 'ext",
        ),
        (
            {"name": "twice", "head": ["one", "fc"]},
            "its extractor has 'two', which is a parameter or layer of the other part; name in mod",
        ),
        ({"name": "tied-rows"}, "recurrent layer 'two' shares 'weight_ih_l0' with another layer"),
        (
            {"name": "tied", "classes": 64, "options": {"across": True}},
            "its classifier has 'weight', which is a parameter or layer of the other part; name i",
        ),
        (
            {"name": "stored"},
            "extractor has 'offset', which is not persistent; register it as pers",
        ),
        (
            {"name": "dotted", "head": ["a.b", "a_b"]},
            "two names differ only in dots and underscore",
        ),
        ({"head": ["fc", "rows", "rows"]}, "'rows' is named twice, or has another of the names wi"),
        (
            {"name": "dotted", "head": ["a", "a.b"]},
            "'a' is named twice, or has another of the names",
        ),
        (
            {"name": "huge", "head": "5", "options": {"layers": 4}},
            "has more than 268,435,456 param",
        ),
        ({"name": "huge", "head": "1", "classes": 2}, "does not take two records"),
        ({"name": "deep", "head": "1"}, "'deep' has more than 16,384 tensors, the most that a mod"),
        (
            {"name": "torchvision:vgg11", "head": "classifier", "input": [3, 600, 600]},
            r"takes 21\d billion operations and \d+ million numbers for two .*; lower its shape",
        ),
        (
            {
                "name": "torchvision:vit_b_16",
                "head": "heads.head",
                "input": [3, 32, 32],
                "options": {"image_size": 22_400},
            },
            "'torchvision:vit_b_16' computes with .* 268,435,456 are the most",
        ),
        (
            {"input": [4096, 4096, 4096]},
            r"input \[4096, 4096, 4096\] has over 16,777,216 n",
        ),
        (
            {"options": {"width": 2**53}},
            "width is a whole number beyond ±9,007,199,254,740,991; lo",
        ),
        (
            {"options": {"width": [[[[8]]]]}},
            "width: give true, false, a number, a text, or a list or table of up to 64 of these, 3",
        ),
        (
            {"options": {"width": list(range(65))}},
            "width: give true, false, a number, a text, or a",
        ),
        (
            {"options": {"width": {"not a name": 3}}},
            "width: give true, false, a number, a text, or",
        ),
        ({"options": {"width": [8, 2**53]}}, "width is a whole number beyond"),
        ({"options": {"width": "x" * 1025}}, "width has over 1,024 characters; shorten it"),
        ({"options": {"not a name": 3}}, "options.not a name"),
        (
            {"name": "failing"},
            r"options none cannot be made: \[Errno 2\] no weights; correct model",
        ),
        (
            {"name": "failing", "options": {"how": "SystemExit"}},
            "cannot be made: no licence; corre",
        ),
        ({"name": "double", "head": "1"}, "torch.float64; parameters have to be float32|dtype"),
        ({"name": "text"}, "is a str, not a torch.nn.Module"),
        ({"name": "pair"}, "makes tuple of two records; it has to return one tensor"),
        ({"name": "number"}, "of package other-models 0.1, is not a function"),
        ({"name": "gone"}, "of package other-models 0.1, cannot be imported: "),
        ({"name": "lenet5", "input": None}, "is of Staddle's own table"),
        (
            {"classes": 2, "name": "torchvision:mobilenet_v3_small", "head": "features"},
            "does not take two",
        ),
    ],
)
def test_what_cannot_be_a_model_is_refused_with_what_to_do(changes, why):
    with refused(why):
        options(**changes)


def test_the_document_has_head_options_and_start_and_is_read_back():
    job = make_job("fedper", model={**MIXED, "options": {"dropout": 0.5, "width": 8}})
    document = job.document()
    assert document["model"]["head"] == ["fc"]
    assert document["model"]["options"] == {"dropout": {"decimal": "0.5"}, "width": 8}
    assert document["start"]["sha256"] == start_digest(job.model, 7)
    assert document["start"]["made_with"].keys() == {"torch", "other-models"}
    again = Job.from_document(document, "wire", None, federated=False)
    assert again == job
    assert again.model.options == {"dropout": 0.5, "width": 8}
    table = make_job("fedper").document()
    assert "start" not in table
    assert not {"head", "options"} & table["model"].keys()


def test_other_releases_are_no_fault_but_other_values_are():
    document = make_job("fedper", model=MIXED).document()

    def read(**start):
        changed = {**document, "start": {**document["start"], **start}}
        return Job.from_document(changed, "wire", None, federated=False)

    releases = document["start"]["made_with"]
    read(made_with={**releases, "torch": "2.99.0"})
    with refused(
        r"this silo would begin from other initial values of model mixed \(torch \S+ here, 2.99.0"
        r" in the job\); install the releases"
    ):
        read(sha256="0" * 64, made_with={**releases, "torch": "2.99.0"})
    with refused("the releases are the same, so the machine differs"):
        read(sha256="0" * 64)
    with refused("start"):
        read(made_with=["2.99.0"])
    with refused("start"):
        Job.from_document(
            {k: v for k, v in document.items() if k != "start"}, "w", None, federated=False
        )


def test_batch_norm_is_found_in_it():
    normed = {**MIXED, "name": "normed", "head": "4"}
    with pytest.raises(ValidationError, match="a model with batch norm cannot train with"):
        make_job("fedper", model=normed, training={"batch_size": 1})
    with pytest.raises(ValidationError, match=r"\[privacy\] with batch norm"):
        make_job("fedper", model=normed, privacy=PRIVATE)


def dropping(**changes):
    return make_job("fedper", model={**MIXED, "options": {"dropout": 0.5}}, rounds=2, **changes)


def test_dropout_draws_from_the_jobs_streams():
    """Whatever else the process draws; and each silo, round and step draws its own."""
    job = dropping()
    assert draws_randomly(job.model)
    assert not draws_randomly(make_job("fedper", model=MIXED).model)
    shards = make_shards(job)
    torch.manual_seed(1)
    first = simulate(job, shards)
    torch.manual_seed(2)
    torch.rand(3)
    second = simulate(job, shards)
    for silo in job.silos:
        assert same(first.states[silo].flat, second.states[silo].flat)
    other = simulate(replace(job, seed=8), shards)
    assert not same(first.states["a"].flat, other.states["a"].flat)
    still = simulate(make_job("fedper", model=MIXED, rounds=2), shards)
    assert not same(first.states["a"].flat, still.states["a"].flat)


def test_each_step_drops_others():
    job, data = dropping(training={"lr": 1e-9}), make_data(8)
    method, parts = job.method(), build(job.model, 7)
    (stage,) = method.stages(None, None)
    seen = []
    parts["extractor"].drop.register_forward_hook(lambda _, __, out: seen.append(out == 0))
    rng, draws = np.random.default_rng(1), np.random.default_rng(np.random.Philox(key=1))
    train(parts, replace(stage, epochs=2), data, 8, rng, draws=draws)
    one, two = seen
    assert not torch.equal(one, two)
    assert 0.2 < one.float().mean() < 0.8


def test_silos_do_not_train_at_once_where_layers_draw():
    job = dropping()
    with refused("cannot be stacked: layers of model 'mixed' draw, as dropout does"):
        Stacked(job, make_shards(job))


def test_silos_at_once_train_as_one_by_one_where_no_layer_draws():
    job = make_job("fedavg", model={**MIXED, "name": "normed", "head": "4"}, rounds=2)
    check_engines_agree(job, make_shards(job))


def test_silos_do_not_train_at_once_where_vmap_cannot_run_a_layer():
    job = make_job("fedavg", model=MIXED)  # it has a GRU
    assert not maps(job.model)
    assert maps(make_job("fedavg", model={**MIXED, "name": "normed", "head": "4"}).model)
    with refused("cannot be stacked: torch.vmap cannot run a layer of model 'mixed'; simulate it"):
        Stacked(job, make_shards(job))


def test_options_keep_their_types():
    """True, 1 and 1.0 are equal, and are not the same argument."""
    for value, layer in ((1, nn.ReLU), (True, nn.Tanh), (1.0, nn.Sigmoid), (1, nn.ReLU)):
        found = options(name="typed", options={"option": value})
        again = validate(found.model_dump(mode="json"), ModelOptions, "wire")
        assert (again, type(again.options["option"])) == (found, type(value))
        for one in (found, again):
            assert type(build(one, 7)["extractor"].before) is layer


def test_lists_and_tables_keep_theirs():
    """As a job file, as a document, and as the builder has them."""
    written = {"a": [[1, 2.0], [True, "x"]], "b": ["group", {"groups": 4, "eps": 0.5}], "c": []}
    taken = {"a": ((1, 2.0), (True, "x")), "b": ("group", {"eps": 0.5, "groups": 4}), "c": ()}
    found = options(name="typed", options={"option": written})
    for one in (found, validate(found.model_dump(mode="json"), ModelOptions, "wire")):
        assert repr(one.options) == repr({"option": taken})
    job = make_job(model={**MIXED, "name": "typed", "options": {"option": written}})
    wire = parse_json(canonical_json(job.document()), "wire")
    assert wire["model"]["options"]["option"]["a"] == [[1, {"decimal": "2.0"}], [True, "x"]]
    assert Job.from_document(wire, "wire", None, federated=False) == job


def test_a_table_has_the_same_order_in_a_job_file_and_in_its_document():
    """A builder may go by it: silos would make another model than the one that was signed."""
    found = options(name="typed", options={"option": [{"wide": 1, "narrow": {"b": 1, "a": 2}}]})
    ((table,),) = found.options.values()
    assert (*table, *table["narrow"]) == ("narrow", "wide", "a", "b")
    wire = parse_json(canonical_json(found.model_dump(mode="json")), "wire")
    assert repr(validate(wire, ModelOptions, "wire").options) == repr(found.options)


def test_a_builder_cannot_change_a_jobs_options():
    found = options(name="typed", options={"option": {"a": 1}})
    asked = wanted(found)
    asked.made_by(lambda *_, option: option.update(a=2))
    assert found.options == dict(asked.options) == {"option": {"a": 1}}


def test_a_model_that_is_too_large_takes_no_memory():
    """Whatever fills a tensor before a layer has it."""
    foreign.builder("greedy")
    devices = sys.modules["other_models"].DEVICES
    devices.clear()
    with refused("'greedy' computes with .* 268,435,456 are the most"):
        options(name="greedy")
    # Not even its tensor without values was made.
    assert devices == []
    options(name="greedy", options={"numbers": 64})
    assert devices == ["meta", "cpu"]


def test_layers_that_cannot_be_reset_are_named():
    with refused(
        r"model: Stuck 'before' cannot be reset: 'values'; correct model.input, model.opt"
    ):
        build(options(name="stuck"), 7)


def test_private_jobs_take_gradients_of_such_a_model_one_record_at_a_time():
    """What two records cannot show of code that draws, one record cannot do."""
    job = make_job("fedavg", model={**MIXED, "name": "typed", "options": {"option": 1}})
    (stage,) = job.method().stages(None, None)
    parts = build(job.model, 7)
    assert not _hookable(parts, stage)
    # as parts of the table, the same layers have hooks
    for module in parts.values():
        delattr(module, foreign.TRAITS)
    assert _hookable(parts, stage)


@pytest.mark.parametrize("name", ["centred", "counting", "lazy"])
def test_records_that_move_one_another_are_found(name):
    """Whatever the layers are called: no clip bounds what such a record changes."""
    assert couples_records(options(name=name))
    assert not couples_records(options(name="typed", options={"option": 1}))
    with pytest.raises(ValidationError, match="by which each record moves the gradients of others"):
        make_job("fedper", model={**MIXED, "name": name}, privacy=PRIVATE)


def test_a_private_job_has_a_model_that_vmap_can_run():
    with pytest.raises(
        ValidationError, match=r"torch\.vmap cannot run model 'mixed'; choose one wit"
    ):
        make_job("fedper", model=MIXED, privacy=PRIVATE)


def test_dropout_may_be_in_a_private_job():
    typed = {**MIXED, "name": "typed", "options": {"option": 0.5, "dropout": 0.5}}
    job = make_job("fedper", model=typed, privacy=PRIVATE)
    assert draws_randomly(job.model)
    assert maps(job.model)
    assert not couples_records(job.model)


def test_a_model_is_listed_without_its_package_and_imported_when_a_job_names_it():
    code = (
        "import sys\nfrom staddle.algorithms.models import foreign\n"
        "assert 'mixed' in foreign.names()\nassert 'other_models' not in sys.modules\n"
        "foreign.builder('mixed')\nassert 'other_models' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_torchvisions_resnet_is_its_own():
    """With the values of the parts, torchvision's module gives what the parts give."""
    found = options(name="torchvision:resnet18", input=[3, 32, 32])
    parts = build(found, 7)
    whole = torchvision("models", "this test").resnet18(num_classes=3)
    own = OrderedDict(
        (f"fc.{name.removeprefix('classifier.')}" if name.startswith("classifier") else
         name.removeprefix("extractor."), tensor)
        for name, tensor in values(parts).items()
    )  # fmt: skip
    whole.load_state_dict(own)
    x = torch.rand(2, 3, 32, 32)
    whole.eval(), parts["extractor"].eval()
    with torch.no_grad():
        assert torch.equal(whole(x), parts["classifier"](parts["extractor"](x)))


def test_a_model_may_have_outputs_for_each_pixel():
    model = {"name": "pixels", "classes": 3, "head": "head", "input": [1, *SIDES]}
    job = make_job("pfedsim", {"rho": 0.5}, model, rounds=2, task={"kind": "segmentation"})
    end = check_engines_agree(job, other_shards("segmentation", job.silos))
    assert end.states["a"].parts["classifier"]["weight"].shape == (3, 6, 1, 1)
    with pytest.raises(ValidationError, match="has outputs for each position, and the task class"):
        make_job(model=model)
    half = {**model, "options": {"stride": 2}}
    with pytest.raises(
        ValidationError, match=r"to return \[2, 3\], or for each position \[2, 3, 8, 6\]"
    ):
        make_job(model=half, task={"kind": "segmentation"})


def test_a_head_of_positions_has_rows_for_methods_that_compare_them_alone():
    """FedSSA averages rows of a linear layer; those of a convolution have another shape."""
    model = {**MIXED, "name": "pointwise", "head": "head"}
    assert make_job("pfedsim", {"rho": 0.5}, model).document()
    for head, options in (("norm", None), ("wide", {"kernel": 3})):
        own = {**model, "head": head, "options": options, "name": "odd-heads"}
        with refused("pfedsim needs a linear classifier with weight, the model's has weight"):
            make_job("pfedsim", {"rho": 0.5}, own).document()
    for method in ("fedssa", "pfedfda"):
        with refused("needs a linear classifier with bias and weight, the model's has weight"):
            make_job(method, model=model).document()


def test_what_comes_before_the_head_of_whole_records_is_a_vector():
    with refused(r"before the head is \[2, 8, 8\] of two"):
        options(name="pointwise", head="head", options={"sides": [8, 8]})
