"""What the metrics say of jobs and silos follows from their states."""

import time
from types import SimpleNamespace

import pytest
from support.jobs import make_job

from staddle.coordinator.gauges import gauges
from staddle.coordinator.rounds.machine import JobState

SILOS = ("a", "b", "c")
SUMS = {"tested": 40, "correct.delivered": 10, "correct.trained": 30}


def run(sums=(), **state):
    made = JobState("lung", SILOS, 9, 1, **state)
    job = SimpleNamespace(name="lung", counting=make_job().counting)
    return SimpleNamespace(state=made, job=job, last_sums=dict(sums), since=time.monotonic() - 50)


def read(folder, made):
    """The gauges of a coordinator with one job that has been in its stage for 50 seconds."""
    daemon = SimpleNamespace(
        runs=[made],
        roster=SimpleNamespace(
            entries=(), having=lambda _: [SimpleNamespace(id=silo) for silo in SILOS]
        ),
        config=SimpleNamespace(directory=folder),
        connected=lambda: {"a"},
        silent_seconds={"a": 1.0, "b": 70.0, "c": 99.0}.get,
        stage_limit=lambda _, stage: {"admitting": 3600.0}.get(stage, 60.0),
    )
    limits = SimpleNamespace(running={("c", "Poll"): 1})
    return {gauge.name: gauge.values for gauge in gauges(daemon, limits)}


def test_an_open_round_waits_for_those_that_have_not_uploaded(tmp_path):
    counted = {"a": 5, "b": 3}
    made = run(stage="round", round=5, cohort=SILOS, given={"a": "x"}, counted=counted)
    found = read(tmp_path, made)
    assert found["silo_rounds_behind"] == {("lung", "a"): 0, ("lung", "b"): 2, ("lung", "c"): 5}
    waited = found["silo_awaited_seconds"]
    assert waited["lung", "a"] == 0
    assert waited["lung", "b"] == waited["lung", "c"] >= 50
    assert found["job_stage_seconds"]["lung",] == waited["lung", "b"]
    assert found["job_stage_limit_seconds"] == {("lung",): 60.0}
    assert found["silo_silent_seconds"] == {("a",): 1.0, ("b",): 70.0, ("c",): 0.0}
    assert found["silo_connected"] == {("a",): True, ("b",): False, ("c",): True}


def test_an_admission_waits_for_those_that_have_not_answered(tmp_path):
    found = read(tmp_path, run(stage="admitting", answers={"b": "POLICY", "c": "WAITING"}))
    waited = found["silo_awaited_seconds"]
    assert [silo for silo in SILOS if waited["lung", silo]] == ["a", "c"]
    assert found["job_stage_limit_seconds"] == {("lung",): 3600.0}


@pytest.mark.parametrize("stage", ["queued", "stopped", "ended"])
def test_nobody_is_awaited_in_a_job_that_does_not_run(tmp_path, stage):
    found = read(tmp_path, run(stage=stage, round=5))
    names = ("silo_awaited_seconds", "silo_rounds_behind", "job_stage_seconds")
    assert [found[name] for name in names] == [{}, {}, {}]


def test_measures_are_those_of_the_last_closed_round(tmp_path):
    found = read(tmp_path, run(SUMS, stage="ended"))["job_measure"]
    assert found["lung", "accuracy", "delivered"] == 0.25
    assert found["lung", "accuracy", "trained"] == 0.75


@pytest.mark.parametrize("sums", [{}, dict.fromkeys(SUMS, 0)])
def test_a_job_whose_silos_keep_their_counts_has_none(tmp_path, sums):
    """As private jobs without metrics_sigma, whose silos send zeros."""
    assert read(tmp_path, run(sums, stage="round"))["job_measure"] == {}
