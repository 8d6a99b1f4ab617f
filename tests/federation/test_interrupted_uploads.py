"""What the coordinator keeps of an upload whose connection was lost, and what it says of it: raw
calls, real TLS.
"""

import asyncio
import contextlib
from types import SimpleNamespace

import grpc
import pytest
from support.raw_silo import SECONDS, Caller, arrived, frames_of, refused

from staddle.commands.federation import local_federation
from staddle.coordinator import config as configs
from staddle.coordinator import daemon as daemons
from staddle.coordinator import server
from staddle.coordinator.rpc import uploads
from staddle.proto.channel import CHUNK_BYTES
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys

SILOS = ("north", "east")
INVALID = grpc.StatusCode.INVALID_ARGUMENT
CHUNKS = 4  # whole ones of a payload


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    federation = local_federation.make(tmp_path_factory.mktemp("cut") / "federation", SILOS)
    document = {
        "version": 1,
        "name": "big",
        "seed": 11,
        "rounds": 2,
        "silos": list(SILOS),
        "round_timeout": 60,
        "method": {"name": "fedavg"},
        "model": {"name": "glm", "classes": 260, "input": [1, 64, 64]},
        "training": {"epochs": 1, "batch_size": 32, "lr": 0.05},
    }
    job = local_federation.sign_job(federation, document)
    timing = {"admission_seconds": 20, "beat_seconds": 1, "hold_seconds": 1}
    local_federation.write_coordinator(federation, ["big"], timing)
    folder = federation.folder
    return SimpleNamespace(
        job=job,
        roster=rosters.load(folder / "roster.json"),
        keys={silo: load_keys(folder / silo / "keys") for silo in SILOS},
        config=configs.load(federation.coordinator_config),
    )


@pytest.fixture
def serving(made, tmp_path):
    @contextlib.asynccontextmanager
    async def begin():
        config = made.config.model_copy(update={"directory": tmp_path / "state"})
        async with server.running(config) as address:
            callers = [Caller(address, made.keys[silo], made.roster, made.job) for silo in SILOS]
            for caller in callers:
                await caller.accept()
            yield callers
            for caller in callers:
                await caller.channel.close()

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
def test_the_rest_of_an_upload_is_taken_with_the_digests_of_all_of_it(serving, number):
    async def scenario():
        async with serving() as (north, east):
            size = frames_of(north)[0].manifest.size
            received = await interrupted(north, number, serving.spool)
            assert received == min(size, (number - 1) * CHUNK_BYTES)
            receipt = await north.upload(behind(north, received))
            assert receipt.size == size
            assert (await north.standing()).receipt.signature == receipt.signature
            await east.give()
            assert (await north.told("round")).round == 1
            assert not list(serving.spool.iterdir())

    asyncio.run(scenario())


def test_an_upload_may_be_cut_again_and_again(serving):
    async def scenario():
        async with serving() as (north, east):
            received = await interrupted(north, 2, serving.spool)
            for _ in range(CHUNKS - 1):
                before, received = received, await interrupted(north, 2, serving.spool, received)
                assert received == before + CHUNK_BYTES
            await north.upload(behind(north, received))
            await east.give()
            assert (await north.told("round")).round == 1

    asyncio.run(scenario())


def test_a_wrong_offset_is_refused_and_the_silo_may_start_over(serving):
    async def scenario():
        async with serving() as (north, east):
            await refused(
                north.upload(behind(north, CHUNK_BYTES), wary=True),
                "MANIFEST",
                INVALID,
                "has 0 bytes of it",
            )
            received = await interrupted(north, 3, serving.spool)
            for offset in (CHUNK_BYTES, 3 * CHUNK_BYTES, received + 1, 2**63):
                frames = [behind(north, 0)[0], *behind(north, 0)[-1:]]
                frames[0].manifest.offset = offset
                why = f"has {received} bytes of it; send all of it"
                await refused(north.upload(frames, wary=True), "MANIFEST", INVALID, why)
            assert (await north.standing()).received == received
            await north.give()
            await east.give()
            assert (await north.told("round")).round == 1

    asyncio.run(scenario())


def test_bytes_that_changed_meanwhile_are_found_by_the_digests(serving):
    async def scenario():
        async with serving() as (north, _):
            received = await interrupted(north, 3, serving.spool)
            path = serving.spool / "north.part"
            path.write_bytes(b"\x01" + path.read_bytes()[1:])
            await refused(
                north.upload(behind(north, received), wary=True),
                "DIGEST",
                grpc.StatusCode.DATA_LOSS,
            )
            assert not list(serving.spool.iterdir())
            assert (await north.standing()).received == 0

    asyncio.run(scenario())


def test_nothing_stays_of_an_upload_that_was_refused_or_too_slow(serving, monkeypatch):
    async def scenario():
        async with serving() as (north, _):
            call = north.stub.Upload(timeout=SECONDS)
            monkeypatch.setattr(uploads, "transfer_seconds", lambda _: 0.5)
            for frame in frames_of(north)[:3]:
                await call.write(frame)
            await refused(
                call, "LIMIT", grpc.StatusCode.RESOURCE_EXHAUSTED, "longer than its size allows"
            )
            assert (await north.standing()).received == 0
            monkeypatch.undo()
            frames = frames_of(north)[:3]
            frames[2].chunk = frames[2].chunk[:-1]
            await refused(north.upload(frames, wary=True), "LENGTH", INVALID)
            assert (await north.standing()).received == 0
            assert not list(serving.spool.iterdir())

    asyncio.run(scenario())


def test_what_is_kept_goes_with_its_round(serving):
    async def scenario():
        async with serving() as (north, _):
            assert await interrupted(north, 3, serving.spool) == 2 * CHUNK_BYTES
            assert [path.name for path in serving.spool.iterdir()] == ["north.part"]
            await north.answer("FAILED", 0, 24)
            assert not list(serving.spool.iterdir())
            assert (await north.standing()).received == 0
            frames = behind(north, 2 * CHUNK_BYTES)
            await refused(
                north.upload(frames, wary=True), "ROUND_CLOSED", grpc.StatusCode.FAILED_PRECONDITION
            )

    asyncio.run(scenario())


def test_whoever_asks_ends_the_upload_that_still_runs(serving):
    """As after a line that stalled: the coordinator has not noticed yet that the old connection is
    gone.
    """

    async def scenario():
        async with serving() as (north, _):
            call = north.stub.Upload(timeout=SECONDS)
            for frame in frames_of(north)[:3]:
                await call.write(frame)
            await arrived(serving.spool, "north", 2 * CHUNK_BYTES)
            await refused(
                north.give(wary=True),
                "LIMIT",
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "running already",
            )
            assert (await north.standing()).received == 2 * CHUNK_BYTES
            await refused(call, "INTERRUPTED", grpc.StatusCode.ABORTED, "asked meanwhile")
            await north.upload(behind(north, 2 * CHUNK_BYTES))
            assert (await north.standing()).receipt.size

    asyncio.run(scenario())


def test_an_upload_that_is_being_checked_waits_for_its_end_alone(serving, monkeypatch):
    real, here, hold = daemons.JobRun.accept, asyncio.Event(), asyncio.Event()

    async def accept(run, silo, *rest):
        here.set()
        await hold.wait()
        return await real(run, silo, *rest)

    monkeypatch.setattr(daemons.JobRun, "accept", accept)

    async def scenario():
        async with serving() as (north, _):
            giving = asyncio.create_task(north.give())
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

    asyncio.run(scenario())


def test_standing_is_ones_own_and_of_a_known_job(serving):
    async def scenario():
        async with serving() as (north, east):
            assert await interrupted(north, 3, serving.spool) == 2 * CHUNK_BYTES
            assert (await east.standing()).received == 0
            assert (await north.standing(1)).received == 0
            assert (await north.standing(2**32 - 1)).received == 0
            for caller, session in ((north, b""), (east, north.session)):
                before, caller.session = caller.session, session
                await refused(caller.standing(), "SESSION", grpc.StatusCode.UNAUTHENTICATED)
                caller.session = before
            north.job = SimpleNamespace(name="big", digest="00" * 32)
            await refused(north.standing(), "UNKNOWN_JOB", grpc.StatusCode.NOT_FOUND)

    asyncio.run(scenario())
