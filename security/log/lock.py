"""One process a state folder, one writer a ledger.

The file ``LOCK`` of a state folder has the number of the process that holds it, or held it last.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import LocalError, UnwritableError, reason
from ...files.documents import unwritable
from ...files.portable import lock

TRIES, WAIT = 10, 0.05  # somebody who asks whether the lock is held has it for an instant


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``<folder>/LOCK`` while the block runs; LocalError if another process holds it.

    UnwritableError where the disk does not take it.
    """
    try:
        descriptor = os.open(folder / "LOCK", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UnwritableError(f"{folder / 'LOCK'}: cannot write it: {unwritable(error)}") from error
    # The descriptor is the lock: the kernel releases it however the process ends, so no stale lock
    # file ever has to be removed by hand.
    try:
        # Retried: ``held`` takes a shared lock for an instant, which must not keep a daemon from
        # starting.
        for _ in range(TRIES):
            if _taken(descriptor, folder / "LOCK"):
                break
            time.sleep(WAIT)
        else:
            raise LocalError(f"{folder}: another process runs with this folder; stop it first")
        _sign(descriptor, folder / "LOCK")
        yield
    finally:
        os.close(descriptor)


def _sign(descriptor: int, path: Path) -> None:
    """Write our number, by which others find us."""
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, b"%d\n" % os.getpid())
    except OSError as error:
        raise UnwritableError(f"{path}: cannot write it: {unwritable(error)}") from error


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the folder itself while the block runs, for a command that changes what is in it.

    It makes no file. LocalError if another process holds the folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not _taken(descriptor, folder):
            raise LocalError(f"{folder}: another command is at work here; wait until it has ended")
        yield
    finally:
        os.close(descriptor)


def hold(path: Path) -> int:
    """Descriptor that holds this lock until it is closed, or its process dies.

    LocalError where another holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if _taken(descriptor, path):
            return descriptor
    except LocalError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    raise LocalError(
        f"{path}: another process writes this ledger; stop it, then start this one again"
    )


def held(folder: Path) -> bool:
    """True if a process holds ``<folder>/LOCK`` now.

    Who asks never keeps a process from taking it.
    """
    # A shared lock: two processes that ask at once do not see each other as the holder.
    try:
        descriptor = os.open(folder / "LOCK", os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise LocalError(
            f"{folder / 'LOCK'}: cannot read it: {reason(error)}; ask its owner"
        ) from error
    try:
        return not _taken(descriptor, folder / "LOCK", shared=True)
    finally:
        os.close(descriptor)


def _taken(descriptor: int, path: Path, *, shared: bool = False) -> bool:
    """True if this process has the lock now; LocalError where the file system has no locks."""
    try:
        lock(descriptor, shared=shared)
    except BlockingIOError:
        return False
    except OSError as error:
        # Without a lock two processes could write one ledger, so nothing starts.
        raise LocalError(
            f"{path}: cannot lock it: {reason(error)}; move its folder to a disk that"
            " has file locks"
        ) from error
    return True
