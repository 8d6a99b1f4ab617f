"""Who follows a run while it goes: a terminal, a log, nobody. The runner says what happens, and shows nothing."""

from collections.abc import Sequence
from typing import Literal, Protocol

from ..experiment.plan import Run
from .history import Measured

Doing = Literal["training", "looking"]


class Watch(Protocol):
    """What a runner tells; rounds are those that train."""

    def begin(self, run: Run, rounds: int) -> None:
        """A run begins, or goes on after so many rounds."""
        ...

    def work(self, doing: Doing, silos: int) -> None:
        """So many silos are to train in the next round, or to be looked at."""
        ...

    def silo(self) -> None:
        """One of them is done."""
        ...

    def round(self, rounds: int, measured: Sequence[Measured]) -> None:
        """So many rounds are done, and what the last of them measured."""
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
