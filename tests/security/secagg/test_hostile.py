"""Messages with anything in place of anything: the machines end or refuse, and never raise."""

from dataclasses import fields, is_dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.secure_sums import Run, attempt, names, ones, signer

from staddle.errors import RefusedError
from staddle.security.secagg import coordinator
from staddle.security.secagg import coordinator_events as c
from staddle.security.secagg import evidence as e
from staddle.security.secagg import silo as machine
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.dealing import PAIR, SELF
from staddle.security.secagg.receiving_keys import receiving_seed

FIVE = names(5)
ANY_KEY = st.binary(min_size=32, max_size=32)
RUN = Run(attempt(5), ones(FIVE), drops={FIVE[4]: "SendHeader"}).finish()
DOCUMENT = RUN.spec.signed_bytes()
TO_SILO = ["KeysReceived", "SharesReceived", "SurvivorsReceived", "NotesReceived"]
TO_COORDINATOR = [
    "SendKeys", "SendShares", "WordsUploaded", "SendSurvival", "SendReveal",
]  # fmt: skip


def corrupted(draw, value):
    """The value with one thing in it changed, however deep."""
    if is_dataclass(value):
        name = draw(st.sampled_from([each.name for each in fields(value)]))
        return replace(value, **{name: corrupted(draw, getattr(value, name))})
    if isinstance(value, tuple):
        hows = ["drop", "again", "swap", "inside", "none"]
        how = draw(st.sampled_from(hows)) if value else "none"
        at = draw(st.integers(0, len(value) - 1)) if value else 0
        return {
            "drop": lambda: value[:at] + value[at + 1 :],
            "again": lambda: (*value, value[at]),
            "swap": lambda: value[::-1],
            "inside": lambda: (*value[:at], corrupted(draw, value[at]), *value[at + 1 :]),
            "none": tuple,
        }[how]()
    if isinstance(value, bytes):
        how = draw(st.sampled_from(["bit", "any", "short", "long"]))
        if how == "bit" and value:
            at = draw(st.integers(0, 8 * len(value) - 1))
            return bytes(b ^ (1 << at % 8) if i == at // 8 else b for i, b in enumerate(value))
        return {"any": draw(st.binary(max_size=80)), "short": value[:-1]}.get(how, value + b"\0")
    if isinstance(value, int):
        return draw(st.integers(-(2**70), 2**70))
    assert isinstance(value, str)
    return draw(st.sampled_from(FIVE) | st.text(max_size=8))


@settings(max_examples=400)
@given(st.data())
def test_a_silo_goes_on_only_with_what_every_signature_fits(data):
    name = data.draw(st.sampled_from(TO_SILO))
    state, event = RUN.before[FIVE[0], name]
    changed = corrupted(data.draw, event)
    after, effects = machine.advance(state, changed)
    if changed == event:
        return
    # a smaller set, of which every member is as it was, is for the coordinator to choose
    if after.stage != "ended":
        (original,) = (getattr(event, each.name) for each in fields(event))
        (kept,) = (getattr(changed, each.name) for each in fields(changed))
        assert set(kept) <= set(original)
        return
    (end,) = effects
    assert end.blame in ("coordinator", *FIVE)
    assert "Error" not in end.why


@settings(max_examples=400)
@given(st.data())
def test_the_coordinator_takes_nothing_that_was_changed(data):
    name = data.draw(st.sampled_from(TO_COORDINATOR))
    state, event = RUN.before["coordinator", name]
    changed = corrupted(data.draw, event)
    _, effects = coordinator.advance(state, changed)
    if changed != event:
        assert isinstance(effects[0], c.Refuse)


@settings(max_examples=200)
@given(st.data())
def test_a_specification_with_anything_in_it_is_refused(data):
    """Bytes changed anywhere, under the signature over the first."""
    (ask,) = RUN.effects(c.Ask)
    document = corrupted(data.draw, ask.document)
    if document == ask.document:
        return
    with pytest.raises(RefusedError) as caught:
        machine.begin(
            RUN.participant(FIVE[0]), RUN.frame, document, ask.signature, machine.Memory()
        )
    assert (caught.value.peer, caught.value.code) == ("coordinator", "SPEC")


def shares_of(dealer, kind):
    """Those that four silos hold of an honest dealer."""
    return tuple(
        e.ShownShare(silo, RUN.before[silo, "SurvivorsReceived"][0].held[dealer].of(kind))
        for silo in FIVE[:4]
    )


@settings(max_examples=600)
@given(st.data())
def test_nothing_made_of_what_an_honest_dealer_said_is_evidence_against_it(data):
    dealer, kind = data.draw(st.sampled_from(FIVE[:4])), data.draw(st.sampled_from([SELF, PAIR]))
    state, other = RUN.state, data.draw(st.sampled_from(FIVE[:4]))
    by, of_kind = st.sampled_from([dealer, other]), st.sampled_from([SELF, PAIR])
    shares = shares_of(data.draw(by), data.draw(of_kind))
    holder, sealer = data.draw(st.permutations(FIVE[:4]))[:2]
    seed = RUN.before[holder, "KeysReceived"][0].seeds.receiving
    key = data.draw(st.just(receiving_seed(seed, state.ctx, holder, sealer)) | ANY_KEY)
    evidence = e.Misdealing(
        DOCUMENT,
        state.bundles[dealer],
        state.dealings[data.draw(by)],
        state.portions[data.draw(by)],
        data.draw(st.sampled_from([e.Unjoined(kind, shares), e.Unopened(holder, key)])),
    )
    for _ in range(data.draw(st.integers(0, 2))):
        evidence = corrupted(data.draw, evidence)
    assert not evidence.proves(RUN.spec, RUN.signers)
    with pytest.raises(RefusedError) as caught:
        e.proven((evidence,), RUN.spec.federation, RUN.spec.job_digest, RUN.signers)
    assert (caught.value.peer, caught.value.code) == ("coordinator", "MISDEALT")


@settings(max_examples=300)
@given(st.data())
def test_a_complaint_about_an_honest_dealer_names_who_complains_whatever_is_in_it(data):
    state = replace(RUN.before["coordinator", "WordsUploaded"][0], headers={})
    silo, dealer = data.draw(st.permutations(FIVE[:4]))[:2]
    seed = RUN.before[silo, "KeysReceived"][0].seeds.receiving
    key = data.draw(st.just(receiving_seed(seed, state.ctx, silo, dealer)) | ANY_KEY)
    complaint = e.make_complaint(state.ctx, silo, state.h_u2, dealer, key, signer(silo))
    if data.draw(st.booleans()):
        complaint = replace(corrupted(data.draw, complaint), silo=silo)
    after, effects = coordinator.advance(state, s.SendComplaint(complaint))
    assert (effects[0].silo, effects[0].code) == (silo, "COMPLAINT")
    found = {name: code for name, code in after.failed.items() if code != "lost"}
    assert found == {silo: "COMPLAINT"}


def test_what_an_end_says_names_no_secret():
    state, event = RUN.before[FIVE[0], "NotesReceived"]
    _, (end,) = machine.advance(state, s.NotesReceived(event.survivals[:1]))
    held = [
        secret
        for each in state.held.values()
        for secret in (each.own.share, each.own.salt, each.pair.share)
    ]
    assert not [secret for secret in held if secret.hex() in end.why or repr(secret) in end.why]
