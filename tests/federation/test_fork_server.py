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
FORKING = """
import json, os, sys, time
if child := os.fork():
    print(json.dumps({"event": "forked", "child": child}), file=sys.stderr, flush=True)
time.sleep(0 if child else 600)
"""


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


def test_what_one_asker_leaves_is_killed_and_the_others_go_on(tmp_path, waiting):
    ours, theirs = (ForkServer(tmp_path / "server", preloaded=()) for _ in range(2))
    left, other = waiting(ours.launch), waiting(theirs.launch)
    descriptors = [os.pidfd_open(daemon.pid) for daemon in (left, other)]
    with pytest.raises(AssertionError, match=f"a test left behind: .{left.pid}."):
        ours.close()
    assert select.select(descriptors[:1], [], [], 10)[0]  # it has ended
    assert other.returncode is None
    assert waiting(theirs.launch).stop() == -signal.SIGTERM
    with pytest.raises(AssertionError, match=f"a test left behind: .{other.pid}."):
        theirs.close()
    assert select.select(descriptors[1:], [], [], 10)[0]
    for descriptor in descriptors:
        os.close(descriptor)


def test_its_server_takes_along_what_its_children_forked(tmp_path, waiting):
    program = tmp_path / "forking.py"
    program.write_text(FORKING)
    server = ForkServer(tmp_path / "server", preloaded=())
    daemon = ChildProcess("forking", (str(program),), tmp_path / "none.toml", server.launch)
    descriptor = os.pidfd_open(daemon.wait_for("forked", 60)["child"])
    daemon.stop()
    server.close()
    assert select.select([descriptor], [], [], 10)[0]
    os.close(descriptor)
    assert not (tmp_path / "server" / "socket").exists()  # the next asker starts a new one
    again = ForkServer(tmp_path / "server", preloaded=())
    waiting(again.launch).stop()
    again.close()
