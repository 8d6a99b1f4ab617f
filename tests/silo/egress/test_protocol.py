"""Messages of secure sums: recorded before they leave, and held back over the policy's bytes."""

import asyncio

import pytest
from support.recording_gate import World, kinds, records

from staddle.proto.convert.secagg_sent import Attempt, Over
from staddle.security.faults import Code
from staddle.silo.egress.outcomes import DeniedError


def test_a_message_of_a_secure_sum_is_in_the_ledger_before_it_leaves(world):
    """Killed between the two, the ledger says too much, never too little."""
    left = []

    async def secure(request):
        left.append((request.WhichOneof("body"), kinds(records(world.path))[-1]))

    world.client.secure = secure
    attempt = Attempt(world.job.name, bytes.fromhex(world.job.digest), 0, 0, bytes(32))
    asyncio.run(world.gate.protocol.secure(attempt, Over(Code.SUM)))
    assert left == [("end", "egress.protocol")]


def test_messages_over_the_bytes_of_a_round_are_held_back_and_recorded(made, tmp_path):
    limit = {'max_bytes_per_round = "64MiB"': "max_bytes_per_round = 300"}
    world = World(made, tmp_path, made.policy(*made.jobs.values(), replace=limit))
    left = []

    async def secure(request):
        left.append(request.ByteSize())

    world.client.secure = secure
    attempt = Attempt(world.job.name, bytes.fromhex(world.job.digest), 0, 0, bytes(32))

    async def messages():
        for _ in range(10):
            await world.gate.protocol.secure(attempt, Over(Code.SUM))

    with pytest.raises(DeniedError, match="over max_bytes_per_round = 300"):
        asyncio.run(messages())
    assert 0 < sum(left) <= 300 < sum(left) + left[0]
    assert kinds(records(world.path))[-2:] == ["egress.protocol", "policy.deny"]
    world.ledger.close()
