"""Whole attempts with drop-outs, messages in any order: the plain sum, or none."""

import hashlib
import hmac
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from support.secure_sums import GROUP_KEY, Run, attempt, frame, group, names, ones, signer

from staddle.errors import RefusedError
from staddle.security.arithmetic import fixedpoint
from staddle.security.faults import COORDINATOR_OR_SILO
from staddle.security.secagg import coordinator_events as c
from staddle.security.secagg import masked_sum
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.linear_tags import Tagger
from staddle.security.secagg.messages import make_header
from staddle.security.secagg.spec import Terms, specify

FOUR = names(4)
STEPS = ["SendKeys", "SendShares", "UploadWords", "SendHeader", "SendSurvival", "SendReveal"]


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
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_silos_lost_before_each_step(step, lost):
    """Of seven with threshold 5: one, as many as may be lost, and one more."""
    seven = names(7)
    drops = dict.fromkeys(seven[2 : 2 + lost], step)
    run = Run(attempt(7), ones(seven), drops=drops).finish()
    survivors = outcome(7, 5, drops)
    assert (survivors is None) == (lost == 3)
    if survivors is None:
        assert run.state.stage == "ended"
        assert run.opened is None
        assert (run.ends["coordinator"].code, run.ends["coordinator"].blame) == ("TOO_FEW", "")
    else:
        assert run.state.u3 == tuple(survivors)
        assert run.opened[0].total[0] == sum(seven.index(silo) + 1 for silo in survivors) / 16


@settings(max_examples=80)
@given(st.data())
def test_any_dropouts_in_any_order_give_the_plain_sum_or_none(data):
    # each remainder by three, which the threshold follows from; two of 7 or 8 may be lost
    n = data.draw(st.integers(4, 8))
    silos = names(n)
    drops = data.draw(
        st.dictionaries(st.sampled_from(silos), st.sampled_from(STEPS), max_size=n // 2)
    )
    ring = data.draw(st.sampled_from([32, 64]))
    own = frame(
        groups=(group(ring=ring), group("counts", 3, ring=64, clip_exponent=20)), chunk_bytes=64
    )
    spec = specify(own, silos, 0)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = {
        silo: [
            masked_sum.GroupValues(random.normal(0, 2, 20).clip(-8, 8).astype(np.float32)),
            masked_sum.GroupValues(random.integers(0, 2**20, 3).astype(np.float64)),
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
    found = run.opened[1].total.tolist()
    assert found == sum(values[silo][1].values for silo in run.state.u3).tolist()


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
        assert secrets_in(run.before[silo, "ResultReceived"][0]) == []
        assert secrets_in(run.before[silo, "NotesReceived"][0]) != []
    assert secrets_in(run.silos) == []


def test_a_transcript_with_fixed_seeds_is_known():
    """Golden digests of each kind of message of one attempt of five; the last is lost at upload."""
    run = Run(attempt(5), ones(names(5)), drops={names(5)[4]: "SendHeader"}, seed="golden").finish()
    ctx, state, silo = run.state.ctx, run.state, names(5)[0]

    def hashed(*pieces):
        return hashlib.sha256(b"".join(pieces)).digest()

    found = {
        "context": ctx, "keys": state.h_u1,
        "receiving keys": hashed(*(k.leaf() for ks in state.keys.values() for k in ks)),
        "shares": state.h_u2,
        "portions": hashed(*(p.leaf() for ps in state.portions.values() for p in ps)),
        "upload": hashed(*run.uploads[silo]), "headers": state.h_u3,
        "reveal": hashed(state.reveals[silo].signed_bytes(ctx, state.h_u3)),
    }  # fmt: skip
    assert {name: digest.hex() for name, digest in found.items()} == {
        "context": "edbe198fb14f81b4adfe62376fa29bd0cf23e57351d783c105c55185d1b1396b",
        "keys": "9e91f16c1a80da17d4a3b6f68ef54665e8af2afda5ee03a317956fb1e53c517e",
        "receiving keys": "225a5fb7fedb8d09dc3e47142f64622d9fe338b2dac4e1826626665d6f421685",
        "shares": "5a289b8def3e7a7d3ff66bb28194ced9f5f5a693e429103f77df73a537b5bc9a",
        "portions": "cb4d5f319804ebf5ddd6d8b92e1be965eb358c0ea9c2355fe996224df3e571bb",
        "upload": "546ed0bbc9b1e80315f76e66cffda349a6be84b7d4cd8faf3e28ca4326fbdac6",
        "headers": "c63101b31fcff2e9c3efcd57871c51b76ea6c1bd8687d8d56e13b972422a8362",
        "reveal": "032cf9a56532af5667772ad13b7f47059145685354521ed8956b38f3d5e839e6",
    }
    assert run.opened[0].total.tolist() == [10 / 16] * 20


@pytest.mark.parametrize(
    "effect", [s.SendKeys, s.SendShares, s.SendHeader, s.SendSurvival, s.SendReveal]
)
def test_each_silo_sends_each_message_once(effect):
    run = Run(attempt(), ones(FOUR)).finish()
    assert sorted(by for by, e in run.sent if isinstance(e, effect)) == list(FOUR)


def test_what_must_be_remembered_comes_before_what_is_sent():
    run = Run(attempt(), ones(FOUR)).finish()
    kinds = [type(e).__name__ for by, e in run.sent if by == FOUR[0]]
    expected = (
        "Remember SendKeys SendShares Remember UploadWords SendHeader Remember SendSurvival"
        " SendReveal Finish"
    )
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


def test_an_upload_is_what_a_slow_oracle_makes_of_the_seeds():
    """By hand: HMAC for HKDF, single AES blocks for counter mode, Python's integers as ring."""
    run = Run(attempt(5), ones(names(5))).finish()
    spec, ctx = run.spec, run.state.ctx
    seeds = {silo: run.before[silo, "SharesReceived"][0].seeds for silo in names(5)}

    def framed(*pieces):
        return b"".join(len(piece).to_bytes(8, "big") + piece for piece in pieces)

    def hkdf(secret, info):
        return hmac.digest(hmac.digest(ctx, secret, "sha256"), info + b"\x01", "sha256")

    def stream(key, n):
        block = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update
        made = b"".join(block(i.to_bytes(16, "big")) for i in range(2, n // 4 + 3))
        return [int.from_bytes(made[4 * i : 4 * i + 4], "little") for i in range(n)]

    def private(silo):
        return X25519PrivateKey.from_private_bytes(seeds[silo].mask)

    me, words = names(5)[2], 25
    expected = [round(3 / 16 * 2.0 ** spec.groups[0].scale_exponent)] * 20
    for chunk, at, size in ((0, 15, 1), (1, 21, 4)):
        pattern = framed(b"staddle/secagg/canary/1", ctx, bytes(8), chunk.to_bytes(8, "big"))
        digest = hashlib.sha256(pattern).digest()
        expected[at:at] = [int.from_bytes(digest[4 * i : 4 * i + 4], "little") for i in range(size)]
    info = framed(b"staddle/secagg/self/1", b"\x02", me.encode(), run.state.h_u2)
    total = [a + b for a, b in zip(expected, stream(hkdf(seeds[me].own, info), words), strict=True)]
    for other in names(5):
        if other != me:
            low, high = sorted((me, other))
            info = framed(
                b"staddle/secagg/pair/1", b"\x02", low.encode(), high.encode(), run.state.h_u2
            )
            key = hkdf(private(me).exchange(private(other).public_key()), info)
            sign = 1 if other > me else -1
            total = [a + sign * b for a, b in zip(total, stream(key, words), strict=True)]
    sent = np.frombuffer(b"".join(run.uploads[me]), "<u4").tolist()
    assert sent == [word % 2**32 for word in total]


@pytest.mark.parametrize("n", [2, 3])
def test_two_or_three_silos_only_where_no_colluder_is_assumed(n):
    own = frame(colluders=0, min_cohort=n)
    spec, silos = specify(own, names(n), 0), names(n)
    run = Run(spec, ones(silos), own=own, terms=Terms(n, n, 0)).finish()
    assert run.opened[0].total[0] == sum(range(1, n + 1)) / 16
    for step in STEPS:  # no dropout tolerance below four
        run = Run(spec, ones(silos), own=own, terms=Terms(n, n, 0), drops={silos[0]: step}).finish()
        assert (run.opened, run.ends["coordinator"].code) == (None, "TOO_FEW")


def test_silos_check_the_tags_of_a_tagged_sum():
    own = frame(tagged=True, groups=(group(), group("b", 5, ring=64)))
    values = {silo: [*ones(FOUR)[silo], *ones(FOUR, 5)[silo]] for silo in FOUR}
    run = Run(specify(own, FOUR, 0), values, own=own, drops={FOUR[1]: "SendHeader"}).finish()
    (finish,) = run.effects(s.Finish, FOUR[0])
    assert finish.survivors == (FOUR[0], FOUR[2], FOUR[3])
    for shift in (0, 1):
        tagger = Tagger(GROUP_KEY, run.state.ctx, 2)
        for index, words in run.numbers:
            tagger.add(index, words + words.dtype.type(shift))
        if shift:
            with pytest.raises(RefusedError) as caught:
                tagger.check(finish.tags, GROUP_KEY, run.state.ctx, finish.survivors)
            assert (caught.value.peer, caught.value.code) == (COORDINATOR_OR_SILO, "SUM")
        else:
            tagger.check(finish.tags, GROUP_KEY, run.state.ctx, finish.survivors)


@pytest.mark.parametrize("tags", [b"", bytes(7), bytes(16), b"\xff" * 8])
def test_an_upload_without_its_tags_is_refused(tags):
    own = frame(tagged=True)

    def alter(silo, effect):
        if silo != FOUR[1] or not isinstance(effect, s.SendHeader):
            return effect
        header = effect.header
        ctx, sign = attempt(tagged=True).context(), signer(silo)
        return s.SendHeader(
            make_header(ctx, silo, header.h_u2, header.length, header.sha256, tags, sign)
        )

    run = Run(specify(own, FOUR, 0), ones(FOUR), own=own, alter=alter).finish()
    assert [(e.silo, e.code) for e in run.effects(c.Refuse)] == [(FOUR[1], "UPLOAD")]
    assert run.opened[0].total[0] == (1 + 3 + 4) / 16
