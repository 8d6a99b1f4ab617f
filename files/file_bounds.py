"""What a silo's files may ask of its machine: they must be regular files, and fit the memory that
is available.

A FIFO makes whoever opens it wait for a writer, a device never ends, and a header of a few bytes
can claim hundreds of gigabytes. So a reader opens files through ``open_regular``, and asks
``check_fits`` before it allocates what a header claims. Both raise LocalError, which a silo answers
to a job's offer with ``DATA``.
"""

import errno
import os
import resource
import stat
from pathlib import Path
from typing import BinaryIO

from ..errors import LocalError

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# of a control group: limit, use, and the page cache in it that the kernel gives up first; version
# 2, 1
LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def check_regular(path: Path) -> None:
    """LocalError for a FIFO, a socket or a device, which is not opened for that.

    OSError where nothing is there.
    """
    _check_mode(path, path.stat().st_mode)


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read, without ever waiting for a writer.

    LocalError for what is no regular file.
    """
    check_regular(path)  # first: some devices act on being opened
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    try:
        _check_mode(path, os.fstat(file.fileno()).st_mode)  # again: another may lie there by now
    except LocalError:
        file.close()
        raise
    return file


def _check_mode(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise LocalError(f"{path}: is {kind}, not a file; put a file with the records there")


def check_fits(path: Path, needed: int, what: str) -> None:
    """LocalError where reading would take more memory than is available.

    ``needed`` in bytes, ``what`` takes them.
    """
    available = available_memory()
    if needed > available:
        size = path.stat().st_size if path.is_file() else None
        held = "" if size is None else f", holds {size:,} bytes"
        raise LocalError(
            f"{path}{held}: {what} would take {needed:,} bytes of memory, {available:,} are"
            " available; give fewer records, free memory, or replace the file if it should be"
            " smaller"
        )


def available_memory() -> int:
    """Bytes that this process can take: of the machine, of its control groups and of its own limit,
    the least.
    """
    return max(0, min(_of_machine(), *_of_control_groups(), _of_process()))


def _of_machine() -> int:
    try:
        for line in (PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:  # not Linux
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_control_groups() -> list[int]:
    """What each group that the process is in has left, those above it included."""
    found = []
    for folder in _folders():
        for limit, used, cache in LIMITS:
            try:
                most, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
                pages = dict(
                    line.split() for line in (folder / "memory.stat").read_text().splitlines()
                )
            # the root has no limit; a container may not show the groups above its own
            except OSError:
                continue
            if most != "max":
                found.append(int(most) - now + int(pages.get(cache, 0)))
    return found


def _folders() -> list[Path]:
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    folders = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers in ("", "memory"):
            root = CGROUPS / controllers
            own = root / path.lstrip("/")
            folders += [own, *(folder for folder in own.parents if folder.is_relative_to(root))]
    return folders


def _of_process() -> int:
    """What the process's own limit on addresses leaves, as ``LimitAS=`` and ``ulimit -v``
    set it.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return 2**63
    try:
        pages = int((PROC / "self" / "statm").read_text().split()[0])
    except FileNotFoundError:  # not Linux
        return most
    return most - pages * os.sysconf("SC_PAGE_SIZE")
