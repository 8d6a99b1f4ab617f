import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.secure_sums import frame, group, names

from staddle.errors import LocalError, RefusedError
from staddle.security.arithmetic.fixedpoint import SIGNED, WORD, scale_exponent
from staddle.security.arithmetic.masks import Keystream, Term
from staddle.security.faults import COORDINATOR_OR_SILO
from staddle.security.identity.domains import SECAGG_TAG, framed
from staddle.security.identity.pairwise_keys import derive
from staddle.security.secagg import linear_tags, masked_sum
from staddle.security.secagg.linear_tags import PRIME, Tagger, TagPads, combine, decoded
from staddle.security.secagg.spec import specify

FOUR = names(4)
KEY, CTX = b"k" * 32, b"c" * 32


def slow(words, index, key=KEY, ctx=CTX):
    """Σ β_r α_c q_rc in Python's own integers."""
    stream, side = Keystream(derive(key, ctx, framed(SECAGG_TAG)), index), linear_tags.SIDE

    def drawn():
        low, high = bytearray(8 * side), bytearray(4 * side)
        stream.fill(memoryview(low))
        stream.fill(memoryview(high))
        pairs = zip(
            np.frombuffer(low, "<u8").tolist(), np.frombuffer(high, "<u4").tolist(), strict=True
        )
        return [a + 2**64 * b for a, b in pairs]

    alpha, total = drawn(), 0
    for k, number in enumerate(words.view(SIGNED[8 * words.itemsize]).tolist()):
        row, column = divmod(k, side)
        if k % side**2 == 0:
            beta = drawn()
        total += beta[row % side] * alpha[column] * number
    return total % PRIME


def tagged(*groups):
    tagger = Tagger(KEY, CTX, len(groups))
    for index, words in enumerate(groups):
        tagger.add(index, words)
    return tagger


def test_the_modulus_is_the_largest_prime_below_2_to_64():
    """Miller-Rabin with the first twelve primes proves it below 3.3e24 (Sorenson, Webster 2015)."""

    def prime(n):
        d, twos = n - 1, 0
        while d % 2 == 0:
            d, twos = d // 2, twos + 1
        for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
            x = pow(base, d, n)
            if x not in (1, n - 1) and not any((x := x * x % n) == n - 1 for _ in range(twos - 1)):
                return False
        return True

    assert PRIME < 2**64
    assert prime(PRIME)
    assert not any(prime(n) for n in range(PRIME + 1, 2**64))


@pytest.mark.parametrize("weights", ["public", "equal"])
def test_honest_sums_stay_far_enough_from_the_ends_of_the_ring(weights):
    for n in range(2, 1001):
        largest = 2 ** scale_exponent(64, n, 0, weights) * (1 if weights == "public" else n)
        assert largest + n < 2**63 - 59


def test_a_shift_by_any_multiple_of_a_modulus_is_noticed():
    """Modulo 2^61 - 1 a word of ring 64 could be shifted by that: the same tag for another sum."""
    combined, total = sums_of(vectors())
    least, most = -(2**63) + 1, 2**63 - 1
    multiples = {m * n for n in (2**61 - 1, PRIME, 2**63 - 1) for m in range(-8, 9) if m}
    for by in multiples | {2**61, 2**62, 2**63}:
        value = int(total[1][7].astype("<i8")) + by
        shifted = total[1].copy()
        shifted[7:8] += np.array([by % 2**64], "<u8")
        if by % 2**64:
            with pytest.raises(RefusedError, match="group 1 that was altered"):
                tagged(total[0], shifted).check(combined, KEY, CTX, FOUR)
        # no multiple of the modulus leads to another word
        assert by % PRIME or not least <= value <= most


@given(st.data())
def test_agrees_with_the_slow_oracle_however_it_is_cut(data):
    ring = data.draw(st.sampled_from([32, 64]))
    edge = [0, 1, 2**ring - 1, 2 ** (ring - 1), 2 ** (ring - 1) - 1]
    # ends of what fits 32 bits
    edge += [number % 2**ring for number in (2**31 - 1, 2**31, -(2**31), -(2**31) - 1)]
    numbers = data.draw(st.lists(st.sampled_from(edge) | st.integers(0, 2**ring - 1), max_size=40))
    size = data.draw(st.integers(0, 3 * linear_tags.SIDE))
    words = np.resize(np.array(numbers or [0], WORD[ring]), size)
    cuts = sorted(data.draw(st.lists(st.integers(0, words.size), max_size=3)))
    tagger = Tagger(KEY, CTX, 2)
    for start, stop in zip((0, *cuts), (*cuts, words.size), strict=True):
        tagger.add(1, words[start:stop])
        assert tagger.sums == [0, slow(words[:stop], 1)]


@pytest.mark.parametrize("ring", [32, 64])
def test_long_vectors_at_their_limits(ring):
    """More than a page; cut between two words of a row."""
    n = linear_tags.SIDE**2 + 1100
    for value in (2 ** (ring - 1), 2 ** (ring - 1) - 1, 2**ring - 1, 2**31 - 1, 2**ring - 2**31):
        words = np.full(n, value, WORD[ring])
        tagger = Tagger(KEY, CTX, 1)
        tagger.add(0, words[:1001])
        tagger.add(0, words[1001:])
        assert tagger.sums == [slow(words, 0)]


@pytest.mark.parametrize("largest", [2**31, 2**32, 2**63])
@pytest.mark.parametrize("signs", ["negative", "positive", "in turn", "half by half", "at random"])
def test_sums_are_exact_however_large_they_are_and_however_they_cancel(largest, signs, monkeypatch):
    """At their limits: floats hold the sums of a page and of its rows without rounding."""
    n, random = linear_tags.SIDE * (linear_tags.SIDE + 2) + 5, np.random.default_rng(3)
    most = largest - (0 if signs == "negative" else 1)
    sign = {
        "negative": np.full(n, -1),
        "positive": np.full(n, 1),
        "in turn": np.resize([1, -1], n),
        "half by half": np.where(np.arange(n) % linear_tags.SIDE < linear_tags.SIDE // 2, 1, -1),
        "at random": random.choice([1, -1], n),
    }[signs]
    for lost in (0, random.integers(0, 2**31, n)):
        pairs = zip(sign, np.broadcast_to(lost, n), strict=True)
        numbers = [int(s) * (most - int(o)) for s, o in pairs]
        words = np.array(numbers, "<i4" if largest == 2**31 else "<i8")
        for coefficient in (2**64 - 1, 2**64 - 2**13):
            field = lambda _, count, c=coefficient: np.full(count, c, "<u8")
            monkeypatch.setattr(linear_tags, "_field", field)
            exact = coefficient**2 * sum(numbers)
            assert tagged(words.view(f"<u{words.itemsize}")).sums == [exact % PRIME]


def test_coefficients_are_those_of_the_96_bits_that_they_are_made_of():
    low = np.array([0, 1, PRIME - 1, PRIME, 2**64 - 1, 2**64 - 59, 2**64 - 60], "<u8").repeat(3)
    high = np.resize(np.array([0, 1, 2**32 - 1], "<u4"), low.size)
    bits = iter((low, high))

    class Given:
        def fill(self, into):
            into[:] = next(bits).data.cast("B")

    found = linear_tags._field(Given(), low.size)
    whole = [a + 2**64 * b for a, b in zip(low.tolist(), high.tolist(), strict=True)]
    assert [value % PRIME for value in found.tolist()] == [value % PRIME for value in whole]


def test_groups_come_in_order():
    tagger = Tagger(KEY, CTX, 3)
    one, two = np.arange(5, dtype="<u4"), np.arange(7, dtype="<u8")
    tagger.add(0, one)
    tagger.add(2, two)
    assert tagger.sums == [slow(one, 0), 0, slow(two, 2)]
    with pytest.raises(LocalError, match="group 0 after group 2"):
        tagger.add(0, one)


def sums_of(vectors):
    """Each silo's tags, their combination, and the sum itself, mod 2^b."""
    sent = {silo: tagged(*groups).padded(KEY, CTX, silo) for silo, groups in vectors.items()}
    total = [sum(groups[1:], groups[0]) for groups in zip(*vectors.values(), strict=True)]
    return combine(sent, len(total)), total


def vectors(seed=0):
    random = np.random.default_rng(seed)
    small, large = (0, 2**29), (0, 2**60)
    return {
        silo: [
            (random.integers(*small, 50) - 2**28).astype("<i4").view("<u4"),
            (random.integers(*large, 30) - 2**59).astype("<i8").view("<u8"),
        ]
        for silo in FOUR
    }


def test_the_honest_sum_is_accepted():
    combined, total = sums_of(vectors())
    tagged(*total).check(combined, KEY, CTX, FOUR)


def altered(change, blamed=COORDINATOR_OR_SILO):
    combined, total = sums_of(vectors())
    with pytest.raises(RefusedError) as caught:
        change(combined, total)
    assert (caught.value.peer, caught.value.code) == (blamed, "SUM")


def test_any_word_shifted_is_noticed():
    for index, at, by in ((0, 0, 1), (0, 49, 2**31), (1, 0, 1), (1, 29, 2**63)):

        def shift(combined, total, index=index, at=at, by=by):
            total[index][at : at + 1] += total[index].dtype.type(by)
            tagged(*total).check(combined, KEY, CTX, FOUR)

        altered(shift)


def test_a_sum_that_wrapped_around_is_noticed():
    over = {silo: [np.full(3, 2**29, "<u4")] for silo in FOUR}  # 2^31 in all: negative, mod 2^32
    combined, total = sums_of(over)
    with pytest.raises(RefusedError):
        tagged(*total).check(combined, KEY, CTX, FOUR)
    below = {silo: [np.full(3, 2**29 - 1, "<u4")] for silo in FOUR}
    combined, total = sums_of(below)
    tagged(*total).check(combined, KEY, CTX, FOUR)


def test_other_survivors_keys_contexts_and_tags_are_noticed():
    def check(change, blamed=COORDINATOR_OR_SILO, key=KEY, ctx=CTX, silos=FOUR):
        altered(lambda tags, total: tagged(*total).check(change(tags), key, ctx, silos), blamed)

    def same(tags):
        return tags

    check(same, silos=FOUR[:3])
    check(same, key=b"x" * 32)
    check(same, ctx=b"x" * 32)
    check(lambda tags: tags[:-1], "coordinator")
    check(lambda tags: tags[8:] + tags[:8])
    check(lambda _: bytes(16))
    for key, ctx in ((b"x" * 32, CTX), (KEY, b"x" * 32)):
        other = Tagger(key, ctx, 1)
        words = np.arange(5, dtype="<u4")
        other.add(0, words)
        assert other.sums != tagged(words).sums


@settings(max_examples=50)
@given(st.data())
def test_weighted_sums_of_vectors_of_several_contexts(data):
    weights = {silo: data.draw(st.integers(0, 2**30)) for silo in FOUR}
    contexts = {silo: silo.encode().ljust(32) for silo in FOUR}
    numbers = st.lists(st.integers(-(2**30), 2**30), min_size=5, max_size=5)
    vectors = {silo: data.draw(numbers) for silo in FOUR}
    words = {silo: np.array(vector, "<i8").view("<u8") for silo, vector in vectors.items()}
    sent = {silo: tagged(own).padded(KEY, contexts[silo], silo) for silo, own in words.items()}
    total = [sum(weights[silo] * vectors[silo][k] for silo in FOUR) for k in range(5)]
    mine = tagged(np.array(total, "<i8").view("<u8"))
    summed = [TagPads(s, contexts[s], weights[s]) for s in FOUR]
    combined = combine(sent, 1, weights)
    mine.check_weighted(combined, KEY, summed)
    other = [TagPads(FOUR[0], contexts[FOUR[0]], weights[FOUR[0]] + 1), *summed[1:]]
    elsewhere = [TagPads(FOUR[0], b"x" * 32, 1 + weights[FOUR[0]]), *summed[1:]]
    shifted = tagged(np.array([total[0] + 1, *total[1:]], "<i8").view("<u8"))
    for tagger, wrong in ((mine, other), (mine, elsewhere), (shifted, summed)):
        with pytest.raises(RefusedError, match="was altered"):
            tagger.check_weighted(combined, KEY, wrong)


def test_pads_hide_what_was_tagged():
    words = np.arange(5, dtype="<u4")
    plain = tagged(words)
    sent = {plain.padded(KEY, ctx, silo) for silo in FOUR for ctx in (CTX, b"d" * 32)}
    assert len(sent) == 8
    assert plain.sums[0].to_bytes(8) not in sent
    two = Tagger(KEY, CTX, 2).padded(KEY, CTX, FOUR[0])
    assert two[:8] != two[8:]


def test_tags_have_one_spelling():
    assert decoded((PRIME - 1).to_bytes(8) + bytes(8), 2) == [PRIME - 1, 0]
    for wrong in (PRIME.to_bytes(8), b"", bytes(7), bytes(16)):
        assert decoded(wrong, 1) is None
        with pytest.raises(RefusedError) as caught:
            combine({FOUR[0]: bytes(8), FOUR[1]: wrong}, 1)
        assert (caught.value.peer, caught.value.code) == (FOUR[1], "UPLOAD")


def test_tags_of_masked_uploads_fit_the_opened_sum():
    weighed = {"weights": "private", "weight_most": 12, "weight_least": 2}
    groups = (group(), group("d", 24, rows=3, ring=64, **weighed))
    spec = specify(frame(groups=groups), FOUR, 0)
    accumulator, sent = masked_sum.Accumulator(spec), {}
    for i, silo in enumerate(FOUR):
        values = [
            masked_sum.GroupValues(np.linspace(-8, 8, 20)),
            masked_sum.GroupValues(np.full(24, 1.5 * i), np.array([2.0, 0.0, 12.0])),
        ]
        tagger = Tagger(KEY, spec.context(), 2)
        term = Term(bytes([i]) * 32)
        made = [w.tobytes() for w in masked_sum.masked_chunks(spec, silo, values, [term], tagger)]
        accumulator.add(made)
        sent[silo] = tagger.padded(KEY, spec.context(), silo, terms=[term])
    left = [Term(bytes([i]) * 32) for i in range(4)]
    accumulator.open(left, FOUR)
    combined = combine(sent, 2, terms=left)

    def checked(shift):
        mine = Tagger(KEY, spec.context(), 2)
        for index, words in accumulator.numbers():
            mine.add(index, words + words.dtype.type(shift))
        mine.check(combined, KEY, spec.context(), FOUR)

    checked(0)
    with pytest.raises(RefusedError, match="was altered"):
        checked(1)
