"""The result of a tagged sum as it comes down: it is what was opened, and nothing else passes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.secure_sums import GROUP_KEY, frame, group, names, signer, signers

from staddle.errors import RefusedError
from staddle.security.blind import open_sum
from staddle.security.blind.open_sum import Claim, check_claim, open_group, tag_of
from staddle.security.blind.silo_pads import silo_pads
from staddle.security.faults import COORDINATOR_OR_SILO
from staddle.security.identity.domains import SECAGG_SPEC
from staddle.security.secagg import linear_tags
from staddle.security.secagg import masked_sum as m
from staddle.security.secagg.spec import Terms, specify

SILOS = names(4)
GROUPS = (
    group("model", 20, weights="public"),
    group("twin", 20, weights="public"),
    group("rows", 24, rows=4, ring=64, weights="private", weight_most=50, weight_least=1),
)
FRAME = frame(groups=GROUPS, tagged=True, counts=tuple((silo, 30) for silo in SILOS))
HIDDEN = frame(
    groups=tuple(each.model_copy(update={"reader": "silos"}) for each in GROUPS),
    tagged=True,
    counts=FRAME.counts,
)
TERMS = Terms(min_cohort=3)


class Sum:
    """An opened sum without masks and the claim of each group; ``opened`` is from before pads."""

    def __init__(self, survivors=SILOS, own=FRAME):
        self.survivors, self.own = survivors, own
        self.spec, plain = specify(own, SILOS, 0), specify(FRAME, SILOS, 0)
        ctx = self.spec.context()
        accumulator = m.Accumulator(self.spec)
        clear = m.Accumulator(plain)
        sent = {}
        for number, silo in enumerate(survivors):
            contributions = [contribution(each, number) for each in own.groups]
            m.check_group_values(self.spec, contributions)
            tagger = linear_tags.Tagger(GROUP_KEY, ctx, len(GROUPS))
            pads = silo_pads(self.spec, silo, GROUP_KEY)
            accumulator.add(
                words.tobytes()
                for words in m.masked_chunks(self.spec, silo, contributions, (), tagger, pads)
            )
            clear.add(words.tobytes() for words in m.masked_chunks(plain, silo, contributions, ()))
            sent[silo] = tagger.padded(GROUP_KEY, ctx, silo)
        accumulator.open((), survivors)
        self.opened = clear.open((), survivors)
        self.tags = linear_tags.combine(sent, len(GROUPS))
        self.words = [
            np.concatenate([words for index, words in accumulator.numbers() if index == wanted])
            for wanted in range(len(GROUPS))
        ]

    def claim(self, index=0, **changes):
        payload = self.spec.signed_bytes()
        signature = signer("coordinator")(SECAGG_SPEC, payload)
        tag = tag_of(self.tags, index, len(GROUPS))
        return replace(Claim(payload, signature, self.survivors, tag), **changes)


def contribution(own, number):
    values = np.linspace(-1, 1, own.elements, dtype=np.float32) * (number + 1) / 8
    weights = np.full(own.rows, number + 1.0) if own.weights == "private" else None
    return m.GroupValues(values, weights)


@pytest.fixture(
    scope="module", params=[FRAME, HIDDEN], ids=["the coordinator reads it", "silos alone read it"]
)
def made(request):
    return Sum(own=request.param)


def same(found, wanted):
    for name in ("elements", "ring", "exponent", "unit"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.weight.tolist() == wanted.weight.tolist()
    assert found.total.tolist() == wanted.total.tolist()
    assert found.mean().tolist() == wanted.mean().tolist()


@pytest.mark.parametrize("own", [FRAME, HIDDEN])
@pytest.mark.parametrize("survivors", [SILOS, SILOS[:3], SILOS[1:]])
@pytest.mark.parametrize("piece", [1 << 18, 7])
def test_the_words_give_the_bits_of_what_was_opened(own, survivors, piece, monkeypatch):
    # pieces of 7 words cut the elements from the weights elsewhere
    monkeypatch.setattr(open_sum, "PIECE", piece)
    found = Sum(survivors, own)
    for index, words in enumerate(found.words):
        claim = found.claim(index)
        spec = check_claim(claim, own, TERMS, signers(SILOS))
        assert spec == found.spec
        assert words.nbytes == spec.groups[index].nbytes == own.groups[index].nbytes
        same(open_group(spec, index, claim, GROUP_KEY, words.copy()), found.opened[index])


@given(st.integers(0, 2), st.data())
def test_any_word_changed_in_any_way_is_noticed(made, index, data):
    words = made.words[index].copy()
    place = data.draw(st.integers(0, words.size - 1))
    ring = 8 * words.itemsize
    words[place : place + 1] += words.dtype.type(data.draw(st.integers(1, 2**ring - 1)))
    with pytest.raises(RefusedError, match=f"group {index} that was altered") as caught:
        open_group(made.spec, index, made.claim(index), GROUP_KEY, words)
    assert (caught.value.peer, caught.value.code) == (COORDINATOR_OR_SILO, "SUM")


@pytest.mark.parametrize("modulus", [linear_tags.PRIME, 2**61 - 1, 2**32, 2**63])
@pytest.mark.parametrize("times", [1, 3, 5])
def test_multiples_of_a_modulus_are_noticed(made, modulus, times):
    words = made.words[2].copy()
    words[3:4] += np.uint64(modulus * times % 2**64)
    with pytest.raises(RefusedError, match="was altered"):
        open_group(made.spec, 2, made.claim(2), GROUP_KEY, words)


def test_words_of_another_group_of_the_same_size_are_noticed(made):
    # the same, under another tag
    assert (made.words[0].tolist() == made.words[1].tolist()) == (made.own is FRAME)
    for index, claim in ((0, made.claim(1)), (1, made.claim(0))):
        with pytest.raises(RefusedError, match="was altered"):
            open_group(made.spec, index, claim, GROUP_KEY, made.words[index].copy())


@pytest.mark.parametrize("survivors", [SILOS[:3], SILOS[1:]])
def test_survivors_that_were_others_are_noticed(made, survivors):
    claim = made.claim(survivors=survivors)
    check_claim(claim, made.own, TERMS, signers(SILOS))
    with pytest.raises(RefusedError, match="was altered"):
        open_group(made.spec, 0, claim, GROUP_KEY, made.words[0].copy())


@pytest.mark.parametrize("own", [FRAME, HIDDEN])
def test_one_that_was_not_among_the_survivors_is_noticed(own):
    found = Sum(SILOS[:3], own)
    with pytest.raises(RefusedError, match="was altered"):
        open_group(found.spec, 0, found.claim(survivors=SILOS), GROUP_KEY, found.words[0])


@pytest.mark.parametrize(("changes", "own", "terms", "code", "said"), [
    ({"signature": bytes(64)}, {}, TERMS, "SPEC", "its signature does not fit"),
    ({}, {"round": 4}, TERMS, "SPEC", "specifies round 3, this silo expects 4"),
    ({}, {"job_digest": "ab" * 32}, TERMS, "SPEC", "specifies job_digest"),
    ({}, {"members": "ab" * 32}, TERMS, "SPEC", "specifies members"),
    ({}, {"tagged": False}, TERMS, "SPEC", "specifies tagged True, this silo expects False"),
    ({}, {"groups": GROUPS[:2]}, TERMS, "SPEC", "specifies groups"),
    ({}, {"groups": "the other readers"}, TERMS, "SPEC", "specifies groups"),
    ({}, {}, Terms(min_cohort=5), "POLICY", "smaller than min_cohort 5"),
    ({}, {}, Terms(colluders=2), "POLICY", "has colluders = 1"),
    ({"survivors": SILOS[:2]}, {}, TERMS, "SURVIVORS", "2 survivors are fewer than 3"),
    ({"survivors": SILOS[::-1]}, {}, TERMS, "SURVIVORS", "not members of the cohort in order"),
    ({"survivors": SILOS[:3]}, {}, Terms(batches=(SILOS,)), "SURVIVORS", "the sum lacks"),
])  # fmt: skip
def test_a_claim_that_does_not_hold_is_refused(made, changes, own, terms, code, said):
    if own.get("groups") == "the other readers":
        own = {"groups": (FRAME if made.own is HIDDEN else HIDDEN).groups}
    expected = frame(**{"groups": made.own.groups, "tagged": True, "counts": FRAME.counts, **own})
    with pytest.raises(RefusedError) as caught:
        check_claim(made.claim(**changes), expected, terms, signers(SILOS))
    assert (caught.value.peer, caught.value.code) == ("coordinator", code), caught.value.why
    assert said in caught.value.why


def test_a_claim_may_lack_a_silo_that_is_excused(made):
    terms = Terms(batches=(SILOS,), excused=frozenset(SILOS[3:]))
    for survivors in (SILOS[:3], SILOS):
        found = check_claim(made.claim(survivors=survivors), made.own, terms, signers(SILOS))
        assert found == made.spec
    with pytest.raises(RefusedError, match="the sum lacks"):
        check_claim(made.claim(survivors=SILOS[1:]), made.own, terms, signers(SILOS))


def test_strangers_are_refused(made):
    with pytest.raises(RefusedError, match="the cohort names silo-03, no silo of the roster"):
        check_claim(made.claim(), made.own, TERMS, signers(SILOS[:3]))


def test_a_model_digest_may_be_of_a_round_in_which_the_silo_was_not(made):
    other = frame(groups=made.own.groups, tagged=True, counts=FRAME.counts, model_digest="ab" * 32)
    assert check_claim(made.claim(), other, TERMS, signers(SILOS)) == made.spec
