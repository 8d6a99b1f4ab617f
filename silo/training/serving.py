"""A trainer process: it computes the order in a folder, and writes there what came of it."""

import asyncio
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...errors import StaddleError
from .order import Noted, OrderFolder
from .trainer import Trainer, TrainingDevice

TIED = "--tied"  # end with the standard input


def main(arguments: Sequence[str]) -> int:
    """Compute an order; returns the exit status, 0 also where the outcome is an error."""
    folder, *more = arguments
    if TIED in more:
        threading.Thread(target=_wait_for_end, daemon=True).start()
    path = Path(folder)
    serve(OrderFolder(path, path.stat().st_mode & 0o660))
    return 0


def serve(folder: OrderFolder) -> None:
    """Compute the order in this process; an error is an outcome, too."""
    trainer = Trainer()
    try:
        # Errors become those that they are in a thread of the agent.
        asyncio.run(trainer.run(_compute, folder))
    except StaddleError as error:
        folder.fail(error)
    finally:
        trainer.close()


def _compute(folder: OrderFolder) -> None:
    asked, on = folder.take()
    noted = Noted()
    place = TrainingDevice(on.device, on.precision, graphs=on.graphs)
    folder.give(place.outcome(replace(asked, note=noted)), noted)


def _wait_for_end() -> None:
    # Whoever began this process holds the other end: it is closed when that is gone, or stops us.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)
