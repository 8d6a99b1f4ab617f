"""A coordinator before silos that cheat or vanish: it refuses them, drops them or names them."""

import hashlib
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from support.secure_sums import Run, attempt, names, ones, signed_dealing, signer, signers

from staddle.errors import LocalError, RefusedError
from staddle.security.arithmetic import shamir
from staddle.security.arithmetic.shamir import SHARE_BYTES
from staddle.security.identity.domains import SECAGG_REVEAL
from staddle.security.secagg import coordinator as machine
from staddle.security.secagg import coordinator_events as c
from staddle.security.secagg import masked_sum
from staddle.security.secagg import silo as secagg_silo
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.dealing import PAIR, SELF, HeldShare, deal, make_bundle
from staddle.security.secagg.messages import Reveal, make_abandon, make_header
from staddle.security.secagg.spec import Terms

FIVE = names(5)
LIAR = FIVE[2]


@pytest.fixture(scope="module")
def run():
    """Five silos, threshold 4, nobody lost."""
    return Run(attempt(5), ones(FIVE), seed=2).finish()


def cheating(kind, change, n=5, liar=LIAR, **fields):
    """A run in which one silo sends another ``kind`` of effect than its machine says."""

    def alter(silo, effect):
        return change(effect) if silo == liar and isinstance(effect, kind) else effect

    return Run(attempt(n), ones(names(n)), alter=alter, **fields).finish()


def refusals(run):
    return [(effect.silo, effect.code) for effect in run.effects(c.Refuse, "coordinator")]


def whole_sum(run):
    return sum(names(12).index(silo) + 1 for silo in run.state.u3) / 16


def signed_header(header):
    """Of an upload of other bytes, which the liar signs."""
    of = (LIAR, header.h_u2, header.length, bytes(32))
    return make_header(attempt(5).context(), *of, b"", signer(LIAR))


def test_replaying_the_events_gives_the_states():
    run = Run(attempt(5), ones(FIVE), drops={FIVE[4]: "SendHeader"}, seed=3)
    history, deliver = [], run.deliver
    start = run.state

    def noted(to, event):
        history.append((to, event))
        deliver(to, event)

    run.deliver = noted
    run.finish()
    state = start
    for to, event in history:
        if to == "coordinator":
            state, _ = machine.advance(state, event)
    assert state == run.state
    first = run.before[FIVE[0], "KeysReceived"][0]
    for to, event in history:
        if to == FIVE[0] and not isinstance(event, c.Ask):
            first, _ = secagg_silo.advance(first, event)
    assert first == run.silos[FIVE[0]]


# What a silo sends that does not hold: it drops out, the others go on.


ANOTHER = make_bundle(b"another" * 4, LIAR, bytes(32), b"1" * 32, bytes(32), signer(LIAR))


@pytest.mark.parametrize("change", [
    lambda e: replace(e, bundle=replace(e.bundle, signature=b"x" * 64)),
    lambda e: replace(e, bundle=replace(e.bundle, mask=bytes(31))),
    lambda e: replace(e, bundle=replace(e.bundle, seal=e.bundle.mask)),
    lambda e: replace(e, bundle=ANOTHER),
])  # fmt: skip
def test_keys_that_do_not_hold(change):
    run = cheating(s.SendKeys, change)
    assert refusals(run) == [(LIAR, "KEYS")]
    assert LIAR not in run.state.u1
    assert run.opened[0].total[0] == whole_sum(run)


def test_the_keys_of_another_silo(run):
    state, event = run.before["coordinator", "SendKeys"]
    silo, victim = event.bundle.silo, next(iter(state.bundles))
    seeds = run.before[victim, "KeysReceived"][0].seeds
    copied = make_bundle(
        state.ctx, silo, seeds.seal, b"1" * 32, event.bundle.receiving, signer(silo)
    )
    after, (refused, *_) = machine.advance(state, s.SendKeys(copied, event.keys))
    assert (refused.silo, refused.code, silo in after.failed) == (silo, "KEYS", True)


@pytest.mark.parametrize("change", [
    lambda e: replace(e, dealing=replace(e.dealing, signature=bytes(64))),
    lambda e: replace(e, dealing=replace(e.dealing, h_u1=bytes(32))),
    lambda e: replace(e, portions=e.portions[1:]), lambda e: replace(e, portions=e.portions[::-1]),
    lambda e: replace(e, portions=(replace(e.portions[0], own=bytes(32)), *e.portions[1:])),
    lambda e: replace(e, portions=(replace(e.portions[0], sealed=b""), *e.portions[1:])),
    lambda e: replace(e, portions=(replace(e.portions[0], pair=bytes(31)), *e.portions[1:])),
    lambda e: replace(e, portions=()),
])  # fmt: skip
def test_shares_that_do_not_hold(change):
    run = cheating(s.SendShares, change)
    assert refusals(run) == [(LIAR, "SHARES")]
    assert LIAR in run.state.u1
    assert LIAR not in run.state.u2
    assert run.opened[0].total[0] == whole_sum(run) == (1 + 2 + 4 + 5) / 16


@pytest.mark.parametrize("change", [
    lambda portions: portions[1:], lambda portions: portions[::-1],
    lambda portions: (*portions, portions[0]), lambda _: (),
    lambda portions: (replace(portions[0], sealed=b""), *portions[1:]),
    lambda portions: (replace(portions[0], own=bytes(31)), *portions[1:]),
    lambda portions: (*portions[:2], replace(portions[2], sealed=bytes(146)), *portions[3:]),
])  # fmt: skip
def test_shares_that_are_signed_and_not_one_portion_for_each(run, change):
    state, _ = run.before["coordinator", "SendShares"]
    portions = change(run.state.portions[LIAR])
    dealing = signed_dealing(run.state.dealings[LIAR], state.ctx, portions)
    state = replace(state, dealings={}, portions={})
    after, (refused, *_) = machine.advance(state, s.SendShares(dealing, portions))
    assert (refused.silo, refused.code, after.dealings) == (LIAR, "SHARES", {})
    honest, _ = machine.advance(
        state, s.SendShares(run.state.dealings[LIAR], run.state.portions[LIAR])
    )
    assert list(honest.dealings) == [LIAR]


@pytest.mark.parametrize("change", [
    lambda e: replace(e, header=replace(e.header, signature=bytes(64))),
    lambda e: replace(e, header=replace(e.header, length=e.header.length + 1)),
    lambda e: replace(e, header=replace(e.header, h_u2=bytes(32))),
    lambda e: replace(e, header=replace(e.header, sha256=bytes(32))),
    lambda e: replace(e, header=signed_header(e.header)),
])  # fmt: skip
def test_uploads_that_are_not_what_was_signed(change):
    run = cheating(s.SendHeader, change)
    assert refusals(run) == [(LIAR, "UPLOAD")]
    assert LIAR in run.state.u2
    assert LIAR not in run.state.u3
    assert run.opened[0].total[0] == whole_sum(run) == (1 + 2 + 4 + 5) / 16


def test_an_upload_of_other_bytes_than_arrived(run):
    state, event = run.before["coordinator", "WordsUploaded"]
    for changed in (replace(event, sha256=bytes(32)), replace(event, length=event.length - 1)):
        after, (refused, *_) = machine.advance(state, changed)
        assert (refused.silo, refused.code) == (event.header.silo, "UPLOAD")
        assert event.header.silo not in after.headers


def test_a_signature_over_other_survivors():
    run = cheating(
        s.SendSurvival, lambda e: replace(e, survival=replace(e.survival, signature=bytes(64)))
    )
    assert (LIAR, "NOTES") in refusals(run)
    assert LIAR not in run.state.survivals
    assert run.opened[0].total[0] == whole_sum(run) == 15 / 16  # its upload stays in the sum


LYING = Run(attempt(5), ones(FIVE), seed=2).finish()


@pytest.mark.parametrize("change", [
    lambda a, *rest: (replace(a, held=HeldShare(bytes(SHARE_BYTES), a.held.salt)), *rest),
    lambda a, *rest: (replace(a, held=HeldShare(a.held.share, bytes(32))), *rest),
    lambda a, *rest: (replace(a, kind=PAIR), *rest), lambda _, *rest: rest,
    lambda a, b, *rest: (b, a, *rest), lambda *all_: (*all_, all_[0]),
    lambda a, *rest: (replace(a, dealer=rest[0].dealer), *rest), lambda *_: (),
])  # fmt: skip
def test_a_share_that_was_not_dealt_names_who_revealed_it(change):
    """The liar signs what it reveals, so that only the commitments tell."""
    state, _ = LYING.before["coordinator", "SendReveal"]
    state = replace(state, reveals={}, survivals={**state.survivals, LIAR: None})
    (honest,) = LYING.effects(s.SendReveal, LIAR)
    reveal = Reveal(LIAR, tuple(change(*honest.reveal.shares)))
    payload = reveal.signed_bytes(LYING.state.ctx, LYING.state.h_u3)
    reveal = replace(reveal, signature=signer(LIAR)(SECAGG_REVEAL, payload))
    after, (refused, *_) = machine.advance(state, s.SendReveal(reveal))
    assert (refused.silo, refused.code) == (LIAR, "REVEAL")
    assert (after.reveals, LIAR in after.failed) == ({}, True)
    taken, _ = machine.advance(state, s.SendReveal(honest.reveal))
    assert list(taken.reveals) == [LIAR]


def test_an_unsigned_reveal():
    run = cheating(
        s.SendReveal, lambda e: replace(e, reveal=replace(e.reveal, signature=bytes(64))), seed=5
    )
    assert set(refusals(run)) <= {(LIAR, "REVEAL"), (LIAR, "ORDER")}
    assert LIAR not in run.state.reveals
    assert run.opened[0].total[0] == 15 / 16  # four others are enough


@pytest.mark.parametrize("which", ["own", "mask"])
def test_a_dealer_of_shares_of_something_else_is_named(which):
    """Its shares fit their commitments, but join to another seed: no sum, and it is named."""
    drops = {} if which == "own" else {LIAR: "SendHeader"}

    def alter(silo, effect):
        if silo != LIAR or not isinstance(effect, s.SendShares):
            return effect
        state, event = run.before[LIAR, "KeysReceived"]
        wrong = replace(state.seeds, **{which: b"w" * 32})
        holders = {member: state.spec.holder(member) for member in FIVE}
        dealing, portions, _ = deal(
            state.ctx, effect.dealing.h_u1, event.keys, LIAR, wrong, 4, holders, signer(LIAR)
        )
        dealing = signed_dealing(dealing, state.ctx, seed=effect.dealing.seed)
        run.silos[LIAR] = replace(run.silos[LIAR], dealing=dealing)
        return s.SendShares(dealing, portions)

    run = Run(attempt(5), ones(FIVE), drops=drops, alter=alter)
    run.finish()
    assert run.opened is None
    assert (run.ends["coordinator"].code, run.ends["coordinator"].blame) == ("MISDEALT", LIAR)


def wrongly_dealt(run, holders):
    """In place of what LIAR deals: shares that are of none of its polynomials, yet fit."""

    def split(secret, threshold, numbers, draw):
        wrong = {FIVE.index(holder) + 1: bytes(33) for holder in holders}
        return {**shamir.split(secret, threshold, numbers, draw), **wrong}

    def alter(silo, effect):
        if silo != LIAR or not isinstance(effect, s.SendShares):
            return effect
        state, event = run.before[LIAR, "KeysReceived"]
        numbers = {member: state.spec.holder(member) for member in FIVE}
        with patch("staddle.security.secagg.dealing.split", split):
            own = (event.keys, LIAR, state.seeds, 4, numbers, signer(LIAR))
            dealing, portions, kept = deal(state.ctx, effect.dealing.h_u1, *own)
        run.silos[LIAR] = replace(run.silos[LIAR], dealing=dealing, held={LIAR: kept})
        return s.SendShares(dealing, portions)

    run.alter = alter
    return run.finish()


@pytest.mark.parametrize("holder", FIVE)
@pytest.mark.parametrize("seed", [0, 1])
def test_one_wrong_share_ends_no_sum(holder, seed):
    run = wrongly_dealt(Run(attempt(5), ones(FIVE), seed=seed), [holder])
    assert run.opened[0].total[0] == 15 / 16
    assert run.ends == {}


def test_where_no_other_shares_come_a_wrong_one_ends_the_sum_and_its_dealer_is_named():
    holder = next(silo for silo in FIVE if silo != LIAR)
    silent = next(silo for silo in FIVE if silo not in (LIAR, holder))
    for run in (
        wrongly_dealt(Run(attempt(5), ones(FIVE), drops={silent: "SendReveal"}), [holder]),
        wrongly_dealt(Run(attempt(5), ones(FIVE)), [silo for silo in FIVE if silo != LIAR]),
    ):
        assert run.opened is None
        assert (run.ends["coordinator"].code, run.ends["coordinator"].blame) == ("MISDEALT", LIAR)


def test_garbage_in_a_masked_upload_is_noticed_by_its_canaries():
    """Values may be anything, unseen; a spoilt canary ends the attempt, whoever sent it."""
    run = Run(attempt(5), ones(FIVE))
    while LIAR not in run.uploads:
        run.deliver(*run.queue.pop(0))
    spoiled = bytearray(run.uploads[LIAR][0])
    spoiled[-1] ^= 1
    run.uploads[LIAR][0] = bytes(spoiled)
    run.queue = [(to, e) for to, e in run.queue if not (to == LIAR and isinstance(e, s.Streamed))]
    data = b"".join(run.uploads[LIAR])
    run.queue.append((LIAR, s.Streamed(len(data), hashlib.sha256(data).digest())))
    run.finish()
    assert run.opened is None
    assert run.ends["coordinator"].code == "SUM"


# Order, repetition, strangers.


# each message, and what in it names its silo
GIVEN = {"SendKeys": "bundle", "SendShares": "dealing", "WordsUploaded": "header"}
GIVEN |= {"SendSurvival": "survival", "SendReveal": "reveal"}


@pytest.mark.parametrize("name", GIVEN)
def test_messages_too_early_too_late_twice_or_of_strangers_change_nothing(run, name):
    state, event = run.before["coordinator", name]
    for other_name in GIVEN:
        other, _ = run.before["coordinator", other_name]
        if other.stage != state.stage and not (name == "SendSurvival" and other.stage == "reveal"):
            after, (refused,) = machine.advance(other, event)
            assert (after, refused.code) == (other, "ORDER")
    once, _ = machine.advance(state, event)
    if once.stage == state.stage:
        after, (refused,) = machine.advance(once, event)
        assert (after, refused.code) == (once, "ORDER")
    by = {"dealer" if name == "SendShares" else "silo": "silo-99"}
    stranger = replace(event, **{GIVEN[name]: replace(getattr(event, GIVEN[name]), **by)})
    after, (refused,) = machine.advance(state, stranger)
    assert (after, refused.silo, refused.code) == (state, "silo-99", "ORDER")


def test_a_stale_deadline_changes_nothing(run):
    state, _ = run.before["coordinator", "WordsUploaded"]
    assert machine.advance(state, c.AttemptDeadline("keys")) == (state, ())
    assert machine.advance(run.state, c.AttemptDeadline("done")) == (run.state, ())
    assert machine.advance(run.state, c.OpenFailed("late")) == (run.state, ())


def test_who_signs_late_may_still_reveal_in_the_place_of_another():
    """Four of five sign; one vanishes before it reveals; the fifth signs late and reveals."""
    run = Run(attempt(5), ones(FIVE), drops={FIVE[0]: "SendReveal"})
    late = []
    while run.state.stage != "reveal" or run.queue:
        if not run.queue:
            break
        to, event = run.queue.pop(0)
        if isinstance(event, s.SendSurvival) and event.survival.silo == LIAR and not late:
            late.append((to, event))
            continue
        run.deliver(to, event)
    assert run.state.stage == "reveal"
    assert sorted(run.state.reveals) == [FIVE[1], FIVE[3], FIVE[4]]
    run.queue += late
    run.finish()
    assert run.opened[0].total[0] == 15 / 16


def test_silos_that_fail_close_a_stage_or_end_the_attempt():
    run = Run(attempt(5), ones(FIVE))
    state, effects = machine.advance(run.state, c.SiloDropped(FIVE[0], "lost"))
    assert (state.stage, effects) == ("keys", ())
    assert machine.advance(state, c.SiloDropped(FIVE[0], "again")) == (state, ())
    assert machine.advance(state, c.SiloDropped("silo-99", "lost")) == (state, ())
    state, effects = machine.advance(state, c.SiloDropped(FIVE[1], "lost"))
    for silo in FIVE[2:]:
        state, effects = machine.advance(state, c.SiloDropped(silo, "lost"))
    assert state.stage == "ended"
    assert [(e.code, e.blame) for e in effects if isinstance(e, c.EndAttempt)] == [("TOO_FEW", "")]
    assert not [e for e in effects if isinstance(getattr(e, "message", None), s.AbandonAsked)]
    # no masked byte was asked for: another attempt may follow at once
    assert state.notes_missing == 0
    run = Run(attempt(5), ones(FIVE), drops=dict.fromkeys(FIVE[:2], "SendShares")).finish()
    assert (run.state.stage, run.state.u1, run.state.notes_missing) == ("ended", FIVE, 0)


def test_who_failed_is_not_listened_to_and_is_not_in_the_next_set(run):
    state, event = run.before["coordinator", "SendKeys"]  # the last of five: four are in
    dropped, _ = machine.advance(state, c.SiloDropped(event.bundle.silo, "lost"))
    assert (dropped.stage, len(dropped.u1)) == ("shares", 4)
    first = next(iter(state.bundles))
    dropped, _ = machine.advance(state, c.SiloDropped(first, "lost"))
    after, _ = machine.advance(dropped, event)
    assert after.u1 == tuple(silo for silo in FIVE if silo != first)
    open_, event = run.before["coordinator", "SendSurvival"]
    open_ = replace(open_, survivals={})
    dropped, _ = machine.advance(open_, c.SiloDropped(event.survival.silo, "lost"))
    after, (refused,) = machine.advance(dropped, event)
    assert (after, refused.code) == (dropped, "ORDER")


def test_each_stage_must_be_as_large_as_min_cohort():
    for step, sizes in (
        ("SendKeys", (0, 0, 0)),
        ("SendShares", (5, 0, 0)),
        ("SendHeader", (5, 5, 0)),
    ):
        run = Run(attempt(5), ones(FIVE), drops={LIAR: step}, terms=Terms(min_cohort=5)).finish()
        assert (len(run.state.u1), len(run.state.u2), len(run.state.u3)) == sizes, step
        assert run.ends["coordinator"].code == "TOO_FEW", step


TWELVE = names(12)
BATCHES = tuple(TWELVE[at : at + 3] for at in range(0, 12, 3))


@pytest.mark.parametrize("lost", ["SendKeys", "SendShares", "SendHeader"])
def test_a_silo_that_is_lost_takes_its_batch_out_of_the_sum(lost):
    terms = Terms(batches=BATCHES)
    run = Run(attempt(12), ones(TWELVE), drops={TWELVE[4]: lost}, terms=terms, seed=4).finish()
    kept = tuple(silo for silo in TWELVE if silo not in BATCHES[1])
    assert (run.state.stage, run.state.u3) == ("done", kept)
    found = {"SendKeys": run.state.u1, "SendShares": run.state.u2, "SendHeader": run.state.u3}[lost]
    assert found == kept
    assert np.array_equal(run.opened[0].total, np.full(20, whole_sum(run)))


def test_who_is_lost_behind_its_upload_breaks_no_batch():
    run = Run(
        attempt(12), ones(TWELVE), drops={TWELVE[4]: "SendSurvival"}, terms=Terms(batches=BATCHES)
    ).finish()
    assert (run.state.stage, run.state.u3) == ("done", TWELVE)


def test_two_broken_batches_of_four_end_the_attempt():
    drops = {TWELVE[4]: "SendKeys", TWELVE[9]: "SendKeys"}
    run = Run(attempt(12), ones(TWELVE), drops=drops, terms=Terms(batches=BATCHES)).finish()
    assert (run.state.u1, run.ends["coordinator"].code) == ((), "TOO_FEW")
    found = run.ends["coordinator"].why
    assert found == "stage 'keys' closed with 6 silos in whole batches, fewer than 9"


@pytest.mark.parametrize("name", ["SendSurvival", "SendReveal"])
def test_survivors_too_few_to_unmask_end_the_attempt_before_the_deadline(run, name):
    state = replace(run.before["coordinator", name][0], reveals={})
    state = replace(state, survivals={}) if name == "SendSurvival" else state
    state, effects = machine.advance(state, c.SiloDropped(FIVE[0], "lost"))
    assert effects == ()
    state, effects = machine.advance(state, c.SiloDropped(FIVE[1], "lost"))
    assert state.stage == "ended"
    assert [e.code for e in effects if isinstance(e, c.EndAttempt)] == ["TOO_FEW"]


# Abandoned attempts.


def test_notes_are_asked_for_once_masked_bytes_may_have_left_and_counted():
    drops = dict.fromkeys(FIVE[3:], "SendHeader")
    run = Run(attempt(5), ones(FIVE), drops=drops).finish()
    assert run.ends["coordinator"].code == "TOO_FEW"
    (asked,) = run.tells(s.AbandonAsked)
    assert asked.silos == FIVE
    assert {effect.silo for effect in run.effects(c.Discard)} == set(FIVE[:3])
    # |U1| - t + c + 1 = 5 - 4 + 1 + 1 = 3, and three silos are there to give them
    assert sorted(run.state.notes) == list(FIVE[:3])
    assert run.state.notes_missing == 0
    assert replace(run.state, notes={}).notes_missing == 3


def test_a_note_that_does_not_hold_does_not_count(run):
    state, _ = run.before["coordinator", "WordsUploaded"]
    for note in (
        make_abandon(bytes(32), LIAR, signer(LIAR)),
        make_abandon(state.ctx, "silo-99", signer("silo-99")),
        make_abandon(state.ctx, LIAR, signer(FIVE[0])),
    ):
        assert machine.advance(state, s.SendAbandon(note)) == (state, ())
    after, _ = machine.advance(state, s.SendAbandon(make_abandon(state.ctx, LIAR, signer(LIAR))))
    assert (sorted(after.notes), after.failed) == ([LIAR], {LIAR: "ABANDON"})


def test_a_note_of_who_is_not_in_u1_does_not_count():
    run = Run(attempt(5), ones(FIVE), drops={LIAR: "SendKeys"}).finish()
    state, _ = run.before["coordinator", "WordsUploaded"]
    note = make_abandon(state.ctx, LIAR, signer(LIAR))
    assert machine.advance(state, s.SendAbandon(note)) == (state, ())


def test_another_attempt_follows_with_the_notes_of_the_first():
    first = Run(attempt(5), ones(FIVE), drops=dict.fromkeys(FIVE[3:], "SendHeader")).finish()
    notes = tuple(first.state.notes.values())
    second = Run(
        attempt(5, number=1), ones(FIVE), seed=1, memories=first.memories, notes=notes
    ).finish()
    assert second.opened[0].total[0] == 15 / 16
    with pytest.raises(RefusedError) as caught:
        Run(attempt(5, number=1), ones(FIVE), memories=first.memories, notes=notes[1:]).finish()
    assert (caught.value.peer, caught.value.code) == ("", "ABANDON")


# Before anything is asked.


def test_a_cohort_that_no_silo_would_join_is_not_asked():
    for spec, terms in ((attempt(3), Terms()), (attempt(4), Terms(min_cohort=5))):
        with pytest.raises(RefusedError):
            machine.begin(spec, signers(spec.cohort), terms, signer("coordinator"))


def test_values_that_cannot_be_sent_end_at_the_silo():
    values = ones(FIVE)
    values[LIAR] = [masked_sum.GroupValues(np.full(20, np.nan))]
    with pytest.raises(LocalError, match="NaN"):
        Run(attempt(5), values).finish()


def test_kinds_of_shares_are_two():
    drops = {FIVE[1]: "UploadWords", FIVE[0]: "SendSurvival"}
    run = Run(attempt(5), ones(FIVE), drops=drops).finish()
    # five, less one upload, less one signature: three of the four that it takes
    assert run.opened is None
    run = Run(attempt(7), ones(names(7)), drops=drops).finish()
    found = {each.dealer: each.kind for each in next(iter(run.state.reveals.values())).shares}
    assert found == {silo: PAIR if silo == names(7)[1] else SELF for silo in names(7)}
