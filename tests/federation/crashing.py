"""A daemon that dies again and again: ``crashing.py (coordinator|silo) PLAN --config CONFIG``, for
tests.

The parent imports everything once and forks; each child runs the daemon as it ships and kills
itself where ``PLAN`` says, or finds the disk full; the parent then forks the next. A child that
ends by itself for any other reason ends the parent, with its status.

``every``: each durable step (fsync, rename, removal, COMMIT) is died at once, right before it and,
for a COMMIT, also right after it; steps are told apart by the file and what it holds, so the n-th
child gets further than the one before. Files of several silos are one, and temporary files are one.
``every:TEXT``: of these, the steps whose name has this text, or one of several:
``every:TEXT|TEXT``.
``once:TEXT``: only at the first step whose name has this text, and there is no next child.
``full``: the kernel refuses each durable write once; there is room again for the next child.
``full:TEXT``: only where the write's name has this text, and there is no next child.
``seed:S:N``: N children die after a random time of at most one second, or right before one of their
first DRAWN_STEPS durable steps where that comes sooner, both drawn from the seed S; the next one
lives. So all N die, however fast the machine is, where a daemon's part of a job is more steps than
were drawn.
"""

import asyncio
import contextlib
import faulthandler
import json
import os
import random
import re
import resource
import signal
import sys
import threading
import time
from pathlib import Path

from staddle import log
from staddle.files import documents
from staddle.proto.channel import require_tls13

require_tls13()

import safetensors.torch  # noqa: E402, F401

from staddle.coordinator import config as coordinator_configs  # noqa: E402
from staddle.coordinator import server  # noqa: E402
from staddle.coordinator.storage import database, spool, store  # noqa: E402
from staddle.errors import StaddleError  # noqa: E402
from staddle.proto import secure_pb2 as pb  # noqa: E402
from staddle.security.log import append_log  # noqa: E402
from staddle.silo import config as silo_configs  # noqa: E402
from staddle.silo import daemon  # noqa: E402

LONGEST_SECONDS = 1.0
DRAWN_STEPS = 16
OTHER = "another change"  # a transaction that is named after nothing in it


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # the signal is on its way; nothing more may happen here


class Steps:
    """Dies at the first step, with one of ``only`` in its name, that no child has died at yet.

    ``told`` is a pipe to the parent.
    """

    def __init__(self, died: set[str], told: int, only: str) -> None:
        self._died = died
        self._told = told
        self._only = only.split("|")
        self._lock = threading.Lock()

    def step(self, key: str) -> None:
        with self._lock:
            if key not in self._died and any(text in key for text in self._only):
                os.write(self._told, key.encode() + b"\n")
                die()

    def arm(self) -> None:
        """Watch every durable step of this process."""
        replace, unlink, connect = Path.replace, Path.unlink, database.sqlite3.connect
        steps = self

        def watched(sync):
            def run(descriptor):
                path = Path(f"/proc/self/fd/{descriptor}").readlink()
                # all that was written is there, as it is right before its rename, which is a step
                name = "*.tmp" if path.suffix == ".tmp" else described(path)
                steps.step(f"sync {name}")
                sync(descriptor)

            return run

        def watched_replace(path, target):
            steps.step(f"rename {unnumbered(Path(target).name)}")
            return replace(path, target)

        def watched_unlink(path, *, missing_ok=False):
            # what an earlier death left half written, wherever that was: one step
            name = "*.tmp" if path.suffix == ".tmp" else unnumbered(path.name)
            steps.step(f"remove {name}")
            unlink(path, missing_ok=missing_ok)

        class Connection(database.sqlite3.Connection):
            changes = "a new job"

            def execute(self, sql, *args):
                if sql != "COMMIT":
                    self.changes = changed(sql, args, self.changes)
                    return super().execute(sql, *args)
                steps.step(f"before COMMIT of {self.changes}")
                done = super().execute(sql, *args)
                steps.step(f"after COMMIT of {self.changes}")
                return done

            def executemany(self, sql, rows):
                self.changes = changed_rows(sql, rows, self.changes)
                return super().executemany(sql, rows)

        os.fsync, os.fdatasync = watched(os.fsync), watched(os.fdatasync)
        Path.replace, Path.unlink = watched_replace, watched_unlink
        database.sqlite3.connect = lambda path, **options: connect(
            path, factory=Connection, **options
        )


class Countdown(Steps):
    """Dies at the step of a number, whatever it is."""

    def __init__(self, steps: int, told: int) -> None:
        super().__init__(set(), told, "")
        self._left = steps

    def step(self, key: str) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.write(self._told, key.encode() + b"\n")
                die()


class Full:
    """Has the kernel refuse the first write of each name: from then on no file of this process
    takes a byte.

    The bytes that a file may have (RLIMIT_FSIZE) are limited, so whoever writes, Python, SQLite or
    safetensors, meets it, and a write may be cut in the middle. What is tried again by itself,
    uploads and folds, finds room then.
    """

    def __init__(self, died: set[str], told: int, only: str) -> None:
        self._died = died
        self._told = told
        self.chosen = only
        self._lock = threading.Lock()

    def step(self, key: str, size: int = 8) -> bool:
        """Limit all files to ``size`` bytes, if no child has met it here yet."""
        with self._lock:
            if key in self._died or self.chosen not in key:
                return False
            self._died.add(key)
            os.write(self._told, key.encode() + b"\n")
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            return True

    def arm(self) -> None:
        """Watch every durable write of this process."""
        append, exclusive, connect = (
            append_log.AppendLog._write,
            documents._write_exclusive,
            database.sqlite3.connect,
        )
        full = self

        def watched_append(log, line, *, durable):
            what = f"seg-{log._number:08d}.jsonl {recorded(line)}"
            # to the ledger a record is like another; who appended it sees the same error twice
            if not full.step(f"none of {what if full.chosen else 'a record'}"):
                full.step(f"a part of {what}", log._size + len(line) // 2)
            append(log, line, durable=durable)

        def watched_exclusive(path, data, mode):
            full.step(described(path))
            exclusive(path, data, mode)

        def passing(write, name):
            """A write that is tried again: there is room once it has failed."""

            def run(self, *args):
                met = full.step(name(self, *args))
                try:
                    return write(self, *args)
                finally:
                    if met:
                        resource.setrlimit(
                            resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
                        )

            return run

        class Connection(database.sqlite3.Connection):
            changes = "a new job"

            def execute(self, sql, *args):
                self.changes = changed(sql, args, self.changes)
                if sql == "COMMIT":
                    full.step(f"COMMIT of {self.changes}")
                return super().execute(sql, *args)

        append_log.AppendLog._write, documents._write_exclusive = watched_append, watched_exclusive
        spool.Spool.write = passing(
            spool.Spool.write, lambda spool, _: f"upload {spool._path.name}"
        )
        store.JobStore.write = passing(store.JobStore.write, lambda _, name, *__: f"fold {name}")
        store.JobStore.write_aside = passing(
            store.JobStore.write_aside, lambda _, name, *__: f"aside {name}"
        )
        database.sqlite3.connect = lambda path, **options: connect(
            path, factory=Connection, **options
        )


def changed(sql: str, args: tuple, before: str) -> str:
    """What a transaction changes, after this statement of it.

    Which silo it is of does not matter.
    """
    if sql.startswith("BEGIN IMMEDIATE"):
        return OTHER
    if sql.startswith("UPDATE jobs SET state"):
        return transition(json.loads(args[0][0]))
    if sql.startswith("INSERT INTO contributions"):
        return f"{args[0][0]} contribution"
    if sql.startswith("INSERT INTO hidden"):
        job, round_, part = args[0][:3]
        return f"{job} padded or rotated {round_}: {part}"
    if sql.startswith("UPDATE hidden"):
        _, job, round_, part, _ = args[0]
        return f"{job} word on padded {round_}: {part}"
    if sql.startswith("INSERT INTO secure"):
        job, round_, _, kind, _, body, *_ = args[0]
        what = pb.SecureUpload.FromString(body).WhichOneof("body") if kind == "given" else ""
        return f"{job} sum {round_}: {kind} {what}".rstrip()
    return before


def changed_rows(sql: str, rows: list[tuple], before: str) -> str:
    """The same of a statement that is run for many rows; of a fold, that is the fold."""
    if before != OTHER or not rows:
        return before
    if sql.startswith("DELETE FROM hidden"):
        return f"{rows[0][0]} {rows[0][1].rpartition('.')[2]} let go"
    if sql.startswith("INSERT OR REPLACE INTO mixed"):
        job, part, _, memory = rows[0]
        newest = max(json.loads(memory)["newest"].values())
        return f"{job} {part} rows of {min(newest, 1)}"
    return before


def transition(state: dict) -> str:
    """A state in short; neither who came first matters, nor how many have come since."""
    some = [name for name in ("answers", "given", "failed", "done") if state[name]]
    return " ".join([state["job"], state["stage"], str(state["round"]), *some])


def described(path: Path) -> str:
    """A file and, for a ledger, what its last record is about."""
    if path.suffix != ".jsonl":
        return unnumbered(path.name)
    lines = path.read_bytes().splitlines()
    return f"{path.name} {recorded(lines[-1]) if lines else 'empty'}"


def unnumbered(name: str) -> str:
    """A file's name without what is random in that of a temporary one, or which silo it is of."""
    return re.sub(r"[0-9a-f]{12}|\b(north|east|south|west)\b", "*", name.strip("."))


def recorded(line: bytes) -> str:
    """What a record of a ledger is about."""
    record = json.loads(line)
    what = record.get("status", record.get("kind", record.get("form", "")))
    if record["type"] == "egress.digest":
        what = f"of {record['message']['bytes']} bytes"
    return f"{record['type']} {record.get('job', '')} {record.get('round', '')} {what}"


def die_after(seconds: float) -> None:
    def wait() -> None:
        time.sleep(seconds)
        die()

    threading.Thread(target=wait, daemon=True).start()


def run(role: str, config: Path) -> None:
    if role == "coordinator":
        loaded = coordinator_configs.load(config)
        log.setup(loaded.log)
        asyncio.run(server.serve(loaded))
    else:
        silo = silo_configs.load(config)
        log.setup(silo.log)
        asyncio.run(daemon.serve(silo))


def main(role: str, plan: str, config: Path) -> int:
    faulthandler.enable()  # a child that dies by another signal than ours says where
    died: set[str] = set()
    drawn: list[tuple[float, int]] = []
    if plan.startswith("seed"):
        _, seed, number = plan.split(":")
        rng = random.Random(int(seed))
        drawn = [
            (rng.uniform(0, LONGEST_SECONDS), rng.randint(1, DRAWN_STEPS))
            for _ in range(int(number))
        ]
    life, asked, child = 0, False, 0

    def stop(*_: object) -> None:
        nonlocal asked
        asked = True
        if child:
            with contextlib.suppress(ProcessLookupError):  # it has just died
                os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    while True:
        # it reaches the next child, or there is none
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        if asked:
            return 0
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the daemon has its own
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            os.close(ours)
            if plan.startswith(("every", "once")):
                Steps(died, theirs, plan.partition(":")[2]).arm()
            elif plan.startswith("full"):
                Full(died, theirs, plan.partition(":")[2]).arm()
            elif life < len(drawn):
                seconds, steps = drawn[life]
                Countdown(steps, theirs).arm()
                die_after(seconds)
            try:
                run(role, config)
            except StaddleError as error:
                sys.stderr.write(f"staddle: {error}\n")
                os._exit(1)
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            told = pipe.read().splitlines()  # until the child has ended
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code != -signal.SIGKILL and not (plan == "full" and code == 1 and told):
            sys.stderr.write(json.dumps({"event": "ended", "life": life + 1, "code": code}) + "\n")
            return code
        died.update(told)
        life += 1
        sys.stderr.write(json.dumps({"event": "killed", "life": life, "at": told}) + "\n")
        sys.stderr.flush()
        if plan.startswith("once"):
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[4])))
