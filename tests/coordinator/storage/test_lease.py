"""One coordinator per folder, whichever machine it is on, and what becomes of the one before."""

import asyncio
import contextlib
import json
import os

import grpc
import pytest
from support.signed_federation import job_document, raw_silos, signed_federation

from staddle.coordinator import server
from staddle.coordinator.storage import lease as leases
from staddle.coordinator.storage.database import Database
from staddle.coordinator.storage.lease import FILE, LeaseRecord, leased, vacant
from staddle.errors import LocalError
from staddle.security.ledger.ingress_ledger import ReceivingLedger
from staddle.security.ledger.records import StopRecord
from staddle.security.log.lock import locked

FAR = 10**15  # later than any clock of today


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.2)
    monkeypatch.setattr(leases, "LOOK_SECONDS", 0.01)


def record(folder):
    return LeaseRecord(**json.loads((folder / FILE).read_bytes()))


def elsewhere(folder, generation=7):
    """Another machine has this folder."""
    other = LeaseRecord(generation=generation, holder="ab" * 16, machine="another machine")
    (folder / FILE).write_bytes(other.encoded())


async def waited(folder, *, standby=False):
    stopped = asyncio.get_running_loop().create_future()
    await asyncio.wait_for(vacant(folder, stopped, standby=standby), 20)


async def test_generations_grow_over_restarts_and_over_a_clock_that_went_back(tmp_path):
    found = []
    for _ in range(3):
        await waited(tmp_path)
        with leased(tmp_path) as lease:
            lease.check()
            found.append(lease.generation)
            assert record(tmp_path).machine
        assert record(tmp_path).machine == ""
    assert found == sorted(set(found))
    elsewhere(tmp_path, FAR)
    with leased(tmp_path) as lease:
        assert lease.generation == FAR + 1


async def test_who_died_on_this_machine_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "LEASE_SECONDS", 1e9)
    with leased(tmp_path):
        left = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(left)  # as kill -9 leaves it
    await waited(tmp_path)


async def test_a_lease_of_another_machine_expires_once_it_stands_still(tmp_path, monkeypatch):
    elsewhere(tmp_path)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await waited(tmp_path)
    assert loop.time() - began >= 0.2


@pytest.mark.parametrize("standby", [False, True])
async def test_a_lease_that_is_renewed_elsewhere_is_not_taken(tmp_path, monkeypatch, standby):
    monkeypatch.setattr(leases, "LEASE_SECONDS", 1e9)
    elsewhere(tmp_path)
    waiting = asyncio.create_task(waited(tmp_path, standby=standby))
    renewals = 0
    while not waiting.done() and renewals < 5:
        renewals += 1
        os.utime(tmp_path / FILE, ns=(renewals, renewals))
        await asyncio.wait({waiting}, timeout=0.1)
    if standby:
        assert not waiting.done()
        # It stops in order, and leaves the lease to whoever waits.
        (tmp_path / FILE).write_bytes(LeaseRecord(generation=7).encoded())
        await waiting
    else:
        with pytest.raises(LocalError, match="a coordinator on another machine serves from this"):
            await waiting


async def test_a_standby_waits_for_the_lock_and_any_other_is_refused(tmp_path):
    with locked(tmp_path):
        waiting = asyncio.create_task(waited(tmp_path, standby=True))
        await waited(tmp_path)  # returns: taking the lock says what is wrong
        with pytest.raises(LocalError, match="another process runs"), leased(tmp_path):
            pass
        assert not waiting.done()
    await waiting


async def test_a_standby_that_is_asked_to_stop_does(tmp_path):
    stopped = asyncio.get_running_loop().create_future()
    with locked(tmp_path):
        waiting = asyncio.create_task(vacant(tmp_path, stopped, standby=True))
        await asyncio.sleep(0)
        stopped.set_result("")
        await asyncio.wait_for(waiting, 20)


async def test_whoever_lost_its_lease_writes_neither_rows_nor_records(tmp_path):
    world = signed_federation(tmp_path, ("a", "b"), job_document(("a", "b")))
    keys = server.owner(world.config).keys
    with (
        leased(tmp_path) as lease,
        contextlib.closing(Database(tmp_path / "c.sqlite", fence=lease.check)) as database,
    ):
        ledger = ReceivingLedger.open(
            tmp_path / "ledger", "coordinator", "local", keys.log, None, lease.check
        )
        ledger.append(StopRecord(reason="before"))
        elsewhere(tmp_path)
        files = {path: path.read_bytes() for path in (tmp_path / "ledger").iterdir()}
        with (
            pytest.raises(LocalError, match="has taken this folder over"),
            database.transaction(),
        ):
            database.drop_job("none")
        for write in (lambda: ledger.append(StopRecord(reason="after")), ledger.close):
            with pytest.raises(LocalError, match="has taken this folder over"):
                write()
        assert files == {path: path.read_bytes() for path in (tmp_path / "ledger").iterdir()}
    assert record(tmp_path).holder == "ab" * 16


async def loses_its_lease(world):
    async with server.running(world.config) as address, raw_silos(address, world) as callers:
        for caller in callers:
            await caller.told("round")
        stored = record(world.config.directory)
        assert (await callers[0].hello()).generation == stored.generation
        elsewhere(world.config.directory)
        with pytest.raises(grpc.aio.AioRpcError):
            await callers[0].contribute()


async def test_a_coordinator_that_lost_its_lease_stops_and_takes_nothing_more(
    tmp_path, monkeypatch
):
    """Its renewals stand still: the next upload finds out."""
    monkeypatch.setattr(leases, "RENEW_SECONDS", 1e9)
    world = signed_federation(tmp_path, ("a", "b"), job_document(("a", "b")))
    loop, broken = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: broken.append(str(context["exception"])))
    with pytest.raises(LocalError, match="has taken this folder over"):
        await loses_its_lease(world)
    assert "has taken this folder over" in broken[0]


async def test_a_coordinator_that_is_idle_notices_at_its_next_renewal(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.01)
    with leased(tmp_path) as lease:
        before = (tmp_path / FILE).stat().st_mtime_ns
        renewing = asyncio.create_task(lease.renew())
        while (tmp_path / FILE).stat().st_mtime_ns == before:
            await asyncio.wait({renewing}, timeout=0.01)
        elsewhere(tmp_path)
        with pytest.raises(LocalError, match="has taken this folder over"):
            await asyncio.wait_for(renewing, 20)
