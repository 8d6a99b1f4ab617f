"""Messages of secure sums: recorded before they leave, and held back over the policy's bytes."""

import asyncio

import pytest
from support.recording_gate import World, kinds, records

from staddle.proto.convert.secagg_sent import Attempt, Over
from staddle.security.faults import Code


@pytest.fixture
def world(made, tmp_path):
    found = World(made, tmp_path)
    yield found
    found.ledger.close()


def test_a_message_of_a_secure_sum_is_in_the_ledger_before_it_leaves(world):
    """Killed between the two, the ledger says too much, never too little."""
    left = []

    async def secure(request):
        left.append((request.WhichOneof("body"), kinds(records(world.path))[-1]))

    world.client.secure = secure
    attempt = Attempt(world.job.name, bytes.fromhex(world.job.digest), 0, 0, bytes(32))
    asyncio.run(world.gate.protocol.secure(attempt, Over(Code.SUM)))
    assert left == [("end", "egress.protocol")]
