"""Followers of a run while it goes: a terminal, a log, a tracking tool, nobody.

The runner reports what happens, and shows nothing itself. ``Pace`` says how fast rounds go, and
when they will be done.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import monotonic
from typing import Literal, Protocol, TypeAlias

from ..experiment.plan import Run
from .history import Measured
from .work_file import RoundWork

Doing = Literal["training", "looking"]

# Is told what a round measured, and what it took.
Follow: TypeAlias = Callable[[Sequence[Measured], RoundWork], None]
# Opened with the run's folder, and with what is kept of the run from before.
Track: TypeAlias = Callable[
    [Path, Run, Iterable[Measured], Iterable[RoundWork]], AbstractContextManager[Follow]
]


class RunProgress(Protocol):
    """The reports of a runner; rounds are those that train.

    The runner calls these methods between rounds and silos, so they must be fast.
    """

    def begin(self, run: Run, rounds: int) -> None:
        """A run begins, or resumes after this many rounds."""
        ...

    def work(self, doing: Doing, silos: int) -> None:
        """Training or an evaluation begins, over ``silos`` silos."""
        ...

    def silo(self) -> None:
        """One of its silos is done."""
        ...

    def round(self, rounds: int, measured: Sequence[Measured]) -> None:
        """``rounds`` rounds are done; ``measured`` is what the last of them measured."""
        ...


class Unwatched:
    """Nobody follows."""

    def begin(self, run: Run, rounds: int) -> None:
        """Not shown."""

    def work(self, doing: Doing, silos: int) -> None:
        """Not shown."""

    def silo(self) -> None:
        """Not shown."""

    def round(self, rounds: int, measured: Sequence[Measured]) -> None:
        """Not shown."""


@contextmanager
def untracked(*_: object) -> Iterator[Follow]:
    """No tool is told."""

    def follow(measures: Sequence[Measured], work: RoundWork) -> None:
        """Not shown."""

    yield follow


class Pace:
    """The pace of this process's rounds; those of an earlier process do not count."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock, self._begun, self._done, self._seconds = clock, clock(), 0, 0.0

    def tick(self) -> None:
        """Another round is done."""
        self._done += 1
        self._seconds = self._clock() - self._begun

    def rate(self) -> str:
        """Such as ``3.2 rounds/s`` or ``14 s/round``; empty before the first round."""
        # The clock may be too coarse to have moved in the first round.
        if 0 in (self._done, self._seconds):
            return ""
        number, unit = self._done / self._seconds, "rounds/s"
        if number < 1:
            number, unit = 1 / number, "s/round"
        digits = ".3g"
        if number >= 100:  # 3 digits would be written with an exponent
            digits = ".0f"
        return f"{number:{digits}} {unit}"

    def left(self, rounds: int) -> str:
        """How long this many more rounds take, such as ``0:03:20``; empty before the first."""
        return span(self._seconds / self._done * rounds) if self._done else ""


def span(seconds: float) -> str:
    """Hours, minutes and seconds, such as ``1:02:03``, rounded to whole seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
