"""What a coordinator learns of one silo by two jobs, of which the first has two batches, against
the real agent.

The silos of the second batch sign the sum over all, and never hear of the one without them, which
those of the first batch sign too: any silo signs further sums of a round over whole batches. So the
coordinator has what the second batch has together. A job for that batch and one silo more tells it
that silo's records, and no silo signed sums from which it could see that. The measure is how far
off the recovered numbers of training and test records are.
"""

from dataclasses import replace

import numpy as np
import pytest
from support.hostile_coordinator import SILO, offer, play, records, round_of
from support.hostile_sum_coordinator import OTHERS, SILOS, Attempted, Blind, GroupValues, make_world

from staddle.algorithms.job.batches import split
from staddle.security.identity.signers import Signers
from staddle.security.ledger.sum_history import SignedSet, find_implied
from staddle.security.secagg import coordinator_events as c
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.memory import Memory
from staddle.security.secagg.spec import Terms

pytestmark = [pytest.mark.actor("coordinator"), pytest.mark.usefixtures("hurried")]

MORE, NINTH = ("border", "coast", "hills", "inland"), "ninth"
EIGHT = tuple(sorted((*SILOS, *MORE)))
(WITH,) = (batch for batch in split(EIGHT, 2) if SILO in batch)
WITHOUT = tuple(silo for silo in EIGHT if silo not in WITH)
COUNTS = {
    NINTH: (97, 31),
    **{silo: (60 + 7 * at, 20 + at) for at, silo in enumerate((*OTHERS, *MORE))},
}
SECURITY = {"secure_aggregation": "required", "weight_most": 2000, "tags": False}
LEAST = 3  # min_difference, left out: min_honest and assumed_colluders together


class Counted(Attempted):
    """The other silos give their numbers of records; without the real one they wait for nobody."""

    def contribution(self, group, silo):
        given, (train, test) = super().contribution(group, silo), COUNTS[silo]
        if group.name == "metrics":
            return GroupValues(np.array([0.0, 0.0, test]))
        weights = None if given.weights is None else np.full(group.rows, float(train))
        return GroupValues(given.values, weights)

    def act(self, who, effect):
        super().act(who, effect)
        if SILO in self.cohort:
            return
        match effect:
            case c.Tell(_, s.SurvivorsReceived()):
                self.queue += self.later
                self.later = []
            case c.Ask():
                self.told.clear()

    def counts(self):
        """Training and test records of all its silos together, as they were opened."""
        by_name = dict(zip([group.name for group in self.spec.groups], self.opened, strict=True))
        return np.array([by_name["model"].weight[0], by_name["metrics"].total[2]])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    silos = {"first": EIGHT, "second": (*WITH, NINTH)}
    folder, tables = tmp_path_factory.mktemp("attacked"), dict.fromkeys(silos, SECURITY)
    return make_world(folder, tables, (*MORE, NINTH), silos)


def test_a_job_that_tells_one_silo_beside_batches_of_another_is_declined(world, tmp_path):
    """Before: accepted, and off by (0.0, 0.0)."""
    batches = {frozenset(batch) for batch in world.jobs["first"].batches}
    assert batches == {frozenset(WITH), frozenset(WITHOUT)}
    all_of = lambda name: tuple(sorted(world.jobs[name].silos))
    whole, second = (Counted(world, name, cohort=all_of(name)) for name in ("first", "second"))
    script = [offer(world, "first"), round_of(world, 0, "first", cohort=EIGHT)]
    script += [offer(world, "second")]
    script += [round_of(world, 0, "second", cohort=world.jobs["second"].silos)]
    hostile = play(Blind(world, script, {0: [whole, second]}), tmp_path)
    # the same values, without the real silo's batch
    half = Counted(world, "first", attempt=1, cohort=WITHOUT)
    # Its silos, honest ones, have signed the sum over all, and sign this one.
    terms = replace(Terms(), batches=world.jobs["first"].batches)
    members = frozenset((*EIGHT, NINTH))
    Memory().signed(whole.spec, EIGHT).entered(half.spec, (), Signers.of(world.roster), None, terms)
    assert (
        find_implied([SignedSet("first", frozenset(EIGHT), members)], WITHOUT, members, LEAST)
        is None
    )
    off = None
    if None not in (whole.opened, half.opened, second.opened):
        found = second.counts() - (whole.counts() - half.counts())
        off = tuple(np.abs(found - COUNTS[NINTH]).round(6))
    assert off is None, f"its training and test records were found, off by {off}"
    assert None not in (whole.opened, half.opened)
    assert [kind for kind, *_ in hostile.answers if kind != "FAILED"] == ["ACCEPT", "DECLINE"]
    (declined,) = records(tmp_path, "job.decline")
    assert "of which classes, ninth alone has" in declined["reasons"][0]
