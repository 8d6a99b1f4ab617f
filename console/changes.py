"""What changed on the disk since a page was made, told as server-sent events.

Daemons tell nobody, so the console looks: at sizes and times of files, never into them, once a
second and only while a page is open and seen. A page that is hidden closes its stream.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

SECONDS = 1.0  # between two looks
# A ledger is read from its first byte: at most this share of the time is spent on it.
DUTY = 0.1

Stamp: TypeAlias = tuple[object, ...]
FoundT = TypeVar("FoundT")


def stamp_of(paths: Iterable[Path]) -> Stamp:
    """What shows that one of these files changed; one that is missing is noted as such."""
    return tuple(map(_stamp, paths))


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return (str(path),)
    # Who puts an older time back changes the last of these.
    return str(path), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class StampedValue(Generic[FoundT]):
    """What was read last, read again only once the stamp differs."""

    def __init__(self, stamp: Callable[[], Stamp], read: Callable[[], FoundT]) -> None:
        self._stamp = stamp
        self._read = read
        self._of: Stamp | None = None
        self._found: FoundT | None = None

    def get(self) -> FoundT:
        """The value; it raises what reading raises, each time."""
        # Taken before it is read: what changes meanwhile is read again.
        now = self._stamp()
        if now != self._of or self._found is None:
            self._found = self._read()
            self._of = now
        return self._found


class SlowReading(Generic[FoundT]):
    """What takes long to read, read in a thread of its own; pages show what was found last."""

    def __init__(self, stamp: Callable[[], Stamp], read: Callable[[], FoundT]) -> None:
        self._stamp = stamp
        self._read = read
        self._of: Stamp | None = None
        self._task: asyncio.Task[None] | None = None
        self._rests_until = 0.0
        self.found: FoundT | None = None
        self.count = 0  # of the readings so far

    @property
    def is_running(self) -> bool:
        """Whether a reading is under way."""
        return self._task is not None and not self._task.done()

    def refresh(self) -> None:
        """Begin to read again, where there is something new and the last reading has rested."""
        now = self._stamp()
        if now != self._of and not self.is_running and time.monotonic() >= self._rests_until:
            self._of = now
            self._task = asyncio.get_running_loop().create_task(self._run())

    def forget(self) -> None:
        """Let the next ``refresh`` read, whatever the stamp says."""
        self._of, self._rests_until = None, 0.0

    async def _run(self) -> None:
        began = time.monotonic()
        try:
            self.found = await asyncio.to_thread(self._read)
        except OSError:
            # A segment may have gone meanwhile: read again, though nothing may change any more.
            self._of = None
        self.count += 1
        ended = time.monotonic()
        self._rests_until = ended + (ended - began) * (1 / DUTY - 1)


async def changes(refresh: Callable[[], None], look: Callable[[], Stamp]) -> AsyncIterator[bytes]:
    """One event at the start and one for each change, for as long as the page listens."""
    seen: Stamp | None = None
    while True:
        refresh()
        now = await asyncio.to_thread(look)
        if now != seen:
            yield b"event: changed\ndata: -\n\n"
            seen = now
        await asyncio.sleep(SECONDS)
