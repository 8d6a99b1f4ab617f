"""Low-rank adapters: what stands still, what trains and crosses, and which models can have none."""

from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.engines import check_engines_agree
from support.jobs import make_shards
from support.refusals import refused
from torch import nn

from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.job.job import Job
from staddle.algorithms.leaks.traps import Caution, TrapError
from staddle.algorithms.models.build import ModelOptions, build, start_digest
from staddle.algorithms.models.lora import adapter_names, adapters, computed
from staddle.algorithms.models.pretrained import load_weights
from staddle.algorithms.numerics.frozen import frozen_names
from staddle.algorithms.training.accountant import MemoryAccount, PrivateSilo
from staddle.commands.terminal.toml import to_toml
from staddle.files.documents import validate

MLP = {"name": "mlp", "classes": 3, "input": [1, 8, 8], "options": {"widths": [16, 12]}}
ATTENDING = {"name": "attending", "classes": 3, "input": [1, 8, 8], "head": "fc"}
LENET = {"name": "lenet5", "classes": 3, "input": [1, 16, 16], "norm": "group"}
PRIVATE = {"epsilon": 6.0, "delta": 1e-5, "sample_rate": 0.25, "sigma": "2", "histogram_sigma": "1"}


def options(model, **lora):
    return validate({**model, "lora": lora}, ModelOptions, "job.toml")


def without(model):
    return validate(model, ModelOptions, "job.toml")


@pytest.fixture
def read(tmp_path):
    def call(method, model, **fields):
        document = {
            "version": 1,
            "name": "test",
            "seed": 7,
            "purpose": "For a test",
            "rounds": 2,
            "silos": ["a", "b", "c"],
            "method": {"name": method, "options": fields.pop("options", {})},
            "model": model,
            "training": {"epochs": 1, "batch_size": 8, "lr": 0.1},
            **fields,
        }
        (tmp_path / "job.toml").write_text(to_toml(document))
        return Job.from_toml(tmp_path / "job.toml")

    return call


@pytest.mark.parametrize("model", [MLP, ATTENDING, LENET])
def test_a_model_begins_as_without_adapters_and_all_but_these_and_the_head_stands_still(model):
    plain, adapted = build(without(model), 7), build(options(model, rank=2), 7)
    extractor, classifier = adapted["extractor"], adapted["classifier"]
    x = torch.randn(4, *model["input"], generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain["classifier"](plain["extractor"](x)), classifier(extractor(x)))
    own = plain["extractor"].state_dict()
    trained = {name for name, _ in extractor.named_parameters()}
    assert trained == adapter_names(extractor) != set()
    assert frozen_names(extractor) == {name for name, _ in plain["extractor"].named_parameters()}
    assert extractor.state_dict().keys() == own.keys() | trained
    assert all(torch.equal(extractor.state_dict()[name], own[name]) for name in own)
    again = build(options(model, rank=2), 7)["extractor"].state_dict()
    assert all(torch.equal(again[name], value) for name, value in extractor.state_dict().items())
    other = build(options(model, rank=2), 8)["extractor"].state_dict()
    assert not any(torch.equal(other[name], again[name]) for name in trained if "lora_a" in name)
    assert [name for name, _ in classifier.named_parameters()] == [
        name for name, _ in plain["classifier"].named_parameters()
    ]


def test_an_adapter_adds_a_product_of_two_small_matrices():
    """Hu et al., Eq. 3; a convolution's A has its kernel, and B one place."""
    draw = torch.Generator().manual_seed(1)
    for model, rank in ((MLP, 3), (LENET, 4)):
        (_, layer), *_ = adapters(build(options(model, rank=rank, alpha=6), 7)["extractor"])
        with torch.no_grad():
            layer.lora_b.weight.normal_(generator=draw)
        if model is MLP:
            x = torch.randn(5, layer.in_features, generator=draw)
            own = nn.functional.linear(x, layer.weight, layer.bias)
            added = x @ layer.lora_a.weight.T @ layer.lora_b.weight.T
        else:
            x = torch.randn(5, layer.in_channels, 9, 9, generator=draw)
            own = nn.functional.conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding)
            product = torch.einsum("or,rikl->oikl", layer.lora_b.weight[..., 0, 0],
                                   layer.lora_a.weight)  # fmt: skip
            added = nn.functional.conv2d(x, product, None, layer.stride, layer.padding)
        assert len(layer.lora_a.weight) == rank
        torch.testing.assert_close(layer(x), own + 6 / rank * added)


def test_an_adapter_is_smaller_than_its_layer():
    layers = dict(adapters(build(options(LENET, rank=32), 7)["extractor"]))
    ranks = {len(layer.weight): len(layer.lora_a.weight) for layer in layers.values()}
    assert ranks == {84: 32}
    layers = dict(adapters(build(options(LENET, rank=5), 7)["extractor"]))
    assert [*layers] == ["conv2", "fc1", "fc2"]
    wide = {**MLP, "options": {"widths": [300, 3]}}
    (_, one), (_, two) = adapters(build(options(wide, rank=2), 7)["extractor"])
    assert [len(own.lora_a.weight) for own in (one, two)] == [2, 2]


@pytest.mark.parametrize("method", ["fedavg", "fedper", "pfedsim"])
def test_adapters_alone_train_and_cross_and_the_engines_agree(read, method):
    job = read(method, {**ATTENDING, "lora": {"targets": ["query"], "rank": 2}})
    names = {spec.name for part in job.up(job.length - 1) for spec in part.tensors}
    assert {name for name in names if "query" in name or "value" in name or "norm" in name} == {
        "extractor.query.lora_a.weight",
        "extractor.query.lora_b.weight",
    }
    end = check_engines_agree(job, make_shards(job))
    begun = build(job.model, job.seed)["extractor"].state_dict()
    for silo in job.silos:
        held = end.states[silo].parts["extractor"]
        for name, value in held.items():
            assert torch.equal(value, begun[name]) == ("lora" not in name), name


def test_networks_of_the_silos_own_have_none(read):
    model = {"name": "digits-cnn-a", "classes": 3, "lora": {"rank": 2}}
    with refused("model.lora with method.options.extractors of 'fedssa'"):
        read("fedssa", model, options={"extractors": ["digits-cnn-a", "digits-cnn-b"]}).document()


def test_making_a_model_takes_no_random_number_of_anybody_else():
    """Of torch's own generator, which others may be using."""
    before = torch.get_rng_state()
    for rank in (1, 2):
        build(options(ATTENDING, rank=rank), 7)
        build(options(LENET, rank=rank), 7)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("model", [MLP, LENET])
def test_checks_for_leaks_see_the_weights_that_layers_compute_with(model):
    """A delivery whose B A makes rows alike is a trap; adapters that were trained are none."""
    asked = options({**model, "options": {"widths": [64]}} if model is MLP else model, rank=4)
    extractor = build(asked, 7)["extractor"]
    caution, look = Caution.of(None, 2), partial(computed, options=asked.lora)
    began = {name: value.clone() for name, value in extractor.state_dict().items()}
    name, layer = list(adapters(extractor))[-1]
    product = torch.einsum("or,r...->o...", layer.lora_b.weight.flatten(1), layer.lora_a.weight)
    whole = look(began)
    assert torch.equal(whole[f"{name}.weight"], layer.weight + 4 * product)
    assert whole.keys() == began.keys() - adapter_names(extractor)

    with torch.no_grad():
        layer.lora_b.weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.01)
    honest = dict(extractor.state_dict())
    parts = frozenset({"extractor"})
    caution.check(None, {"extractor": began}, {"extractor": honest}, parts, 1, look)
    with torch.no_grad():
        layer.lora_a.weight[0] = 1.0
        layer.lora_b.weight[:, 0] = torch.linspace(1e3, 2e3, len(layer.lora_b.weight)).reshape(
            -1, *layer.lora_b.weight.shape[2:]
        )
    trap = dict(extractor.state_dict())
    with pytest.raises(TrapError, match=f"rows of extractor.{name}.weight that are multiples"):
        caution.check(None, {"extractor": began}, {"extractor": trap}, parts, 1, look)


def test_a_silos_own_weights_may_be_of_the_model_without_adapters(read, tmp_path):
    base = build(without(ATTENDING), 99)["extractor"].state_dict()
    save_file({n: t.contiguous() for n, t in base.items()}, tmp_path / "own.safetensors")
    job = read("fedssa", {**ATTENDING, "lora": {"rank": 2}})
    found, _ = load_weights(tmp_path / "own.safetensors", job.method(), "a", "extractor")
    drawn = build(job.model, job.seed)["extractor"].state_dict()
    assert found.keys() == drawn.keys()
    for name, value in found.items():
        assert torch.equal(value, base[name] if name in base else drawn[name]), name


def test_fedbn_has_no_norm_that_could_stay(read):
    with refused("the job's model trains no norm layer"):
        read("fedbn", {**ATTENDING, "lora": {"rank": 1}}).method()


def test_a_private_job_trains_adapters(read):
    model = {**MLP, "lora": {"rank": 2}}
    training = {"epochs": 1, "lr": 0.1}
    job = read("fedavg", model, privacy=PRIVATE, training=training)
    random = np.random.default_rng(3)

    class Seeded:
        def normal(self, count):
            return random.normal(size=count)

        def drawn(self, records, q):
            return np.flatnonzero(random.uniform(size=records) < q)

    paying = lambda _: PrivateSilo(MemoryAccount(job), Seeded)
    end = simulate(job, make_shards(job), private=paying).states["a"].parts["extractor"]
    begun = build(job.model, job.seed)["extractor"].state_dict()
    for name, value in end.items():
        assert torch.equal(value, begun[name]) == ("lora" not in name), name


def test_they_stand_on_a_file_and_a_later_job_goes_on_with_both(read, tmp_path):
    """The file has the names of the model without adapters; a later one has those of the silo."""
    base = build(without(ATTENDING), 99)["extractor"]
    save_file({n: t.contiguous() for n, t in base.state_dict().items()}, tmp_path / "w.safetensors")
    model = {**ATTENDING, "lora": {"rank": 2}, "weights": {"file": "w.safetensors"}}
    job = read("fedavg", model)
    end = simulate(job, make_shards(job)).states["a"].parts["extractor"]
    frozen = frozen_names(build(options(ATTENDING, rank=2), 7)["extractor"])
    assert frozen == base.state_dict().keys()
    assert all(torch.equal(end[name], base.state_dict()[name]) for name in frozen)
    save_file({f"part/extractor/{n}": t for n, t in end.items()}, tmp_path / "w.safetensors")
    values = read("fedavg", model).start_values().parts["extractor"]
    assert values.keys() == end.keys()
    assert all(torch.equal(values[name], end[name]) for name in end)
    save_file({n: t for n, t in end.items() if n != "norm.bias"}, tmp_path / "w.safetensors")
    with refused("lacks 'norm.bias', which the job's extractor has"):
        read("fedavg", model).start_values()


def test_other_adapters_begin_with_another_digest():
    digests = {start_digest(options(ATTENDING, rank=rank), 7) for rank in (1, 2)}
    assert len(digests | {start_digest(without(ATTENDING), 7)}) == 3


def test_a_job_without_adapters_says_nothing_of_them(read):
    assert "lora" not in read("fedavg", MLP).document()["model"]
    written = read("fedavg", {**MLP, "lora": {"rank": 4}}).document()["model"]["lora"]
    assert written == {"targets": ["*"], "rank": 4, "alpha": 16}


@pytest.mark.parametrize(
    ("model", "lora", "said"),
    [
        (MLP, {"targets": ["query"]}, "'query' names no linear or convolutional layer of the"),
        ({**MLP, "name": "glm", "options": None}, {},
            "of 'glm' that is larger than an adapter of rank 8; it has none"),
        ({**ATTENDING, "options": {"own": False}}, {"targets": ["*linear1"], "rank": 1},
            "reads the weights of layer 'encoder.linear1' without calling it"),
        ({**ATTENDING, "name": "peeking"}, {}, "the weights of layer 'one' without calling it"),
        ({**ATTENDING, "name": "peeking", "options": {"how": "sum"}}, {},
            "computes something else"),
        ({**ATTENDING, "name": "replaced"}, {}, "the weights of layer 'before' without calling it"),
        ({**ATTENDING, "name": "own-names"}, {}, "it has none"),
        (MLP, {"rank": 0}, "rank"),
        ({**MLP, "buffers": "global"}, {}, "keeps no running statistics"),
    ],
)  # fmt: skip
def test_what_can_have_none(model, lora, said):
    with refused(said):
        options(model, **lora)
