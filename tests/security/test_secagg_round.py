"""Whole attempts: who drops out where, in whatever order messages come; the sum is the plain one, or there is none."""

import hashlib
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from secure_sums import Run, attempt, frame, group, names, ones

from staddle.security import fixedpoint, masked_sum
from staddle.security import secagg_coordinator_events as c
from staddle.security import secagg_silo_events as s
from staddle.security.round_spec import specify

FOUR = names(4)
STEPS = ["SendKeys", "SendShares", "Upload", "SendHeader", "SendSurvival", "SendReveal"]


def outcome(n, t, drops):
    """Survivors of an attempt by the rules, or None: who is in the sum gave a header."""
    at = {silo: STEPS.index(step) for silo, step in drops.items()}
    reached = [{silo for silo in names(n) if at.get(silo, 9) > i} for i in range(len(STEPS))]
    if any(len(reached[i]) < t for i in (0, 1, 3, 4, 5)):
        return None
    return sorted(reached[3])


def secrets_in(value):
    """All byte strings of fields that are not shown, however deep."""
    found = []
    if is_dataclass(value):
        for each in fields(value):
            inner = getattr(value, each.name)
            if not each.repr and isinstance(inner, bytes):
                found.append(inner)
            found += secrets_in(inner)
    elif isinstance(value, dict):
        found += [secret for inner in value.values() for secret in secrets_in(inner)]
    elif isinstance(value, tuple | list):
        found += [secret for inner in value for secret in secrets_in(inner)]
    return found


@pytest.mark.parametrize("n", [4, 5, 7, 10])
def test_everyone_stays(n):
    run = Run(attempt(n), ones(names(n))).finish()
    assert run.opened[0].total.tolist() == [sum(range(1, n + 1)) / 16] * 20
    assert {state.stage for state in run.silos.values()} == {"done"}
    assert run.ends == {}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("lost", [1, 3, 4])
def test_silos_lost_before_each_step(step, lost):
    """Of ten with threshold 7: one, as many as may be lost, and one more."""
    drops = dict.fromkeys(names(10)[2 : 2 + lost], step)
    run = Run(attempt(10), ones(names(10)), drops=drops).finish()
    survivors = outcome(10, 7, drops)
    assert (survivors is None) == (lost == 4)
    if survivors is None:
        assert run.state.stage == "ended"
        assert run.opened is None
        assert (run.ends["coordinator"].code, run.ends["coordinator"].blame) == ("TOO_FEW", "")
    else:
        assert run.state.u3 == tuple(survivors)
        assert run.opened[0].total[0] == sum(names(10).index(silo) + 1 for silo in survivors) / 16


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_dropouts_in_any_order_give_the_plain_sum_or_none(data):
    n = data.draw(st.integers(4, 9))
    silos = names(n)
    drops = data.draw(st.dictionaries(st.sampled_from(silos), st.sampled_from(STEPS), max_size=n // 2))
    ring = data.draw(st.sampled_from([32, 64]))
    own = frame(groups=(group(ring=ring), group("counts", 3, ring=64, clip_exponent=20)), chunk_bytes=64)
    spec = specify(own, silos, 0)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = {
        silo: [
            masked_sum.Given(random.normal(0, 2, 20).clip(-8, 8).astype(np.float32)),
            masked_sum.Given(random.integers(0, 2**20, 3).astype(np.float64)),
        ]
        for silo in silos
    }
    run = Run(spec, values, own=own, drops=drops, seed=data.draw(st.integers())).finish()
    survivors = outcome(n, spec.threshold, drops)
    if survivors is None:
        assert run.opened is None
        assert run.state.stage == "ended"
        return
    assert run.state.u3 == tuple(survivors)
    exact = sum(values[silo][0].values.astype(np.float64) for silo in run.state.u3)
    bound = float(fixedpoint.error_bound(spec.groups[0], len(run.state.u3)))
    assert np.abs(run.opened[0].total - exact).max() <= bound + 1e-12
    assert run.opened[1].total.tolist() == sum(values[silo][1].values for silo in run.state.u3).tolist()


def test_a_silo_that_uploads_after_the_deadline_is_refused_and_helps_with_nothing():
    late = FOUR[3]
    run = Run(attempt(), ones(FOUR), drops={late: "SendHeader"})
    run.finish()
    assert run.before[late, "Streamed"][0].stage == "uploading"
    run.silent.clear()
    run.drops.clear()
    run.deliver(late, run.before[late, "Streamed"][1])
    ((to, event),) = run.queue
    run.queue.clear()
    run.deliver(to, event)
    refused = run.sent[-1][1]
    assert (type(refused), refused.silo, refused.code) == (c.Refuse, late, "ORDER")
    assert run.state.stage == "done"


def test_no_message_effect_or_state_shows_a_secret():
    run = Run(attempt(5), ones(names(5)), drops={names(5)[4]: "SendHeader"}).finish()
    states = [state for state, _ in run.before.values()]
    secrets = {x for value in (states, [e for _, e in run.sent]) for x in secrets_in(value) if x}
    assert len(secrets) > 100  # seeds, shares, salts, mask keys
    shown = "".join(repr(each) for each in (*states, *(e for _, e in run.sent)))
    assert not [secret for secret in secrets if repr(secret) in shown or secret.hex() in shown]


def test_secrets_are_gone_once_they_are_not_needed():
    run = Run(attempt(), ones(FOUR)).finish()
    for silo in FOUR:
        assert secrets_in(run.before[silo, "ResultTold"][0]) == []
        assert secrets_in(run.before[silo, "NotesTold"][0]) != []
    assert secrets_in(run.silos) == []


def test_a_transcript_with_fixed_seeds_is_known():
    """Golden digests of each kind of message of one attempt of five, of whom the last is lost during its upload."""
    run = Run(attempt(5), ones(names(5)), drops={names(5)[4]: "SendHeader"}, seed="golden").finish()
    ctx = run.state.ctx
    found = {
        "context": ctx,
        "keys": run.state.h_u1,
        "shares": run.state.h_u2,
        "portions": hashlib.sha256(b"".join(p.leaf() for ps in run.state.portions.values() for p in ps)).digest(),
        "upload": hashlib.sha256(b"".join(run.uploads[names(5)[0]])).digest(),
        "headers": run.state.h_u3,
        "reveal": hashlib.sha256(run.state.reveals[names(5)[0]].payload(ctx, run.state.h_u3)).digest(),
    }
    assert {name: digest.hex() for name, digest in found.items()} == {
        "context": "dac044cdee21dc70dac14a2de3088957b77500c6e7b6274a27e3b2abf62409a2",
        "keys": "681316d62e0aefb3e2bc13b0a5bcfe47823b036b5dd80426f057c8f01e219ddd",
        "shares": "049245a491b34da00e64bf0b8289116018057f410f3ea99aef127b152079ba92",
        "portions": "45f0a250c9d9c7a62cfd46fc63d74e121e673d2de0bf4d5ef4c5fdbb5428c5b0",
        "upload": "fe83d64d2147f204643a574bab0db7bbf537e768d4e558c2b77216d4122c983a",
        "headers": "9856dfec9edbb4b22cf0c1869c45c3c7a5dfcb827144daf8e4810d6b066bf5a1",
        "reveal": "b2f20789fd6a4524cda5289a75158c564d2d680060d1223dc5bfe4ab58d0bb6e",
    }
    assert run.opened[0].total.tolist() == [10 / 16] * 20


@pytest.mark.parametrize("effect", [s.SendKeys, s.SendShares, s.SendHeader, s.SendSurvival, s.SendReveal])
def test_each_silo_sends_each_message_once(effect):
    run = Run(attempt(), ones(FOUR)).finish()
    assert sorted(by for by, e in run.sent if isinstance(e, effect)) == list(FOUR)


def test_what_must_be_remembered_comes_before_what_is_sent():
    run = Run(attempt(), ones(FOUR)).finish()
    kinds = [type(e).__name__ for by, e in run.sent if by == FOUR[0]]
    expected = "Remember SendKeys SendShares Remember Upload SendHeader Remember SendSurvival SendReveal Finish"
    assert kinds == expected.split()
    first, second, third = run.effects(s.Remember, FOUR[0])
    assert (first.memory.round, first.memory.attempt, first.memory.pending) == (3, 0, ())
    assert [p.members for p in second.memory.pending] == [FOUR]
    assert (third.memory.signed_round, third.memory.pending) == (3, ())


def test_two_attempts_at_once_are_isolated():
    one, other = attempt(), attempt(number=1)
    first, second = Run(one, ones(FOUR)), Run(other, ones(FOUR), seed=1)
    while first.queue or second.queue:
        for run in (first, second):
            if run.queue:
                run.deliver(*run.queue.pop(0))
    assert first.opened[0].total.tolist() == second.opened[0].total.tolist()
    assert first.uploads[FOUR[0]] != second.uploads[FOUR[0]]
