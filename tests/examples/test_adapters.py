"""``examples/adapters``, used as its README says, with a round of each."""

import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from staddle.commands.main import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "adapters"
pytestmark = pytest.mark.skipif(not EXAMPLE.is_dir(), reason="examples are not in the wheel")


def simulated(file, **shorter):
    """Runs a file of the example with other numbers."""
    text = file.read_text()
    for key, value in shorter.items():
        text, found = re.subn(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
        assert found == 1
    file.write_text(text)
    result = CliRunner().invoke(app, ["simulate", str(file), "--workers", "1"])
    assert result.exit_code == 0, result.output


def numbers(folder):
    """How many numbers a silo's model has, and how many of them are adapters'."""
    with safe_open(folder / "seed-1/models/clinic-1.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118 no dict
    own = {name: size for name, size in sizes.items() if "extractor" in name}
    return sum(own.values()), sum(size for name, size in own.items() if ".lora_" in name)


def test_the_example_runs_and_its_table_has_its_sizes(tmp_path, monkeypatch):
    for file in EXAMPLE.iterdir():
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("draw.py")
    public, own = np.load("literature.npz"), np.load("clinics.npz")
    assert (public["x"].shape, own["x"].shape) == ((3000, 16), (480, 16))
    assert set(own["y"].tolist()) == set(range(4))
    simulated(Path("literature.toml"), rounds=1, epochs=1, batch_size=512)
    simulated(Path("clinics.toml"), rounds=1, seeds=[1], batch_size=512)
    page = (EXAMPLE / "README.md").read_text()
    everything, none = numbers(tmp_path / "clinics" / "everything")
    more, adapters = numbers(tmp_path / "clinics" / "adapters")
    assert (none, more - everything) == (0, adapters)
    assert f"all of the extractor | 82.9 % | {everything:,} numbers |" in page
    assert f"adapters of rank 8 | 63.3 % | {adapters:,} |" in page
