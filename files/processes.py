"""How processes begin that work for this one."""

import multiprocessing
from multiprocessing.context import ForkServerContext


def threadless(module: str) -> ForkServerContext:
    """Makes processes by a server without threads, which has loaded ``module`` once.

    A fork of this process would hold the locks of its threads for ever.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context
