"""The words of a sum that silos get: as a file holds them, and as they go down."""

import hashlib

import numpy as np
import pytest

from staddle.coordinator import kept_words
from staddle.coordinator.kept_words import kept_sum
from staddle.errors import LocalError, RefusedError
from staddle.security.open_sum import Claim

CLAIM = Claim(b'{"attempt":0,"name":"\\u00e9"}', bytes(range(64)), ("a", "b", "c"), bytes(8))
PIECES = [np.arange(3, dtype="<u4"), np.arange(5, dtype="<u4")]
WORDS = b"".join(piece.tobytes() for piece in PIECES)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "0.model.words"
    path.write_bytes(b"".join(kept_words.kept_words(CLAIM, PIECES)))
    return path


def test_what_was_kept_is_read_again(file, monkeypatch):
    monkeypatch.setattr(kept_words, "CHUNK_BYTES", 12)  # more than one piece, the last one shorter
    found = kept_sum("model", file, len(WORDS))
    assert (found.part, found.claim, found.nbytes) == ("model", CLAIM, len(WORDS))
    assert found.sha256 == hashlib.sha256(WORDS).digest()
    pieces = [bytes(piece) for piece in found.words("a")]
    assert [len(piece) for piece in pieces] == [12, 12, 8]
    assert b"".join(pieces) == WORDS


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b" ", lambda data: data[4:]])
def test_a_file_that_something_else_wrote_is_none(file, change):
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(LocalError, match=r"0\.model\.words"):
        kept_sum("model", file, len(WORDS))


def test_whose_round_is_over_gets_no_words(file):
    found = kept_sum("model", file, len(WORDS))
    file.unlink()
    with pytest.raises(RefusedError, match="the round of this delivery is over") as caught:
        next(found.words("a"))
    assert (caught.value.peer, caught.value.code) == ("a", "ROUND_CLOSED")
