"""What the coordinator keeps of an upload whose connection was lost, and what it says of it: raw
calls, real TLS.
"""

import asyncio
import contextlib
from types import SimpleNamespace

import grpc
import pytest
from support.raw_silo import SECONDS, arrived, frames_of, refused
from support.signed_federation import job_document, raw_silos, signed_federation

from staddle.coordinator import daemon as daemons
from staddle.coordinator import server
from staddle.coordinator.rpc import uploads
from staddle.proto.channel import CHUNK_BYTES

SILOS = ("north", "east")
CHUNKS = 4  # whole ones of a payload


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    model = {"name": "glm", "classes": 260, "input": [1, 64, 64]}
    document = job_document(SILOS, name="big", rounds=2, model=model)
    return signed_federation(tmp_path_factory.mktemp("cut"), SILOS, document)


@pytest.fixture
def serving(made, tmp_path):
    @contextlib.asynccontextmanager
    async def begin():
        config = made.config.model_copy(update={"directory": tmp_path / "state"})
        async with server.running(config) as address, raw_silos(address, made) as callers:
            yield callers

    begin.spool = tmp_path / "state" / "spool"
    return begin


async def interrupted(caller, number, spool, before=0):
    """Send so many frames of what goes on behind ``before``, break off.

    What the coordinator says that it has.
    """
    call = caller.stub.Upload(timeout=SECONDS)
    frames = behind(caller, before)[:number]
    for frame in frames:
        await call.write(frame)
    await arrived(spool, caller.silo, before + sum(len(frame.chunk) for frame in frames))
    call.cancel()
    return (await caller.standing()).received


def behind(caller, offset):
    """The frames of an upload that goes on at an offset."""
    first, *chunks, end = frames_of(caller)
    first.manifest.offset = offset
    return [first, *chunks[-(-offset // CHUNK_BYTES) :], end]


@pytest.mark.parametrize("number", [1, 2, 4, CHUNKS + 2])
async def test_the_rest_of_an_upload_is_taken_with_the_digests_of_all_of_it(serving, number):
    async with serving() as (north, east):
        size = frames_of(north)[0].manifest.size
        received = await interrupted(north, number, serving.spool)
        assert received == min(size, (number - 1) * CHUNK_BYTES)
        receipt = await north.upload(behind(north, received))
        assert receipt.size == size
        assert (await north.standing()).receipt.signature == receipt.signature
        await east.contribute()
        assert (await north.told("round")).round == 1
        assert not list(serving.spool.iterdir())


async def test_an_upload_may_be_cut_again_and_again(serving):
    async with serving() as (north, east):
        received = await interrupted(north, 2, serving.spool)
        for _ in range(CHUNKS - 1):
            before, received = received, await interrupted(north, 2, serving.spool, received)
            assert received == before + CHUNK_BYTES
        await north.upload(behind(north, received))
        await east.contribute()
        assert (await north.told("round")).round == 1


async def test_a_wrong_offset_is_refused_and_the_silo_may_start_over(serving):
    async with serving() as (north, east):
        await refused(
            north.upload(behind(north, CHUNK_BYTES), wary=True), "MANIFEST", "has 0 bytes of it"
        )
        received = await interrupted(north, 3, serving.spool)
        for offset in (CHUNK_BYTES, 3 * CHUNK_BYTES, received + 1, 2**63):
            frames = [behind(north, 0)[0], *behind(north, 0)[-1:]]
            frames[0].manifest.offset = offset
            why = f"has {received} bytes of it; send all of it"
            await refused(north.upload(frames, wary=True), "MANIFEST", why)
        assert (await north.standing()).received == received
        await north.contribute()
        await east.contribute()
        assert (await north.told("round")).round == 1


async def test_bytes_that_changed_meanwhile_are_found_by_the_digests(serving):
    async with serving() as (north, _):
        received = await interrupted(north, 3, serving.spool)
        path = serving.spool / "north.big.part"
        path.write_bytes(b"\x01" + path.read_bytes()[1:])
        await refused(north.upload(behind(north, received), wary=True), "DIGEST")
        assert not list(serving.spool.iterdir())
        assert (await north.standing()).received == 0


async def test_nothing_stays_of_an_upload_that_was_refused_or_too_slow(serving, monkeypatch):
    async with serving() as (north, _):
        call = north.stub.Upload(timeout=SECONDS)
        monkeypatch.setattr(uploads, "transfer_seconds", lambda _: 0.5)
        for frame in frames_of(north)[:3]:
            await call.write(frame)
        await refused(call, "LIMIT", "longer than its size allows")
        assert (await north.standing()).received == 0
        monkeypatch.undo()
        frames = frames_of(north)[:3]
        frames[2].chunk = frames[2].chunk[:-1]
        await refused(north.upload(frames, wary=True), "LENGTH")
        assert (await north.standing()).received == 0
        assert not list(serving.spool.iterdir())


async def test_what_is_kept_goes_with_its_round(serving):
    async with serving() as (north, _):
        assert await interrupted(north, 3, serving.spool) == 2 * CHUNK_BYTES
        assert [path.name for path in serving.spool.iterdir()] == ["north.big.part"]
        await north.answer("FAILED", 0, 24)
        assert not list(serving.spool.iterdir())
        assert (await north.standing()).received == 0
        frames = behind(north, 2 * CHUNK_BYTES)
        await refused(north.upload(frames, wary=True), "ROUND_CLOSED")


async def test_whoever_asks_ends_the_upload_that_still_runs(serving):
    """As after a line that stalled: the coordinator has not noticed yet that the old connection is
    gone.
    """
    async with serving() as (north, _):
        call = north.stub.Upload(timeout=SECONDS)
        for frame in frames_of(north)[:3]:
            await call.write(frame)
        await arrived(serving.spool, "north", 2 * CHUNK_BYTES)
        await refused(north.contribute(wary=True), "LIMIT", "running already")
        assert (await north.standing()).received == 2 * CHUNK_BYTES
        await refused(call, "INTERRUPTED", "since asked")
        await north.upload(behind(north, 2 * CHUNK_BYTES))
        assert (await north.standing()).receipt.size


async def test_an_upload_that_is_being_checked_waits_for_its_end_alone(serving, monkeypatch):
    real, here, hold = daemons.JobRun.accept, asyncio.Event(), asyncio.Event()

    async def accept(run, silo, *rest):
        here.set()
        await hold.wait()
        return await real(run, silo, *rest)

    monkeypatch.setattr(daemons.JobRun, "accept", accept)
    async with serving() as (north, _):
        giving = asyncio.create_task(north.contribute())
        async with asyncio.timeout(SECONDS):
            await here.wait()
        size = frames_of(north)[0].manifest.size
        assert (await north.standing()).received == size
        with contextlib.suppress(grpc.aio.AioRpcError):
            await giving
        hold.set()
        assert len(behind(north, size)) == 2
        await north.upload(behind(north, size))
        assert (await north.standing()).receipt.size == size


async def test_standing_is_ones_own_and_of_a_known_job(serving):
    async with serving() as (north, east):
        assert await interrupted(north, 3, serving.spool) == 2 * CHUNK_BYTES
        assert (await east.standing()).received == 0
        assert (await north.standing(1)).received == 0
        assert (await north.standing(2**32 - 1)).received == 0
        for caller, session in ((north, b""), (east, north.session)):
            before, caller.session = caller.session, session
            await refused(caller.standing(), "SESSION")
            caller.session = before
        north.job = SimpleNamespace(name="big", digest="00" * 32)
        await refused(north.standing(), "UNKNOWN_JOB")
