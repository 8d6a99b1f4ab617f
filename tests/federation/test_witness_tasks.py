"""What one silo asks without end: the others get their tasks, and the coordinator's ledger does not
grow for it.
"""

import asyncio
from contextlib import asynccontextmanager

import pytest
from support.raw_silo import SECONDS, refused
from support.signed_federation import job_document, raw_silos, signed_federation

from staddle.coordinator.rpc.service import WITNESSED_BEFORE_A_TASK
from staddle.coordinator.server import running
from staddle.coordinator.storage import receiving
from staddle.proto import federation_pb2 as pb

SILOS = ("north", "east", "south")


@pytest.fixture
def setup(tmp_path):
    document = job_document(SILOS, name="told", rounds=2)
    world = signed_federation(tmp_path, SILOS, document, hold_seconds=5)

    @asynccontextmanager
    async def serving():
        async with (
            running(world.config) as address,
            raw_silos(address, world, accepted=False) as callers,
        ):
            yield callers

    return serving


def polled(caller):
    """The next task as it comes."""
    return caller.stub.Poll(pb.PollRequest(session=caller.session), timeout=SECONDS)


async def test_a_silo_that_greets_in_a_loop_does_not_keep_the_others_from_their_tasks(setup):
    async with setup() as (north, east, _):
        await east.hello()
        told = []
        for _ in range(2 * WITNESSED_BEFORE_A_TASK + 2):
            await north.hello()  # a new question for east
            told.append((await polled(east)).WhichOneof("body"))
        once = ["witness"] * WITNESSED_BEFORE_A_TASK + ["offer"]
        assert told == once * 2


async def test_a_poll_of_an_old_session_takes_no_questions_from_the_new_one(setup):
    async with setup() as (north, east, _):
        await north.accept()
        old = asyncio.ensure_future(polled(north))
        # it is there
        await north.stub.Beat(pb.BeatRequest(session=north.session, job="told"), timeout=SECONDS)
        await north.hello()
        await east.hello()  # a question for north
        await refused(old, "SESSION")
        (asked,) = (await polled(north)).witness.asked
        assert asked.silo == "east"


async def test_a_delivery_that_is_fetched_without_end_is_refused(setup, monkeypatch):
    monkeypatch.setattr(receiving, "MOST_DELIVERIES", 3)
    async with setup() as callers:
        for caller in callers:
            await caller.accept()
        for caller in callers:
            await caller.contribute()
        north, east, _ = callers
        assert (await north.told("round")).round == 1
        for _ in range(3):
            assert len(await north.delivered(1)) > 0
        await refused(north.delivered(1), "LIMIT", "3 times")
        assert len(await east.delivered(1)) > 0
        for caller in callers:
            await caller.contribute(1)
        assert (await north.told("finish")).round == 2
        assert len(await north.delivered(2)) > 0
