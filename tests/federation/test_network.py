"""Bad lines between silos and coordinator: real TLS through a proxy that cuts, stalls, delays,
throttles, reorders.
"""

import asyncio
import contextlib
import json
import time

import grpc
import pytest
import torch
from federation.proxy import Proxy
from support.ledgers import write_start

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import upload_items
from staddle.bundle import measuring
from staddle.commands.federation import local_federation
from staddle.coordinator import config as coordinator_configs
from staddle.coordinator import daemon as daemons
from staddle.coordinator import server
from staddle.proto import channel
from staddle.proto.channel import OPTIONS, SERVER_OPTIONS
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys
from staddle.security.ledger import audit
from staddle.security.ledger import messages as ledger_view
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.policy import policy as policies
from staddle.silo import agent as agents
from staddle.silo import config as silo_configs
from staddle.silo import plain_rounds
from staddle.silo.agent import Agent
from staddle.silo.egress import client as clients
from staddle.silo.egress.gate import Gate
from staddle.silo.egress.session import open_client
from staddle.silo.egress.witness import HEADS, Witness
from staddle.silo.session import Exit

SILOS = ("north", "east")
MIB = 1024 * 1024
SECONDS = 40
BIG = {"name": "ppfl-mlp", "classes": 10, "input": [1, 128, 128]}  # about 8 MB


def records(seed):
    rng = torch.Generator().manual_seed(seed)
    return Dataset(
        torch.randn(40, 1, 128, 128, generator=rng), torch.randint(0, 10, (40,), generator=rng)
    )


class Network:
    """Silos as agents of this process, each behind a line of its own.

    ``events`` is what everybody logged.
    """

    def __init__(self, running, events, silos=SILOS):
        self.running = running
        self.events = events
        self.silos = silos
        self.lines = {}
        self.agents = {}
        self.run = None

    @property
    def job(self):
        return self.running.jobs[0]

    @property
    def size(self):
        """Payload bytes of a round."""
        return sum(item.spec.nbytes for item in upload_items(self.job.up(0)))

    def ledger(self, silo):
        return self.running.federation.state(silo) / "ledger"

    def messages(self, silo):
        return ledger_view.messages(self.ledger(silo))

    async def silo(self, silo):
        """One agent until it is stopped."""
        config = silo_configs.load(self.running.federation.silo_config(silo))
        keys, roster, policy = (
            load_keys(config.keys),
            rosters.load(config.roster),
            policies.load(config.policy),
        )
        with Ledger.open(self.ledger(silo), silo, roster.federation, keys.log) as ledger:
            write_start(ledger, "test", rosters.digest(roster), policy.digest)
            witness = Witness(ledger, roster, keys, config.directory / HEADS)
            gate = Gate(
                open_client(config.coordinator, keys, roster), ledger, policy, roster, witness
            )
            self.agents[silo] = Agent(config, silo, roster, policy, gate, keys, pytest.fail)
            assert await self.agents[silo].run() == Exit("")

    @contextlib.asynccontextmanager
    async def open(self):
        """Coordinator and lines."""
        config = coordinator_configs.load(self.running.federation.coordinator_config)
        async with server.running(config) as address, contextlib.AsyncExitStack() as stack:
            for silo in self.silos:
                self.lines[silo] = await stack.enter_async_context(Proxy(address))
                self.running.address = self.lines[silo].address
                self.running.write_silo(silo)
            yield self.lines

    async def finish(self):
        """Run the agents until the job has ended; every ledger holds, nothing is unsettled."""
        tasks = {silo: asyncio.create_task(self.silo(silo)) for silo in self.silos}
        await self.until("job.finished", len(self.silos))
        for silo, task in tasks.items():
            self.agents[silo].stop()
            await task
            found = audit.verify(self.ledger(silo))
            assert found.ok, found.problems
            assert found.open_intents == ()

    def same_as_simulated(self):
        expected = simulate(self.job, self.running.shards(self.silos))
        self.running.check_models(self.job, expected, self.silos)

    async def until(self, event, times=1, **fields):
        ends = time.monotonic() + SECONDS
        while len(self.named(event, **fields)) < times:
            lines = {silo: (line.bytes, line.came) for silo, line in self.lines.items()}
            assert time.monotonic() < ends, f"no {event}: {lines}, {self.events}"
            await asyncio.sleep(0.02)  # events come from threads too

    def named(self, event, **fields):
        return [e for e in self.events if e["event"] == event and fields.items() <= e.items()]


def impatient(monkeypatch):
    """Pauses of moments only, and few resamples; what everybody logs from now on."""
    events = []

    def note(event, **fields):
        events.append(
            {"event": event, "at": time.monotonic(), **json.loads(json.dumps(fields, default=str))}
        )

    for module in (agents, daemons):
        monkeypatch.setattr(module.log, "event", note)
        monkeypatch.setattr(module.log, "problem", note)
    monkeypatch.setattr(agents, "FIRST_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(agents, "LONGEST_WAIT_SECONDS", 0.5)
    monkeypatch.setattr(agents, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(plain_rounds, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(clients, "RECONNECT_MS", (50, 200))
    monkeypatch.setattr(measuring, "RESAMPLES", measuring.FEWEST_RESAMPLES)
    return events


@pytest.fixture
def network(start, document, monkeypatch):
    events = impatient(monkeypatch)

    def make(**timing):
        running = start(*SILOS)
        running.data = {silo: records(number) for number, silo in enumerate(SILOS)}
        table = document("net", SILOS, rounds=2)
        running.job({**table, "model": BIG})
        timing = {"admission_seconds": 60, "beat_seconds": 2, "hold_seconds": 2, **timing}
        local_federation.write_coordinator(running.federation, ["net"], timing)
        return Network(running, events)

    return make


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_an_upload_that_is_cut_goes_on_where_it_broke(network, reset):
    """Cut four times in two rounds.

    Little crosses twice, each byte of it under an intent that declares it.
    """
    net = network()
    async with net.open() as lines:
        lines["north"].rate = 48 * MIB
        for place in (2.3, 4.6, 6.9, 10.2):
            lines["north"].when("up", int(place * MIB), lambda: lines["north"].cut(reset=reset))
        await net.finish()
    wire, payload = net.lines["north"].bytes["up"], 2 * net.size
    sent = [message for message in net.messages("north") if message.status == "sent"]
    going_on = [message for message in net.messages("north") if message.intent.offset]
    assert net.lines["north"].came >= 5
    assert len(going_on) >= 3
    assert all(message.intent.offset % MIB == 0 for message in going_on)
    assert [message.intent.round for message in sent] == [0, 1]
    assert wire < 1.3 * payload, wire / payload
    assert sum(message.intent.message.bytes for message in net.messages("north")) >= payload
    assert (
        len(net.named("upload.settled", job="net", outcome="unknown"))
        == len(net.messages("north")) - 2
    )
    assert not net.named("silo.dropped")
    net.same_as_simulated()


async def test_a_receipt_that_was_lost_is_settled(network, monkeypatch):
    """The line is cut after the coordinator has taken the upload, before its receipt is through."""
    net, real, lost = network(), daemons.Daemon.conclude, []

    def conclude(self, run, silo, upload, *args):
        receipt = real(self, run, silo, upload, *args)
        if silo == "north":
            lost.append((upload.round, receipt.signature.hex()))
            net.lines["north"].cut()
        return receipt

    monkeypatch.setattr(daemons.Daemon, "conclude", conclude)
    async with net.open():
        await net.finish()
    settled = [(e["round"], e["outcome"]) for e in net.named("upload.settled")]
    assert settled == [(0, "sent"), (1, "sent")]
    assert [(m.intent.round, m.status, m.receipt) for m in net.messages("north")] == [
        (r, "sent", s) for r, s in lost
    ]
    assert net.lines["north"].bytes["up"] < 1.1 * 2 * net.size  # it went once
    net.same_as_simulated()


async def test_a_line_that_stalls_is_noticed_and_its_round_ends(network, monkeypatch):
    """Nothing comes through and nothing is closed, as when a router dies.

    Times of keepalive are shortened.
    """
    short = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 2000}
    short["grpc.http2.ping_timeout_ms"] = 2000
    monkeypatch.setattr(channel, "OPTIONS", tuple({**dict(OPTIONS), **short}.items()))
    served = {**short, "grpc.http2.min_ping_interval_without_data_ms": 500}
    monkeypatch.setattr(server, "SERVER_OPTIONS", tuple({**dict(SERVER_OPTIONS), **served}.items()))
    net = network()
    async with net.open() as lines:
        north = lines["north"]
        north.rate = 48 * MIB
        before = []  # losses before it stalls: on a busy machine an answer may come too late

        def stall():
            before.extend(net.named("coordinator.lost"))
            net.events.append({"event": "stalled", "at": time.monotonic()})
            north.stall()

        north.when("up", int(3.2 * MIB), stall)
        running = asyncio.create_task(net.finish())
        await net.until("stalled")
        await net.until("coordinator.lost", len(before) + 1)
        (stalled,), lost = net.named("stalled"), net.named("coordinator.lost")[len(before)]
        assert lost["at"] - stalled["at"] < 15  # keepalive finds out after 3 s
        assert not net.named("silo.dropped")
        north.go_on()
        await running
    first = net.messages("north")[0]
    assert (first.intent.round, first.status) == (0, "unknown")
    assert any(message.intent.offset for message in net.messages("north"))
    assert {m.intent.round for m in net.messages("north") if m.status == "sent"} == {0, 1}
    net.same_as_simulated()


async def test_a_call_that_waits_behind_a_stalled_line_ends():
    """With nothing on its way, whose bytes the kernel would miss. All times are a tenth."""
    client, served = (
        {key: value // 10 if key.endswith("_ms") else value for key, value in options}
        for options in (OPTIONS, SERVER_OPTIONS)
    )
    waiting = asyncio.Event()

    async def wait(*_):
        waiting.set()
        await asyncio.Event().wait()

    coordinator = grpc.aio.server(options=[*served.items()])
    handlers = {"Wait": grpc.unary_unary_rpc_method_handler(wait)}
    coordinator.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x", handlers),))
    port = coordinator.add_insecure_port("127.0.0.1:0")
    await coordinator.start()
    async with (
        Proxy(f"127.0.0.1:{port}") as line,
        grpc.aio.insecure_channel(line.address, options=[*client.items()]) as channel,
    ):
        call = channel.unary_unary("/x/Wait")(b"")
        await waiting.wait()
        line.stall()
        async with asyncio.timeout(SECONDS):  # 6 s are enough; left to itself gRPC takes 63
            assert await call.code() == grpc.StatusCode.UNAVAILABLE
        line.go_on()
    await coordinator.stop(None)


async def test_a_silo_behind_a_stalled_line_is_dropped_by_its_missed_beats(network, monkeypatch):
    monkeypatch.setattr(daemons, "LOST_AFTER_BEATS", 3)
    net = network(beat_seconds=1, hold_seconds=1)
    async with net.open() as lines:
        lines["north"].when("up", int(1.2 * MIB), lines["north"].stall)
        running = [asyncio.create_task(net.silo(silo)) for silo in SILOS]
        await net.until("silo.dropped", silo="north", code="lost")
        for silo in SILOS:
            net.agents[silo].stop()
        lines["north"].go_on()
        await asyncio.gather(*running)
    spool = coordinator_configs.load(net.running.federation.coordinator_config).directory / "spool"
    assert spool.is_dir()
    assert not list(spool.iterdir())


async def test_a_throttled_silo_finishes_while_the_others_wait(network):
    net = network(beat_seconds=1)
    async with net.open() as lines:
        lines["north"].rate = 16 * MIB
        lines["north"].delay = 0.001
        await net.finish()
    assert not net.named("silo.dropped")
    assert [message.status for message in net.messages("north")] == ["sent", "sent"]
    net.same_as_simulated()


async def test_a_line_on_which_packets_take_long_is_connected_once(network):
    """The handshake takes longer than gRPC would wait between two attempts."""
    net = network()
    async with net.open() as lines:
        north = lines["north"]
        north.delay = 0.4  # RECONNECT_MS has 200 ms at most

        def soon():
            north.delay = 0.0

        north.when("down", 1, soon)
        await net.finish()
    assert lines["north"].came == 1
    assert not net.named("coordinator.lost")
    net.same_as_simulated()


def test_a_coordinator_that_refuses_is_not_hammered_and_late_connections_come_first(
    network, monkeypatch
):
    monkeypatch.setattr(agents, "FIRST_WAIT_SECONDS", 0.2)
    monkeypatch.setattr(agents, "LONGEST_WAIT_SECONDS", 5.0)
    monkeypatch.setattr(clients, "RECONNECT_MS", (200, 5000))
    net = network()

    async def scenario():
        async with net.open() as lines:
            north = lines["north"]
            north.refuse()
            running = asyncio.create_task(net.finish())
            await net.until("coordinator.lost", 2)
            await asyncio.sleep(2)
            refused = (north.came, len(net.named("coordinator.lost")))
            north.refuse(False)
            north.reverse(2)
            # comes first, is opened last
            probe = await asyncio.open_connection(*north.address.split(":"))
            await running
            probe[1].close()
            return refused

    refused = asyncio.run(scenario())
    assert all(2 <= count <= 8 for count in refused), refused
    net.same_as_simulated()
