"""What the coordinator refuses, over real TLS on loopback, and that the other silos go on."""

import asyncio
import socket
import ssl
import struct
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.raw_silo import SECONDS, Caller, code_of, frames_of, refused

from staddle.algorithms.exchange.parts import upload_items
from staddle.commands.federation import local_federation
from staddle.coordinator import config as configs
from staddle.coordinator.server import running
from staddle.proto import federation_pb2 as pb
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.federation_pb2_grpc import FederationStub
from staddle.proto.stream import Digester
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys

SILOS = ("north", "east", "south")


class Setup:
    def __init__(self, folder):
        self.federation = local_federation.make(folder, SILOS)
        self.folder = folder
        self.roster = rosters.load(folder / "roster.json")

    def keys(self, member):
        return load_keys(self.folder / member / "keys")


@pytest.fixture
def setup(tmp_path, document):
    made = Setup(tmp_path / "federation")
    made.job = local_federation.sign_job(made.federation, document("refuse", SILOS, rounds=2))
    timing = {"admission_seconds": 20, "beat_seconds": 1, "hold_seconds": 1}
    local_federation.write_coordinator(made.federation, ["refuse"], timing)
    return made


@asynccontextmanager
async def serving(setup):
    async with running(configs.load(setup.federation.coordinator_config)) as address:
        yield address


@asynccontextmanager
async def in_round_zero(setup):
    """Three silos that have accepted the job; the round is open."""
    async with serving(setup) as address:
        callers = [Caller(address, setup.keys(silo), setup.roster, setup.job) for silo in SILOS]
        for caller in callers:
            await caller.accept()
        yield callers
        for caller in callers:
            await caller.channel.close()


# Who may speak.


def handshake(address, roster, version, certificate=None):
    """A bare TLS handshake of one version; raises ssl.SSLError or OSError where it is refused."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cadata=roster.coordinator.certificate)
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    if certificate is not None:
        context.load_cert_chain(*certificate)
    with (
        socket.create_connection((host, int(port)), timeout=SECONDS) as plain,
        context.wrap_socket(plain, server_hostname="coordinator.staddle") as wrapped,
    ):
        wrapped.settimeout(SECONDS)
        wrapped.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        # TLS 1.3 tells a client about its certificate only after the handshake
        if not wrapped.recv(1):
            raise ConnectionResetError("closed by the coordinator")
        return wrapped.version()


def test_tls_1_2_is_refused_and_1_3_is_not(setup):
    pair = (setup.folder / "north/keys/tls.crt", setup.folder / "north/keys/tls.key")

    async def scenario():
        async with serving(setup) as address:
            talk = lambda version: asyncio.to_thread(  # noqa: E731
                handshake, address, setup.roster, version, pair
            )
            assert await talk(ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
            with pytest.raises((ssl.SSLError, OSError)):
                await talk(ssl.TLSVersion.TLSv1_2)

    asyncio.run(scenario())


def test_no_certificate_is_refused(setup):
    async def scenario():
        async with serving(setup) as address:
            with pytest.raises((ssl.SSLError, OSError)):
                await asyncio.to_thread(handshake, address, setup.roster, ssl.TLSVersion.TLSv1_3)

    asyncio.run(scenario())


def test_unknown_silo_is_refused(setup, tmp_path):
    create_keys(tmp_path / "stranger", "north", Role.SILO, "a stranger with a member's name")

    async def scenario():
        async with serving(setup) as address:
            caller = Caller(address, load_keys(tmp_path / "stranger"), setup.roster, setup.job)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await caller.hello()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await caller.channel.close()

    asyncio.run(scenario())


def test_another_members_certificate_is_refused(setup):
    async def scenario():
        async with serving(setup) as address:
            caller = Caller(address, setup.keys("north"), setup.roster, setup.job)
            await refused(
                caller.hello(silo="east"),
                "IDENTITY",
                grpc.StatusCode.PERMISSION_DENIED,
                "'east'",
                "'north'",
            )
            await caller.channel.close()

    asyncio.run(scenario())


def test_coordinator_and_founder_may_not_act_as_silos(setup):
    async def scenario():
        async with serving(setup) as address:
            caller = Caller(address, setup.keys("coordinator"), setup.roster, setup.job)
            await refused(
                caller.hello(), "IDENTITY", grpc.StatusCode.PERMISSION_DENIED, "role coordinator"
            )
            await caller.channel.close()

    asyncio.run(scenario())


def test_wrong_protocol_version_is_refused_politely(setup):
    async def scenario():
        async with serving(setup) as address:
            caller = Caller(address, setup.keys("north"), setup.roster, setup.job)
            call = caller.hello(protocol_min=2, protocol_max=3)
            status = grpc.StatusCode.FAILED_PRECONDITION
            await refused(
                call, "PROTOCOL_VERSION", status, "protocol 2 to 3", "install the same release"
            )
            # a newer silo that still speaks ours
            await caller.hello(protocol_min=1, protocol_max=9)
            await caller.channel.close()

    asyncio.run(scenario())


def test_another_roster_is_refused(setup):
    async def scenario():
        async with serving(setup) as address:
            caller = Caller(address, setup.keys("north"), setup.roster, setup.job)
            call = caller.hello(roster_digest=bytes(32))
            await refused(
                call,
                "ROSTER",
                grpc.StatusCode.FAILED_PRECONDITION,
                "roster; this coordinator has version",
            )
            await caller.channel.close()

    asyncio.run(scenario())


def test_a_session_is_needed_and_is_ones_own(setup):
    async def scenario():
        async with in_round_zero(setup) as (north, east, _):
            for session in (b"", bytes(16), east.session):
                call = north.stub.Poll(pb.PollRequest(session=session), timeout=SECONDS)
                await refused(call, "SESSION", grpc.StatusCode.UNAUTHENTICATED, "say hello again")

    asyncio.run(scenario())


def test_health_service_answers_members(setup):
    async def scenario():
        async with serving(setup) as address:
            caller = Caller(address, setup.keys("north"), setup.roster, setup.job)
            reply = await health_pb2_grpc.HealthStub(caller.channel).Check(
                health_pb2.HealthCheckRequest()
            )
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            watching = health_pb2_grpc.HealthStub(caller.channel).Watch(
                health_pb2.HealthCheckRequest()
            )
            assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
            watching.cancel()
            await caller.channel.close()

    asyncio.run(scenario())


def test_reflection_is_off(setup):
    async def scenario():
        async with serving(setup) as address:
            caller = Caller(address, setup.keys("north"), setup.roster, setup.job)
            call = caller.channel.stream_stream(
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call(iter([b""]), timeout=SECONDS):
                    pass
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            await caller.channel.close()

    asyncio.run(scenario())


def test_compressed_requests_are_refused(setup):
    async def scenario():
        async with serving(setup) as address:
            keys = setup.keys("north")
            credentials = grpc.ssl_channel_credentials(
                setup.roster.coordinator.certificate.encode(),
                keys.tls_key,
                keys.entry.certificate.encode(),
            )
            name = ("grpc.ssl_target_name_override", "coordinator.staddle")
            async with grpc.aio.secure_channel(address, credentials, options=[name]) as channel:
                request = pb.HelloRequest(silo="north" * 500, protocol_min=1, protocol_max=1)
                call = FederationStub(channel).Hello(
                    request, compression=grpc.Compression.Gzip, timeout=SECONDS
                )
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(scenario())


# What may be uploaded. Each bad upload: (name, change, code, status, words of the error).


def change_header(**fields):
    def change(frames):
        header = frames[0].manifest.tensors[0]
        for name, value in fields.items():
            if name == "shape":
                del header.shape[:]
                header.shape.extend(value)
            else:
                setattr(header, name, value)
        return frames

    return change


def undeclared(frames):
    extra = tensor.TensorHeader(
        part="model", kind="PART_KIND_WHOLE_MODEL", name="smuggled", dtype="DTYPE_FLOAT32"
    )
    extra.shape.append(1)
    extra.size = 4
    frames[0].manifest.tensors.append(extra)
    frames[0].manifest.size += 4
    return frames


def missing(frames):
    del frames[0].manifest.tensors[-1]
    return frames


def too_long(frames):
    return [*frames[:-1], tensor.Frame(chunk=b"x"), frames[-1]]


def too_short(frames):
    frames[1].chunk = frames[1].chunk[:-1]
    return frames


def rows_of_a_delivery(frames):
    frames[0].manifest.rows.add(part="model")
    return frames


def sums_of_a_delivery(frames):
    frames[0].manifest.sums.add(part="model")
    return frames


def prekeys_of_a_delivery(frames):
    frames[0].manifest.prekeys.add(part="model")
    return frames


def no_bytes(frames):
    return [frames[0], frames[2]]


def negative_weight(frames):
    headers = frames[0].manifest.tensors
    at = 0
    for header in headers:
        if header.name == "@weight":
            break
        at += header.size
    payload = bytearray(frames[1].chunk)
    payload[at : at + 8] = struct.pack("<d", -199.9999)
    return [
        frames[0],
        tensor.Frame(chunk=bytes(payload)),
        tensor.Frame(end=end_of(frames, payload)),
    ]


def end_of(frames, payload):
    digester = Digester([header.size for header in frames[0].manifest.tensors])
    digester.update(bytes(payload))
    digests = digester.digests()
    end = tensor.End()
    end.CopyFrom(frames[-1].end)
    end.sha256, end.tensor_sha256[:] = digests.total, digests.tensors
    return end


def other_bytes(frames):
    frames[1].chunk = b"\x01" + frames[1].chunk[1:]
    return frames


def no_end(frames):
    return frames[:-1]


def chunk_first(frames):
    return frames[1:]


INVALID = grpc.StatusCode.INVALID_ARGUMENT
BAD_UPLOADS = [
    ("undeclared tensor", undeclared, "MANIFEST", INVALID, "smuggled"),
    ("missing tensor", missing, "MANIFEST", INVALID, "tested"),
    ("shape", change_header(shape=[8, 1, 3, 4]), "MANIFEST", INVALID, "[8, 1, 3, 4]"),
    ("dtype", change_header(dtype="DTYPE_FLOAT64"), "MANIFEST", INVALID, "FLOAT64"),
    ("kind", change_header(kind="PART_KIND_PROTOTYPES"), "MANIFEST", INVALID, "PROTOTYPES"),
    ("name", change_header(name="extractor.conv9.weight"), "MANIFEST", INVALID, "conv9"),
    ("oversize", change_header(size=1 << 62), "MANIFEST", INVALID, str(1 << 62)),
    ("too long", too_long, "LENGTH", INVALID, "0 were left"),
    ("too short", too_short, "LENGTH", INVALID, "are due"),
    (
        "rows",
        rows_of_a_delivery,
        "MANIFEST",
        INVALID,
        "brings 1 rows, 0 sums, 0 prekeys and 0 proofs, which only",
    ),
    (
        "sums",
        sums_of_a_delivery,
        "MANIFEST",
        INVALID,
        "brings 0 rows, 1 sums, 0 prekeys and 0 proofs, which only",
    ),
    (
        "prekeys",
        prekeys_of_a_delivery,
        "MANIFEST",
        INVALID,
        "brings 0 rows, 0 sums, 1 prekeys and 0 proofs, which only",
    ),
    ("no bytes", no_bytes, "LENGTH", INVALID, "bytes before its manifest"),
    ("negative weight", negative_weight, "WEIGHT", INVALID, "@weight"),
    ("digest", other_bytes, "DIGEST", grpc.StatusCode.DATA_LOSS, "other digests"),
    ("no end", no_end, "INTERRUPTED", grpc.StatusCode.ABORTED, "before its end"),
    ("chunk first", chunk_first, "MANIFEST", INVALID, "not a manifest"),
]


@pytest.mark.parametrize(
    ("change", "code", "status", "word"),
    [b[1:] for b in BAD_UPLOADS],
    ids=[b[0] for b in BAD_UPLOADS],
)
def test_bad_uploads_are_refused_and_the_others_go_on(setup, change, code, status, word):
    async def scenario():
        async with in_round_zero(setup) as (north, east, south):
            await refused(north.upload(change(frames_of(north)), wary=True), code, status, word)
            for silo in (east, south):
                receipt = await silo.upload(frames_of(silo))
                assert len(receipt.signature) == 64
            # no fault in what it gave so far: north may try again
            if change in (chunk_first, no_end):
                await north.upload(frames_of(north))
            task = await east.poll()
            assert (task.WhichOneof("body"), task.round.round) == ("round", 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(setup, value):
    async def scenario():
        async with in_round_zero(setup) as (north, east, south):
            frames = frames_of(north)
            items = upload_items(setup.job.up(0))
            payload = bytearray(frames[1].chunk)
            payload[4:8] = struct.pack("<f", value)
            frames[1].chunk = bytes(payload)
            frames[2].end.CopyFrom(end_of(frames, payload))
            await refused(
                north.upload(frames, wary=True), "NOT_FINITE", INVALID, items[0].spec.name
            )
            for silo in (east, south):
                await silo.upload(frames_of(silo))
            assert (await south.poll()).round.round == 1

    asyncio.run(scenario())


def test_a_chunk_over_one_mebibyte_is_refused(setup):
    async def scenario():
        async with in_round_zero(setup) as (north, _, _):
            frames = frames_of(north)
            frames[1].chunk = bytes(3 * 1024 * 1024)
            await refused(north.upload(frames, wary=True), "LENGTH", INVALID, "3145728 bytes")

    asyncio.run(scenario())


def test_a_message_over_the_limit_is_refused(setup):
    async def scenario():
        async with serving(setup) as address:
            caller = Caller(
                address, setup.keys("north"), setup.roster, setup.job, limit=64 * 1024 * 1024
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await caller.hello(silo="n" * 5 * 1024 * 1024)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await caller.channel.close()

    asyncio.run(scenario())


def test_a_round_takes_one_upload_a_silo_and_none_when_closed(setup):
    closed = ("ROUND_CLOSED", grpc.StatusCode.FAILED_PRECONDITION, "does not await")

    async def scenario():
        async with in_round_zero(setup) as (north, east, south):
            await refused(north.upload(frames_of(north, round_=1), wary=True), *closed)
            await north.upload(frames_of(north))
            await refused(north.upload(frames_of(north), wary=True), *closed)
            await east.upload(frames_of(east))
            await south.answer("FAILED", 0, pb.ERROR_CODE_TRAINING)
            assert (await north.poll()).round.round == 1
            await refused(south.upload(frames_of(south), wary=True), *closed)

    asyncio.run(scenario())


def test_another_jobs_digest_is_refused(setup):
    async def scenario():
        async with in_round_zero(setup) as (north, _, _):
            frames = frames_of(north)
            frames[0].manifest.job_digest = bytes(32)
            await refused(
                north.upload(frames, wary=True), "UNKNOWN_JOB", grpc.StatusCode.NOT_FOUND, "digest"
            )

    asyncio.run(scenario())


def test_a_silo_that_breaks_off_may_come_back(setup):
    async def scenario():
        async with in_round_zero(setup) as (north, east, south):
            call = north.stub.Upload(timeout=SECONDS)
            for frame in frames_of(north)[:1]:
                await call.write(frame)
            call.cancel()
            for silo in (east, south):
                await silo.upload(frames_of(silo))
            for _ in range(100):  # until the coordinator has noticed the end of the first stream
                try:
                    await north.upload(frames_of(north), wary=True)
                    break
                except grpc.aio.AioRpcError as error:
                    assert code_of(error) == "LIMIT"  # noqa: PT017
            assert (await north.poll()).round.round == 1

    asyncio.run(scenario())


def test_the_signed_job_crosses_unchanged(setup):
    async def scenario():
        async with serving(setup) as address:
            caller = Caller(address, setup.keys("north"), setup.roster, setup.job)
            await caller.hello()
            offer = (await caller.poll()).offer
            assert offer.signed_job == (setup.folder / "jobs/refuse.json").read_bytes()
            await caller.channel.close()

    asyncio.run(scenario())
