"""What the gate lets out is what its ledger says, by a reader that finds what is not so."""

import asyncio
import contextlib
import copy
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.explained import UPLOAD, Call, entries, message_bytes, unexplained
from support.framed import framed
from support.ledgers import write_start
from support.recording_gate import AGENT, RECORDS, World

from staddle.algorithms.exchange.parts import (
    DTYPES,
    WEIGHT,
    Item,
    Kind,
    TensorSpec,
    delivered_items,
)
from staddle.proto import federation_pb2 as pb
from staddle.proto import stream
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.wire import tensor_bytes
from staddle.security.blind.plan import JobPlan
from staddle.security.identity import roster as rosters
from staddle.security.ledger import audit as ledger_audit
from staddle.security.ledger import messages as ledger_view
from staddle.security.ledger.records import (
    ControlClose,
    ControlOpen,
    Intent,
    JobAccept,
    OutcomeRecord,
)
from staddle.security.policy import policy as policies
from staddle.silo.egress import messages as outgoing
from staddle.silo.egress.session import UnreachableError
from staddle.silo.parts.declared import Declared

CHUNK = 16  # bytes


def accepted(job, digest):
    return JobAccept(job=job, job_digest=digest, signer="operator")


POLICY = """
version = 1
[limits]
max_bytes_per_round = "1MiB"
[control]
max_messages = 1000
max_bytes = "1MiB"
[[allow]]
name = "all"
methods = ["drawn"]
parts = ["a", "b", "c"]
kinds = ["whole_model", "backbone", "sketch"]
tensors = ["**"]
dtypes = ["float32", "float64", "int64"]
max_elements = 1000
recipients = ["coordinator"]
readers = ["coordinator"]
"""


@contextlib.contextmanager
def chunks_of(size):
    """Both ends cut payloads into chunks of so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outgoing, "chunks", lambda values: stream.chunks(values, size))
        patch.setattr(stream, "CHUNK_BYTES", size)
        yield


# The gate.
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
KINDS = (Kind.WHOLE_MODEL, Kind.BACKBONE, Kind.SKETCH)


@st.composite
def jobs(draw):
    """What two rounds give: one to three parts of one to three tensors, some with a weight."""

    def items():
        for part, kind in list(zip("abc", KINDS, strict=True))[: draw(st.integers(1, 3))]:
            for number in range(draw(st.integers(1, 3))):
                yield Item(
                    part,
                    kind,
                    TensorSpec(f"t{number}.x", draw(st.sampled_from(sorted(DTYPES))), draw(SHAPES)),
                )
            if draw(st.booleans()):
                yield Item(part, kind, TensorSpec(WEIGHT, "float64", ()))

    phases = ((0, tuple(items())), (1, tuple(items())), (2, ()))
    return Declared("drawn-job", "ab" * 32, "drawn", phases, RECORDS)


# A cut: frames until the line breaks, whole chunks of them that the coordinator keeps, whether the
# process restarts.
CUTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.booleans()), max_size=4)


@settings(max_examples=60)
@given(jobs(), CUTS, CUTS, st.booleans())
def test_the_bytes_in_the_ledger_are_those_that_crossed(made, drawn, first, second, killed):
    with tempfile.TemporaryDirectory() as folder, chunks_of(CHUNK):
        world = World(made, Path(folder), policies.parse(POLICY.encode(), "policy.toml"))
        world.declares = drawn
        write_start(world.ledger, "test", rosters.digest(made.roster), world.policy.digest)
        asyncio.run(world.gate.session.hello())
        asyncio.run(world.gate.session.record_decision(accepted(drawn.job, drawn.digest)))
        for round_, cuts in ((0, first), (1, second)):
            world.client.task = round_task(drawn, round_)
            asyncio.run(world.gate.session.poll())
            give_in_pieces(world, round_, cuts)
        if not killed:
            asyncio.run(world.gate.session.close())
        world.ledger.close()

        assert ledger_audit.verify(world.path).ok
        ledger, calls = entries(world.path), world.client.calls
        assert unexplained(calls, ledger, made.roster) == []
        # Where no frame was lost, the two sums are one; an upload that was cut has more declared
        # than crossed, and counts with what was handed over.
        totals = [t for (job, _), t in ledger_view.summary(world.path).items() if job == drawn.job]
        uploads = [call for call in calls if call.method == UPLOAD]
        intents = [entry.record for entry in ledger if isinstance(entry.record, Intent)]
        assert len(uploads) == len(intents)
        measured = sum(total.bytes for total in totals)
        crossed = sum(message_bytes([call]) for call in uploads)
        assert measured <= sum(i.message.bytes for i in intents)
        assert crossed <= measured + sum(total.assumed for total in totals)
        assert measured == crossed or any(call.cut for call in uploads)
        for call, intent in zip(uploads, intents, strict=True):
            size = message_bytes([call])
            assert size <= intent.message.bytes if call.cut else size == intent.message.bytes
        cut = [i.message.bytes for call, i in zip(uploads, intents, strict=True) if call.cut]
        assert sum(total.assumed for total in totals) <= sum(cut)


def round_task(drawn, round_):
    return pb.Task(
        round=pb.Round(job=drawn.job, job_digest=bytes.fromhex(drawn.digest), round=round_)
    )


def give_in_pieces(world, round_, cuts):
    """Give a round through these cuts, then whole; Standing may bring a lost receipt."""
    client, size = world.client, sum(item.spec.nbytes for item in world.items(round_))
    for frames, kept, restart in cuts:
        client.stop_after = frames
        try:
            world.contribute(world.payload(round_), round_)
        except UnreachableError:
            pass
        else:
            break
        finally:
            client.stop_after = None
        offset = client.frames[0].manifest.offset if client.frames else 0
        came = offset + sum(len(frame.chunk) for frame in client.frames)
        over = bool(client.frames) and client.frames[-1].WhichOneof("body") == "end"
        reply = pb.StandingReply(
            received=size if came == size else min(came // CHUNK, kept) * CHUNK
        )
        if over and kept % 2:
            reply = pb.StandingReply(receipt=world.receipt(client))
        client.standing_reply = lambda _, reply=reply: reply
        if restart:
            world.restart()
        else:
            asyncio.run(world.gate.session.hello())
        world.settle()
        if reply.HasField("receipt"):
            break
    else:
        world.contribute(world.payload(round_), round_)


# The reader. Each doctored recording has one thing in it that no record explains, or lacks one that
# the ledger names.
@pytest.fixture(scope="module")
def recorded(made, tmp_path_factory):
    """Calls and ledger of a round delivered, given, cut, given again, and all else that is sent."""
    with chunks_of(4096):
        return record(World(made, tmp_path_factory.mktemp("recorded")))


def record(world):
    job, client = world.job, world.client
    write_start(world.ledger, "test", rosters.digest(world.made.roster), world.policy.digest)
    client.task = round_task(world.declared, 1)
    items = delivered_items(job.down(1))
    values = [torch.rand(i.spec.shape, generator=torch.Generator().manual_seed(1)) for i in items]
    client.delivery = delivery(job, items, values)

    async def before():
        await world.gate.session.hello()
        await world.gate.session.record_decision(accepted(job.name, job.digest))
        await world.gate.session.answer(job.name, job.digest, 0, "ACCEPT")
        await world.gate.session.poll()
        await world.gate.session.fetch(JobPlan(job).round(1))
        await world.gate.session.beat(job.name, 1)

    asyncio.run(before())
    client.stop_after = 4
    with pytest.raises(UnreachableError):
        world.contribute(round_=1)
    client.stop_after = None
    client.standing_reply = lambda _: pb.StandingReply(received=2 * 4096)
    asyncio.run(world.gate.session.hello())
    world.settle()
    world.contribute(round_=1)
    asyncio.run(world.gate.session.close())
    world.ledger.close()
    return client.calls, entries(world.path)


def delivery(job, items, values):
    return framed(job, 1, [tensor_bytes(value) for value in values], items, 4096)


def test_an_honest_recording_is_explained(made, recorded):
    calls, ledger = recorded
    assert unexplained(calls, ledger, made.roster) == []
    assert {call.method.rpartition("/")[2] for call in calls} == {
        "Hello", "Answer", "Poll", "Fetch", "Beat", "Upload", "Standing"
    }  # fmt: skip


def of(calls, method, number=0):
    return [call for call in calls if call.method.endswith(f"/{method}")][number]


def frame(call, number, change):
    """Change one frame of an upload."""
    found = tensor.Frame.FromString(call.sent[number])
    change(found)
    call.sent[number] = found.SerializeToString()


def extra(call, number=0, data=b"\xfa\x01\x06secret"):  # field 31, six bytes
    call.sent[number] += data


def greeting(calls, **fields):
    """Change fields of the greeting."""
    call = of(calls, "Hello")
    found = pb.HelloRequest.FromString(call.sent[0])
    found.MergeFrom(pb.HelloRequest(**fields))
    call.sent[0] = found.SerializeToString()


def nested(call):
    """An unknown field inside the manifest's first tensor."""
    found = tensor.Frame.FromString(call.sent[0])
    found.manifest.tensors[0].MergeFromString(b"\xfa\x01\x06secret")
    call.sent[0] = found.SerializeToString()


def chunk(data):
    return tensor.Frame(chunk=data).SerializeToString()


def spoiled(data):
    return data[:-1] + bytes([data[-1] ^ 1])


DOCTORED = {
    "an extra chunk": (lambda c: of(c, "Upload", 1).sent.insert(-1, chunk(b"secret")),
        "message bytes crossed"),
    "a chunk behind the end": (lambda c: of(c, "Upload", 1).sent.append(chunk(b"secret")),
        "no manifest, chunks and"),
    "an extra chunk before the cut": (lambda c: of(c, "Upload").sent.append(chunk(bytes(2**20))),
        "message bytes crossed, intent"),
    "a chunk that is missing": (lambda c: of(c, "Upload", 1).sent.pop(1), "message bytes crossed"),
    "another chunk of the same size": (
        lambda c: of(c, "Upload", 1).sent.__setitem__(2, spoiled(of(c, "Upload", 1).sent[2])),
        "are not those of digest",
    ),
    "another chunk before the cut": (
        lambda c: of(c, "Upload").sent.__setitem__(1, spoiled(of(c, "Upload").sent[1])),
        "are not those of digest",
    ),
    "a second end": (lambda c: of(c, "Upload", 1).sent.append(of(c, "Upload", 1).sent[-1]),
        "no manifest, chunks"),
    "an unknown field in a greeting": (lambda c: extra(of(c, "Hello")),
        "HelloRequest has unknown fields [31]"),
    "a text for a version": (lambda c: greeting(c, software="staddle secret"),
        "field software is 'staddle secret', which nothing explains"),
    "a number for a clock": (lambda c: greeting(c, clock=0x7365637265740A),
        "field clock is"),
    "an unknown field in a poll": (lambda c: extra(of(c, "Poll")),
        "PollRequest has unknown fields [31]"),
    "an unknown field in a manifest": (lambda c: extra(of(c, "Upload")),
        "Frame has unknown fields [31]"),
    "an unknown field in a tensor's header": (lambda c: nested(of(c, "Upload")),
        "Frame has unknown fields [31]"),
    "an unknown field in a chunk": (lambda c: extra(of(c, "Upload"), 1),
        "Frame has unknown fields [31]"),
    "an unknown field that comes down": (
        lambda c: of(c, "Poll").received.__setitem__(
            0, of(c, "Poll").received[0] + b"\xfa\x01\x01s"
        ),
        "came down: Task has unknown fields",
    ),
    "a field that is written twice": (
        lambda c: of(c, "Poll").sent.__setitem__(0, b"\n\x06secret" + of(c, "Poll").sent[0]),
        "with more than its fields",
    ),
    "a number in more bytes than it needs": (
        lambda c: of(c, "Beat").sent.__setitem__(0, of(c, "Beat").sent[0][:-1] + b"\x81\x00"),
        "with more than its fields",
    ),
    "bytes that are not a message": (lambda c: of(c, "Beat").sent.__setitem__(0, b"\xff\xff"),
        "are no BeatRequest"),
    "a second message in a call": (lambda c: of(c, "Poll").sent.append(of(c, "Poll").sent[0]),
        "2 messages in a call that has one"),
    "a call that is not counted": (lambda c: c.insert(3, copy.deepcopy(of(c, "Poll"))),
        "the ledger closes it with"),
    "a call of another method": (
        lambda c: c.insert(2, Call("/other.Service/Tell", AGENT, [b"secret"])),
        "a method that is not of this protocol, 6 bytes",
    ),
    "an upload that no intent declares": (lambda c: c.append(copy.deepcopy(of(c, "Upload", 1))),
        "no intent declares"),
    "an upload that never crossed": (lambda c: c.remove(of(c, "Upload", 1)),
        "no upload of it crossed"),
    "metadata of a request": (
        lambda c: setattr(of(c, "Beat"), "metadata", (*AGENT, ("x-secret", "secret"))),
        "metadata x-secret='secret'",
    ),
    "binary metadata": (
        lambda c: setattr(of(c, "Upload"), "metadata", (*AGENT, ("x-bin", b"\x00"))),
        "metadata x-bin=",
    ),
    "a user agent of one's own": (
        lambda c: setattr(of(c, "Beat"), "metadata", (("user-agent", f"secret {AGENT[0][1]}"),)),
        "metadata user-agent='secret",
    ),
    "metadata of a response": (
        lambda c: setattr(of(c, "Fetch"), "answered", (("x-told", "secret"),)),
        "came down: metadata x-told",
    ),
    "a code that is none": (
        lambda c: setattr(of(c, "Fetch"), "answered", (("staddle-error", "SECRET"),)),
        "came down: metadata staddle-error='SECRET'",
    ),
    "a manifest of another round": (
        lambda c: frame(of(c, "Upload"), 0, lambda f: setattr(f.manifest, "round", 2)),
        "no intent declares",
    ),
    "a manifest with another size": (
        lambda c: frame(of(c, "Upload"), 0, lambda f: setattr(f.manifest, "size", 7)),
        "its intent another size",
    ),
    "a manifest with another name": (
        lambda c: frame(
            of(c, "Upload"), 0, lambda f: setattr(f.manifest.tensors[0], "name", "secret")
        ),
        "tensors are not the intent's: [('extractor', 'backbone', 'secret'",
    ),
    "a manifest with a tensor more": (
        lambda c: frame(
            of(c, "Upload"), 0, lambda f: f.manifest.tensors.add(part="secret", size=0)
        ),
        "tensors are not the intent's: [('secret'",
    ),
    "a manifest with another session": (
        lambda c: frame(of(c, "Upload"), 0, lambda f: setattr(f.manifest, "session", b"secret")),
        "names another session",
    ),
    "an end with another place": (
        lambda c: frame(of(c, "Upload", 1), -1, lambda f: setattr(f.end, "ledger_seq", 3)),
        "END says place 3",
    ),
    "an end with another leaf": (
        lambda c: frame(of(c, "Upload", 1), -1, lambda f: setattr(f.end, "ledger_leaf", bytes(32))),
        "where no digest of intent",
    ),
    "an end with another digest": (
        lambda c: frame(of(c, "Upload", 1), -1, lambda f: f.end.tensor_sha256.append(b"secret")),
        "END has other digests than record",
    ),
    "a session that is a message": (
        lambda c: of(c, "Poll").sent.__setitem__(
            0, pb.PollRequest(session=b"secret").SerializeToString()
        ),
        "field session is b'secret'",
    ),
    "a round that nobody asked for": (
        lambda c: of(c, "Beat").sent.__setitem__(0, beat(c, round=4711).SerializeToString()),
        "field round is 4711",
    ),
    "a job that nobody offered": (
        lambda c: of(c, "Beat").sent.__setitem__(0, beat(c, job="secret").SerializeToString()),
        "field job is 'secret'",
    ),
    "a receipt that never came": (lambda c: of(c, "Upload", 1).received.clear(),
        "has a receipt that never came down"),
    "a delivery that never came": (lambda c: of(c, "Fetch").received.clear(),
        "is of a delivery that never came down"),
    "a delivery of other numbers": (
        lambda c: of(c, "Fetch").received.__setitem__(1, spoiled(of(c, "Fetch").received[1])),
        "is of a delivery that never came down",
    ),
    "a delivery that is not recorded": (lambda c: c.insert(5, copy.deepcopy(of(c, "Fetch"))),
        "1 deliveries came down without a record"),
}  # fmt: skip


def beat(calls, **changes):
    found = pb.BeatRequest.FromString(of(calls, "Beat").sent[0])
    for name, value in changes.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(("doctor", "said"), DOCTORED.values(), ids=DOCTORED)
def test_what_no_record_explains_is_found(made, recorded, doctor, said):
    calls, ledger = copy.deepcopy(recorded[0]), recorded[1]
    doctor(calls)
    found = unexplained(calls, ledger, made.roster)
    assert [why for why in found if said in why], found


def test_a_ledger_that_says_less_or_other_is_found(made, recorded):
    calls, ledger = recorded
    for at, entry in enumerate(ledger):
        if isinstance(entry.record, OutcomeRecord) or entry is ledger[-1]:
            continue  # how an intent ended; and the last session may have ended by a kill
        assert unexplained(calls, [*ledger[:at], *ledger[at + 1 :]], made.roster), entry.record


def test_a_session_that_a_kill_left_open_is_held_to_its_cap(made, recorded):
    calls, ledger = recorded
    last = next(e for e in reversed(ledger) if isinstance(e.record, ControlOpen))
    killed = [
        e for e in ledger if not (isinstance(e.record, ControlClose) and e.record.ref == last.seq)
    ]
    assert unexplained(calls, killed, made.roster) == []
    capped = replace(last, record=last.record.model_copy(update={"max_messages": 1}))
    (found,) = unexplained(calls, [capped if e is last else e for e in killed], made.roster)
    assert "over its cap" in found
