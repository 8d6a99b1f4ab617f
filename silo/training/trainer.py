"""Local training in a worker, so that heartbeats never stall.

One thread: torch lets go of the interpreter lock inside its kernels, and the event loop needs little of it. A stop
reaches the training between two batches. Whatever error ends the work, memory that ran out or a mistake in a method,
becomes a LocalError: the round is lost for this silo, not its agent.
"""

import asyncio
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from ...errors import LocalError, StaddleError

MAX_TEXT = 500  # characters of an error's text

P = ParamSpec("P")
T = TypeVar("T")


def _described(error: Exception) -> str:
    """Type and text of an error, cut short, and the line of ours or of torch's that raised it.

    The text stays in this silo's log. It is the method's, so it may be of any length, or fail to be made.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    lines = traceback.TracebackException.from_exception(error, limit=0).format_exception_only()
    return f"{' '.join(line.strip() for line in lines)[:MAX_TEXT]}{place}"


class Trainer:
    """Runs one piece of work at a time beside the event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")
        self._cancel = threading.Event()

    def cancelled(self) -> bool:
        """Asked by the training loop between batches."""
        return self._cancel.is_set()

    def cancel(self) -> None:
        """Stop the work in hand at its next batch; it ends with CancelledError."""
        self._cancel.set()

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the work in the thread; cancelling the caller cancels the work and waits for its end.

        Raises the errors of errors.py as they are, any other as LocalError with the place where it rose.
        """
        self._cancel.clear()
        future = asyncio.wrap_future(self._pool.submit(work, *args, **kwargs))
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            self.cancel()
            await asyncio.wait([future])
            future.exception()  # how the work ended is of no interest any more; asking keeps asyncio from complaining
            raise
        error = future.exception()
        if isinstance(error, Exception) and not isinstance(error, StaddleError):
            raise LocalError(f"{_described(error)}; lower the batch size if memory ran out, else report it") from error
        return future.result()

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        self.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)
