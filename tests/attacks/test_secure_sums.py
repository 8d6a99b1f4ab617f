"""Attacks on secure sums (docs/security-rules.md), each twice: done where a rule is left out, and
refused.

Beside these, in tests/security: a lowered threshold is refused (test_round_spec.py, step 4), keys
and sets that differ from silo to silo (test_secagg_silo.py), a sum that was shifted or wrapped
around is noticed by its tags (test_tags.py, test_secagg_round.py), messages with anything in them
(test_secagg_hostile.py).
"""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from support.secure_sums import Drawn, Run, attempt, frame, group, names, signer, signers

from staddle.errors import LocalError, RefusedError
from staddle.security.arithmetic import fixedpoint
from staddle.security.arithmetic.masks import Term, pair_term
from staddle.security.arithmetic.shamir import join, weights_at_zero
from staddle.security.identity.domains import SECAGG_SPEC
from staddle.security.identity.pairwise_keys import agree, pair_key, self_key
from staddle.security.secagg import masked_sum
from staddle.security.secagg import silo as machine
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.dealing import PAIR, SELF
from staddle.security.secagg.masked_sum import Accumulator, GroupValues
from staddle.security.secagg.memory import Memory
from staddle.security.secagg.spec import Terms, specify

pytestmark = pytest.mark.actor("coordinator")

FIVE = names(5)
VICTIM = FIVE[4]
SECRETS = {
    silo: [GroupValues(np.random.default_rng(i).uniform(-1, 1, 20))] for i, silo in enumerate(FIVE)
}
STEP = 2.0**-24  # well above the rounding of five silos' numbers at a clip of 8


def asked(silo, spec, own, *, terms=None, memory=None):
    """A silo before a coordinator that asks it into any cohort: the state it enters, or
    RefusedError.
    """
    party = machine.Participant(silo, signers(FIVE), terms or Terms(), signer(silo), Drawn("asked"))
    signature = signer("coordinator")(SECAGG_SPEC, spec.signed_bytes())
    return machine.begin(party, own, spec.signed_bytes(), signature, memory or Memory())


def refused(silo, spec, own, **rest):
    with pytest.raises(RefusedError) as caught:
        asked(silo, spec, own, **rest)
    assert caught.value.peer == ("" if caught.value.code == "ABANDON" else "coordinator")
    return caught.value.code


# Rule 1: values that do not change between rounds.


COUNTS = dict(zip(FIVE, (57, 91, 64, 33, 120), strict=True))


def count_frame(round_):
    counted = group(weights="private", weight_most=400, weight_least=30)
    return frame(round=round_, groups=(counted,), model_digest=f"{round_:064x}")


def given_counts():
    weighted = lambda count: [GroupValues(np.zeros(20), np.array([float(count)]))]
    return {silo: weighted(count) for silo, count in COUNTS.items()}


@pytest.mark.control
def test_static_counts_over_varying_cohorts_are_solved_for():
    """Each round's cohort is known and its total weight comes out, so five rounds are five
    equations.
    """
    rounds = list(combinations(FIVE, 4))
    totals = []
    for number, cohort in enumerate(rounds):
        own = count_frame(number)
        run = Run(specify(own, cohort, 0), given_counts(), own=own).finish()
        totals.append(run.opened[0].weight[0])
    who = np.array([[silo in cohort for silo in FIVE] for cohort in rounds], np.float64)
    solved, *_ = np.linalg.lstsq(who, np.array(totals))
    assert dict(zip(FIVE, solved.round().astype(int).tolist(), strict=True)) == COUNTS


def test_static_counts_are_summed_over_all_or_not_at_all():
    terms = Terms(batches=(FIVE,))
    for number, cohort in enumerate(combinations(FIVE, 4)):
        own = count_frame(number)
        for silo in cohort:
            assert refused(silo, specify(own, cohort, 0), own, terms=terms) == "POLICY"
    own = count_frame(9)
    run = Run(specify(own, FIVE, 0), given_counts(), own=own, terms=terms).finish()
    assert run.opened[0].weight[0] == pytest.approx(sum(COUNTS.values()))
    # the cohort is whole, and one is lost on the way: neither the coordinator as it ships nor a
    # silo opens the rest
    spec, lost = specify(own, FIVE, 0), {"own": own, "drops": {VICTIM: "SendHeader"}}
    run = Run(spec, given_counts(), terms=terms, **lost).finish()
    assert (run.opened, run.ends["coordinator"].code) == (None, "TOO_FEW")
    lenient = Run(spec, given_counts(), **lost).finish()
    for silo in FIVE[:4]:
        state, event = lenient.before[silo, "SurvivorsReceived"]
        own = replace(state.participant, terms=terms)
        _, (end,) = machine.advance(replace(state, participant=own), event)
        assert (end.code, end.blame) == ("SURVIVORS", "coordinator")


def test_public_weights_tell_the_declared_counts_and_nothing_else():
    """Another count than the declared one changes neither what a silo sends nor the total."""
    own = frame(groups=(group(weights="public"),), counts=tuple((silo, 50) for silo in FIVE))
    spec = specify(own, FIVE, 0)
    run = Run(spec, SECRETS, own=own).finish()
    assert run.opened[0].weight.tolist() == [250.0]
    with pytest.raises(LocalError, match="weights are public"):
        masked_sum.check_group_values(spec, [GroupValues(np.zeros(20), np.array([57.0]))])


# Rule 17: one sum of one set of values. What two sums of them differ by is a silo's own vector.


AGAIN = {
    "a retry of the round": frame(),
    "a later round from the same model": frame(round=7),
    "the same round from another model": frame(model_digest="ee" * 32),
}


@pytest.mark.parametrize("how", AGAIN)
def test_two_sums_of_the_same_values_differ_by_one_silo(how):
    """Silos that forget let a coordinator open the sum again without the victim.

    Those that remember refuse.
    """
    first, own = Run(attempt(5), SECRETS).finish(), AGAIN[how]
    smaller = specify(own, FIVE[:4], 1)
    forgetful = Run(smaller, SECRETS, own=own, seed=1).finish()
    difference = first.opened[0].total - forgetful.opened[0].total
    assert np.abs(difference - SECRETS[VICTIM][0].values).max() < STEP

    for silo in FIVE[:4]:
        assert refused(silo, smaller, own, memory=first.memories[silo]) == "ATTEMPT"
    honest = frame(round=7, model_digest="ee" * 32)
    for silo in FIVE[:4]:
        entered, _ = asked(silo, specify(honest, FIVE[:4], 0), honest, memory=first.memories[silo])
        assert entered.stage == "keys"


def test_an_upload_that_may_still_be_opened_is_no_reason_for_another():
    """The coordinator has all uploads, says that the attempt failed, asks again without the victim,
    and opens both.
    """
    run = Run(attempt(5), SECRETS).finish()
    smaller = specify(frame(), FIVE[:4], 1)
    for silo in FIVE[:4]:
        uploaded = run.before[silo, "SurvivorsReceived"][0]
        assert (uploaded.stage, uploaded.memory.signed_round) == ("uploaded", -1)
        assert refused(silo, smaller, frame(), memory=uploaded.memory) == "ABANDON"
        told = run.before[silo, "SharesReceived"][0]  # nothing masked has left before this
        entered, _ = asked(silo, smaller, frame(), memory=told.memory)
        assert entered.stage == "keys"


# One mask hides one payload.


def test_a_pad_used_twice_shows_the_difference():
    spec, terms = attempt(5), [Term(bytes([i]) * 32) for i in range(5)]
    before, after = SECRETS[FIVE[0]], [GroupValues(SECRETS[FIVE[0]][0].values + 0.25)]
    chunks = (masked_sum.masked_chunks(spec, FIVE[0], each, terms) for each in (before, after))
    one, two = (np.concatenate([words.copy() for words in each]) for each in chunks)
    scale = spec.groups[0].scale_exponent
    shown = fixedpoint.dequantise(two - one, 32, scale)
    width = spec.chunk_bytes // 4 - 1  # words of the first chunk, before its canary
    assert np.abs(shown[:width] - 0.25).max() < STEP

    run = Run(spec, SECRETS).finish()
    state, event = run.before[FIVE[0], "Streamed"]
    uploaded, _ = machine.advance(state, event)
    ended, (end,) = machine.advance(uploaded, replace(event, sha256=bytes(32)))
    assert (ended.stage, end.code, ended.seeds) == ("ended", "UPLOAD", None)
    # and the masks of another attempt are others
    again = Run(attempt(5, 1), {**SECRETS, FIVE[0]: after}, seed=1).finish()
    words = [np.frombuffer(b"".join(each.uploads[FIVE[0]]), "<u4") for each in (run, again)]
    shown = fixedpoint.dequantise(words[1] - words[0], 32, scale)
    assert np.median(np.abs(shown[:width] - 0.25)) > 0.5


# Of each silo one of both shares.


def unmasked(run, shares):
    """The victim's vector, out of its upload and the shares of it that holders gave: (number, own,
    pair).
    """
    spec, ctx, state = run.spec, run.spec.context(), run.state
    weights = weights_at_zero([number for number, _, _ in shares])
    weights = dict(zip([number for number, _, _ in shares], weights, strict=True))
    own, pair = (join({number: held[i] for number, *held in shares}, weights) for i in (0, 1))
    if own is None or pair is None:
        return None
    terms = [Term(self_key(own, ctx, VICTIM, spec.prg, state.h_u2))]
    for other in FIVE[:4]:
        shared = agree(pair, state.bundles[other].mask, other)
        key = pair_key(shared, ctx, VICTIM, other, spec.prg, state.h_u2)
        terms.append(pair_term(VICTIM, other, key))
    accumulator = Accumulator(spec)
    accumulator.add(run.uploads[VICTIM])
    return accumulator.open(terms, [VICTIM])[0].total


def test_both_shares_of_a_silo_open_its_upload_and_silos_give_one():
    run = Run(attempt(5), SECRETS).finish()
    holders = [run.before[silo, "NotesReceived"][0].held[VICTIM] for silo in FIVE[:4]]
    shares = [(i + 1, held.own.share, held.pair.share) for i, held in enumerate(holders)]
    assert np.abs(unmasked(run, shares) - SECRETS[VICTIM][0].values).max() < STEP

    lost = Run(attempt(5), SECRETS, drops={VICTIM: "SendSurvival"}).finish()
    gone = Run(attempt(5), SECRETS, drops={VICTIM: "SendHeader"}).finish()
    # lost after its upload, it is in the sum
    for ran, kind in ((run, SELF), (lost, SELF), (gone, PAIR)):
        shares = [each for sent in ran.effects(s.SendReveal) for each in sent.reveal.shares]
        given = [each for each in shares if each.dealer == VICTIM]
        assert {each.kind for each in given} == {kind}
        assert len(given) >= ran.spec.threshold


# Rule 15: clipped first, then weighted.


def wrapped(spec, value):
    """The sum of what silos send who clip w x in the place of x, with the canaries that belong to
    it.
    """
    accumulator, own = Accumulator(spec), spec.groups[0]
    for silo in spec.cohort:
        weighted = np.full(own.elements, value * spec.share_of(silo, own))
        product = np.clip(weighted, -own.clip, own.clip)
        sent = []
        for chunk in masked_sum.chunks(spec):
            words = np.empty(chunk.words, "<u4")
            here = product[chunk.start : chunk.start + chunk.body]
            fixedpoint.quantise(own, here, 1.0, words[: chunk.body])
            words[chunk.body :] = masked_sum.canaries(spec.context(), chunk, own.ring)
            sent.append(words.tobytes())
        accumulator.add(sent)
    return accumulator.open([], spec.cohort)[0]


@pytest.mark.actor("silo")
def test_clipping_the_product_overflows_under_intact_canaries():
    own = frame(groups=(group(weights="public"),), counts=tuple((silo, 50) for silo in FIVE))
    spec, beyond = specify(own, FIVE, 0), 35.0
    naive = wrapped(spec, beyond).mean()  # its canaries came out, or this raises
    assert naive.tolist() == pytest.approx([3.0] * 20)  # 35 less the 32 that the ring spans
    assert wrapped(spec, 5.0).mean()[0] == pytest.approx(5.0)  # nothing is wrong with small values

    values = {
        silo: [GroupValues(np.full(20, beyond if silo in FIVE[:3] else 0.0))] for silo in FIVE
    }
    with pytest.raises(LocalError, match="largest magnitude is 35, above its clip 8"):
        masked_sum.check_group_values(spec, values[FIVE[0]])
    accumulator = Accumulator(spec)
    for silo in FIVE:
        clipped = masked_sum.check_group_values(spec, values[silo], saturate=True)
        assert clipped == (20 if silo in FIVE[:3] else 0,)
        chunks = masked_sum.masked_chunks(spec, silo, values[silo], [])
        accumulator.add([words.tobytes() for words in chunks])
    assert accumulator.open([], FIVE)[0].mean().tolist() == pytest.approx([8.0 * 3 / 5] * 20)
