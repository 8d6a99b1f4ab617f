"""A coordinator has a silo train a round of shared noise again, of which a sum was opened already,
over real TLS.

The silo's job folder was put back from a backup, its ledger and its budget were not. Of two sums of
one round that differ in this silo's part alone, the difference is under its own shares of the
noise, whatever was paid for each: the shares of all others are gone.
"""

import re
import shutil

import pytest
from support.hostile_coordinator import SILO, offer, play, round_of
from support.hostile_sum_coordinator import Attempted, Blind, make_world
from support.ledgers import write_start
from support.private_jobs import dataset, undrafted

from staddle.commands.federation import local_federation
from staddle.proto import federation_pb2 as pb
from staddle.security.identity import roster as rosters
from staddle.security.ledger.egress_ledger import Ledger
from staddle.silo.egress.gate import Gate
from staddle.silo.egress.witness import HEADS, Witness

pytestmark = [pytest.mark.actor("coordinator"), pytest.mark.usefixtures("hurried")]

OTHER, JOB = "east", "shared"
SIGMA, UNITS = 2.0, 2**24  # and three honest silos
PRIVACY = {"epsilon": 60.0, "delta": 1e-5, "sample_rate": 0.25, "sigma": str(SIGMA)}
PRIVACY |= {"noise": "shared", "histogram_sigma": 1.0}
SECURITY = {JOB: {"secure_aggregation": "required"}}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    made = make_world(tmp_path_factory.mktemp("two"), SECURITY, privacy=PRIVACY)
    text = local_federation.policy_text(list(made.jobs.values()))
    text = re.sub(r"(?m)^max_(step|parallel) = .*\n", "", text)
    made.policy = undrafted(text) + dataset(200.0, noise='"shared"', required="true")
    return made


class Agreeing(Blind):
    """It passes on another silo's honest word on the ledger."""

    def __init__(self, world, tasks, sums, other):
        super().__init__(world, tasks, sums)
        self.other = other

    async def hello(self, request, context):
        asked = pb.Challenge(silo=SILO, challenge=request.challenge)
        word = self.other.attest(asked, b"s" * 16)
        self.tasks.insert(0, pb.Task(witness=pb.Witness(attestations=[word])))
        return await super().hello(request, context)


@pytest.fixture
def other(world, tmp_path):
    keys, federation = world.others[OTHER], world.roster.federation
    with Ledger.open(tmp_path / "other" / "ledger", OTHER, federation, keys.log) as ledger:
        write_start(ledger, "test", rosters.digest(world.roster), "0" * 64)
        yield Witness(ledger, world.roster, keys, tmp_path / "other" / HEADS)


def life(world, folder, other, attempt):
    """A life of the silo's agent in which it is asked for an attempt at the second round's sum."""
    tried = Attempted(world, JOB, 1, attempt)
    tasks = [round_of(world, 1, JOB, counted=1)]
    return play(Agreeing(world, tasks, {1: [tried]}, other), folder), tried


@pytest.mark.parametrize(
    "checked", [True, pytest.param(False, marks=pytest.mark.control)], ids=["checked", "unchecked"]
)
def test_a_round_whose_sum_was_opened_is_not_trained_again(
    world, tmp_path, other, monkeypatch, checked
):
    silo, jobs, copy = tmp_path / "silo", tmp_path / "silo" / "jobs", tmp_path / "copy"
    silo.mkdir()
    begun = {0: [Attempted(world, JOB)]}
    play(Agreeing(world, [offer(world, JOB), round_of(world, 0, JOB)], begun, other), silo)
    shutil.copytree(jobs, copy)
    _, first = life(world, silo, other, 0)
    assert first.opened is not None
    shutil.rmtree(jobs)
    shutil.copytree(copy, jobs)
    if not checked:
        monkeypatch.setattr(Gate, "part_left", lambda *_: False)
    hostile, second = life(world, silo, other, 1)
    if checked:
        assert second.opened is None
        assert hostile.answers == [("FAILED", 1, "TRAINING")]
        return
    # Two steps were paid for, by all of the noise of each.
    difference = first.opened[0].total - second.opened[0].total
    assert 0.75 < difference.std() / (SIGMA * UNITS) < 0.9 < 2**0.5
