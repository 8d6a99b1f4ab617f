"""What an operator sees who follows a job to its end."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from staddle.commands.federation import jobs
from staddle.errors import AbortedError
from staddle.proto import operations_pb2 as pb


def test_whom_a_job_waits_for_is_said_once_until_it_changes():
    silos = ("north", "south")
    stages = [
        {"stage": "admitting", "answers": {}},
        {"stage": "admitting", "answers": {}},
        {"stage": "admitting", "answers": {"north": "accepted"}},
        {"stage": "round", "cohort": silos, "round": 1},
        {"stage": "stopped", "round": 1},
        {"stage": "stopped", "round": 1},
        {"stage": "ended", "round": 2, "outcome": "failed"},
    ]
    reports = [
        SimpleNamespace(status=pb.JobStatus(job="lung", silos=silos, rounds=2, **fields))
        for fields in stages
    ]
    shown = []
    bar = SimpleNamespace(add_task=lambda *_, **__: 0, update=lambda *_, **__: None)
    screen = SimpleNamespace(show=shown.append, progress=lambda **_: nullcontext(bar))
    operator = SimpleNamespace(watch=lambda _: iter(reports))
    with pytest.raises(AbortedError, match="job lung did not complete"):
        jobs.follow(screen, operator, "lung")
    both, one, stopped, end = shown
    assert both.endswith("awaited: north, south (not answered)")
    assert "stopped" in stopped
    assert one.endswith("awaited: south (not answered)")
    assert end == f"{'lung':<24} {'failed':<18} 2 of 2 rounds"
