"""The session: control messages, deliveries and decisions, as the ledger has them."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from unittest import mock

import pytest
import torch
from support.framed import framed
from support.ledgers import by_person, failing, stored
from support.recording_gate import SESSION, SILO, World, kinds

from staddle.algorithms.exchange.parts import delivered_items
from staddle.errors import LocalError, PeerError, RefusedError
from staddle.proto import federation_pb2 as pb
from staddle.proto import stream
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.wire import tensor_bytes
from staddle.security.blind.plan import JobPlan
from staddle.security.identity import roster as rosters
from staddle.security.ledger.records import JobAccept, JobDecline
from staddle.silo.egress.session import (
    MAX_CONTROL_BYTES,
    MAX_REASON,
    UnreachableError,
)


def test_a_session_is_opened_in_the_ledger_before_the_greeting_leaves(world, monkeypatch):
    assert asyncio.run(world.gate.session.hello()) == 5
    opened = stored(world.path)[-1]
    caps = world.policy.file.control
    assert (opened["type"], opened["max_messages"]) == ("control.open", caps.max_messages)
    assert opened["max_bytes"] == caps.max_bytes
    (greeting,) = world.client.messages
    assert greeting.silo == SILO
    assert greeting.roster_digest.hex() == rosters.digest(world.made.roster)
    failing(monkeypatch, "control.open")
    with pytest.raises(LocalError, match="no more records"):
        asyncio.run(world.gate.session.hello())
    assert len(world.client.messages) == 1


def test_no_control_message_leaves_without_a_session(world):
    for call in (
        world.gate.session.poll(),
        world.gate.session.beat("simple", 1),
        world.gate.session.answer("simple", "00" * 32, 1, "DONE"),
        world.gate.session.fetch(JobPlan(world.job).round(0)),
    ):
        with pytest.raises(UnreachableError, match="no session"):
            asyncio.run(call)
    assert world.client.messages == []


def test_every_control_message_is_counted_and_the_totals_are_written(world):
    async def scenario():
        await world.gate.session.hello()
        await world.gate.session.poll()
        assert await world.gate.session.beat("simple", 1)
        assert not await world.gate.session.beat("simple", 2)
        await world.gate.session.answer("simple", "ab" * 32, 3, "FAILED", "TRAINING")
        await world.gate.session.end()
        await world.gate.session.end()

    asyncio.run(scenario())
    sent = world.client.messages
    names = [f"{name}Request" for name in ("Hello", "Poll", "Beat", "Beat", "Answer")]
    assert [type(m).__name__ for m in sent] == names
    of = {"session": SESSION, "job": "simple", "job_digest": b"\xab" * 32, "round": 3}
    assert sent[4] == pb.AnswerRequest(**of, kind="ANSWER_KIND_FAILED", code=24)
    closed = stored(world.path)[-1]
    assert (closed["type"], closed["messages"]) == ("control.close", 5)
    assert closed["bytes"] == sum(m.ByteSize() for m in sent)
    assert kinds(stored(world.path)).count("control.close") == 1
    assert world.audited().open_control is None


def test_a_greeting_that_is_cancelled_leaves_the_totals_of_the_session_before(world):
    async def scenario():
        loop, busy = asyncio.get_running_loop(), threading.Event()
        with ThreadPoolExecutor(max_workers=1) as only:
            await world.gate.session.hello()
            loop.set_default_executor(only)
            only.submit(busy.wait)
            greeting = asyncio.create_task(world.gate.session.hello())
            await asyncio.sleep(0)
            greeting.cancel()
            await asyncio.wait({greeting})
            busy.set()

    asyncio.run(scenario())
    assert kinds(stored(world.path))[:2] == ["control.open", "control.close"]
    assert stored(world.path)[1]["messages"] == 1


def test_a_new_session_closes_the_one_before(world):
    async def scenario():
        for _ in range(3):
            await world.gate.session.hello()

    asyncio.run(scenario())
    opened = ["control.open", "control.close"]
    assert kinds(stored(world.path)) == [*opened, *opened, "control.open"]
    assert len({r["session"] for r in stored(world.path) if r["type"] == "control.open"}) == 3


def polled(made, folder, caps):
    """Poll until the caps stop it; what left."""
    world = World(made, folder, made.policy(*made.jobs.values(), replace=caps))

    async def scenario():
        await world.gate.session.hello()
        with contextlib.suppress(UnreachableError):
            for _ in range(1000):
                await world.gate.session.poll()
        with pytest.raises(UnreachableError, match="control record is full"):
            await world.gate.session.poll()

    asyncio.run(scenario())
    assert world.audited().ok  # totals within the caps: the rules check it
    return world.client.messages


def test_the_caps_on_messages_and_on_bytes_hold(made, tmp_path):
    sent = polled(made, tmp_path / "few", {"max_messages = 100000": "max_messages = 4"})
    assert len(sent) == 4
    sent = polled(made, tmp_path / "small", {'max_bytes = "16MiB"': "max_bytes = 200"})
    size = sum(m.ByteSize() for m in sent)
    assert size <= 200 < size + sent[-1].ByteSize()


def test_a_control_message_is_small(world):
    async def scenario():
        await world.gate.session.hello()
        await world.gate.session.beat("x" * 900, 1)
        for call in (
            world.gate.session.beat("x" * 1100, 1),
            world.gate.session.answer("x" * 1100, "00" * 32, 1, "DONE"),
        ):
            with pytest.raises(LocalError, match=f"at most {MAX_CONTROL_BYTES}"):
                await call

    asyncio.run(scenario())
    assert len(world.client.messages) == 2
    assert world.gate.session._counts.messages == 2


def test_an_answer_is_of_the_closed_lists(world):
    async def scenario():
        await world.gate.session.hello()
        for kind, code in (("SECRET", "DATA"), ("FAILED", "free text")):
            with pytest.raises(ValueError, match="enum"):
                await world.gate.session.answer("simple", "00" * 32, 1, kind, code)

    asyncio.run(scenario())
    assert len(world.client.messages) == 1


@pytest.mark.parametrize(("seconds", "beat", "hold"), [(0, 1, 0), (7, 7, 7), (10**6, 300, 300)])
def test_what_the_coordinator_asks_for_is_kept_within_bounds(world, seconds, beat, hold):
    asked = {"beat_seconds": seconds, "hold_seconds": seconds}
    world.client.greeting = pb.HelloReply(session=SESSION, **asked)

    async def scenario():
        found = await world.gate.session.hello()
        await world.gate.session.poll()
        return found

    assert asyncio.run(scenario()) == beat
    assert world.client.hold == hold


# Deliveries.
PIECE = 10_000  # bytes of a chunk of a delivery here


def delivery(world, round_=1, values=None, **changes):
    """Frames of a delivery as the coordinator streams them."""
    items = delivered_items(world.job.down(round_))
    rng = torch.Generator().manual_seed(5)
    values = values or [torch.randn(item.spec.shape, generator=rng) for item in items]
    pieces = [tensor_bytes(value) for value in values]
    return framed(world.job, round_, pieces, items, PIECE, **changes), values


def fetched(world, frames, round_=1):
    world.client.delivery = frames

    async def scenario():
        await world.gate.session.hello()
        return (await world.gate.session.fetch(JobPlan(world.job).round(round_))).tensors

    with mock.patch.object(stream, "CHUNK_BYTES", PIECE):
        return asyncio.run(scenario())


def test_a_delivery_that_waits_for_another_is_asked_for_in_the_session_that_is_open_then(world):
    """And counted in it."""
    world.client.delivery = delivery(world)[0]

    async def scenario():
        session = world.gate.session
        await session.hello()
        async with session._fetching:
            second = asyncio.create_task(session.fetch(JobPlan(world.job).round(1)))
            await asyncio.sleep(0)
            world.client.greeting.session = b"another session"
            await session.hello()
        await second
        await session.end()

    with mock.patch.object(stream, "CHUNK_BYTES", PIECE):
        asyncio.run(scenario())
    assert world.client.messages[-1].session == b"another session"
    closed = [each for each in stored(world.path) if each["type"] == "control.close"]
    assert [each["messages"] for each in closed] == [1, 2]


def test_a_delivery_is_taken_and_recorded(world):
    frames, values = delivery(world)
    found = fetched(world, frames)
    for item, value in zip(delivered_items(world.job.down(1)), values, strict=True):
        assert torch.equal(found[item.part][item.spec.name], value)
    ingress, manifest = stored(world.path)[-1], frames[0].manifest
    assert (ingress["type"], ingress["job"]) == ("ingress", "simple")
    assert (ingress["round"], ingress["purpose"]) == (1, "delivery")
    digest = frames[-1].end.sha256.hex()
    assert ingress["message"] == {"bytes": manifest.size, "sha256": digest}
    assert ingress["sender"]["spki"] == world.made.roster.coordinator.spki_sha256
    request = world.client.messages[-1]
    assert (request.job, request.round, request.job_digest.hex()) == ("simple", 1, world.job.digest)
    assert world.audited().ok


def test_an_empty_delivery_leaves_no_record(world):
    empty = tensor.Manifest(job="simple", job_digest=bytes.fromhex(world.job.digest), round=1)
    end = tensor.End(sha256=sha256(b"").digest())
    assert fetched(world, [tensor.Frame(manifest=empty), tensor.Frame(end=end)]) == {}
    assert kinds(stored(world.path)) == ["control.open"]


def check_refused(world, frames, code):
    with pytest.raises(RefusedError) as caught:
        fetched(world, frames)
    assert (caught.value.code, caught.value.peer) == (code, "coordinator")
    assert "ingress" not in kinds(stored(world.path))


@pytest.mark.parametrize(
    "changes",
    [
        {"job": "other"}, {"job_digest": bytes(32)}, {"round": 2}, {"size": 1}, {"offset": 1},
        {"offset": PIECE}, {"tensors": []},
        {"tensors": [tensor.TensorHeader(part="secret", name="x")]},
        {"tensors": [tensor.TensorHeader(part="extractor", name="x")]},
    ],
    ids=lambda v: str(v)[:30],
)  # fmt: skip
def test_a_delivery_of_anything_else_is_refused(world, changes):
    check_refused(world, delivery(world, **changes)[0], "MANIFEST")


def test_a_delivery_that_names_a_part_twice_is_refused(world):
    frames, _ = delivery(world)
    first = frames[0].manifest
    first.tensors.extend(list(first.tensors))
    with pytest.raises(RefusedError, match="undeclared tensor"):
        fetched(world, frames)


@pytest.mark.parametrize(
    ("cut", "code"),
    [
        (lambda frames: frames[:-1], "INTERRUPTED"),
        (lambda frames: frames[:1], "INTERRUPTED"),
        (lambda _: [], "INTERRUPTED"),
        (lambda frames: frames[1:], "MANIFEST"),
        (lambda frames: [*frames[:2], *frames[1:]], "LENGTH"),
        (lambda frames: [frames[0], *frames[2:]], "LENGTH"),
        (lambda frames: [*frames, frames[1]], "MANIFEST"),
        (lambda frames: [frames[0], frames[2], frames[1], *frames[3:]], "DIGEST"),
    ],
)
def test_a_delivery_in_any_other_order_is_refused(world, cut, code):
    check_refused(world, cut(delivery(world)[0]), code)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_delivered_value_that_is_not_finite_is_refused(world, bad):
    _, values = delivery(world)
    values[2].reshape(-1)[0] = bad
    check_refused(world, delivery(world, values=values)[0], "NOT_FINITE")


def test_nothing_is_handed_on_when_the_ingress_cannot_be_recorded(world, monkeypatch):
    failing(monkeypatch, "ingress")
    with pytest.raises(LocalError, match="no more records"):
        fetched(world, delivery(world)[0])


# Decisions, and the end.
OTHER_JOB = {"job": "other", "job_digest": "ab" * 32, "signer": ""}


def test_decisions_are_recorded(world):
    async def scenario():
        about = {"job": "simple", "job_digest": world.job.digest, "signer": "operator"}
        await world.gate.session.record_decision(JobAccept(**about, person=by_person("anna")))
        await world.gate.session.record_decision(JobDecline(**OTHER_JOB, reasons=("no rule",)))

    asyncio.run(scenario())
    accept, decline = stored(world.path)
    assert (accept["type"], accept["job_digest"]) == ("job.accept", world.job.digest)
    assert (accept["signer"], accept["person"]["by"]) == ("operator", "anna")
    assert decline["person"] is None
    assert (decline["type"], decline["job"]) == ("job.decline", "other")
    assert decline["reasons"] == ["no rule"]


def test_a_reason_of_any_length_is_recorded_short(world):
    reasons = ("long" * 400_000, "x" * MAX_REASON, "brief")
    decline = JobDecline(**OTHER_JOB, reasons=reasons)
    asyncio.run(world.gate.session.record_decision(decline))
    (decline,) = stored(world.path)
    assert decline["type"] == "job.decline"
    assert decline["reasons"] == [("long" * 400_000)[:MAX_REASON], "x" * MAX_REASON, "brief"]
    assert world.audited().ok


@pytest.mark.parametrize("size", [0, 64, 65, 3_000_000])
def test_a_session_has_a_short_name(world, size):
    world.client.greeting = pb.HelloReply(session=b"s" * size, beat_seconds=1, hold_seconds=1)
    if size <= 64:
        assert asyncio.run(world.gate.session.hello()) == 1
        return
    with pytest.raises(PeerError, match=f"{size} bytes"):
        asyncio.run(world.gate.session.hello())
    assert world.gate.session.token == b""


def test_closing_writes_the_totals_and_closes_the_channel(world):
    async def scenario():
        await world.gate.session.hello()
        await world.gate.session.close()

    asyncio.run(scenario())
    assert kinds(stored(world.path)) == ["control.open", "control.close"]
    assert world.client.closed


def test_the_channel_is_closed_even_where_the_ledger_fails(world, monkeypatch):
    asyncio.run(world.gate.session.hello())
    failing(monkeypatch, "control.close")
    asyncio.run(world.gate.session.close())
    assert world.client.closed
