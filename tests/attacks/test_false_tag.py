"""What tags can be used for by a silo that lies, and by a coordinator with one silo: against the
agent as it ships.

One silo flips a bit of its tag, and all others are honest: the sum does not open at any silo, and
none can tell by whose doing. The attack's measure is whom the real silo's ledger names: a name that
can be read as the coordinator's guilt is what the attacker is after. Coordinator and one silo take
the pads off another silo's tag: their measure is how many guesses at its test counts are left.
"""

from itertools import product

import numpy as np
import pytest
from support.hostile_coordinator import SILO, play, records
from support.hostile_keyed_coordinator import Keyed
from support.hostile_sum_coordinator import OTHERS, SILOS, make_world

from staddle.security.faults import COORDINATOR_OR_SILO
from staddle.security.secagg.linear_tags import PRIME, Tagger, decoded

pytestmark = [pytest.mark.actor("silo"), pytest.mark.usefixtures("hurried")]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    security = {"secure_aggregation": "required", "weight_most": 2000, "tags": True}
    return make_world(tmp_path_factory.mktemp("attacked"), {"first": security})


@pytest.mark.parametrize("flip", [False, True], ids=["honest", "flipped"])
def test_a_flipped_tag_names_only_what_is_known(world, tmp_path, flip):
    """Before: one record of one named the coordinator, which had done nothing."""
    hostile = play(Keyed(world, flip), tmp_path)
    found = records(tmp_path)
    assert [each["survivors"] for each in found if each["type"] == "secagg.sum"] == [sorted(SILOS)]
    # canaries came out: the coordinator sees nothing
    assert np.isfinite(hostile.tagged.opened[0].total).all()
    ends = [each for each in found if each["type"] == "secagg.end"]
    ended = [(each["round"], each["code"], each["blame"]) for each in ends]
    taken = [each["round"] for each in found if each["type"] == "ingress"]
    if not flip:
        assert (ended, taken) == ([], [1])
        return
    assert taken == []
    assert [(round_, code) for round_, code, _ in ended] == [(0, "SUM")]
    named = [blame for _, _, blame in ended if blame != COORDINATOR_OR_SILO]
    assert named == [], f"{len(named)} of {len(ended)} records name {named}"
    assert COORDINATOR_OR_SILO == "coordinator or a silo of the cohort"


@pytest.mark.actor("coordinator and silos")
def test_the_tag_of_a_silo_tells_nothing_of_its_own_numbers(world, tmp_path):
    """Before: one guess of 29,791 fitted, the right one, for each silo and round.

    Tags had no masks.
    """
    made = play(Keyed(world, flip=False), tmp_path).tagged
    spec, ctx, at = made.spec, made.spec.context(), 1  # the metrics
    group, key, groups = spec.groups[at], made.key(), len(spec.groups)
    others = sum(made.contribution(group, silo).values for silo in OTHERS)
    true = tuple(int(number) for number in np.rint(made.opened[at].total - others))
    most = 30
    assert all(0 <= number <= most for number in true)  # of the silo's 80 records, 19 are held out
    assert true[2] == 19  # the split is fixed
    pad = decoded(Tagger(key, ctx, groups).padded(key, ctx, SILO), groups)[at]
    tag = (decoded(made.state.headers[SILO].tags, groups)[at] - pad) % PRIME
    of_one = []
    for each in range(3):  # the tag of 1 in the place of one of the three counts
        tagger = Tagger(key, ctx, groups)
        tagger.add(at, (np.eye(3, dtype=np.int64)[each] << group.scale_exponent).view(np.uint64))
        of_one.append(tagger.sums[at])
    guesses = product(range(most + 1), repeat=3)
    made = lambda guess: sum(n * by for n, by in zip(guess, of_one, strict=True))
    fits = [guess for guess in guesses if made(guess) % PRIME == tag]
    assert fits == [], f"the right guess is {true}, and those that fit are {fits}"
