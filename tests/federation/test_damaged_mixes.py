"""Padded words and rotated vectors that the coordinator's disk changed are neither mixed nor
compared.
"""

import grpc
import pytest
from federation.test_blind_mixes import FOUR, world  # noqa: F401 a fixture
from support.coordinator_thread import coordinator
from support.raw_mixing_silo import in_turn


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["padded", "rotated"])
def test_an_upload_that_the_disk_changed_ends_the_job_by_its_name(world, kind):  # noqa: F811
    """Before: silos refused a row, and blamed each other or the coordinator.

    What was compared came out otherwise.
    """
    made = world()

    async def scenario():
        silos = [made.silo(here, name) for name in FOUR]
        for each in silos:
            await each.accept()
        (run,) = here.daemon.runs
        if kind == "rotated":
            fold = run.fold

            def folding(*args):
                flip(*made.folder.glob("0.north.*.rotated"))
                return fold(*args)

            run.fold = folding
        for each in silos:
            await each.told("round")
        await in_turn(silos, lambda each: each.take_part(0))
        if kind == "padded":
            for each in silos:
                await each.told("round")
            flip(*made.folder.glob("0.north.*.padded"))
            with pytest.raises(grpc.aio.AioRpcError, match="cannot continue"):
                await silos[1].opened(1)
        await silos[1].told("finish")
        assert run.state.outcome == "failed"
        assert f".{kind}; have the job signed again" in run.state.reason
        assert "the disk changed 0.north." in run.state.reason
        for each in silos:
            await each.channel.close()

    with coordinator(made.config) as here:
        here.run(scenario(), 120)
        assert here.broken == []
