"""The model of a simulated silo as a folder."""

import sys
from importlib import invalidate_caches

import pytest
from typer.testing import CliRunner

from staddle.bundle import folder
from staddle.bundle.trained import load
from staddle.commands.main import app
from staddle.errors import LocalError
from staddle.simulator.experiment.experiment import read
from staddle.simulator.experiment.population import populate
from staddle.simulator.report.finished_runs import load_runs

EXPERIMENT = """
version = 1
name = "tiny"
rounds = 1
seeds = [1, 2]

[data]
kind = "bundled"
name = "digits"

[partition]
kind = "dirichlet"
alpha = 5.0
silos = 3

[model]
name = "glm"
classes = 10
input = [1, 8, 8]

[training]
epochs = 1
batch_size = 64
lr = 0.1

[[methods]]
name = "local"

[[methods]]
name = "fedavg"
"""


def call(*arguments):
    found = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.mark.parametrize("name", ["python:lone_nets:net", "glm"])
def test_modules_next_to_the_file_are_found_where_it_names_one(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, "path", [*sys.path])
    path, before = tmp_path / "tiny.toml", [*sys.path]
    (tmp_path / "lone_nets.py").write_text(NET)
    path.write_text(EXPERIMENT.replace('"glm"', f'"{name}"'))
    invalidate_caches()
    assert read(path).file.model.name == name
    sys.modules.pop("lone_nets", None)
    assert sys.path == ([*before, str(tmp_path.resolve())] if name != "glm" else before)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("simulated") / "tiny.toml"
    path.write_text(EXPERIMENT)
    call("simulate", path, "--workers", "1")
    return path


def test_it_is_the_model_of_the_run_measured_on_the_silos_tests(file, tmp_path):
    out = tmp_path / "model"
    arguments = ("--method", "fedavg", "--seed", "2", "--silo", "silo-001")
    call("model", "make", file, *arguments, "--out", out)
    model = load(out)
    (run,) = (
        run for run in load_runs(file.parent / "tiny") if (run.label, run.seed) == ("fedavg", 2)
    )
    state = run.model("silo-001")
    for part, module in model.module.parts.items():
        for name, value in module.state_dict().items():
            assert (value == state.parts[part][name]).all()
    own = populate(read(file)).records["silo-001"]
    right = (model.module.answers(own.test.held).argmax(1) == own.test.y).double().mean()
    assert model.description.measured.said["accuracy"] == right.item()
    assert model.description.records.train == len(own.train)
    assert folder.read(out).signer is None
    assert "signature  none" in call("model", "verify", "--model", out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name one run by its method and seed; finished: fedavg, seed 1; fedavg, seed 2;"),
        (("--method", "fedavg"), "name one run by its method and seed"),
        (("--method", "fedavg", "--seed", "1", "--silo", "x"), "unknown silo 'x'; .* has silo-000"),
        (("--results", "nothing"), "no finished run there"),
    ],
)
def test_what_is_not_clear_is_told(file, tmp_path, arguments, said):
    silo = () if "--silo" in arguments else ("--silo", "silo-000")
    with pytest.raises(LocalError, match=said):
        call("model", "make", file, *silo, *arguments, "--out", tmp_path / "model")


def test_other_records_are_no_measure_of_it(file, tmp_path):
    other = tmp_path / "tiny.toml"
    other.write_text(EXPERIMENT.replace("silos = 3", "silos = 3\nseed = 5"))
    arguments = ("--method", "fedavg", "--seed", "1", "--silo", "silo-001")
    results = ("--results", file.parent / "tiny")
    with pytest.raises(LocalError, match="is a run on other records than those of"):
        call("model", "make", other, *arguments, *results, "--out", tmp_path / "model")
