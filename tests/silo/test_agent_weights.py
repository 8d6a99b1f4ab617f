"""When the agent downloads the file of weights that a job begins with."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.jobs import make_job

from staddle.algorithms.models.pretrained import StartWeights
from staddle.errors import RefusedError
from staddle.silo.admission.start_weights import WeightsNeededError
from staddle.silo.agent import Agent
from staddle.silo.session import JobOffered

OFFER = JobOffered("test", "ab" * 32, b"job")


@pytest.fixture
def agent(monkeypatch):
    """An agent that lacks the file of the job that is offered, and what it does about that."""
    weights = StartWeights(sha256="ab" * 32, size=1)
    made, done = Agent.__new__(Agent), []

    def admit(offer):
        done.append("admit")
        if "download" not in done:
            raise WeightsNeededError("coordinator", make_job("fedper"), weights, Path("w"))
        return offer.signed

    async def download(needed):
        done.append("download")

    monkeypatch.setattr(made, "_admit", admit, raising=False)
    monkeypatch.setattr(made, "_download", download, raising=False)
    return SimpleNamespace(made=made, done=done)


def test_a_job_that_earlier_ones_speak_against_is_declined_without_its_file(agent, monkeypatch):
    def check(job, signed):
        raise RefusedError("coordinator", "POLICY", "ran before")

    monkeypatch.setattr(agent.made, "_check_earlier", check, raising=False)
    with pytest.raises(RefusedError, match="ran before"):
        asyncio.run(agent.made._admit_with_weights(OFFER))
    assert agent.done == ["admit"]


def test_any_other_job_is_judged_again_once_its_file_is_here(agent, monkeypatch):
    monkeypatch.setattr(agent.made, "_check_earlier", lambda *_: None, raising=False)
    assert asyncio.run(agent.made._admit_with_weights(OFFER)) == b"job"
    assert agent.done == ["admit", "download", "admit"]
