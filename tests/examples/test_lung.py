"""The package of ``examples/lung``, used as its README says."""

import csv
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import invalidate_caches
from pathlib import Path

import numpy as np
import pytest
import torch
from federation import forked_command
from support.refusals import refused
from typer.testing import CliRunner

from staddle.algorithms.data.sources.installed import Installed
from staddle.commands.main import app
from staddle.files import packages

EXAMPLE = Path(__file__).parents[2] / "examples" / "lung"
pytestmark = pytest.mark.skipif(not EXAMPLE.is_dir(), reason="examples are not in the wheel")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package as pip would install it, for this process and those that it starts."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    site = tmp_path / "site"
    about = site / f"{project['name']}-{project['version']}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (about / "entry_points.txt").write_text("\n".join(lines))
    (site / "lung").mkdir()
    for module in (EXAMPLE / "lung").glob("*.py"):
        (site / "lung" / module.name).write_bytes(module.read_bytes())
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), before))))
    monkeypatch.syspath_prepend(str(site))
    # Another test of this process may have a package of this name.
    monkeypatch.setattr(packages, "_FIRST", {})
    forget()
    yield site
    forget()


def forget():
    invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] == "lung"]:
        del sys.modules[name]


def test_a_folder_of_phantoms_is_read_as_they_are(installed, tmp_path):
    from lung.phantoms import phantom, write  # noqa: PLC0415 - installed a moment ago

    write(tmp_path / "scans", patients=5, side=8, hospital=2)
    made = Installed(kind="package", name="lung-phantoms", options={
        "patients": 5, "side": 8, "hospital": 2,
    }).read()  # fmt: skip
    for lazy in (False, True):
        found = Installed(kind="package", name="lung-scans", folder=tmp_path / "scans", lazy=lazy)
        data = found.read()
        x = data.x.whole() if lazy else data.x
        assert torch.equal(x, made.x)
        assert (x.shape, data.ids[:2]) == ((5, 1, 8, 8, 8), ("p0000", "p0001"))
        assert torch.allclose(data.y, made.y, atol=0.05)
    volume, (days, died) = phantom(3, 8, 2)
    assert volume.dtype == np.int16
    assert (days > 0, died in (0.0, 1.0)) == (True, True)
    with refused("name the folder of patients.csv and the volumes as data.folder"):
        Installed(kind="package", name="lung-scans").read()


def test_the_brier_score_by_hand(installed):
    from lung.survival import LungSurvival  # noqa: PLC0415

    task = LungSurvival(cuts=(100.0, 200.0), horizon=100.0)
    outputs = torch.zeros(4, 2)  # hazards of 1/2: half are alive at 100
    outputs[3, 0] = -torch.inf  # this one is, for sure
    y = torch.tensor([[50.0, 1], [150, 0], [50, 0], [150, 1]])
    values = task.values(outputs, y)
    # Whoever was last seen before the horizon is not known.
    assert values["known"].tolist() == [1, 1, 0, 1]
    assert values["brier"].tolist() == [0.25, 0.25, 0, 0]
    said = task.measures({"loss": 0.1, "known": 0.75, "brier": 0.125})
    assert said["brier"] == pytest.approx(1 / 6)
    assert "brier" not in task.measures({"loss": 0.1, "known": 0.0, "brier": 0.0})
    assert task.fault(2) == ""
    assert "task.horizon = 730 is none of task.cuts" in LungSurvival(cuts=(100.0,)).fault(1)


def test_an_experiment_of_two_seeds_is_run_resumed_and_compared(installed, tmp_path):
    """A model of a package begins elsewhere under each seed; that is no other experiment."""
    text = (EXAMPLE / "simulate.toml").read_text()
    for old, new in (
        ("patients = 80, side = 16", "patients = 14, side = 8"),
        ("[1, 16, 16, 16]", "[1, 8, 8, 8]"), ("rounds = 10", "rounds = 2"),
    ):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    text = text[: text.index('[[methods]]\nname = "fedper"')]
    file, out = tmp_path / "simulate.toml", tmp_path / "out"
    file.write_text(text)
    for _ in range(2):
        result = CliRunner().invoke(app, ["simulate", str(file), "--out", str(out)])
        assert result.exit_code == 0, (result.output, result.exception)
    assert "C-index" in (out / "summary.md").read_text()
    measures = json.loads((out / "fedavg" / "seed-2" / "measures.json").read_text())
    assert 0 <= measures["delivered"]["all"]["brier"] <= 1
    assert "hospital-4" in measures["delivered"]["silos"]
    other = text.replace("lr = 0.003", "lr = 0.004").replace("seeds = [1, 2]", "seeds = [3]")
    file.write_text(other)
    result = CliRunner().invoke(app, ["simulate", str(file), "--out", str(out)])
    assert "training.lr is 0.003 there and 0.004 here" in str(result.exception)


@pytest.fixture
def path(installed, tmp_path, fork_server):
    """Its ``staddle`` is forked where torch is imported: the script starts thirty."""
    program = f"import sys; sys.path.insert(0, {str(installed)!r})"
    program += "; from staddle.commands.main import main; main()"
    command = [sys.executable, "-IS", forked_command.__file__, str(fork_server.folder), program]
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "staddle"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    script.chmod(0o755)
    folders = (str(script.parent), str(Path(sys.executable).parent), os.environ["PATH"])
    return os.pathsep.join(folders)


@pytest.mark.timeout(300)
def test_the_script_runs_four_hospitals_blind(path, tmp_path):
    """With fewer rounds than the example has, and without processes that read ahead."""
    example = tmp_path / "example"
    shutil.copytree(EXAMPLE, example)
    text = (example / "job.toml").read_text()
    (example / "job.toml").write_text(text.replace("\nrounds = 5\n", "\nrounds = 2\n"))
    script = (example / "federation.sh").read_text()
    assert "\nworkers = 1\n" in script
    (example / "federation.sh").write_text(script.replace("\nworkers = 1\n", "\n"))
    done = subprocess.run(
        [str(example / "federation.sh"), str(tmp_path / "lung"), str(example / "blind.toml")],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    assert "completed          2 of 2 rounds" in done.stdout
    assert done.stdout.count("2 receipts hold; 0 messages that were sent have none") == 5
    report = json.loads((tmp_path / "lung/hospital-1/state/jobs/lung/report.json").read_text())
    assert 0 <= report["final"]["trained"]["measures"]["brier"] <= 1
    with (tmp_path / "lung/hospital-1/scans/patients.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 80
