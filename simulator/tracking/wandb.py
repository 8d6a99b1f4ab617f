"""A run's points for Weights & Biases: kept in the run's folder, or sent where a person asks.

Nothing is sent unless ``WANDB_MODE=online`` is set; ``wandb sync`` sends a folder later. Steps of
its own count the points, and ``rounds`` is among the numbers, as the axis of all others.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from ...errors import LocalError
from ...files.documents import write_atomic
from ..experiment.plan import Run
from ..run.disk import writing
from .points import Point, settings, tracker_failed

MODE = "WANDB_MODE"
REPORTS = "WANDB_ERROR_REPORTING"
RUN_ID = "wandb-run"  # in the folder of a run
OURS = re.compile(rb"[0-9a-f]{32}")  # anything else may be a pattern, or lead out of the folder
ROUNDS = "rounds"
# Neither what is printed, nor the program of whoever runs this, its machine, paths and packages.
NOTHING_ELSE: dict[str, Any] = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "disable_code": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    "host": "-",
}
Mode: TypeAlias = Literal["online", "offline", "disabled"]


class WandbRun:
    """A run of the project with the experiment's name.

    Where nothing is sent, a process that resumes writes the run again from the points that are
    kept, and removes what was there. A run that is sent is continued.
    """

    def __init__(self, folder: Path, run: Run, kept: Iterable[Point]) -> None:
        """``folder`` is that of the run, ``kept`` its points so far.

        LocalError where Weights & Biases is not installed, or does not answer.
        """
        wandb = _package()
        mode = _mode()
        own = folder / RUN_ID
        if not own.exists() or not OURS.fullmatch(own.read_bytes()):
            write_atomic(own, uuid.uuid4().hex.encode(), 0o644)
        run_id = own.read_text(encoding="ascii")
        for old in (folder / "wandb").glob(f"offline-run-*-{run_id}"):
            with writing(old, "cannot remove it"):
                shutil.rmtree(old)
        try:
            self._run = wandb.init(
                mode=mode,
                dir=str(folder),
                project=run.job.name,
                id=run_id,
                name=run.title,
                group=run.label,
                config=dict(settings(run.job.document())),
                resume="allow" if mode == "online" else None,
                settings=wandb.Settings(**NOTHING_ELSE),
            )
            self._run.define_metric(ROUNDS)
            self._run.define_metric("*", step_metric=ROUNDS)
        except wandb.errors.Error as error:
            raise tracker_failed("Weights & Biases", "wandb", error) from error
        # Each point is one of its steps. What a killed process sent is measured again, alike.
        self._sent: int = self._run.step
        self.add(kept)

    def add(self, points: Iterable[Point]) -> None:
        """Write those that it does not have."""
        for point in points:
            if self._sent:
                self._sent -= 1
                continue
            values: dict[str, Any] = {ROUNDS: point.rounds, **point.values}
            self._run.log(values)

    def close(self) -> None:
        """End the run; one that resumes begins it again."""
        self._run.finish()


def _mode() -> Mode:
    given = os.environ.get(MODE, "offline")
    for mode in get_args(Mode):
        if given == mode:
            return mode  # type: ignore[no-any-return]
    raise LocalError(f"{MODE} is {given!r}; set online, offline or disabled")


def check_installed() -> None:
    """LocalError, before anything runs, where Weights & Biases is not installed."""
    try:
        _package()
    except ModuleNotFoundError as error:
        raise LocalError(
            "the package of Weights & Biases is not installed; pip install 'staddle[tracking]', or"
            " leave --track wandb out"
        ) from error


def _package() -> Any:
    # Its faults go to its maker, offline runs' too, unless a person has decided otherwise.
    os.environ.setdefault(REPORTS, "false")
    import wandb  # noqa: PLC0415 - an extra, whose import takes a second

    return wandb
