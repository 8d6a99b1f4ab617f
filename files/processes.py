"""How processes begin that work for this one, and end with it."""

import multiprocessing
import os
import signal
import threading
from multiprocessing import forkserver, parent_process, resource_tracker
from multiprocessing.context import ForkServerContext


def threadless(module: str) -> ForkServerContext:
    """Makes processes by a server without threads, which has loaded ``module`` once.

    A fork of this process would hold the locks of its threads for ever. None of these processes
    sees Ctrl-C, which a terminal sends to all at once: this one sees it, and ends the others.
    """
    context = multiprocessing.get_context("forkserver")
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
