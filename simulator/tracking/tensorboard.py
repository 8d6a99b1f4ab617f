"""A run's points for TensorBoard.

A tag per name, and the rounds as steps. A process that resumes a run writes its events again from
the history that is kept, and removes the old ones: what a killed process measured after its last
snapshot is measured again, and would otherwise appear twice.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import LocalError
from ..run.disk import writing
from .points import Point

EVENTS = "tensorboard"  # folder in that of a run
FROM_START = 0  # step from which on a TensorBoard that is open drops what it has read


class Board:
    """The one writer of a run's events.

    Events are for people; no result is read from them.
    """

    def __init__(self, folder: Path, kept: Iterable[Point]) -> None:
        """``folder`` is that of the run. LocalError where TensorBoard is not installed."""
        events = folder / EVENTS
        writer = _writer_class()
        with writing(events, "cannot write there"):
            for old in events.glob("events.out.tfevents.*"):
                old.unlink()
            self._writer = writer(str(events), purge_step=FROM_START)
        # Rewritten from the history: events of a killed process may go beyond it.
        self.add(kept)

    def add(self, points: Iterable[Point]) -> None:
        """Write them, so that an open TensorBoard sees them."""
        for point in points:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.rounds)
        self._writer.flush()

    def close(self) -> None:
        """Nothing more is written."""
        self._writer.close()


def check_installed() -> None:
    """LocalError, before anything runs, where TensorBoard is not installed."""
    _writer_class()


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        # TensorBoard is there, and lacks something of its own: that is not ours to explain
        if error.name is None or error.name.partition(".")[0] != "tensorboard":
            raise
        raise LocalError(
            "events for TensorBoard need its package, which is not installed; pip install"
            " 'staddle[tracking]', or leave --track tensorboard out"
        ) from error
    return SummaryWriter
