"""``import staddle``: cheap, and no more than docs/python.md names."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import staddle

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
HEAVY = ("torch", "numpy", "pydantic", "grpc", "cryptography", "sklearn", "matplotlib")


def test_the_import_brings_nothing_along():
    """Fifty modules are read in a few milliseconds; torch alone takes a second."""
    code = (
        "import sys; before = set(sys.modules); import staddle;"
        "print(*sorted(set(sys.modules) - before)); dir(staddle); print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new, everything = map(str.split, run.stdout.splitlines())
    assert [name for name in new if name.startswith("staddle")] == ["staddle"]
    assert len(new) < 50
    assert not set(HEAVY) & set(everything)


@pytest.mark.parametrize("name", staddle.__all__)
def test_each_name_is_there(name):
    found = getattr(staddle, name)
    assert found is getattr(staddle, name)
    assert name in dir(staddle)


def test_type_checkers_see_the_same_names():
    source = Path(str(staddle.__file__)).read_text(encoding="utf-8")
    (block,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {
        alias.asname: f"{node.module}.{alias.name}" for node in block.body for alias in node.names
    }
    assert seen.pop("testing") == "api.testing"
    names = set(staddle.__all__) - {"testing"}
    assert seen == {name: f"{staddle._HOME_OF[name]}.{name}" for name in names}


@pytest.mark.skipif(not PAGE.exists(), reason="the tests run without docs/ beside them")
def test_the_page_names_them_and_no_others():
    first, *_ = PAGE.read_text(encoding="utf-8").split("\n## ")
    rows = re.findall(r"^\| (`.*?) \|", first, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == list(staddle.__all__)


@pytest.mark.skipif(not PAGE.exists(), reason="the tests run without docs/ beside them")
def test_the_experiment_of_the_page_runs(tmp_path, fork_server):
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    program, *others = blocks
    assert all(block.startswith("# not run here") for block in others)
    (tmp_path / "program.py").write_text(program)
    run = fork_server.run([sys.executable, "-P", "program.py"], tmp_path)
    assert run.returncode == 0, run.stderr
    assert "fedper" in run.stdout
    assert (tmp_path / "digits-by-hand" / "results" / "summary.md").exists()


def test_other_names_are_none():
    with pytest.raises(AttributeError, match="module 'staddle' has no attribute 'models'"):
        _ = staddle.models
    assert set(dir(staddle)) == set(staddle.__all__)
