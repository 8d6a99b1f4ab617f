"""The command that a stranger types first."""

import re
import shlex
import signal
from functools import partial
from pathlib import Path

import pytest
from federation.conftest import free_port
from support.ledgers import first
from typer.testing import CliRunner

from staddle.commands.federation import demo, local_federation
from staddle.commands.federation.processes import ChildProcess, running
from staddle.commands.main import app
from staddle.errors import LocalError
from staddle.security.ledger.audit import ledger_folder, verify


def staddle(*arguments):
    return CliRunner().invoke(app, [*arguments])


# two federations, one after the other
@pytest.mark.timeout(600)
def test_demo_trains_compares_and_verifies(tmp_path, fork_server, monkeypatch):
    """With differential privacy; without, CI runs the README's own, in processes as shipped."""
    monkeypatch.setattr(demo, "ChildProcess", partial(ChildProcess, launch=fork_server.launch))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests' own stay
    # The coordinator is started again where it listened, and nobody may have taken the port then.
    listening = partial(local_federation.write_coordinator, listen=f"127.0.0.1:{free_port()}")
    monkeypatch.setattr(local_federation, "write_coordinator", listening)
    folder = tmp_path / "kept"
    options = ("--rounds", "2", "--silos", "2", "--method", "fedper", "--keep", str(folder))
    done = staddle("demo", "--private", *options)
    assert done.exit_code == 0, done.output
    for heading in ("local", "fedavg", "fedper", "silo-2"):
        assert heading in done.stdout
    assert len(re.findall(r"ledger verified \(\d+ records\)", done.stdout)) == 2
    spent = re.findall(
        r"epsilon ([\d.]+) of ([\d.]+) spent at delta = 0.0001 .alone: demo-local", done.stdout
    )
    assert len(spent) == 2
    assert all(0 < float(own) <= float(limit) < 24 for own, limit in spent)  # three jobs of 8
    for n in (1, 2):
        assert verify(ledger_folder(folder / f"silo-{n}" / "state")).ok
    shown = staddle("ledger", "show", str(folder / "silo-1"), "--job", "demo-fedper")
    assert shown.exit_code == 0
    assert "extractor" in shown.output
    assert "classifier" not in shown.output  # FedPer keeps it
    assert "exact" not in shown.output
    _check_kept(done.stdout, folder, fork_server.launch)
    path = first(ledger_folder(folder / "silo-2" / "state"))
    text = path.read_text()
    path.write_text(text.replace('"round":1', '"round":0', 1))
    broken = staddle("ledger", "verify", str(folder / "silo-2" / "state"))
    assert broken.exit_code == 1


def _check_kept(said, folder, launch):
    """The commands that the demo tells work: what lies there can be read, and started again."""
    lines = said.replace("\\\n", "").splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("  staddle ")]
    by_name = {" ".join(words[:2]): words for words in commands}
    for name in ("job show", "ledger show", "model show"):
        shown = staddle(*by_name[name])
        assert shown.exit_code == 0, (shown.output, shown.exception)
    runs = [words for words in commands if words[1] == "run"]
    daemons = []
    with running(daemons):
        for noun, _, _, config in runs:
            daemons.append(ChildProcess(noun, ("-m", f"staddle.{noun}"), Path(config), launch))
            daemons[-1].wait_for({"coordinator": "listening", "silo": "connected"}[noun], 120)
        listed = staddle("job", "list", *by_name["job submit"][-2:])
    assert len(runs) == 3
    assert listed.output.count("completed") == 3, listed.exception
    assert (folder / "jobs" / "demo-fedper.toml").exists()


def test_demo_names_the_known_methods():
    done = staddle("demo", "--method", "fedavgg")
    assert isinstance(done.exception, LocalError)
    assert "did you mean 'fedavg'?" in str(done.exception)


def test_demo_does_not_overwrite(tmp_path):
    (tmp_path / "precious").write_text("x")
    done = staddle("demo", "--keep", str(tmp_path))
    assert isinstance(done.exception, LocalError)
    assert "not empty" in str(done.exception)
    assert (tmp_path / "precious").read_text() == "x"


@pytest.mark.parametrize(
    "noun", ["keys", "roster", "job", "coordinator", "silo", "ledger", "membership", "demo"]
)
def test_help_reads(noun):
    done = staddle(noun, "--help")
    assert done.exit_code == 0
    assert "Usage" in done.output
