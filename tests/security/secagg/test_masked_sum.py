import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.secure_sums import Drawn, frame, group, names

from staddle.errors import LocalError, RefusedError
from staddle.security.arithmetic import fixedpoint
from staddle.security.arithmetic.masks import Term, pair_term
from staddle.security.secagg import masked_sum
from staddle.security.secagg.masked_sum import Accumulator, GroupChunk, GroupValues, chunks
from staddle.security.secagg.spec import specify

FOUR = names(4)


def keys(silos, draw):
    own = {silo: draw(32) for silo in silos}
    return own, {frozenset((u, v)): draw(32) for u in silos for v in silos if u < v}


def terms_of(silo, silos, own, pair):
    pairs = (pair_term(silo, v, pair[frozenset((silo, v))]) for v in silos if v != silo)
    return [Term(own[silo]), *pairs]


def left(survivors, silos, own, pair):
    lost = [v for v in silos if v not in survivors]
    pairs = [pair_term(u, v, pair[frozenset((u, v))]) for u in survivors for v in lost]
    return [*(Term(own[u]) for u in survivors), *pairs]


def upload(spec, silo, given, terms):
    return [words.tobytes() for words in masked_sum.masked_chunks(spec, silo, given, terms)]


def opened(spec, values, survivors, seed=0):
    own, pair = keys(spec.cohort, Drawn(seed))
    accumulator = Accumulator(spec)
    for silo in survivors:
        masked_sum.check_group_values(spec, values[silo])
        accumulator.add(upload(spec, silo, values[silo], terms_of(silo, spec.cohort, own, pair)))
    return accumulator.open(left(survivors, spec.cohort, own, pair), survivors)


def test_chunks_are_those_of_the_docstring():
    spec = specify(frame(), FOUR, 0)
    assert list(chunks(spec)) == [GroupChunk(0, 0, 0, 0, 15, 1), GroupChunk(0, 1, 16, 15, 5, 4)]
    assert masked_sum.upload_bytes(spec) == 4 * 25
    for elements, expected in (
        (12, [GroupChunk(0, 0, 0, 0, 12, 4)]),
        (15, [GroupChunk(0, 0, 0, 0, 15, 1), GroupChunk(0, 1, 16, 15, 0, 4)]),
    ):
        assert list(chunks(specify(frame(groups=(group(elements=elements),)), FOUR, 0))) == expected


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([32, 64]),
)
def test_chunks_hold_every_number_once_and_fit(sizes, chunk_bytes, ring):
    groups = tuple(group(f"g{i}", size, ring=ring) for i, size in enumerate(sizes))
    spec = specify(frame(groups=groups, chunk_bytes=chunk_bytes), FOUR, 0)
    found = list(chunks(spec))
    assert {chunk.group for chunk in found} == set(range(len(sizes)))
    for index, size in enumerate(sizes):
        mine = [chunk for chunk in found if chunk.group == index]
        assert [c.number for c in mine] == list(range(len(mine)))
        assert [n for c in mine for n in range(c.start, c.start + c.body)] == list(range(size))
        words = [n for c in mine for n in range(c.first, c.first + c.words)]
        assert words == list(range(sum(c.words for c in mine)))
        assert [c.canaries for c in mine] == [1] * (len(mine) - 1) + [4]
        assert all(c.words * ring // 8 == chunk_bytes for c in mine[:-2])
        assert all(c.words * ring // 8 <= chunk_bytes for c in mine)
    assert masked_sum.upload_bytes(spec) == sum(c.words for c in found) * ring // 8


@settings(max_examples=50)
@given(st.data())
def test_every_mode_and_ring_gives_the_plain_sum(data):
    n = data.draw(st.integers(4, 8))
    silos = names(n)
    numbers = data.draw(st.lists(st.integers(8, 12), min_size=n, max_size=n))
    counts = dict(zip(silos, numbers, strict=True))
    ring, private = st.sampled_from([32, 64]), {"weights": "private", "weight_most": 12}
    groups = (
        group("a", data.draw(st.integers(1, 40)), weights="public", ring=data.draw(ring)),
        group("b", data.draw(st.integers(1, 40)), weights="equal", ring=data.draw(ring)),
        group("c", 40, weight_least=8, ring=data.draw(ring), **private),
        group("d", 24, rows=3, weight_least=2, ring=data.draw(ring), **private),
    )
    spec = specify(frame(groups=groups, counts=tuple(counts.items())), silos, 0)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = {s: random.choice([0.0, 2.0, 7.0, 12.0], 3) for s in silos}
    values = {}
    for s in silos:
        unweighted = (random.uniform(-8, 8, g.elements).astype(np.float32) for g in groups[:2])
        values[s] = [GroupValues(each) for each in unweighted]
        values[s].append(GroupValues(random.uniform(-8, 8, 40), np.array([float(counts[s])])))
        values[s].append(GroupValues(random.uniform(-8, 8, 24), rows[s]))
    survivors = data.draw(st.permutations(silos))[: data.draw(st.integers(spec.threshold, n))]
    a, b, c, d = opened(spec, values, survivors)
    m, most = len(survivors), 12

    def near(found, exact, index, unit):
        bound = float(fixedpoint.error_bound(spec.groups[index], m)) * unit + 1e-12 * unit * m * 8
        assert np.abs(found - exact).max() <= bound

    exact = sum(counts[s] * values[s][0].values.astype(float) for s in survivors)
    near(a.total, exact, 0, sum(counts.values()))
    assert a.weight.tolist() == [sum(counts[s] for s in survivors)]
    near(b.total, sum(values[s][1].values.astype(float) for s in survivors), 1, 1)
    assert b.weight.tolist() == [m]
    near(c.total, sum(counts[s] * values[s][2].values for s in survivors), 2, most)
    near(d.total, sum(np.repeat(rows[s], 8) * values[s][3].values for s in survivors), 3, most)
    for found, weights, g in ((c, counts, 2), (d, rows, 3)):
        exact = sum(weights[s] for s in survivors)
        rounding = 2.0 ** -fixedpoint.weight_exponent(groups[g].ring, n) + 1e-15
        assert np.abs(found.weight - exact).max() <= m * most * rounding


def test_the_mean_is_row_by_row_and_zero_without_weight():
    words = np.array([2, 4, 9, 9], "<u4")
    for pieces in (((0, words),), ((0, words[:1]), (1, words[1:3]), (3, words[3:]))):
        sums = masked_sum.OpenedGroup(4, 32, 1, 3.0, np.array([2.0, 0.0]), pieces)
        assert sums.total.tolist() == [3.0, 6.0, 13.5, 13.5]
        assert sums.mean().tolist() == [1.5, 3.0, 0.0, 0.0]
        assert (sums.mean().dtype, sums.mean(np.float64).dtype) == (np.float32, np.float64)
        whole = masked_sum.OpenedGroup(4, 32, 1, 3.0, np.array([4.0]), pieces)
        assert whole.mean().tolist() == [0.75, 1.5, 3.375, 3.375]


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize(
    ("ring", "dtype"), [(32, np.float32), (64, np.float64), (32, np.float64), (64, np.float32)]
)
def test_the_mean_may_take_the_memory_of_the_words(ring, dtype, rows):
    elements, random = 7 * (fixedpoint.BLOCK // 4), np.random.default_rng(5)
    # weights too
    drawn = random.integers(0, 2**ring, elements + rows, dtype=np.uint64)
    words, weights = drawn.astype(fixedpoint.WORD[ring]), np.arange(rows) + 2.0
    pieces = ((0, words[:9]), (9, words[9:elements]))
    sums = masked_sum.OpenedGroup(elements, ring, 20, 3.0, weights, pieces)
    apart = sums.mean(dtype)
    numbers = words[:elements].view(fixedpoint.SIGNED[ring]).astype(float) * 2.0**-20
    exact = (numbers.reshape(rows, -1) * (3.0 / weights)[:, None]).reshape(-1).astype(dtype)
    assert apart.tobytes() == exact.tobytes()
    within = sums.mean(dtype, words)
    assert within.tobytes() == exact.tobytes()
    assert np.shares_memory(within, words) == (8 * np.dtype(dtype).itemsize == ring)


def test_any_chunk_size_gives_the_same_sum():
    values = {s: [GroupValues(np.linspace(-8, 8, 500) * (i + 1) / 4)] for i, s in enumerate(FOUR)}
    own = frame(groups=(group("g", 500),))
    found = [
        opened(specify(replace(own, chunk_bytes=size), FOUR, 0), values, FOUR)[0].total
        for size in (64, 448, 8192)
    ]
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()


def test_pieces_give_the_words_of_the_whole():
    """Also an upload smaller than a chunk, and no multiple of a word of its other ring."""
    groups = (group("a", 21), group("b", 5, ring=64))
    spec = specify(frame(groups=groups, chunk_bytes=1 << 20), FOUR, 0)
    whole, other = np.linspace(-8, 8, 21), np.ones(5)
    for cuts in ([], [0, 7, 7, 20], range(22)):
        pieces = tuple(np.split(whole, cuts))
        values = [GroupValues(pieces), GroupValues((other,))]
        assert masked_sum.check_group_values(spec, values) == (0, 0)
        at_once = [GroupValues(whole), GroupValues(other)]
        assert upload(spec, FOUR[0], values, []) == upload(spec, FOUR[0], at_once, [])


def test_values_at_the_clip_saturate_when_allowed():
    spec = specify(frame(groups=(group("g", 2),)), FOUR, 0)
    values = [GroupValues(np.array([8.0, 9.0]))]
    with pytest.raises(LocalError, match="above its clip"):
        masked_sum.check_group_values(spec, values)
    assert masked_sum.check_group_values(spec, values, saturate=True) == (1,)
    own, pair = keys(FOUR, Drawn(0))
    accumulator = Accumulator(spec)
    for silo in FOUR:
        accumulator.add(upload(spec, silo, values, terms_of(silo, FOUR, own, pair)))
    assert accumulator.open(left(FOUR, FOUR, own, pair), FOUR)[0].total.tolist() == [32.0, 32.0]


@pytest.mark.parametrize("wrong", ["missing", "extra", "sign", "survivors", "key"])
def test_masks_that_do_not_come_off_are_noticed(wrong):
    spec = specify(frame(), FOUR, 0)
    own, pair = keys(FOUR, Drawn(0))
    accumulator = Accumulator(spec)
    for silo in FOUR[:3]:
        terms = terms_of(silo, FOUR, own, pair)
        accumulator.add(upload(spec, silo, [GroupValues(np.ones(20))], terms))
    terms = left(FOUR[:3], FOUR, own, pair)
    changed = {
        "missing": terms[1:],
        "extra": [*terms, Term(bytes(32))],
        "sign": [-terms[0], *terms[1:]],
        "survivors": terms,
        "key": [Term(bytes(32)), *terms[1:]],
    }[wrong]
    with pytest.raises(RefusedError) as caught:
        accumulator.open(changed, FOUR if wrong == "survivors" else FOUR[:3])
    assert (caught.value.code, "do not come out" in caught.value.why) == ("SUM", True)


def test_two_contexts_or_two_chunks_have_other_canaries():
    spec = specify(frame(), FOUR, 0)
    chunk = GroupChunk(0, 0, 0, 0, 15, 4)
    found = [
        masked_sum.canaries(spec.context(), chunk, 32),
        masked_sum.canaries(specify(frame(), FOUR, 1).context(), chunk, 32),
        masked_sum.canaries(spec.context(), replace(chunk, number=1), 32),
        masked_sum.canaries(spec.context(), replace(chunk, group=1), 32),
    ]
    assert len({words.tobytes() for words in found}) == 4
    assert masked_sum.canaries(spec.context(), chunk, 64).tobytes()[:16] == found[0].tobytes()


def test_what_is_not_for_the_specification_is_refused():
    spec = specify(frame(), FOUR, 0)
    good = [bytes(64), bytes(36)]
    for wrong in ([], good[:1], [bytes(64), bytes(32)], [bytes(64), bytes(40)]):
        with pytest.raises(LocalError, match="words, not"):
            Accumulator(spec).add(wrong)
    with pytest.raises(LocalError, match="more chunks"):
        Accumulator(spec).add([*good, b""])
    Accumulator(spec).add(good)
    for wrong, why in (
        ([], "values for 0 groups"),
        ([GroupValues(np.ones(20), np.ones(1))], "its weights are equal"),
        ([GroupValues(np.full(20, np.nan))], "NaN"),
    ):
        with pytest.raises(LocalError, match=why):
            masked_sum.check_group_values(spec, wrong)
    own = group(weights="private", weight_most=2, weight_least=1)
    private = specify(frame(groups=(own,)), FOUR, 0)
    with pytest.raises(LocalError, match="its weights are private"):
        masked_sum.check_group_values(private, [GroupValues(np.ones(20))])
    with pytest.raises(LocalError, match="not between"):
        masked_sum.check_group_values(private, [GroupValues(np.ones(20), np.array([3.0]))])


def test_two_uploads_of_the_same_values_are_unrelated():
    spec = specify(frame(groups=(group("g", 50_000),), chunk_bytes=1 << 20), FOUR, 0)
    values = [GroupValues(np.ones(50_000))]
    terms = [terms_of(FOUR[0], FOUR, *keys(FOUR, Drawn(seed))) for seed in (1, 2)]
    sent = (b"".join(upload(spec, FOUR[0], values, each)) for each in terms)
    one, other = (np.frombuffer(words, "<u4") for words in sent)
    for found in (one, other, one - other):
        counts = np.bincount(found.view(np.uint8), minlength=256)
        expected = found.nbytes / 256
        assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 4.5 * (2 * 255) ** 0.5


def test_a_silo_holds_a_chunk_whatever_the_size_of_its_upload():
    size = 4_000_000  # 16 MB
    spec = specify(frame(groups=(group("g", size),), chunk_bytes=1 << 20), FOUR, 0)
    values = [GroupValues(np.ones(size, np.float32))]
    terms = terms_of(FOUR[0], FOUR, *keys(FOUR, Drawn(0)))
    tracemalloc.start()
    try:
        masked_sum.check_group_values(spec, values)
        sent = sum(words.nbytes for words in masked_sum.masked_chunks(spec, FOUR[0], values, terms))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sent == masked_sum.upload_bytes(spec)
    assert peak < 3 << 20


def test_the_coordinator_holds_the_sum_and_the_mean():
    size = 2_000_000
    spec = specify(frame(groups=(group("g", size),), chunk_bytes=1 << 20), FOUR, 0)
    values = [GroupValues(np.full(size, 0.5, np.float32))]
    uploads = {s: upload(spec, s, values, [Term(bytes([i]) * 32)]) for i, s in enumerate(FOUR)}
    tracemalloc.start()
    try:
        accumulator = Accumulator(spec)
        for silo in FOUR:
            accumulator.add(uploads[silo])
        (sums,) = accumulator.open([Term(bytes([i]) * 32) for i in range(4)], FOUR)
        found = sums.mean()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found == 0.5).all()
    assert peak < 2 * 4 * size + (5 << 20)


# What no values can add up to.


WEIGHED = {"weights": "private", "weight_least": 1, "weight_most": 900}
BOUNDED = {
    "public": (group(weights="public"), 1.0), "equal": (group(), 1.0),
    "count": (group(ring=64, clip_exponent=40), 1.0), "private": (group(ring=64, **WEIGHED), 900.0),
    "private, narrow": (group(weights="private", weight_least=10, weight_most=100), 100.0),
    "rows": (group(elements=20, rows=4, ring=64, **WEIGHED), 900.0),
}  # fmt: skip


def bounded(kind, value, share=1.0):
    """A specification and each silo's values: ``value`` clips, by a share of the largest weight."""
    own, most = BOUNDED[kind]
    spec = specify(frame(groups=(own,), counts=tuple((silo, 50) for silo in FOUR)), FOUR, 0)
    weights = None
    if own.weights == "private":
        weights = np.full(own.rows, max(most * share, own.weight_least), float)
    values = [GroupValues(np.full(own.elements, value * own.clip), weights)]
    return spec, dict.fromkeys(FOUR, values)


@pytest.mark.parametrize("share", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("value", [1.0, -1.0])
@pytest.mark.parametrize("survivors", [4, 3])
@pytest.mark.parametrize("kind", BOUNDED)
def test_what_silos_may_give_is_never_beyond_the_bounds(kind, survivors, value, share):
    spec, values = bounded(kind, value, share)
    (found,) = opened(spec, values, FOUR[:survivors])
    assert found.mean(np.float64) == pytest.approx(value * spec.groups[0].clip, rel=1e-6)


def test_a_row_that_no_silo_has_is_within_the_bounds():
    own, _ = BOUNDED["rows"]
    spec = specify(frame(groups=(own,)), FOUR, 0)
    weights = np.array([0.0, 900, 0, 1])
    (found,) = opened(spec, {silo: [GroupValues(np.zeros(20), weights)] for silo in FOUR}, FOUR)
    assert found.weight == pytest.approx([0, 3600, 0, 4])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("kind", BOUNDED)
def test_a_number_that_no_values_add_up_to_is_refused(kind, place, sign, monkeypatch):
    """One silo of four gives its clip and 1/1000 of what all may in one number; others theirs."""
    spec, values = bounded(kind, float(sign))
    own, write = spec.groups[0], masked_sum._write_body
    at = 0 if place == "first" else own.elements - 1
    limit = 4 * own.clip * 2.0**own.scale_exponent / (4 if own.weights == "public" else 1)

    def altered(spec, silo, own, given, chunk, into):
        write(spec, silo, own, given, chunk, into)
        if silo == FOUR[0] and chunk.start <= at < chunk.start + chunk.body:
            more = np.array([sign * int(limit / 1000)]).astype(into.dtype)
            into[at - chunk.start : at - chunk.start + 1] += more

    monkeypatch.setattr(masked_sum, "_write_body", altered)
    why = "numbers that 4 silos within its clip cannot give; one of them"
    with pytest.raises(RefusedError, match=why) as caught:
        opened(spec, values, FOUR)
    assert (caught.value.peer, caught.value.code) == ("coordinator or a silo of the cohort", "SUM")


@pytest.mark.parametrize("weight", [-1.0, 4000.0])
@pytest.mark.parametrize("kind", ["private", "rows"])
def test_a_weight_that_no_silo_may_have_is_refused(kind, weight, monkeypatch):
    spec, values = bounded(kind, 0.0, 0.5)
    monkeypatch.setattr(masked_sum, "check_weights", lambda *_: None)
    values[FOUR[0]] = [GroupValues(np.zeros(20), np.full(spec.groups[0].rows, weight - 3 * 450))]
    why = r"has weights from .* that 4 silos within its clip cannot give"
    with pytest.raises(RefusedError, match=why):
        opened(spec, values, FOUR)
