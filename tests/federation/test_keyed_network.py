"""Lines that are cut in the middle of what a keyed job gives and gets: it goes on where it
broke.
"""

import asyncio
import json
from collections import Counter

import pytest
from federation.keyed import SECURITY, check_ledgers, check_result, even
from federation.test_network import Network, impatient

from staddle.commands.federation import local_federation
from staddle.coordinator.blind import mixing
from staddle.coordinator.jobs.blind_collector import BlindCollector
from staddle.coordinator.rpc import uploads
from staddle.proto import stream
from staddle.proto.frames import ChunkFrame
from staddle.silo.blind import group_keys
from staddle.silo.blind import round as blind
from staddle.silo.egress.gate import Gate

SILOS = ("north", "east", "south", "west")
TIMING = {"admission_seconds": 60, "beat_seconds": 5, "hold_seconds": 2}
CHUNK = 1024  # bytes, so that small parts have several
PADDED = 43264  # bytes of an extractor's words


@pytest.fixture
def network(start, document, monkeypatch):
    events = impatient(monkeypatch)
    monkeypatch.setattr(blind, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(group_keys, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(stream, "CHUNK_BYTES", CHUNK)
    for cut in (stream.chunks, stream.recut):
        monkeypatch.setattr(cut, "__defaults__", (CHUNK,))
    running = start(*SILOS)
    even(running, SILOS)
    changes = {"options": {"rho": 0.34}, "rounds": 3, "min_cohort": 3, "security": SECURITY}
    running.job(document("job", SILOS, "pfedsim", **changes))  # one round of means, two of rows
    local_federation.write_coordinator(running.federation, ["job"], TIMING)
    return Network(running, events, SILOS)


def finish(net):
    """Run the job to its end; nobody was dropped, and all have what the oracle computes."""

    async def scenario():
        async with net.open():
            await net.finish()

    asyncio.run(scenario())
    assert not net.named("silo.dropped")
    assert not net.named("sum.failed")
    members = check_result(net.running, net.job, SILOS)
    assert members == dict.fromkeys(range(3), SILOS)
    check_ledgers(net.running, SILOS)


def uploads_of(net):
    return [
        (message.intent.form, message.intent.round, message) for message in net.messages("north")
    ]


def test_masked_padded_and_rotated_uploads_that_are_cut_go_on_where_they_broke(
    network, monkeypatch
):
    places = {("masked", 0), ("padded", 1), ("rotated", 1), ("padded", 2)}
    came, write, frames = Counter(), uploads.Arriving.write, Gate._frames

    def written(arriving, chunk):
        write(arriving, chunk)
        came[arriving.spool._path.name[:6], arriving.name, arriving.round] += len(chunk)

    async def interrupted(gate, intent, manifest, outgoing, sent):
        place = (outgoing.form, manifest.round)
        async for frame in frames(gate, intent, manifest, outgoing, sent):
            yield frame
            here = "north.", manifest.part, manifest.round
            if (
                isinstance(frame, ChunkFrame)
                and sent.size == 2 * CHUNK
                and gate._ledger.silo == "north"
                and place in places
            ):
                places.remove(place)
                async with asyncio.timeout(10):
                    while came[here] < 2 * CHUNK:  # noqa: ASYNC110 the coordinator has no event for it
                        await asyncio.sleep(0.01)
                network.lines["north"].cut(reset=True)

    monkeypatch.setattr(uploads.Arriving, "write", written)
    monkeypatch.setattr(Gate, "_frames", interrupted)
    cuts = set(places)
    finish(network)
    assert places == set()
    found = uploads_of(network)
    going_on = {(form, round_): message for form, round_, message in found if message.intent.offset}
    assert going_on.keys() == cuts
    assert {message.intent.offset for message in going_on.values()} == {2 * CHUNK}
    for place, rest in going_on.items():
        first, second = [message for form, round_, message in found if (form, round_) == place]
        assert (first.status, second) == ("unknown", rest)
        assert rest.status == "sent"
        assert first.intent.hidden == rest.intent.hidden  # the same version, or use
    assert len(network.named("upload.settled", outcome="unknown")) == len(cuts)


def test_receipts_and_answers_that_were_lost_are_settled(network, monkeypatch):
    """The line is cut after the coordinator took a part, or the word on it, before its answer is
    through.
    """
    lost = []

    def cut(silo, place):
        if silo == "north" and place not in lost:
            lost.append(place)
            network.lines["north"].cut()

    take, signed = BlindCollector.take, BlindCollector.padded

    def taken(collector, silo, upload, *rest):
        take(collector, silo, upload, *rest)
        if upload.name:
            cut(silo, (upload.round, upload.name))

    def word(collector, silo, given, body):
        signed(collector, silo, given, body)
        cut(silo, (given.upload.version.round, "word"))

    monkeypatch.setattr(BlindCollector, "take", taken)
    monkeypatch.setattr(BlindCollector, "padded", word)
    finish(network)
    assert lost == [(round_, what) for round_ in (1, 2) for what in ("extractor", "word", "rows")]
    found = uploads_of(network)
    assert [(form, round_) for form, round_, _ in found] == [
        ("masked", 0),
        *((form, round_) for round_ in (1, 2) for form in ("padded", "rotated", "masked")),
    ]  # each went once
    assert {message.status for _, _, message in found} == {"sent"}
    assert len(network.named("upload.settled", outcome="sent")) == 4


def test_a_delivery_whose_rows_are_cut_is_taken_again(network, monkeypatch):
    """The very same rows are opened; those of a round that goes on, and those of the last."""
    words, cuts = mixing.Mixing.words, []

    def interrupted(made, planned):
        number = planned.row.shares[0].version.round
        if planned.row.recipient == "north" and number not in cuts:
            cuts.append(number)
            line = network.lines["north"]
            line.when("down", line.bytes["down"] + PADDED // 4, line.cut)
        yield from words(made, planned)

    monkeypatch.setattr(mixing.Mixing, "words", interrupted)
    finish(network)
    assert cuts == [1, 2]
    delivered = [event["round"] for event in network.named("delivered", silo="north")]
    assert delivered == [0, 1, 2, 3]
    folder = network.running.federation.state("north") / "jobs" / "job"
    memory = json.loads((folder / "mix-extractor.rows.json").read_text())
    assert memory["delivered"] == [memory["memory"]["last"]]
    assert network.lines["north"].came >= 3
