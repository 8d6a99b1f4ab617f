"""Anything at all as messages and streams: an error of ours each time, soon, and honest rounds go
on. Real TLS.
"""

import asyncio
import contextlib
from hashlib import sha256
from types import SimpleNamespace

import grpc
import pytest
from federation.proxy import Proxy
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.any_message import PATIENT, SECONDS, ended, messages
from support.coordinator_thread import coordinator, memory_of
from support.raw_silo import Caller, frames_of, refused
from support.signed_federation import job_document, raw_silos, signed_federation

from staddle.algorithms.exchange.parts import delivered_items
from staddle.commands.federation import local_federation
from staddle.coordinator.rpc import uploads
from staddle.errors import PeerError
from staddle.proto import federation_pb2 as pb
from staddle.proto import secure_pb2 as secure
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.frames import decode
from staddle.proto.wire import to_wire
from staddle.security.blind.plan import JobPlan
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.policy import policy as policies
from staddle.silo.egress.gate import Gate
from staddle.silo.egress.witness import HEADS, Witness

pytestmark = pytest.mark.actor("silo")

SILOS = ("north", "east", "south")
REQUESTS = {
    "Hello": pb.HelloRequest,
    "Poll": pb.PollRequest,
    "Beat": pb.BeatRequest,
    "Answer": pb.AnswerRequest,
    "Standing": pb.StandingRequest,
    "Fetch": pb.FetchRequest,
    "Weights": pb.WeightsRequest,
    "Upload": tensor.Frame,
    "Contribute": secure.Contributed,
    "GroupKey": secure.KeyPoll,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    document = job_document(SILOS, rounds=500, round_timeout=600, min_cohort=2)
    return signed_federation(tmp_path_factory.mktemp("fuzzed"), SILOS, document, beat_seconds=60)


@pytest.fixture(scope="module")
def world(made, tmp_path_factory):
    """A coordinator in a thread of its own; ``north`` is hostile, the others are not.

    Nothing may go wrong inside.
    """
    folder = tmp_path_factory.mktemp("state")
    with coordinator(made.config.model_copy(update={"directory": folder})) as world:
        stack = contextlib.AsyncExitStack()

        async def begin():
            callers = await stack.enter_async_context(raw_silos(world.address, made))
            world.callers = {caller.silo: caller for caller in callers}

        world.made, world.job, world.round, world.folder = made, made.job, 0, folder
        world.run(begin())
        world.north = world.callers["north"]
        yield world
        world.run(stack.aclose())


@pytest.fixture
def honest(world):
    """After the test an honest round works, and nothing was left or broken on the way."""
    yield

    async def scenario():
        round_ = world.daemon.runs[0].state.round
        for silo in ("east", "south"):
            await world.callers[silo].contribute(round_)
        await world.north.hello()
        with contextlib.suppress(grpc.aio.AioRpcError):  # it may have spoilt this round for itself
            await world.north.contribute(round_, wary=True)
        assert (await world.callers["east"].told("round")).round == round_ + 1

    world.run(scenario())
    assert world.broken == []
    assert not list((world.folder / "spool").iterdir())


async def say(caller, name, *payloads):
    """Raw bytes as the messages of one call."""
    path = f"/staddle.v1.Federation/{name}"
    if name == "Upload":

        async def all_of_it():
            for payload in payloads:
                yield payload

        return await ended(caller.channel.stream_unary(path)(all_of_it(), timeout=SECONDS))
    if name in {"Fetch", "Weights"}:

        async def read():
            async for _ in caller.channel.unary_stream(path)(payloads[0], timeout=SECONDS):
                pass

        return await ended(read())
    return await ended(caller.channel.unary_unary(path)(payloads[0], timeout=SECONDS))


# What may be said.

WHOLE = -1  # stands for the payload's size


def true_values(caller, message):
    """The message with the true session, job, digest and name where the magic words stand."""
    known = {"@session": caller.session, "@job": caller.job.name}
    known |= {"@digest": caller.digest, "@silo": caller.silo}
    for descriptor, value in message.ListFields():
        values = value if descriptor.is_repeated else [value]
        if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in values:
                true_values(caller, inner)
        elif not descriptor.is_repeated:
            word = value.decode(errors="replace") if isinstance(value, bytes) else value
            if isinstance(known.get(word), type(value)):
                setattr(message, descriptor.name, known[word])
    return message


def step():
    """One frame of a stream: of an honest one, of one with a changed place, or any at all."""
    numbers = st.sampled_from([0, 1, 7, 1024 * 1024, 2**31, 2**53, 2**64 - 1])
    numbers |= st.integers(0, 2**64 - 1)
    offsets = numbers | st.just(WHOLE)
    fields = {"offset": offsets, "size": numbers, "round": st.integers(0, 3)}
    changes = st.fixed_dictionaries({}, optional=fields)
    return st.one_of(
        st.tuples(st.just("manifest"), changes | st.just({})),
        st.tuples(st.just("chunk"), st.integers(0, 3) | st.integers(0, 2 * 1024 * 1024)),
        st.tuples(st.sampled_from(["chunk", "end"]), st.none()),
        st.tuples(st.just("any"), messages(tensor.Frame)),
    )


def frame_of(caller, honest_frames, kind, change):
    if kind == "any":
        return true_values(caller, change)
    frame = tensor.Frame()
    frame.CopyFrom(honest_frames[{"manifest": 0, "chunk": 1, "end": -1}[kind]])
    if kind == "manifest":
        for name, value in change.items():
            setattr(frame.manifest, name, frame.manifest.size if value == WHOLE else value)
    elif kind == "chunk" and change is not None:
        frame.chunk = bytes(change)
    return frame


# The coordinator.


@settings(max_examples=120, **PATIENT)
@given(
    name=st.sampled_from(sorted(REQUESTS)),
    payloads=st.lists(st.binary(max_size=300), min_size=1, max_size=4),
)
def any_bytes(world, name, payloads):
    payloads = payloads if name == "Upload" else payloads[:1]
    try:
        for payload in payloads:
            REQUESTS[name].FromString(payload)
        readable = True
    except Exception:  # noqa: BLE001 whatever protobuf raises for bytes that are no message
        readable = False
    found = world.run(say(world.north, name, *payloads))
    assert found != "OK"
    assert (
        readable or found == "MANIFEST" or (name == "Upload" and found in {"INTERNAL", "SESSION"})
    ), found


def test_any_bytes_are_refused(world, honest):
    any_bytes(world)


@settings(max_examples=250, **PATIENT)
@given(data=st.data(), name=st.sampled_from(sorted(set(REQUESTS) - {"Upload"})))
def any_message(world, data, name):
    message = true_values(world.north, data.draw(messages(REQUESTS[name])))
    if name == "Poll" and message.session == world.north.session:
        return  # it would only wait
    world.run(say(world.north, name, message.SerializeToString()))


def test_any_message_is_answered_or_refused(world, honest):
    any_message(world)


@settings(max_examples=200, **PATIENT)
@given(steps=st.lists(step(), max_size=5))
def any_stream(world, steps):
    async def scenario():
        north, round_ = world.north, world.daemon.runs[0].state.round
        good = frames_of(north, round_)
        frames = [frame_of(north, good, *one) for one in steps]
        sent, whole = ([frame.SerializeToString() for frame in each] for each in (frames, good))
        found = await say(north, "Upload", *sent)
        assert found != "OK" or sent == whole
        assert len(list((world.folder / "spool").iterdir())) <= 1

    world.run(scenario())


def test_any_stream_is_refused(world, honest):
    any_stream(world)


def test_memory_does_not_grow(world, honest):
    """Streams that end in every way, again and again."""

    async def storm(number):
        north = world.north
        for count in range(number):
            good = frames_of(north, world.daemon.runs[0].state.round)
            big = tensor.Frame(end=tensor.End(ledger_leaf=bytes(1_000_000)))
            streams = [], good[:1], good[:2], good[1:], [good[0], big]
            streams = (*streams, [tensor.Frame()] * 3, [big] * 3)
            sent = [frame.SerializeToString() for frame in streams[count % len(streams)]]
            await say(north, "Upload", *sent)
            await say(north, "Hello", pb.HelloRequest(silo="x" * 100_000).SerializeToString())

    world.run(storm(20))
    left, peak = memory_of(world, storm(150))
    assert left < 4_000_000, left
    assert peak < 64_000_000, peak


# Slow ones.


def test_who_sends_nothing_more_is_ended_and_frees_its_place(world, honest, monkeypatch):
    async def scenario():
        await world.north.hello()
        round_ = world.daemon.runs[0].state.round
        for number in (0, 1, 2):  # nothing at all, the manifest, all but the end
            monkeypatch.setattr(uploads, "transfer_seconds", lambda _: 0.4)
            call = world.north.stub.Upload(timeout=SECONDS)
            for frame in frames_of(world.north, round_)[:number]:
                await call.write(frame)
            await refused(call, "LIMIT", "longer than its size allows")
            assert not list((world.folder / "spool").iterdir())
            monkeypatch.undo()
        await world.north.contribute(round_)

    world.run(scenario())


def test_a_line_of_a_few_bytes_a_second_is_ended_and_frees_its_place(world, honest, monkeypatch):
    async def scenario():
        round_ = world.daemon.runs[0].state.round
        async with Proxy(world.address) as line:
            slow = Caller(line.address, world.made.keys["north"], world.made.roster, world.job)
            await slow.hello()
            line.rate = 1000.0
            monkeypatch.setattr(uploads, "transfer_seconds", lambda _: 1.0)
            giving = asyncio.create_task(slow.contribute(round_))
            with pytest.raises(grpc.aio.AioRpcError):
                await asyncio.wait_for(giving, SECONDS)
            monkeypatch.undo()
            await world.north.hello()
            await world.north.contribute(round_)
            await slow.channel.close()

    world.run(scenario())


# The silo.


def delivery(job):
    """Frames of a delivery of zeros."""
    items = delivered_items(job.down(1))
    pieces = [bytes(item.spec.nbytes) for item in items]
    tensors = [sha256(piece).digest() for piece in pieces]
    fields = {"job": job.name, "job_digest": bytes.fromhex(job.digest), "round": 1}
    fields |= {"size": sum(map(len, pieces)), "tensors": to_wire(items)}
    manifest = tensor.Manifest(**fields)
    end = tensor.End(sha256=sha256(b"".join(tensors)).digest(), tensor_sha256=tensors)
    chunk = tensor.Frame(chunk=b"".join(pieces))
    return [tensor.Frame(manifest=manifest), chunk, tensor.Frame(end=end)]


class Deliverer:
    """A client whose coordinator delivers whatever it is told to."""

    def __init__(self):
        self.frames = []

    async def hello(self, request):
        return pb.HelloReply(protocol=2, session=b"s", beat_seconds=5, hold_seconds=5)

    async def fetch(self, request, largest):
        for frame in self.frames:
            yield decode(frame.SerializeToString())

    async def close(self):
        pass


@pytest.fixture(scope="module")
def gate(made, tmp_path_factory):
    policy = policies.parse(local_federation.policy_text([made.job]).encode(), "policy.toml")
    folder, keys = tmp_path_factory.mktemp("north"), made.keys["north"]
    with Ledger.open(folder / "ledger", "north", made.roster.federation, keys.log) as ledger:
        client, witness = Deliverer(), Witness(ledger, made.roster, keys, folder / HEADS)
        found = Gate(client, ledger, policy, made.roster, witness)
        with asyncio.Runner() as runner:
            runner.run(found.session.hello())
            yield SimpleNamespace(gate=found, client=client, run=runner.run)
            runner.run(found.session.close())


@example(steps=[("manifest", {"offset": WHOLE}), ("chunk", None)])
@example(steps=[("manifest", {}), ("chunk", None), ("end", None)])
@settings(max_examples=600, **PATIENT)
@given(steps=st.lists(step(), max_size=5))
def any_delivery(made, gate, steps):
    digest = bytes.fromhex(made.job.digest)
    caller = SimpleNamespace(session=b"", job=made.job, digest=digest, silo="north")
    good = delivery(made.job)
    gate.client.frames = [frame_of(caller, good, *one) for one in steps]
    with contextlib.nullcontext() if gate.client.frames == good else pytest.raises(PeerError):
        gate.run(gate.gate.session.fetch(JobPlan(made.job).round(1)))


@pytest.mark.actor("coordinator")
def test_any_delivery_is_refused_by_the_silo(made, gate):
    any_delivery(made, gate)
