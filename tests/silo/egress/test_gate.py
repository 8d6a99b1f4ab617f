import asyncio
import contextlib
import json
import os
from dataclasses import replace
from hashlib import sha256

import pytest
import torch
from support.ledgers import failing, first, intend_padded, intend_rotated, stored
from support.recording_gate import RECORDS, SESSION, SILO, SILOS, World, kinds, records

from staddle.algorithms.exchange.parts import upload_items
from staddle.errors import LocalError, PeerError
from staddle.proto import federation_pb2 as pb
from staddle.proto import stream
from staddle.proto.channel import CHUNK_BYTES
from staddle.proto.frames import decode
from staddle.proto.stream import Inbound
from staddle.proto.wire import check_manifest, to_wire
from staddle.security.ledger import audit as ledger_audit
from staddle.security.ledger import messages as ledger_view
from staddle.silo.egress import gate as egress
from staddle.silo.egress import messages as outgoing
from staddle.silo.egress.outcomes import DeniedError
from staddle.silo.egress.session import (
    TurnedAwayError,
    UnreachableError,
)
from staddle.silo.parts.contributions import Contributions


def limited(made, folder, **limits):
    """A world whose policy has these limits of a round."""
    limits = {"max_bytes_per_round": '"64MiB"', **limits}
    lines = "\n".join(f"{key} = {value}" for key, value in limits.items())
    replace = {'max_bytes_per_round = "64MiB"': lines}
    return World(made, folder, made.policy(*made.jobs.values(), replace=replace))


def size_of(made):
    return sum(item.spec.nbytes for item in upload_items(made.jobs["simple"].up(0)))


def held_back(world, error, why, *given, **options):
    """It does not leave, for this reason."""
    with pytest.raises(error, match=why):
        world.contribute(*given, **options)
    world.nothing_left()


def without_extractor(made):
    """A policy that does not let the extractor leave."""
    replace = {'tensors = ["extractor.**", "@weight"]': 'tensors = ["@weight"]'}
    return made.policy(made.jobs["simple"], replace=replace)


def resume(world, received):
    """The coordinator says what it has of the broken upload, and takes what comes from then on."""
    reply = pb.StandingReply(received=received)
    world.client.standing_reply = lambda _: reply
    world.settle()
    world.client.stop_after = None


def bodies(world):
    return [frame.WhichOneof("body") for frame in world.client.frames]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(outgoing, "chunks", lambda values: stream.chunks(values, 4096))
    monkeypatch.setattr(stream, "CHUNK_BYTES", 4096)  # what the other end takes


# The whole way.
def test_a_round_leaves_as_declared_and_recorded(world, small_chunks):
    payload = world.payload()
    world.contribute(payload)
    client, items = world.client, world.items()
    first, *middle, last = client.frames
    pieces = world.wanted(payload)

    assert first.manifest.tensors == to_wire(items)
    check_manifest(SILO, first.manifest, items)
    assert (first.manifest.session, first.manifest.job) == (SESSION, "simple")
    assert first.manifest.round == 0
    assert first.manifest.job_digest.hex() == world.job.digest
    assert first.manifest.size == sum(map(len, pieces))
    assert len(middle) > 5
    assert b"".join(frame.chunk for frame in middle) == b"".join(pieces)
    assert list(last.end.tensor_sha256) == [sha256(piece).digest() for piece in pieces]

    found = stored(world.path)
    assert kinds(found) == ["control.open", "egress.intent", "egress.digest", "egress.outcome"]
    assert found[1]["cohort"] == list(SILOS)
    assert (found[3]["status"], found[3]["bytes_sent"]) == ("sent", first.manifest.size)
    assert found[3]["receipt"] == world.receipt(client).signature.hex()
    assert world.audited().open_intents == ()


def test_the_packages_whose_code_the_job_runs_are_recorded(made, tmp_path):
    model = {"name": "normed", "classes": 3, "head": "4", "input": [1, 8, 8]}
    world = World(made, tmp_path, made.policy(made.job("outside-gate", model=model)))
    world.job = made.jobs.pop("outside-gate")
    world.contribute()
    (intent,) = stored(world.path, "egress.intent")
    assert intent["packages"] == world.job.document()["packages"]
    assert intent["packages"][0]["name"] == "other-models"
    assert world.audited().open_intents == ()


def test_the_other_end_takes_what_leaves(world, small_chunks):
    payload = world.payload()
    world.contribute(payload)
    taken, items = bytearray(), world.items()

    def check(manifest):
        check_manifest(SILO, manifest, items)
        return [item.spec.nbytes for item in items]

    inbound = Inbound(SILO, check, taken.extend)
    for frame in world.client.frames:
        inbound.feed(decode(frame.SerializeToString()))
    inbound.finish()
    assert bytes(taken) == b"".join(world.wanted(payload))


# (1) Exactly what the signed job declares.
@pytest.mark.parametrize(
    "change",
    [
        lambda given: given["extractor"].update(secret=torch.zeros(1)),
        lambda given: given.update(classifier={"classifier.weight": torch.zeros(3, 64)}),
        lambda given: given["extractor"].pop("@weight"),
        lambda given: given.pop("metrics"),
        lambda given: given["metrics"].update(tested=torch.tensor(1.0)),
        lambda given: given["extractor"].update({"extractor.conv1.bias": torch.zeros(17)}),
    ],
)
def test_1_what_the_job_does_not_declare_does_not_leave(world, change):
    given = world.payload()
    change(given)
    held_back(world, LocalError, "schema", given)


def test_1_a_part_of_another_phase_does_not_leave(world):
    world.job = world.made.jobs["phases"]
    held_back(world, LocalError, "schema", world.payload(2), 0)
    held_back(world, LocalError, "round 9", {}, 9)
    held_back(world, DeniedError, None, {}, 4)  # the final delivery: nothing is given in it


# (2) Every value is finite.
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["extractor.conv1.weight", "extractor.fc1.bias", "@weight"])
def test_2_a_value_that_is_not_finite_does_not_leave(world, bad, name):
    given = world.payload()
    given["extractor"][name].reshape(-1)[-1] = bad
    held_back(world, LocalError, f"extractor/{name} holds NaN or infinity", given)


# (3) What counts records counts records that there are: tests/attacks/test_smuggling.py has the
# ways to lie.
def test_3_a_weight_counts_training_records(world):
    most = float(RECORDS.train)
    weighing = [
        world.payload(**{"@weight": torch.tensor(weight, dtype=torch.float64)})
        for weight in (most + 1, 0.0, most)
    ]
    why = "extractor/@weight is not a whole number from 0 to 30"
    held_back(world, LocalError, why, weighing[0])
    for payload in weighing[1:]:
        world.contribute(payload)
    assert world.client.uploads == 2


# (4) The policy allows it.
def test_4_a_denial_leaves_no_frame_and_a_record(made, tmp_path):
    world = World(made, tmp_path, without_extractor(made))
    held_back(world, DeniedError, r"extractor/extractor\.conv1\.weight")
    denied = stored(world.path)[-1]
    assert (denied["type"], denied["job"], denied["round"]) == ("policy.deny", "simple", 0)
    assert denied["policy"] == world.policy.digest
    assert any("extractor/extractor.conv1.weight" in reason for reason in denied["reasons"])
    assert world.audited().ok


def test_4_the_same_denial_again_and_again_is_recorded_once(made, tmp_path):
    world = World(made, tmp_path, without_extractor(made))
    for round_ in (0, 0, 0, 1, 1, 0):
        with pytest.raises(DeniedError):
            world.contribute(round_=round_)
    denied = [record["round"] for record in stored(world.path) if record["type"] == "policy.deny"]
    assert denied == [0, 1, 0]


def test_4_norms_are_computed_where_a_rule_asks(made, tmp_path, monkeypatch):
    asked = []
    real = egress.norms
    monkeypatch.setattr(egress, "norms", lambda *values: asked.append(1) or real(*values))
    limit = {'name = "fedper-extractor"': 'name = "fedper-extractor"\nmax_norm = 1e9'}
    for number, replaced in enumerate(({}, limit)):
        policy = made.policy(made.jobs["simple"], replace=replaced)
        World(made, tmp_path / str(number), policy).contribute()
        assert len(asked) == number


@pytest.mark.parametrize(("most", "may"), [(100.0, True), (0.5, False)])
def test_4_a_part_that_is_too_long_does_not_leave(made, tmp_path, most, may):
    limit = {'name = "fedper-extractor"': f'name = "fedper-extractor"\nmax_norm = {most}'}
    world = World(made, tmp_path, made.policy(made.jobs["simple"], replace=limit))
    payload = world.payload(**{"@weight": torch.tensor(30.0, dtype=torch.float64)})
    for value in payload["extractor"].values():
        value.div_(1 if value.ndim == 0 else 1000)
    if may:
        world.contribute(payload)
        assert world.client.uploads == 1
        return
    held_back(world, DeniedError, r"its norm is \d\.\d+, over max_norm = 0.5", payload)
    assert any("over max_norm = 0.5" in reason for reason in records(world.path)[-1]["reasons"])


@pytest.mark.parametrize("key", ["readers", "recipients"])
def test_4_the_coordinator_must_be_a_reader_and_a_recipient(made, tmp_path, key):
    other = {f'{key} = ["coordinator"]': f'{key} = ["somebody"]'}
    world = World(made, tmp_path, made.policy(made.jobs["simple"], replace=other))
    held_back(world, DeniedError, key)


def test_4_the_bytes_of_a_round_add_up_over_its_attempts(made, tmp_path):
    size = size_of(made)
    world = limited(made, tmp_path, max_bytes_per_round=2 * size)
    for _ in range(2):
        world.contribute()
    with pytest.raises(DeniedError, match=f"{3 * size} bytes this round"):
        world.contribute()
    world.contribute(round_=1)
    assert world.client.uploads == 3
    assert world.audited().ok


def test_4_a_broken_attempt_counts_against_the_round(made, tmp_path):
    world = limited(made, tmp_path, max_bytes_per_round=size_of(made))
    world.client.stop_after = 1
    with pytest.raises(UnreachableError):
        world.contribute()
    with pytest.raises(DeniedError):
        world.contribute()
    assert world.client.uploads == 1


def test_4_the_bytes_of_a_round_are_counted_across_other_rounds_and_a_restart(made, tmp_path):
    size = size_of(made)
    world = limited(made, tmp_path, max_bytes_per_round=size)
    for round_ in (0, 1):
        world.contribute(round_=round_)
    for again in range(2):
        for round_ in (0, 1):
            with pytest.raises(DeniedError, match=f"{2 * size} bytes this round"):
                world.contribute(round_=round_)
        assert world.client.uploads == (0 if again else 2)
        world.audited()
        world = World(made, tmp_path, world.policy)
    world.ledger.close()


def test_4_the_attempts_of_a_round_are_limited_across_restarts(made, tmp_path, small_chunks):
    """The coordinator has all but the last chunk each time: few bytes, but no end of attempts."""
    world = limited(made, tmp_path, max_attempts_per_round=3)
    size = sum(item.spec.nbytes for item in world.items())
    world.client.standing_reply = lambda _: pb.StandingReply(received=size // 4096 * 4096)
    for attempt in range(3):
        world.broken(2)
        if attempt == 1:
            world.restart()
        world.settle()
    world.client.stop_after = None
    why = r"3 uploads of this round were begun, max_attempts_per_round = 3"
    with pytest.raises(DeniedError, match=why):
        world.contribute()
    world.restart()
    with pytest.raises(DeniedError):
        world.contribute()
    assert world.client.uploads == 3
    world.contribute(round_=1)
    assert world.client.uploads == 4
    assert world.ledger.sent(world.job.digest, 0) == size + 2 * (size % 4096)
    assert world.audited().ok


def test_4_what_left_whole_is_an_attempt_too_and_each_part_of_its_own_has_its_own(made, tmp_path):
    world = limited(made, tmp_path, max_attempts_per_round=1)
    own = {"job_digest": world.job.digest, "round_number": 0, "cohort": ()}
    intend_padded(world.ledger, **own)
    intend_rotated(world.ledger, **own)
    world.contribute()
    with pytest.raises(DeniedError, match="1 uploads"):
        world.contribute()
    assert world.client.uploads == 1
    # the two parts never crossed, so only their intents lack a digest
    assert world.audited().ok


# (6) INTENT is durable.
def test_6_the_intent_is_on_the_disk_before_the_first_frame_is_pulled(world, monkeypatch):
    synced, sizes = [], []
    real, real_upload = os.fdatasync, world.client.upload

    def noting(descriptor):
        real(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    async def upload(frames, size):
        sizes.append((synced[-1], first(world.path).stat().st_size))
        return await real_upload(frames, size)

    monkeypatch.setattr(os, "fdatasync", noting)
    world.client.upload = upload
    world.contribute()
    assert sizes[0][0] == sizes[0][1], "the intent was written but not synced"
    intent = world.client.before[-1]
    wanted = {
        "type": "egress.intent", "silo": SILO, "job": "simple", "job_digest": world.job.digest,
        "round": 0, "purpose": "update", "form": "plain",
        "recipient": {"id": "coordinator", "spki": world.made.roster.coordinator.spki_sha256},
        "readers": ["coordinator"], "message": {"bytes": world.client.frames[0].manifest.size},
    }  # fmt: skip
    assert {key: intent[key] for key in wanted} == wanted
    rule = {"file": world.policy.digest, "rule": "fedper-extractor, fedper-metrics"}
    assert {key: intent["policy"][key] for key in rule} == rule
    assert intent["tensors"] == [
        {
            "part": item.part, "kind": item.kind.name.lower(), "name": item.spec.name,
            "dtype": item.spec.dtype, "shape": list(item.spec.shape), "bytes": item.spec.nbytes,
            "taint": "exact", "readers": [],
        }
        for item in world.items()
    ]  # fmt: skip


# (7) The bytes go.
def test_7_what_leaves_is_what_was_checked_though_the_payload_changes(world, small_chunks):
    payload = world.payload()
    wanted = b"".join(world.wanted(payload))

    def spoil(client):
        if len(client.frames) == 3:
            for value in payload["extractor"].values():
                value.fill_(7)

    world.client.on_frame = spoil
    world.contribute(payload)
    left = b"".join(frame.chunk for frame in world.client.frames)
    assert left == wanted
    pieces = []
    for item in world.items():
        pieces.append(left[: item.spec.nbytes])
        left = left[item.spec.nbytes :]
    assert list(world.client.end.tensor_sha256) == [sha256(piece).digest() for piece in pieces]
    recorded = stored(world.path)[2]["tensors"]
    assert [t["sha256"] for t in recorded] == [sha256(piece).hexdigest() for piece in pieces]


def test_7_a_big_payload_goes_in_chunks_of_a_mebibyte(made, tmp_path):
    assert outgoing.chunks is stream.chunks
    assert stream.chunks.__defaults__ == (CHUNK_BYTES,)
    world = World(made, tmp_path)
    world.contribute()
    assert bodies(world) == ["manifest", "chunk", "end"]


# (8) DIGEST is durable.
def test_8_the_digest_is_on_the_disk_before_the_end_frame(world, small_chunks):
    payload = world.payload()
    world.contribute(payload)
    *before, last = world.client.at
    assert all(kinds(found)[-1] == "egress.intent" for found in before)
    digest = last[-1]
    assert digest["type"] == "egress.digest"
    pieces = world.wanted(payload)
    assert [t["sha256"] for t in digest["tensors"]] == [sha256(p).hexdigest() for p in pieces]
    assert [(t["part"], t["name"]) for t in digest["tensors"]] == [
        (i.part, i.spec.name) for i in world.items()
    ]
    total = sha256(b"".join(sha256(piece).digest() for piece in pieces)).hexdigest()
    assert digest["message"] == {"bytes": sum(map(len, pieces)), "sha256": total}
    assert digest["ref"] == last[-2]["seq"]


# (9) END makes the message count.
def test_9_the_end_frame_names_its_place_in_the_ledger(world):
    world.contribute()
    line = first(world.path).read_bytes().splitlines()[2]
    assert json.loads(line)["type"] == "egress.digest"
    assert world.client.end.ledger_seq == 2
    assert world.client.end.ledger_leaf == sha256(b"\x00" + line).digest()
    tensors = tuple(world.client.end.tensor_sha256)
    assert world.client.end.sha256 == sha256(b"".join(tensors)).digest()


# (10) OUTCOME.
@pytest.mark.parametrize("frames", [0, 1, 3])
def test_10_a_connection_lost_midway_counts_as_left(world, small_chunks, frames):
    world.broken(frames)
    world.settle()
    outcome = world.outcome()
    sent = sum(len(frame.chunk) for frame in world.client.frames)
    assert (outcome["status"], outcome["bytes_sent"], outcome["receipt"]) == ("unknown", sent, None)
    assert len(world.audited().undigested) == 1
    # What was handed over counts, and no more of what was declared.
    totals = [t for (job, _), t in ledger_view.summary(world.path).items() if job == "simple"]
    assert sum(total.bytes for total in totals) == sent
    assert sum(total.assumed for total in totals) == 0


def test_10_a_connection_lost_after_the_end_is_unknown_and_digested(world):
    world.broken(3)
    (settled,) = world.settle()
    assert (settled.job, settled.round, settled.status) == ("simple", 0, "unknown")
    assert bodies(world)[-1] == "end"
    assert world.outcome()["status"] == "unknown"
    assert world.audited().undigested == ()


def test_10_a_refusal_is_a_failure_and_is_raised(world):
    world.client.stop_after = 2
    world.client.error = TurnedAwayError("coordinator", "ROUND_CLOSED", "too late")
    with pytest.raises(TurnedAwayError):
        world.contribute()
    assert world.outcome()["status"] == "failed"
    totals = ledger_view.summary(world.path)["simple", "extractor"]
    assert totals.bytes > 0, "what was refused had left all the same"


OTHERS = {
    "federation": "other", "members": "00" * 32, "silo": "silo-b", "job": "00" * 32, "round": 1,
    "size": 1, "sha256": "00" * 32, "ledger_seq": 1, "ledger_leaf": "00" * 32,
}  # fmt: skip


@pytest.mark.parametrize("field", OTHERS)
def test_10_a_receipt_for_anything_else_leaves_the_outcome_unknown(world, field):
    world.receipt_changes = {field: OTHERS[field]}
    with pytest.raises(PeerError, match="does not fit"):
        world.contribute()
    assert (world.outcome()["status"], world.outcome()["receipt"]) == ("unknown", None)
    assert world.audited().ok


@pytest.mark.parametrize("signature", [b"", bytes(64), b"x" * 5000])
def test_10_a_receipt_that_is_no_signature_leaves_the_outcome_unknown(world, signature):
    world.client.receipt = lambda _: pb.Receipt(signature=signature)
    with pytest.raises(PeerError):
        world.contribute()
    assert world.outcome()["status"] == "unknown"


def test_10_a_receipt_before_the_end_leaves_the_outcome_unknown(world):
    async def hasty(frames, size):
        async with contextlib.aclosing(frames):
            await anext(frames)
        return pb.Receipt(signature=bytes(64))

    world.client.upload = hasty
    with pytest.raises(PeerError, match="before the message ended"):
        world.contribute()
    assert world.outcome()["status"] == "unknown"


def test_10_a_cancelled_upload_is_unknown(world, small_chunks):
    async def scenario():
        await world.gate.session.hello()
        reached, never = asyncio.Event(), asyncio.Event()
        real = world.client.upload

        async def stuck(frames, size):
            async def slowed():
                async for frame in frames:
                    yield frame
                    if len(world.client.frames) == 3:
                        reached.set()
                        await never.wait()

            return await real(slowed(), size)

        world.client.upload = stuck
        task = asyncio.create_task(
            world.gate.upload_plain(world.declared, 0, Contributions(world.payload()), SILOS)
        )
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    (intent,) = world.ledger.open_intents
    world.settle()
    outcome = world.outcome()
    assert (outcome["ref"], outcome["status"]) == (intent, "unknown")
    assert outcome["bytes_sent"] == 2 * 4096
    assert world.audited().open_intents == ()


# Uploads whose connection broke: how they stand, and their rest.
def test_an_upload_that_broke_stays_open_until_the_coordinator_was_asked(world, small_chunks):
    world.broken(4)
    assert kinds(stored(world.path)) == ["control.open", "egress.intent"]
    assert ledger_audit.verify(world.path).ok
    (settled,) = world.settle()
    request = world.client.messages[-1]
    assert (request.session, request.job, request.round) == (SESSION, "simple", 0)
    assert request.job_digest.hex() == world.job.digest
    assert world.gate.session._counts.messages == 2  # a control message like any other
    assert "0 bytes" in settled.why
    assert world.settle() == []


@pytest.mark.parametrize("restart", [False, True], ids=["same process", "after a restart"])
def test_a_lost_receipt_is_settled(world, small_chunks, restart):
    payload = world.payload()
    world.broken(10**6, payload)  # all frames left
    assert bodies(world)[-1] == "end"
    if restart:
        world.restart()
    world.client.standing_reply = lambda client: pb.StandingReply(receipt=world.receipt(client))
    (settled,) = world.settle()
    assert (settled.status, settled.why) == ("sent", "")
    outcome = world.outcome()
    assert outcome["status"] == "sent"
    assert outcome["bytes_sent"] == world.client.frames[0].manifest.size
    assert outcome["receipt"] == world.receipt(world.client).signature.hex()
    assert world.audited().open_intents == ()


@pytest.mark.parametrize("field", ["ledger_seq", "round", "sha256", "job"])
def test_a_receipt_for_anything_else_settles_nothing_as_sent(world, field):
    world.broken(10**6)
    world.receipt_changes = {field: OTHERS[field]}
    world.client.standing_reply = lambda client: pb.StandingReply(receipt=world.receipt(client))
    (settled,) = world.settle()
    assert settled.status == "unknown"
    assert "does not fit" in settled.why
    assert (world.outcome()["status"], world.outcome()["receipt"]) == ("unknown", None)
    assert world.audited().ok


def test_a_receipt_for_a_message_that_never_ended_settles_nothing_as_sent(world, small_chunks):
    world.broken(3)
    world.client.standing_reply = lambda _: pb.StandingReply(
        receipt=pb.Receipt(signature=bytes(64))
    )
    assert "before the message ended" in world.settle()[0].why
    assert world.outcome()["status"] == "unknown"


def test_after_a_restart_all_that_was_declared_counts_as_handed_over(world, small_chunks):
    world.broken(3)
    world.restart()
    world.settle()
    assert world.outcome()["bytes_sent"] == sum(item.spec.nbytes for item in world.items())
    assert world.audited().ok


def test_a_job_that_the_coordinator_lost(world):
    """A job that the coordinator no longer has is unknown; other refusals leave it open."""
    world.broken(2)

    def refuse(code):
        def reply(_):
            raise TurnedAwayError("coordinator", code, "no")

        world.client.standing_reply = reply

    for code in ("SESSION", "STOPPING", "LIMIT"):
        refuse(code)
        with pytest.raises(TurnedAwayError):
            world.settle()
        assert len(world.ledger.open_intents) == 1
    refuse("UNKNOWN_JOB")
    assert world.settle()[0].status == "unknown"


def test_the_rest_goes_behind_what_the_coordinator_has(world, small_chunks):
    """12 chunks left, 7 arrived: the rest goes, by the manifest; digests are of all of it."""
    payload = world.payload()
    pieces = b"".join(world.wanted(payload))
    world.broken(13, payload)
    offset = 7 * 4096
    resume(world, offset)
    world.contribute(payload)
    first, *middle, last = world.client.frames
    assert (first.manifest.offset, first.manifest.size) == (offset, len(pieces))
    assert b"".join(frame.chunk for frame in middle) == pieces[offset:]
    assert list(last.end.tensor_sha256) == [sha256(p).digest() for p in world.wanted(payload)]
    cut, whole = ledger_view.messages(world.path)
    assert (cut.intent.offset, cut.intent.message.bytes, cut.status) == (0, len(pieces), "unknown")
    assert whole.intent.offset == offset
    assert (whole.intent.message.bytes, whole.status) == (len(pieces) - offset, "sent")
    assert world.ledger.sent(world.job.digest, 0) == 2 * len(pieces) - offset
    world.contribute(payload)  # said once, used once
    assert world.client.frames[0].manifest.offset == 0
    assert world.audited().ok


def test_what_the_coordinator_has_whole_needs_its_end_alone(world, small_chunks):
    size = sum(item.spec.nbytes for item in world.items())
    world.broken(10**6)
    resume(world, size)
    world.contribute()
    assert bodies(world) == ["manifest", "end"]
    assert world.outcome()["status"] == "sent"
    assert world.audited().ok


@pytest.mark.parametrize("received", [1, 4095, 4097, 10**9 * 4096, 2**64 - 1])
def test_an_offset_between_two_chunks_or_past_the_end_is_not_used(world, small_chunks, received):
    world.broken(5)
    resume(world, received)
    world.contribute()
    assert world.client.frames[0].manifest.offset == 0
    assert world.audited().ok


def test_4_the_rest_counts_against_the_round_with_its_own_bytes(made, tmp_path, small_chunks):
    size = size_of(made)
    offset = 6 * 4096
    for most, may in ((2 * size - offset, True), (2 * size - offset - 1, False)):
        world = limited(made, tmp_path / str(may), max_bytes_per_round=most)
        world.broken(9)
        resume(world, offset)
        denied = pytest.raises(DeniedError, match=f"{2 * size - offset} bytes")
        with contextlib.nullcontext() if may else denied:
            world.contribute()
        assert world.audited().ok


@pytest.mark.parametrize("record", ["policy.deny", "egress.intent", "egress.digest"])
def test_what_cannot_be_recorded_does_not_leave(made, tmp_path, monkeypatch, record):
    """A denial (4) or an intent (6): no frame leaves. A digest (8): no end frame."""
    world = World(made, tmp_path, made.policy() if record == "policy.deny" else None)
    failing(monkeypatch, record)
    with pytest.raises(LocalError, match="no more records"):
        world.contribute()
    if record != "egress.digest":
        world.nothing_left()
        return
    assert "end" not in bodies(world)
    assert world.outcome()["status"] == "unknown"
    assert world.audited().undigested


def test_10_an_outcome_that_cannot_be_written_counts_as_left(world, monkeypatch):
    failing(monkeypatch, "egress.outcome")
    with pytest.raises(LocalError, match="no more records"):
        world.contribute()
    assert ledger_view.summary(world.path)["simple", "extractor"].bytes > 0


def test_rounds_and_attempts_are_messages_of_their_own(world):
    for round_ in (0, 0, 1):
        world.contribute(round_=round_)
    assert world.audited().ok
    assert [m.intent.round for m in ledger_view.messages(world.path)] == [0, 0, 1]
    assert {m.status for m in ledger_view.messages(world.path)} == {"sent"}


# Several jobs at a time.
def other_job(world):
    return replace(world.declared, job="other", digest="cd" * 32)


def test_uploads_of_two_jobs_leave_one_after_the_other(world):
    """Each proves that the ledger grew from the head that came with the one before."""
    own, other, at_once = world.declared, other_job(world), []
    real = world.client.upload

    async def upload(frames, size):
        at_once.append(1)
        for _ in range(100):  # whoever else could run has run
            await asyncio.sleep(0)
        assert at_once == [1]
        at_once.clear()
        return await real(frames, size)

    async def scenario():
        await world.gate.session.hello()
        given = Contributions(world.payload())
        world.client.upload = upload
        await asyncio.gather(
            *(world.gate.upload_plain(each, 0, given, SILOS) for each in (own, other)),
            return_exceptions=True,
        )

    asyncio.run(scenario())
    kept = kinds(records(world.path))
    one = ["egress.intent", "egress.digest", "egress.outcome"]
    assert [kind for kind in kept if kind.startswith("egress.")] == one + one


def test_nothing_uploads_until_a_broken_upload_is_settled(world):
    """The coordinator may have it, and then holds a later head than the next would begin with."""
    world.broken(2)
    given, before = Contributions(world.payload()), world.client.uploads
    for declared in (other_job(world), world.declared):
        with pytest.raises(UnreachableError, match="settle"):
            asyncio.run(world.gate.upload_plain(declared, 0, given, SILOS))
    assert world.client.uploads == before
    assert world.gate.unsettled
    world.settle()
    assert not world.gate.unsettled
    world.client.stop_after = None
    world.contribute()
    assert world.outcome()["status"] == "sent"
