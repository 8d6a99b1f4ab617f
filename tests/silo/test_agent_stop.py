"""An agent hears that it shall stop, whatever it waits for."""

import asyncio

import pytest

from staddle.silo.agent import Agent
from staddle.silo.session import Decide, JobOffered, StopAsked


@pytest.mark.timeout(60)
def test_a_file_that_settles_for_ever_keeps_no_agent_from_stopping():
    async def scenario():
        agent = Agent.__new__(Agent)  # of it all, only this is asked
        agent._stop = asyncio.Event()
        looked = asyncio.Event()
        settling = lambda: looked.set() or True
        offer = Decide(JobOffered("lung", "ab" * 32, b"{}"))
        waits = asyncio.create_task(agent._next(offer, str, settling))
        await looked.wait()
        agent._stop.set()
        assert await waits == StopAsked()

    asyncio.run(scenario())
