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
    """Remembers that this process was asked to end.

    Use it in the main thread only, where Python runs signal handlers.
    """

    def __init__(self) -> None:
        self._asked, self._open = False, False

    def ask(self) -> None:
        """CancelledError at once where a guarded call runs, otherwise where the next one begins."""
        self._asked = True
        # Only in a guarded call: elsewhere a file might be left half written.
        if self._open:
            # once: a second signal must not cut short what the first one's error does
            self._open = False
            raise CancelledError("stopped")

    def guard(self, call: Callable[[], T]) -> T:
        """The result of a call that may be given up halfway."""
        self._open = True
        try:
            # A signal since the last guarded call counts now.
            if self._asked:
                raise CancelledError("stopped")
            return call()
        finally:
            self._open = False


@contextmanager
def stopping(*numbers: signal.Signals) -> Iterator[StopSignal]:
    """While the block runs, these signals ask to end.

    Only the main thread may set handlers. The earlier ones are restored afterwards.
    """
    stop = StopSignal()

    def ask(_number: int, _frame: FrameType | None) -> None:
        stop.ask()

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
        """Like the engine's; CancelledError if a stop was asked for."""
        return self._stop.guard(lambda: self._engine.train(round_, work, done))

    def look(
        self, round_: int, work: Sequence[SiloWork], done: Callable[[], None]
    ) -> Mapping[str, Evaluation]:
        """As the engine's."""
        return self._stop.guard(lambda: self._engine.look(round_, work, done))

    def close(self) -> None:
        """As the engine's."""
        self._engine.close()
