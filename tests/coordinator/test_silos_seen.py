"""Only silos that this coordinator process heard of count as there: real TLS, a fake clock."""

import asyncio
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from support.coordinator_thread import coordinator
from support.raw_silo import SECONDS, Caller
from support.signed_federation import job_document

from staddle.commands.federation import local_federation, operator_client
from staddle.commands.federation.jobs import status_fields
from staddle.coordinator import config as configs
from staddle.coordinator import daemon as daemons
from staddle.coordinator import live_status
from staddle.coordinator.gauges import gauges
from staddle.coordinator.live_status import SiloSeen
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys

SILOS = ("north", "east", "south")


@pytest.fixture
def world(tmp_path, monkeypatch):
    federation = local_federation.make(tmp_path / "federation", SILOS)
    job = local_federation.sign_job(federation, job_document(SILOS))
    local_federation.write_coordinator(federation, ["job"], {"beat_seconds": 1, "hold_seconds": 1})
    roster = rosters.load(federation.folder / "roster.json")
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(daemons, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return SimpleNamespace(
        federation=federation,
        clock=clock,
        config=configs.load(federation.coordinator_config),
        operator=lambda here: operator_client.connected(
            local_federation.write_operator(federation, here.address)
        ),
        caller=lambda here, silo: Caller(
            here.address, load_keys(federation.folder / silo / "keys"), roster, job
        ),
    )  # fmt: skip


async def until(condition):
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 the clock that is waited for is not asyncio's
            await asyncio.sleep(0.05)


def metric(here):
    """Silos that the metrics show as connected."""
    (found,) = [g for g in gauges(here.daemon, here.limits) if g.name == "silo_connected"]
    return {silo for (silo,), value in found.values.items() if value}


def test_after_a_restart_silos_count_once_they_are_heard_of(world):
    async def open_round():
        callers = [world.caller(here, silo) for silo in SILOS]
        for caller in callers:
            await caller.accept()
        for caller in callers:
            await caller.channel.close()

    async def back():
        caller = world.caller(here, "north")
        await caller.hello(software="staddle 9", clock=int(time.time()) + 3600)
        await caller.channel.close()

    async def hostile():
        caller = world.caller(here, "south")
        await caller.hello(software="<script>", clock=2**64 - 1)
        await caller.channel.close()

    def written():
        """What the file says, once it says of this moment which silos are here."""
        here.daemon.note_silos()
        return live_status.read(world.config.directory).silos

    with coordinator(world.config) as here:
        assert here.daemon.connected() == set()
        assert written() == dict.fromkeys(SILOS, SiloSeen(connected=False))
        here.run(open_round())
        assert here.daemon.connected() == metric(here) == set(SILOS)
        assert here.daemon.runs[0].state.stage == "round"
        assert [each.connected for each in written().values()] == [True] * 3
        world.clock.now += 6.5
        assert here.daemon.connected() == set()
        assert [each.connected for each in written().values()] == [False] * 3
        assert all(each.seen for each in written().values())
    # Nobody is here without a coordinator.
    assert live_status.read(world.config.directory).silos == {}
    world.clock.now += 1000
    with coordinator(world.config) as here, world.operator(here) as operator:
        state = lambda: here.daemon.runs[0].state
        world.clock.now += 5.5
        here.run(asyncio.sleep(2.1))  # two looks of the watch
        assert here.daemon.connected() == metric(here) == set()
        # all have six beats to come back
        assert (state().stage, dict(state().failed)) == ("round", {})
        reports = operator.watch("job")
        assert status_fields(next(reports).status)["unheard"] == list(SILOS)
        here.run(back())
        assert status_fields(next(reports).status)["unheard"] == ["east", "south"]
        assert here.daemon.connected() == metric(here) == {"north"}
        north = written()["north"]
        assert (north.connected, north.software) == (True, "staddle 9")
        assert 3600 - SECONDS - 1 <= north.ahead <= 3601
        world.clock.now += 1.0
        here.run(until(lambda: state().failed.keys() == {"east", "south"}))
        assert dict(state().failed) == {"east": "lost", "south": "lost"}
        assert here.daemon.connected() == {"north"}
        here.run(hostile())
        south = written()["south"]
        assert (south.software, south.ahead) == ("", live_status.FARTHEST)
        operator.stop("job")
        # a job that waits awaits nobody
        assert status_fields(operator.show("job").status)["unheard"] == []


def test_a_silo_lost_before_a_round_opens_is_not_awaited(
    world,
):
    """Beats of five minutes: nothing but the opening of a round can drop a silo here."""

    async def scenario():
        north, east, south = (world.caller(here, silo) for silo in SILOS)
        for caller in (north, east, south):
            await caller.accept()
        await south.contribute()
        await north.contribute()
        waiting = asyncio.create_task(north.told("round"))
        await until(lambda: here.daemon._waiting["north"])
        world.clock.now += 6 * 300 + 1
        await east.contribute()
        assert ((await waiting).round, (await east.told("round")).round) == (1, 1)
        assert dict(state().failed) == {"south": "lost"}
        await south.hello()  # back, too late for this round
        for caller in (north, east):
            await caller.contribute(1)
        asked = await asyncio.gather(*(caller.told("round") for caller in (north, east, south)))
        assert [each.round for each in asked] == [2, 2, 2]
        for caller in (north, east, south):
            await caller.channel.close()

    slow = world.config.timing.model_copy(update={"beat_seconds": 300, "hold_seconds": 300})
    with coordinator(world.config.model_copy(update={"timing": slow})) as here:
        state = lambda: here.daemon.runs[0].state
        here.run(scenario())


def test_an_upload_wakes_no_other_silo_and_writes_no_state_or_roster(world, monkeypatch):
    """What one silo costs must not grow with the number of the others."""
    looked, saved, digests = Counter(), [], []

    def counted(owner, name, note):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            note(*args)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    async def scenario():
        north, east, south = (world.caller(here, silo) for silo in SILOS)
        for caller in (north, east, south):
            await caller.accept()
        await north.contribute()
        waiting = asyncio.create_task(north.told("round"))
        await until(lambda: here.daemon._waiting["north"])
        counted(daemons.Daemon, "tasks_for", lambda _, silo: looked.update([silo]))
        counted(daemons.Database, "save_state", lambda _, state: saved.append(state.stage))
        counted(rosters, "digest", digests.append)
        await east.contribute()
        await east.standing()  # whoever was woken has looked
        assert (looked["north"], saved) == (0, [])
        await south.contribute()
        assert (await waiting).round == 1
        assert (looked["north"], saved) == (1, ["folding", "drawing", "round"])
        assert digests == []
        for caller in (north, east, south):
            await caller.channel.close()

    slow = world.config.timing.model_copy(update={"beat_seconds": 300, "hold_seconds": 300})
    with coordinator(world.config.model_copy(update={"timing": slow})) as here:
        here.run(scenario())


def test_a_job_lets_the_next_one_run_while_a_silo_is_away_or_does_not_answer(world):
    """The second job is of two silos that are there."""
    document = job_document(SILOS[:2], name="second", min_cohort=2)
    local_federation.sign_job(world.federation, document)

    async def accepted(silos, name):
        for silo in silos:
            caller = world.caller(here, silo)
            caller.job = here.daemon.run_of(name).job
            await caller.hello()
            await caller.told("offer")
            await caller.answer("ACCEPT")
            await caller.channel.close()

    def stages():
        return [run.state.stage for run in here.daemon.runs]

    with coordinator(world.config) as here, world.operator(here) as operator:
        here.run(accepted(SILOS[:2], "job"))
        operator.submit((world.federation.folder / "jobs" / "second.json").read_bytes())
        assert stages() == ["admitting", "queued"]
        # South is away for six beats, the other two are heard of.
        world.clock.now += 6.5
        here.run(until(lambda: stages() == ["admitting", "admitting"]))
        here.run(accepted(SILOS[:2], "second"))
        assert stages() == ["admitting", "round"]
        # Once it is back the first has its turn after the second.
        here.run(accepted(SILOS[2:], "job"))
        assert stages() == ["queued", "round"]
        operator.stop("second")
        assert stages() == ["round", "stopped"]


def test_a_silo_that_is_there_and_does_not_answer_holds_up_the_queue_for_some_beats(
    world, monkeypatch
):
    monkeypatch.setattr(daemons, "ANSWER_BEATS", 0)
    local_federation.sign_job(world.federation, job_document(SILOS, name="second"))
    with coordinator(world.config) as here, world.operator(here) as operator:
        operator.submit((world.federation.folder / "jobs" / "second.json").read_bytes())
        here.run(until(lambda: here.daemon.run_of("second").state.stage == "admitting"))
        assert here.daemon.runs[0].state.aside
