"""The trackers that somebody asks for, by name."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from enum import StrEnum
from pathlib import Path

from ...errors import LocalError
from ..experiment.plan import Run
from ..run.history import Measured
from ..run.progress import Follow
from ..run.work_file import RoundWork
from . import mlflow, tensorboard, wandb
from .points import Point, PointTracker, points


class TrackerName(StrEnum):
    """Tools that show runs."""

    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"


CHECKS = {
    TrackerName.TENSORBOARD: tensorboard.check_installed,
    TrackerName.MLFLOW: mlflow.check_installed,
    TrackerName.WANDB: wandb.check_installed,
}


def trackers(names: Iterable[str]) -> tuple[TrackerName, ...]:
    """The trackers of these names; LocalError for another name."""
    known = {name.value: name for name in TrackerName}
    found = []
    for name in names:
        if name not in known:
            raise LocalError(f"track: {name!r} is none of {', '.join(known)}")
        found.append(known[name])
    return tuple(found)


def check_installed(names: Iterable[TrackerName]) -> None:
    """LocalError, before anything runs, for a tracker that is not installed."""
    for name in names:
        CHECKS[name]()


@contextmanager
def tracking(
    names: Sequence[TrackerName],
    folder: Path,
    run: Run,
    measures: Iterable[Measured],
    work: Iterable[RoundWork],
) -> Iterator[Follow]:
    """What shows a round's measures in these trackers while the block runs.

    ``folder`` is that of the run; ``measures`` and ``work`` are kept from before. LocalError where
    a tracker fails.
    """
    form = run.job.counting.score
    kept = points(measures, work, form)
    with ExitStack() as stack:
        begun: list[PointTracker] = [
            stack.enter_context(closing(_begun(name, folder, run, kept)))
            for name in dict.fromkeys(names)
        ]

        def follow(measures: Sequence[Measured], work: RoundWork) -> None:
            found = points(measures, [work], form)
            for tracker in begun:
                tracker.add(found)

        yield follow


def _begun(name: TrackerName, folder: Path, run: Run, kept: Sequence[Point]) -> PointTracker:
    match name:
        case TrackerName.TENSORBOARD:
            return tensorboard.Board(folder, kept)
        case TrackerName.MLFLOW:
            return mlflow.MlflowRun(folder.parent.parent, folder, run, kept)
        case TrackerName.WANDB:
            return wandb.WandbRun(folder, run, kept)
