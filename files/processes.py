"""How processes begin that work for this one, and end with it."""

import os
import signal
import threading
from ctypes import c_bool
from multiprocessing import context as contexts
from multiprocessing import forkserver, parent_process, resource_tracker
from multiprocessing.context import BaseContext
from typing import Any

# Windows has no fork server: each process there loads its modules itself.
CONTEXT: Any = getattr(contexts, "ForkServerContext", contexts.SpawnContext)
SERVED = CONTEXT is not contexts.SpawnContext


class Flag:
    """A ``multiprocessing.Event`` without its lock, and without ``wait``.

    A process that is killed while it asks an event keeps the lock, and all others wait for ever.
    """

    def __init__(self, context: BaseContext) -> None:
        self._set = context.RawValue(c_bool, False)

    def set(self) -> None:
        """For all processes that have it."""
        self._set.value = True

    def is_set(self) -> bool:
        """Whether anybody has set it."""
        return bool(self._set.value)


class _Threadless(CONTEXT):  # type: ignore[misc]
    def Event(self) -> Flag:  # noqa: N802 - as multiprocessing calls it
        return Flag(self)


def threadless(module: str) -> Any:
    """Makes processes by a server without threads, which has loaded ``module`` once.

    A fork of this process would hold the locks of its threads for ever. Events are ``Flag``s. None
    of these processes sees Ctrl-C, which a terminal sends to all at once: this one sees it, and
    ends the others. On Windows each process loads ``module`` itself, and sees Ctrl-C.
    """
    context = _Threadless()
    if not SERVED:
        return context
    context.set_forkserver_preload([module])
    # multiprocessing begins this tracker with the first process, and lets interrupts through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # All processes have the mask of their server.
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def end_with_parent() -> None:
    """Let this process end as soon as the one that it works for is gone.

    A killed process sends nothing, and the work at hand may take long.
    """
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
