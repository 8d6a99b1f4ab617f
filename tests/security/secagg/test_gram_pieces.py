"""Shares of compared vectors as they are sealed: who opens which, and what is refused."""

import numpy as np
import pytest
from support.secure_sums import frame, names

from staddle.errors import LocalError, RefusedError
from staddle.security.secagg import gram_pieces as p
from staddle.security.secagg import shared_gram as g
from staddle.security.secagg.masked_sum import upload_bytes
from staddle.security.secagg.spec import specify

FOUR = names(4)
ROWS = g.Compared(name="rows", groups=2, width=5, clip_exponent=3)
SPEC = specify(frame(compared=ROWS), FOUR, 0)


def key(dealer, holder):
    return p.share_key(b"agreed".ljust(32), SPEC.context(), dealer, holder)


SEED = b"of one attempt".ljust(32)


def dealt(dealer, among=FOUR, seed=SEED):
    vectors = np.random.default_rng(FOUR.index(dealer)).standard_normal((2, 5))
    keys = {holder: key(dealer, holder) for holder in among if holder != dealer}
    return p.deal_sealed(SPEC, dealer, g.quantise(ROWS, vectors), p.GramKeys(seed, keys))


def piece(dealer, holder, **how):
    """As the coordinator cuts it out of an upload."""
    whole = bytes(upload_bytes(SPEC)) + b"".join(dealt(dealer, **how)[0])
    at = p.place_of(SPEC, dealer, holder)
    assert len(whole) == p.message_bytes(SPEC)
    return whole[at : at + p.sealed_bytes(SPEC)]


def test_each_holder_opens_its_own_share():
    dealer, *others = FOUR
    shares = {
        holder: p.open_share(SPEC, key(dealer, holder), dealer, holder, piece(dealer, holder))
        for holder in others
    }
    shares[dealer] = g.loaded(ROWS, 4, dealt(dealer)[1])
    told = {SPEC.holder(holder): g.multiply({1: share}) for holder, share in shares.items()}
    q = g.quantise(ROWS, np.random.default_rng(0).standard_normal((2, 5)))
    assert g.opened(told, 1).products.tolist() == [(q * q).sum(axis=1).tolist()]


def test_the_same_vectors_and_keys_give_the_same_bytes():
    assert dealt(FOUR[1]) == dealt(FOUR[1])
    assert dealt(FOUR[1])[0] != dealt(FOUR[1], seed=b"other".ljust(32))[0]


def test_for_a_silo_that_is_not_in_the_attempt_there_are_zeros():
    assert piece(FOUR[0], FOUR[2], among=(FOUR[0], FOUR[1], FOUR[3])) == bytes(p.sealed_bytes(SPEC))


@pytest.mark.parametrize("other", ["dealer", "holder", "bytes", "key", "attempt"])
def test_what_is_not_for_this_holder_of_this_dealer_and_attempt_does_not_open(other):
    dealer, holder, third, fourth = FOUR
    sealed, by, to, spec, own = piece(dealer, holder), dealer, holder, SPEC, key(dealer, holder)
    match other:
        case "dealer":
            by = third
        case "holder":
            to = fourth
        case "bytes":
            sealed = sealed[:-1] + bytes([sealed[-1] ^ 1])
        case "key":
            own = key(holder, dealer)
        case "attempt":
            spec = specify(frame(compared=ROWS), FOUR, 1)
    with pytest.raises(RefusedError, match="does not open") as refused:
        p.open_share(spec, own, by, to, sealed)
    assert refused.value.peer == "coordinator or a silo of the cohort"


def test_hostile_bytes_are_refused_whatever_their_length():
    for size in (0, 15, 16, 17, p.sealed_bytes(SPEC)):
        with pytest.raises(RefusedError, match="does not open"):
            p.open_share(SPEC, key(*FOUR[:2]), *FOUR[:2], bytes(size))


def test_a_dealer_that_seals_rubbish_is_named():
    rubbish = g.dumped(g.GramShare(np.full((2, 5), 2**61 - 1, "<u8"), np.zeros((4, 2), "<u8")))
    sealed = p.ChaCha20Poly1305(key(*FOUR[:2])).encrypt(
        p.NONCE, rubbish, p._associated(SPEC.context(), *FOUR[:2])
    )
    why = r"sealed 144 bytes to 'silo-01' that are not a share"
    with pytest.raises(RefusedError, match=why) as refused:
        p.open_share(SPEC, key(*FOUR[:2]), *FOUR[:2], sealed)
    assert refused.value.peer == FOUR[0]


def test_the_coordinator_brings_one_share_of_each_other_survivor():
    brought = [p.SealedShare(silo, b"") for silo in FOUR[1:]]
    p.check_dealers(brought, FOUR[1:])
    for wrong in (brought[1:], [*brought, brought[0]], brought[::-1]):
        with pytest.raises(RefusedError, match="not of the other survivors") as refused:
            p.check_dealers(wrong, FOUR[1:])
        assert refused.value.peer == "coordinator"


def test_what_a_survivor_reveals_has_one_length():
    shares = {silo: g.loaded(ROWS, 4, dealt(silo)[1]) for silo in FOUR[:3]}
    data = p.revealed(SPEC, shares)
    assert p.read_revealed(SPEC, FOUR[0], 3, data).shape == (6, 2)
    for wrong, survivors in ((data, 4), (data[8:], 3), (b"", 3), (b"\xff" * len(data), 3)):
        with pytest.raises(RefusedError, match="are not those of") as refused:
            p.read_revealed(SPEC, FOUR[0], survivors, wrong)
        assert refused.value.peer == FOUR[0]


def test_a_round_that_compares_nothing_has_masked_words_alone():
    spec = specify(frame(), FOUR, 0)
    assert b"compared" not in spec.signed_bytes()
    assert p.message_bytes(spec) == upload_bytes(spec)
    assert p.read_revealed(spec, FOUR[0], 3, b"") is None
    with pytest.raises(RefusedError, match="compares nothing by shares"):
        p.read_revealed(spec, FOUR[0], 3, b"\0" * 8)
    with pytest.raises(LocalError, match="compares nothing by shares"):
        p.sealed_bytes(spec)
