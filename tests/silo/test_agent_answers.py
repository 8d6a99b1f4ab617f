"""What the agent answers to a job that is offered again and again."""

import asyncio
from types import SimpleNamespace

import pytest
from support.jobs import make_job

from staddle.errors import RefusedError
from staddle.proto import federation_pb2 as pb
from staddle.silo import agent as agents
from staddle.silo.admission import approvals
from staddle.silo.agent import Agent
from staddle.silo.session import Decide, JobOffered, StopAsked

OFFER = JobOffered("job", "ab" * 32, b"signed")


@pytest.fixture
def agent(monkeypatch):
    """An agent without files, and what it records and answers."""
    monkeypatch.setattr(agents, "PAUSE_SECONDS", 0)
    made, done = Agent.__new__(Agent), []

    async def record_decision(record):
        done.append(("record", record.job, record.reasons))

    async def answer(job, digest, round_, kind, code):
        done.append((kind, code))

    async def admit(signed):
        done.append("admit")
        return SimpleNamespace(job=make_job("fedper"))

    made._declined, made._config = {}, None
    made._policy = SimpleNamespace(digest="")
    made._roster = SimpleNamespace(coordinator=SimpleNamespace(id="coordinator"))
    made._gate = SimpleNamespace(
        session=SimpleNamespace(record_decision=record_decision, answer=answer)
    )
    monkeypatch.setattr(made, "_admit_with_weights", admit, raising=False)
    return SimpleNamespace(made=made, done=done)


@pytest.mark.parametrize("code", ["NOT_APPROVED", "WAITING"])
def test_a_job_that_nobody_approves_is_judged_and_recorded_once(agent, monkeypatch, code):
    """A coordinator offers it without end; whoever decides otherwise makes another agent."""

    def asked(*_):
        if code == "WAITING":
            raise RefusedError("coordinator", code, "waits for a person")
        return SimpleNamespace(answer="declined", recorded=lambda: None)

    monkeypatch.setattr(agents.approvals, "asked", asked)
    for _ in range(3):
        asyncio.run(agent.made._decide(OFFER))
    said = ("a person at this silo declined it",)
    recorded = [("record", "job", said)] * (code == "NOT_APPROVED")
    assert agent.done == ["admit", *recorded, *[("DECLINE", code)] * 3]


def told(*offers, **body):
    return pb.Task(open_offers=pb.OpenOffers(signed_sha256=offers), **body)


async def test_the_coordinators_list_of_offers_is_noted_once_it_differs(agent, monkeypatch):
    """An older coordinator has none: then whatever waits does so on."""
    offer, noted = pb.Offer(job="job", job_digest=bytes(32)), []
    answers = [pb.Task(), told(b"1"), told(b"1", offer=offer), told(nothing=pb.Nothing())]

    async def poll():
        return answers.pop(0)

    made = agent.made
    made._config, made._open_offers = SimpleNamespace(directory="here"), None
    made._gate.session.poll = poll
    monkeypatch.setattr(made, "_renew", lambda: asyncio.sleep(0), raising=False)
    monkeypatch.setattr(agents.approvals, "sort_offers", lambda *said: noted.append(said) or {})
    while answers:
        await made._poll()
    assert noted == [("here", {b"1"}), ("here", frozenset())]


async def test_a_job_that_the_policy_forbids_by_now_waits_for_nobody(agent, monkeypatch, tmp_path):
    made, offer = agent.made, JobOffered("test", "ab" * 32, b"signed")
    made._config = SimpleNamespace(directory=tmp_path, admission=SimpleNamespace(approve="ask"))
    await made._decide(offer)
    assert len(list(tmp_path.rglob("offers/*.json"))) == 1
    made._declined = {}

    async def forbids(signed):
        raise RefusedError("coordinator", "POLICY", "no rule allows it")

    monkeypatch.setattr(made, "_admit_with_weights", forbids, raising=False)
    await made._decide(offer)
    assert list(tmp_path.rglob("offers/*.json")) == []
    assert approvals.declined(tmp_path) == ["test"]


async def test_an_agent_stops_though_a_file_never_settles(agent, monkeypatch):
    monkeypatch.setattr(agents, "LOOK_SECONDS", 60)
    agent.made._stop = asyncio.Event()
    agent.made._stop.set()

    async def decide(offer):
        await asyncio.Event().wait()

    monkeypatch.setattr(agent.made, "_decide", decide, raising=False)
    async with asyncio.timeout(30):
        found = await agent.made._next(Decide(OFFER), str, lambda: True)
    assert found == StopAsked()
