from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staddle.errors import LocalError
from staddle.files.documents import validate
from staddle.security.arithmetic import fixedpoint
from staddle.security.arithmetic.fixedpoint import WORD, Group, scale_exponent


def group(elements=3, silos=4, **fields):
    fields = {"ring": 32, "clip_exponent": 3, "weights": "equal", **fields}
    exponent = scale_exponent(fields["ring"], silos, fields["clip_exponent"], fields["weights"])
    return Group(name="g", elements=elements, scale_exponent=exponent, **fields)


def quantised(g, values, weight=1.0):
    into = np.zeros(g.elements, fixedpoint.WORD[g.ring])
    fixedpoint.quantise(g, np.asarray(values), weight, into)
    return into


@pytest.mark.parametrize("ring", [32, 64])
@pytest.mark.parametrize("weights", ["public", "private", "equal"])
@pytest.mark.parametrize("silos", [2, 3, 4, 7, 10, 64, 100, 127, 128, 1000])
@pytest.mark.parametrize("clip_exponent", [-3, 0, 3, 20])
def test_the_scale_is_the_largest_under_which_no_sum_wraps(ring, weights, silos, clip_exponent):
    bound = Fraction(2) ** clip_exponent * (1 if weights == "public" else silos)
    e = scale_exponent(ring, silos, clip_exponent, weights)
    assert bound * 2**e <= 2 ** (ring - 1) - 1 - silos < bound * 2 ** (e + 1)


@pytest.mark.parametrize("ring", [32, 64])
@pytest.mark.parametrize("silos", [2, 3, 7, 10, 127, 128])
def test_sums_at_the_bounds_do_not_wrap(ring, silos):
    for sign in (1.0, -1.0):
        g = group(1, silos, ring=ring)
        words = quantised(g, [sign * g.clip])
        total = words * words.dtype.type(silos)
        assert fixedpoint.dequantise(total, ring, g.scale_exponent)[0] == sign * g.clip * silos
        counts = [2**40 + 7 * i for i in range(silos)]
        g = group(1, silos, ring=ring, weights="public")
        total = sum(quantised(g, [sign * g.clip], count / sum(counts)) for count in counts)
        found = fixedpoint.dequantise(total, ring, g.scale_exponent)[0]
        assert abs(Fraction(float(found)) - int(sign * g.clip)) <= fixedpoint.error_bound(g, silos)


def test_a_ring_that_is_too_small_is_said():
    assert scale_exponent(32, 10, 27, "equal") == 0
    why = "ring 32 cannot hold a sum over 10 silos of numbers up to 2\\^28"
    with pytest.raises(LocalError, match=why):
        scale_exponent(32, 10, 28, "equal")
    with pytest.raises(LocalError, match="cannot hold"):
        scale_exponent(32, 2**31, -64, "equal")


finite = st.floats(-8, 8, width=32)


@given(st.data())
def test_opened_sums_are_within_the_bound(data):
    ring = data.draw(st.sampled_from([32, 64]))
    weights = data.draw(st.sampled_from(["public", "private", "equal"]))
    silos = data.draw(st.integers(2, 20))
    fields = {"weight_most": 50, "weight_least": 5} if weights == "private" else {}
    g = group(3, silos, ring=ring, weights=weights, **fields)
    counts = data.draw(st.lists(st.integers(5, 50), min_size=silos, max_size=silos))
    shares = {
        "public": [Fraction(c, sum(counts)) for c in counts],
        "private": [Fraction(c, 50) for c in counts],
        "equal": [Fraction(1)] * silos,
    }[weights]
    vectors = [data.draw(st.lists(finite, min_size=3, max_size=3)) for _ in range(silos)]
    members = data.draw(st.sets(st.integers(0, silos - 1), min_size=1))
    total = sum(quantised(g, np.array(vectors[i], np.float32), float(shares[i])) for i in members)
    found = fixedpoint.dequantise(total, ring, g.scale_exponent)
    for k in range(3):
        exact = sum(shares[i] * Fraction(vectors[i][k]) for i in members)
        # float64 holds 53 bits of the opened integer; the bound is about the integer itself
        seen = Fraction(int(total.view(fixedpoint.SIGNED[ring])[k]), 2**g.scale_exponent)
        assert abs(seen - exact) <= fixedpoint.error_bound(g, len(members))
        assert abs(Fraction(float(found[k])) - seen) <= abs(seen) * Fraction(1, 2**53)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40),
    st.floats(0, 1),
    st.sampled_from([32, 64]),
)
def test_one_number_as_python_computes_it(values, weight, ring):
    g = group(len(values), 4, ring=ring)
    found = quantised(g, values, weight).view(fixedpoint.SIGNED[ring])
    expected = [round(max(-8.0, min(8.0, v)) * (weight * 2.0**g.scale_exponent)) for v in values]
    assert found.tolist() == expected


def test_blocks_and_weights_of_each_value():
    n = 2 * fixedpoint.BLOCK + 5
    g = group(n, 4)
    values, weights = np.linspace(-8, 8, n), np.linspace(0, 1, n)
    expected = np.rint(values * weights * 2.0**g.scale_exponent).astype(np.int64)
    assert abs(quantised(g, values, weights).view("<i4") - expected).max() <= 1
    assert (quantised(g, values).view("<i4") == np.rint(values * 2.0**g.scale_exponent)).all()


def test_clipped_before_it_is_weighted():
    g = group(1, 4)
    assert quantised(g, [1000.0], 0.01)[0] == round(8 * 0.01 * 2**g.scale_exponent)


def test_what_does_not_fit_is_named_before_anything_leaves():
    g = group(3, 4)
    at_the_clip = np.array([8, -8, 0.0])
    assert fixedpoint.check_values(g, at_the_clip) == 0
    over = np.array([np.nextafter(8, 9), -9, 0.0])
    why = "'g': its largest magnitude is 9, above its clip 8; have the job signed with a larger"
    with pytest.raises(LocalError, match=why):
        fixedpoint.check_values(g, over)
    assert fixedpoint.check_values(g, over, saturate=True) == 2
    with pytest.raises(LocalError, match="above its clip"):
        fixedpoint.check_values(g, np.array([8.5, 0, 0]))
    for value in (np.nan, np.inf, -np.inf):
        for saturate in (False, True):
            with pytest.raises(LocalError, match="NaN or infinity"):
                fixedpoint.check_values(g, np.array([0, value, 0], np.float32), saturate=saturate)
    for wrong in (np.zeros(2), np.zeros((3, 1)), np.zeros(3, np.int64), np.zeros(3, np.float16)):
        with pytest.raises(LocalError, match=r"give float32 or float64 \[3\]"):
            fixedpoint.check_values(g, wrong)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.data())
def test_pieces_are_one_vector(sizes, data):
    vector, starts = np.arange(sum(sizes), dtype=np.float32) - 9, np.cumsum([0, *sizes])
    pieces = tuple(vector[a:b] for a, b in pairwise(starts))
    start = data.draw(st.integers(0, vector.size))
    stop = data.draw(st.integers(start, vector.size))
    assert fixedpoint.cut(pieces, start, stop).tolist() == vector[start:stop].tolist()
    assert fixedpoint.cut(vector, start, stop).tolist() == vector[start:stop].tolist()
    if vector.size:
        over = int((np.abs(vector) > 8).sum())
        assert fixedpoint.check_values(group(vector.size, 4), pieces, saturate=True) == over


def test_a_piece_is_not_copied_and_what_is_no_vector_is_refused():
    three, one = np.zeros(3, np.float32), np.ones(1, np.float32)
    assert np.shares_memory(fixedpoint.cut((one, three), 2, 4), three)
    g = group(4, 4)
    assert fixedpoint.check_values(g, (three, one)) == 0
    for wrong in (
        (three, three), (three,), (), (three, np.ones(1)), (three, np.ones((1, 1), np.float32)),
    ):  # fmt: skip
        with pytest.raises(LocalError, match=r"give float32 or float64 \[4\]"):
            fixedpoint.check_values(g, wrong)
    for last in (np.nan, np.inf):
        with pytest.raises(LocalError, match="NaN or infinity"):
            fixedpoint.check_values(g, (three, one * np.float32(last)), saturate=True)
    with pytest.raises(LocalError, match="its largest magnitude is 9,"):
        fixedpoint.check_values(g, (one * np.float32(-9), three))


def test_private_weights_are_within_their_declaration():
    one = group(4, 4, weights="private", weight_most=100, weight_least=10)
    fixedpoint.check_weights(one, np.array([10.0]))
    fixedpoint.check_weights(one, np.array([100.0]))
    for weight in (0.0, 9.0, 101.0, np.nan):
        with pytest.raises(LocalError, match="not between the declared 10 and 100"):
            fixedpoint.check_weights(one, np.array([weight]))
    rows = group(4, 4, rows=2, weights="private", weight_most=100, weight_least=10)
    fixedpoint.check_weights(rows, np.array([0.0, 50.0]))
    for weights in ([5.0, 50.0], [-10.0, 50.0]):
        with pytest.raises(LocalError, match="not between"):
            fixedpoint.check_weights(rows, np.array(weights))
    with pytest.raises(LocalError, match=r"not \[2\]"):
        fixedpoint.check_weights(rows, np.array([50.0]))


@given(st.lists(st.integers(10, 100), min_size=2, max_size=100))
def test_private_weights_add_up(weights):
    g = group(1, len(weights), weights="private", weight_most=100, weight_least=10)
    total = np.zeros(1, "<u4")
    for weight in weights:
        into = np.zeros(1, "<u4")
        fixedpoint.quantise_weights(g, np.array([float(weight)]), len(weights), into)
        total += into
    found = fixedpoint.dequantise(total, 32, fixedpoint.weight_exponent(32, len(weights)))[0] * 100
    assert abs(found - sum(weights)) <= 100 * len(weights) * 2.0 ** -(
        fixedpoint.weight_exponent(32, len(weights)) + 1
    ) * (1 + 1e-9)


@pytest.mark.parametrize(("fields", "why"), [
    ({"elements": 5, "rows": 2, "weights": "private", "weight_most": 2, "weight_least": 1},
        "not 2 equal rows"),
    ({"weights": "private"}, "need 1 <= weight_least"),
    ({"weights": "private", "weight_most": 1, "weight_least": 2}, "need 1 <= weight_least"),
    ({"weights": "private", "weight_most": 17, "weight_least": 1}, "need ring 64"),
    ({"rows": 2, "elements": 4}, "for private weights only"),
    ({"weight_most": 3}, "for private weights only"), ({"ring": 16}, "ring"),
    ({"elements": "3"}, "elements"), ({"elements": 0}, "elements"),
    ({"clip_exponent": 63}, "clip_exponent"), ({"scale_exponent": -1}, "scale_exponent"),
    ({"name": "a b"}, "name"), ({"weights": "none"}, "weights"),
])  # fmt: skip
def test_a_group_that_is_none(fields, why):
    document = {
        "name": "g", "elements": 3, "ring": 32, "clip_exponent": 3, "scale_exponent": 20,
        "weights": "equal",
    }  # fmt: skip
    assert validate(document, Group, "x").rows == 1
    with pytest.raises(LocalError, match=why):
        validate({**document, **fields}, Group, "x")


@pytest.mark.parametrize("ring", [32, 64])
@pytest.mark.parametrize("exponent", [0, 27, 59, 126])
def test_numbers_are_those_of_the_words_rounded_once(ring, exponent):
    bits = np.random.default_rng(exponent).integers(0, 2**64, 1000, dtype=np.uint64)
    words = np.concatenate([bits, bits & 1, -(bits & 1)]).astype(WORD[ring])
    exact = [Fraction(word) / 2**exponent for word in words.view(f"<i{ring // 8}").tolist()]
    found = fixedpoint.dequantise(words, ring, exponent).tolist()
    assert found == [float(number) for number in exact]


def test_numbers_may_take_the_place_of_their_words():
    words = np.random.default_rng(0).integers(0, 2**64, 100_003, dtype=np.uint64)
    expected = fixedpoint.dequantise(words, 64, 59)
    assert (fixedpoint.dequantise(words, 64, 59, words.view("<f8")) == expected).all()
    assert (words.view("<f8") == expected).all()
