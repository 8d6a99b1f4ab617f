"""Bounds on a silo's files: each must be a regular file, and fit the available memory.

A FIFO makes whoever opens it wait for a writer, a device never ends, and a header of a few bytes
can claim hundreds of gigabytes. So a reader opens files through ``open_regular``, and asks
``check_fits`` before it allocates what a header claims. Both raise LocalError, which a silo answers
to a job's offer with ``DATA``.
"""

import contextlib
import errno
import os
import re
import stat
from itertools import product
from pathlib import Path
from typing import BinaryIO

from ..errors import LocalError
from .portable import NONBLOCK, resource

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
AVAILABLE = re.compile(r"^MemAvailable:\s*(\d+)", re.MULTILINE)  # KiB
FEWER = "give fewer records, free memory, or replace the file if it should be smaller"
NO_LIMIT = 2**63  # larger than every other bound, so it is never the smallest
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# of a control group: limit, use, and the page cache in it that the kernel gives up first; version
# 2, 1
LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def check_regular(path: Path) -> None:
    """Raise LocalError for a FIFO, a socket or a device, without opening it.

    Raises OSError where nothing is there.
    """
    _check_mode(path, path.stat().st_mode)


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read, without ever waiting for a writer.

    Raises LocalError for anything but a regular file.
    """
    check_regular(path)  # first: some devices act on being opened
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | NONBLOCK))  # noqa: SIM115
    try:
        _check_mode(path, os.fstat(file.fileno()).st_mode)  # again: another may lie there by now
    except LocalError:
        file.close()
        raise
    return file


def _check_mode(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        # The same error as opening a folder raises.
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise LocalError(f"{path}: is {kind}, not a file; put a file with the records there")


def check_fits(path: Path, needed: int, what: str, fix: str = FEWER) -> None:
    """Raise LocalError where reading would take more memory than is available.

    ``needed`` is in bytes; ``what`` names in the error what needs them, ``fix`` says what to do.
    """
    available = available_memory()
    if needed > available:
        held = f", holds {path.stat().st_size:,} bytes" if path.is_file() else ""
        raise LocalError(
            f"{path}{held}: {what} would take {needed:,} bytes of memory, {available:,} are"
            f" available; {fix}"
        )


def available_memory() -> int:
    """Bytes that this process can take.

    The least of what the machine, its control groups and its own limit leave.
    """
    if resource is None:  # Windows, whose own errors say that memory ran out
        return NO_LIMIT
    # In a container the machine has more than the process may take, and the kernel would kill it.
    return max(0, min(_of_machine(), *_of_control_groups(), _of_process()))


def _of_machine() -> int:
    with contextlib.suppress(FileNotFoundError):  # not Linux
        found = AVAILABLE.search((PROC / "meminfo").read_text())
        if found:
            return int(found[1]) * 1024
    # Other systems do not say how much is free, so all of the memory counts.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_control_groups() -> list[int]:
    """Memory that each group of the process has left, those above it included; bytes."""
    found = []
    for folder, (limit, used, cache) in product(_folders(), LIMITS):
        try:
            most, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
            statistics = (folder / "memory.stat").read_text().splitlines()
        # the root has no limit; a container may not show the groups above its own
        except OSError:
            continue
        pages = dict(map(str.split, statistics))
        if most != "max":
            found.append(int(most) - now + int(pages.get(cache, 0)))
    return found


def _folders() -> list[Path]:
    """Folders of the process's control groups, with those above them."""
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # version 2 has one hierarchy without a name, version 1 one per controller
        if controllers in ("", "memory"):
            root = CGROUPS / controllers
            own = root / path.lstrip("/")
            above = [folder for folder in own.parents if folder.is_relative_to(root)]
            folders += [own, *above]
    return folders


def _of_process() -> int:
    """Bytes that the limit on addresses leaves, as ``LimitAS=`` and ``ulimit -v`` set it."""
    most = int(resource.getrlimit(resource.RLIMIT_AS)[0])
    if most == resource.RLIM_INFINITY:
        return NO_LIMIT
    try:
        pages = int((PROC / "self" / "statm").read_text().split()[0])
    except FileNotFoundError:  # not Linux
        return most
    return most - pages * os.sysconf("SC_PAGE_SIZE")
