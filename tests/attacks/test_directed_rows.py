"""A coordinator in league with silos, against rows for single ones: what it gains on one upload,
and directed.
"""

import numpy as np
import pytest
from support.blind_mixes import KEY, Mixing, seed_of
from support.directed_rows import AWAY, FIVE, Directed, own_frame, prekeys
from support.secure_sums import GROUP_KEY

from staddle.algorithms.exchange.parts import integer_weights
from staddle.errors import RefusedError
from staddle.security.arithmetic.fixedpoint import dequantise
from staddle.security.arithmetic.masks import Term
from staddle.security.blind import directed_mix as d
from staddle.security.blind import padded_mix as o
from staddle.security.blind import sealing
from staddle.security.secagg import linear_tags
from staddle.security.secagg.linear_tags import PRIME, Tagger, decoded
from staddle.security.secagg.masked_sum import unpad
from staddle.security.secagg.spec import Terms, check_cohort, check_frame

pytestmark = pytest.mark.actor("coordinator and silos")

ELEMENTS = 20_000
WHOLE = 1 << 32  # what the weights of a row add up to
VICTIM, FRIEND = FIVE[0], FIVE[1]  # the coordinator is in league with the second


def alike(one, other):
    return abs(float(np.corrcoef(one, other)[0, 1]))


@pytest.mark.succeeds
def test_one_upload_is_opened_by_the_coordinator_with_any_silo():
    """The naive side: every other silo has the seed under which an upload is hidden."""
    made, values = Mixing(4, elements=200), np.random.default_rng(1).uniform(-8, 8, 200)
    victim, friend = made.silos[:2]
    upload = made.contribute(victim, values)
    letter = sealing.letters(upload.pieces)[friend]
    seed = o.open_seed(made.line, upload.upload, letter, friend, {0: seed_of(friend)}, made.signers)
    # as a row of it alone
    opening = o.Opening(made.line, KEY, [o.Summand(upload.upload, WHOLE, seed)], 0, ())
    read = lambda _, at, size: memoryview(upload.hidden)[at : at + size]
    for words in o.mixed_pieces(made.line, {victim: WHOLE}, read):
        opening.add(words.tobytes())
    tag = linear_tags.combine({victim: upload.upload.tag}, 1, {victim: WHOLE})
    assert np.abs(opening.finish(tag) - values).max() < 1e-6


@pytest.fixture(scope="module")
def made():
    return Directed(own_frame(elements=ELEMENTS, chunk_bytes=1 << 16))


def known_pads(made, friend):
    """Every pad of the first row that the coordinator can make with a silo of the cohort, and what
    it may try.
    """
    spec, group = made.spec, made.spec.groups[1]
    own = d.sender_pads(spec, friend, seed_of(friend), prekeys(friend))
    as_reader = d.recipient_pads(
        spec, group, seed_of(friend), {**prekeys(friend), friend: prekeys(FIVE[2])[friend]}
    )
    return {friend: own[1]}, as_reader


def test_directed_rows_stay_noise(made):
    """Directed rows for another silo stay noise to the coordinator with one silo of the cohort."""
    known, tried = known_pads(made, FRIEND)
    for pads in (known, tried, {**tried, **known}):
        words = made.hidden[1].copy()
        unpad(1, words, list(pads.values()))
        left = dequantise(words, 32, made.spec.groups[1].scale_exponent)
        assert max(alike(left, values) for values in (made.exact(), *made.held.values())) < 0.04
        with pytest.raises(RefusedError, match="was altered"):
            made.open(pads={**dict.fromkeys(FIVE, Term(bytes(32))), **pads})


def test_nor_does_it_open_a_single_senders_numbers_with_the_reader_of_another_row(made):
    """With the second reader it has the second row, and of the first one nothing."""
    second = made.open(2)
    assert np.abs(second.mean(np.float64) - made.exact(2)).max() < 1e-6
    words = made.hidden[1].copy()
    pads = d.recipient_pads(
        made.spec, made.spec.groups[1], seed_of(AWAY[1]), prekeys(AWAY[1]) | prekeys(AWAY[0])
    )
    unpad(1, words, [pads[silo] for silo in FIVE])
    assert max(alike(words.view("<i4"), values) for values in made.held.values()) < 0.04
    # The two rows are different mixtures of the same models; who reads both, having both readers,
    # has two equations.
    assert alike(made.open(1).mean(np.float64), second.mean(np.float64)) < 0.999


def test_its_tags_tell_no_guess_from_another(made):
    """By the group key alone a tag of the sum confirms a guess of all numbers.

    Here a guess stays as good as others.
    """
    spec, ctx = made.spec, made.spec.context()
    tagger = Tagger(GROUP_KEY, ctx, len(spec.groups))
    words = made.hidden[1].copy()
    pads = d.recipient_pads(spec, spec.groups[1], seed_of(AWAY[0]), prekeys(AWAY[0]))
    unpad(1, words, list(pads.values()))
    tagger.add(1, words)  # the right guess
    tag = made.claim(1).tag
    # the reader sees that it is
    tagger.check_group(1, tag, {s: p.key for s, p in pads_of(spec).items()}, ctx, FIVE)
    with pytest.raises(RefusedError, match="was altered"):
        tagger.check_group(1, tag, dict.fromkeys(FIVE, GROUP_KEY), ctx, FIVE)


def pads_of(spec):
    return d.recipient_pads(spec, spec.groups[1], seed_of(AWAY[0]), prekeys(AWAY[0]))


@pytest.mark.succeeds
def test_with_a_silo_it_can_shift_a_row_unseen_as_the_table_says():
    """What tags do not hold against: who has the group key knows what a shift adds to the tag."""
    made = Directed()
    shifted, tagger = made.hidden[1].copy(), Tagger(GROUP_KEY, made.spec.context(), 3)
    shift = np.zeros_like(shifted)
    shift[0] = 1 << 20
    tagger.add(1, shift)
    shifted += shift
    (tag,) = decoded(made.claim(1).tag, 1)
    forged = ((tag + tagger.sums[1]) % PRIME).to_bytes(8)
    assert (made.open(words=shifted, tag=forged).mean() != made.open().mean()).sum() == 1


def test_n_rows_of_one_silo_s_choosing_are_not_to_be_had():
    """Each round has one row for a silo, by weights that follow from the job: senders refuse
    another document.
    """
    weights = integer_weights([1, 0, 0, 0, 0])
    spec = Directed().spec
    groups = (spec.groups[0], spec.groups[1].model_copy(update={"counts": weights}), spec.groups[2])
    chosen = spec.model_copy(update={"groups": groups})
    with pytest.raises(RefusedError, match="1 silos are mixed, fewer than min_cohort 3"):
        check_cohort(chosen, Terms())
    with pytest.raises(RefusedError, match="specifies groups"):
        check_frame(chosen, own_frame())
