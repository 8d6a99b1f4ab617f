"""What a daemon tells systemd, heard at real datagram sockets."""

import asyncio
import os
import socket
import time
from pathlib import Path

import pytest
from support.product_source import ROOT, sources

from staddle import log
from staddle.commands.federation.systemd import (
    COORDINATOR,
    SILO,
    STATES,
    Systemd,
    supervised,
)


@pytest.fixture(params=["path", "abstract"])
def notified(request, tmp_path):
    """A socket as systemd has one, and the variable that names it."""
    name = str(tmp_path / "notify")
    if request.param == "abstract":
        name = f"@staddle-test-{os.getpid()}-{tmp_path.name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name.replace("@", "\0") if name.startswith("@") else name)
        receiver.settimeout(60)
        yield receiver, {"NOTIFY_SOCKET": name}


def waiting(receiver):
    """What has arrived by now."""
    found = []
    receiver.setblocking(False)
    try:
        while True:
            found.append(receiver.recv(4096).decode())
    except BlockingIOError:
        return found
    finally:
        receiver.settimeout(60)


def run(environment, serving, texts=COORDINATOR, directory=Path("/nowhere")):
    log.setup("json")
    asyncio.run(supervised(serving(), directory, texts, environment))


def test_events_are_told_as_states_and_texts(notified):
    receiver, environment = notified

    async def serving():
        log.event("listening", address="here")
        log.event("ready")
        log.event("round.opened", job="lung", round=3, silos=["a"])
        log.event("job.ended", job="lung\nSTOPPING=1", outcome="completed")
        log.event("stopping", why="a new roster")  # and starts again, in the same process
        log.event("stop.asked")

    run(environment, serving)
    assert waiting(receiver) == [
        "READY=1\nSTATUS=waits for jobs and silos",
        "STATUS=lung: round 3 is open",
        "STATUS=lung\\nSTOPPING=1: completed",
        "STOPPING=1\nSTATUS=stops",
    ]


def test_the_loop_says_that_it_turns_and_is_silent_while_it_hangs(notified):
    receiver, environment = notified
    interval = 0.1
    environment |= {"WATCHDOG_USEC": str(int(interval * 1e6)), "WATCHDOG_PID": str(os.getpid())}

    async def serving():
        loop = asyncio.get_running_loop()
        for _ in range(3):
            assert await loop.run_in_executor(None, receiver.recv, 99) == b"WATCHDOG=1"
        waiting(receiver)
        time.sleep(5 * interval)  # noqa: ASYNC251 it hangs
        assert waiting(receiver) == []

    run(environment, serving)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "many"},
        {"WATCHDOG_USEC": "²"},
        {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},  # a parent's
    ],
)
def test_without_a_watchdog_nothing_beats(notified, environment):
    receiver, named = notified
    asyncio.run(asyncio.wait_for(Systemd({**named, **environment}).beat(), 60))
    assert waiting(receiver) == []


@pytest.mark.parametrize("name", ["", "/nowhere/notify", "vsock:2:1", "@nobody-listens", "x" * 200])
def test_a_daemon_that_nobody_hears_runs_all_the_same(name, capsys):
    async def serving():
        log.event("ready")
        log.event("stop.asked")

    run({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000"}, serving)
    assert "Traceback" not in capsys.readouterr().err


def test_a_systemd_that_does_not_read_holds_nobody_up(notified, monkeypatch):
    receiver, environment = notified
    monkeypatch.setattr("staddle.commands.federation.systemd.SEND_SECONDS", 0.01)
    systemd = Systemd(environment)
    most = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text()) + 2
    for _ in range(most):
        systemd.tell("WATCHDOG=1")
    assert 0 < len(waiting(receiver)) < most


def test_the_daemons_own_error_comes_through(notified):
    async def serving():
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        run(notified[1], serving)


def test_every_event_that_is_told_is_logged():
    code = "".join(path.read_text(encoding="utf-8") for path in sources() if path != ROOT)
    named = {*COORDINATOR, *SILO, *STATES}
    assert {name for name in named if f'"{name}"' not in code.replace(f'"{name}": ', "")} == set()
