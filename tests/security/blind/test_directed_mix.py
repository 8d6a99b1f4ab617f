from itertools import combinations

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from support import directed_rows as d
from support.blind_mixes import seed_of
from support.secure_sums import GROUP_KEY

from staddle.errors import LocalError, RefusedError
from staddle.security.arithmetic.fixedpoint import Group, error_bound
from staddle.security.faults import COORDINATOR_OR_SILO
from staddle.security.identity.domains import framed
from staddle.security.identity.pairwise_keys import public_key
from staddle.security.secagg import spec as round_spec
from staddle.security.secagg.linear_tags import PRIME, Tagger, decoded
from staddle.security.secagg.masked_sum import GroupValues, masked_chunks
from staddle.security.secagg.spec import Terms, specify


@pytest.mark.parametrize("lost", [{}, {d.FIVE[4]: "SendHeader"}])
@pytest.mark.parametrize("index", [1, 2])
def test_each_recipients_row_is_right(lost, index):
    made = d.Directed(drops=lost)
    assert set(d.FIVE) - set(made.survivors) == set(lost)
    opened = made.open(index)
    whole = sum(made.spec.groups[index].counts)
    assert (opened.weight[0] == whole) == (not lost)
    # over half of the weight or more
    bound = float(error_bound(made.spec.groups[index], len(made.survivors))) * 2
    assert np.abs(opened.mean(np.float64) - made.exact(index)).max() <= bound


def test_survivors_in_another_order_give_the_same_row():
    made = d.Directed()
    backwards = made.open(survivors=tuple(reversed(made.survivors)))
    assert (backwards.mean() == made.open().mean()).all()


def test_what_the_coordinator_opens_is_noise():
    made = d.Directed(d.own_frame(elements=20_000, chunk_bytes=1 << 16))
    words = made.hidden[1]
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * np.sqrt(510)
    for values in (*made.held.values(), made.exact()):
        assert abs(np.corrcoef(words.view("<i4"), values)[0, 1]) < 0.04
    assert (made.run.opened[0].total == 5).all()  # the metrics of the same sum are for it


def test_every_other_set_of_survivors_is_refused():
    made = d.Directed(drops={d.FIVE[3]: "SendHeader"})
    others = {subset for m in (3, 4, 5) for subset in combinations(d.FIVE, m)} - {
        tuple(sorted(made.survivors))
    }
    for survivors in others:
        with pytest.raises(RefusedError) as caught:
            made.open(survivors=survivors)
        assert (caught.value.peer, caught.value.code) == (COORDINATOR_OR_SILO, "SUM")


def test_pads_of_another_recipient_or_attempt_do_not_come_off():
    made, again = d.Directed(), specify(d.own_frame(), d.FIVE, 1)
    for pads in (d.recipient_pads(made.spec, 2), d.recipient_pads(again, 1)):
        with pytest.raises(RefusedError, match="was altered"):
            made.open(pads=pads)
    with pytest.raises(RefusedError, match="was altered"):
        made.open(words=made.hidden[2])


def test_a_shifted_word_is_noticed():
    made = d.Directed()
    for at in (0, 199):
        shifted = made.hidden[1].copy()
        shifted[at] += 1
        with pytest.raises(RefusedError, match="was altered"):
            made.open(words=shifted)


def test_its_tag_tells_those_who_have_the_group_key_nothing():
    """In a row of the sum their pad comes off a tag; in one for a single silo its pad stays on."""
    made, silo = d.Directed(), d.FIVE[0]
    spec, ctx = made.spec, made.spec.context()
    given = [GroupValues(np.ones(3)), *(GroupValues(made.held[silo]) for _ in d.AWAY)]
    tagger = Tagger(GROUP_KEY, ctx, 3)
    for _ in masked_chunks(spec, silo, given, (), tagger, d.sender_pads(spec, silo)):
        pass
    own = {index: pad.key for index, pad in d.sender_pads(spec, silo).items()}
    sent = decoded(tagger.padded(GROUP_KEY, ctx, silo, own), 3)
    # of nothing: the pads alone
    by_all = decoded(Tagger(GROUP_KEY, ctx, 3).padded(GROUP_KEY, ctx, silo), 3)
    told = [
        (tag - pad) % PRIME == value
        for tag, pad, value in zip(sent, by_all, tagger.sums, strict=True)
    ]
    assert told == [True, False, False]


def test_each_pad_has_a_key_of_its_own_that_both_sides_know():
    specs = [
        specify(d.own_frame(), d.FIVE, 0), specify(d.own_frame(), d.FIVE, 1),
        specify(d.own_frame(round=4), d.FIVE, 0), specify(d.own_frame(elements=201), d.FIVE, 0),
    ]  # fmt: skip
    found = set()
    for spec in specs:
        for index in (1, 2):
            theirs = d.recipient_pads(spec, index)
            assert theirs == {silo: d.sender_pads(spec, silo)[index] for silo in d.FIVE}
            found |= {pad.key for pad in theirs.values()}
    assert len(found) == 4 * 2 * 5


def test_a_pad_is_that_of_the_docstring():
    spec = specify(d.own_frame(), d.FIVE, 0)
    private = X25519PrivateKey.from_private_bytes(seed_of(d.FIVE[0]))
    agreed = private.exchange(X25519PublicKey.from_public_bytes(public_key(seed_of(d.AWAY[0]))))
    fields = (b"\x02", b"silo-00", b"silo-05", bytes(7) + b"\x03", b"theta.silo-05")
    info = framed(b"staddle/mix/pad/1", *fields)
    found = d.sender_pads(spec, d.FIVE[0])[1].key
    assert found == HKDF(SHA256(), 32, spec.context(), info).derive(agreed)


def test_a_row_without_its_pad_does_not_leave():
    made = d.Directed()
    given = [GroupValues(np.ones(3)), *(GroupValues(made.held[d.FIVE[0]]) for _ in d.AWAY)]
    pads = d.sender_pads(made.spec, d.FIVE[0])
    for some in ({}, {1: pads[1]}, {**pads, 0: pads[1]}):
        with pytest.raises(LocalError, match="are not for the coordinator's eyes"):
            next(masked_chunks(made.spec, d.FIVE[0], given, (), None, some))


# Weights: rules 4 and 5.


def counts(raw, **fields):
    return specify(d.own_frame(raw, **fields), d.FIVE, 0).groups[1].counts


def test_weights_are_whole_and_add_up_or_there_is_no_row():
    assert sum(counts(d.RAW)) == 1 << 32
    assert counts([0, 0, 1, 1, 1]) == (0, 0, 1431655766, 1431655765, 1431655765)
    for none in ([0] * 5, [0, 0, 0, 1, 1], [6, 1, 1, 1, 1], [5, 5, 0, 0, 0]):
        assert counts(none) == (0, 0, 0, 0, 0), none
    assert counts([1, 1, 1, 1, 0], min_cohort=5) == (0,) * 5
    assert sum(counts([1, 1, 1, 1, 1], min_cohort=5)) == 1 << 32


def test_a_row_may_not_show_too_much_once_silos_are_lost():
    spec = specify(d.own_frame([6, 3, 3, 1, 1]), d.FIVE, 0)
    round_spec.check_cohort(spec, Terms())
    round_spec.check_survivors(spec, Terms(), d.FIVE[:4])
    with pytest.raises(RefusedError, match=r"theta\.silo-05.*more than half"):
        round_spec.check_survivors(spec, Terms(), (d.FIVE[0], d.FIVE[1], *d.FIVE[3:]))
    few = specify(d.own_frame([0, 1, 1, 1, 0]), d.FIVE, 0)
    with pytest.raises(RefusedError, match="2 silos are mixed, fewer than min_cohort 3"):
        round_spec.check_survivors(few, Terms(), (d.FIVE[0], *d.FIVE[2:]))
    with pytest.raises(RefusedError, match="3 silos are mixed, fewer than min_cohort 4"):
        round_spec.check_cohort(few, Terms(min_cohort=4))


def test_a_reader_has_no_weight_in_its_own_row():
    own = d.own_frame(away=(d.FIVE[0],))
    assert specify(own, d.FIVE, 0).groups[1].counts[0] == 0
    assert d.ALL[6] not in {group.reader for group in own.groups}


def test_names_of_groups_hold_two_ids():
    Group(
        name=f"{'p' * 64}.{'s' * 64}", elements=1, clip_exponent=0, weights="public",
        reader="s" * 64,
    )  # fmt: skip
