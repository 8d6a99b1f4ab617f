"""Anything at all said to the Operations service: an error of ours each time, soon, and operators
work on. Real TLS.
"""

import asyncio
import copy
import json
from itertools import count

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.any_message import PATIENT, SECONDS, ended, messages
from support.coordinator_thread import coordinator, memory_of
from support.raw_silo import Caller
from support.signed_federation import job_document, signed_federation

from staddle.algorithms.job.job import Job
from staddle.coordinator.rpc import limits
from staddle.errors import LocalError
from staddle.files.documents import canonical_json, parse_json
from staddle.proto import operations_pb2 as pb
from staddle.proto.channel import MAX_STREAMS_PER_CONNECTION
from staddle.proto.operations_pb2_grpc import OperationsStub
from staddle.security.identity import roster as rosters
from staddle.security.identity.domains import JOB
from staddle.security.identity.keys import load_keys
from staddle.security.identity.signed_document import sign_document

pytestmark = pytest.mark.actor("operator")

SILOS = ("north", "east", "south")
REQUESTS = {
    "Submit": pb.SubmitRequest,
    "SubmitWeights": pb.WeightedJob,
    "List": pb.ListRequest,
    "Show": pb.JobRequest,
    "Watch": pb.JobRequest,
    "Stop": pb.JobRequest,
    "Resume": pb.JobRequest,
}
UNNAMED = {"List", "Submit", "SubmitWeights"}  # their messages name no job
LARGE = 3_900_000  # bytes, just below what one message may have
PATIENCE = 30  # seconds, for reading so much on a busy machine


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder, document = tmp_path_factory.mktemp("operated"), job_document(SILOS)
    made = signed_federation(folder, SILOS, document, admission_seconds=3600, beat_seconds=60)
    made.operator = load_keys(made.folder / "operator")
    made.signed = lambda document: canonical_json(
        sign_document(document, made.roster, made.operator, JOB)
    )
    assert signed_as_it_stands(made, made.job.document()) == made.signed(made.job.document())
    return made


def signed_as_it_stands(made, document):
    """The same, without the checks that take seconds on a large document."""
    spelt = lambda value: json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    members = rosters.members_digest(made.roster, made.job.silos)
    envelope = {"document": document, "members": members}
    envelope["signer"] = made.operator.entry.id
    return spelt({**envelope, "signature": made.operator.sign(JOB, spelt(envelope)).hex()})


@pytest.fixture(scope="module")
def world(made, tmp_path_factory):
    """A coordinator, an operator and a silo. Nothing may go wrong inside."""
    config = made.config.model_copy(update={"directory": tmp_path_factory.mktemp("state")})
    with coordinator(config) as world:

        async def connect():
            of = made.roster, made.job
            world.operator = Caller(world.address, made.operator, *of)
            world.silo = Caller(world.address, made.keys["north"], *of)
            world.stub = OperationsStub(world.operator.channel)

        async def leave():
            for caller in (world.operator, world.silo):
                await caller.channel.close()

        world.made, world.names = made, count()
        world.run(connect())
        yield world
        world.run(leave())


@pytest.fixture
def honest(world):
    """After the test an operator's day works, silos are served, and nothing was left or broken on
    the way.
    """
    yield

    async def scenario():
        name = f"honest-{next(world.names)}"
        signed = world.made.signed({**world.made.job.document(), "name": name})
        before = await listed(world)
        submitted = await world.stub.Submit(pb.SubmitRequest(signed_job=signed), timeout=SECONDS)
        assert submitted.job == name
        assert await listed(world) == [*before, name]
        request = pb.JobRequest(job=name)
        assert (await world.stub.Stop(request, timeout=SECONDS)).stage == "stopped"
        watching = world.stub.Watch(request, timeout=SECONDS)
        assert (await watching.read()).status.stage == "stopped"
        assert (await world.stub.Resume(request, timeout=SECONDS)).stage in {"queued", "admitting"}
        assert (await watching.read()).status.stage in {"queued", "admitting"}
        watching.cancel()
        await world.silo.hello()
        assert (await world.silo.told("offer")).job in {*before, name}
        await all_calls_over(world)

    world.run(scenario())
    assert world.broken == []


async def listed(world):
    found = await world.stub.List(pb.ListRequest(), timeout=SECONDS)
    return [status.job for status in found.jobs]


async def all_calls_over(world):
    async with asyncio.timeout(SECONDS):
        while world.limits.running:  # noqa: ASYNC110 a plain counter has no event
            await asyncio.sleep(0.01)


async def say(caller, name, *payloads):
    """Raw bytes as the messages of one call; of a Watch, its first report is read."""
    path = f"/staddle.v1.Operations/{name}"
    if name == "Watch":
        call = caller.channel.unary_stream(path)(payloads[0], timeout=SECONDS)
        found = await ended(call.read())
        call.cancel()
        return found
    if len(payloads) == 1:
        call = caller.channel.unary_unary(path)(payloads[0], timeout=PATIENCE)
        return await ended(call, PATIENCE)

    async def all_of_it():
        for payload in payloads:
            yield payload

    return await ended(caller.channel.stream_unary(path)(all_of_it(), timeout=SECONDS))


@settings(max_examples=150, **PATIENT)
@given(name=st.sampled_from(sorted(REQUESTS)), payload=st.binary(max_size=300))
def any_bytes(world, name, payload):
    try:
        REQUESTS[name].FromString(payload)
        refused = {"JOB_INVALID", "JOB_SIGNATURE"}
        known = {"List": {"OK"}, "Submit": refused, "SubmitWeights": refused}
        wanted = known.get(name, {"UNKNOWN_JOB"})
    except Exception:  # noqa: BLE001 whatever protobuf raises for bytes that are no message
        wanted = {"MANIFEST"}
    assert world.run(say(world.operator, name, payload)) in wanted


def test_any_bytes_are_refused(world, honest):
    any_bytes(world)


@settings(max_examples=150, **PATIENT)
@given(data=st.data(), name=st.sampled_from(sorted(REQUESTS)))
def any_message(world, data, name):
    message = data.draw(messages(REQUESTS[name]))
    if name not in UNNAMED and message.job == "@job":
        message.job = world.made.job.name
    found = world.run(say(world.operator, name, message.SerializeToString()))
    known = name == "List" or (name not in UNNAMED and message.job == world.made.job.name)
    assert found == "OK" if known else found in {"UNKNOWN_JOB", "JOB_INVALID", "JOB_SIGNATURE"}


def test_any_message_is_answered_or_refused(world, honest):
    any_message(world)


@pytest.mark.parametrize("name", sorted(set(REQUESTS) - {"Watch"}))
def test_a_call_of_several_messages_is_one_of_its_first_or_refused(world, honest, name):
    wanted = {"UNKNOWN_JOB", "JOB_INVALID"}
    if name == "List":
        wanted = {"OK", "INTERNAL", "UNIMPLEMENTED"}
    for number in (2, 3):
        assert world.run(say(world.operator, name, *[b""] * number)) in wanted


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_calls_that_end_before_their_message_hold_no_place(world, honest, name):
    """gRPC waits for the message until the caller goes.

    More of them than one connection may have streams.
    """

    async def scenario():
        async def nothing():
            for _ in ():
                yield b""

        for _ in range(2):  # all that a connection may have, and again
            method = world.operator.channel.stream_unary(f"/staddle.v1.Operations/{name}")
            times = range(MAX_STREAMS_PER_CONNECTION)
            calls = [method(nothing(), timeout=0.1) for _ in times]
            assert grpc.StatusCode.OK not in await asyncio.gather(*(call.code() for call in calls))

    world.run(scenario())


# Documents.

NUMBERS = [0, 1, 2, 99_999, 100_000, 2**31, 2**53 - 1, 2**53, -1, 10**30, 0.5, 1e308]
NAMES = ["fedper", "fedsimsup", "ppfl", "lenet5", "glm", "global"]
TEXTS = st.text(max_size=12) | st.sampled_from([*NAMES, "\ud800", "0.1", "inf", "1e-999"])


def nested(inner):
    return st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)


SCALARS = st.none() | st.booleans() | st.sampled_from(NUMBERS) | TEXTS
VALUES = st.recursive(SCALARS, nested, max_leaves=8)


def places(value, path=()):
    """All places of a document."""
    yield path
    inner = list(enumerate(value)) if isinstance(value, list) else []
    for key, below in value.items() if isinstance(value, dict) else inner:
        yield from places(below, (*path, key))


def changed(document, path, action, value):
    """A copy with one place replaced, left out, or with a neighbour."""
    if not path:
        return value
    document = copy.deepcopy(document)
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    if action == "replace":
        holder[path[-1]] = value
    elif action == "remove":
        del holder[path[-1]]
    elif isinstance(holder, list):
        holder.insert(path[-1], value)
    else:
        holder[str(value)] = value
    return document


@settings(max_examples=300, **PATIENT)
@given(data=st.data(), signed=st.booleans(), action=st.sampled_from(["replace", "remove", "add"]))
def any_document(world, data, signed, action):
    """A job that is wrong in one place, signed as it stands or signed before.

    Or an envelope that is.
    """
    made, value = world.made, data.draw(VALUES)
    document = made.job.document()
    if signed:
        top = [(key,) for key in document if key != "schema"]
        path = data.draw(st.sampled_from([*top, *places(document)]))
        try:
            payload = made.signed(changed(document, path, action, value))
        except (LocalError, TypeError, ValueError):
            return  # nothing that a signature could be over
    else:
        envelope = parse_json(made.signed(document), "f")
        path = data.draw(st.sampled_from(list(places(envelope))))
        text = json.dumps(changed(envelope, path, action, value))
        payload = text.encode()
    request = pb.SubmitRequest(signed_job=payload).SerializeToString()
    found = world.run(say(world.operator, "Submit", request))
    assert found in {"OK", "JOB_INVALID", "JOB_SIGNATURE"}
    if found == "OK":
        job = Job.from_document(parse_json(payload, "f")["document"], "f", ())
        assert job.digest in [run.job.digest for run in world.daemon.runs]


def test_any_document_is_refused_or_is_the_job_that_it_says(world, honest):
    any_document(world)


def large_documents(made):
    """Documents of almost four megabytes, by what is large in them."""
    document, text = made.job.document(), "x" * LARGE
    yield "bytes", b"\xff" * LARGE
    yield "key twice", b'{"%s": 1, "%s": 1}' % ((b"x" * (LARGE // 2),) * 2)
    yield "nested", b"[" * LARGE
    yield "nested and closed", b'{"document":' + b"[" * 900 + b"]" * 900 + b"}"
    yield "number", b"1" * LARGE
    yield "numbers", b"[" + b"1," * (LARGE // 2) + b"1]"
    yield "unknown keys", json.dumps({f"key-{n}": n for n in range(150_000)}).encode()
    envelope = {"document": {text: 1}, "signer": "s", "members": "r", "signature": "0"}
    yield "envelope", json.dumps(envelope).encode()
    envelope = {"document": {}, "signer": text, "members": "0" * 64, "signature": "0" * 128}
    yield "signer", json.dumps(envelope).encode()
    method, model = document["method"], document["model"]
    wide = {"name": "glm", "classes": 100_000, "input": [4096, 4096, 4096]}
    for what, change in {
        "document": {"name": text},
        "name of a key": {text: 1},
        "method": {"method": {**method, "name": text}},
        "model": {"model": {**model, "name": text}},
        "option": {"method": {**method, "options": {text: 1}}},
        "silos": {"silos": [f"s-{n}" for n in range(300_000)]},
        "ten thousand silos": {"silos": [f"silo-number-{n}" for n in range(10_000)]},
        "rounds": {"rounds": 100_000, "name": "long"},
        "parameters": {"model": {**model, **wide}},
        "schema": {"schema": [[]] * 900_000},
    }.items():
        yield what, signed_as_it_stands(made, {**document, **change})


def test_large_documents_are_refused_with_a_short_reason(world, honest):
    async def scenario():
        for what, payload in large_documents(world.made):
            request = pb.SubmitRequest(signed_job=payload).SerializeToString()
            found = await say(world.operator, "Submit", request)
            assert found in {"JOB_INVALID", "JOB_SIGNATURE"}, (what, found)
        text = pb.JobRequest(job="x" * LARGE).SerializeToString()
        for name in sorted(set(REQUESTS) - UNNAMED):
            assert await say(world.operator, name, text) == "UNKNOWN_JOB"

    world.run(scenario(), 300)


def test_a_message_that_is_too_large_is_refused_by_the_line(world, honest):
    async def scenario():
        made = world.made
        large = Caller(world.address, made.operator, made.roster, made.job, 32_000_000)
        payload = pb.SubmitRequest(signed_job=bytes(5_000_000)).SerializeToString()
        submit = large.channel.unary_unary("/staddle.v1.Operations/Submit")
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
            await submit(payload, timeout=SECONDS)
        await large.channel.close()

    world.run(scenario())


# Who may not.


@pytest.mark.parametrize("name", sorted(REQUESTS))
@pytest.mark.actor("silo")
def test_a_silo_may_not_operate_whatever_it_says(world, honest, name):
    signed = {"signed_job": world.made.signed(world.made.job.document())}
    good = {"Submit": signed, "SubmitWeights": signed, "List": {}}
    payload = REQUESTS[name](**good.get(name, {"job": world.made.job.name})).SerializeToString()
    before = [run.state for run in world.daemon.runs]
    for said in (payload, b"", b"\xff\xff"):
        assert world.run(say(world.silo, name, said)) == "IDENTITY"
    assert [run.state for run in world.daemon.runs] == before


@pytest.mark.parametrize("name", ["Hello", "Poll", "Answer", "Fetch"])
def test_an_operator_may_not_take_part(world, honest, name):
    async def scenario():
        path, channel = f"/staddle.v1.Federation/{name}", world.operator.channel
        if name == "Fetch":
            return await ended(channel.unary_stream(path)(b"", timeout=SECONDS).read())
        return await ended(channel.unary_unary(path)(b"", timeout=SECONDS))

    assert world.run(scenario()) == "IDENTITY"


# Watching.


def test_watching_ends_with_the_watcher_and_only_so_many_watch(world, honest):
    async def scenario():
        request = pb.JobRequest(job=world.made.job.name)
        for _ in range(3):
            calls = [
                world.stub.Watch(request, timeout=SECONDS) for _ in range(limits.OTHERS_AT_ONCE)
            ]
            for call in calls:
                assert (await call.read()).status.job == world.made.job.name
            assert await say(world.operator, "Watch", request.SerializeToString()) == "LIMIT"
            for call in calls:
                call.cancel()
            await all_calls_over(world)

    world.run(scenario())


def test_memory_does_not_grow(world, honest):
    """Refused submissions and watchers that leave, again and again."""
    document = world.made.job.document()
    changes = {"name": "x" * LARGE}, {"silos": [f"s-{n}" for n in range(300_000)]}
    signed = (signed_as_it_stands(world.made, {**document, **change}) for change in changes)
    sent = (b"\xff" * LARGE, b"1" * LARGE, *signed)
    payloads = [pb.SubmitRequest(signed_job=each).SerializeToString() for each in sent]
    request = pb.JobRequest(job=world.made.job.name).SerializeToString()

    async def storm(number):
        for turn in range(number):
            await say(world.operator, "Submit", payloads[turn % len(payloads)])
            await say(world.operator, "Watch", request)
            await say(world.operator, "Show", pb.JobRequest(job="x" * 100_000).SerializeToString())

    world.run(storm(4))
    left, peak = memory_of(world, storm(8), 300)
    assert left < 2_600_000, left  # a payload of one kind that is kept is 7.8 MB
    assert peak < 400_000_000, peak
