"""What operating systems do not share.

Silos and coordinators run on Linux and macOS. Simulations and the verification of ledgers also run
on Windows, and every module can be imported there. macOS lacks fdatasync(2); Windows lacks more.
"""

import errno
import importlib
import mmap
import os
from typing import Any

from ..errors import LocalError


def _optional(name: str) -> Any:
    """A module of the standard library; None where the system has none of this name."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


# Windows has none of them.
fcntl, resource, pwd = map(_optional, ("fcntl", "resource", "pwd"))
# Without O_BINARY, which Windows alone has, os.write would turn each "\n" into "\r\n" there.
BINARY: int = getattr(os, "O_BINARY", 0)
# Windows has no FIFOs among its files, so nothing there would wait for a writer.
NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)
# Of a memory map that no other process sees; on Windows there is no other kind.
OWN_MEMORY: dict[str, Any] = {}
if hasattr(mmap, "MAP_PRIVATE"):
    OWN_MEMORY["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
OPENS_FOLDERS = hasattr(os, "O_DIRECTORY")


def sync_data(descriptor: int) -> None:
    """Make a file's bytes and length durable; its times may be lost. OSError if the disk fails."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def lock(descriptor: int, *, shared: bool) -> None:
    """Lock an open file until it is closed, or its process dies.

    BlockingIOError if another process has it locked, another OSError where the file system has no
    locks.
    """
    if fcntl is not None:
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        return
    # Its first byte; Windows locks bytes for one process alone.
    windows = _optional("msvcrt")
    try:
        windows.locking(descriptor, windows.LK_NBLCK, 1)
    except PermissionError as error:
        raise BlockingIOError(errno.EAGAIN, "another process has it") from error


def check_runs_daemons(daemon: str) -> None:
    """LocalError on Windows, which has no signals by which a daemon could be stopped in order."""
    if fcntl is None:
        raise LocalError(
            f"{daemon} does not run on this system; use Linux or macOS (simulations and the"
            " verification of ledgers run here)"
        )
