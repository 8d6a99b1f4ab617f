import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.secure_sums import group

from staddle.silo.ingress.word_reader import WordReader

GROUPS = (
    group("a", 3, ring=32),
    group("b", 5, ring=64),
    group("c", 1, ring=64),
    group("d", 700, ring=32),
)
VECTORS = [np.arange(each.body, dtype=f"<u{each.ring // 8}") * 3 + 1 for each in GROUPS]
BYTES = b"".join(vector.tobytes() for vector in VECTORS)


@given(st.lists(st.integers(0, len(BYTES))))
def test_vectors_are_whole_however_their_bytes_are_cut(cuts):
    came = []
    words = WordReader(lambda name, found: came.append((name, found)))
    words.begin(zip("abcd", GROUPS, strict=True))
    places = [0, *sorted(cuts), len(BYTES)]
    for start, stop in itertools.pairwise(places):
        words.write(memoryview(BYTES)[start:stop])
        ended = [len(vector) for _, vector in came]
        # each as soon as its last byte is there
        assert ended == [len(vector) for vector in VECTORS[: len(came)]]
        assert len(came) == sum(stop >= end for end in np.cumsum([v.nbytes for v in VECTORS]))
    assert [name for name, _ in came] == list("abcd")
    for (_, found), vector in zip(came, VECTORS, strict=True):
        assert found.dtype == vector.dtype
        assert (found == vector).all()


def test_what_its_taker_refuses_ends_it():
    def refuse(name, _):
        raise ValueError(name)

    words = WordReader(refuse)
    words.begin(zip("abcd", GROUPS, strict=True))
    words.write(memoryview(BYTES)[: VECTORS[0].nbytes - 1])
    with pytest.raises(ValueError, match="a"):
        words.write(memoryview(BYTES)[VECTORS[0].nbytes - 1 :])
