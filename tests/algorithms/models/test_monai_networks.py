"""MONAI's networks as a job's model, in simulations by both engines and in private ones."""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.engines import check_engines_agree
from support.jobs import make_data, make_job
from support.refusals import refused
from torch import nn

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.job.foreign_code import check_code, packages_of, unlisted
from staddle.algorithms.job.job import Job
from staddle.algorithms.models import foreign
from staddle.algorithms.models.build import (
    ModelOptions,
    build,
    couples_records,
    dense,
    draws_randomly,
    has_batch_norm,
    maps,
)
from staddle.algorithms.models.monai_networks import monai_builder
from staddle.algorithms.training.accountant import MemoryAccount, PrivateSilo
from staddle.files import packages
from staddle.files.documents import validate

VOLUME, IMAGE = (1, 16, 16, 16), (1, 16, 16)
SMALL = {"init_features": 8, "growth_rate": 4, "block_config": [1, 1]}
DENSENET = {
    "name": "monai:DenseNet121",
    "head": "class_layers.out",
    "input": list(VOLUME),
    "classes": 3,
    "options": SMALL,
}
UNET = {
    "name": "monai:UNet",
    "head": "model.2",
    "input": list(IMAGE),
    "classes": 3,
    "options": {"channels": [4, 8], "strides": [2]},
}
VIT = {"patch_size": 8, "hidden_size": 12, "mlp_dim": 16, "num_layers": 1, "num_heads": 2}
SIZES = {"kernel_size": [3, [3, 1], 3], "strides": [1, 2, [2, 2]], "filters": [4, 8, 8]}
PRIVATE = {"epsilon": 6.0, "delta": 1e-5, "sample_rate": 0.25, "sigma": "2", "histogram_sigma": "1"}


@pytest.fixture(scope="module")
def nets():
    """Imported late: each process that collects tests would take two seconds for it."""
    return import_module("monai.networks.nets")


def options(name, head="fc", shape=IMAGE, **further):
    table = {"name": f"monai:{name}", "head": head, "input": list(shape), "classes": 3}
    return validate({**table, "options": further}, ModelOptions, "job.toml")


def volumes(silos, n=8):
    return {
        silo: (make_data(n + i, i, shape=VOLUME), make_data(4, 100 + i, shape=VOLUME))
        for i, silo in enumerate(silos)
    }


def masks(silos, n=12):
    """Images that are brighter where the class is higher."""

    def drawn(n, seed):
        rng = np.random.default_rng(seed)
        y = rng.integers(0, 3, (n, 4, 4)).repeat(4, 1).repeat(4, 2)
        x = y[:, None] + 0.3 * rng.normal(size=(n, *IMAGE))
        return Dataset(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.uint8)))

    return {silo: (drawn(n + i, i), drawn(6, 100 + i)) for i, silo in enumerate(silos)}


@pytest.mark.parametrize(
    ("name", "head", "shape", "further"),
    [
        ("resnet10", "fc", (2, 16, 16, 16), {"widen_factor": 0.125}),
        ("ResNet", "fc", IMAGE, {"block": "basic", "layers": [1] * 4, "block_inplanes": [4] * 4}),
        ("EfficientNetBN", "_fc", (1, 32, 32), {"model_name": "efficientnet-b0"}),
        ("ViT", "classification_head", IMAGE, {**VIT, "post_activation": ""}),
        ("Classifier", ["final.1", "reshape"], IMAGE, {"channels": [4, 8], "strides": [2, 2]}),
        ("FullyConnectedNet", "output", (12,), {"hidden_channels": [8]}),
    ],
)
def test_classifiers_take_what_the_job_says(name, head, shape, further):
    found = options(name, head, shape, **further)
    assert not dense(found)
    assert maps(found)
    parts = build(found, 7)
    parts["extractor"].eval()
    with torch.no_grad():
        assert parts["classifier"](parts["extractor"](torch.ones(2, *shape))).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "head", "shape", "further"),
    [
        ("UNet", "model.2", (1, 16, 16, 16), {"channels": [4, 8], "strides": [2]}),
        ("BasicUNet", "final_conv", (2, 32, 32), {"features": [4, 4, 4, 8, 8, 4]}),
        ("AttentionUnet", "model.2", IMAGE, {"channels": [4, 8], "strides": [2]}),
        ("SegResNet", "conv_final", IMAGE, {"blocks_down": [1, 1], "blocks_up": [1]}),
        ("DynUNet", "output_block", IMAGE, {**SIZES, "upsample_kernel_size": [2, 2]}),
        ("SwinUNETR", "out", (1, 64, 64), {"feature_size": 12}),
        ("UNETR", "out", (1, 32, 32), {"hidden_size": 12, "mlp_dim": 16, "num_heads": 2}),
        ("MedNeXtS", "out_0", (1, 16, 16), {}),
    ],
)
def test_networks_of_positions_take_what_the_job_says(name, head, shape, further):
    found = options(name, head, shape, **further)
    assert dense(found)
    assert maps(found)


def test_what_training_does_is_found():
    """Batch norm couples records, and the dropping of connections draws."""
    small = options("DenseNet121", "class_layers.out", VOLUME, **SMALL)
    still = options("DenseNet121", "class_layers.out", VOLUME, **SMALL, norm="instance")
    assert (has_batch_norm(small), couples_records(small)) == (True, True)
    assert (has_batch_norm(still), couples_records(still), draws_randomly(still)) == (False,) * 3
    table = ["group", {"num_groups": 4}]
    net = options("EfficientNetBN", "_fc", (1, 32, 32), model_name="efficientnet-b0", norm=table)
    assert (has_batch_norm(net), draws_randomly(net)) == (False, True)


def test_a_networks_values_are_those_of_its_own_module(nets):
    parts = build(options("UNet", "model.2", **UNET["options"]), 7)
    whole = nets.UNet(spatial_dims=2, in_channels=1, out_channels=3, channels=(4, 8), strides=(2,))
    own = {f"extractor.{name}" for name in whole.state_dict() if not name.startswith("model.2")}
    own |= {
        f"classifier.{name.removeprefix('model.2.')}"
        for name in whole.state_dict()
        if name.startswith("model.2")
    }
    assert own == {f"{part}.{name}" for part, each in parts.items() for name in each.state_dict()}


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_silos_train_a_classifier_alone_and_at_once(norm):
    """With batch norm, a large rate would make much of how the engines round."""
    model = {**DENSENET, "options": {**SMALL, "norm": norm}}
    few = {"rounds": 2, "silos": ["a", "b"], "training": {"lr": 0.01}}
    job = make_job("fedper", model=model, **few)
    end = check_engines_agree(job, volumes(job.silos))
    start = build(job.model, job.seed)["classifier"].weight
    assert not torch.equal(end.states["a"].parts["classifier"]["weight"], start)


def test_silos_train_a_segmentation_alone_and_at_once():
    task = {"kind": "segmentation"}
    job = make_job("fedper", model=UNET, rounds=2, task=task)
    end = check_engines_agree(job, masks(job.silos))
    start = build(job.model, job.seed)["extractor"].state_dict()
    assert not torch.equal(
        end.states["a"].parts["extractor"]["model.0.conv.weight"], start["model.0.conv.weight"]
    )


def test_methods_that_compare_rows_take_a_convolution_of_one_pixel():
    task = {"kind": "segmentation"}
    attention = {**UNET, "name": "monai:AttentionUnet", "head": "model.2.conv"}
    assert make_job("pfedsim", {"rho": 0.5}, attention, task=task).document()
    with refused("pfedsim needs a linear classifier with weight, the model's has conv.weight, con"):
        make_job("pfedsim", {"rho": 0.5}, UNET, task=task).document()


def test_a_segmentation_may_be_private():
    task = {"kind": "segmentation"}
    job = make_job("fedavg", model=UNET, rounds=2, task=task, privacy=PRIVATE)
    random = np.random.default_rng(3)

    class Seeded:
        def normal(self, count):
            return random.normal(size=count)

        def drawn(self, records, q):
            return np.flatnonzero(random.uniform(size=records) < q)

    paying = lambda _: PrivateSilo(MemoryAccount(job), Seeded)
    end = simulate(job, masks(job.silos), private=paying)
    start = build(job.model, job.seed)["classifier"].state_dict()
    after = end.states["a"].parts["classifier"]
    assert not torch.equal(after["conv.weight"], start["conv.weight"])
    with pytest.raises(ValidationError, match=r"\[privacy\] with batch norm"):
        make_job("fedavg", model=DENSENET, privacy=PRIVATE)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("ResNet18",), "unknown model 'monai:ResNet18'; did you mean 'monai:resnet18'?"),
        (("drop_connect",), "unknown model 'monai:drop_connect'; "),
        (("get_pretrained_resnet_medicalnet",), "unknown model 'monai:get_pretrained_resnet_m"),
        (("",), "unknown model 'monai:'; monai.networks.nets has AHNet, "),
        (
            ("UNet", "model.2"),
            r"options none cannot be made: .*'channels' and 'strides'; correct m",
        ),
        (("NetAdapter",), "cannot be made: .* missing 1 required positional argument: 'model'"),
        (("UNet", "last", IMAGE), "missing 2 required"),
        (("DAF3D",), "cannot be made|has more than"),
    ],
)
def test_what_cannot_be_made_is_refused(asked, why):
    with refused(why):
        options(*asked)


@pytest.mark.parametrize(
    ("name", "further"),
    [
        ("resnet18", {"pretrained": True}),
        ("EfficientNetBN", {"model_name": "efficientnet-b0", "pretrained": "yes"}),
        ("HoVerNet", {"pretrained_url": "https://example.org/x.pth"}),
        ("TorchVisionFCModel", {"weights": "DEFAULT"}),
    ],
)
def test_no_values_are_fetched(name, further):
    (word,) = {"pretrained", "pretrained_url", "weights"} & further.keys()
    with refused(
        rf"model 'monai:{name}': model.options.{word} brings values from elsewhere, which"
    ):
        options(name, **further)


@pytest.mark.parametrize(
    ("name", "why"),
    [("Transchex", "downloads values"), ("TopologySearch", "in a time that grows")],
)
def test_networks_that_fetch_or_hang_whatever_the_options_are_not_made(nets, name, why):
    with refused(f"model 'monai:{name}' .*{why}"):
        monai_builder(nets, f"monai:{name}")


@pytest.mark.parametrize(
    ("options", "numbers"),
    [({"window_size": 32}, r"\[3, 32768, 32768\]"), ({"depths": [300_000_000] * 4}, r"\[12000000")],
)
def test_numbers_that_layers_only_compute_with_are_bounded(options, numbers):
    table = {"name": "monai:SwinUNETR", "outputs": 2, "input": [1, 64, 64, 64], "head": "out"}
    table["options"] = {"feature_size": 12, "depths": [1] * 4, "num_heads": [1] * 4} | options
    with pytest.raises(ValidationError, match=f"computes with {numbers}"):
        ModelOptions.model_validate(table)


def test_several_outputs_are_refused():
    with refused("'monai:BasicUNetPlusPlus' makes list of two records; it has to return one tens"):
        options("BasicUNetPlusPlus", "final_conv_0_4", (1, 32, 32), features=[4] * 6)


def test_arguments_go_by_the_signature():
    """What it has no name for, not even by **kwargs, is not filled in."""

    class Inner(nn.Module):
        def __init__(self, spatial_dims, in_channels, num_classes=2, other=1):
            super().__init__()
            self.said = (spatial_dims, in_channels, num_classes, other)

    class Outer(Inner):
        def __init__(self, img_size, pretrained=True, **kwargs):
            super().__init__(**kwargs)
            self.own = (img_size, pretrained)

    def outer(**kwargs) -> Outer:
        return Outer(**kwargs)

    def lone(**kwargs):
        return SimpleNamespace(**kwargs)

    module = ModuleType("nets")
    vars(module).update(Inner=Inner, Outer=Outer, outer=outer, lone=lone, number=3)
    for name in ("Outer", "outer"):
        made = monai_builder(module, f"monai:{name}")((2, 8, 4), 5, other=7)
        assert (made.said, made.own) == ((2, 2, 5, 7), ((8, 4), False))
    assert monai_builder(module, "monai:Inner")((2, 8, 4), 5, in_channels=1).said == (2, 1, 5, 1)
    made = monai_builder(module, "monai:lone")((2, 8, 4), 5)
    assert vars(made) == {"spatial_dims": 2, "in_channels": 2, "out_channels": 5}
    with refused("unknown model 'monai:number'"):
        monai_builder(module, "monai:number")


def test_its_code_is_a_packages_that_has_to_be_listed():
    job = make_job("fedavg", model=UNET, task={"kind": "segmentation"})
    document = job.document()
    (package,) = packages_of("fedavg", "monai:UNet", "segmentation")
    assert document["packages"] == [vars(package)]
    assert (package.name, document["start"]["made_with"]["monai"]) == ("monai", package.version)
    assert unlisted(document, ()) == ("monai",)
    with refused("the job runs code of the installed package monai, which may not run here; read"):
        Job.from_document(document, "wire", (), federated=False)
    check_code(document, ["MONAI"], "wire")
    with refused(r"differs \(monai: 1\S+, SHA-256 \w+ here, 1\S+, SHA-256 0+ in the job\)"):
        wrong = {**document, "packages": [{**vars(package), "sha256": "0" * 64}]}
        check_code(wrong, ["monai"], "wire")


def test_an_entry_point_cannot_take_its_names():
    """One of the tests' package is called monai:UNet."""
    assert packages.owners(packages.MODELS, "monai:UNet") == ["monai"]
    assert foreign.releases_of("monai:UNet").keys() == {"torch", "monai"}
    assert packages.owners(packages.TASKS, "monai:UNet") == []


def test_where_it_is_not_installed_the_error_has_the_command(monkeypatch):
    other = packages.Catalogue("not-monai", "monai.networks.nets", "pip install 'staddle[monai]'")
    monkeypatch.setitem(packages.CATALOGUES, (packages.MODELS, packages.MONAI), other)
    assert packages.owners(packages.MODELS, "monai:VNet") == []
    with refused(r"'monai:VNet': no installed package has it; pip install 'staddle\[monai\]'"):
        options("VNet")


def test_it_is_imported_when_a_job_names_it(nets, monkeypatch):
    """And not on torch's device "meta", though its user makes no values there."""
    monkeypatch.delitem(sys.modules, "monai.networks.nets.vnet")
    monkeypatch.delitem(sys.modules, "monai.networks.nets")
    assert "monai.networks.nets" not in sys.modules
    with torch.device("meta"):
        foreign.builder("monai:UNet")
    assert "monai.networks.nets" in sys.modules
