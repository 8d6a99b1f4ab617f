import hashlib
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staddle.errors import LocalError
from staddle.security.arithmetic.masks import Keystream
from staddle.security.blind import rotated_sketch
from staddle.security.blind.rotation import rotate
from staddle.security.identity.domains import GRAM_SKETCH, framed
from staddle.security.identity.pairwise_keys import derive

KEY = bytes(range(32))


def slow(vector, size, key):
    source, total = Keystream(derive(key, b"", framed(GRAM_SKETCH)), 0), [0.0] * size
    for value in vector.tolist():
        made = bytearray(8)
        source.fill(memoryview(made))
        word = int.from_bytes(made, "little")
        total[(word >> 1) % size] += -value if word & 1 else value
    return total


@settings(max_examples=40)
@given(st.integers(1, 90), st.integers(1, 20), st.binary(min_size=32, max_size=32))
def test_agrees_with_the_slow_oracle(d, size, key):
    vectors = np.random.default_rng(d).normal(size=(2, d))
    expected = rotate(np.array([slow(vector, size, key) for vector in vectors]), key)
    assert (rotated_sketch.sketched(vectors, size, key) == expected).all()


def test_vectors_of_several_pieces():
    d = rotated_sketch.STEP + 333
    vectors = np.random.default_rng(0).normal(size=(1, d)).astype(np.float32)
    expected = rotate(np.array([slow(vectors[0], 8, KEY)]), KEY)
    assert np.abs(rotated_sketch.sketched(vectors, 8, KEY) - expected).max() < 1e-9


def test_the_error_is_what_the_docstring_says():
    """Over 900 keys the mean is exact, and the variance at most the bound and not far below it."""
    size, tries, random = 16, 900, np.random.default_rng(0)
    vectors = np.linalg.qr(random.normal(size=(400, 2)))[0].T
    made = [
        rotated_sketch.sketched(vectors, size, hashlib.sha256(struct.pack("<Q", i)).digest())
        for i in range(tries)
    ]
    for cosine in (0.0, 0.5, 1.0):
        found = [x @ (cosine * x + math.sqrt(1 - cosine**2) * y) for x, y in made]
        bound = (1 + cosine**2) / size
        assert abs(np.mean(found) - cosine) < 4 * math.sqrt(bound / tries)
        assert 0.8 * bound < np.var(found) < 1.2 * bound


def test_what_is_sent_shows_no_magnitudes():
    """The largest coordinates stand out of a sketch, and not of a rotated one."""
    vector = np.random.default_rng(1).normal(size=(1, 2000)) * 0.01
    vector[0, 7] = 5.0
    alone, sent = np.array(slow(vector[0], 64, KEY)), rotated_sketch.sketched(vector, 64, KEY)[0]
    assert np.abs(alone).max() > 0.98 * np.linalg.norm(alone)
    assert np.abs(sent).max() < 0.6 * np.linalg.norm(sent)


def test_wrong_calls_are_told():
    for vectors, size in (
        (np.zeros((1, 3)), 0), (np.zeros((1, 3)), rotated_sketch.LARGEST + 1), (np.zeros(3), 2),
        (np.zeros((1, 3), np.int64), 2),
    ):  # fmt: skip
        with pytest.raises(LocalError, match=r"a sketch of|give float32 or float64 \[n, d\]"):
            rotated_sketch.sketched(vectors, size, KEY)
