"""What shows that a dealer broke the rules holds against who did, and against nobody else."""

import random
from dataclasses import replace
from itertools import combinations

import pytest
from support.secure_sums import (
    Run,
    attempt,
    names,
    ones,
    signed_bundle,
    signed_dealing,
    signer,
    signers,
    with_portion,
)

from staddle.errors import RefusedError
from staddle.security.identity.pairwise_keys import public_key
from staddle.security.secagg import coordinator as machine
from staddle.security.secagg import coordinator_events as c
from staddle.security.secagg import silo as silo_machine
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.dealing import PAIR, SELF, deal, deliver, open_portion
from staddle.security.secagg.evidence import (
    Misdealing,
    ShownShare,
    Unjoined,
    Unopened,
    make_complaint,
    proven,
)
from staddle.security.secagg.memory import Memory
from staddle.security.secagg.receiving_keys import (
    ReceivingKey,
    key_root,
    receiving_keys,
    receiving_seed,
)
from staddle.security.secagg.spec import Terms

FIVE = names(5)
DEALER, VICTIM = FIVE[1], FIVE[3]
REST = tuple(silo for silo in FIVE if silo != DEALER)
SPOILS = {
    "random bytes": lambda portion: replace(portion, sealed=bytes(len(portion.sealed))),
    "one bit": lambda portion: replace(
        portion, sealed=portion.sealed[:-1] + bytes([portion.sealed[-1] ^ 1])
    ),
    "a commitment to another share": lambda portion: replace(portion, own=bytes(32)),
    "and of the other kind": lambda portion: replace(portion, pair=bytes(32)),
}


def rubbish(run, effect, spoil=SPOILS["random bytes"], victims=(VICTIM,)):
    """What the dealer sends in the place of what it dealt: signed, and for the victims rubbish."""
    portions = tuple(
        spoil(portion) if portion.holder in victims else portion for portion in effect.portions
    )
    dealing = signed_dealing(effect.dealing, run.spec.context(), portions)
    run.silos[DEALER] = replace(run.silos[DEALER], dealing=dealing)
    return s.SendShares(dealing, portions)


def with_rubbish(spec=None, memories=None, notes=(), seed=0, **how):
    run = Run(spec or attempt(5), ones(FIVE), seed=seed, memories=memories, notes=notes)

    def alter(silo, effect):
        dealt = silo == DEALER and isinstance(effect, s.SendShares)
        return rubbish(run, effect, **how) if dealt else effect

    run.alter = alter
    return run


def guilty_in(run):
    return {silo for silo, code in run.state.failed.items() if code in ("MISDEALT", "COMPLAINT")}


# Complaints.


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
@pytest.mark.parametrize("seed", range(3))
def test_a_dealer_that_seals_rubbish_is_named_and_its_victim_is_not(spoil, seed):
    run = with_rubbish(spoil=spoil, seed=seed).finish()
    end = run.ends["coordinator"]
    assert (end.code, end.blame, guilty_in(run)) == ("MISDEALT", DEALER, {DEALER})
    assert run.ends[VICTIM].blame == DEALER
    assert run.opened is None


def test_the_next_attempt_without_the_dealer_has_the_sum_of_all_others():
    """n - t + c + 1 = 3 silos give the first attempt up; the dropped dealer is not waited for."""
    first = with_rubbish().finish()
    assert first.state.notes_missing == 0
    notes = tuple(first.state.notes.values())
    second = Run(attempt(5, 1), ones(FIVE), memories=first.memories, notes=notes, seed=1)
    second.deliver("coordinator", c.SiloDropped(DEALER, "MISDEALT"))
    second.finish()
    assert second.state.u3 == REST
    assert second.opened[0].total[0] == (1 + 3 + 4 + 5) / 16


def test_one_complaint_ends_the_attempt_and_others_change_nothing():
    run = with_rubbish(victims=(FIVE[0], VICTIM, FIVE[4])).finish()
    assert run.ends["coordinator"].blame == DEALER
    assert len(run.state.complaints) == 1
    assert guilty_in(run) == {DEALER}


HONEST = Run(attempt(5), ones(FIVE), seed=4).finish()
MASKED, _ = HONEST.before["coordinator", "WordsUploaded"]
MASKED = replace(MASKED, headers={})


def key_for(silo, dealer, run=HONEST):
    """A silo's private key for what a dealer seals to it."""
    return receiving_seed(
        run.before[silo, "KeysReceived"][0].seeds.receiving, MASKED.ctx, silo, dealer
    )


def complain(silo, dealer, key=None, h_u2=None, by=None):
    given = key if key is not None else key_for(silo, dealer)
    return make_complaint(MASKED.ctx, silo, h_u2 or MASKED.h_u2, dealer, given, signer(by or silo))


FALSE = {
    "all is well": complain(VICTIM, DEALER),
    "with its key for another dealer": complain(VICTIM, DEALER, key_for(VICTIM, FIVE[0])),
    "with any key": complain(VICTIM, DEALER, b"k" * 32),
    "with a key that is too short": complain(VICTIM, DEALER, b"k" * 31),
    "about itself": complain(VICTIM, VICTIM, b"k" * 32),
    "about a stranger": complain(VICTIM, "silo-99", b"k" * 32),
    "signed by another": complain(VICTIM, DEALER, by=FIVE[0]),
    "of another attempt": complain(VICTIM, DEALER, h_u2=bytes(32)),
    "not signed": replace(complain(VICTIM, DEALER), signature=b""),
}


@pytest.mark.parametrize("complaint", FALSE.values(), ids=FALSE)
def test_a_complaint_that_does_not_hold_names_who_complains_and_the_others_go_on(complaint):
    after, effects = machine.advance(MASKED, s.SendComplaint(complaint))
    (refused,) = effects
    assert (refused.silo, refused.code) == (VICTIM, "COMPLAINT")
    assert (after.stage, after.failed) == ("masked", {VICTIM: "COMPLAINT"})


def test_a_lying_complainer_is_left_out_of_the_sum_and_its_dealer_is_in_it():
    run = Run(attempt(5), ones(FIVE), seed=4)

    def alter(silo, effect):
        if silo != VICTIM or not isinstance(effect, s.UploadWords):
            return effect
        state = run.silos[silo]
        key = receiving_seed(state.seeds.receiving, state.ctx, silo, DEALER)
        return s.SendComplaint(
            make_complaint(state.ctx, silo, state.h_u2, DEALER, key, signer(silo))
        )

    run.alter = alter
    run.finish()
    assert run.state.u3 == tuple(x for x in FIVE if x != VICTIM)
    assert run.state.failed == {VICTIM: "COMPLAINT"}
    assert run.opened[0].total[0] == (1 + 2 + 3 + 5) / 16


@pytest.mark.parametrize("name", ["SendKeys", "SendShares", "SendSurvival", "SendReveal"])
def test_a_complaint_that_comes_too_early_or_too_late_changes_nothing(name):
    state, _ = HONEST.before["coordinator", name]
    after, (refused,) = machine.advance(state, s.SendComplaint(complain(VICTIM, DEALER)))
    assert (after, refused.code) == (state, "ORDER")
    uploaded = replace(MASKED, headers={VICTIM: None})  # it has masked what it was dealt
    after, (refused,) = machine.advance(uploaded, s.SendComplaint(complain(VICTIM, DEALER)))
    assert (after, refused.code) == (uploaded, "ORDER")


def test_a_complaint_opens_one_portion_and_nothing_else():
    """By trying: of all portions of the attempt, one opens with the key that is given away."""
    key, opened = key_for(VICTIM, DEALER), []
    for dealer, portions in HONEST.state.portions.items():
        for portion in portions:
            if portion.holder == dealer:
                continue
            for sender in HONEST.state.bundles.values():  # whoever it is said to be from
                try:
                    open_portion(portion, MASKED.ctx, sender, key)
                except RefusedError:
                    continue
                opened.append((dealer, portion.holder))
    assert opened == [(DEALER, VICTIM)]


def test_keys_for_dealers_do_not_show_one_another_or_the_seed():
    seed = b"s" * 32
    made = {(v, u): receiving_seed(seed, MASKED.ctx, v, u) for v in FIVE for u in FIVE if u != v}
    assert len({*made.values(), seed}) == 21
    keys = receiving_keys(seed, MASKED.ctx, VICTIM, FIVE)
    assert keys == tuple(ReceivingKey(u, public_key(made[VICTIM, u])) for u in FIVE if u != VICTIM)


def told(evidence, run, **other):
    """What a silo that is shown evidence makes of it; the code with which it refuses it."""
    spec = run.spec.model_copy(update=other)
    try:
        return proven((evidence,), spec.federation, spec.job_digest, run.signers)
    except RefusedError as error:
        return error.code if error.peer == "coordinator" else error.peer


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_what_was_sealed_and_does_not_open_proves_it_to_anyone_in_its_job_alone(spoil):
    run = with_rubbish(spoil=spoil).finish()
    evidence = run.state.proofs[DEALER]
    assert list(run.state.proofs) == [DEALER]
    assert told(evidence, run) == {DEALER}
    assert told(evidence, run, job_digest="ee" * 32) == "MISDEALT"
    assert told(evidence, run, federation="heart") == "MISDEALT"
    for other in (attempt(5, 1), attempt(5, round=4), attempt(5, job_digest="ee" * 32)):
        replayed = replace(evidence, document=other.signed_bytes())
        assert told(replayed, run, job_digest=other.job_digest) == "MISDEALT"
    assert told(replace(evidence, document=b"{}"), run) == "MISDEALT"


def unopened(run=HONEST, dealer=DEALER, holder=VICTIM, key=None, **changes):
    """The evidence of a silo and a coordinator that are in league against an honest dealer."""
    state = run.state
    dealt = state.bundles[dealer], state.dealings[dealer], state.portions[dealer]
    fault = Unopened(holder, key_for(holder, dealer) if key is None else key)
    return replace(Misdealing(run.spec.signed_bytes(), *dealt, fault), **changes)


def test_a_silo_that_signs_two_sets_of_receiving_keys_frames_nobody():
    """The dealer seals to the key of the first set, and the silo shows the key of the second, as if
    that were it.

    Every other thing holds: the second bundle is signed, the key is under its root, and what was
    sealed does not open.
    """
    seed = b"another".ljust(32)
    keys = receiving_keys(seed, MASKED.ctx, VICTIM, FIVE)
    first = HONEST.state.bundles[VICTIM]
    second = signed_bundle(first, MASKED.ctx, receiving=key_root(keys))
    second.check(MASKED.ctx, HONEST.signers)
    key = receiving_seed(seed, MASKED.ctx, VICTIM, DEALER)
    portions = HONEST.state.portions[DEALER]
    (portion,) = (each for each in portions if each.holder == VICTIM)
    with pytest.raises(RefusedError):
        open_portion(portion, MASKED.ctx, HONEST.state.bundles[DEALER], key)
    assert told(unopened(key=key), HONEST) == "MISDEALT"
    # Nor with the dealer's portion made out to the second key: the dealer signed the first.
    swapped = with_portion(portions, VICTIM, key=public_key(key))
    assert told(unopened(key=key, portions=swapped), HONEST) == "MISDEALT"
    # A dealing of their own over it is not signed by the dealer.
    for by in (VICTIM, "coordinator"):
        dealing = signed_dealing(HONEST.state.dealings[DEALER], MASKED.ctx, swapped, by)
        assert told(unopened(key=key, portions=swapped, dealing=dealing), HONEST) == "MISDEALT"


DEALT = HONEST.state.portions[DEALER]
FRAMED = {
    "all is well": unopened(),
    "its key for another dealer": unopened(key=key_for(VICTIM, FIVE[0])),
    "the key of another holder": unopened(key=key_for(FIVE[0], DEALER)),
    "any key": unopened(key=b"k" * 32),
    "a key that is too short": unopened(key=b""),
    "the portion of the dealer to itself": unopened(holder=DEALER, key=b""),
    "a holder that was dealt nothing": unopened(holder="silo-99", key=b"k" * 32),
    "the portions of another dealer": unopened(portions=HONEST.state.portions[FIVE[0]]),
    "the dealing of another dealer": unopened(dealing=HONEST.state.dealings[FIVE[0]]),
    "the keys of another dealer": unopened(bundle=HONEST.state.bundles[FIVE[0]]),
    "the portion of another holder": unopened(
        portions=with_portion(DEALT, VICTIM, sealed=DEALT[0].sealed)
    ),
    "portions in another order": unopened(portions=DEALT[::-1]),
    "one portion alone": unopened(portions=tuple(p for p in DEALT if p.holder == VICTIM)),
}


@pytest.mark.parametrize("evidence", FRAMED.values(), ids=FRAMED)
def test_invented_evidence_proves_nothing(evidence):
    """Nothing that a silo and the coordinator invent proves an honest dealer at fault."""
    assert told(evidence, HONEST) == "MISDEALT"


def test_a_dealer_that_says_it_sealed_to_another_key_drops_out():
    """Else nobody could show what it sealed."""
    state, event = HONEST.before["coordinator", "SendShares"]
    dealer = event.dealing.dealer
    victim = next(silo for silo in FIVE if silo != dealer)
    portions = with_portion(event.portions, victim, key=public_key(b"x" * 32))
    dealing = signed_dealing(event.dealing, state.ctx, portions)
    after, (refused, *_) = machine.advance(state, s.SendShares(dealing, portions))
    assert (refused.silo, refused.code, after.failed) == (dealer, "SHARES", {dealer: "SHARES"})


def test_a_portion_that_is_sealed_to_a_key_of_nobody_blames_who_brought_it():
    state, event = HONEST.before[VICTIM, "SharesReceived"]
    (place,) = (at for at, each in enumerate(event.deliveries) if each.dealing.dealer == DEALER)
    portions = with_portion(HONEST.state.portions[DEALER], VICTIM, key=public_key(b"x" * 32))
    dealing = signed_dealing(HONEST.state.dealings[DEALER], state.ctx, portions)
    changed = list(event.deliveries)
    changed[place] = deliver(dealing, portions)[FIVE.index(VICTIM)]
    _, (end,) = silo_machine.advance(state, s.SharesReceived(tuple(changed)))
    assert (end.code, end.blame) == ("SHARES", "coordinator")
    assert "key which it never gave" in end.why


def test_receiving_keys_that_do_not_hold_drop_out_who_gave_them():
    state, event = HONEST.before["coordinator", "SendKeys"]
    contributor, keys = event.bundle.silo, event.keys

    def given(changed):
        root = key_root(changed) if changed else bytes(32)
        bundle = signed_bundle(event.bundle, state.ctx, receiving=root)
        return s.SendKeys(bundle, tuple(changed))

    for wrong in (
        given(()),
        given(keys[1:]),
        given(keys[::-1]),
        given((*keys, keys[0])),
        given((replace(keys[0], dealer="silo-99"), *keys[1:])),
        given((replace(keys[0], dealer=contributor), *keys[1:])),
        given((replace(keys[0], public=b"short"), *keys[1:])),
        s.SendKeys(event.bundle, (*keys[:3], replace(keys[3], public=public_key(b"x" * 32)))),
        *(given((replace(keys[0], public=low), *keys[1:])) for low in LOW_ORDER),
    ):
        after, (refused, *_) = machine.advance(state, wrong)
        assert (refused.silo, refused.code) == (contributor, "KEYS")
        assert after.failed == {contributor: "KEYS"}
    assert contributor in machine.advance(state, given(keys))[0].bundles


P = 2**255 - 19
# a point of order 8, RFC 7748
ORDER_8 = 325606250916557431795983626356110631294008115727848805560023387167927233504
LOW_ORDER = [number.to_bytes(32, "little") for number in (0, 1, P - 1, P, P + 1, ORDER_8)]


# Shares that do not join.


def misdealt(spec=None, holders=REST, kind=SELF, seed=0, **fields):
    """A run whose dealer deals these holders shares of another secret, which yet fit."""
    spec = spec or attempt(5)
    run = Run(spec, ones(spec.cohort), seed=seed, **fields)

    def alter(silo, effect):
        if silo != DEALER or not isinstance(effect, s.SendShares):
            return effect
        state, event = run.before[DEALER, "KeysReceived"]
        numbers = {member: spec.holder(member) for member in spec.cohort}
        wrong = replace(state.seeds, **{"own" if kind == SELF else "mask": b"w" * 32})
        args = (spec.threshold, numbers, signer(DEALER))
        h_u1 = effect.dealing.h_u1
        _, honest, _ = deal(state.ctx, h_u1, event.keys, DEALER, state.seeds, *args)
        _, other, _ = deal(state.ctx, h_u1, event.keys, DEALER, wrong, *args)
        portions = tuple(
            o if h.holder in holders else h for h, o in zip(honest, other, strict=True)
        )
        dealing = signed_dealing(effect.dealing, state.ctx, portions)
        run.silos[DEALER] = replace(run.silos[DEALER], dealing=dealing)
        return s.SendShares(dealing, portions)

    run.alter = alter
    return run


def ended_by(run):
    run.finish()
    end = run.ends["coordinator"]
    assert (end.code, end.blame, run.opened) == ("MISDEALT", DEALER, None)
    assert run.state.evidence.proves(run.spec, run.signers)
    return run


@pytest.mark.parametrize("seed", range(3))
def test_shares_that_do_not_join_are_evidence(seed):
    """The survivors repeat the sum without the dealer of such shares."""
    first = ended_by(misdealt(seed=seed))
    assert first.state.u3 == FIVE
    assert not first.tells(s.AbandonAsked)
    assert all(memory.is_signed(first.state.ctx) for memory in first.memories.values())
    second = Repeating(first).finish()
    assert second.opened[0].total[0] == (1 + 3 + 4 + 5) / 16
    assert second.state.u3 == REST


class Repeating(Run):
    """An attempt that silos are asked into with evidence; ``no`` has the codes of refusals."""

    def __init__(self, first, number=1, evidence=None, silos=FIVE, **fields):
        self.no, self.evidence = {}, evidence or first.state.evidence
        spec = attempt(len(silos), number)
        super().__init__(spec, ones(silos), memories=first.memories, **fields)
        out = {DEALER: "MISDEALT"}
        self.state, effects = machine.begin(
            spec, self.signers, self.terms, signer("coordinator"), out
        )
        self.queue, self.sent = [], []
        self.do("coordinator", effects)

    def deliver(self, to, event):
        if not isinstance(event, c.Ask) or to == "coordinator":
            super().deliver(to, event)
            return
        memory = self.memories.get(to, Memory())
        try:
            brought = (event.document, event.signature, memory, self.notes, self.evidence)
            state, effects = silo_machine.begin(self.participant(to), self.frame, *brought)
        except RefusedError as error:
            self.no[to] = error.code
            self.silent.add(to)
            return
        self.silos[to] = state
        self.do(to, effects)


def test_a_repeated_sum_has_the_very_survivors_that_were_signed():
    """One silo more would show, beside the first sum, what that silo gave: nobody signs."""
    first = ended_by(misdealt())
    second = Repeating(first, drops={VICTIM: "SendHeader"}, seed=2).finish()
    assert second.opened is None
    seven = names(7)
    assert attempt(7).threshold == 5
    first = misdealt(attempt(7), holders=[x for x in seven if x != DEALER]).finish()
    assert first.state.evidence is not None
    for lost in (seven[0], seven[6]):
        second = Repeating(first, silos=seven, drops={lost: "UploadWords"}).finish()
        assert len(second.state.u3) == 5  # enough to open a sum
        assert (second.opened, dict(second.state.survivals)) == (None, {})
        assert {end.code for end in second.ends.values()} >= {"SURVIVORS"}
    others = tuple(silo for silo in seven if silo != DEALER)
    assert Repeating(first, silos=seven).finish().state.u3 == others


def test_without_evidence_or_with_such_as_proves_nothing_no_sum_is_repeated():
    first = ended_by(misdealt())
    good = first.state.evidence
    three = good.fault.shares[:3]
    honest = HONEST.state
    shares = tuple(ShownShare(holder, held_of(HONEST, holder, DEALER, SELF)) for holder in FIVE[:4])
    dealt = honest.bundles[DEALER], honest.dealings[DEALER], honest.portions[DEALER]
    joining = Misdealing(HONEST.spec.signed_bytes(), *dealt, Unjoined(SELF, shares))
    assert not joining.proves(HONEST.spec, HONEST.signers)
    for wrong in (
        None, joining, with_shares(good, three), with_shares(good, (*three, three[2])),
        with_shares(good, (*three, replace(good.fault.shares[3], held=three[2].held))),
        replace(good, fault=Unjoined(PAIR, good.fault.shares)),
        replace(good, document=attempt(5, 1).signed_bytes()),
        replace(good, portions=good.portions[1:]),
        replace(good, portions=good.portions[::-1]),
        replace(good, bundle=replace(good.bundle, signature=bytes(64))),
        replace(good, bundle=first.state.bundles[VICTIM]),
        replace(good, dealing=replace(good.dealing, signature=bytes(64))),
        replace(good, dealing=replace(good.dealing, seed=bytes(32))),
        replace(good, dealing=first.state.dealings[VICTIM]),
    ):  # fmt: skip
        second = Repeating(first, evidence=wrong or joining)
        if wrong is None:
            second.evidence = None
        second.finish()
        assert (second.opened, second.no) == (None, dict.fromkeys(REST, "ATTEMPT"))


def with_shares(evidence, shares):
    return replace(evidence, fault=replace(evidence.fault, shares=shares))


def held_of(run, holder, dealer, kind):
    """A holder's share of a dealer, from before it dropped its secrets."""
    return run.before[holder, "SurvivorsReceived"][0].held[dealer].of(kind)


@pytest.mark.parametrize("kind", [SELF, PAIR])
def test_no_shares_of_an_honest_dealer_are_evidence_against_it(kind):
    """All sets of t holders of each dealer, and the dealer's own share among them."""
    state = HONEST.state
    for dealer in FIVE:
        for holders in combinations(FIVE, 4):
            shares = tuple(
                ShownShare(holder, held_of(HONEST, holder, dealer, kind)) for holder in holders
            )
            dealt = state.bundles[dealer], state.dealings[dealer], state.portions[dealer]
            evidence = Misdealing(HONEST.spec.signed_bytes(), *dealt, Unjoined(kind, shares))
            assert not evidence.proves(HONEST.spec, HONEST.signers)


def test_evidence_is_of_its_attempt_alone():
    evidence = ended_by(misdealt()).state.evidence
    for other in (attempt(5, 1), attempt(5, round=4), attempt(6)):
        assert not evidence.proves(other, signers(other.cohort))
    assert not evidence.proves(attempt(5), signers(()))


def test_a_lost_dealer_of_another_secret_is_out_and_the_survivors_repeat_the_sum():
    first = ended_by(misdealt(kind=PAIR, drops={DEALER: "SendHeader"}))
    assert first.state.u3 == REST
    second = Repeating(first).finish()
    assert (second.state.u3, second.opened[0].total[0]) == (REST, (1 + 3 + 4 + 5) / 16)


def test_a_dealer_whose_wrong_shares_did_no_harm_is_named_too():
    """One share is wrong, t others join: the sum opens, and what the coordinator saw is proof."""
    wrong = FIVE[0]
    seen = []
    for seed in range(6):
        run = misdealt(holders=(wrong,), seed=seed).finish()
        assert run.opened[0].total[0] == 15 / 16
        seen.append(run.state.failed.get(DEALER))
        assert all(told(evidence, run) == {DEALER} for evidence in run.state.proofs.values())
        assert bool(run.state.proofs) == (DEALER in run.state.failed)
    assert set(seen) <= {None, "MISDEALT"}  # the wrong share may be among those that nobody needed
    assert "MISDEALT" in seen


def test_a_signed_round_is_repeated_from_the_memory_alone():
    """A restarted silo has its memory and the evidence; another specification is refused."""
    first = ended_by(misdealt())
    memory = first.memories[VICTIM]
    evidence, spec = first.state.evidence, attempt(5, 1)
    assert memory.repeated(spec, evidence, first.signers) == REST
    for other in (attempt(5, 1, model_digest="ee" * 32), attempt(5, 1, purpose="count")):
        with pytest.raises(RefusedError, match="another sum than was signed"):
            memory.repeated(other, evidence, first.signers)
    assert memory.repeated(attempt(5, 0, round=4), evidence, first.signers) == ()
    with pytest.raises(RefusedError, match="summed before"):  # nor the same model in another round
        memory.entered(attempt(5, 0, round=4), (), first.signers, evidence)


def test_a_repetition_may_be_abandoned_and_repeated_and_a_signed_one_may_not():
    first = ended_by(misdealt())
    second = Repeating(first, drops=dict.fromkeys(REST[:2], "SendHeader"), seed=3).finish()
    assert second.opened is None
    notes = tuple(second.state.notes.values())
    assert second.state.notes_missing == 4 - 4 + 1 + 1 - len(notes) == 0
    third = Repeating(second, evidence=first.state.evidence, number=2, seed=5, notes=notes).finish()
    assert third.state.u3 == REST
    again = Repeating(third, evidence=first.state.evidence, number=3, seed=6).finish()
    # that evidence was of the first
    assert (again.opened, set(again.no.values())) == (None, {"ATTEMPT"})


# Anything in any order.


@pytest.mark.parametrize("seed", range(40))
def test_permuted_and_missing_messages_never_name_an_honest_silo(seed):
    """Rubbish or a liar, among silos lost at random: nobody else is ever named."""
    draw = random.Random(seed)
    steps = ["SendKeys", "SendShares", "SendHeader", "SendSurvival", "SendReveal"]
    lost = {silo: draw.choice(steps) for silo in FIVE}
    drops = {silo: lost[silo] for silo in draw.sample(REST, draw.randrange(3))}
    kind = draw.choice(["sealed", "own", "pair"])
    if kind == "sealed":
        victims = tuple(draw.sample(REST, draw.randrange(1, 4)))
        run = with_rubbish(seed=seed, victims=victims)
        run.drops = drops
    else:
        run = misdealt(kind=SELF if kind == "own" else PAIR, drops=drops, seed=seed)
    run.finish()
    assert guilty_in(run) <= {DEALER}
    blamed = {end.blame for end in run.ends.values()}
    assert blamed <= {"", "coordinator", DEALER}  # who hears of the result first blames who told it
    assert run.state.stage in ("done", "ended")
    if run.opened is not None:
        assert run.opened[0].total[0] == sum(FIVE.index(silo) + 1 for silo in run.state.u3) / 16


def test_terms_of_the_policy_hold_in_a_repetition_too():
    first = ended_by(misdealt())
    strict = Terms(min_cohort=5)
    with pytest.raises(RefusedError):
        machine.check_survivors(first.spec, strict, REST)
