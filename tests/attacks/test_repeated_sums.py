"""A coordinator in league with a dealer whose shares do not join, against the agent as it ships.

Only the two can open the first sum, and the agent takes part in a second one of the same values. If
that were over other silos, the difference of the two sums would be one silo's model. The measure is
the largest error of that model, as it is recovered; models have numbers of about 0.05.
"""

from dataclasses import replace
from operator import itemgetter

import numpy as np
import pytest
from support.hostile_coordinator import SILO, delivery, ends, offer, play, records, round_of
from support.hostile_sum_coordinator import SILOS, Attempted, Blind, Later, make_world

from staddle.security.arithmetic.masks import Term
from staddle.security.identity.domains import SECAGG_DEALING
from staddle.security.identity.pairwise_keys import self_key
from staddle.security.secagg import coordinator_events as c
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.dealing import SELF, seed_commitment
from staddle.security.secagg.evidence import Misdealing, ShownShare, Unjoined, joins
from staddle.security.secagg.masked_sum import Accumulator
from staddle.silo.blind import round as blind

pytestmark = [pytest.mark.actor("coordinator and silos"), pytest.mark.usefixtures("hurried")]

DEALER, VICTIM = "east", "south"
COUNT = 60  # records of each silo, as the job declares them
SECURITY = {"secure_aggregation": "required", "weights": "public", "dropouts": "any"}
SECURITY |= {"counts": dict.fromkeys(SILOS, COUNT), "tags": False}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("attacked"), {"public": SECURITY})


class Betrayed(Attempted):
    """The first attempt: a dealer commits to another secret than it deals, and tells the
    coordinator the true one.
    """

    def __init__(self, world):
        self.secret, self.sum = b"", None
        super().__init__(world, "public")

    def act(self, who, effect):
        match effect:
            case s.SendShares(dealing, portions) if who == DEALER:
                self.secret = self.states[DEALER].seeds.own
                ctx, sign = self.spec.context(), self.world.others[DEALER].sign
                other = seed_commitment(ctx, DEALER, bytes(32))
                dealing = replace(dealing, seed=other, signature=b"")
                dealing = replace(
                    dealing, signature=sign(SECAGG_DEALING, dealing.signed_bytes(ctx))
                )
                self.states[DEALER] = replace(self.states[DEALER], dealing=dealing)
                super().act(who, s.SendShares(dealing, portions))
            case c.EndAttempt():
                self.sum = self.betrayed()
            case _:
                super().act(who, effect)

    def shares(self, dealer):
        """The shares of a dealer that t silos revealed."""
        reveals = self.state.reveals.items()
        shares = [(holder, each) for holder, reveal in reveals for each in reveal.shares]
        found = [(holder, each.held) for holder, each in shares if each.dealer == dealer]
        return dict(sorted(found, key=itemgetter(0))[: self.spec.threshold])

    def betrayed(self):
        """The sum that nobody else can open."""
        state, ctx, terms = self.state, self.spec.context(), []
        for dealer in state.u3:
            dealt = state.bundles[dealer], state.dealings[dealer]
            known = self.secret
            if dealer != DEALER:
                known = joins(self.spec, *dealt, SELF, self.shares(dealer))
            terms.append(Term(self_key(known, ctx, dealer, self.spec.prg, state.h_u2)))
        accumulator = Accumulator(self.spec)
        for silo in state.u3:
            accumulator.add(self.pieces(self.uploads[silo]))
        return accumulator.open(terms, state.u3)[0].total


class Repeated(Attempted):
    """The second attempt, with evidence, without ``absent``."""

    def __init__(self, world, evidence, absent):
        self.proofs = () if evidence is None else (evidence,)
        super().__init__(world, "public", attempt=1, absent=(absent,))


def against_an_honest_dealer(first):
    """The same of the victim, whose shares join."""
    state = first.state
    dealt = state.bundles[VICTIM], state.dealings[VICTIM], state.portions[VICTIM]
    shares = tuple(ShownShare(*each) for each in first.shares(VICTIM).items())
    return Misdealing(first.spec.signed_bytes(), *dealt, Unjoined(SELF, shares))


def recovered(first, second):
    """Largest error of the victim's model, as the difference of the two sums has it."""
    true = first.contribution(first.spec.groups[0], VICTIM).values
    return float(np.abs((first.sum - second.opened[0].total) / COUNT - true).max())


@pytest.mark.parametrize(
    ("evidence", "absent", "code", "refused"),
    [
        pytest.param(
            lambda first: first.state.evidence,
            VICTIM,
            "SURVIVORS",
            True,
            id="another silo left out",
        ),
        pytest.param(
            against_an_honest_dealer,
            VICTIM,
            "MISDEALT",
            True,
            id="evidence against an honest dealer",
        ),
        pytest.param(lambda _: None, DEALER, "ATTEMPT", True, id="no evidence"),
        pytest.param(
            lambda first: first.state.evidence,
            VICTIM,
            "",
            False,
            id="the rule left out",
            marks=pytest.mark.control,
        ),
    ],
)
def test_a_second_sum_shows_no_silo(world, tmp_path, monkeypatch, evidence, absent, code, refused):
    """Without the rule the victim's model comes out to 1e-7."""
    if not refused:
        begin = blind.begin

        def lax(*given):
            state, effects = begin(*given)
            return replace(state, only=()), effects

        monkeypatch.setattr(blind, "begin", lax)
    first, second = played(world, tmp_path, evidence, absent)
    assert first.sum is not None, "the two could not open the first sum"
    ended = ends(tmp_path)
    if not refused:
        error = recovered(first, second)
        assert error < 1e-6, f"off by {error:.1e}"
        return
    assert second.opened is None, f"{VICTIM}'s model is off by {recovered(first, second):.1e}"
    assert (code, "coordinator") in ended


def test_a_second_sum_without_the_dealer_is_made(world, tmp_path):
    """The difference of the two is what the dealer gave, which it knows."""
    first, second = played(world, tmp_path, lambda first: first.state.evidence, DEALER)
    assert second.state.u3 == tuple(silo for silo in sorted(SILOS) if silo != DEALER)
    own = first.contribution(first.spec.groups[0], DEALER).values
    assert np.abs((first.sum - second.opened[0].total) / COUNT - own).max() < 1e-6
    opened = [each["survivors"] for each in records(tmp_path, "secagg.sum")]
    assert opened == [list(second.state.u3)]


def played(world, tmp_path, evidence, absent):
    """A round of two attempts; the second has this evidence, and this silo is not in it."""
    first = Betrayed(world)
    second = Later(first, lambda first: Repeated(world, evidence(first), absent))
    tasks = [offer(world, "public"), round_of(world, 0, "public")]
    hostile = Blind(world, tasks, {0: [first, second]})
    hostile.script["fetch"] = [lambda: delivery(world, "public", 0)]
    play(hostile, tmp_path)
    assert SILO in first.state.reveals
    return first, second
