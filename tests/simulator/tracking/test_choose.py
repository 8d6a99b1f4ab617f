from contextlib import suppress

import pytest
from support.refusals import refused
from support.simulated_jobs import SCHEDULE, make_population, make_run

from staddle.algorithms.engines.engine import Serial
from staddle.errors import CancelledError
from staddle.simulator.engines.signals import StopSignal
from staddle.simulator.run.progress import Unwatched
from staddle.simulator.run.runner import complete
from staddle.simulator.tracking import choose
from staddle.simulator.tracking.choose import TrackerName, trackers, tracking

pytestmark = pytest.mark.usefixtures("quick")
POPULATION = make_population(validation=False)


class Listed:
    def __init__(self, points):
        self.points, self.open = list(points), True

    def add(self, points):
        self.points += points

    def close(self):
        self.open = False


class StopsAfter(Unwatched):
    def __init__(self, stop, rounds):
        self.stop, self.rounds = stop, rounds

    def round(self, rounds, measured):
        if rounds == self.rounds:
            self.stop.ask()


@pytest.fixture
def opened(monkeypatch):
    """All trackers that were begun."""
    found = []

    def begin(name, folder, run, kept):
        found.append(Listed(kept))
        return found[-1]

    monkeypatch.setattr(choose, "_begun", begin)
    return found


def run_it(out, watch=None, stop=None):
    def track(*run):
        return tracking([TrackerName.MLFLOW, TrackerName.MLFLOW], *run)

    stop = stop or StopSignal()
    complete(
        out,
        make_run(),
        POPULATION,
        SCHEDULE,
        lambda job: Serial(job, POPULATION.records),
        watch or Unwatched(),
        stop,
        track=track,
    )


def test_a_tracker_is_told_what_each_round_measured_and_its_loss(tmp_path, opened):
    run_it(tmp_path)
    (tracker,) = opened  # named twice
    assert not tracker.open
    # the look after the last round comes on its own
    assert [one.rounds for one in tracker.points] == [1, 2, 3, 4, 4]
    assert ["loss" in one.values for one in tracker.points] == [True] * 4 + [False]
    assert "all/trained/accuracy.macro" in tracker.points[-1].values


def test_after_a_stop_it_begins_with_what_was_kept(tmp_path, opened):
    stop = StopSignal()
    with suppress(CancelledError):
        run_it(tmp_path / "stopped", StopsAfter(stop, 3), stop)
    run_it(tmp_path / "stopped")
    run_it(tmp_path / "whole")
    stopped, resumed, whole = opened
    assert [one.rounds for one in stopped.points] == [1, 2, 3]
    assert not stopped.open
    assert resumed.points == whole.points


def test_names_are_those_of_trackers():
    names = iter(["wandb", "tensorboard"])
    assert trackers(names) == (TrackerName.WANDB, TrackerName.TENSORBOARD)
    with refused("track: 'mlfow' is none of tensorboard, mlflow, wandb"):
        trackers(["mlfow"])
