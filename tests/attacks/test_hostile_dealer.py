"""A silo that deals badly, or lies about a dealer, in a federation of real daemons over TLS.

The measures are who is evicted, round by round, and how many rounds are completed. The agent of the
bad silo is ours but for one function (hostile_dealer.py); coordinator and other silos are as they
ship.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from federation.conftest import small_document

from staddle.algorithms.data.dataset import digits

pytestmark = [pytest.mark.actor("silo"), pytest.mark.timeout(300)]

BAD, *HONEST = SILOS = ("north", "east", "south", "west")
FIVE = (*SILOS, "dover")
ONE_BATCH = {"weights": "private", "dropouts": "batches", "counts": {}, "weight_most": 1000}
ROUNDS = 2
PROGRAM = str(Path(__file__).with_name("hostile_dealer.py"))


class Played:
    """What came of a job with a bad silo in it."""

    def __init__(self, start, how, dies="", silos=SILOS, **security):
        """``security`` beside declared counts, so that a sum over three of the four is opened.

        The first silo is bad.

        One honest silo ``dies`` (federation/crashing.py) before it records a message of this kind,
        and is started anew.
        """
        self.silos, self.honest = silos, [silo for silo in silos if silo != BAD]
        self.running = running = start(*silos)
        running.data = {
            silo: digits().take(np.arange(80 * i, 80 * i + 80)) for i, silo in enumerate(silos)
        }
        table = {"secure_aggregation": "required", "weights": "public", "dropouts": "any"}
        table["counts"] = dict.fromkeys(silos, 60)
        fields = {"rounds": ROUNDS, "min_cohort": 3, "security": {**table, **security}}
        self.job = running.job(small_document("job", silos, **fields))
        coordinator = running.start_coordinator()
        for silo in silos:
            running.write_silo(silo)
        for silo in self.honest:
            running.start_daemon(silo, f"every:{dies}" if dies and silo == HONEST[0] else "never")
        running.launch(BAD, (PROGRAM, how), running.federation.silo_config(BAD))
        ended = coordinator.wait_for("job.ended", 120)
        self.outcome, self.reason = ended["outcome"], ended["reason"]
        running.stop()
        self.events = events = running.events("coordinator")
        closed = running.events("coordinator", "round.closed")
        self.rounds = [sorted(event["members"]) for event in closed]
        self.blamed = [e["blame"] for e in events if e["event"] == "sum.ended" and "blame" in e]

    @property
    def evicted(self):
        """Who is not in the sum, round by round."""
        return [sorted({*self.silos} - {*members}) for members in self.rounds]

    def ends(self, silo):
        """(code, blame) of the attempts that ended at a silo without a sum, as its ledger
        has them.
        """
        found = self.running.records(silo, "secagg.end")
        return [(each["code"], each["blame"]) for each in found]

    def check_models(self):
        """All honest silos have the same model of finite numbers in the end, and a ledger that
        holds.
        """
        self.running.check_ledgers(self.honest)
        models = [self.running.model(self.job, silo) for silo in self.honest]
        for part, tensors in models[0].parts.items():
            for name, value in tensors.items():
                assert torch.isfinite(value).all()
                others = [model.parts[part][name] for model in models[1:]]
                assert all(torch.equal(other, value) for other in others), (part, name)

    def check_rounds(self, members):
        """It completed, and all rounds were of these silos."""
        told = self.evicted, self.reason
        assert (self.outcome, self.rounds) == ("completed", [sorted(members)] * ROUNDS), told

    def dropped(self):
        """(silo, code) of those that the coordinator dropped."""
        found = [each for each in self.events if each["event"] == "silo.dropped"]
        return [(each["silo"], each["code"]) for each in found]


def test_a_dealer_of_rubbish_goes_and_its_victim_stays(start):
    """Before: three rounds of three without ``east``, whom the coordinator named as well."""
    played = Played(start, "rubbish:east")
    played.check_rounds(HONEST)
    assert played.evicted == [[BAD]] * ROUNDS
    assert played.blamed == [BAD]  # once: it is out of the job
    assert played.ends("east") == [("SHARES", BAD)]
    played.check_models()


@pytest.mark.parametrize("tags", [False, True], ids=["", "tags"])
def test_a_survivor_that_was_killed_takes_part_in_the_repeated_round(start, tags):
    """It signed, and its process died before it revealed: the round needs it, and its memory is on
    disk.
    """
    played = Played(start, "inconsistent", dies="protocol job 0 reveal", tags=tags)
    played.check_rounds(HONEST)
    assert len(played.running.killed(HONEST[0])) == 1
    played.check_models()


@pytest.mark.parametrize("tags", [False, True], ids=["", "tags"])
def test_a_dealer_whose_shares_do_not_join_goes_and_the_round_is_repeated(start, tags):
    """Before: the job failed in its first round, after none of three."""
    played = Played(start, "inconsistent", tags=tags)
    played.check_rounds(HONEST)
    assert played.blamed == [BAD]
    assert [played.ends(silo) for silo in HONEST] == [[("STOPPED", "")]] * 3
    played.check_models()


def test_a_wrong_share_counts_once(start):
    """Its dealer is in the sum that opens, and in none after the share was seen.

    Before: it went on as it liked.

    Whether the wrong share is among those that are joined is by chance.
    """
    played = Played(start, "one:east")
    assert (played.outcome, len(played.rounds)) == ("completed", ROUNDS), played.reason
    assert all({*HONEST} <= {*members} for members in played.rounds)
    seen = [BAD in members for members in played.rounds]
    assert seen == sorted(seen, reverse=True)  # once it is out it does not come back
    assert played.blamed in ([], [BAD])
    played.check_models()


def test_a_silo_that_complains_of_an_honest_dealer_goes_itself(start):
    """Before: it was left out of each round in which it said that it could not open its shares."""
    played = Played(start, "lies:east")
    played.check_rounds(HONEST)
    assert played.dropped() == [(BAD, "COMPLAINT")]
    assert [played.ends(silo) for silo in HONEST] == [[]] * 3
    played.check_models()


@pytest.mark.parametrize("how", ["rubbish:east", "inconsistent"])
def test_one_batch_goes_on_without_a_dealer_that_is_proven(start, how):
    """Before: the job failed in its first round, after none of three."""
    played = Played(start, how, silos=FIVE, **ONE_BATCH)
    played.check_rounds({*FIVE} - {BAD})
    assert played.blamed == [BAD]
    assert {*played.dropped()} == {(BAD, "MISDEALT")}
    played.check_models()


def test_below_the_declared_minimum_a_job_ends_and_names_who_did_it(start):
    """Of four silos that are one batch three are left, and a sum takes four."""
    played = Played(start, "rubbish:east", **ONE_BATCH)
    assert (played.outcome, played.rounds) == ("failed", [])
    assert "north: MISDEALT, it dealt shares that do not open or do not join" in played.reason
