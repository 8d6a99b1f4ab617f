"""A coordinator that leaves a silo out of its batch, with evidence against it or none, against the
agent as it ships.

The job's five silos are one batch: a sum over four of them, beside one over all five, would show
the fifth. The agent takes part in it only where the fifth is proven to have dealt what does not
open. The measure is what the agent sends.
"""

from dataclasses import replace

import pytest
from support.hostile_coordinator import SILO, delivery, ends, offer, play, records, round_of
from support.hostile_sum_coordinator import SILOS, Attempted, Blind, Later, make_world

from staddle.security.identity.domains import SECAGG_DEALING
from staddle.security.log.merkle import Tree
from staddle.security.secagg import coordinator_events as c
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.evidence import Misdealing, Unopened
from staddle.security.secagg.receiving_keys import receiving_seed
from staddle.silo.admission import signed_sets

pytestmark = [pytest.mark.actor("coordinator and silos"), pytest.mark.usefixtures("hurried")]

DEALER, VICTIM, HONEST = "dover", "south", "west"
FIVE = tuple(sorted((*SILOS, DEALER)))
FOUR = tuple(silo for silo in FIVE if silo != DEALER)
TABLE = {"secure_aggregation": "required", "weights": "private", "weight_most": 1000, "tags": False}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    jobs = ("job", "other")
    folder, tables = tmp_path_factory.mktemp("attacked"), dict.fromkeys(jobs, TABLE)
    return make_world(folder, tables, (DEALER,), dict.fromkeys(jobs, FIVE))


class Asking(Attempted):
    """Silos complain, and are asked to give attempts up."""

    def act(self, who, effect):
        match effect:
            case c.Tell(silos, s.AbandonAsked() as asked):
                self.tell(silos, asked)
            case s.SendComplaint() | s.SendAbandon():
                self.queue.append(("coordinator", effect))
            case _:
                super().act(who, effect)


class Rubbish(Asking):
    """The first attempt: what the dealer seals to the victim does not open."""

    def __init__(self, world, job="job"):
        super().__init__(world, job, cohort=FIVE)

    def act(self, who, effect):
        if who == DEALER and isinstance(effect, s.SendShares):
            spoilt = lambda each: replace(each, sealed=bytes(len(each.sealed)))
            told = effect.portions
            portions = tuple(spoilt(each) if each.holder == VICTIM else each for each in told)
            root = Tree(each.leaf() for each in portions).root()
            dealing = replace(effect.dealing, root=root, signature=b"")
            sign, ctx = self.world.others[DEALER].sign, self.spec.context()
            signature = sign(SECAGG_DEALING, dealing.signed_bytes(ctx))
            dealing = replace(dealing, signature=signature)
            self.states[DEALER] = replace(self.states[DEALER], dealing=dealing)
            effect = s.SendShares(dealing, portions)
        if isinstance(effect, s.SendShares | s.SendKeys):
            self.kept = {**getattr(self, "kept", {}), who: self.states[who].seeds}
        super().act(who, effect)


class Without(Asking):
    """The second attempt, over four, with these proofs.

    Whoever else is in it signs whatever survives.
    """

    def __init__(self, world, first, proofs):
        self.proofs = proofs
        notes = tuple(first.state.notes.values())
        super().__init__(world, "job", attempt=1, cohort=FOUR, notes=notes, lenient=True)


def genuine(first):
    return first.state.proofs[DEALER]


def against_an_honest_dealer(first):
    """The victim shows the true key with which an honest dealer's portion opens, and the
    coordinator brings it.
    """
    state, ctx = first.state, first.spec.context()
    dealt = state.bundles[HONEST], state.dealings[HONEST], state.portions[HONEST]
    key = receiving_seed(first.kept[VICTIM].receiving, ctx, VICTIM, HONEST)
    return Misdealing(first.spec.signed_bytes(), *dealt, Unopened(VICTIM, key))


def of_another_job(first):
    """The same dealer in the job beside this one."""
    other = {"job": "other", "job_digest": first.world.jobs["other"].digest}
    document = first.spec.model_copy(update=other).signed_bytes()
    return replace(genuine(first), document=document)


def of_another_attempt(first):
    return replace(
        genuine(first), document=first.spec.model_copy(update={"attempt": 7}).signed_bytes()
    )


@pytest.mark.parametrize(
    ("made", "code"),
    [
        pytest.param(None, "POLICY", id="no evidence"),
        pytest.param(against_an_honest_dealer, "MISDEALT", id="against an honest dealer"),
        pytest.param(of_another_job, "MISDEALT", id="of another job"),
        pytest.param(of_another_attempt, "MISDEALT", id="of another attempt"),
        pytest.param(
            against_an_honest_dealer, "", id="the check left out", marks=pytest.mark.control
        ),
    ],
)
def test_no_sum_lacks_a_silo_against_which_there_is_no_evidence(
    world, tmp_path, monkeypatch, made, code
):
    if not code:
        monkeypatch.setattr(signed_sets, "proven", lambda *_: frozenset({DEALER}))
    hostile, second = played(world, tmp_path, lambda first: () if made is None else (made(first),))
    kinds = [kind for _, ctx, kind in hostile.given if ctx == second.spec.context()]
    ended = ends(tmp_path)
    if code:
        assert (kinds, second.opened) == (["end"], None)
        assert (code, "coordinator") in ended
    else:
        assert second.opened is not None


def test_a_sum_lacks_a_dealer_that_is_proven_to_have_sealed_rubbish(world, tmp_path):
    _, second = played(world, tmp_path, lambda first: (genuine(first),))
    assert second.state.u3 == FOUR
    assert [each["survivors"] for each in records(tmp_path, "secagg.sum")] == [list(FOUR)]


def played(world, tmp_path, proofs):
    """A round of two attempts, the second without the dealer."""
    first = Rubbish(world)
    second = Later(first, lambda first: Without(world, first, proofs(first)))
    tasks = [offer(world, "job"), round_of(world, 0, "job", cohort=FIVE)]
    hostile = Blind(world, tasks, {0: [first, second]})
    hostile.script["fetch"] = [lambda: delivery(world, "job", 0)]
    play(hostile, tmp_path)
    assert first.state.proofs.keys() == {DEALER}
    assert SILO in first.state.notes
    return hostile, second
