"""How long processes were at a run, evaluation included: for the summary, and no part of what the run comes to.

::

    {"milliseconds":81250}

It is written after each checkpoint, and a process that goes on from there adds its own.
"""

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Annotated

from pydantic import Field

from ..files import Strict, canonical_json, parse_canonical, read_bytes, write_atomic

ELAPSED = "elapsed.json"


class _Elapsed(Strict):
    milliseconds: Annotated[int, Field(strict=True, ge=0)]


class Stopwatch:
    """Runs on from what earlier processes kept."""

    def __init__(self, folder: Path, clock: Callable[[], float] = monotonic) -> None:
        self._folder, self._clock, self._begun, self._earlier = folder, clock, clock(), read(folder) or 0.0

    def keep(self) -> None:
        """Write how long it has been."""
        seconds = self._earlier + self._clock() - self._begun
        document = _Elapsed(milliseconds=round(1000 * seconds)).model_dump()
        write_atomic(self._folder / ELAPSED, canonical_json(document) + b"\n", 0o644)


def read(folder: Path) -> float | None:
    """Seconds; None where none were kept yet."""
    path = folder / ELAPSED
    return parse_canonical(read_bytes(path), _Elapsed, str(path)).milliseconds / 1000 if path.exists() else None
