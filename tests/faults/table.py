"""The table of faults: what goes wrong, where, and what must hold.

One row is one function, in the module of its area.

A row makes its fault in an empty folder from a seeded generator, and raises whatever it likes where
the rule does not hold. ``test_rows.py`` runs each row with few seeds, ``benchmarks/soak.py`` with
new ones for hours. A new area is a module beside these, named in ``AREAS``.
"""

import contextlib
import importlib
import random
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

AREAS = (
    "at_rest",
    "foreign_records",
    "verify",
    "coordinator_ledger",
    "memory",
    "terminal",
    "listener",
    "disks",
    "deaths",
    "edges",
)
# after which a row that still runs has fallen: some faults are those that make a reader wait for
# ever
SECONDS = 60.0


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    area: str
    fault: str
    holds: str
    make: Callable[[Path, random.Random], None]
    seeds: tuple[int, ...]

    def run(self, folder: Path, seed: int) -> None:
        """Make the fault in an empty folder; an exception says that the rule does not hold."""
        with limited(SECONDS):
            self.make(folder, random.Random(f"{self.name} {seed}"))


ROWS: dict[str, Row] = {}


def row(
    fault: str, holds: str, seeds: int = 3, fell: tuple[int, ...] = ()
) -> Callable[[Callable[[Path, random.Random], None]], Callable]:
    """Put a function into the table, under its own name and its module's area.

    CI runs it with so many seeds, and with those that ``fell`` once, in benchmarks/soak.py or by
    hand; where there are none, soak.py alone does.
    """

    def put(make: Callable[[Path, random.Random], None]) -> Callable[[Path, random.Random], None]:
        name, area = make.__name__, make.__module__.rpartition(".")[2]
        assert name not in ROWS, f"two rows are called {name}"
        ROWS[name] = Row(name, area, fault, holds, make, (*range(seeds), *fell))
        return make

    return put


def rows() -> dict[str, Row]:
    """All of them, by name."""
    for area in AREAS:
        importlib.import_module(f"faults.{area}")
    return ROWS


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in whatever the block still does then.

    Signals reach the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"not over within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


def flip(path: Path, draw: random.Random, first: int = 0) -> str:
    """Flip one drawn bit of a file, not before the byte ``first``; where it is."""
    data = bytearray(path.read_bytes())
    at, bit = draw.randrange(first, len(data)), draw.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {at} of {path.name}"


def refused(call: Callable[[], object], where: object, kind: type[Exception], made: str) -> str:
    """What an error of ours says that names ``where``.

    AssertionError where the call goes through.
    """
    try:
        call()
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"{made}: nothing was noticed")
    assert str(where) in said, f"{made}: does not name {where}: {said}"
    return said
