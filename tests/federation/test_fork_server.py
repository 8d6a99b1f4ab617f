"""A forked daemon is what the shipped command is, and none outlives the tests."""

import os
import select
import signal

import pytest
from federation.fork_server import ForkServer

from staddle.commands.federation.processes import ChildProcess, launched
from staddle.errors import AbortedError
from staddle.proto.channel import CIPHERS_VARIABLE

WAITING = "import time\ntime.sleep(600)\n"


@pytest.fixture
def waiting(tmp_path):
    """A program that runs until it is killed, started by this launcher."""
    program = tmp_path / "waiting.py"
    program.write_text(WAITING)
    return lambda launch: ChildProcess("waiting", (str(program),), tmp_path / "none.toml", launch)


@pytest.mark.parametrize("role", ["coordinator", "silo"])
def test_it_ends_as_the_shipped_command_does(fork_server, tmp_path, monkeypatch, role):
    """The command sets itself what gRPC reads when it is imported, before anything imports it."""
    monkeypatch.delenv(CIPHERS_VARIABLE)
    (tmp_path / "bad.toml").write_text("version = 7\n")
    ended = []
    for launch in (launched, fork_server.launch):
        daemon = ChildProcess(
            f"{role}-{len(ended)}", ("-m", f"staddle.{role}"), tmp_path / "bad.toml", launch
        )
        with pytest.raises(AbortedError):
            daemon.wait_for("started", 60)
        ended.append((daemon.returncode, daemon.tail()))
    assert ended[0] == ended[1]
    assert ended[0][0] == 1
    assert "bad.toml" in ended[0][1]


def test_signals_reach_it_and_its_end_is_told(fork_server, waiting):
    for ask, code in ((ChildProcess.stop, -signal.SIGTERM), (ChildProcess.kill, -signal.SIGKILL)):
        daemon = waiting(fork_server.launch)
        assert daemon.returncode is None
        os.kill(daemon.pid, 0)
        ask(daemon)
        assert daemon.stop() == daemon.returncode == code
        with pytest.raises(ProcessLookupError):
            os.kill(daemon.pid, 0)


def test_its_server_takes_it_along(tmp_path, waiting):
    server = ForkServer(tmp_path / "log", preloaded=())
    daemon = waiting(server.launch)
    descriptor = os.pidfd_open(daemon.pid)
    with pytest.raises(AssertionError, match="a test left behind"):
        server.close()
    assert select.select([descriptor], [], [], 10)[0]  # it has ended
    os.close(descriptor)
