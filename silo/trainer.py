"""Local training in a worker, so that heartbeats never stall.

One thread: torch lets go of the interpreter lock inside its kernels, and the event loop needs little of it. A stop
reaches the training between two batches.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


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
        """Do the work in the thread; cancelling the caller cancels the work and waits for its end."""
        self._cancel.clear()
        future = asyncio.wrap_future(self._pool.submit(work, *args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self.cancel()
            await asyncio.wait([future])
            future.exception()  # how the work ended is of no interest any more; asking keeps asyncio from complaining
            raise

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        self.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)
