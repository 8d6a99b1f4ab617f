"""All of docs/write-a-method.md is run: its files, its commands and its tests."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from staddle.algorithms import catalog
from staddle.commands.main import app
from staddle.errors import LocalError

PAGE = Path(__file__).parents[1] / "docs" / "write-a-method.md"
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OFFLINE = (
    "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet",
)  # fmt: skip


def write(block):
    """Add a block to the file that its first line names."""
    first, _, text = block.partition("\n")
    path = Path(first.removeprefix("# "))
    before = path.read_text() if path.exists() else ""
    gap = "" if not before else "\n" if text.startswith("    ") else "\n\n"
    path.write_text(before + gap + text)
    return path.name


@pytest.fixture
def afternoon(tmp_path, monkeypatch):
    """An empty folder, and a machine on which the method is not installed.

    ``run`` gives it a command of the page.
    """
    site = tmp_path / "site"
    monkeypatch.chdir(tmp_path)
    # where pip installs to here, and where an editable installation points to
    for path in (site, tmp_path):
        monkeypatch.syspath_prepend(path)

    def run(program, *words):
        match program:
            case "pip":
                subprocess.run(
                    [sys.executable, "-m", "pip", *words, *OFFLINE, "--target", str(site)],
                    check=True,
                )
            case "pytest":
                more = (
                    "--import-mode=importlib", "-p", "no:cacheprovider", "--rootdir", str(tmp_path),
                )  # fmt: skip
                assert pytest.main([*words, *more]) == 0
            case "staddle":
                result = CliRunner().invoke(app, list(words))
                assert result.exit_code == 0, result.output
            case _:
                raise AssertionError(program)

    yield run
    for name in ("softper", "centred", "softper_yogi", "test_softper"):
        sys.modules.pop(name, None)


@pytest.mark.skipif(not PAGE.exists(), reason="the tests run without docs/ beside them")
def test_every_block_of_the_page_runs(afternoon):
    with pytest.raises(LocalError, match="unknown method 'softper'"):
        catalog.method_class("softper")
    done = []
    for language, block in FENCED.findall(PAGE.read_text()):
        if language == "sh":
            for line in block.splitlines():
                afternoon(*shlex.split(line))
                done.append(line.split()[0])
        else:
            assert language in {"python", "toml"}
            done.append(write(block))
    assert done == [
        *["softper.py"] * 4, "pyproject.toml", "pip", *["test_softper.py"] * 4, "pytest",
        "digits.toml", "staddle",
        "staddle",
        "centred.py", "test_centred.py", "pytest",
        "fedrep-adam.toml", "softper_yogi.py", "test_softper_yogi.py", "pytest",
    ]  # fmt: skip
    assert "softper-fast" in Path("digits/summary.md").read_text()
    assert "keep = 0.2" in Path("job.toml").read_text()
    shown = tomllib.loads(Path("fedrep-adam.toml").read_text())["method"]
    assert catalog.method_options(**shown).server_lr == 0.03
