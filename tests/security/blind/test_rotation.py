import hashlib
import math
import os
import struct
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staddle.algorithms.exchange.parts import Kind
from staddle.errors import LocalError, RefusedError
from staddle.security.arithmetic.masks import Keystream
from staddle.security.blind import rotation as r
from staddle.security.identity.pairwise_keys import derive

KEY = bytes(range(32))
VECTOR = [
    "0x1.51de2ac1114dap+0", "0x1.e8819ef510f70p-4", "-0x1.49fc3febd3a2bp+1",
    "-0x1.aada07f206967p-1", "-0x1.e6762c5e701c6p-1",
]  # fmt: skip
LARGE = [
    "-0x1.f646138af9170p-4",
    "0x1.8837c9d625e6ap-1",
    "05a872a918cbc0e90e2541a857f34e844d841d1054954e7e24b90131c734ed3c",
]


def keys(n):
    return [hashlib.sha256(struct.pack("<Q", n + i)).digest() for i in range(n)]


def slow_gaussians(key, stream, count):
    """In Python's own floats, a number at a time."""
    source, made = Keystream(key, stream), []
    while len(made) < count:
        point = []
        for _ in range(2):
            word = bytearray(8)
            source.fill(memoryview(word))
            point.append((int.from_bytes(word, "little") >> 11) / 2**52 - 1)
        s = point[0] * point[0] + point[1] * point[1]
        if 0 < s < 1:
            m, e = math.frexp(s)
            if m < 0.7071067811865476:
                m, e = 2 * m, e - 1
            z, series = (m - 1) / (m + 1), 0.0
            for k in range(12, -1, -1):
                series = series * (z * z) + 1 / (2 * k + 1)
            factor = math.sqrt(-2 * (e * 0.6931471805599453 + 2 * z * series) / s)
            made += [point[0] * factor, point[1] * factor]
    return made[:count]


def slow_sum(values):
    values = list(values)
    while len(values) > 1:
        half = (len(values) + 1) // 2
        values = [
            v + values[half + i] if half + i < len(values) else v
            for i, v in enumerate(values[:half])
        ]
    return values[0]


def slow_rotate(vector, key):
    v = list(vector)
    v[-1] *= 1.0 if slow_gaussians(key, 1, 1)[0] < 0 else -1.0
    for m in range(2, len(v) + 1):
        g, at = slow_gaussians(key, m, m), len(v) - m
        s = -1.0 if g[0] < 0 else 1.0
        w = [g[0] + s * math.sqrt(slow_sum(x * x for x in g)), *g[1:]]
        t = slow_sum(a * b for a, b in zip(w, v[at:], strict=True)) * (
            2 / slow_sum(x * x for x in w)
        )
        v[at:] = [(x - a * t) * -s for a, x in zip(w, v[at:], strict=True)]
    return v


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 40), st.binary(min_size=32, max_size=32))
def test_the_same_bits_as_in_pythons_floats_one_after_another(n, d, key):
    """Another order of operations, or a library's own sum, would differ in last bits."""
    vectors = np.random.default_rng(n * 41 + d).normal(size=(n, d))
    before = vectors.copy()
    found = r.rotate(vectors, key)
    assert (vectors == before).all()
    for row, vector in zip(found.tolist(), vectors.tolist(), strict=True):
        assert row == slow_rotate(vector, key)


def test_vectors():
    """Any machine, and any later version, must give these."""
    found = r.rotate(np.arange(-2.0, 3.0)[None], KEY)
    assert [value.hex() for value in found[0].tolist()] == VECTOR
    large = r.rotate(((np.arange(700) * 37) % 101 - 50.0)[None] / 64, KEY)
    assert [value.hex() for value in large[0, :2].tolist()] == LARGE[:2]
    assert hashlib.sha256(large.astype("<f8").tobytes()).hexdigest() == LARGE[2]


def test_vectors_on_a_processor_without_vector_instructions():
    """NumPy picks its loops by what the processor has; this run may take only the slowest."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__  # noqa: PLC0415

    had = [name for name in __cpu_dispatch__ if __cpu_features__[name]]
    code = (
        "import numpy as np, hashlib; from staddle.security.blind import rotation as r;"
        "from numpy._core._multiarray_umath import __cpu_features__ as f;"
        f"assert not any(f[name] for name in {had});"
        f"large = r.rotate(((np.arange(700) * 37) % 101 - 50.0)[None] / 64, bytes(range(32)));"
        "print(hashlib.sha256(large.astype('<f8').tobytes()).hexdigest(), flush=True);"
        "import os; os._exit(0)"  # torch takes its time to end
    )
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(had)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == (LARGE[2], "")


def test_q_is_the_product_that_the_docstring_says():
    d = 6
    q = np.array([[-1.0 if r.gaussians(KEY, 1, 1)[0] >= 0 else 1.0]])
    for m in range(2, d + 1):
        g = r.gaussians(KEY, m, m)
        u, s = g / np.linalg.norm(g), np.sign(g[0])
        w = u + s * np.eye(m)[0]
        inner = np.eye(m)
        inner[1:, 1:] = q
        turn = -s * (np.eye(m) - 2 * np.outer(w, w) / (w @ w))
        assert np.abs(turn[:, 0] - u).max() < 1e-14
        q = turn @ inner
    assert np.abs(r.rotate(np.eye(d), KEY).T - q).max() < 1e-13


@settings(max_examples=40)
@given(st.integers(2, 300), st.integers(-30, 30), st.integers(0, 2**32))
def test_inner_products_are_kept(d, exponent, seed):
    random = np.random.default_rng(seed)
    vectors = random.normal(size=(5, d)) * 2.0**exponent * random.choice([1.0, 1e-3, 1e3], (5, 1))
    turned = r.rotate(vectors, KEY)
    exact, found = vectors @ vectors.T, turned @ turned.T
    norms = np.linalg.norm(vectors, axis=1)
    assert (np.abs(found - exact) <= 1e-13 * np.outer(norms, norms)).all()
    assert np.abs(turned - vectors).max() > 1e-3 * norms.min()


def test_long_vectors_keep_their_cosine():
    vectors = np.random.default_rng(0).normal(size=(3, 1281))
    turned = r.rotate(vectors, KEY)
    exact, found = vectors @ vectors.T, turned @ turned.T
    assert np.abs(found / exact - 1).max() < 1e-9
    for i in range(3):
        assert (r.rotate(vectors[i : i + 1], KEY)[0] == turned[i]).all()
    assert abs(np.corrcoef(turned[0], vectors[0])[0, 1]) < 0.1


def largest_gap(samples, cdf):
    """Kolmogorov-Smirnov, times √n: above 1.95 once in 1000 times."""
    ordered = np.sort(samples)
    exact, n = np.array([cdf(x) for x in ordered]), len(ordered)
    return max(
        np.abs(exact - np.arange(n) / n).max(), np.abs(exact - np.arange(1, n + 1) / n).max()
    ) * math.sqrt(n)


def test_q_is_haar():
    """Each entry of a Haar 3 × 3 is uniform in [-1, 1] (Archimedes), and det is ±1 alike."""
    found = np.array([r.rotate(np.eye(3), key) for key in keys(3000)])
    for i in range(3):
        for j in range(3):
            assert largest_gap(found[:, i, j], lambda x: (x + 1) / 2) < 1.95
    assert abs(np.linalg.det(found).sum()) < 4 * math.sqrt(3000)
    # a minor is ± the opposite entry
    once = found[:, 0, 0] * found[:, 1, 1] - found[:, 0, 1] * found[:, 1, 0]
    assert largest_gap(once, lambda x: (x + 1) / 2) < 1.95
    two = np.array([r.rotate(np.eye(2), key)[0] for key in keys(3000)])
    seen = largest_gap(np.arctan2(two[:, 1], two[:, 0]), lambda a: (a + math.pi) / (2 * math.pi))
    assert seen < 1.95


def test_gaussians_are_gaussian():
    found = r.gaussians(KEY, 5, 200_001)
    assert found.shape == (200_001,)
    assert largest_gap(found[:20_000], lambda x: (1 + math.erf(x / math.sqrt(2))) / 2) < 1.95
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        spread = math.sqrt({1: 1, 2: 2, 3: 15, 4: 96, 6: 10170}[power] / len(found))
        assert abs((found**power).mean() - moment) < 4 * spread
    assert (r.gaussians(KEY, 5, 7) == found[:7]).all()
    assert (r.gaussians(KEY, 6, 7) != found[:7]).any()


def test_the_logarithm_is_one():
    values = np.concatenate([
        np.random.default_rng(0).random(10_000), [2.0**-103, 1 - 2.0**-53, 0.5, 0.7071067811865476],
    ])  # fmt: skip
    exact = np.array([math.log(v) for v in values])
    assert (np.abs(r._logarithm(values) - exact) <= 4e-16 * np.maximum(1, np.abs(exact))).all()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=70))
def test_folding_adds_each_number_once(numbers):
    assert abs(r.folded(np.array(numbers)) - math.fsum(numbers)) <= 1e-9
    assert r.folded(np.arange(float(len(numbers)))) == len(numbers) * (len(numbers) - 1) / 2


def test_each_use_has_a_key_of_its_own():
    base, other = (2, "j", 3, 0, "rows", 1), (1, "k", 4, 1, "cols", 2)
    uses = {base, (2, "jr", 3, 0, "ows", 1)}
    uses |= {(*base[:at], other[at], *base[at + 1 :]) for at in range(6)}
    made = {r.Use(*use).key(group_key) for use in uses for group_key in (KEY, bytes(32))}
    assert len(made) == 2 * len(uses)
    assert all(len(key) == 32 for key in made)
    assert derive(KEY, b"", b"x") not in made


def test_vectors_of_one_sign_are_refused():
    good = np.array([[0.5, -0.1, 0.0], [0.0, 0.0, 0.0]])
    r.check_vectors("rows", good)
    for bad in ([0.5, 0.1, 0.0], [-0.5, -0.1, 0.0], [0.0, 0.0, 1e-300]):
        with pytest.raises(LocalError, match="'rows': vector 2 has entries of one sign"):
            r.check_vectors("rows", np.array([*good.tolist(), bad]))
    for bad in (np.nan, np.inf):
        with pytest.raises(LocalError, match="NaN or infinity"):
            r.check_vectors("rows", np.array([[1.0, -1.0, bad]]))


@pytest.mark.parametrize("kind", list(Kind))
def test_kinds_that_a_gram_discloses_are_refused(kind):
    if kind in (Kind.COUNTS, Kind.MEMBERSHIP, Kind.METRIC, Kind.STATISTICS):
        with pytest.raises(LocalError, match=f"is of kind {kind.name.lower()}"):
            r.check_kind("p", kind)
    else:
        r.check_kind("p", kind)


def test_a_rotation_is_used_for_one_attempt():
    one, other = r.digest_of(np.ones((2, 3))), r.digest_of(np.ones((3, 2)))
    assert one != other
    memory = r.RotationMemory().used(3, 1, one)
    assert r.RotationMemory.model_validate_json(memory.model_dump_json()) == memory
    for round_number, attempt in ((3, 0), (2, 5)):
        for vectors in (one, other):
            with pytest.raises(RefusedError) as caught:
                memory.used(round_number, attempt, vectors)
            assert (caught.value.peer, caught.value.code) == ("coordinator", "ATTEMPT")
    found = memory.used(3, 2, other).used(4, 0, one)
    assert found == r.RotationMemory(round=4, attempt=0, vectors=one)


def test_the_same_vectors_are_rotated_again_for_their_attempt_and_no_others():
    one, other = r.digest_of(np.ones((2, 3))), r.digest_of(np.full((2, 3), 1.5))
    memory = r.RotationMemory().used(3, 1, one)
    assert memory.used(3, 1, one) == memory
    with pytest.raises(LocalError, match="round 3, attempt 1: other vectors were rotated before"):
        memory.used(3, 1, other)


def test_what_an_upload_of_rotated_vectors_is_bound_to():
    use = r.Use(0, "bb" * 32, 3, 0, "rows", 0)
    changed = [
        replace(use, **{name: value})
        for name, value in asdict(replace(use, epoch=1, round=4, attempt=1)).items()
    ]
    changed += [replace(use, job="cc" * 32), replace(use, group="other"), replace(use, row=1), use]
    contexts = {each.context("lung", "aa" * 32) for each in changed}
    contexts |= {use.context("heart", "aa" * 32), use.context("lung", "ab" * 32)}
    assert len(contexts) == 9
    assert {len(context) for context in contexts} == {32}


def test_wrong_calls_are_told():
    for vectors, key in (
        (np.zeros(3), KEY), (np.zeros((2, 3), np.float32), KEY), (np.zeros((2, 0)), KEY),
        (np.zeros((2, 3)), KEY[:31]),
    ):  # fmt: skip
        with pytest.raises(LocalError):
            r.rotate(vectors, key)


@pytest.mark.parametrize("d", [1, 2, 84, 700])
def test_vectors_under_keys_of_their_own_have_the_bits_of_one_after_the_other(d):
    vectors = np.random.default_rng(d).normal(size=(3, d))
    keys = [bytes([d % 256, i]) * 16 for i in range(3)]
    one_by_one = [r.rotate(vectors[i : i + 1], keys[i]) for i in range(3)]
    assert (r.rotate_each(vectors, keys) == np.concatenate(one_by_one)).all()
    # Q of one is a sign
    assert d == 1 or not (r.rotate_each(vectors, keys[::-1])[0] == one_by_one[0][0]).any()


def test_numbers_made_ahead_are_those_of_each_stream():
    """Also where a stream needs more words than are made first, as one in a hundred does."""
    made = list(r._reflecting([KEY, bytes(32)], 700))
    assert [len(numbers) for numbers in made] == list(range(1, 701))
    short = 0
    for m, numbers in enumerate(made, start=1):
        assert (numbers[:, 0] == r.gaussians(KEY, m, m)).all()
        assert (numbers[:, 1] == r.gaussians(bytes(32), m, m)).all()
        words = np.empty((r._pairs(m), 2), "<u8")
        r.Keystream(KEY, m).fill(words.data.cast("B"))
        short += len(r._polar(words)[0]) < m
    assert short


def test_each_vector_needs_a_key():
    with pytest.raises(LocalError, match="2 keys for 3 vectors; give one for each"):
        r.rotate_each(np.ones((3, 4)), [KEY, KEY])
