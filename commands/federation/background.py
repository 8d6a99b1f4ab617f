"""Daemons that outlive the command that starts them, in sessions of their own.

Which process is a folder's daemon its ``LOCK`` tells, which the kernel releases however the daemon
ends. So no file names a process that is gone, and no other process is stopped in its place.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...errors import AbortedError, LocalError
from ...files.documents import read_bytes
from ...security.log.lock import held
from .processes import STOP_SECONDS

START_SECONDS = 120.0
LOOK_SECONDS = 0.1  # between two looks at a log, unless the daemon ends earlier
LAST_LINES = 5


@dataclass(frozen=True)
class BackgroundDaemon:
    """A coordinator's or a silo's daemon, by its files.

    ``ready`` is the event by which it says that it has started.
    """

    name: str
    module: str
    ready: str
    config: Path
    state: Path

    @property
    def log(self) -> Path:
        """Its log, which each start continues."""
        return self.config.with_name(f"{self.name}.log")

    def process(self) -> psutil.Process | None:
        """The process that runs with its state folder, whoever started it; None if none does.

        LocalError where it cannot be told which one it is.
        """
        path = self.state / "LOCK"
        if not held(self.state):
            return None
        # A number alone may be that of a process that ended long ago, and another one's by now. But
        # the daemon has the file open.
        with suppress(ValueError, psutil.Error):
            found = psutil.Process(int(read_bytes(path)))
            if str(path.resolve()) in [file.path for file in found.open_files()]:
                return found
        # It may have ended meanwhile.
        if not held(self.state):
            return None
        raise LocalError(
            f"{path}: a process holds it, and which one cannot be told; repeat the command, or find"
            " and stop that process yourself"
        )

    def launch(self) -> "WatchedDaemon":
        """Start it; it ends neither with this command nor with the terminal."""
        command = [sys.executable, "-P", "-m", self.module, "--config", str(self.config.resolve())]
        # It has numbers of records by class, so it is for its owner alone.
        self.log.touch(0o600)
        with self.log.open("ab") as log:
            begins = log.seek(0, os.SEEK_END)
            process = subprocess.Popen(  # noqa: S603 our own interpreter and program
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return WatchedDaemon(self, psutil.Process(process.pid), begins)

    def watch(self) -> "WatchedDaemon | None":
        """Its log from now on; None if it does not run."""
        process = self.process()
        return WatchedDaemon(self, process, self.log.stat().st_size) if process else None


@dataclass(frozen=True)
class WatchedDaemon:
    """A daemon that runs, and its log from ``begins`` on."""

    daemon: BackgroundDaemon
    process: psutil.Process
    begins: int

    def said(self) -> str:
        """What it has logged since."""
        with self.daemon.log.open("rb") as log:
            log.seek(self.begins)
            return log.read().decode(errors="replace")

    def wait_for(self, event: str) -> None:
        """Return once it has logged an event of this name.

        AbortedError, with the end of its log, if it ends or takes too long.
        """
        name, until = self.daemon.name, time.monotonic() + START_SECONDS
        while f'"{event}"' not in self.said():
            with suppress(psutil.TimeoutExpired):
                code = self.process.wait(LOOK_SECONDS)
                raise AbortedError(f"{name} ended with code {code}; {self._tail()}")
            if time.monotonic() > until:
                why = f"{name}: no event {event!r} within {START_SECONDS:g} s"
                raise AbortedError(f"{why}; {self._tail()}")

    def _tail(self) -> str:
        lines = self.said().splitlines()[-LAST_LINES:]
        return "\n".join([f"the end of {self.daemon.log}:", *lines])


def start(daemons: Sequence[BackgroundDaemon]) -> list[str]:
    """Start those that do not run, and wait until each has; their names.

    AbortedError if one fails: then none of those that were started still runs.
    """
    launched: list[WatchedDaemon] = []
    try:
        for daemon in daemons:
            if daemon.process() is None:
                # One by one: a failure ends those that were launched before.
                launched += [daemon.launch()]
        for each in launched:
            each.wait_for(each.daemon.ready)
    # Ctrl-C, too
    except BaseException:
        end([each.process for each in launched])
        raise
    return [each.daemon.name for each in launched]


def stop(daemons: Sequence[BackgroundDaemon]) -> list[str]:
    """Stop those that run, and wait until each has ended; their names."""
    running = {daemon.name: daemon.process() for daemon in daemons}
    end([process for process in running.values() if process])
    return [name for name, process in running.items() if process]


def end(processes: Sequence[psutil.Process]) -> None:
    """SIGTERM, so that each ledger ends with its stop record; SIGKILL where that takes too long."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, STOP_SECONDS)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive)
