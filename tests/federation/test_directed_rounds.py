"""Rounds that mix by directed sums, over real TLS: a coordinator, and silos of raw calls, one of
which is lost.
"""

import sqlite3
from contextlib import closing
from itertools import pairwise

import pytest
import torch
from federation.keyed import made_up, seeded
from support.coordinator_thread import coordinator
from support.raw_mixing_silo import DirectedSilo, in_turn
from support.signed_federation import job_document, signed_federation

from staddle.algorithms.exchange.delivery import KEEP
from staddle.proto import federation_pb2 as pb
from staddle.security.secagg import silo_events as s

SIX = ("north", "east", "south", "west", "up", "down")
CLASSES = {silo: [10 + at, 10, 10, 10, 10 + 4 * at, 0, 0, 0, 0, 0] for at, silo in enumerate(SIX)}
CLASSES["down"] = [0] * 9 + [75]  # like nobody
SECURITY = {
    "secure_aggregation": "required",
    "weights": "public",
    "dropouts": "any",
    "counts": {silo: sum(own) for silo, own in CLASSES.items()},
    "class_counts": CLASSES,
    "mix": "directed",
}


def waits_twice(job):
    """A silo that is like others is away in two rounds on end that mix, and the one that is like
    nobody in one.
    """
    away = [set(job.away(round_)) for round_ in range(1, job.length)]
    return any(one & two - {"down"} for one, two in pairwise(away)) and any(
        "down" in each for each in away
    )


class GoneError(Exception):
    """A silo has stopped in the middle of a round."""


@pytest.fixture
def world(tmp_path):
    method = {"name": "fedsimsup", "options": {"supervisor": "cnn"}}
    fields = {"rounds": 5, "min_cohort": 3, "participation": 0.67, "method": method}
    document = seeded(job_document(SIX, **fields, security=SECURITY), waits_twice)
    world = signed_federation(tmp_path, SIX, document, beat_seconds=60)
    job = world.job

    world.contributions = made_up(job)
    world.folder = world.config.directory / "jobs" / "job"
    world.silo = lambda here, name: DirectedSilo(
        *(here.address, world.keys[name], world.roster, job, world.contributions(name)),
        tmp_path / "silos" / name,
    )
    return world


class Expected:
    """By hand, what waits for each silo: rows over who survived, put together by the method's own
    posts.
    """

    def __init__(self, world):
        self.world, self.method = world, world.job.method()
        self.state, self.waiting = self.method.begin(), {silo: [] for silo in SIX}

    def close(self, round_, survivors):
        combined = self.method.combine(self.state, round_, survivors, {})
        for silo in survivors:
            self.waiting[silo] = []
        away = self.world.job.away(round_)
        for post in combined.posts:
            if post.silo in away:  # who was drawn and lost has no row
                self.waiting[post.silo].append(
                    (round_, self.row(round_, survivors, post.silo), post.keep)
                )

    def row(self, round_, survivors, reader):
        drawn = self.method.row_weights(round_, reader)
        weights = {silo: weight for silo, weight in drawn.items() if silo in survivors}
        gave = {silo: self.world.contributions(silo)(round_)["theta"] for silo in weights}
        names = next(iter(gave.values()))
        return {
            name: (
                sum(weight * gave[silo][name].double() for silo, weight in weights.items())
                / sum(weights.values())
            )
            for name in names
        }

    def check(self, silo, mailed, rounds):
        waiting = self.waiting[silo]
        assert rounds == [round_ for round_, _, _ in waiting]
        if not waiting:
            assert mailed is None
            return
        kept, found = 1.0, {name: torch.zeros_like(value) for name, value in waiting[0][1].items()}
        for _, row, keep in waiting:
            found = {name: keep * found[name] + (1 - keep) * row[name] for name in row}
            kept *= keep
        assert float(mailed[KEEP.name]) == pytest.approx(kept)
        for name, value in found.items():
            assert torch.allclose(mailed[name].double(), value, rtol=0, atol=1e-6)


def lost_of(job):
    """A silo that is lost in a round, after which enough that are alike are left."""
    round_ = next(n for n in range(2, job.length) if n > 2 or "down" not in job.cohort(n))
    return {round_: "down" if "down" in job.cohort(round_) else job.cohort(round_)[0]}


async def take_part(each, round_, lost):
    """The round, to its end or until its upload is due."""

    def gone(effect):
        if isinstance(effect, s.UploadWords):
            raise GoneError
        return effect

    if each.silo != lost:
        await each.take_part(round_)
        return
    each.hear = gone
    with pytest.raises(GoneError):
        await each.take_part(round_)
    each.hear = lambda effect: effect
    await each.answer("FAILED", round_, pb.ERROR_CODE_TRAINING)


def test_rows_are_over_who_survived_and_wait_over_a_restart_until_their_silo_gives(world):
    job, expected, piled = world.job, Expected(world), []
    rounds, lost = iter(range(job.length)), lost_of(job)

    async def go_on(silos, count):
        for _ in range(count):
            round_ = next(rounds)
            cohort = [each for each in silos if each.silo in job.cohort(round_)]
            for each in cohort:
                assert (await each.told("round")).round == round_
                if round_ > 1:
                    mailed, of = await each.mail(round_)
                    expected.check(each.silo, mailed, of)
                    piled.append(of)
            await in_turn(
                cohort, lambda each, round_=round_: take_part(each, round_, lost.get(round_))
            )
            expected.close(
                round_, tuple(silo for silo in job.cohort(round_) if silo != lost.get(round_))
            )

    async def first(here):
        silos = [world.silo(here, name) for name in SIX]
        for each in silos:
            await each.accept()
        await go_on(silos, 4)
        for each in silos:
            await each.channel.close()

    async def second(here):
        silos = [world.silo(here, name) for name in SIX]
        for each in silos:
            await each.hello()
        await go_on(silos, job.length - 4)
        for each in silos:
            await each.told("finish")
            mailed, of = await each.mail(job.length)
            expected.check(each.silo, mailed, of)
            piled.append(of)
            await each.answer("DONE")
            await each.channel.close()

    with coordinator(world.config) as here:
        here.run(first(here), 120)
        assert here.broken == []
    with coordinator(world.config) as here:
        waiting = {
            (round_, silo) for silo, rows in expected.waiting.items() for round_, _, _ in rows
        }
        words = {path.name for path in world.folder.glob("*.words")}
        assert words == {f"{round_}.theta.{silo}.words" for round_, silo in waiting}
        with (
            closing(sqlite3.connect(world.config.directory / "coordinator.sqlite")) as database,
            database,
        ):
            # and no versions
            assert database.execute("SELECT DISTINCT room FROM files").fetchall() == [("mail",)]
        here.run(second(here), 120)
        assert here.broken == []
    assert any("down" in job.away(round_) for round_ in range(1, job.length))
    assert expected.waiting["down"] == []
    assert max(map(len, piled)) > 1  # rows of several rounds waited for one silo
    assert not {path.suffix for path in world.folder.iterdir()} & {".padded", ".masked"}
