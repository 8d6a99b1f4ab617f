"""What an operator sees who follows a job to its end."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from staddle.algorithms.job.evaluated import evaluation_of
from staddle.commands.federation import jobs
from staddle.errors import AbortedError
from staddle.files.documents import canonical_json
from staddle.proto import operations_pb2 as pb


@pytest.mark.parametrize("terminal", [True, False])
def test_whom_a_job_waits_for_is_said_once_and_without_a_bar_each_round(terminal):
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
    read = canonical_json(evaluation_of({"model": {"classes": 2}}))
    reports = [
        pb.JobReport(
            status=pb.JobStatus(job="lung", silos=silos, rounds=2, **fields), evaluation=read
        )
        for fields in stages
    ]
    # A watch that begins late is told of all rounds at once.
    reports[3].rounds.extend(pb.ClosedRound(round=number, members=silos) for number in range(9))
    reports[5].rounds.add(round=9, members=silos)
    shown = []
    bar = SimpleNamespace(add_task=lambda *_, **__: 0, update=lambda *_, **__: None)
    screen = SimpleNamespace(
        show=lambda *lines: shown.extend(lines),
        progress=lambda **_: nullcontext(bar),
        is_terminal=terminal,
    )
    operator = SimpleNamespace(watch=lambda _: iter(reports))
    with pytest.raises(AbortedError, match="job lung did not complete"):
        jobs.follow(screen, operator, "lung")
    rounds = [line for line in shown if line.startswith("round ")]
    assert [line.split(":")[0] for line in rounds] == [
        f"round {number} closed" for number in range(4, 10) if not terminal
    ]
    both, one, stopped, end = (line for line in shown if line not in rounds)
    assert both.endswith("awaited: north, south (not answered)")
    assert "stopped" in stopped
    assert one.endswith("awaited: south (not answered)")
    assert end == f"{'lung':<24} {'failed':<18} 2 of 2 rounds"
