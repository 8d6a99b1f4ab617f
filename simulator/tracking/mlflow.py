"""A run's points for MLflow.

They go where ``MLFLOW_TRACKING_URI`` says; without it into ``mlflow.db`` in the folder of results,
which ``mlflow ui --backend-store-uri sqlite:///…/mlflow.db`` shows. MLflow's run id is kept in the
run's folder: a run that resumes adds to its own what that lacks.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...errors import LocalError
from ...files.documents import write_atomic
from ..experiment.plan import Run
from .points import Point, settings, tracker_failed

PLACE = "MLFLOW_TRACKING_URI"
DATABASE, ARTIFACTS = "mlflow.db", "mlflow-artifacts"  # in the folder of results
USAGE = "MLFLOW_DISABLE_TELEMETRY"
RUN_ID = "mlflow-run"  # in the folder of a run
OURS = re.compile(rb"[0-9a-f]{32}")  # MLflow's ids
SECRETS = re.compile(r"//[^/@\s]*@")  # of an address: who asks, and the password
MOST_AT_ONCE = 100  # settings in one call, MLflow's limit

Found = TypeVar("Found")


class MlflowRun:
    """A run of MLflow's experiment of the same name; its metrics have the rounds as steps."""

    def __init__(self, out: Path, folder: Path, run: Run, kept: Iterable[Point]) -> None:
        """``out`` is the folder of results, ``folder`` that of the run, ``kept`` its points so far.

        LocalError where MLflow is not installed, or does not answer.
        """
        _stay_silent()
        # Only to be asked for: it takes a second to import.
        from mlflow.entities import Metric, Param  # noqa: PLC0415 - an extra
        from mlflow.exceptions import MlflowException  # noqa: PLC0415
        from mlflow.tracking import MlflowClient  # noqa: PLC0415

        # It tells of each table that it makes in a new database, in the middle of a progress bar.
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._metric, self._fault = Metric, MlflowException
        own = f"sqlite:///{(out / DATABASE).resolve()}"
        self._place = os.environ.get(PLACE) or own
        self._client = self._asked(lambda: MlflowClient(tracking_uri=self._place))
        artifacts = (out / ARTIFACTS).resolve().as_uri() if self._place == own else None

        def begin() -> tuple[str, set[tuple[str, int]]]:
            given = settings(run.job.document())
            parameters = [Param(key, str(value)) for key, value in given.items()]
            return self._begun(folder / RUN_ID, run, parameters, artifacts)

        self._id, self._there = self._asked(begin)
        self.add(kept)

    def add(self, points: Iterable[Point]) -> None:
        """Write those that MLflow does not have; LocalError where it does not answer."""
        now = int(time.time() * 1000)
        for point in points:
            new = [
                self._metric(name, value, now, point.rounds)
                for name, value in point.values.items()
                if (name, point.rounds) not in self._there
            ]
            self._there |= {(one.key, one.step) for one in new}
            self._asked(partial(self._client.log_batch, self._id, metrics=new))

    def close(self) -> None:
        """End the run; one that resumes begins it again."""
        self._asked(lambda: self._client.set_terminated(self._id))

    def _begun(
        self, kept: Path, run: Run, parameters: list[Any], artifacts: str | None
    ) -> tuple[str, set[tuple[str, int]]]:
        """The run's id, and the name and step of what it has: one of before, or a new one."""
        experiment = self._client.get_experiment_by_name(run.job.name)
        if experiment is None:
            number = self._client.create_experiment(run.job.name, artifact_location=artifacts)
        else:
            number = experiment.experiment_id
        given = kept.read_bytes() if kept.exists() else b""
        known = given.decode("ascii", "replace")
        # Under this experiment alone: a database that was removed has other runs by now.
        asked = f"attributes.run_id = '{known}'"
        if OURS.fullmatch(given) and self._client.search_runs([number], asked):
            self._client.update_run(known, status="RUNNING")
            return known, self._steps(known)

        tags = {"staddle.label": run.label, "staddle.seed": str(run.seed)}
        made = self._client.create_run(number, tags=tags, run_name=run.title).info.run_id
        write_atomic(kept, made.encode(), 0o644)
        for first in range(0, len(parameters), MOST_AT_ONCE):
            some = parameters[first : first + MOST_AT_ONCE]
            self._client.log_batch(made, params=some)
        return made, set()

    def _steps(self, run_id: str) -> set[tuple[str, int]]:
        """A killed process may have written points that the next one measures again."""
        names: Mapping[str, float] = self._client.get_run(run_id).data.metrics
        return {
            (name, one.step)
            for name in names
            for one in self._client.get_metric_history(run_id, name)
        }

    def _asked(self, ask: Callable[[], Found]) -> Found:
        try:
            return ask()
        except self._fault as error:
            tool, why = (SECRETS.sub("//", text) for text in (self._place, str(error)))
            raise tracker_failed(f"MLflow at {tool}", "mlflow", why) from error


def check_installed() -> None:
    """LocalError, before anything runs, where MLflow is not installed, or cannot keep files."""
    _stay_silent()
    try:
        import mlflow.tracking  # noqa: F401, PLC0415 - an extra

        # Of the two that a database takes; MLflow's small distribution leaves them out.
        import sqlalchemy  # noqa: F401, PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise LocalError(
            "MLflow's package, or SQLAlchemy which it keeps runs with, is not installed; pip"
            " install 'staddle[tracking]', or leave --track mlflow out"
        ) from error


def _stay_silent() -> None:
    # Before its import: else it tells its makers of each run, unless a person has decided.
    os.environ.setdefault(USAGE, "true")
