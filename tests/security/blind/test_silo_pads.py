"""Pads over sums that silos alone read: the coordinator adds them up, and opens noise."""

import hmac

import numpy as np
import pytest
from support.secure_sums import GROUP_KEY, frame, group, names

from staddle.errors import LocalError
from staddle.security.arithmetic.masks import Term
from staddle.security.blind.silo_pads import silo_pad, silo_pads
from staddle.security.secagg import masked_sum as m
from staddle.security.secagg.spec import specify

SILOS = names(4)
GROUPS = (
    group("model", 5000, reader="silos"),
    group("coupling", 700, ring=64, clip_exponent=4, reader="silos"),
    group("metrics", 3, ring=64, clip_exponent=40),
)
SPEC = specify(frame(groups=GROUPS, tagged=True), SILOS, 0)
VALUES = {
    silo: [m.GroupValues(np.random.default_rng(n).uniform(-1, 1, own.elements)) for own in GROUPS]
    for n, silo in enumerate(SILOS)
}


def opened(survivors=SILOS, pads=silo_pads, spec=SPEC):
    """The integers of each group as the coordinator has them, once all masks are off."""
    accumulator = m.Accumulator(spec)
    for silo in survivors:
        m.check_group_values(spec, VALUES[silo])
        own = pads(spec, silo, GROUP_KEY)
        accumulator.add(
            words.tobytes() for words in m.masked_chunks(spec, silo, VALUES[silo], (), None, own)
        )
    accumulator.open((), survivors)  # canaries have no pads
    return [
        np.concatenate([w for g, w in accumulator.numbers() if g == index])
        for index in range(len(GROUPS))
    ]


def plain(survivors=SILOS):
    """The same where the coordinator reads all."""
    groups = tuple(each.model_copy(update={"reader": "coordinator"}) for each in GROUPS)
    return opened(survivors, spec=specify(frame(groups=groups, tagged=True), SILOS, 0))


def related(a, b):
    signed = [each.view(f"<i{each.itemsize}").astype(np.float64) for each in (a, b)]
    return abs(np.corrcoef(*signed)[0, 1]) * np.sqrt(a.size)


@pytest.mark.parametrize("survivors", [SILOS, SILOS[:3], SILOS[1:]])
def test_what_is_padded_is_noise_and_comes_back_with_the_pads_of_the_survivors(survivors):
    found, wanted = opened(survivors), plain(survivors)
    assert found[2].tolist() == wanted[2].tolist()  # the coordinator reads the metrics
    for index in (0, 1):
        assert related(found[index], wanted[index]) < 5
        words = found[index].copy()
        m.unpad(
            index,
            words,
            [silo_pad(GROUP_KEY, SPEC.context(), silo, SPEC.prg) for silo in survivors],
        )
        assert words.tolist() == wanted[index].tolist()


@pytest.mark.parametrize("wrong", [SILOS[:3], (*SILOS, "silo-99"), SILOS[1:] + SILOS[1:2]])
def test_the_pads_of_others_than_the_survivors_leave_noise(wrong):
    (words, *_), (wanted, *_) = opened(), plain()
    m.unpad(0, words, [silo_pad(GROUP_KEY, SPEC.context(), silo, SPEC.prg) for silo in wrong])
    assert related(words, wanted) < 5


def test_a_pad_is_of_one_silo_key_and_attempt_and_each_group_has_its_own_stream():
    ctx, again = SPEC.context(), specify(frame(groups=GROUPS, tagged=True), SILOS, 1).context()
    prg = SPEC.prg
    pads = [silo_pad(GROUP_KEY, ctx, silo, prg) for silo in SILOS]
    pads += [silo_pad(bytes(32), ctx, SILOS[0], prg), silo_pad(GROUP_KEY, again, SILOS[0], prg)]
    pads += [silo_pad(GROUP_KEY, ctx, SILOS[0], prg + 1)]
    assert len({pad.key for pad in pads}) == 7
    assert silo_pads(SPEC, SILOS[0], GROUP_KEY) == {0: pads[0], 1: pads[0]}
    streams = [np.zeros(200, "<u8") for _ in range(2)]
    for index, words in enumerate(streams):
        m.unpad(index, words, pads[:1])
    assert not set(streams[0].tolist()) & set(streams[1].tolist())


def test_the_key_of_a_pad_is_known():
    """HKDF-SHA256 (RFC 5869) of the group key, salt ctx, by hand."""
    ctx = SPEC.context()
    extracted = hmac.digest(ctx, GROUP_KEY, "sha256")
    info = b"".join(
        len(piece).to_bytes(8) + piece for piece in (b"staddle/secagg/hide/1", b"\x01", b"silo-00")
    )
    found = silo_pad(GROUP_KEY, ctx, "silo-00", 1)
    assert found == Term(hmac.digest(extracted, info + b"\x01", "sha256"))


def test_words_that_silos_alone_read_never_leave_without_their_pads():
    why = r"pads of groups \[\], and \[0, 1\] are not for the coordinator's eyes"
    with pytest.raises(LocalError, match=why):
        opened(pads=lambda *_: {})


def common(spec, silo, key):
    """What is not done: one pad for all."""
    return dict.fromkeys((0, 1), Term(silo_pad(key, spec.context(), "all", spec.prg).key))


@pytest.mark.parametrize(("survivors", "bits"), [(SILOS, 2), (SILOS[:3], 0), (SILOS[:2], 1)])
def test_of_a_common_pad_the_lowest_bits_of_the_sum_would_be_in_the_clear(survivors, bits):
    lowest = np.uint32(2**bits - 1)
    naive, own, wanted = (
        each[0] & lowest
        for each in (opened(survivors, common), opened(survivors), plain(survivors))
    )
    assert naive.tolist() == wanted.tolist()
    assert (own.tolist() == wanted.tolist()) == (bits == 0)
