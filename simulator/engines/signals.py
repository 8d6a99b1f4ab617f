"""Ctrl-C and SIGTERM: training stops at once, and the state between rounds stays whole."""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

import torch

from ...algorithms.engines.engine import Engine, SiloWork
from ...algorithms.training.silo_round import Evaluation, RoundOutcome
from ...errors import CancelledError

T = TypeVar("T")


class StopSignal:
    """Whether this process was asked to end.

    Not to be shared between threads: signals reach the main thread, where guarded calls run.
    """

    def __init__(self) -> None:
        self._asked, self._open = False, False

    def ask(self) -> None:
        """CancelledError at once where a guarded call runs, otherwise where the next one begins."""
        self._asked = True
        # Only inside of a guarded call: anywhere else a file could be half written.
        if self._open:
            # once: a second signal must not cut short what the first one's error does
            self._open = False
            raise CancelledError("stopped")

    def guard(self, call: Callable[[], T]) -> T:
        """The result of a call that may be given up halfway."""
        self._open = True
        try:
            # A signal between two guarded calls counts for the next one.
            if self._asked:
                raise CancelledError("stopped")
            return call()
        finally:
            self._open = False


@contextmanager
def stopping(*numbers: signal.Signals) -> Iterator[StopSignal]:
    """While the block runs, these signals ask to end.

    Only in the main thread, which alone may set handlers. The earlier handlers are put back.
    """
    stop = StopSignal()

    def ask(_number: int, _frame: FrameType | None) -> None:
        stop.ask()

    # The earlier handlers come back when the block ends, whatever they were.
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stoppable:
    """An engine whose work is given up when its process is asked to end.

    Nothing is left of a round given up.
    """

    def __init__(self, engine: Engine, stop: StopSignal) -> None:
        self._engine, self._stop = engine, stop

    @property
    def device(self) -> torch.device:
        """The engine's."""
        return self._engine.device

    def train(
        self, round_: int, work: Sequence[SiloWork], done: Callable[[], None]
    ) -> Mapping[str, RoundOutcome]:
        """As the engine's.

        CancelledError where a stop was asked for; the silos' states are then as before the round.
        """
        return self._stop.guard(lambda: self._engine.train(round_, work, done))

    def look(
        self, round_: int, work: Sequence[SiloWork], done: Callable[[], None]
    ) -> Mapping[str, Evaluation]:
        """As the engine's."""
        return self._stop.guard(lambda: self._engine.look(round_, work, done))

    def close(self) -> None:
        """As the engine's."""
        self._engine.close()
