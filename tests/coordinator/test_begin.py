"""Jobs a coordinator begins with, and what speaks against one, in one process over real TLS."""

import asyncio
import shutil
import sys
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from support.raw_silo import SECONDS, arrived, frames_of
from support.refusals import refused
from support.signed_federation import job_document, raw_silos, signed_federation

from staddle.commands.federation import local_federation
from staddle.coordinator import config as configs
from staddle.coordinator import server
from staddle.coordinator.config import JobLimits
from staddle.coordinator.storage.database import Database
from staddle.proto import operations_pb2 as pb
from staddle.proto.channel import ERROR_METADATA, OPTIONS
from staddle.proto.operations_pb2_grpc import OperationsStub
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys

SILOS = ("a", "b")
DOCUMENT = job_document(SILOS, rounds=2)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    federation = local_federation.make(
        tmp_path_factory.mktemp("begin") / "federation", (*SILOS, "c", "d")
    )
    for name in ("one", "two"):
        local_federation.sign_job(federation, {**DOCUMENT, "name": name})
    local_federation.write_coordinator(federation, ["one"], {})
    folder = federation.folder
    return SimpleNamespace(
        federation=federation,
        config=configs.load(federation.coordinator_config),
        roster=rosters.load(folder / "roster.json"),
        operator=load_keys(folder / "operator"),
        signed={name: (folder / "jobs" / f"{name}.json").read_bytes() for name in ("one", "two")},
    )


@pytest.fixture
def begin(world, tmp_path):
    """``begin(then)``: run the coordinator and, as its operator, ``then(stub)``."""

    @asynccontextmanager
    async def operating(address):
        keys, coordinator = world.operator, world.roster.coordinator
        pair = (keys.tls_key, keys.entry.certificate.encode())
        credentials = grpc.ssl_channel_credentials(coordinator.certificate.encode(), *pair)
        named = ("grpc.ssl_target_name_override", "coordinator.staddle")
        async with grpc.aio.secure_channel(
            address, credentials, options=[*OPTIONS, named]
        ) as channel:
            yield OperationsStub(channel)

    def call(then, **changes):
        async def run():
            config = world.config.model_copy(update={"directory": tmp_path / "state", **changes})
            async with server.running(config) as address, operating(address) as stub:
                return await then(stub)

        return asyncio.run(run())

    call.jobs = tmp_path / "state" / "jobs"
    call.database = tmp_path / "state" / "coordinator.sqlite"
    return call


async def names(stub):
    return [job.job for job in (await stub.List(pb.ListRequest())).jobs]


def submitting(signed):
    async def submit(stub):
        try:
            await stub.Submit(pb.SubmitRequest(signed_job=signed))
        except grpc.aio.AioRpcError as error:
            return (
                dict(error.trailing_metadata())[ERROR_METADATA],
                error.details(),
                await names(stub),
            )
        return await names(stub)

    return submit


def remove(database: Path):
    for path in database.parent.glob(f"{database.name}*"):
        path.unlink()


def test_a_coordinator_whose_database_is_gone_refuses_to_start_and_removes_nothing(begin):
    assert begin(names) == ["one"]
    kept = begin.jobs / "one" / "0.model.safetensors"
    kept.write_bytes(b"the only copy")
    copy = begin.jobs / "copy.sqlite"
    shutil.copyfile(begin.database, copy)
    remove(begin.database)
    for _ in range(2):  # the first start has made a database, which is no better
        with refused(rf"{kept.parent}: holds {kept.name}, .*bring coordinator\.sqlite back"):
            begin(names)
        assert kept.read_bytes() == b"the only copy"
    remove(begin.database)
    shutil.copyfile(copy, begin.database)
    assert begin(names) == ["one"]


def test_a_database_that_is_older_than_the_tensors_is_refused(begin):
    assert begin(names) == ["one"]
    kept = begin.jobs / "one" / "1.a.upload"
    kept.write_bytes(b"the only copy")
    with refused(r"1\.a\.upload, but by coordinator.sqlite the job stands in round 0"):
        begin(names)
    kept.rename(kept.with_name("0.a.upload"))  # what a crash leaves of round 0 is rubbish
    assert begin(names) == ["one"]
    assert list(kept.parent.iterdir()) == []


def test_an_empty_folder_of_a_crash_locks_nobody_out(begin):
    (begin.jobs / "one").mkdir(parents=True)
    assert begin(names) == ["one"]


def test_an_operator_is_refused_a_job_whose_folder_holds_tensors(begin, world):
    (begin.jobs / "two").mkdir(parents=True)
    kept = begin.jobs / "two" / "0.model.safetensors"
    kept.write_bytes(b"the only copy")
    code, why, listed = begin(submitting(world.signed["two"]))
    assert (code, listed) == ("STORAGE", ["one"])  # and the coordinator answers on
    assert f"{kept.parent}: holds {kept.name}" in why
    assert kept.exists()
    shutil.rmtree(kept.parent)
    assert begin(submitting(world.signed["two"])) == ["one", "two"]


def test_a_job_whose_declared_weights_show_one_silo_is_refused(begin, world):
    """The coordinator says which silo it is, before the silos refuse each round."""
    counts = {"a": 30, "b": 30, "c": 30, "d": 200}
    silos = {"silos": list(counts), "min_cohort": 3}
    even = {
        "secure_aggregation": "required",
        "weights": "public",
        "counts": dict.fromkeys(counts, 30),
    }
    for name, own in (("even", even), ("uneven", {**even, "counts": counts})):
        local_federation.sign_job(
            world.federation, {**DOCUMENT, **silos, "name": name, "security": own}
        )
    signed = {
        name: (world.federation.folder / "jobs" / f"{name}.json").read_bytes()
        for name in ("even", "uneven")
    }
    code, why, listed = begin(submitting(signed["uneven"]))
    assert (code, listed) == ("STORAGE", ["one"])
    assert "job 'uneven': silo 'd' weighs too much among a, b, c, d, with 200 records of 290" in why
    assert begin(submitting(signed["even"])) == ["one", "even"]


def test_a_job_over_the_limit_of_a_job_is_refused(begin, world):
    few = JobLimits(max_job_bytes=286_000)
    with refused(r"job 'one' with 2 silos may need .*max_job_bytes is 279.3 KiB"):
        begin(names, limits=few)
    code, why, listed = begin(submitting(world.signed["two"]), limits=few, jobs=())
    assert (code, listed) == ("STORAGE", [])
    assert "job 'two' with 2 silos may need 280.2 KiB (107.1 KiB uploads, " in why
    assert not (begin.jobs / "two").exists()
    assert begin(names) == ["one"]
    assert begin(names, limits=few) == ["one"]  # one that has begun goes on


@pytest.fixture
def outside(world):
    """A signed job of a model of the package in tests/packages."""
    model = {"name": "normed", "classes": 3, "head": "4", "input": [1, 8, 8]}
    local_federation.sign_job(world.federation, {**DOCUMENT, "name": "outside", "model": model})
    path = world.federation.folder / "jobs" / "outside.json"
    sys.modules.pop("other_models", None)
    yield path.read_bytes()
    path.unlink()


def test_code_of_a_package_runs_where_the_coordinators_people_say_so(begin, world, outside):
    """Whatever an operator signs: reading such a job imports the package."""
    code, why, listed = begin(submitting(outside))
    assert (code, listed) == ("JOB_INVALID", ["one"])
    assert "submitted job: the job runs code of the installed package other-models, which" in why
    assert "other_models" not in sys.modules
    path = world.federation.folder / "jobs" / "outside.json"
    with refused(f"{path}: the job runs code of the installed package other-models, which may"):
        begin(names, jobs=(path,))
    assert "other_models" not in sys.modules
    assert begin(submitting(outside), packages=("other-models",)) == ["one", "outside"]


def test_a_job_that_is_not_over_stops_with_the_permission_for_its_code(begin, outside):
    allowed = {"packages": ("Other_Models",)}
    assert begin(submitting(outside), **allowed) == ["one", "outside"]
    with refused("job 'outside' in coordinator.sqlite: the job runs code of the installed package"):
        begin(names)
    assert begin(names, **allowed) == ["one", "outside"]


def test_under_another_roster_jobs_continue_whose_files_are_gone(begin, world, tmp_path):
    """Nobody is there to mend a configuration when a founder hands in a roster."""
    file = tmp_path / "one.json"
    file.write_bytes(world.signed["one"])
    assert begin(names, jobs=(file,)) == ["one"]
    file.unlink()
    with refused(f"{file}: cannot read it"):
        begin(names, jobs=(file,))
    later = server.continued(world.config, "127.0.0.1:7443")
    assert begin(names, jobs=later.jobs) == ["one"]
    assert later.listen == "127.0.0.1:7443"


async def test_calls_that_grpc_serves_are_told_from_other_tasks():
    """Whatever gRPC calls them in the release that is installed."""
    seen = []

    async def answer(request, _):
        seen.append(server.calls_open())
        return request

    grpc_server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(answer)
    served = {"Echo": handler}
    grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x", served),))
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await channel.unary_unary("/x/Echo")(b"1") == b"1"
    await grpc_server.stop(None)
    ((call,),) = seen
    assert call is not asyncio.current_task()


def test_a_coordinator_stops_once_its_calls_have_ended(begin, monkeypatch):
    """gRPC's ``stop`` returns a little before."""
    ended = []

    async def call():
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        ended.append("call")

    open_calls = []
    monkeypatch.setattr(server, "calls_open", lambda: set(open_calls))

    async def names_and_a_call(stub):
        found = await names(stub)
        real = grpc.aio._server.Server.stop

        async def stop(self, grace):
            await real(self, grace)
            open_calls.append(asyncio.create_task(call()))

        monkeypatch.setattr(grpc.aio._server.Server, "stop", stop)
        return found

    assert begin(names_and_a_call) == ["one"]
    assert ended == ["call"]


async def test_an_upload_that_ends_while_a_coordinator_stops_is_folded(tmp_path, monkeypatch):
    """The last upload of a round begins a fold; the job must not fail because folds have ended."""
    monkeypatch.setattr(server, "GRACE_SECONDS", 60)
    daemons, real = [], server.Daemon
    monkeypatch.setattr(server, "Daemon", lambda *given: daemons.append(real(*given)) or daemons[0])
    world = signed_federation(tmp_path, SILOS, DOCUMENT)
    serving = AsyncExitStack()
    address = await serving.enter_async_context(server.running(world.config))
    async with raw_silos(address, world) as callers:
        for caller in callers:
            await caller.told("round")
        await callers[0].contribute()
        *frames, last = frames_of(callers[1])
        upload = callers[1].stub.Upload(timeout=SECONDS)
        for frame in frames:
            await upload.write(frame)
        await arrived(world.config.directory / "spool", "b", frames[0].manifest.size)
        stopped = asyncio.create_task(serving.aclose())
        while not daemons[0].stopping:
            await daemons[0].changed.wait()
        await upload.write(last)
        await upload.done_writing()
        await upload
        await stopped
    path = world.config.directory / "coordinator.sqlite"
    with closing(Database(path, read_only=True)) as database:
        (state,) = database.states()
    assert (state.stage, state.round, state.reason) == ("round", 1, "")
