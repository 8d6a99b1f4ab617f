"""A job's file of weights at the coordinator: from its operator, and to its silos.

One process, real TLS.
"""

import asyncio
import shutil
from types import SimpleNamespace

import grpc
import pytest
from support.raw_silo import SECONDS, Caller
from support.refusals import refused
from support.signed_federation import job_document
from support.start_weights import NETWORK, extractor, save_start, start_table

from staddle import log
from staddle.commands.federation import local_federation
from staddle.coordinator import config as configs
from staddle.coordinator import server
from staddle.coordinator.check import check
from staddle.coordinator.config import JobLimits
from staddle.coordinator.storage.spool import MARGIN_BYTES
from staddle.proto import federation_pb2, operations_pb2
from staddle.proto.channel import ERROR_METADATA
from staddle.proto.operations_pb2_grpc import OperationsStub
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys

SILOS = ("a", "b", "c")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Jobs "begun" and "twin" begin with one file, "spoilt" with one that does not fit."""
    federation = local_federation.make(tmp_path_factory.mktemp("weighted") / "federation", SILOS)
    folder = federation.folder / "jobs"
    save_start(folder / "w.safetensors")
    save_start(folder / "spoilt.safetensors", dict(list(extractor().items())[1:]))
    jobs = {}
    for name, file in {
        "begun": "w",
        "twin": "w",
        "both": "w",
        "spoilt": "spoilt",
        "bare": "",
    }.items():
        model = start_table(f"{file}.safetensors") if file else {"name": NETWORK, "classes": 10}
        if name == "both":
            model["weights"]["parts"] = ["extractor", "classifier"]
        document = job_document(SILOS[:2], name=name, model=model)
        jobs[name] = local_federation.sign_job(federation, document)
    local_federation.write_coordinator(federation, [], {"hold_seconds": 1, "beat_seconds": 20})
    return SimpleNamespace(
        federation=federation,
        config=configs.load(federation.coordinator_config),
        roster=rosters.load(federation.folder / "roster.json"),
        jobs=jobs,
        signed={name: (folder / f"{name}.json").read_bytes() for name in jobs},
        data=(folder / "w.safetensors").read_bytes(),
        spoilt=(folder / "spoilt.safetensors").read_bytes(),
    )


@pytest.fixture
def coordinator(world, tmp_path):
    """``coordinator(then)`` runs one and, next to it, ``then(asking)``."""

    def call(then, **changes):
        async def run():
            config = world.config.model_copy(update={"directory": call.folder, **changes})
            async with server.running(config) as address:
                asking = Asking(address, world)
                try:
                    return await then(asking)
                finally:
                    for caller in asking.callers:
                        await caller.channel.close()

        return asyncio.run(run())

    call.folder = tmp_path / "state"
    call.weights = call.folder / "weights" / world.jobs["begun"].model.weights.name
    return call


class Asking:
    """An operator, and silos that have greeted."""

    def __init__(self, address, world):
        self.address, self.world, self.callers = address, world, []
        folder = world.federation.folder
        self.operator = OperationsStub(self.caller(load_keys(folder / "operator")).channel)

    def caller(self, keys, job="begun"):
        self.callers.append(Caller(self.address, keys, self.world.roster, self.world.jobs[job]))
        return self.callers[-1]

    async def submit(self, *pieces, job="begun"):
        """The outcome of a submission with a file in these pieces."""

        async def frames():
            yield operations_pb2.WeightedJob(signed_job=self.world.signed[job])
            for piece in pieces:
                yield operations_pb2.WeightedJob(weights=piece)

        return await outcome(self.operator.SubmitWeights(frames(), timeout=SECONDS))

    async def submit_alone(self, job):
        request = operations_pb2.SubmitRequest(signed_job=self.world.signed[job])
        return await outcome(self.operator.Submit(request, timeout=SECONDS))

    async def download(self, silo, job="begun", **changes):
        keys = load_keys(self.world.federation.folder / silo / "keys")
        caller = self.caller(keys, job)
        await caller.hello()
        fields = caller.of_round(0, **changes)
        del fields["round"]
        call = caller.stub.Weights(federation_pb2.WeightsRequest(**fields), timeout=SECONDS)
        return await outcome(collected(call))

    async def jobs(self):
        found = await self.operator.List(operations_pb2.ListRequest(), timeout=SECONDS)
        return [job.job for job in found.jobs]


async def collected(call):
    return b"".join([piece.data async for piece in call])


async def outcome(call):
    """What a call returns, or its code and why."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return dict(error.trailing_metadata())[ERROR_METADATA], error.details()


def test_what_an_operator_submits_silos_of_the_job_download(coordinator, world):
    half = len(world.data) // 2

    async def scenario(asking):
        status = await asking.submit(world.data[:half], world.data[half:])
        assert (status.job, coordinator.weights.read_bytes()) == ("begun", world.data)
        # once it is here, no other job with the same file needs it, nor does this one again
        assert (await asking.submit_alone("begun")).job == "begun"
        assert (await asking.submit(job="begun")).job == "begun"
        assert (await asking.submit(b"not read", job="twin")).job == "twin"
        assert await asking.jobs() == ["begun", "twin"]
        assert await asking.download("a") == world.data
        assert await asking.download("b", offset=half) == world.data[half:]
        assert await asking.download("b", offset=len(world.data)) == b""
        code, why = await asking.download("b", offset=len(world.data) + 1)
        assert (code, why) == ("MANIFEST", f"the file ends before byte {len(world.data) + 1}")
        code, why = await asking.download("c")
        assert (code, why) == ("UNKNOWN_JOB", "no job 'begun' for this silo")
        assert (await asking.download("a", session=b"x"))[0] == "SESSION"

    coordinator(scenario)
    # after a restart both are there
    coordinator(still_there)
    assert list((coordinator.folder / "spool").iterdir()) == []


async def still_there(asking):
    assert await asking.jobs() == ["begun", "twin"]
    assert await asking.download("a", "twin") == asking.world.data


def test_a_job_without_its_file_is_not_queued(coordinator, world):
    async def scenario(asking):
        code, why = await asking.submit_alone("begun")
        assert code == "JOB_INVALID"
        assert why.startswith("job 'begun' begins with a file of weights that is not here: submit")
        assert await asking.jobs() == []
        assert (await asking.submit_alone("bare")).job == "bare"
        assert await asking.download("a", "bare") == (
            "MANIFEST", "job 'bare' names no file of weights",
        )  # fmt: skip
        assert await asking.submit(world.data, job="bare") == (
            "JOB_INVALID", "job 'bare' names no file of weights; submit it without one",
        )  # fmt: skip

    coordinator(scenario)


def test_another_file_is_refused_and_leaves_nothing(coordinator, world):
    data = world.data
    wrong = {
        "DIGEST": [(data[:-1] + b"x",), (b"\0" * len(data),)],
        "LENGTH": [(data[:-1],), (data, b"x"), (data + b"x",), (), (b"",)],
    }

    async def scenario(asking):
        for code, submissions in wrong.items():
            for pieces in submissions:
                assert (await asking.submit(*pieces))[0] == code
        assert await asking.jobs() == []
        assert (await asking.submit(data)).job == "begun"

    coordinator(scenario)
    assert [path.name for path in coordinator.weights.parent.iterdir()] == [
        coordinator.weights.name
    ]
    assert list((coordinator.folder / "spool").iterdir()) == []


def test_a_file_that_is_gone_or_spoilt_is_told_and_can_be_sent_again(coordinator, world):
    async def scenario(asking):
        assert (await asking.submit(world.data)).job == "begun"
        other = world.data[:-1] + bytes([world.data[-1] ^ 1])
        for spoilt in (None, b"x", other):
            coordinator.weights.unlink()
            if spoilt is not None:
                coordinator.weights.write_bytes(spoilt)
            assert (await asking.submit(world.data)).job == "begun"
            assert await asking.download("a") == world.data
        coordinator.weights.unlink()
        code, why = await asking.download("a")
        assert (code, why) == (
            "UNKNOWN_JOB",
            "job 'begun': its file of weights is gone; its operator has to submit it again",
        )

    coordinator(scenario)
    told = []
    with log.followed(lambda event, fields: told.append((event, fields))):
        coordinator(sent_again)
    (missing,) = [fields for event, fields in told if event == "weights.missing"]
    assert missing["job"] == "begun"
    assert "submit it with --weights FILE" in missing["why"]


async def sent_again(asking):
    assert await asking.jobs() == ["begun"]
    assert (await asking.submit(asking.world.data)).job == "begun"
    assert await asking.download("a") == asking.world.data


def test_a_job_that_cannot_be_queued_leaves_no_file(coordinator, world):
    async def scenario(asking):
        # known before a byte of the file is read
        found = await asking.submit(b"not read")
        assert found[0] == "STORAGE"
        assert "the coordinator's limits.max_job_bytes is" in found[1]

    coordinator(scenario, limits=JobLimits(max_job_bytes=1000))
    assert not coordinator.weights.parent.exists()


def test_a_refused_job_takes_no_file_from_another(coordinator, world):
    async def scenario(asking):
        assert (await asking.submit(world.data)).job == "begun"
        code, why = await asking.submit(job="both")  # the file has no classifier
        assert code == "JOB_INVALID"
        assert "has no tensor of the job's classifier" in why
        assert await asking.download("a") == world.data

    coordinator(scenario)


def test_a_file_that_does_not_fit_the_model_is_refused(coordinator, world):
    async def scenario(asking):
        code, why = await asking.submit(world.spoilt, job="spoilt")
        assert code == "JOB_INVALID"
        assert "which the job's extractor has" in why
        assert why.startswith(f"weights/{world.jobs['spoilt'].model.weights.name}: lacks ")
        assert await asking.jobs() == []

    coordinator(scenario)
    assert list(coordinator.weights.parent.iterdir()) == []


@pytest.mark.parametrize("first", [b"", b"{}", b"\xff"])
def test_a_stream_that_does_not_begin_with_a_signed_job_is_refused(coordinator, first):
    async def scenario(asking):
        async def frames():
            yield operations_pb2.WeightedJob(signed_job=first)

        async def weights_first():
            yield operations_pb2.WeightedJob(weights=b"data")

        for sent in (frames(), weights_first()):
            found = await outcome(asking.operator.SubmitWeights(sent, timeout=SECONDS))
            assert found[0] in {"JOB_INVALID", "JOB_SIGNATURE"}

    coordinator(scenario)


def test_a_stream_that_breaks_off_leaves_nothing_and_can_be_sent_again(coordinator, world):
    async def scenario(asking):
        half, arrived = len(world.data) // 2, asyncio.Event()

        async def frames():
            yield operations_pb2.WeightedJob(signed_job=world.signed["begun"])
            yield operations_pb2.WeightedJob(weights=world.data[:half])
            arrived.set()
            await asyncio.Event().wait()

        call = asking.operator.SubmitWeights(frames(), timeout=SECONDS)
        await arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        # the guard lets one such call of an operator run at a time
        while isinstance(found := await asking.submit(world.data), tuple):
            assert found[0] == "LIMIT"
        assert found.job == "begun"

    coordinator(scenario)


def test_a_full_disk_refuses_the_file_and_not_the_coordinator(coordinator, world, monkeypatch):
    free = SimpleNamespace(free=0)

    async def scenario(asking):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
        free.free = MARGIN_BYTES + len(world.data) - 1
        code, why = await asking.submit(world.data)
        assert (code, why) == (
            "STORAGE", f"no room for {len(world.data)} bytes of a file of weights; free some disk",
        )  # fmt: skip
        free.free += 1
        assert (await asking.submit(world.data)).job == "begun"

    coordinator(scenario)


def test_a_configured_job_finds_its_file_in_the_folder_of_weights(coordinator, world):
    path = world.federation.folder / "jobs" / "begun.json"
    missing = (
        f"job 'begun' begins with a file of weights that is not here: .*{coordinator.weights.name}"
    )
    with refused(missing):
        coordinator(still_listed, jobs=(path,))
    coordinator.weights.parent.mkdir(parents=True)
    coordinator.weights.write_bytes(world.data)
    coordinator(still_listed, jobs=(path,))


async def still_listed(asking):
    assert await asking.jobs() == ["begun"]
    assert await asking.download("b") == asking.world.data


def test_the_check_before_the_start_says_the_same(world, tmp_path):
    config = tmp_path / "coordinator.toml"
    text = world.federation.coordinator_config.read_text()
    names = world.federation.folder / "jobs" / "begun.json"
    assert "jobs = []" in text
    text = text.replace("jobs = []", f'jobs = ["{names}"]')
    place = world.federation.coordinator_config.parent / config.name
    place.write_text(text)
    found = [f for f in check(place).findings if f.name == "job"]
    assert "begins with a file of weights that is not here" in found[0].text
