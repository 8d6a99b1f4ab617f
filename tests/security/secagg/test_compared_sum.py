"""Vectors compared by shares, beside a secure sum: both machines, what they open and refuse."""

from dataclasses import replace

import numpy as np
import pytest
from support.secure_sums import Run, attempt, frame, names, ones

from staddle.security.arithmetic import field
from staddle.security.secagg import shared_gram as g
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.dealing import HeldShares
from staddle.security.secagg.gram_pieces import SealedShare
from staddle.security.secagg.messages import make_reveal

ROWS = g.Compared(name="rows", groups=2, width=6, clip_exponent=2)


def vectors(n, seed=0):
    drawn = np.random.default_rng(seed).standard_normal((n, 2, 6))
    return dict(zip(names(n), drawn / np.linalg.norm(drawn, axis=2, keepdims=True), strict=True))


def run(n=4, **how):
    spec, values = attempt(n, compared=ROWS, **how.pop("fields", {})), vectors(n)
    return Run(spec, ones(names(n)), own=frame(compared=ROWS), vectors=values, **how)


def grams(done, silos):
    products = np.frombuffer(done.products, "<i8").astype(np.int64).reshape(-1, 2)
    return g.squares(ROWS, g.dequantise(ROWS, products), len(silos))


def check(done, silos):
    """The sum and the inner products over these silos are open."""
    assert done.state.stage == "done"
    assert done.state.u3 == tuple(silos)
    assert np.array_equal(grams(done, silos), g.gram(ROWS, [done.vectors[silo] for silo in silos]))


@pytest.mark.parametrize("seed", range(5))
def test_the_sum_and_the_inner_products_of_all_are_opened(seed):
    done = run(seed=seed).finish()
    check(done, names(4))
    assert done.opened is not None


@pytest.mark.parametrize("at", ["SendKeys", "SendShares", "UploadWords", "SendHeader"])
def test_who_is_lost_before_its_header_is_compared_with_nobody(at):
    four = names(4)
    check(run(drops={four[1]: at}).finish(), [four[0], four[2], four[3]])


@pytest.mark.parametrize("at", ["SendSurvival", "SendReveal"])
def test_who_is_lost_after_its_header_is_compared_all_the_same(at):
    check(run(drops={names(4)[1]: at}).finish(), names(4))


def reveal_with(done, silo, change):
    """``alter`` by which a silo reveals other products, signed."""

    def alter(who, effect):
        if who != silo or not isinstance(effect, s.SendReveal):
            return effect
        state, reveal = done[0].silos[who], effect.reveal
        products = g.products_loaded(ROWS, len(state.headers), reveal.products)
        kinds = {each.dealer: each.kind for each in reveal.shares}
        held = {each.dealer: HeldShares(each.held, each.held) for each in reveal.shares}
        changed = g.products_dumped(change(products))
        sign = state.participant.sign
        return s.SendReveal(make_reveal(state.ctx, who, state.h_u3, kinds, held, sign, changed))

    return alter


def wrong(products):
    return field.add(products, np.ones_like(products))


def lying(n, liar, change=wrong, **how):
    """A run in which one silo reveals other products than it computed."""
    box = []
    box.append(run(n, alter=reveal_with(box, liar, change), **how))
    return box[0].finish()


@pytest.mark.parametrize("n", [5, 7])
def test_a_silo_that_reveals_wrong_products_is_named_and_the_products_are_right(n):
    for seed in range(6):
        done = lying(n, names(n)[2], seed=seed)
        if names(n)[2] in done.state.reveals:
            break
    assert done.state.failed == {names(n)[2]: "REVEAL"}
    check(done, names(n))


def test_where_too_few_reveal_to_name_it_the_attempt_ends_and_opens_nothing():
    done = lying(5, names(5)[2], drops={names(5)[4]: "SendReveal"})
    assert (done.state.stage, done.opened, done.products) == ("ended", None, b"")
    end = done.ends["coordinator"]
    assert (end.code, end.blame) == ("SUM", "")
    assert end.why.startswith("what survivors revealed of inner products does not fit together")


def test_products_of_another_length_are_refused_and_their_silo_drops_out():
    four = names(4)
    done = lying(4, four[2], lambda products: products[1:])
    assert done.state.failed == {four[2]: "REVEAL"}
    check(done, four)


HOSTILE = {
    "altered": lambda share: replace(share, sealed=share.sealed[:-1] + b"\0"),
    "cut": lambda share: replace(share, sealed=share.sealed[:-8]),
    "of zeros": lambda share: replace(share, sealed=bytes(len(share.sealed))),
    "empty": lambda share: replace(share, sealed=b""),
    "of another dealer": lambda share: SealedShare("silo-00", share.sealed),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_silo_signs_no_survivors_whose_shares_do_not_open(how):
    three = names(4)[3]
    done = run(cut=lambda silo, share: HOSTILE[how](share) if silo == three else share).finish()
    assert done.ends[three].code == "SHARES"
    assert done.effects(s.SendSurvival, three) == done.effects(s.SendReveal, three) == []
    check(done, names(4))  # the others are enough


def test_shares_of_a_round_that_compares_nothing_are_refused():
    spec = attempt()
    done = Run(spec, ones(names(4)))
    done.told_shares = lambda silo, _: (SealedShare("silo-00", b""),) if silo == "silo-03" else ()
    done.finish()
    assert done.ends["silo-03"].why.startswith("brings shares of compared vectors of ['silo-00']")


def test_a_silo_that_keeps_no_share_of_its_own_ends_the_attempt():
    done = run()
    real = done.deliver

    def deliver(to, event):
        if isinstance(event, s.Streamed) and to == "silo-02":
            event = replace(event, kept=event.kept[8:])
        real(to, event)

    done.deliver = deliver
    done.finish()
    assert done.ends["silo-02"].code == "UPLOAD"
    check(done, ["silo-00", "silo-01", "silo-03"])


def test_each_attempt_deals_anew():
    one, other = run(seed=1), run(seed=2)
    one.finish(), other.finish()
    for silo in names(4):
        assert one.sealed[silo] != other.sealed[silo]
    assert one.products == other.products


def test_secrets_go_with_the_attempt_and_none_is_shown():
    done = run().finish()
    for state in done.silos.values():
        assert (state.seeds, dict(state.vectors)) == (None, {})
    (upload,) = done.effects(s.UploadWords, "silo-01")
    shown = repr(upload)
    assert upload.hiding.seed.hex() not in shown
    assert repr(upload.hiding.seed) not in shown
