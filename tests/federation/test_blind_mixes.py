"""Rounds that mix and compare blind, over real TLS: a coordinator, and silos of raw calls with the
pure core.
"""

import json
import sqlite3
from contextlib import closing

import grpc
import pytest
import torch
from federation.keyed import made_up
from support.coordinator_thread import coordinator
from support.raw_mixing_silo import KEY, MixSilo, in_turn
from support.signed_federation import pfedsim, signed_federation

from staddle.algorithms.engines.aggregation import MemoryArchive, close_round, deliver
from staddle.algorithms.exchange.delivery import KEEP
from staddle.algorithms.exchange.parts import DTYPES, Mix
from staddle.coordinator.rounds.events import RoundDeadline, Unkeyed
from staddle.coordinator.storage import table_seals
from staddle.files.documents import parse_canonical
from staddle.security.blind.mix_row import RecipientRow
from staddle.security.blind.plan import JobPlan, simulated, uploaded
from staddle.silo.ingress.mix_rows import expected_rows

FOUR = ("north", "east", "south", "west")
SIX = (*FOUR, "up", "down")
CLOSED, INVALID = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
def world(tmp_path):
    def build(method="pfedsim", options=None, silos=FOUR, **changes):
        method = {"name": method, "options": options or {"rho": 0.0}}
        document = pfedsim(silos, method=method, **changes)
        world = signed_federation(tmp_path, silos, document, beat_seconds=60)
        job = world.job
        assert job.keyed
        world.contributions = made_up(job, 60.0)
        world.folder = world.config.directory / "jobs" / "job"
        world.silo = lambda here, name: MixSilo(
            here.address, world.keys[name], world.roster, job, world.contributions(name)
        )
        return world

    return build


def rows_of(world, table="hidden"):
    with closing(sqlite3.connect(world.config.directory / "coordinator.sqlite")) as database:
        return database.execute(f"SELECT * FROM {table}").fetchall()


class Oracle:
    """The same job in one process."""

    def __init__(self, world):
        self.world, self.method, self.exchanges = (
            world,
            world.job.method(),
            simulated(world.job, KEY),
        )
        self.archive, self.state = MemoryArchive(), world.job.method().begin()

    def down(self, round_, silo):
        return deliver(self.method, self.exchanges, self.state, round_, silo, self.archive)

    def close(self, round_, members):
        read = lambda part, silo, name: self.world.contributions(silo)(round_)[part][name]
        up = self.world.job.up(round_)
        self.state, _ = close_round(
            self.method, self.exchanges, self.state, round_, members, up, read, self.archive
        )


def part_of(job, name):
    return next(
        p
        for n in range(job.length)
        for p in job.up(n)
        if p.name == name and isinstance(p.exchange, Mix)
    )


def as_mailed(part, found):
    """What a silo makes of the rows that were put aside for it: m ← keep·m + (1 − keep)·row, k ←
    keep·k.
    """
    mailed, kept = (
        {spec.name: torch.zeros(spec.shape, dtype=DTYPES[spec.dtype]) for spec in part.tensors},
        1.0,
    )
    for place, (_, values, keep) in enumerate(found):
        at = 0
        for spec in part.tensors:
            row = (
                torch.from_numpy(values[at : at + spec.elements])
                .reshape(spec.shape)
                .to(DTYPES[spec.dtype])
            )
            share = row.double() * (1 - keep)
            mailed[spec.name] = (share + (mailed[spec.name].double() * keep if place else 0)).to(
                DTYPES[spec.dtype]
            )
            at += spec.elements
        kept *= keep
    return {**mailed, KEEP.name: torch.tensor(kept, dtype=torch.float64)}


def check_rows(world, found, expected):
    """Bit for bit what the oracle delivers by Row."""
    mixed = {
        part: tensors for part, tensors in expected.items() if part in found or part == "extractor"
    }
    assert set(found) == set(mixed)
    for name, ((row, values, keep),) in found.items():
        part, whole, at = part_of(world.job, name), mixed[name], 0
        assert keep == 0
        assert row.own_weight > 0
        for spec in part.tensors:
            own = (
                torch.from_numpy(values[at : at + spec.elements])
                .reshape(spec.shape)
                .to(DTYPES[spec.dtype])
            )
            assert torch.equal(own, whole[spec.name])
            at += spec.elements


def check_prekeys(each, last):
    """Beside the last upload of each other silo that counted, whoever was away since, there is a
    prekey of its own.
    """
    assert {silo: word.version.round for (_, silo), word in each.prekeys.items()} == last
    for (part, _), word in each.prekeys.items():
        word.check(each.line(part_of(each.job, part)), each.silo, each.signers)
        assert word.prekey.generation == word.version.number + 1


async def check_mail(world, oracle, each, round_):
    """Bit for bit what the oracle delivers by Mail; of how many rows it is."""
    expected = oracle.down(round_, each.silo).get("theta")
    found = (await each.opened(round_)).get("theta", [])
    rounds = range(
        round_
        if round_ < world.job.length and expected_rows(JobPlan(world.job).round(round_))
        else 0
    )
    rounds = [n for n in rounds if uploaded(world.job.up(n))]
    check_prekeys(
        each, {other: n for n in rounds for other in set(world.job.cohort(n)) - {each.silo}}
    )
    assert bool(found) == (expected is not None)
    for name, value in as_mailed(part_of(world.job, "theta"), found).items() if found else ():
        assert torch.equal(value, expected[name])
    return len(found)


def test_extractors_are_mixed_and_classifiers_compared_as_in_the_oracle(world):
    world = world()
    oracle = Oracle(world)

    async def scenario():
        silos = [world.silo(here, name) for name in FOUR]
        for each in silos:
            await each.accept()
        for round_ in range(world.job.length + 1):
            for each in silos:
                await each.told("round" if round_ < world.job.length else "finish")
                expected = oracle.down(round_, each.silo)
                found = await each.opened(round_)
                check_rows(world, found, expected)
                last = round_ - 1 if 0 < round_ < world.job.length else None
                check_prekeys(
                    each, {other: last for other in FOUR if last is not None and other != each.silo}
                )
                assert bool(found) == (round_ > 0)
                again = await each.opened(round_)  # the same row is made again
                assert {part: rows[0][0] for part, rows in again.items()} == {
                    p: r[0][0] for p, r in found.items()
                }
            if round_ < world.job.length:
                await in_turn(silos, lambda each, round_=round_: each.take_part(round_))
                oracle.close(round_, FOUR)
                for each in silos:
                    each.counted(round_)
        for each in silos[1:]:
            await each.answer("DONE")
        (run,) = here.daemon.runs
        assert (
            len(rows_of(world))
            == len([*world.folder.glob("*.padded")]) - len(run.store._rubbish)
            == 4
        )
        here.daemon.apply(run, RoundDeadline("finishing", world.job.length))
        assert_nothing_is_padded(world)
        # who comes too late gets no row, and goes on with its own part
        await silos[0].told("finish")
        assert await silos[0].opened(world.job.length) == {}
        await silos[0].answer("DONE")
        for each in silos:
            await each.channel.close()

    with coordinator(world.config) as here:
        here.run(scenario(), 120)
        assert here.broken == []
    assert len(rows_of(world, "mixed")) == 4
    assert_nothing_is_padded(world)
    # As a coordinator left it that was killed meanwhile, or of the release before.
    name = f"{world.job.length - 1}.north.extractor.padded"
    (world.folder / name).write_bytes(bytes(8))
    with (
        closing(sqlite3.connect(world.config.directory / "coordinator.sqlite")) as database,
        database,
    ):
        table_seals.keep(database)
        fields = (
            "job",
            world.job.length - 1,
            "extractor",
            "north",
            b"\1" * 32,
            name,
            8,
            "02" * 32,
            b"",
        )
        database.execute("INSERT INTO hidden VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", fields)
        database.execute(
            "INSERT INTO files VALUES ('job', 'version', 'extractor', 'north', ?)", (name,)
        )
    with coordinator(world.config) as here:
        assert here.broken == []
    assert_nothing_is_padded(world)


def assert_nothing_is_padded(world):
    """The job has ended: the coordinator has deleted what silos gave to be mixed."""
    assert rows_of(world) == []
    assert {row[1] for row in rows_of(world, "files")} <= {"result", "words"}
    assert [
        path.name
        for path in world.folder.iterdir()
        if path.suffix in (".padded", ".rotated", ".rows")
    ] == []


def test_a_job_that_fails_leaves_nothing_of_what_was_given_to_be_mixed(world):
    world = world()

    async def scenario():
        silos = [world.silo(here, name) for name in FOUR]
        for each in silos:
            await each.accept()
        await in_turn(silos, lambda each: each.take_part(0))
        for each in silos:
            await each.told("round")
        await silos[0].give_parts(1)
        (run,) = here.daemon.runs
        assert {path.name.partition(".")[0] for path in world.folder.glob("*.padded")} == {"0", "1"}
        here.daemon.apply(run, Unkeyed("the roster has changed"))
        assert run.state.stage == "finishing"
        assert_nothing_is_padded(world)
        for each in silos:
            await each.channel.close()

    with coordinator(world.config) as here:
        here.run(scenario(), 120)
        assert here.broken == []


PUBLIC = {
    "secure_aggregation": "required",
    "weights": "public",
    "dropouts": "any",
    "counts": dict.fromkeys(SIX, 60),
}


def test_rows_that_were_put_aside_are_opened_in_order_and_kept_over_a_restart(world):
    options = {"supervisor": "cnn", "similarity": "samples"}
    world = world("fedsimsup", options, SIX, rounds=7, participation=0.67, security=PUBLIC)
    oracle, piled, rounds = Oracle(world), [], iter(range(world.job.length + 1))
    away = [set(SIX) - set(world.job.cohort(round_)) for round_ in range(world.job.length)]
    # rows of two rounds lie there
    stop = next(n for n in range(2, world.job.length) if away[n] & away[n - 1]) + 1

    async def go_on(here, silos, count):
        for _ in range(count):
            round_ = next(rounds)
            cohort = world.job.cohort(round_)
            for each in silos if round_ else ():
                if each.silo in cohort:
                    assert (await each.told("round")).round == round_
                    piled.append(await check_mail(world, oracle, each, round_))
            await in_turn(
                [each for each in silos if each.silo in cohort],
                lambda each, round_=round_: each.take_part(round_),
            )
            oracle.close(round_, cohort)

    async def first(here):
        silos = [world.silo(here, name) for name in SIX]
        for each in silos:
            await each.accept()
        await go_on(here, silos, stop)
        for each in silos:
            await each.channel.close()
        return {each.silo: (each.number, each.memories) for each in silos}

    async def second(here, known):
        silos = [world.silo(here, name) for name in SIX]
        for each in silos:
            await each.hello()
            each.number, each.memories = known[each.silo]
        await go_on(here, silos, world.job.length - stop)
        for each in silos:
            await each.told("finish")
            piled.append(await check_mail(world, oracle, each, world.job.length))
            await each.answer("DONE")
        for each in silos:
            await each.channel.close()

    with coordinator(world.config) as here:
        known = here.run(first(here), 120)
        assert here.broken == []
    with coordinator(world.config) as here:
        files = {row[4] for row in rows_of(world, "files")}
        asides = [
            json.loads((world.folder / name).read_text())["rows"]
            for name in files
            if name.endswith(".rows")
        ]
        shares = [
            share["version"]
            for rows in asides
            for row in rows
            for share in json.loads(row["document"])["shares"]
        ]
        needed = {f"{share['round']}.{share['silo']}.theta.padded" for share in shares}
        assert {int(name.partition(".")[0]) for name in needed} == {stop - 2, stop - 1}
        assert {path.name for path in world.folder.iterdir()} == files | needed
        assert {row[5] for row in rows_of(world)} == {
            name for name in files | needed if name.endswith(".padded")
        }
        newest = {tuple(row[1:3]): json.loads(row[3])["last"] for row in rows_of(world, "mixed")}
        for name in files:
            if name.endswith(".rows"):
                _, part, silo, _ = name.split(".")
                last = json.loads((world.folder / name).read_text())["rows"][-1]["document"]
                assert (
                    newest[part, silo]
                    == parse_canonical(last.encode(), RecipientRow, name).digest()
                )
        here.run(second(here, known), 120)
        assert here.broken == []
    assert max(piled) > 1
    assert_nothing_is_padded(world)
