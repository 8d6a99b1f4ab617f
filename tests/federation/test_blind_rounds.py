"""Blind rounds over real TLS: a coordinator, and silos of raw calls with the pure machine."""

import asyncio
import dataclasses
import sqlite3
import threading
from contextlib import closing

import pytest
from federation.keyed import made_up
from support import raw_silo
from support.coordinator_thread import coordinator
from support.raw_blind_silo import BlindSilo
from support.raw_silo import SECONDS, arrived, frames_of, maybe_late, refused
from support.signed_federation import job_document, signed_federation

from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.bundle.shared_model import shared_state
from staddle.coordinator import daemon as daemons
from staddle.coordinator.blind import unmask
from staddle.coordinator.jobs import job_run as jobruns
from staddle.coordinator.jobs import secure_sum_runner
from staddle.coordinator.rounds.events import OperatorStopped
from staddle.coordinator.storage import results
from staddle.files import tensor_file
from staddle.proto import federation_pb2 as pb
from staddle.proto import stream
from staddle.proto.convert.secagg_sent import Over
from staddle.proto.wire import tensor_bytes
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.sum import Quantised
from staddle.security.faults import Code
from staddle.security.secagg import silo_events as s

SILOS = ("north", "east", "south", "west")


@pytest.fixture
def world(tmp_path):
    security = {"secure_aggregation": "required", "weight_most": 1000, "tags": False}
    document = job_document(SILOS, rounds=2, min_cohort=3, security=security)
    world = signed_federation(tmp_path, SILOS, document, beat_seconds=5)
    job = world.job

    world.contributions = made_up(job, 50.0)
    world.silo = lambda here, name: BlindSilo(
        here.address, world.keys[name], world.roster, job, world.contributions(name)
    )
    world.folder = tmp_path / "federation" / "coordinator" / "state"
    return world


def published(world, round_, members=SILOS):
    """What the members' contributions of a round become, summed without masks."""
    (part,) = (part for part in world.job.up(round_) if part.name != RIGHT.name)
    exchanges = Quantised(JobPlan(world.job).bounds)
    gave = {silo: world.contributions(silo)(round_) for silo in members}
    fold = exchanges.collect(part, members, lambda silo, name: gave[silo][part.name][name])
    return b"".join(bytes(tensor_bytes(fold[spec.name])) for spec in part.tensors)


async def begun(world, here, silos=SILOS):
    made = [world.silo(here, silo) for silo in silos]
    for each in made:
        await each.accept()
    for each in made:
        assert (await each.told("round")).round == 0
    return made


def test_two_blind_rounds_are_the_quantised_ones_to_the_bit(world, caplog):
    caplog.set_level("INFO", "staddle")

    async def scenario():
        made = await begun(world, here)
        slow, attempts = made[0], []
        for round_ in (0, 1):
            await asyncio.gather(*(each.take_part(round_) for each in made))
            for each in made:
                asked = await each.told("round" if round_ == 0 else "finish")
                assert (asked.round, asked.counted) == (round_ + 1, round_ + 1)
            attempts.append(slow.attempt)
            # the sum is open; of a round before the last nothing is awaited
            for slow.attempt in reversed(attempts):
                await refused(slow.say(Over(Code.STOPPED)), "ROUND_CLOSED", "has no open sum")
        for each in made:
            assert await each.delivered(2) == published(world, 1)
            await each.answer("DONE")
        return made

    with coordinator(world.config) as here:
        made = here.run(scenario())
        assert here.broken == []
    told = [
        (line.message, line.levelname)
        for line in caplog.records
        if line.message in ("late", "refused")
    ]
    # a silo whose last word of a round came after enough others had opened the sum is late, too
    *late, last = told
    assert last == ("refused", "WARNING")
    assert len(late) >= 2
    assert set(late) == {("late", "INFO")}
    assert {each.received for each in made} == {published(world, 0)}
    assert not list(world.folder.glob("jobs/job/*.masked"))
    with closing(sqlite3.connect(world.folder / "coordinator.sqlite")) as rows, rows:
        assert rows.execute("SELECT count(*) FROM secure").fetchone() == (0,)
        metrics = rows.execute("SELECT metrics FROM rounds").fetchall()
    assert all('"tested": 28' in kept for (kept,) in metrics)
    # The open sum is all that the coordinator has, and it is the model of all silos.
    parts = {
        part: tensor_file.read(path)[0]
        for part, path in results.read(world.folder, "job").published.items()
    }
    state = shared_state(world.job, parts)
    (part,) = (part for part in world.job.down(2) if part.name == "model")
    values = [state.flat[f"part/{spec.name.replace('.', '/', 1)}"] for spec in part.tensors]
    assert b"".join(bytes(tensor_bytes(value)) for value in values) == published(world, 1)


async def until_words_are_due(each, round_=0):
    """Up to the moment before its upload; the terms of its masks."""
    due = []

    def hear(effect):
        if isinstance(effect, s.UploadWords):
            due.append(effect.terms)
            return None
        return effect

    each.hear = hear
    own = await each.frame(round_)
    async with asyncio.timeout(SECONDS):
        while not due:
            if (told := await each.next(round_)) is not None:
                await each.heard(own, told)
    each.hear = lambda effect: effect
    each.own, each.words = own, each.masked(due[0])
    return due[0]


async def finish(each, terms, round_=0):
    await each.do((s.UploadWords(terms),))
    async with asyncio.timeout(SECONDS):
        while each.finished is None:
            if (told := await each.next(round_)) is not None:
                await each.heard(each.own, told)


def test_masked_words_are_refused_before_a_byte_unless_they_are_due(world):
    async def scenario():
        made = await begun(world, here)
        await refused(made[0].upload(frames_of(made[0]), True), "MANIFEST", "sums are blind")
        await asyncio.gather(*(until_words_are_due(each) for each in made))
        first = made[0]
        for changes in ({"context": b"\1" * 32}, {"round": 1}):
            await refused(
                first.upload(first.masked_frames(**changes), True), "ROUND_CLOSED", "not await it"
            )
        last = made[-1]
        short = last.masked_frames(size=len(last.words) - 4)
        # it drops out
        await refused(last.upload(short, True), "MANIFEST", "due are")
        assert not list(world.folder.glob("jobs/job/*.masked"))

    with coordinator(world.config) as here:
        here.run(scenario())
        (run,) = here.daemon.runs
        assert run.state.failed == {"west": "MANIFEST"}
        assert here.broken == []


def test_a_broken_upload_of_masked_words_goes_on_where_it_broke(world, monkeypatch):
    monkeypatch.setattr(stream, "CHUNK_BYTES", 1024)  # or all of it would be one chunk
    monkeypatch.setattr(raw_silo, "MIB", 1024)

    async def scenario():
        made = await begun(world, here)
        await asyncio.gather(*(until_words_are_due(each) for each in made))
        first = made[0]
        call = first.stub.Upload(timeout=SECONDS)
        for frame in first.masked_frames()[:4]:
            await call.write(frame)
        await arrived(world.folder / "spool", "north", 3 * 1024)
        assert (await first.standing()).received == 3 * 1024
        frames = first.masked_frames(offset=3 * 1024)
        await first.upload(frames)
        assert (await first.standing()).receipt.size == len(first.words)
        again = first.upload(first.masked_frames(), True)
        await refused(again, "ROUND_CLOSED", "not await it")

    with coordinator(world.config) as here:
        here.run(scenario())


def test_another_attempt_asks_for_other_words_and_gives_no_receipt_of_the_first(world):
    async def scenario():
        made = await begun(world, here)
        terms = await asyncio.gather(*(until_words_are_due(each) for each in made))
        for each, of in zip(made[:2], terms, strict=False):
            await each.do((s.UploadWords(of),))
        first = (await made[0].standing()).receipt
        assert first.signature
        for each in made[2:]:
            await each.answer("FAILED", code=pb.ERROR_CODE_TRAINING)
        for each in made:  # over, and asked to give it up
            while not each.memory.abandoned:
                if (told := await each.next(0)) is not None:
                    await each.heard(each.own, told)
        terms = await asyncio.gather(*(until_words_are_due(each) for each in made))
        assert not (await made[0].standing()).HasField("receipt")
        await asyncio.gather(*(finish(each, of) for each, of in zip(made, terms, strict=True)))
        second = (await made[0].standing()).receipt
        assert second.sha256 not in (first.sha256, b"")
        for each in made:
            assert (await each.told("round")).round == 1
            assert await each.delivered(1) == published(world, 0)

    with coordinator(world.config) as here:
        here.run(scenario())
        assert here.broken == []


def test_a_coordinator_that_was_away_goes_on_in_the_same_attempt(world):
    made, terms = [], []

    async def first():
        made.extend(await begun(world, here))
        terms.extend(await asyncio.gather(*(until_words_are_due(each) for each in made)))
        for each in made:
            await each.channel.close()

    async def second():
        for each in made:
            back = world.silo(here, each.silo)
            each.channel, each.stub = back.channel, back.stub
            await each.hello()
        await asyncio.gather(*(finish(each, of) for each, of in zip(made, terms, strict=True)))
        for each in made:
            assert (await each.told("round")).round == 1
            assert await each.delivered(1) == published(world, 0)

    with coordinator(world.config) as here:
        here.run(first())
    with coordinator(world.config) as here:
        here.run(second())
        (run,) = here.daemon.runs
        assert (run.state.counted, run.state.attempt) == (dict.fromkeys(SILOS, 1), 0)
        assert here.broken == []


def test_only_a_silo_with_its_session_asks_and_only_for_an_open_round(world):
    async def scenario():
        made = await begun(world, here)
        each = made[0]
        session, each.session = each.session, b"0" * 16
        await refused(each.next(0), "SESSION")
        each.session = session
        await refused(each.next(1), "ROUND_CLOSED")
        each.had = 99
        await refused(each.next(0), "SECURE", "had 99 messages")
        each.had = 0
        own, told = await each.frame(0), await each.next(0)
        each.had = 1
        assert await each.next(0) is None  # nothing for the hold time
        each.attempt = dataclasses.replace(told.attempt, ctx=b"\1" * 32)
        await refused(each.say(Over(Code.STOPPED)), "SECURE", "no attempt of round 0")
        assert own.round == 0

    with coordinator(world.config) as here:
        here.run(scenario())


def test_a_method_that_delivers_different_values_fails_its_job_and_says_why(world, monkeypatch):
    real = jobruns.JobRun.delivery

    async def delivery(run, round_, silo):
        found = await real(run, round_, silo)
        if round_ == 1 and silo == "east":
            tensors = {
                part: {name: t + 1 for name, t in of.items()} for part, of in found.tensors.items()
            }
            return jobruns.SiloDelivery(tensors, {})
        return found

    monkeypatch.setattr(jobruns.JobRun, "delivery", delivery)

    async def scenario():
        made = await begun(world, here)
        # The job fails as soon as the sum is open: a slower silo finds its round closed.
        await asyncio.gather(*(maybe_late(each.take_part(0)) for each in made))
        async with asyncio.timeout(SECONDS):
            while (task := await made[0].poll()).WhichOneof("body") != "finish":
                pass
        assert not task.finish.completed

    with coordinator(world.config) as here:
        here.run(scenario())
        (run,) = here.daemon.runs
        assert "method 'fedavg' delivers different values to silos in round 1" in run.state.reason


def test_nobody_waits_in_the_round_of_a_job_that_was_stopped(world):
    """A silo that has done its part would take no other job meanwhile."""

    async def leave(each):
        async with asyncio.timeout(SECONDS):
            while True:  # what is still told of the attempt that ended
                await each.next(0)

    async def scenario():
        made = await begun(world, here)
        await asyncio.gather(*(until_words_are_due(each) for each in made))
        here.daemon.apply(here.daemon.runs[0], OperatorStopped())
        for each in made:
            await refused(leave(each), "ROUND_CLOSED", "is stopped in round 0")

    with coordinator(world.config) as here:
        here.run(scenario())


def test_a_coordinator_that_is_stopped_while_it_opens_a_sum_folds_it_first(world, monkeypatch):
    stopping = threading.Event()

    def slow(*args):
        assert stopping.wait(SECONDS)
        return unmask.open_sum(*args)

    monkeypatch.setattr(secure_sum_runner, "open_sum", slow)
    real = daemons.Daemon.stop

    async def stop(daemon):
        asyncio.get_running_loop().call_soon(stopping.set)
        await real(daemon)

    monkeypatch.setattr(daemons.Daemon, "stop", stop)

    async def scenario():
        made = await begun(world, here)
        terms = await asyncio.gather(*(until_words_are_due(each) for each in made))
        finishing = [
            asyncio.create_task(finish(each, of)) for each, of in zip(made, terms, strict=True)
        ]
        (run,) = here.daemon.runs
        async with asyncio.timeout(SECONDS):
            while run.collector.summing.stage != "opening":
                await here.daemon.changed.wait()
        for task in finishing:
            task.cancel()
        return run

    with coordinator(world.config) as here:
        run = here.run(scenario())
    assert (run.state.round, run.state.outcome, run.state.counted) == (
        1,
        "running",
        dict.fromkeys(SILOS, 1),
    )
