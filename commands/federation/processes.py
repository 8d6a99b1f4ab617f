"""Daemons of ours as child processes whose events are read as they come."""

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from ...errors import AbortedError

# The coordinator finishes a fold before it ends; 20 s are plenty for the demo's models.
STOP_SECONDS = 20.0
Event = Mapping[str, Any]
Launcher: TypeAlias = Callable[[Sequence[str]], "subprocess.Popen[bytes]"]


def launched(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    """A child process whose standard error is read, where the daemons log.

    Standard input is empty, standard output is dropped.
    """
    return subprocess.Popen(  # noqa: S603 our own interpreter and program
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


class ChildProcess:
    """One child process; its JSON events go to a file and to a queue.

    A thread reads its log, so that the process never blocks on a full pipe.
    """

    def __init__(
        self, name: str, program: Sequence[str], config: Path, launch: Launcher = launched
    ) -> None:
        """Start ``python <program> --config <config>``."""
        self.name = name
        self.log = config.parent / f"{name}.log"
        # -P: the working folder is no place to import from, whatever it is called.
        self._process = launch([sys.executable, "-P", *program, "--config", str(config)])
        self._events: queue.Queue[Event | None] = queue.Queue()
        # daemon: it must not keep the command from ending.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def _read(self) -> None:
        with self.log.open("ab") as log:
            for line in self._process.stderr or ():
                log.write(line)
                log.flush()
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # a library's own line: it stands in the log
                if isinstance(event, dict):
                    self._events.put(event)
        # Marks the end of the stream for ``event``.
        self._events.put(None)

    def event(self, seconds: float) -> Event | None:
        """The next event; None if none came within ``seconds``.

        AbortedError if the process has ended.
        """
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        if event is None:
            raise AbortedError(
                f"{self.name} ended with code {self._process.wait()}:\n{self.tail()}"
            )
        return event

    def wait_for(self, name: str, seconds: float) -> Event:
        """The next event of this name; AbortedError when it does not come.

        Events before it are dropped. ``seconds`` bounds the time between two events, not the total.
        """
        while (event := self.event(seconds)) is not None:
            if event.get("event") == name:
                return event
        raise AbortedError(f"{self.name}: no event {name!r} within {seconds:g} s:\n{self.tail()}")

    def check(self) -> None:
        """AbortedError if the process has ended.

        Its text has the end of the log.
        """
        if self._process.poll() is not None:
            # The last lines, which say why it ended, may still be in the pipe.
            self._reader.join(timeout=5)
            raise AbortedError(
                f"{self.name} ended with code {self._process.returncode}:\n{self.tail()}"
            )

    def tail(self) -> str:
        """The last five lines of its log, as far as it was read."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])

    def stop(self) -> int:
        """Ask it to stop, kill it if it does not, and return its exit code.

        Waits up to five seconds more for the rest of its log.
        """
        if self._process.poll() is None:
            # As a service manager does, so that the ledger ends with a stop record.
            self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        self._reader.join(timeout=5)
        return code

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        self._process.kill()


@contextmanager
def running(daemons: Sequence[ChildProcess]) -> Iterator[None]:
    """Stop all of them when the block ends, however it ends.

    In the order of the list, which may grow while the block runs.
    """
    try:
        yield
    finally:
        for daemon in daemons:
            daemon.stop()


def exit_on_signals() -> None:
    """End this command on SIGTERM and SIGHUP as on Ctrl-C, so that it leaves no daemon behind."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
