"""Units keep their hardening and start commands that exist; the container holds no secret."""

import configparser
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer

from staddle.commands.loader import COMMANDS, function

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
UNITS = {"coordinator": "staddle-coordinator.service", "silo": "staddle-silo@.service"}
HARDENING = {
    "User": "staddle", "DynamicUser": "no", "ProtectSystem": "strict", "ProtectHome": "yes",
    "PrivateTmp": "yes", "PrivateDevices": "yes", "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "", "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
    "SystemCallFilter": "@system-service", "LimitCORE": "0", "UMask": "0077",
    "Restart": "on-failure", "KillSignal": "SIGTERM", "Type": "notify", "NotifyAccess": "main",
    "TimeoutStartSec": "infinity", "WatchdogSec": "120",
}  # fmt: skip

pytestmark = pytest.mark.skipif(
    not DEPLOY.is_dir(), reason="the wheel's tests run without the repository"
)


def unit(role):
    parser = configparser.RawConfigParser(strict=True, comment_prefixes="#", delimiters="=")
    parser.optionxform = str
    parser.read(DEPLOY / UNITS[role])
    return dict(parser["Service"])


def test_the_auditors_distribution_is_the_one_file_of_the_same_release():
    """CI builds it, and runs tests/verify with it."""
    folder = DEPLOY / "staddle-verify"
    ours, whole = (
        tomllib.loads((place / "pyproject.toml").read_text()) for place in (folder, DEPLOY.parent)
    )
    project = ours["project"]
    assert project["version"] == whole["project"]["version"]
    (needed,) = project["dependencies"]
    assert needed in whole["project"]["dependencies"]
    assert needed.startswith("cryptography>=")
    assert project["scripts"] == {"staddle-verify": "staddle_verify:main"}
    assert ours["tool"]["setuptools"]["py-modules"] == ["staddle_verify"]
    place = folder / ours["tool"]["setuptools"]["package-dir"][""] / "staddle_verify.py"
    assert place.resolve() == DEPLOY.parent / "staddle_verify.py"


@pytest.mark.parametrize("role", UNITS)
def test_the_service_is_hardened_and_writes_its_state_alone(role):
    service = unit(role)
    assert {key: service.get(key) for key in HARDENING} == HARDENING
    name = "%i" if role == "silo" else role
    assert (
        service["ReadWritePaths"]
        == f"/var/lib/{service['StateDirectory']}"
        == f"/var/lib/staddle/{name}"
    )
    assert "MemoryDenyWriteExecute" not in service  # convolutions are compiled at run time
    assert int(service["TimeoutStopSec"]) >= 60
    assert int(service["LimitNOFILE"]) >= 65536


@pytest.mark.parametrize("role", UNITS)
def test_the_service_starts_a_command_that_exists(role):
    program, *words = shlex.split(unit(role)["ExecStart"])
    assert Path(program).name == "staddle"
    assert words[:3] == [role, "run", "--config"]
    alone = typer.Typer()
    alone.command()(function(COMMANDS[f"{words[0]} {words[1]}"]))
    command = typer.main.get_command(alone)
    assert words[2] in [option for parameter in command.params for option in parameter.opts]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("role", UNITS)
def test_systemd_reads_the_unit_without_complaint(role, tmp_path):
    copy = tmp_path / UNITS[role].replace("@", "@hospital-a")
    copy.write_text(
        (DEPLOY / UNITS[role]).read_text().replace("/opt/staddle/bin/staddle", "/bin/true")
    )
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_image_runs_as_a_user_of_its_own_and_holds_the_wheel_alone():
    lines = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert steps[:2] == [["ARG", "BASE=docker.io/library/python:3.11-slim"], ["FROM", "$BASE"]]
    assert [what for step, what in steps if step in ("COPY", "ADD")] == ["dist/staddle-*.whl /tmp/"]
    assert [what for step, what in steps if step == "USER"] == ["10001"]
    assert [what for step, what in steps if step == "ENTRYPOINT"] == ['["staddle"]']
    order = [step for step, _ in steps]
    assert order.index("RUN") < order.index("USER") < order.index("ENTRYPOINT")
    assert ["VOLUME", "/var/lib/staddle"] in steps
