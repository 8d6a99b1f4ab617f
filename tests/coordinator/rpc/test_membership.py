"""What a founder learns before a member is removed."""

import asyncio
from types import SimpleNamespace

import pytest

from staddle.commands.federation import local_federation
from staddle.coordinator.rpc.membership import MembershipService
from staddle.proto import membership_pb2 as pb
from staddle.security.identity import roster as rosters

SILOS = ("north", "south")


@pytest.mark.parametrize(
    ("runs", "stage", "told"),
    [
        (True, "round", ["heart"]),
        (False, "stopped", ["heart"]),  # it could resume, but not without one of its silos
        (False, "queued", []),
        (False, "ended", []),
    ],
)
def test_a_founder_is_told_of_jobs_that_end_with_a_silo(tmp_path, monkeypatch, runs, stage, told):
    federation = local_federation.make(tmp_path / "federation", SILOS)
    job = SimpleNamespace(name="heart", silos=SILOS)
    run = SimpleNamespace(job=job, state=SimpleNamespace(runs=runs, stage=stage))
    roster = rosters.load(federation.folder / "roster.json")
    daemon = SimpleNamespace(roster=roster, runs=[run])
    enrolments = SimpleNamespace(waiting=tuple)
    monkeypatch.setattr(MembershipService, "_waiting_renewals", lambda _: ())
    in_use = SimpleNamespace(roster=roster)
    service = MembershipService(daemon, in_use, enrolments, None, asyncio.Event())
    reply = asyncio.run(service.Waiting(pb.WaitingRequest(), None))
    assert [(each.name, tuple(each.silos)) for each in reply.begun] == [(n, SILOS) for n in told]
