"""What the coordinator refuses, over real TLS on loopback, and that the other silos go on."""

import asyncio
import socket
import ssl
import struct
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.raw_silo import SECONDS, Caller, code_of, frames_of, refused
from support.signed_federation import job_document, raw_silos, signed_federation

from staddle.algorithms.exchange.parts import upload_items
from staddle.coordinator.server import running
from staddle.proto import federation_pb2 as pb
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.stream import Digester
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.silo.egress.session import TurnedAwayError, open_client

SILOS = ("north", "east", "south")
UPLOADS, PIECES = 20, 64


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    document = job_document(SILOS, name="refuse", rounds=2)
    return signed_federation(tmp_path_factory.mktemp("signed"), SILOS, document)


@pytest.fixture
def setup(signed, tmp_path):
    """The one federation, with a coordinator that has no state yet."""
    config = signed.config.model_copy(update={"directory": tmp_path / "state"})
    return SimpleNamespace(**{**vars(signed), "config": config})


@asynccontextmanager
async def in_round_zero(setup):
    """Three silos that have accepted the job; the round is open."""
    async with running(setup.config) as address, raw_silos(address, setup) as callers:
        yield callers


@pytest.fixture
def knocking(setup):
    """A silo at the coordinator's door, with the keys of a member, or others."""

    @asynccontextmanager
    async def begin(keys=None, **options):
        async with running(setup.config) as address:
            caller = Caller(
                address, keys or setup.keys["north"], setup.roster, setup.job, **options
            )
            yield caller
            await caller.channel.close()

    return begin


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


async def test_tls_1_2_is_refused_and_1_3_is_not(setup):
    pair = (setup.folder / "north/keys/tls.crt", setup.folder / "north/keys/tls.key")
    async with running(setup.config) as address:
        talk = lambda version: asyncio.to_thread(handshake, address, setup.roster, version, pair)
        assert await talk(ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
        with pytest.raises((ssl.SSLError, OSError)):
            await talk(ssl.TLSVersion.TLSv1_2)


async def test_no_certificate_is_refused(setup):
    async with running(setup.config) as address:
        with pytest.raises((ssl.SSLError, OSError)):
            await asyncio.to_thread(handshake, address, setup.roster, ssl.TLSVersion.TLSv1_3)


@asynccontextmanager
async def ended_with(code):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code() is code


async def test_unknown_silo_is_refused(knocking, tmp_path):
    create_keys(tmp_path / "stranger", "north", Role.SILO, "a stranger with a member's name")
    async with (
        knocking(load_keys(tmp_path / "stranger")) as caller,
        ended_with(grpc.StatusCode.UNAVAILABLE),
    ):
        await caller.hello()


GREETINGS = {
    "another member": ({"silo": "east"}, ("IDENTITY", "'east'", "'north'")),
    "another protocol": (
        {"protocol_min": 3, "protocol_max": 4},
        ("PROTOCOL_VERSION", "protocol 3 to 4", "install the same release"),
    ),
}


@pytest.mark.parametrize(("fields", "refusal"), GREETINGS.values(), ids=GREETINGS)
async def test_a_greeting_of_another_is_refused_politely(knocking, fields, refusal):
    async with knocking() as caller:
        await refused(caller.hello(**fields), *refusal)
        # a newer silo that still speaks ours
        await caller.hello(protocol_min=1, protocol_max=9)


async def test_who_holds_another_roster_gets_this_one_and_no_session(knocking, setup):
    async with knocking() as caller:
        reply = await caller.hello(roster_digest=bytes(32))
        assert reply == pb.HelloReply(roster=rosters.encoded(setup.roster))
        await refused(caller.poll(), "SESSION", "say hello again")


async def test_the_coordinator_may_not_act_as_a_silo(knocking, setup):
    async with knocking(load_keys(setup.folder / "coordinator" / "keys")) as caller:
        await refused(caller.hello(), "IDENTITY", "role coordinator")


async def test_a_session_is_needed_and_is_ones_own(setup):
    async with in_round_zero(setup) as (north, east, _):
        for session in (b"", bytes(16), east.session):
            call = north.stub.Poll(pb.PollRequest(session=session), timeout=SECONDS)
            await refused(call, "SESSION", "say hello again")


async def test_health_service_answers_members(knocking):
    async with knocking() as caller:
        health = health_pb2_grpc.HealthStub(caller.channel)
        reply = await health.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        watching = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        watching.cancel()


async def test_reflection_is_off(knocking):
    name = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    async with knocking() as caller, ended_with(grpc.StatusCode.UNIMPLEMENTED):
        async for _ in caller.channel.stream_stream(name)(iter([b""]), timeout=SECONDS):
            pass


async def test_compressed_requests_are_refused(knocking):
    async with knocking() as caller, ended_with(grpc.StatusCode.UNIMPLEMENTED):
        request = pb.HelloRequest(silo="north" * 500, protocol_min=2, protocol_max=2)
        await caller.stub.Hello(request, compression=grpc.Compression.Gzip, timeout=SECONDS)


# What may be uploaded. Each bad upload: name: (change, code, words of the error).


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


def of_a_delivery(kind):
    def change(frames):
        getattr(frames[0].manifest, kind).add(part="model")
        return frames

    return change


def no_bytes(frames):
    return [frames[0], frames[2]]


def negative_weight(frames):
    at = 0
    for header in frames[0].manifest.tensors:
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


BROUGHT = "brings {} rows, {} sums, {} prekeys and 0 proofs, which only"
BAD_UPLOADS = {
    "undeclared tensor": (undeclared, "MANIFEST", "smuggled"),
    "missing tensor": (missing, "MANIFEST", "tested"),
    "shape": (change_header(shape=[8, 1, 3, 4]), "MANIFEST", "[8, 1, 3, 4]"),
    "dtype": (change_header(dtype="DTYPE_FLOAT64"), "MANIFEST", "FLOAT64"),
    "kind": (change_header(kind="PART_KIND_PROTOTYPES"), "MANIFEST", "PROTOTYPES"),
    "name": (change_header(name="extractor.conv9.weight"), "MANIFEST", "conv9"),
    "oversize": (change_header(size=1 << 62), "MANIFEST", str(1 << 62)),
    "too long": (too_long, "LENGTH", "0 were left"),
    "too short": (too_short, "LENGTH", "are due"),
    "rows": (of_a_delivery("rows"), "MANIFEST", BROUGHT.format(1, 0, 0)),
    "sums": (of_a_delivery("sums"), "MANIFEST", BROUGHT.format(0, 1, 0)),
    "prekeys": (of_a_delivery("prekeys"), "MANIFEST", BROUGHT.format(0, 0, 1)),
    "no bytes": (no_bytes, "LENGTH", "bytes before its manifest"),
    "negative weight": (negative_weight, "WEIGHT", "@weight"),
    "digest": (other_bytes, "DIGEST", "other digests"),
    "no end": (no_end, "INTERRUPTED", "before its end"),
    "chunk first": (chunk_first, "MANIFEST", "not a manifest"),
}


@pytest.mark.parametrize(("change", "code", "word"), BAD_UPLOADS.values(), ids=BAD_UPLOADS)
async def test_bad_uploads_are_refused_and_the_others_go_on(setup, change, code, word):
    async with in_round_zero(setup) as (north, east, south):
        await refused(north.upload(change(frames_of(north)), wary=True), code, word)
        for silo in (east, south):
            receipt = await silo.upload(frames_of(silo))
            assert len(receipt.signature) == 64
        # no fault in what it gave so far: north may try again
        if change in (chunk_first, no_end):
            await north.upload(frames_of(north))
        task = await east.poll()
        assert (task.WhichOneof("body"), task.round.round) == ("round", 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_values_that_are_not_finite_are_refused(setup, value):
    async with in_round_zero(setup) as (north, east, south):
        frames = frames_of(north)
        items = upload_items(setup.job.up(0))
        payload = bytearray(frames[1].chunk)
        payload[4:8] = struct.pack("<f", value)
        frames[1].chunk = bytes(payload)
        frames[2].end.CopyFrom(end_of(frames, payload))
        await refused(north.upload(frames, wary=True), "NOT_FINITE", items[0].spec.name)
        for silo in (east, south):
            await silo.upload(frames_of(silo))
        assert (await south.poll()).round.round == 1


async def test_a_chunk_over_one_mebibyte_is_refused(setup):
    async with in_round_zero(setup) as (north, _, _):
        frames = frames_of(north)
        frames[1].chunk = bytes(3 * 1024 * 1024)
        await refused(north.upload(frames, wary=True), "LENGTH", "3145728 bytes")


async def test_a_message_over_the_limit_is_refused(knocking):
    async with (
        knocking(limit=64 * 1024 * 1024) as caller,
        ended_with(grpc.StatusCode.RESOURCE_EXHAUSTED),
    ):
        await caller.hello(silo="n" * 5 * 1024 * 1024)


async def test_a_round_takes_one_upload_a_silo_and_none_when_closed(setup):
    closed = ("ROUND_CLOSED", "does not await")
    async with in_round_zero(setup) as (north, east, south):
        await refused(north.upload(frames_of(north, round_=1), wary=True), *closed)
        await north.upload(frames_of(north))
        await refused(north.upload(frames_of(north), wary=True), *closed)
        await east.upload(frames_of(east))
        await south.answer("FAILED", 0, pb.ERROR_CODE_TRAINING)
        assert (await north.poll()).round.round == 1
        await refused(south.upload(frames_of(south), wary=True), *closed)


async def test_a_silo_that_still_writes_hears_that_it_is_refused(setup):
    """Before: for nearly all such uploads it took the connection for lost."""
    async with running(setup.config) as address, raw_silos(address, setup) as (north, _, _):
        client = open_client(address, setup.keys["north"], setup.roster)
        manifest, chunk, end = frames_of(north, round_=1)
        payload = bytes(chunk.chunk)
        step = len(payload) // PIECES

        async def frames():
            yield manifest
            for at in range(0, len(payload), step):
                yield tensor.Frame(chunk=payload[at : at + step])
            yield end

        for _ in range(UPLOADS):
            with pytest.raises(TurnedAwayError, match="does not await") as caught:
                await client.upload(frames(), len(payload))
            assert caught.value.code == "ROUND_CLOSED"
        await client.close()


async def test_another_jobs_digest_is_refused(setup):
    async with in_round_zero(setup) as (north, _, _):
        frames = frames_of(north)
        frames[0].manifest.job_digest = bytes(32)
        await refused(north.upload(frames, wary=True), "UNKNOWN_JOB", "digest")


async def test_a_silo_that_breaks_off_may_come_back(setup):
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


async def test_the_signed_job_crosses_unchanged(knocking, setup):
    async with knocking() as caller:
        await caller.hello()
        offer = (await caller.poll()).offer
        assert offer.signed_job == (setup.folder / "jobs/refuse.json").read_bytes()
