"""Real daemons under a service manager: a socket that hears what they tell."""

import queue
import socket
import threading
from pathlib import Path

import pytest

SILOS = ("north", "south")
TOLD = str(Path(__file__).with_name("told.py"))


class Heard:
    """A socket to which one daemon tells what it does; read as it comes, as systemd does."""

    def __init__(self, path):
        self.path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._told = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        while message := self._socket.recv(4096):
            self._told.put(message.decode())

    def launcher(self, launch):
        """Starts a daemon that tells it."""
        return lambda command: launch([*command[:2], TOLD, self.path, *command[3:]])

    def until(self, message):
        """All messages up to this one."""
        found = []
        while not found or found[-1] != message:
            found.append(self._told.get(timeout=120))
        return found

    def close(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self.path)
        self._reader.join()
        self._socket.close()


@pytest.fixture
def hear(tmp_path):
    made = []

    def listen(name):
        made.append(Heard(tmp_path / name))
        return made[-1]

    yield listen
    for heard in made:
        heard.close()


def test_both_daemons_tell_when_they_are_ready_what_they_do_and_that_they_stop(
    start, document, hear
):
    running = start(*SILOS)
    running.job(document("told", SILOS, rounds=1))
    usual, coordinator = running.launcher, hear("coordinator")
    running.launcher = coordinator.launcher(usual)
    running.start_coordinator()
    north = hear("north")
    running.launcher = north.launcher(usual)
    running.start_silos("north")
    running.launcher = usual
    running.start_silos("south")

    told = coordinator.until("READY=1\nSTATUS=waits for jobs and silos")
    assert set(told[:-1]) <= {"WATCHDOG=1", "STATUS=told: offered to its silos"}
    assert set(north.until("READY=1\nSTATUS=calls the coordinator")[:-1]) <= {"WATCHDOG=1"}
    coordinator.until("STATUS=told: round 0 is open")
    told = north.until("STATUS=told: round 0 is uploaded")
    assert {"STATUS=connected to coordinator", "STATUS=told: accepted"} <= set(told)
    coordinator.until("STATUS=told: completed")
    north.until("STATUS=told: finished")
    # Their loops turn while there is nothing to do.
    for heard in (coordinator, north):
        for _ in range(3):
            heard.until("WATCHDOG=1")
    assert running.daemons["north"].stop() == 0
    north.until("STOPPING=1\nSTATUS=stops")
    assert running.daemons["coordinator"].stop() == 0
    coordinator.until("STOPPING=1\nSTATUS=stops")
