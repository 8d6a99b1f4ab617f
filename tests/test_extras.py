"""Optional parts: what is not installed is named by its extra, and the rest works without it."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from support.product_source import sources
from support.simulated_jobs import conduct, make_population, make_run
from typer.testing import CliRunner

from staddle.algorithms.data import dataset
from staddle.algorithms.data.sources.public.bundled import Bundled
from staddle.commands.federation import demo
from staddle.commands.main import app
from staddle.commands.simulate import simulate
from staddle.errors import LocalError
from staddle.simulator.report.report import write_report

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NAMED = re.compile(r"pip install\"?\s*\"?\s*'staddle\[([a-z,]+)\]'")
NEVER_IMPORTED = {"test", "notebooks"}
# What this package cannot need on import, by the extra that brings it.
BROUGHT = {
    "examples": "sklearn",
    "plots": "matplotlib",
    "tracking": "mlflow",
    "parquet": "pyarrow",
    "huggingface": "pyarrow",
    "sql": "sqlalchemy",
    "imaging": "nibabel",
    "monai": "monai",
    "torchmetrics": "torchmetrics",
    "console": "starlette",
    "onnx": "onnxruntime",
    "ray": "ray",
}


@pytest.fixture
def lacking(monkeypatch):
    def hide(*packages):
        for package in packages:
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                monkeypatch.delitem(sys.modules, name)
            monkeypatch.setitem(sys.modules, package, None)
        dataset._digits.cache_clear()

    return hide


def test_each_extra_is_named_by_an_error_and_each_error_names_an_extra():
    named = set()
    for path in sources():
        for group in NAMED.findall(re.sub(r'"\s*\n\s*f?"', "", path.read_text())):
            named |= set(group.split(","))
    assert named == EXTRAS.keys() - NEVER_IMPORTED == BROUGHT.keys()


def test_what_an_extra_brings_is_no_dependency():
    always = {re.match("[a-z0-9-]+", each)[0] for each in PROJECT["dependencies"]}
    for extra in EXTRAS.keys() - NEVER_IMPORTED:
        assert {re.match("[a-z0-9-]+", each)[0] for each in EXTRAS[extra]}.isdisjoint(always)


@pytest.mark.parametrize("name", ["digits", "diabetes", "breast-cancer"])
def test_bundled_records_name_their_extra(lacking, name):
    lacking("sklearn")
    with pytest.raises(LocalError, match=r"records come with scikit-learn.*'staddle\[examples\]'"):
        Bundled(kind="bundled", name=name).read()


def test_scikit_learn_that_lacks_something_of_its_own_is_not_explained_away(lacking):
    lacking("sklearn", "joblib")
    sys.modules.pop("sklearn")  # it is there again
    with pytest.raises(ModuleNotFoundError, match="joblib"):
        Bundled(kind="bundled", name="digits").read()


def test_the_demo_names_it_before_it_makes_a_folder(lacking, tmp_path):
    lacking("sklearn")
    folder = tmp_path / "kept"
    ended = CliRunner().invoke(app, ["demo", "--keep", str(folder)]).exception
    assert isinstance(ended, LocalError)
    assert "'staddle[examples]'" in str(ended)
    assert not folder.exists()


def test_the_console_names_it(lacking, monkeypatch, tmp_path):
    lacking("starlette", "uvicorn")
    for name in [name for name in sys.modules if name.startswith("staddle.console.")]:
        monkeypatch.delitem(sys.modules, name)
    ended = CliRunner().invoke(app, ["console", "--config", str(tmp_path / "x")]).exception
    assert isinstance(ended, LocalError)
    assert "'staddle[console]'" in str(ended)


def test_without_matplotlib_a_report_has_what_pillow_draws(lacking, tmp_path):
    population = make_population()
    conduct(tmp_path, make_run("ppfl", 1, rounds=1), population, None)
    lacking("matplotlib")
    for module in ("curves", "heatmaps"):
        sys.modules.pop(f"staddle.simulator.report.{module}", None)
    written = [path.relative_to(tmp_path).as_posix() for path in write_report(tmp_path, population)]
    assert written == ["summary.md", "results.csv", "partition.png"]
    text = (tmp_path / "summary.md").read_text()
    assert "](partition.png)" in text
    assert "curves.png" not in text


def test_commands_that_draw_say_what_is_missing(lacking):
    lacking("matplotlib")
    assert not simulate.can_draw()
    assert not demo.can_draw()
    assert "'staddle[plots]'" in simulate.NOT_DRAWN
