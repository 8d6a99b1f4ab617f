"""A daemon that dies by kill -9 again and again: ``crashing.py (coordinator|silo) PLAN --config CONFIG``, for tests.

The parent imports everything once and forks; each child runs the daemon as it ships and kills itself where ``PLAN``
says; the parent then forks the next. A child that ends by itself ends the parent, with its status.

``every``: each durable step (fsync, rename, removal, COMMIT) is died at once, right before it and, for a COMMIT, also
right after it; steps are told apart by the file and what it holds, so the n-th child gets further than the one before.
``never``: it is left alone.
``seed:S:N``: N children die after a random time of at most one second, drawn from the seed S; the next one lives.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path

from staddle import log
from staddle.proto.channel import require_tls13

require_tls13()

import safetensors.torch  # noqa: E402, F401
import torch  # noqa: E402

from staddle.coordinator import config as coordinator_configs  # noqa: E402
from staddle.coordinator import database, server  # noqa: E402
from staddle.silo import agent, client, daemon  # noqa: E402
from staddle.silo import config as silo_configs  # noqa: E402

LONGEST_SECONDS = 1.0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # the signal is on its way; nothing more may happen here


class Steps:
    """Dies at the first step that no child has died at yet; ``told`` is a pipe to the parent."""

    def __init__(self, died: set[str], told: int) -> None:
        self._died = died
        self._told = told
        self._lock = threading.Lock()

    def step(self, key: str) -> None:
        with self._lock:
            if key not in self._died:
                os.write(self._told, key.encode() + b"\n")
                die()

    def arm(self) -> None:
        """Watch every durable step of this process."""
        replace, unlink, connect = Path.replace, Path.unlink, database.sqlite3.connect
        steps = self

        def watched(sync):
            def run(descriptor):
                steps.step(f"sync {described(Path(f'/proc/self/fd/{descriptor}').readlink())}")
                sync(descriptor)

            return run

        def watched_replace(path, target):
            steps.step(f"rename {Path(target).name}")
            return replace(path, target)

        def watched_unlink(path, *, missing_ok=False):
            steps.step(f"remove {path.name}")
            unlink(path, missing_ok=missing_ok)

        class Connection(database.sqlite3.Connection):
            changes = "a new job"

            def execute(self, sql, *args):
                if sql != "COMMIT":
                    if sql.startswith("UPDATE jobs SET state"):
                        self.changes = transition(json.loads(args[0][0]))
                    return super().execute(sql, *args)
                steps.step(f"before COMMIT of {self.changes}")
                done = super().execute(sql, *args)
                steps.step(f"after COMMIT of {self.changes}")
                return done

        os.fsync, os.fdatasync = watched(os.fsync), watched(os.fdatasync)
        Path.replace, Path.unlink = watched_replace, watched_unlink
        database.sqlite3.connect = lambda path, **options: connect(path, factory=Connection, **options)


def transition(state: dict) -> str:
    """A state in short; who came first does not matter."""
    sizes = " ".join(f"{name} {len(state[name])}" for name in ("answers", "given", "failed", "done"))
    return f"{state['job']} {state['stage']} {state['round']}: {sizes}"


def described(path: Path) -> str:
    """A file and, for a ledger, what its last record is about."""
    if path.suffix != ".jsonl":
        return re.sub(r"[0-9a-f]{12}", "*", path.name.strip("."))  # of a temporary name
    record = json.loads(path.read_bytes().splitlines()[-1])
    return f"{path.name} {record['type']} {record.get('job', '')} {record.get('round', '')} {record.get('status', '')}"


def die_after(seconds: float) -> None:
    def wait() -> None:
        time.sleep(seconds)
        die()

    threading.Thread(target=wait, daemon=True).start()


def run(role: str, config: Path) -> None:
    torch.set_num_threads(1)
    agent.FIRST_WAIT_SECONDS = agent.LONGEST_WAIT_SECONDS = 0.05
    agent.PAUSE_SECONDS = 0.02
    client.RECONNECT_MS = (20, 100)
    if role == "coordinator":
        loaded = coordinator_configs.load(config)
        log.setup(loaded.log)
        asyncio.run(server.serve(loaded))
    else:
        silo = silo_configs.load(config)
        log.setup(silo.log)
        asyncio.run(daemon.serve(silo))


def main(role: str, plan: str, config: Path) -> int:
    died: set[str] = set()
    delays: list[float] = []
    if plan.startswith("seed"):
        _, seed, number = plan.split(":")
        rng = random.Random(int(seed))
        delays = [rng.uniform(0, LONGEST_SECONDS) for _ in range(int(number))]
    life, asked, child = 0, False, 0

    def stop(*_: object) -> None:
        nonlocal asked
        asked = True
        if child:
            with contextlib.suppress(ProcessLookupError):  # it has just died
                os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    while True:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # it reaches the next child, or there is none
        if asked:
            return 0
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the daemon has its own
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            os.close(ours)
            if plan == "every":
                Steps(died, theirs).arm()
            elif life < len(delays):
                die_after(delays[life])
            run(role, config)
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            told = pipe.read().splitlines()
        _, status = os.waitpid(child, 0)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            return os.waitstatus_to_exitcode(status)
        died.update(told)
        life += 1
        sys.stderr.write(json.dumps({"event": "killed", "life": life, "at": told}) + "\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[4])))
