"""A coordinator with the right keys and bad intentions, over real TLS, against the agent as it
ships.
"""

import asyncio
import functools
import json
from hashlib import sha256
from types import SimpleNamespace

import grpc
import pytest
from support.hostile_coordinator import (
    GARBAGE,
    SILO,
    Hostile,
    attacked,
    delivery,
    finish,
    make_world,
    offer,
    play,
    records,
    round_of,
)
from support.signed_federation import job_document

from staddle.algorithms.exchange.parts import upload_items
from staddle.algorithms.methods.fedavg import FedAvg
from staddle.proto import federation_pb2 as pb
from staddle.proto import stream
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.channel import CHUNK_BYTES, ERROR_METADATA
from staddle.security.identity import roster as rosters
from staddle.silo import agent as agents
from staddle.silo import plain_rounds
from staddle.silo.egress import client as clients
from staddle.silo.egress import messages

pytestmark = [pytest.mark.actor("coordinator"), pytest.mark.usefixtures("hurried")]

SILOS = (SILO, "east", "south")
PAUSE_SECONDS = agents.PAUSE_SECONDS


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Keys, a roster, two signed jobs of two rounds, and what the silo has."""
    documents = (job_document(SILOS, name=name, rounds=2) for name in ("first", "second"))
    world = make_world(tmp_path_factory.mktemp("attacked"), SILOS, *documents)
    world.size = sum(item.spec.nbytes for item in upload_items(world.jobs["first"].up(0)))
    return world


def signer_of(world, length):
    return json.dumps({**json.loads(world.signed["first"]), "signer": "x" * length}).encode()


def deep(world, levels):
    return b'{"document":' + b"[" * levels + b"]" * levels + b',"signer":"operator"}'


BAD_TASKS = {
    "digest of five bytes": lambda w: [offer(w, job_digest=b"12345", signed_job=b"{}")],
    "signed job, digest of five bytes": lambda w: [offer(w, job_digest=b"12345")],
    "no digest": lambda w: [offer(w, job_digest=b"")],
    "long name": lambda w: [offer(w, job="x" * 2000, signed_job=b"{}")],
    "name with control characters": lambda w: [offer(w, job="a\n\x1b[2Jb", signed_job=b"{}")],
    "name of a path": lambda w: [offer(w, job="../../etc"), round_of(w, 0, job="../../etc")],
    "unsigned": lambda w: [offer(w, signed_job=data) for data in (b"{}", b"", b"\xff\x00")],
    "signer of 3 MB": lambda w: [offer(w, signed_job=signer_of(w, 3_000_000))],
    "deep document": lambda w: [
        offer(w, signed_job=deep(w, levels)) for levels in (90, 600, 100_000)
    ],
    "round, long name": lambda w: [round_of(w, 0, job="x" * 2000)],
    "round, digest of five bytes": lambda w: [round_of(w, 0, job_digest=b"12345")],
    "round of a job that was not offered": lambda w: [round_of(w, 0, "second")],
    "finish, long name": lambda w: [
        finish(w, 0, job="x" * 2000, completed=done) for done in (False, True)
    ],
    "finish of a job that was not offered": lambda w: [
        finish(w, 2, "second", completed=d) for d in (False, True)
    ],
    "no task": lambda _: [pb.Task()],
}


@pytest.mark.parametrize("tasks", BAD_TASKS.values(), ids=BAD_TASKS)
def test_a_bad_task_gets_nothing_and_the_next_good_one_is_done(world, tmp_path, tasks):
    script = [*tasks(world), offer(world), *tasks(world), round_of(world, 0)]
    hostile = play(Hostile(world, script), tmp_path)
    assert [upload[:2] for upload in hostile.uploads] == [("first", 0)]
    accepted = [answer for answer in hostile.answers if answer[0] == "ACCEPT"]
    assert accepted == [("ACCEPT", 0, "UNSPECIFIED")]
    assert not list(tmp_path.glob("jobs/x*"))
    assert {path.name for path in (tmp_path / "jobs").iterdir()} == {"first"}


@pytest.mark.parametrize("number", [2, 3, 2**32 - 1])
def test_a_round_that_the_job_does_not_have_is_refused(world, tmp_path, number):
    script = [offer(world), round_of(world, number), round_of(world, 0)]
    hostile = play(Hostile(world, script), tmp_path)
    assert ("FAILED", number, "DELIVERY") in hostile.answers
    assert [upload[1] for upload in hostile.uploads] == [0]


COHORTS = {
    "stranger": [SILO, "mallory"],
    "twice": [SILO, "east", "east"],
    "without us": SILOS[1:],
    "none": [],
}


@pytest.mark.parametrize("cohort", COHORTS.values(), ids=COHORTS)
def test_a_round_with_a_cohort_that_cannot_be_is_refused_and_nothing_leaves(
    world, tmp_path, cohort
):
    asked = [round_of(world, 0, cohort=silos) for silos in (cohort, SILOS[::-1])]
    script = [offer(world), *asked]
    hostile = play(Hostile(world, script), tmp_path)
    failed = [answer for answer in hostile.answers if answer[0] == "FAILED"]
    assert failed == [("FAILED", 0, "DELIVERY")]
    assert [upload[:2] for upload in hostile.uploads] == [("first", 0)]
    intents = records(tmp_path, "egress.intent")
    assert [intent["cohort"] for intent in intents] == [sorted(SILOS)]


def test_the_end_of_a_round_that_the_job_does_not_have_is_refused(world, tmp_path):
    ends = [finish(world, number) for number in (3, 2**32 - 1)]
    script = [offer(world), *ends, round_of(world, 0)]
    hostile = play(Hostile(world, script), tmp_path)
    done = [answer for answer in hostile.answers if answer[0] == "DONE"]
    assert done == [("DONE", number, "DELIVERY") for number in (3, 2**32 - 1)]
    assert len(hostile.uploads) == 1


# Replays: what a round gives is given once.


def rounds(world, *numbers):
    return [round_of(world, number) for number in numbers]


def test_a_replayed_round_gives_nothing_new(world, tmp_path):
    """Each fetch brings other numbers, so a round that were trained again would give another
    payload.
    """
    script = [offer(world), *rounds(world, 0, 0, 1, 0, 1, 0, 1)]
    script += [finish(world, 2), *rounds(world, 0, 1), offer(world), *rounds(world, 1)]
    hostile = play(Hostile(world, script), tmp_path)
    assert [upload[1] for upload in hostile.uploads] == [0, 0, 1, 1, 1]
    assert len({upload[2] for upload in hostile.uploads}) == 2
    refused = [answer for answer in hostile.answers if answer[0] == "FAILED"]
    assert refused == [("FAILED", number, "DELIVERY") for number in (0, 0, 0, 1, 1)]
    assert ("DECLINE", 0, "JOB_INVALID") in hostile.answers
    report = json.loads((tmp_path / "jobs/first/report.json").read_text())
    assert {entry["round"] for entry in report["rounds"]} == {0, 1}


def test_a_replay_after_a_restart_gives_nothing_new(world, tmp_path):
    first = play(Hostile(world, [offer(world), *rounds(world, 0, 1)]), tmp_path)
    script = [*rounds(world, 1, 0), offer(world), *rounds(world, 0, 1)]
    again = play(Hostile(world, script), tmp_path)
    assert [upload[1] for upload in again.uploads] == [1, 1]
    assert {upload[2] for upload in again.uploads} == {first.uploads[1][2]}
    assert ("DECLINE", 0, "JOB_INVALID") in again.answers


NOTHING = (
    'version = 1\n\n[limits]\nmax_bytes_per_round = "64MiB"\n\n[control]\nmax_messages ='
    ' 1000\nmax_bytes = "1MiB"\n'
)


@pytest.mark.parametrize("code", ["POLICY", "DATA", "JOB_SIGNATURE"])
def test_a_restarted_silo_declines_a_job(world, tmp_path, code):
    """A job that a restarted silo would not accept uploads nothing, and the code says why."""
    first = play(Hostile(world, [offer(world), round_of(world, 0)]), tmp_path)
    assert [upload[1] for upload in first.uploads] == [0]
    gone = world.config.data.model_copy(update={"file": tmp_path / "gone.npz"})
    changes = {
        "POLICY": {},
        "DATA": {"config": world.config.model_copy(update={"data": gone})},
        "JOB_SIGNATURE": {"roster": rosters.remove(world.roster, "east")},
    }
    changed = SimpleNamespace(**(vars(world) | changes[code]))
    script = [round_of(world, 1), round_of(world, 0), finish(world, 2)]
    again = play(Hostile(changed, script), tmp_path, policy=NOTHING if code == "POLICY" else None)
    assert again.uploads == []
    assert again.arrived == 0
    assert again.answers == [("FAILED", 1, code), ("FAILED", 0, code), ("DONE", 2, code)]
    last = play(Hostile(world, [round_of(world, 1)]), tmp_path)  # nothing was lost meanwhile
    assert [upload[1] for upload in last.uploads] == [1]


def test_the_end_told_first_closes_the_job(world, tmp_path):
    script = [offer(world), finish(world, 2), *rounds(world, 0, 1)]
    hostile = play(Hostile(world, script), tmp_path)
    assert hostile.uploads == []
    lost = [("FAILED", number, "DELIVERY") for number in (0, 1)]
    assert hostile.answers[1:] == [("DONE", 2, "UNSPECIFIED"), *lost]


@pytest.mark.parametrize("counted", [2, 5, 2**32 - 1])
def test_a_count_of_rounds_that_never_were_trains_nothing(world, tmp_path, counted):
    script = [offer(world), round_of(world, 0), round_of(world, 1, counted=counted)]
    script += [finish(world, 2, counted=counted), round_of(world, 1, counted=1)]
    hostile = play(Hostile(world, script), tmp_path)
    assert [upload[1] for upload in hostile.uploads] == [0, 1]
    assert ("FAILED", 1, "TRAINING") in hostile.answers
    assert ("DONE", 2, "DELIVERY") in hostile.answers


def test_a_round_that_is_taken_back_is_neither_trained_nor_given_again(world, tmp_path):
    """The coordinator says that nothing counted: the next round begins from the start, what was
    given stays given.
    """
    hostile = play(Hostile(world, [offer(world), *rounds(world, 0, 0, 1, 0)]), tmp_path)
    assert [upload[1] for upload in hostile.uploads] == [0, 0, 1]
    assert hostile.uploads[0] == hostile.uploads[1]


# What goes wrong on our own side.


@pytest.mark.parametrize("where", ["task_loss", "contribute", "deliver"])
@pytest.mark.control
def test_a_method_that_fails_loses_the_round_and_not_the_agent(world, tmp_path, monkeypatch, where):
    def broken(*_, **__):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, where, broken)
        hostile = play(Hostile(world, [offer(world), round_of(world, 0)]), tmp_path)
    assert hostile.answers == [("ACCEPT", 0, "UNSPECIFIED"), ("FAILED", 0, "TRAINING")]
    assert hostile.uploads == []
    again = play(Hostile(world, [round_of(world, 0)]), tmp_path)
    assert [upload[1] for upload in again.uploads] == [0]


# Replies that are no messages.


@pytest.mark.parametrize(
    "reply", [GARBAGE, pb.HelloReply(session=b"s" * 3_000_000), pb.HelloReply(session=b"s" * 65)]
)
def test_a_greeting_that_is_none_is_tried_again(world, tmp_path, reply):
    hostile = Hostile(world, [offer(world), round_of(world, 0)], hello=[reply] * 3)
    play(hostile, tmp_path)
    assert hostile.calls["hello"] == 4
    assert len(hostile.uploads) == 1


def test_a_poll_that_is_answered_with_no_message_is_tried_again(world, tmp_path):
    script = [GARBAGE, offer(world), GARBAGE, GARBAGE, round_of(world, 0)]
    hostile = play(Hostile(world, script), tmp_path)
    assert hostile.calls["hello"] == 4
    assert len(hostile.uploads) == 1


def test_frames_that_are_no_messages_are_no_delivery(world, tmp_path):
    script = [offer(world), *[round_of(world, 0)] * 4]
    begun = lambda: [delivery(world, "first", 0)[0], GARBAGE]
    hostile = play(Hostile(world, script, fetch=[lambda: [GARBAGE], begun]), tmp_path)
    assert [upload[1] for upload in hostile.uploads] == [0, 0]


async def garbage_receipt(hostile, frames, context):
    await hostile.taken(frames)
    return GARBAGE


async def forged(hostile, frames, context):
    await hostile.taken(frames)
    return pb.Receipt(signature=b"x" * 64)


async def signed_by_another(hostile, frames, context):
    manifest, _, end = await hostile.taken(frames)
    return hostile.receipt(manifest, end, keys=hostile.world.silo_keys)


async def for_another_round(hostile, frames, context):
    manifest, _, end = await hostile.taken(frames)
    return hostile.receipt(manifest, end, round=1)


@pytest.mark.parametrize("lie", [garbage_receipt, forged, signed_by_another, for_another_round])
def test_a_receipt_that_does_not_hold_is_none(world, tmp_path, lie):
    hostile = Hostile(world, [offer(world), *[round_of(world, 0)] * 3], upload=[lie] * 2)
    play(hostile, tmp_path)
    outcomes = [record["status"] for record in records(tmp_path, "egress.outcome")]
    assert outcomes == ["unknown", "unknown", "sent"]
    assert len(hostile.uploads) == 1


# Uploads that the coordinator ends early.


def ended(code, status, frames_taken):
    async def end(hostile, frames, context):
        for _ in range(frames_taken):
            frame = await anext(frames)
            hostile.arrived += len(frame.chunk)
        if code == "OK":
            return pb.Receipt(signature=bytes(64))
        return await context.abort(status, "no", trailing_metadata=((ERROR_METADATA, code),))

    return end


@pytest.mark.parametrize("frames_taken", [0, 1, 5])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("LIMIT", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("STORAGE", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("ROUND_CLOSED", grpc.StatusCode.FAILED_PRECONDITION),
        ("INTERRUPTED", grpc.StatusCode.ABORTED),
        ("no such code", grpc.StatusCode.INTERNAL),
        ("OK", None),
    ],
)
def test_an_upload_that_is_ended_early_harms_nobody(
    world, tmp_path, monkeypatch, code, status, frames_taken
):
    monkeypatch.setattr(messages, "chunks", functools.partial(stream.chunks, size=512))
    script = [offer(world), *[round_of(world, 0)] * 6]
    hostile = Hostile(world, script, upload=[ended(code, status, frames_taken)] * 5)
    play(hostile, tmp_path)
    assert [upload[1] for upload in hostile.uploads] == [0]
    assert len(hostile.uploads[0][2]) == world.size
    outcomes = [record["status"] for record in records(tmp_path, "egress.outcome")]
    assert len(outcomes) == 6
    assert outcomes[-1] == "sent"
    assert "sent" not in outcomes[:-1]


def test_an_upload_that_is_refused_for_its_ledger_is_followed_by_a_greeting(world, tmp_path):
    """Which says what head the coordinator holds: the next upload grows from that, or the agent
    ends.
    """
    refusal = ended("LEDGER", grpc.StatusCode.FAILED_PRECONDITION, 1)
    script = [offer(world), *[round_of(world, 0)] * 2]
    hostile = play(Hostile(world, script, upload=[refusal]), tmp_path)
    assert hostile.calls["hello"] == 2
    assert [upload[1] for upload in hostile.uploads] == [0]


# The silo's limit.


def limited(world, size):
    old = 'max_bytes_per_round = "64MiB"'
    assert old in world.policy
    return world.policy.replace(old, f"max_bytes_per_round = {size}")


def test_the_limit_of_a_round_holds_across_jobs_refusals_and_restarts(world, tmp_path):
    policy, seen = limited(world, 2 * world.size), []
    names = ("first", "second")
    script = [offer(world), offer(world, "second")]
    script += [round_of(world, 0, name) for _ in range(4) for name in names]
    refusals = [None, None, ended("LIMIT", grpc.StatusCode.RESOURCE_EXHAUSTED, 2)]
    again = [round_of(world, 0, name) for name in names]
    for tasks in (script, again, [round_of(world, 1, names[0])] * 4):
        hostile = play(Hostile(world, tasks, upload=refusals), tmp_path, policy=policy)
        seen += [upload[:2] for upload in hostile.uploads]
        refusals = []
        assert ("FAILED", tasks[-1].round.round, "POLICY") in hostile.answers
    # one of the four was refused midway
    assert seen.count(("first", 0)) + seen.count(("second", 0)) == 3
    assert seen.count(("first", 1)) == 2
    intents = records(tmp_path, "egress.intent")
    given = sorted((intent["job"], intent["round"]) for intent in intents)
    assert given == [each for each in (("first", 0), ("first", 1), ("second", 0)) for _ in range(2)]


async def cut_before_the_end(hostile, frames, context):
    """The whole message comes; the line breaks before END."""
    async for frame in frames:
        hostile.arrived += len(frame.chunk)
        if frame.HasField("end"):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")


def test_a_coordinator_that_cuts_every_upload_and_has_nearly_all_of_it_is_given_up(
    world, tmp_path, monkeypatch
):
    """Whatever it claims to have, a round is begun so often and no more.

    Restarts of the silo begin nothing anew.
    """
    monkeypatch.setattr(messages, "chunks", functools.partial(stream.chunks, size=512))
    monkeypatch.setattr(stream, "CHUNK_BYTES", 512)
    most, rest = 5, world.size % 512
    policy = world.policy.replace("[limits]\n", f"[limits]\nmax_attempts_per_round = {most}\n")
    assert rest

    async def nearly_all(request, context):
        hostile.calls["standing"] += 1
        return pb.StandingReply(received=world.size - rest)

    script = [offer(world), *[round_of(world, 0)] * 4]
    for tasks in (script, [round_of(world, 0)] * 4):
        hostile = Hostile(world, tasks, upload=[cut_before_the_end] * 99)
        hostile.standing = nearly_all
        play(hostile, tmp_path, policy=policy)
        intents = records(tmp_path, "egress.intent")
    assert hostile.answers.count(("FAILED", 0, "POLICY")) == 3
    sizes = [intent["message"]["bytes"] for intent in intents]
    # the process that came last knows of nothing that waits
    assert sizes == [world.size, *[rest] * 3, world.size]
    denied, *_ = records(tmp_path, "policy.deny")
    assert f"max_attempts_per_round = {most}" in denied["reasons"][0]
    monkeypatch.setattr(stream, "CHUNK_BYTES", CHUNK_BYTES)
    more = play(Hostile(world, [round_of(world, 1)]), tmp_path, policy=policy)
    assert [upload[1] for upload in more.uploads] == [1]


# Pace.

FLOODS = {
    "nothing": lambda _: pb.Task(nothing=pb.Nothing()),
    "no task": lambda _: pb.Task(),
    "unsigned offer": lambda w: offer(w, signed_job=b"{}"),
    "the same good offer": offer,
    "round that was not offered": lambda w: round_of(w, 0),
    "end that was not offered": lambda w: finish(w, 2),
    "end without results": lambda w: finish(w, 0, completed=False),
    "the same good end": lambda w: finish(w, 2),
    "round that is over": lambda w: round_of(w, 7),
}
BEFORE = {  # what was told before the flood
    "the same good end": lambda w: [offer(w), round_of(w, 0), finish(w, 2)],
    "round that is over": lambda w: [offer(w)],
}


async def test_a_flood_of_tasks_is_paced(world, tmp_path, monkeypatch):
    """All floods at once, each against an agent of its own."""
    monkeypatch.setattr(agents, "PAUSE_SECONDS", PAUSE_SECONDS)
    monkeypatch.setattr(plain_rounds, "PAUSE_SECONDS", PAUSE_SECONDS)
    monkeypatch.setattr(agents, "FIRST_WAIT_SECONDS", 0.5)
    before = lambda name: BEFORE.get(name, lambda _: [])(world)
    floods = {
        name: Hostile(world, before(name), endless=made(world)) for name, made in FLOODS.items()
    }
    runs = (attacked(flood, tmp_path / name, seconds=3) for name, flood in floods.items())
    await asyncio.gather(*runs)
    polls = {name: flood.calls["poll"] for name, flood in floods.items()}
    assert all(1 <= count <= 3 / PAUSE_SECONDS + 5 for count in polls.values()), polls
    calls = {name: sum(flood.calls.values()) for name, flood in floods.items()}
    assert all(count <= 3 * (3 / PAUSE_SECONDS + 5) for count in calls.values()), calls


# Deliveries.


def with_part(world):
    frames = delivery(world, "first", 1)
    frames[0].manifest.tensors[0].part = "secret"
    return frames


def with_tensor(world):
    frames = delivery(world, "first", 1)
    frames[0].manifest.tensors.add(part="model", name="more", size=4)
    frames[0].manifest.size += 4
    return frames


def with_nan(world):
    return delivery(world, "first", 1, change=lambda values: values[0].fill_(float("nan")))


def too_long(world):
    *frames, end = delivery(world, "first", 1)
    return [*frames, tensor.Frame(chunk=b"x"), end]


def too_large(world):
    frames = delivery(world, "first", 1)
    return [frames[0], tensor.Frame(chunk=bytes(3_000_000)), *frames[1:]]


def for_ever(*frames, then):
    def yielding():
        yield from frames
        while True:
            yield then

    return yielding()


BAD_DELIVERIES = {
    "part": with_part,
    "tensor": with_tensor,
    "NaN": with_nan,
    "too long": too_long,
    "too large": too_large,
    "no end": lambda w: delivery(w, "first", 1)[:-1],
    "another round": lambda w: delivery(w, "first", 2),
    "another job": lambda w: delivery(w, "second", 1),
    "one-byte chunks": lambda w: for_ever(
        delivery(w, "first", 1)[0], then=tensor.Frame(chunk=b"\0")
    ),
    "empty frames for ever": lambda _: for_ever(then=tensor.Frame()),
    "empty chunks for ever": lambda w: for_ever(
        delivery(w, "first", 1)[0], then=tensor.Frame(chunk=b"")
    ),
    "manifests for ever": lambda w: for_ever(then=delivery(w, "first", 1)[0]),
    "frames after the end": lambda w: for_ever(*delivery(w, "first", 1), then=tensor.Frame()),
}


@pytest.mark.parametrize("bad", BAD_DELIVERIES.values(), ids=BAD_DELIVERIES)
def test_a_bad_delivery_is_refused_and_a_good_one_taken(world, tmp_path, bad):
    script = [offer(world), round_of(world, 0), round_of(world, 1), round_of(world, 1)]
    good = lambda: delivery(world, "first", 0)
    hostile = play(Hostile(world, script, fetch=[good, lambda: bad(world)]), tmp_path)
    failed = [answer for answer in hostile.answers if answer[0] == "FAILED"]
    assert failed == [("FAILED", 1, "DELIVERY")]
    assert [upload[1] for upload in hostile.uploads] == [0, 1]
    ingress = records(tmp_path, "ingress")
    assert [record["round"] for record in ingress] == [1]


def test_a_delivery_that_never_comes_is_given_up(world, tmp_path, monkeypatch):
    monkeypatch.setattr(clients, "transfer_seconds", lambda _: 1.0)
    hostile = Hostile(world, [offer(world), round_of(world, 0), round_of(world, 0)])
    first = hostile.fetch

    async def stuck(request, context):
        if hostile.calls["fetch"] == 0:
            hostile.calls["fetch"] += 1
            await asyncio.sleep(60)
        async for frame in first(request, context):
            yield frame

    hostile.fetch = stuck
    play(hostile, tmp_path)
    assert hostile.calls["hello"] == 2
    assert [upload[1] for upload in hostile.uploads] == [0]


@pytest.mark.control
def test_what_crosses_is_what_the_ledger_says(world, tmp_path):
    hostile = play(Hostile(world, [offer(world), round_of(world, 0), round_of(world, 1)]), tmp_path)
    digests = records(tmp_path, "egress.digest")
    items = upload_items(world.jobs["first"].up(0))
    for (_, _, payload), record in zip(hostile.uploads, digests, strict=True):
        offset = 0
        for item, told in zip(items, record["tensors"], strict=True):
            assert told["sha256"] == sha256(payload[offset : offset + item.spec.nbytes]).hexdigest()
            offset += item.spec.nbytes
