"""The process's heap, kept small where the C library is glibc.

gRPC's threads allocate whole chunks. glibc gives each thread a heap of its own and keeps what was
freed, so their heaps would weigh more than the tensors: 5.9 times one
upload with eight silos at 46.8 MB, 3.2 times with one heap that is trimmed before a fold
(docs/performance.md). Other C libraries have
neither call, and nothing is done there.
"""

import ctypes

M_ARENA_MAX = -8  # mallopt(3): number of a parameter
WORTH_BYTES = 16 * 1024 * 1024  # of an upload: smaller ones leave less behind than a trim is worth


def one_heap() -> None:
    """Let all threads share one heap; to be called before they begin.

    It does nothing unless the C library has mallopt, as glibc does.
    """
    # Before any thread has allocated: a heap that is there stays.
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_ARENA_MAX, 1)


def trim() -> None:
    """Return free pages to the system: malloc_trim(3), some milliseconds.

    Worth it only before a fold of large uploads (``WORTH_BYTES``).
    """
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)
