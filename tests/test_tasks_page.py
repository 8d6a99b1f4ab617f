"""docs/tasks.md: its methods, its file and its own task are those of the code."""

import inspect
import re
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.tasks.registry import TASKS, _foreign
from staddle.commands.main import app

PATH = Path(__file__).parents[1] / "docs" / "tasks.md"
PAGE = PATH.read_text() if PATH.exists() else ""
pytestmark = pytest.mark.skipif(not PATH.exists(), reason="the tests run without docs/")


def test_the_methods_of_any_task_are_listed():
    rows = dict(
        re.findall(
            r"^\| (any task|classification) \| (`apfl`.*|`fedaims`.*) \|$", PAGE, re.MULTILINE
        )
    )
    listed = {kind: set(re.findall(r"`([a-z-]+)`", row)) for kind, row in rows.items()}
    needing = {name for name, method in METHODS.items() if method.needs_classes}
    assert listed == {"any task": set(METHODS) - needing, "classification": needing}
    assert "Twenty-eight methods run any task. Eighteen" in PAGE
    for kind in TASKS:
        assert f"| `{kind}` |" in PAGE


@pytest.mark.parametrize("name", ["Quantile", "Scripted"])
def test_the_task_of_your_own_is_the_one_that_is_tested(name):
    (shown,) = re.findall(rf"^class {name}.*?(?=^```)", PAGE, re.MULTILINE | re.DOTALL)
    _foreign(name.lower())
    tested = inspect.getsource(getattr(sys.modules["other_tasks"], name))
    assert shown.strip() == tested.strip()


def test_the_file_of_the_page_runs(tmp_path):
    (shown,) = re.findall(r"^# diabetes\.toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert tomllib.loads(shown)["task"]["kind"] == "regression"
    file = tmp_path / "diabetes.toml"
    short = shown.replace("rounds = 10", "rounds = 2").replace("seeds = [1, 2]", "seeds = [1]")
    file.write_text(short)
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["simulate", str(file), "--out", str(out), "--workers", "1"])
    assert result.exit_code == 0, result.output
    assert "always the silo's median" in result.output
    assert "MAE on their test records, in points" in " ".join(result.output.split())
    assert "mean: MAE" not in (out / "summary.md").read_text()
    assert "| *always the silo's median*" in (out / "summary.md").read_text()
