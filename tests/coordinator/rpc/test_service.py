"""Which of its tasks a silo is told that works on some already."""

from collections import Counter
from types import SimpleNamespace

import pytest

from staddle.coordinator.rounds.tasks import OfferTask, RoundTask
from staddle.coordinator.rpc.service import Service
from staddle.proto import federation_pb2 as pb

NEXT = RoundTask(4, (), 0)


@pytest.fixture
def service(monkeypatch):
    """The service of a job "one", whose round 4 is open, and of "two", which is offered."""
    made = Service.__new__(Service)
    jobs = [SimpleNamespace(job=SimpleNamespace(name=name)) for name in ("one", "two")]
    made._witnessed = Counter()
    made._daemon = SimpleNamespace(
        hold=lambda: 0,
        changed_for=lambda _: None,
        attesting=SimpleNamespace(waiting=lambda _: None),
        tasks_for=lambda _: zip(jobs, (NEXT, OfferTask()), strict=True),
    )
    monkeypatch.setattr(made, "_silo", lambda *_: "a", raising=False)
    monkeypatch.setattr(made, "_check_session", lambda *_: None, raising=False)
    monkeypatch.setattr(made, "_task", lambda _, run, __: run.job.name, raising=False)
    return made


def own(job, kind, number=0):
    return pb.InHand(job=job, kind=kind, round=number)


@pytest.mark.parametrize(
    ("in_hand", "told"),
    [
        ([], "one"),
        ([own("one", pb.TASK_KIND_ROUND, 4)], "two"),
        ([own("one", pb.TASK_KIND_ROUND, 3)], "two"),  # it is behind, and is not held up by that
        ([own("one", pb.TASK_KIND_ROUND, 3), own("two", pb.TASK_KIND_OFFER)], "one"),
    ],
)
async def test_the_next_task_of_a_job_in_hand_comes_after_those_of_other_jobs(
    service, in_hand, told
):
    assert await service.Poll(pb.PollRequest(in_hand=in_hand), None) == told
