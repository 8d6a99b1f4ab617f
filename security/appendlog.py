"""The one writer of an append-only, hash-chained file (format and reader: chain.py): the only writing of ``security``.

A crash may leave a last line without newline. It was promised to nobody: opening moves it to ``<name>.torn`` and says
so in a record::

    {"dropped_bytes":117,"last_good_seq":41,"mono_ns":83123,…,"type":"recovery","v":1}

Any other fault in the file is refused. A failed write or sync closes the log for good: nothing may leave a silo that
cannot be recorded.
"""

import datetime as dt
import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import LocalError, UnwritableError
from ..files import canonical_json, sync_directory
from .chain import FIRST_PREV, FRAME, MAX_LINE, Line, Reading, leaf_hash

RECOVERY = "recovery"


@dataclass(frozen=True, slots=True)
class Appended:
    """Where a record stands: its index and the hex of its leaf hash."""

    seq: int
    leaf: str


class AppendLog:
    """The one writer of a log; safe to share between threads.

    Open it with ``AppendLog.open``. ``append`` returns once the record is on the disk, or raises LocalError, and
    then every later call does.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._file = -1
        self._mutex = threading.Lock()
        self._failed = ""
        self._size = 0
        self._count = 0
        self._head = FIRST_PREV

    @classmethod
    def open(cls, path: Path, visit: Callable[[Line], None] | None = None) -> Self:
        """Lock the log, check all of it, and repair a torn tail; a new path starts an empty log.

        ``visit`` sees every verified line in order, so that a view can rebuild its state. LocalError if another
        writer holds the log, or if anything but its tail is broken.
        """
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            log = cls(path, _locked(path))
            try:
                log._recover(visit or _unseen)
            except BaseException:
                log.close()
                raise
        except OSError as error:
            raise LocalError(f"{path}: cannot open it: {error.strerror or error}") from error
        return log

    @property
    def head(self) -> Appended | None:
        """The last record, None in an empty log."""
        return Appended(self._count - 1, self._head) if self._count else None

    def append(self, record: Mapping[str, Any], *, durable: bool = True) -> Appended:
        """Add a record of any ``type``; without ``durable`` it reaches the disk with the next durable one."""
        with self._mutex:
            if self._failed:
                raise UnwritableError(f"{self.path}: takes no more records: {self._failed}")
            line = self._framed(record)
            try:
                self._write(line, durable=durable)
            except OSError as error:
                self._failed = f"a write failed ({error.strerror or error}); make room, then restart"
                raise UnwritableError(f"{self.path}: takes no more records: {self._failed}") from error
            appended = Appended(self._count, leaf_hash(line[:-1]))
            self._size += len(line)
            self._count += 1
            self._head = appended.leaf
            return appended

    def close(self) -> None:
        """Make all records durable and let the lock go; a closed log takes nothing more."""
        with self._mutex:
            if self._lock < 0:
                return
            try:
                if self._file >= 0:
                    os.fdatasync(self._file)
            except OSError as error:
                raise LocalError(f"{self.path}: cannot sync it: {error.strerror or error}") from error
            finally:
                self._failed = self._failed or "it is closed"
                for descriptor in (self._file, self._lock):
                    if descriptor >= 0:
                        os.close(descriptor)
                self._file = self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _framed(self, record: Mapping[str, Any]) -> bytes:
        if reserved := sorted(set(record) & set(FRAME)):
            raise LocalError(f"{self.path}: a record must not bring {', '.join(reserved)}; the log adds them")
        if not isinstance(record.get("type"), str):
            raise LocalError(f"{self.path}: a record needs a type, this one has {record.get('type')!r}")
        framed = {
            **record,
            "v": 1,
            "seq": self._count,
            "prev": self._head,
            "nonce": secrets.token_hex(16),
            "time": dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "mono_ns": time.monotonic_ns(),
        }
        line = canonical_json(framed) + b"\n"
        if len(line) > MAX_LINE:
            raise LocalError(f"{self.path}: a record of {len(line)} bytes is over {MAX_LINE}; split it")
        return line

    def _write(self, line: bytes, *, durable: bool) -> None:
        if os.fstat(self._file).st_size != self._size:
            raise OSError(errno.EIO, "somebody else changed its length")
        if os.write(self._file, line) != len(line):
            raise OSError(errno.ENOSPC, "only a part was written")
        if durable:
            os.fdatasync(self._file)

    def _recover(self, visit: Callable[[Line], None]) -> None:
        """Check the chain, then put a torn tail aside.

        The order survives a crash after each step: the tail is copied before it is cut, and what lies in the torn
        file beyond the recovery records was cut without one, so it is recorded now.
        """
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        sync_directory(self.path.parent)
        reading = Reading(self.path)
        recorded = 0
        for line in reading:
            if line.record["type"] == RECOVERY and isinstance(line.record.get("dropped_bytes"), int):
                recorded += line.record["dropped_bytes"]
            visit(line)
        self._size, self._count, self._head = reading.size, reading.count, reading.head
        aside = self.path.with_name(self.path.name + ".torn")
        if reading.torn:
            _append_file(aside, reading.torn)
            os.ftruncate(self._file, reading.size)
            os.fdatasync(self._file)
        dropped = max(len(reading.torn), (aside.stat().st_size if aside.exists() else 0) - recorded)
        if dropped > 0:
            record = {"type": RECOVERY, "dropped_bytes": dropped, "last_good_seq": reading.count - 1}
            done = self.append(record)
            visit(Line(done.seq, done.leaf, record))


def _unseen(line: Line) -> None:
    pass


def _locked(path: Path) -> int:
    """Descriptor that holds the writer's lock until it is closed, or its process dies."""
    lock = path.with_name(path.name + ".LOCK")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise LocalError(f"{lock}: another process writes {path.name}; stop it, then start this one again") from error
    return descriptor


def _append_file(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)
