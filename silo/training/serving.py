"""A trainer process: it computes the order in a folder, and writes there what came of it."""

import asyncio
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...errors import StaddleError
from .order import Noted, OrderFolder
from .ranks import FirstsRandom, ProcessRanks, joined, launched, own_device
from .still_values import moved, shared_out
from .trainer import Trainer, TrainingDevice

TIED = "--tied"  # end with the standard input


def main(arguments: Sequence[str]) -> int:
    """Compute an order; returns the exit status, 0 also where the outcome is an error.

    Of several processes each that has an error ends with 1: the launcher then ends the others,
    which may wait for it.
    """
    folder, *more = arguments
    if TIED in more:
        threading.Thread(target=_wait_for_end, daemon=True).start()
    path = Path(folder)
    done = serve(OrderFolder(path, path.stat().st_mode & 0o660))
    return int(not done and launched() > 1)


def serve(folder: OrderFolder) -> bool:
    """Compute the order in this process; returns False for an error, which is an outcome, too."""
    trainer = Trainer()
    try:
        # Errors become those that they are in a thread of the agent.
        asyncio.run(trainer.run(_compute, folder))
    except StaddleError as error:
        folder.fail(error)
        return False
    finally:
        trainer.close()
    return True


def _compute(folder: OrderFolder) -> None:
    asked, on = folder.take()
    noted, private, device = Noted(), asked.private, own_device(on.device)
    with joined(folder.path, device) as ranks:
        if private is not None and isinstance(ranks, ProcessRanks):
            fresh = partial(FirstsRandom, ranks, private.fresh)
            private = replace(private, fresh=fresh, ranks=ranks)
        if on.shard:
            asked = shared_out(asked, ranks)
        place = TrainingDevice(device, on.precision, graphs=on.graphs, ranks=ranks)
        outcome = place.outcome(replace(asked, note=noted, private=private))
        # All of them, since it may have to be gathered.
        outcome = replace(outcome, state=moved(asked, outcome.state))
        # The others have the same.
        if ranks.rank == 0:
            folder.give(outcome, noted)


def _wait_for_end() -> None:
    # Whoever began this process holds the other end: it is closed when that is gone, or stops us.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)
