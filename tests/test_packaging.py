"""What is installed is what was built."""

import importlib
import os
import sysconfig
from importlib.metadata import distribution, files
from pathlib import Path

import pytest

PACKAGES = (
    "files", "proto", "silo", "coordinator", "algorithms", "security", "simulator", "commands",
    "console",
)  # fmt: skip


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_importable(package):
    assert importlib.import_module(f"staddle.{package}").__doc__


@pytest.mark.skipif(
    "STADDLE_EXPECT_WHEEL" not in os.environ, reason="only where the wheel is under test"
)
def test_the_wheel_is_under_test_and_claims_one_name():
    site = Path(sysconfig.get_paths()["purelib"])
    for package in PACKAGES:
        assert site in Path(str(importlib.import_module(f"staddle.{package}").__file__)).parents
    tops = {path.parts[0] for path in files("staddle") or ()}
    version = distribution("staddle").version
    assert tops - {"..", "__pycache__"} == {"staddle", f"staddle-{version}.dist-info"}


@pytest.mark.skipif(
    "STADDLE_EXPECT_WHEEL" not in os.environ, reason="only where the wheel is under test"
)
def test_every_module_of_the_tree_is_in_the_wheel():
    installed = {str(path) for path in files("staddle") or ()}
    assert "staddle/py.typed" in installed
    assert "staddle/proto/federation.proto" in installed
    assert {
        f"staddle/commands/terminal/templates/{name}.toml"
        for name in ("coordinator", "silo", "job", "tasks", "policy", "simulation")
    } <= installed
    assert {
        f"staddle/commands/report/templates/report.{kind}" for kind in ("html", "css")
    } <= installed
    assert {
        f"staddle/console/static/{name}"
        for name in ("console.css", "console.js", "htmx.min.js", "htmx.LICENSE")
    } <= installed
    assert "staddle/console/templates/base.html" in installed
    papers = ("fedaims", "fedsimsup", "fedssa", "pfedsim", "ppfl")
    assert {f"staddle/simulator/reproduce/tables/{paper}.toml" for paper in papers} <= installed
    assert {
        "staddle/staddle_verify.py",
        "staddle/proto/tensor_pb2.pyi",
        "staddle/algorithms/methods/pfedsim.py",
        "staddle/files/documents.py",
    } <= installed


@pytest.mark.skipif(
    "STADDLE_EXPECT_WHEEL" not in os.environ, reason="only where the wheel is under test"
)
def test_the_auditors_command_is_the_one_file():
    (command,) = (e for e in distribution("staddle").entry_points if e.name == "staddle-verify")
    assert (command.group, command.value) == ("console_scripts", "staddle.staddle_verify:main")
    assert command.load().__module__ == "staddle.staddle_verify"
