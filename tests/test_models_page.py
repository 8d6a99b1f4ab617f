"""docs/models.md says of every model what the code says, and its examples run."""

import contextlib
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from support.jobs import make_job
from torch import nn

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.models import foreign
from staddle.algorithms.models.build import ModelOptions, has_batch_norm, sketch
from staddle.algorithms.models.registry import NETWORKS
from staddle.errors import LocalError

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the tests run without docs/")


# what an error of the method says to set
OTHERWISE = {"fedsimsup": {"supervisor": "mlp"}, "pfedhn": {"hidden": 4}}


def works(method, name, norm):
    """In some job: one that draws half of its silos, or one that draws all."""
    fields, model = {"silos": list("abcdefgh")}, {"name": name, "norm": norm, "classes": 10}
    if NETWORKS[name].dense:
        fields["task"] = {"kind": "segmentation"}
    for participation in (1.0, 0.5):
        for options in ({}, OTHERWISE[method]) if method in OTHERWISE else ({},):
            with contextlib.suppress(LocalError):
                fields["participation"] = participation
                make_job(method, options, model=model, **fields).document()
                return True
    return False


def row(name):
    network = NETWORKS[name]
    norm = network.norms[0]
    parts = sketch(ModelOptions(name=name, classes=10, norm=norm))
    sizes = [f"{sum(t.numel() for t in module.parameters()):,}" for module in parts.values()]
    cannot = [m for m in METHODS if not any(works(m, name, own) for own in network.norms)]
    private = [
        own
        for own in network.norms
        if not has_batch_norm(ModelOptions(name=name, classes=10, norm=own))
    ]
    methods = "all" if not cannot else f"all but {', '.join(f'`{m}`' for m in sorted(cannot))}"
    with_norm = "yes" if len(private) == len(network.norms) else f"with {' or '.join(private)}"
    shape = " × ".join(map(str, network.default_input))
    # in one cell each, where Markdown would end it
    options = ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in defaults(network))
    norms = ", ".join(network.norms)
    return [f"`{name}`", shape, norms, options or "none", *sizes, methods, with_norm]


def defaults(network):
    return [] if network.options is None else network.options().model_dump(mode="json").items()


def table():
    lines = [f"| {' | '.join(row(name))} |" for name in NETWORKS]
    return "\n".join(lines) + "\n"


def test_the_page_has_a_row_per_model_as_the_code_says():
    """Where it fails, the end of the page becomes what ``table`` returns."""
    text = PAGE.read_text(encoding="utf-8")
    assert text[text.index("|---|---|---|---|---|---|---|---|\n") :].partition("\n")[2] == table()


def blocks(language):
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_examples_run(tmp_path, monkeypatch):
    """The package as the page writes it, and all jobs."""
    (code, ward, made), (entry, *jobs) = blocks("python"), blocks("toml")
    (tmp_path / "lung.py").write_text(code)
    (tmp_path / "ward.py").write_text(ward)
    info = tmp_path / "lung-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lung\nVersion: 1.0\n")
    points = tomllib.loads(entry)["project"]["entry-points"]["staddle.models"]
    points["ward-net"] = "ward:ward_net"
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[staddle.models]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)
    assert "lung-net" in foreign.names()
    assert len(jobs) == 8
    # as torchvision publishes it: for 1,000 classes, and without the counts of batches
    whole = foreign.builder("torchvision:resnet18")((3, 224, 224), 1000).state_dict()
    published = {n: nn.Parameter(v) for n, v in whole.items() if "num_batches" not in n}
    monkeypatch.chdir(tmp_path)
    torch.save(published, "resnet18-f37072fd.pth")
    exec(made, {})
    # another test may have one of that name
    monkeypatch.delitem(sys.modules, "lung", raising=False)
    taken, sizes = [], []
    for text in jobs:
        model = tomllib.loads(text)["model"]
        task = {"kind": "segmentation" if model["name"] == "monai:UNet" else "classification"}
        job = make_job("fedper", model=model, folder=tmp_path, task=task)
        start = job.document().get("start")
        assert job.model.name == "mlp" or start["made_with"].keys() >= {"torch"}
        if job.model.weights is not None:
            taken.append(job.start_values())
            (backbone,) = job.up(0)[:1]
            sizes.append(sum(spec.elements for spec in backbone.tensors))
    for one in taken:
        assert one.unused == ("fc.bias", "fc.weight")
        assert torch.equal(one.parts["extractor"]["conv1.weight"], whole["conv1.weight"])
    # counts of batches, and an A and a B for each layer with an adapter
    counts, adapted = (len(one.drawn) for one in taken)
    assert (counts, adapted) == (20, 20 + 2 * 10)
    assert sizes == [11_176_512, 113_664]
    del sys.modules["lung"], sys.modules["ward"]
