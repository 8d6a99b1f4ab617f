"""A coordinator in a thread of its own, in this process: its daemon can be looked at while it
serves over real TLS.
"""

import asyncio
import contextlib
import gc
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from staddle.coordinator import daemon as daemons
from staddle.coordinator import server
from staddle.coordinator.rpc import guard, limits


@contextlib.contextmanager
def coordinator(config):
    """It has ``address``, ``daemon``, ``limits`` and ``run(coroutine)``.

    ``broken`` holds what went wrong inside.
    """
    here, patch = SimpleNamespace(broken=[]), pytest.MonkeyPatch()
    patch.setattr(limits, "CALLS_PER_SECOND", 1e9)
    patch.setattr(limits, "BURST", 1e9)
    real, real_guard, problem = daemons.Daemon.__init__, guard.Guard.__init__, guard.log.problem

    def noted(self, *args):
        real(self, *args)
        here.daemon = self

    def noted_guard(self, *args):
        real_guard(self, *args)
        here.limits = self.limits

    def told(event, **fields):
        problem(event, **fields)
        if event == "call.failed":
            here.broken.append(fields)

    patch.setattr(daemons.Daemon, "__init__", noted)
    patch.setattr(guard.Guard, "__init__", noted_guard)
    patch.setattr(guard.log, "problem", told)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: here.broken.append(context))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    here.run = lambda work, seconds=60: asyncio.run_coroutine_threadsafe(work, loop).result(seconds)
    stack = contextlib.AsyncExitStack()
    try:
        here.address = here.run(stack.enter_async_context(server.running(config)))
        yield here
    finally:
        here.run(stack.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        patch.undo()


def memory_of(world, work, seconds=60):
    """Bytes that a piece of work leaves behind, and the most that it held at one time."""

    async def traced():
        loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor()
        loop.set_default_executor(threads)
        try:
            await work
        finally:
            loop.set_default_executor(ThreadPoolExecutor())
            # A thread lets go of what it read some time after its answer has gone.
            threads.shutdown()
        gc.collect()
        return tracemalloc.get_traced_memory()

    gc.collect()
    tracemalloc.start()
    try:
        return world.run(traced(), seconds)
    finally:
        tracemalloc.stop()
