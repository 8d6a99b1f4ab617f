"""A budget that was put back from a backup, and a coordinator that says what fits the backup, over
real TLS.

The silo's folder, ledger and budget together, is what it was after its first round. The coordinator
greets it with the head that it held then. What counts is how many releases are paid for twice, and
what they have cost in truth.
"""

import asyncio
import re
import shutil

import pytest
from support.hostile_coordinator import SILO, Hostile, make_world, offer, play, records, round_of
from support.ledgers import write_start
from support.signed_federation import job_document

from staddle.commands.federation import local_federation
from staddle.errors import LocalError
from staddle.proto import federation_pb2 as pb
from staddle.security.dp.budget_records import MechanismSteps
from staddle.security.dp.rdp import cost
from staddle.security.identity import roster as rosters
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.log.consistency import Consistency
from staddle.silo.egress.witness import HEADS, Witness

pytestmark = [pytest.mark.actor("coordinator"), pytest.mark.usefixtures("hurried")]

OTHER = "east"
SILOS = (SILO, OTHER, "south")
TABLE = {"epsilon": 6.0, "delta": 1e-5, "sample_rate": 0.25, "sigma": "2", "histogram_sigma": 1.0}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Keys, a roster, a private job of three rounds, and what the silo has."""
    document = job_document(SILOS, name="first", privacy=TABLE)
    world = make_world(tmp_path_factory.mktemp("restored"), SILOS, document, records=200)
    # what comes down are numbers drawn at random
    text = local_federation.policy_text(list(world.jobs.values()))
    world.policy = re.sub(r"(?m)^max_(step|parallel) = .*\n", "", text)
    world.other_keys = world.others[OTHER]
    return world


@pytest.fixture
def other(world, tmp_path):
    """Another silo, honest: what it answers for a challenge, and heads that it is given."""
    with Ledger.open(
        tmp_path / "other" / "ledger", OTHER, world.roster.federation, world.other_keys.log
    ) as ledger:
        write_start(ledger, "test", rosters.digest(world.roster), "0" * 64)
        yield Witness(ledger, world.roster, world.other_keys, tmp_path / "other" / HEADS)


class Agreeing(Hostile):
    """Says at each greeting that it holds ``held``, and passes on what ``word`` has for the silo's
    challenge.
    """

    def __init__(self, world, tasks, held, word):
        super().__init__(world, tasks)
        self.held = self.greeted = held
        self.word = word

    async def hello(self, request, context):
        await super().hello(request, context)
        self.tasks.insert(0, pb.Task(witness=pb.Witness(attestations=self.word(request.challenge))))
        return pb.HelloReply(
            protocol=2, session=b"s" * 16, beat_seconds=1, hold_seconds=1, held=self.greeted
        )

    def receipt(self, manifest, end, *arguments, **changes):
        self.held = bytes(Consistency.parse(end.head).checkpoint)
        return super().receipt(manifest, end, *arguments, **changes)


def answer(other, challenge):
    return other.attest(pb.Challenge(silo=SILO, challenge=challenge), b"s" * 16)


def life(world, folder, rounds, held, word):
    """One life of the silo's agent: it is told these rounds, and offered the job before the
    first.
    """
    tasks = [round_of(world, number, counted=number) for number in rounds]
    if 0 in rounds:
        tasks.insert(0, offer(world))
    return play(Agreeing(world, tasks, held, word), folder)


class Lives:
    """A silo that gave a round and was copied, then gave the two others.

    ``restore`` puts the copy back.
    """

    def __init__(self, world, folder, other):
        self.folder, self._copy, self.challenges = folder / "silo", folder / "copy", []

        def word(challenge):
            self.challenges.append(challenge)
            return [answer(other, challenge)]

        self.first = life(world, self.folder, [0], b"", word)
        shutil.copytree(self.folder, self._copy)
        self.kept = len(self.paid())  # events that the copy knows
        self.second = life(world, self.folder, [1, 2], self.first.held, word)
        self.reserved = self.paid()

    def restore(self):
        shutil.rmtree(self.folder)
        shutil.copytree(self._copy, self.folder)

    def paid(self):
        """Reservations of the budget as it lies there, as events."""
        lines = records(self.folder, log="privacy/data")
        reserved = [record["events"] for record in lines if record["type"] == "budget.reserve"]
        events = (event for events in reserved for event in events)
        return [MechanismSteps(**event).event(event["steps"]) for event in events]


def told(lives, again):
    """The attack's measure: releases that left twice, and what all has cost in truth."""
    known, left = ([each[:2] for each in run.uploads] for run in (lives.second, again))
    twice = [each for each in left if each in known]
    once, new = lives.reserved, lives.paid()[lives.kept :]
    spent, counted = (cost(events, TABLE["delta"]) for events in ([*once, *new], once))
    costs = f"epsilon = {spent:.2f} was spent, {counted:.2f} counted"
    return f"{len(twice)} releases left twice; {costs}"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("word", ["none", "replayed", "forged"])
def test_a_restored_budget_is_not_spent_again_because_the_coordinator_agrees(
    world, tmp_path, other, word
):
    """Before: two of two releases left twice; epsilon = 8.02 was spent, 5.38 counted."""
    lives = Lives(world, tmp_path, other)
    assert [upload[1] for upload in (*lives.first.uploads, *lives.second.uploads)] == [0, 1, 2]
    lives.restore()
    before = lives.paid()

    def said(challenge):
        if word == "none":
            return []
        real = answer(other, challenge if word == "forged" else lives.challenges[0])
        # what that silo signed for an earlier session, under the challenge of this one
        if word == "replayed":
            real.challenge = challenge
        else:  # in another silo's name
            real.by = "south"
        return [real]

    again = life(world, lives.folder, [1, 2], lives.first.held, said)
    measure = told(lives, again)
    assert again.uploads == [], measure
    assert lives.paid() == before, measure
    assert again.calls["fetch"] == 0


def test_a_silo_that_was_shown_what_came_after_the_backup_stops_the_restored_one(
    world, tmp_path, other
):
    lives = Lives(world, tmp_path, other)
    asyncio.run(other.relayed([lives.second.held]))
    lives.restore()
    told = r"records were cut off: .* and east holds a signed checkpoint"
    answers = lambda challenge: [answer(other, challenge)]
    with pytest.raises(LocalError, match=told):
        life(world, lives.folder, [1, 2], lives.first.held, answers)


@pytest.mark.control
def test_the_round_that_waited_goes_on_once_another_silo_answers(world, tmp_path, other, caplog):
    """No history anywhere: what it answers is that it holds nothing."""
    tasks = [offer(world), round_of(world, 0), round_of(world, 0)]
    first = Agreeing(world, tasks, b"", lambda _: [])

    async def hello(request, context):
        reply = await Agreeing.hello(first, request, context)
        first.tasks.insert(
            -1, pb.Task(witness=pb.Witness(attestations=[answer(other, request.challenge)]))
        )
        return reply

    first.hello = hello
    play(first, tmp_path / "silo")
    assert [upload[1] for upload in first.uploads] == [0]
    assert [kind for kind, *_ in first.answers] == ["ACCEPT"]  # to wait is no failure
    (waits,) = [record for record in caplog.records if record.message == "round.waits"]
    assert "ask the operators of east, south" in waits.fields["why"]
