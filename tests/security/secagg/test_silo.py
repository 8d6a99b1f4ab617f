"""A silo before a coordinator that cheats: each attack ends the attempt, with code and blame."""

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import secure_sums as sums

from staddle.errors import RefusedError
from staddle.security.arithmetic.shamir import commitment
from staddle.security.identity.domains import SECAGG_SPEC
from staddle.security.identity.pairwise_keys import public_key
from staddle.security.secagg import silo as machine
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.dealing import (
    PAIR,
    SELF,
    HeldShare,
    HeldShares,
    deal,
    deliver,
    distinct_keys,
    make_bundle,
)
from staddle.security.secagg.messages import (
    Sets,
    Survival,
    make_header,
    make_survival,
    set_digest,
)
from staddle.security.secagg.receiving_keys import deliver_keys, key_root, receiving_keys
from staddle.security.secagg.spec import Terms, specify

FIVE = sums.names(5)
ME, LOST = FIVE[0], FIVE[4]
RECEIVED = ("KeysReceived", "SharesReceived", "SurvivorsReceived", "NotesReceived")
ORDER = (*RECEIVED[:2], "Streamed", *RECEIVED[2:], "ResultReceived")


@pytest.fixture(scope="module")
def run():
    """Five silos, threshold 4; the last is lost during its upload."""
    return sums.Run(sums.attempt(5), sums.ones(FIVE), drops={LOST: "SendHeader"}).finish()


@pytest.fixture(scope="module")
def other():
    """The next attempt of the same round, with fresh keys."""
    return sums.Run(sums.attempt(5, number=1), sums.ones(FIVE), seed="other").finish()


def before(run, name, silo=ME):
    return run.before[silo, name]


def ended(state, event):
    """The one effect of an event that ends the attempt."""
    after, effects = machine.advance(state, event)
    assert after.stage == "ended"
    assert (after.seeds, after.held) == (None, {})
    (end,) = effects
    assert machine.advance(after, event) == (after, ())
    return end.code, end.blame


def by_coordinator(code):
    return code, "coordinator"


# Keys.


def swapped(items, index, item):
    return tuple(item if i == index else each for i, each in enumerate(items))


def with_bundles(run, bundles):
    """How the attempt ends when the coordinator brings these bundles."""
    state, event = before(run, "KeysReceived")
    return ended(state, s.KeysReceived(bundles, event.keys))


def with_bundle(run, bundle, index=1):
    bundles = before(run, "KeysReceived")[1].bundles
    return with_bundles(run, swapped(bundles, index, bundle))


def bundle_of(ctx, silo, by=None):
    return make_bundle(ctx, silo, bytes(32), bytes([1]) * 32, bytes(32), sums.signer(by or silo))


def test_keys_that_the_coordinator_put_in_the_place_of_a_silos(run, other):
    state, event = before(run, "KeysReceived")
    for changed in (
        bundle_of(state.ctx, FIVE[1], by="coordinator"),
        replace(event.bundles[1], seal=public_key(b"x" * 32)),
        replace(event.bundles[1], mask=public_key(b"x" * 32)),
        replace(event.bundles[1], signature=b""),
        replace(event.bundles[1], seal=b""),
        replace(event.bundles[1], silo=FIVE[2]),
        before(other, "KeysReceived")[1].bundles[1],  # of another attempt
    ):
        assert with_bundle(run, changed) == by_coordinator("KEYS")


def test_keys_of_a_stranger_of_one_twice_out_of_order_or_not_ours(run):
    state, event = before(run, "KeysReceived")
    bundles = event.bundles
    for changed in (
        (*bundles, bundle_of(state.ctx, "silo-99")), (*bundles, bundles[4]),
        (bundles[1], bundles[0], *bundles[2:]), bundles[1:],
        swapped(bundles, 0, bundle_of(state.ctx, ME)),
    ):  # fmt: skip
        assert with_bundles(run, changed) == by_coordinator("KEYS")


def test_one_key_in_two_places(run):
    state, event = before(run, "KeysReceived")
    victim = before(run, "KeysReceived", FIVE[2])[0].seeds
    for seeds in (
        (victim.seal, b"1" * 32), (b"1" * 32, victim.mask), (victim.mask, b"1" * 32),
        (b"1" * 32, b"1" * 32),
    ):  # fmt: skip
        twin = make_bundle(state.ctx, FIVE[1], *seeds, bytes(32), sums.signer(FIVE[1]))
        assert distinct_keys(swapped(event.bundles, 1, twin)) is not None
        assert with_bundle(run, twin) == by_coordinator("KEYS")


@pytest.mark.parametrize("field", ["seal", "mask"])
def test_a_key_of_low_order(run, field):
    state, event = before(run, "KeysReceived")
    low = sums.signed_bundle(event.bundles[1], state.ctx, **{field: bytes(32)})
    assert with_bundle(run, low) == by_coordinator("KEYS")


def test_receiving_keys_that_their_silos_did_not_sign_for_us(run):
    state, event = before(run, "KeysReceived")
    theirs = before(run, "KeysReceived", FIVE[2])[1].keys
    first, second, *rest = event.keys
    for changed in (
        (), event.keys[1:], event.keys[::-1], (*event.keys, second), (first, first, *rest), theirs,
        (replace(first, key=theirs[1].key), second, *rest),
        (replace(first, key=replace(first.key, public=public_key(b"x" * 32))), second, *rest),
        (replace(first, key=replace(first.key, public=b"")), second, *rest),
        (replace(first, proof=second.proof), second, *rest),
        (replace(first, proof=first.proof[1:]), second, *rest),
    ):  # fmt: skip
        assert ended(state, s.KeysReceived(event.bundles, tuple(changed))) == by_coordinator("KEYS")


def test_a_receiving_key_of_low_order_that_a_silo_signed(run):
    """The coordinator could have seen it, and passes it on."""
    state, event = before(run, "KeysReceived")
    contributor = before(run, "KeysReceived", FIVE[1])[0]
    keys = receiving_keys(contributor.seeds.receiving, state.ctx, FIVE[1], FIVE)
    keys = (replace(keys[0], public=bytes(32)), *keys[1:])
    bundles = swapped(
        event.bundles, 1, sums.signed_bundle(event.bundles[1], state.ctx, receiving=key_root(keys))
    )
    delivered = (deliver_keys(FIVE[1], keys)[ME], *event.keys[1:])
    assert ended(state, s.KeysReceived(bundles, delivered)) == by_coordinator("KEYS")


def test_too_few_gave_keys(run):
    state, event = before(run, "KeysReceived")
    four = s.KeysReceived(event.bundles[:4], event.keys[:3])
    assert machine.advance(state, four)[0].stage == "shares"
    assert ended(state, s.KeysReceived(event.bundles[:3], event.keys[:2])) == by_coordinator("KEYS")
    strict = replace(state, participant=replace(state.participant, terms=Terms(min_cohort=5)))
    assert ended(strict, four) == by_coordinator("KEYS")


# Shares.


def redealt(run, dealer, h_u1=None):
    """What a dealer dealt to ME, anew: its own machine's words, signed by it."""
    state, event = before(run, "KeysReceived", dealer)
    holders = {silo: state.spec.holder(silo) for silo in FIVE}
    own = (event.keys, dealer, state.seeds, 4, holders, sums.signer(dealer))
    dealing, portions, _ = deal(state.ctx, h_u1 or run.state.h_u1, *own)
    return deliver(dealing, portions)[0]


def told(run, index, delivery):
    state, event = before(run, "SharesReceived")
    return ended(state, s.SharesReceived(swapped(event.deliveries, index, delivery)))


def complained(run, index, delivery):
    """What a silo says of a portion that is rubbish, and how its attempt ends."""
    state, event = before(run, "SharesReceived")
    after, (sent, end) = machine.advance(
        state, s.SharesReceived(swapped(event.deliveries, index, delivery))
    )
    assert (after.stage, after.seeds, after.held) == ("ended", None, {})
    return sent.complaint, (end.code, end.blame)


def test_shares_that_are_not_signed_or_of_another_attempt_or_set(run, other):
    delivery = before(run, "SharesReceived")[1].deliveries[1]
    for changed in (
        replace(delivery, dealing=replace(delivery.dealing, root=bytes(32))),
        replace(delivery, dealing=replace(delivery.dealing, signature=b"")),
        before(other, "SharesReceived")[1].deliveries[1],
        redealt(run, FIVE[1], h_u1=bytes(32)),  # it was told another U1
    ):
        assert told(run, 1, changed) == by_coordinator("SHARES")


def test_a_portion_that_is_not_the_one_signed_or_for_another(run):
    delivery = before(run, "SharesReceived")[1].deliveries[1]
    theirs = before(run, "SharesReceived", FIVE[2])[1].deliveries[1]
    portion = delivery.portion
    for changed in (
        theirs, replace(delivery, portion=replace(portion, sealed=portion.sealed[:-1] + b"x")),
        replace(delivery, portion=replace(portion, own=bytes(32))),
        replace(delivery, proof=delivery.proof[1:]),
        replace(delivery, proof=(*delivery.proof, bytes(32))), replace(delivery, proof=(b"",)),
    ):  # fmt: skip
        assert told(run, 1, changed) == by_coordinator("SHARES")


def signed_portion(run, dealer, change):
    """A dealer's portion for ME after ``change``, under a root that the dealer did sign."""
    state, _ = before(run, "KeysReceived", dealer)
    portions = [run.state.portions[dealer][i] for i in range(5)]
    portions[0] = change(portions[0])
    dealing = sums.signed_dealing(run.state.dealings[dealer], state.ctx, portions)
    return deliver(dealing, portions)[0]


def test_a_dealer_whose_portion_does_not_open_or_does_not_fit_is_named(run):
    dealer = FIVE[1]
    for change in (
        lambda p: replace(p, sealed=p.sealed[:-1] + bytes([p.sealed[-1] ^ 1])),
        lambda p: replace(p, sealed=b""),
        lambda p: replace(p, own=p.pair),
        lambda p: replace(p, pair=bytes(32)),
    ):
        complaint, end = complained(run, 1, signed_portion(run, dealer, change))
        assert (complaint.silo, complaint.dealer, end) == (ME, dealer, ("SHARES", dealer))


def test_a_portion_that_names_another_holder_in_our_place(run):
    changed = signed_portion(run, FIVE[1], lambda p: replace(p, holder=FIVE[2]))
    assert told(run, 1, changed) == by_coordinator("SHARES")


def test_an_honest_redealing_is_accepted(run):
    """The attacks above fail for what they say, and not for how the test makes them."""
    state, event = before(run, "SharesReceived")
    for fresh in (redealt(run, FIVE[1]), signed_portion(run, FIVE[1], lambda p: p)):
        honest = s.SharesReceived(swapped(event.deliveries, 1, fresh))
        assert machine.advance(state, honest)[0].stage == "uploading"


def test_u2_without_us_too_small_or_not_of_u1(run):
    state, event = before(run, "SharesReceived")
    d = event.deliveries
    assert machine.advance(state, s.SharesReceived(d[:4]))[0].stage == "uploading"
    stranger = replace(d[4], dealing=replace(d[4].dealing, dealer="silo-99"))
    for changed in (d[1:], d[:3], (*d, d[4]), (d[1], d[0], *d[2:]), swapped(d, 4, stranger)):
        assert ended(state, s.SharesReceived(changed)) == by_coordinator("SHARES")


def test_two_u2_give_masks_that_do_not_cancel(run):
    """H(U2) is in each mask's key: silos that were told different sets share no masks."""
    state, event = before(run, "SharesReceived")
    theirs, told_them = before(run, "SharesReceived", FIVE[1])
    _, effects = machine.advance(state, s.SharesReceived(event.deliveries[:4]))
    _, other_effects = machine.advance(theirs, told_them)
    _, same = machine.advance(state, event)
    keys, other_keys, same_keys = (
        {term.key for effect in found for term in getattr(effect, "terms", ())}
        for found in (effects, other_effects, same)
    )
    assert not keys & other_keys
    assert len(same_keys & other_keys) == 1


# The upload.


def test_one_payload_under_one_mask(run):
    state, event = before(run, "Streamed")
    after, (header,) = machine.advance(state, event)
    assert machine.advance(after, event) == (after, (header,))  # a lost connection was resumed
    assert ended(after, replace(event, sha256=bytes(32))) == ("UPLOAD", ME)
    assert ended(after, replace(event, tags=b"t")) == ("UPLOAD", ME)
    assert ended(state, replace(event, length=event.length - 4)) == ("UPLOAD", ME)
    for name in ("KeysReceived", "SharesReceived"):
        assert ended(before(run, name)[0], event) == ("ORDER", ME)


# Survivors.


def test_headers_that_do_not_hold(run, other):
    state, event = before(run, "SurvivorsReceived")
    length, h_u2 = event.headers[1].length, event.headers[1].h_u2
    foreign = make_header(
        state.ctx, FIVE[1], bytes(32), length, bytes(32), b"", sums.signer(FIVE[1])
    )
    short = make_header(state.ctx, FIVE[1], h_u2, length - 1, bytes(32), b"", sums.signer(FIVE[1]))
    for changed in (
        foreign, short, replace(event.headers[1], sha256=bytes(32)),
        replace(event.headers[1], tags=b"t"), replace(event.headers[1], length=-1),
        before(other, "SurvivorsReceived")[1].headers[1],
    ):  # fmt: skip
        headers = swapped(event.headers, 1, changed)
        assert ended(state, s.SurvivorsReceived(headers)) == by_coordinator("UPLOAD")


def test_survivors_without_us_too_few_or_not_of_u2(run):
    state, event = before(run, "SurvivorsReceived")
    h = event.headers
    assert [header.silo for header in h] == list(FIVE[:4])
    ours, fifth = (
        make_header(state.ctx, silo, h[0].h_u2, h[0].length, bytes(32), b"", sums.signer(silo))
        for silo in (ME, "silo-99")
    )
    for changed in (h[1:], h[:3], (*h, h[3]), (h[1], h[0], *h[2:]), (*h, fifth), (ours, *h[1:])):
        assert ended(state, s.SurvivorsReceived(changed)) == by_coordinator("SURVIVORS")
    strict = replace(state, participant=replace(state.participant, terms=Terms(min_honest=4)))
    assert ended(strict, event) == by_coordinator("SURVIVORS")


def test_a_second_set_of_survivors(run):
    state, event = before(run, "NotesReceived")
    first = s.SurvivorsReceived(state.headers)
    assert machine.advance(state, first) == (state, ())
    assert ended(state, s.SurvivorsReceived(first.headers[:3])) == by_coordinator("EQUIVOCATION")
    assert event.survivals


# Signatures, and what is revealed.


def test_too_few_signatures_and_signatures_of_another_set(run, other):
    state, event = before(run, "NotesReceived")
    notes = event.survivals
    sets = Sets(state.h_u1, state.h_u2, state.h_u3)
    shrunk = Sets(state.h_u1, state.h_u2, set_digest(b"U3", state.ctx, []))
    split = make_survival(state.ctx, FIVE[1], shrunk, sums.signer(FIVE[1]))
    for changed in (
        notes[:3], (), (*notes[:3], notes[2]), swapped(notes, 1, split),
        swapped(notes, 1, replace(notes[1], signature=b"")),
        swapped(notes, 1, replace(notes[1], silo=LOST)),
        swapped(notes, 1, make_survival(state.ctx, "silo-99", shrunk, sums.signer("silo-99"))),
        swapped(notes, 1, before(other, "NotesReceived")[1].survivals[1]),
        (*notes, Survival(FIVE[3], notes[3].signature)),
        (*notes, make_survival(state.ctx, LOST, sets, sums.signer(LOST))),
    ):  # fmt: skip
        assert ended(state, s.NotesReceived(changed)) == by_coordinator("NOTES")


@pytest.mark.parametrize("field", ["h_u1", "h_u2", "h_u3"])
def test_a_signature_binds_every_set(run, field):
    state, event = before(run, "NotesReceived")
    sets = replace(Sets(state.h_u1, state.h_u2, state.h_u3), **{field: bytes(32)})
    wrong = make_survival(state.ctx, FIVE[1], sets, sums.signer(FIVE[1]))
    notes = swapped(event.survivals, 1, wrong)
    assert ended(state, s.NotesReceived(notes)) == by_coordinator("NOTES")


def test_of_each_silo_one_share_by_our_own_map(run):
    state, event = before(run, "NotesReceived")
    after, (effect,) = machine.advance(state, event)
    kinds = [(revealed.dealer, revealed.kind) for revealed in effect.reveal.shares]
    assert kinds == [(silo, SELF) for silo in FIVE[:4]] + [(LOST, PAIR)]
    for revealed in effect.reveal.shares:
        assert revealed.held == state.held[revealed.dealer].of(revealed.kind)
        other_kind = PAIR if revealed.kind == SELF else SELF
        assert revealed.held != state.held[revealed.dealer].of(other_kind)
    # a second request, with other signatures of the same set even, gets nothing
    assert machine.advance(after, event) == (after, ())
    assert machine.advance(after, s.NotesReceived(event.survivals[::-1])) == (after, ())


# Order.


@pytest.mark.parametrize("name", [*RECEIVED, "ResultReceived"])
def test_a_message_again_changes_nothing_and_too_early_ends(run, name):
    _, event = before(run, name)
    early = {"ResultReceived": ["NotesReceived"]}.get(name, [])  # others may reveal before us
    for later in ORDER:
        state, _ = before(run, later)
        if ORDER.index(later) < ORDER.index(name) and later not in early:
            assert ended(state, event) == by_coordinator("ORDER")
        elif ORDER.index(later) > ORDER.index(name):
            assert machine.advance(state, event) == (state, ())


def test_another_first_message_is_equivocation(run):
    state, _ = before(run, "SurvivorsReceived")
    keys, shares = before(run, "KeysReceived")[1], before(run, "SharesReceived")[1]
    for other in (
        s.KeysReceived(keys.bundles[:4], keys.keys[:3]),
        s.SharesReceived(shares.deliveries[:4]),
    ):
        assert ended(state, other) == by_coordinator("EQUIVOCATION")


@settings(max_examples=150)
@given(st.lists(st.sampled_from((*ORDER, "AbandonAsked", "AttemptStopped")), max_size=12))
def test_whatever_comes_each_message_is_sent_once_and_revealing_needs_all_before(names_):
    ran = SHARED
    state = before(ran, "KeysReceived")[0]
    events = {name: before(ran, name)[1] for name in ORDER}
    events |= {"AbandonAsked": s.AbandonAsked(), "AttemptStopped": s.AttemptStopped("test")}
    sent = []
    for name in names_:
        state, effects = machine.advance(state, events[name])
        sent += [type(effect).__name__ for effect in effects]
    wanted = ["SendShares", "UploadWords", "SendSurvival", "SendReveal"]
    once = [name for name in sent if name in wanted]
    assert once == wanted[: len(once)]
    assert not {"SendSurvival", "SendAbandon"} <= set(sent)  # never both


SHARED = sums.Run(sums.attempt(5), sums.ones(FIVE), drops={LOST: "SendHeader"}).finish()


def test_permuted_messages_reveal_nothing_unless_in_order(run):
    names_ = ORDER[:5]
    start = before(run, "KeysReceived")[0]
    revealed = []
    for order in permutations(names_):
        state = start
        for name in order:
            state, effects = machine.advance(state, before(run, name)[1])
            if any(isinstance(effect, s.SendReveal) for effect in effects):
                revealed.append(order)
    assert revealed == [names_]


# Abandoning, stopping, entering.


def test_abandon_or_sign_never_both(run):
    for name in ORDER[:4]:
        state, event = before(run, name)
        after, (remember, send, end) = machine.advance(state, s.AbandonAsked())
        assert (after.stage, end.code, remember.memory.abandoned) == ("ended", "STOPPED", True)
        assert send.note.holds(state.ctx, run.signers)
        assert machine.advance(after, event) == (after, ())
        again, (_, resent) = machine.advance(after, s.AbandonAsked())
        assert resent == send
        assert again == after
    for name in ("NotesReceived", "ResultReceived"):
        state, _ = before(run, name)
        assert machine.advance(state, s.AbandonAsked()) == (state, ())
    done = run.silos[ME]
    assert machine.advance(done, s.AbandonAsked()) == (done, ())


def test_an_attempt_that_failed_before_it_was_signed_can_still_be_abandoned(run):
    state, _ = before(run, "SurvivorsReceived")
    after, _ = machine.advance(state, s.AttemptStopped("the coordinator ended it"))
    _, effects = machine.advance(after, s.AbandonAsked())
    assert [type(effect).__name__ for effect in effects] == ["Remember", "SendAbandon"]
    signed, _ = machine.advance(before(run, "NotesReceived")[0], s.AttemptStopped("x"))
    assert machine.advance(signed, s.AbandonAsked()) == (signed, ())


def test_stopped_ends_with_nobodys_fault(run):
    assert ended(before(run, "NotesReceived")[0], s.AttemptStopped("asked to")) == ("STOPPED", "")


def entered(spec, *, memory=None, own=None, notes=(), by="coordinator", silo=ME):
    participant = machine.Participant(
        silo, sums.signers(FIVE), Terms(), sums.signer(silo), sums.Drawn("entered")
    )
    signed = spec.signed_bytes(), sums.signer(by)(SECAGG_SPEC, spec.signed_bytes())
    return machine.begin(
        participant, own or sums.frame(), *signed, memory or machine.Memory(), notes
    )


def test_two_models_or_two_schemas_are_refused_at_the_door():
    for name in ("model_digest", "schema_digest"):
        with pytest.raises(RefusedError, match=f"specifies {name}") as caught:
            entered(specify(sums.frame(**{name: "ee" * 32}), FIVE, 0))
        assert (caught.value.peer, caught.value.code) == ("coordinator", "SPEC")
    with pytest.raises(RefusedError, match="signature"):
        entered(sums.attempt(5), by=FIVE[1])
    assert entered(sums.attempt(5))[0].stage == "keys"


def test_fresh_secrets_each_time(run, other):
    seeds = [before(r, "KeysReceived", silo)[0].seeds for r in (run, other) for silo in FIVE]
    drawn = [secret for each in seeds for secret in (each.seal, each.mask, each.own, each.dealing)]
    assert len(set(drawn)) == len(drawn) == 40


def test_a_held_share_that_is_no_number_of_the_field_never_fits():
    share = HeldShare((2**256 + 297).to_bytes(33), bytes(32))
    long, good = HeldShare(bytes(33), bytes(33)), HeldShare(bytes(33), bytes(32))
    place = (b"c", "a", "b", SELF)
    for held, fits in ((share, False), (long, False), (good, True)):
        assert held.fits(*place, commitment(*place, held.salt, held.share)) is fits
    assert HeldShares(share, good).of(PAIR) is good


def test_public_weights_are_checked_again_on_the_survivors():
    def counted(first, **how):
        counts = tuple(zip(FIVE, (first, 10, 10, 10, 10), strict=True))
        own = sums.frame(groups=(sums.group(weights="public"),), counts=counts)
        return sums.Run(specify(own, FIVE, 0), sums.ones(FIVE), own=own, **how).finish()

    assert counted(10).opened[0].weight.tolist() == [50.0]
    ran = counted(20, drops={FIVE[1]: "SendHeader"})
    assert ran.opened[0].weight.tolist() == [50.0]
    state, event = before(ran, "SurvivorsReceived")
    # 20, 10, 10 count as 2.67 silos
    strict = replace(state, participant=replace(state.participant, terms=Terms(min_cohort=4)))
    assert ended(strict, event) == by_coordinator("SURVIVORS")
    ran = counted(20, drops={FIVE[1]: "SendHeader"}, terms=Terms(4))
    assert (ran.opened, ran.ends["coordinator"].code) == (None, "TOO_FEW")
    assert not ran.tells(s.SurvivorsReceived)


def test_a_retry_without_some_silos_shows_their_difference_to_nobody():
    """Signed: no other attempt, none from the model. Uploaded only: none without others' word."""
    ran = sums.Run(sums.attempt(5), sums.ones(FIVE), drops={FIVE[1]: "SendHeader"}).finish()
    assert ran.opened is not None
    smaller = [({}, 1), ({"round": 4}, 0), ({"model_digest": "ee" * 32}, 1)]
    blamed = ((ME, "coordinator", "ATTEMPT"), (FIVE[1], "", "ABANDON"))
    for silo, peer, code in blamed:
        for changes, number in smaller:
            own = sums.frame(**changes)
            with pytest.raises(RefusedError) as caught:
                entered(
                    specify(own, FIVE[:4], number), own=own, memory=ran.memories[silo], silo=silo
                )
            assert (caught.value.peer, caught.value.code) == (peer, code)
    own = sums.frame(round=4, model_digest="ee" * 32)
    fresh = specify(own, FIVE[:4], 0)

    def from_round(start, silo):
        memory = ran.memories[silo].starting(start)
        return entered(fresh, own=own, memory=memory, silo=silo)[0]

    for silo, peer, code in blamed:  # trained once more from where round 3 began
        with pytest.raises(RefusedError) as caught:
            from_round(0, silo)
        assert (caught.value.peer, caught.value.code) == (peer, code)
        assert from_round(4, silo).stage == "keys"


def test_notes_on_an_earlier_round_count_of_silos_that_the_new_cohort_lacks():
    """Another part of the job's silos was drawn since."""
    eight = sums.names(8)
    before = specify(sums.frame(), eight, 0)
    memory = machine.Memory().starting(0).uploading(before, eight)
    notes = tuple(
        machine.make_abandon(before.context(), silo, sums.signer(silo)) for silo in eight[4:]
    )
    own = sums.frame(round=4, model_digest="ee" * 32)
    spec = specify(own, eight[:4], 0)

    def enter(others):
        drawn = sums.Drawn("entered")
        participant = machine.Participant(
            ME, sums.signers(eight[:4]), Terms(), sums.signer(ME), drawn, others
        )
        signature = sums.signer("coordinator")(SECAGG_SPEC, spec.signed_bytes())
        return machine.begin(participant, own, spec.signed_bytes(), signature, memory, notes)

    assert enter(sums.signers(eight))[0].stage == "keys"
    with pytest.raises(RefusedError, match="brings abandon notes of 0 silos, not 4"):
        enter(None)
