"""Random numbers that torch's own code draws: dropout, and layers' ``reset_parameters``.

torch has one generator per device for the whole process. Such code draws from it only within
``drawing``, from a seed of the job's streams, so that every engine draws the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import numpy as np
import torch

from .streams import raw

# Silos may train in one thread and build their models in another.
GENERATOR = RLock()


@contextmanager
def drawing(stream: np.random.Generator) -> Iterator[None]:
    """Within it torch's generators draw from a seed that is the next word of this stream.

    Afterwards they continue as if nothing had been drawn. Other threads that draw by it wait, so
    hold it briefly.
    """
    # torch takes 64 bits; the upper 63 make a number that every one of its functions takes.
    seed = int(raw(stream, 1)[0] >> np.uint64(1))
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with GENERATOR, torch.random.fork_rng(devices=gpus):
        # Not torch.manual_seed: for each kind of GPU that may come it notes a stack trace, which
        # takes a millisecond, and so do we for each step.
        torch.default_generator.manual_seed(seed)
        if gpus:
            torch.cuda.manual_seed_all(seed)
        yield
