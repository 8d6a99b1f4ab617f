"""Silos with the right keys and bad intentions, over real TLS, against the coordinator as
it ships.
"""

import asyncio
import contextlib
import errno
import ssl
import struct
import threading
from types import SimpleNamespace

import pytest
import safetensors
import torch
from support.ledgers import stored
from support.raw_silo import SECONDS, NoLedger, frames_of, refused
from support.signed_federation import job_document, raw_silos, signed_federation

from staddle.algorithms.exchange.parts import WEIGHT
from staddle.coordinator import daemon as daemons
from staddle.coordinator import server
from staddle.coordinator.jobs import job_run
from staddle.coordinator.rpc import guard, limits, service
from staddle.files import tensor_file
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.channel import SECURE_NEXT
from staddle.proto.frames import ChunkFrame
from staddle.proto.wire import tensor_from
from staddle.security.log.head import Signer

pytestmark = pytest.mark.actor("silo")

SILOS = ("north", "east", "south")


@pytest.fixture(scope="module")
def world(request, tmp_path_factory):
    """A federation with a signed job.

    A test may give what its job's file has beside or instead of this one's.
    """
    document = job_document(SILOS, min_cohort=2, **getattr(request, "param", {}))
    return signed_federation(tmp_path_factory.mktemp("attacked"), SILOS, document)


@pytest.fixture
def serving(world, tmp_path, monkeypatch):
    """A coordinator with three silos in round 0; ``serving.state()`` is the job's state."""
    made = []

    class Noted(daemons.Daemon):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(server, "Daemon", Noted)
    guards, addresses, complaints = [], [], []
    monkeypatch.setattr(
        server, "Guard", lambda roster: guards.append(guard.Guard(roster)) or guards[-1]
    )

    @contextlib.asynccontextmanager
    async def begin():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        config = world.config.model_copy(update={"directory": tmp_path / "state"})
        async with server.running(config) as address, raw_silos(address, world) as callers:
            addresses.append(address)
            yield callers
        assert complaints == []

    begin.run = lambda: made[-1].runs[0]
    begin.state = lambda: made[-1].runs[0].state
    begin.address = lambda: addresses[-1]
    begin.limits = lambda: guards[-1].limits
    begin.folder = tmp_path / "state"
    return begin


# Uploads.

BAD_WEIGHTS = [(bad, "WEIGHT") for bad in (-1.0, -199.9999, -1e6, -5e-324, 2.0**53 + 2, 1.7e308)]
BAD_WEIGHTS += [(float("nan"), "NOT_FINITE"), (float("inf"), "NOT_FINITE")]


async def go_on(east, south, **fields):
    """The others' round comes to its end."""
    for silo in (east, south):
        await silo.contribute(**fields)
    assert (await east.told("round")).round == 1


async def values_of(silo, round_):
    """All numbers that a silo is delivered."""
    return torch.frombuffer(bytearray(await silo.delivered(round_)), dtype=torch.float32)


@pytest.mark.parametrize(("weight", "code"), BAD_WEIGHTS)
async def test_a_weight_that_no_silo_has_is_refused_and_the_others_go_on(serving, weight, code):
    async with serving() as (north, east, south):
        await refused(north.contribute(weight=weight, wary=True), code, WEIGHT)
        assert serving.state().failed == {"north": code}
        await go_on(east, south, fill=0.5)
        assert (await north.told("round")).round == 1
        assert set((await values_of(east, 1)).tolist()) == {0.5}
        assert not list(serving.folder.glob("spool/*"))


@pytest.mark.parametrize("weight", [0.0, 2.0**53])
@pytest.mark.control
async def test_a_weight_that_a_silo_may_have_keeps_every_value_finite(serving, weight):
    async with serving() as (north, east, south):
        await north.contribute(weight=weight, fill=3e38)
        for silo in (east, south):
            await silo.contribute(fill=-3e38)
        await east.told("round")
        assert (await values_of(east, 1)).isfinite().all()


# Ledgers.


def anew(ledger):
    return NoLedger(ledger.signer, b"x" * 32).end(9, held=ledger.held)


def the_same(ledger):
    return NoLedger(ledger.signer).end(ledger.held - 1, held=ledger.held)


def of_another_silo(ledger):
    other = Signer("staddle.example/local/east/egress", ledger.signer.key)
    return NoLedger(other).end(9, held=4)


HEADS = {
    "written anew": anew,
    "as if nothing were held": lambda ledger: NoLedger(ledger.signer).end(9, held=0),
    "shorter": lambda ledger: NoLedger(ledger.signer).end(2, held=3),
    "the same": the_same,
    "no inclusion": lambda ledger: {**ledger.end(), "inclusion": []},
    "another leaf": lambda ledger: {**ledger.end(), "ledger_leaf": b"x" * 32},
    "no head": lambda ledger: {**ledger.end(), "head": b""},
    "another silo's": of_another_silo,
}


@pytest.mark.parametrize("other", HEADS.values(), ids=HEADS)
async def test_an_upload_under_a_head_that_does_not_extend_the_one_held_is_refused(serving, other):
    async with serving() as (north, east, south):
        for silo in (north, east, south):
            await silo.contribute()
        for silo in (north, east, south):
            assert (await silo.told("round")).round == 1
        frames = frames_of(north, 1)
        end = frames[-1].end
        for name in ("head", "inclusion", "ledger_leaf"):
            end.ClearField(name)
        end.MergeFrom(tensor.End(**other(north.ledger)))
        await refused(north.upload(frames, wary=True), "LEDGER", "head")
        assert serving.state().failed == {"north": "LEDGER"}
        held = north.ledger.held
        for silo in (east, south):
            await silo.contribute(1)
        await north.hello()
        assert north.ledger.held == held
        records = stored(serving.folder / "ledger")
        kept = [record["silo"] for record in records if record["type"] == "head.refused"]
        signed = end.head and b"local/north/" in end.head
        assert kept == (["north"] if signed else [])


HOLDERS = {"method": {"name": "fedssa", "options": {"min_holders": 3}}}
STALE = {"method": {"name": "fedssa", "options": {"min_holders": 3, "stale_inclusive": True}}}
STATISTICS = {"model": {"name": "cnn-digits", "classes": 10, "norm": "batch", "buffers": "global"}}


WEIGHT_ABOVE = ("WEIGHT", "rows/@weight holds a value above 1")
NEGATIVE = {"extractor.norm1.running_var": -1e-3}


@pytest.mark.parametrize(
    ("world", "good", "bad", "code", "named"),
    [
        (HOLDERS, {"weight": 1.0}, {"weight": 2.0}, *WEIGHT_ABOVE),
        (HOLDERS, {"weight": 0.0}, {"weight": 2.0**53}, *WEIGHT_ABOVE),
        (HOLDERS, {"weight": 1.0}, {"weight": 1.0, "named": {WEIGHT: 1.5}}, *WEIGHT_ABOVE),
        (STALE, {"fill": 1.0}, {"fill": 2.0}, "BOUNDS", "deltas/presence holds a value above 1"),
        (STALE, {"fill": 1.0}, {"fill": -2.0}, "BOUNDS", "deltas/presence holds a value below -1"),
        (STATISTICS, {}, {"named": NEGATIVE}, "BOUNDS", "norm1.running_var holds"),
        (STATISTICS, {}, {"fill": -1.0}, "BOUNDS", "running_var holds a value below 0"),
    ],
    indirect=["world"],
)
async def test_a_value_beyond_the_bounds_of_the_schema_is_refused_and_the_others_go_on(
    serving, good, bad, code, named
):
    """One silo cannot stand for three holders of a class, nor make every model's output NaN."""
    async with serving() as (north, east, south):
        await refused(north.contribute(wary=True, **bad), code, named)
        assert serving.state().failed == {"north": code}
        for silo in (east, south):
            await silo.contribute(**good)
        assert (await north.told("round")).round == 1
        part = next(part for part in serving.run().job.down(1) if part.name in {"header", "model"})
        delivered = await tensors_of(east, part)
        if "status" in delivered:
            # nothing is published with two holders of three
            assert 2 not in delivered["status"]
        for name, value in delivered.items():
            assert value.isfinite().all()
            assert not name.endswith("running_var") or (value >= 0).all()


async def tensors_of(silo, part):
    """The tensors of the one part that a silo is delivered, by name."""
    buffer, offset, found = bytearray(await silo.delivered(1)), 0, {}
    for spec in part.tensors:
        found[spec.name] = tensor_from(buffer, spec, offset)
        offset += spec.nbytes
    assert offset == len(buffer)
    return found


@pytest.mark.parametrize("seq", [2**53, 2**63, 2**64 - 1])
async def test_a_place_in_a_ledger_that_no_ledger_has_is_refused(serving, seq):
    async with serving() as (north, east, south):
        await refused(north.contribute(seq=seq, wary=True), "MANIFEST", "ledger")
        await go_on(east, south)


@pytest.mark.parametrize("size", [1, 1000])
async def test_small_chunks_are_refused_at_the_first(serving, size):
    async with serving() as (north, east, south):
        call = north.stub.Upload(timeout=SECONDS)
        # the coordinator does not wait for a third
        for frame in frames_of(north, size=size)[:2]:
            await call.write(frame)
        await refused(call, "LENGTH", f"a chunk of {size} bytes")
        await go_on(east, south)


async def test_odd_numbers_in_messages_are_refused_or_change_nothing(serving, world):
    async with serving() as (north, east, south):
        long = tensor.Frame(end=tensor.End(ledger_leaf=b"x" * 3_000_000))
        await refused(north.upload([*frames_of(north, 0)[:-1], long], wary=True), "DIGEST")
        frames = frames_of(east)
        frames[0].manifest.round = 2**32 - 1
        await refused(east.upload(frames, wary=True), "ROUND_CLOSED")
        frames = frames_of(east)
        frames[0].manifest.job_digest = b"12345"
        await refused(east.upload(frames, wary=True), "UNKNOWN_JOB")
        before = serving.state()
        await east.answer("FAILED", 2**32 - 1, 77777)
        await east.answer("ACCEPT", 2**32 - 1)
        await east.answer("DECLINE")
        await refused(east.delivered(2**32 - 1), "ROUND_CLOSED")
        assert serving.state() == before
        await go_on(east, south)


# Floods.


def frame(kind, flags, stream, body=b""):
    """RFC 9113, section 4.1."""
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def fields(path):
    """The header of a call, as literals that nobody need remember (RFC 7541, section 6.2.2)."""
    pairs = {":method": "POST", ":scheme": "https", ":path": path, ":authority": "x"}
    pairs |= {"te": "trailers", "content-type": "application/grpc"}
    literal = lambda text: bytes([len(text)]) + text.encode()
    return b"".join(b"\0" + literal(name) + literal(value) for name, value in pairs.items())


async def test_calls_that_are_opened_and_reset_count_as_calls(serving, world, monkeypatch):
    """Before: none of them counted, whatever their number, since none had brought a request."""
    monkeypatch.setattr(limits, "CALLS_PER_SECOND", 0)  # a bucket holds what it holds at first
    begun, real = asyncio.Queue(), guard.Guard.intercept_service

    async def noted(self, continuation, details):
        handler = await real(self, continuation, details)
        begun.put_nowait(details.method)
        return handler

    async def flood():
        tls = ssl.create_default_context(cadata=world.roster.coordinator.certificate)
        tls.load_cert_chain(
            world.folder / "north/keys/tls.crt", world.folder / "north/keys/tls.key"
        )
        tls.set_alpn_protocols(["h2"])
        host, _, port = serving.address().rpartition(":")
        reader, writer = await asyncio.open_connection(
            host, port, ssl=tls, server_hostname="coordinator.staddle"
        )
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0))
        await reader.readexactly(9)
        writer.write(frame(4, 1, 0))  # their settings are taken
        for stream in range(1, 2 * int(limits.BURST), 2):
            writer.write(frame(1, 4, stream, fields(SECURE_NEXT)))
            async with asyncio.timeout(SECONDS):
                assert await begun.get() == SECURE_NEXT
            writer.write(frame(3, 0, stream, struct.pack(">I", 8)))  # RST_STREAM, CANCEL
        writer.close()

    async with serving() as (north, east, south):
        with monkeypatch.context() as patch:
            patch.setattr(guard.Guard, "intercept_service", noted)
            await flood()
        await refused(north.poll(), "LIMIT", "calls per second")
        for silo in (east, south):
            await silo.contribute()
        async with asyncio.timeout(SECONDS):
            while serving.limits().running:  # noqa: ASYNC110 a plain counter has no event
                await asyncio.sleep(0.01)


async def test_a_call_that_ends_without_its_request_is_refused(serving):
    async with serving() as (north, *_):
        call = north.channel.stream_unary(SECURE_NEXT)(timeout=SECONDS)
        await call.done_writing()
        await refused(call, "MANIFEST", "ended the call before its request arrived")


# Folds.


def breaking(monkeypatch, *errors):
    """The next folds raise these, then they work; the rounds that were asked for."""
    real, left, asked = daemons.JobRun.fold, list(errors), []

    def fold(self, round_, members):
        asked.append((round_, members))
        if left:
            raise left.pop(0)
        return real(self, round_, members)

    monkeypatch.setattr(daemons.JobRun, "fold", fold)
    return asked


FATAL = (ValueError, KeyError, safetensors.SafetensorError, MemoryError, RuntimeError)


@pytest.mark.parametrize("error", FATAL)
@pytest.mark.control
async def test_a_fold_that_breaks_ends_the_job_with_a_reason(serving, monkeypatch, error):
    asked = breaking(monkeypatch, error("odd"))
    async with serving() as callers:
        for silo in callers:
            await silo.contribute()
        for silo in callers:
            assert not (await silo.told("finish")).completed
            await silo.answer("DONE")
        state = serving.state()
        assert (state.stage, state.outcome) == ("ended", "failed")
        assert "round 0 could not be folded" in state.reason
        assert error.__name__ in state.reason
    assert asked == [(0, SILOS)]


@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.control
async def test_a_fold_without_files_or_disk_is_tried_again(serving, monkeypatch, failures):
    errors = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ENOSPC, "No space left")]
    monkeypatch.setattr(daemons, "FOLD_WAITS", (0.05, 0.05, 0.05))
    asked = breaking(monkeypatch, *errors[:failures])
    async with serving() as callers:
        for silo in callers:
            await silo.contribute(fill=0.25)
        assert [(await silo.told("round")).round for silo in callers] == [1, 1, 1]
        values = await values_of(callers[0], 1)
        assert set(values.tolist()) == {0.25}
    assert asked == [(0, SILOS)] * (failures + 1)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device;"),
        (OSError("odd"), "folded: OSError;"),
    ],
)
@pytest.mark.control
async def test_a_disk_that_stays_full_ends_the_job(serving, monkeypatch, error, said):
    monkeypatch.setattr(daemons, "FOLD_WAITS", (0.02, 0.02))
    asked = breaking(monkeypatch, *[error] * 9)
    async with serving() as callers:
        for silo in callers:
            await silo.contribute()
        assert not (await callers[0].told("finish")).completed
        assert said in serving.state().reason
    assert len(asked) == 3


@pytest.mark.parametrize("failures", [0, 1, 9])
@pytest.mark.control
async def test_the_result_is_kept_before_the_end_is_told_and_a_full_disk_is_waited_for(
    serving, monkeypatch, failures
):
    monkeypatch.setattr(daemons, "FOLD_WAITS", (0.02, 0.02))
    asked, kept = breaking(monkeypatch), []

    def keep(self, state, silos):
        kept.append((serving.state().stage, dict(state), silos))
        if len(kept) <= failures:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(job_run.JobStore, "keep_result", keep)
    async with serving() as callers:
        for round_ in range(3):
            for silo in callers:
                assert (await silo.told("round")).round == round_
                await silo.contribute(round_)
        assert (await callers[0].told("finish")).completed == (failures < 3)
    assert kept == [("folding", {}, SILOS)] * min(failures + 1, 3)
    assert asked == [(0, SILOS), (1, SILOS), *[(2, SILOS)] * len(kept)]


# Deliveries.


async def test_a_delivery_that_nobody_reads_ends_by_its_deadline(serving, monkeypatch):
    """Frames are made larger than any window of the connection, so that the stream stalls."""

    def padded(values):
        del values
        yield from (ChunkFrame.of([bytes(1024 * 1024)]) for _ in range(64))

    async with serving() as (north, east, south):
        for silo in (north, east, south):
            await silo.contribute()
        assert (await north.told("round")).round == 1
        monkeypatch.setattr(service, "transfer_seconds", lambda _: 1.0)
        with monkeypatch.context() as patched:
            patched.setattr(service, "chunks", padded)
            patched.setattr(service, "Digester", lambda *_: SimpleNamespace(update=lambda _: None))
            call = north.fetch(1)
            assert (await call.read()).WhichOneof("body") == "manifest"
            await refused(north.delivered(1), "LIMIT", "running already")
            await asyncio.sleep(1.5)
        assert len(await north.delivered(1)) > 0  # its place is free again
        call.cancel()
        for silo in (north, east, south):
            await silo.contribute(1)
        assert (await east.told("round")).round == 2


@pytest.mark.control
async def test_a_fetch_during_a_publication_leaves_no_old_value_behind(serving, monkeypatch):
    """A delivery of round 1 is being read while round 1 is folded.

    Round 2 delivers the new value to everybody.
    """
    reading, go_on = threading.Event(), threading.Event()
    real = tensor_file.load_file

    def slow(path):
        monkeypatch.setattr(tensor_file, "load_file", real)
        loaded = real(path)
        reading.set()
        go_on.wait(SECONDS)
        return loaded

    async with serving() as (north, east, south):
        for silo in (north, east, south):
            await silo.contribute(fill=0.25)
        await north.told("round")
        monkeypatch.setattr(tensor_file, "load_file", slow)
        old = asyncio.create_task(north.delivered(1))
        assert await asyncio.to_thread(reading.wait, SECONDS)
        for silo in (east, south):
            await silo.contribute(1, fill=0.75)
        await north.answer("FAILED", 1)
        await asyncio.sleep(0.3)  # the fold is at its publication, or past it
        go_on.set()
        assert set(torch.frombuffer(bytearray(await old), dtype=torch.float32).tolist()) == {0.25}
        for silo in (north, east, south):
            assert (await silo.told("round")).round == 2
            values = await values_of(silo, 2)
            assert set(values.tolist()) == {0.75}


@pytest.mark.parametrize("named", ["correct.delivered", "correct.trained", "tested"])
async def test_a_negative_count_is_refused(serving, named):
    """It would take from the sums of the others."""
    async with serving() as (north, east, south):
        await refused(
            north.contribute(named={named: -1}, wary=True),
            "BOUNDS",
            f"metrics/{named} holds a value",
        )
        await go_on(east, south)
