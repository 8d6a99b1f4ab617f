"""Random numbers that torch's own code draws: dropout, and layers' ``reset_parameters``.

torch has one generator per device for the whole process. Such code draws from it only within
``drawing``, by the job's streams, so that every engine draws the same, or by a secret one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import numpy as np
import torch

from .streams import raw

# Of torch's Mersenne Twister: 624 words of 32 bits, in 64 each, behind a header of 24 bytes.
WORDS = 624
STATE = slice(24, 24 + 8 * WORDS)

# Silos may train in one thread and build their models in another.
GENERATOR = RLock()


@contextmanager
def drawing(stream: np.random.Generator) -> Iterator[None]:
    """Within it torch's generators draw by the next words of this stream.

    Afterwards they continue as if nothing had been drawn. Other threads that draw by it wait, so
    hold it briefly.
    """
    words = raw(stream, 1 + WORDS // 2)
    # torch takes 64 bits; the upper 63 make a number that every one of its functions takes.
    seed = int(words[0] >> np.uint64(1))
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with GENERATOR, torch.random.fork_rng(devices=gpus):
        # Not torch.manual_seed: for each kind of GPU that may come it notes a stack trace, which
        # takes a millisecond, and so do we for each step.
        torch.default_generator.manual_seed(seed)
        if gpus:
            torch.cuda.manual_seed_all(seed)
        # Of a seed the processor's generator takes 32 bits, which can be tried one by one.
        state = torch.get_rng_state()
        whole = words[1:].view(np.uint32).astype(np.uint64)
        state[STATE] = torch.from_numpy(whole.view(np.uint8))
        torch.set_rng_state(state)
        yield
