"""The meters of this folder's benchmarks: CPU seconds by name, and memory."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Clock:
    """CPU seconds of this process, all threads, added up by name."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, name: str, *, counts: bool = True) -> Iterator[None]:
        """Add the time of the block to ``name``, if it counts."""
        began = time.process_time()
        yield
        if counts:
            self.spent[name] += time.process_time() - began


def status(key: str) -> int:
    """Bytes of VmHWM (peak) or VmRSS of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}; this benchmark needs Linux")


def extra_memory(work: Callable[[], object]) -> int:
    """Bytes by which this process grows at its peak while it does the work."""
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    held = work()
    grown = status("VmHWM") - before
    del held
    return grown
