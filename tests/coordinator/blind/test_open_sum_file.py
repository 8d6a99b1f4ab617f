"""The words of a sum that silos get: as a file holds them, and as they go down."""

import hashlib

import numpy as np
import pytest
from support.refusals import refused

from staddle.coordinator.blind import unmask
from staddle.coordinator.blind.unmask import kept_sum
from staddle.errors import LocalError, RefusedError
from staddle.security.blind.open_sum import Claim

CLAIM = Claim(b'{"attempt":0,"name":"\\u00e9"}', bytes(range(64)), ("a", "b", "c"), bytes(8))
PIECES = [np.arange(3, dtype="<u4"), np.arange(5, dtype="<u4")]
WORDS = b"".join(piece.tobytes() for piece in PIECES)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "0.model.words"
    path.write_bytes(b"".join(unmask.open_sum_file(CLAIM, PIECES)))
    return path


def test_what_was_kept_is_read_again(file, monkeypatch):
    monkeypatch.setattr(unmask, "CHUNK_BYTES", 12)  # more than one piece, the last one shorter
    found = kept_sum("model", file, len(WORDS))
    assert (found.part, found.claim, found.nbytes) == ("model", CLAIM, len(WORDS))
    assert found.sha256 == hashlib.sha256(WORDS).digest()
    pieces = [bytes(piece) for piece in found.words("a")]
    assert [len(piece) for piece in pieces] == [12, 12, 8]
    assert b"".join(pieces) == WORDS


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: data + b" ", lambda data: data[4:]]
)
def test_a_file_that_something_else_wrote_is_none(file, change):
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(LocalError, match=r"0\.model\.words"):
        kept_sum("model", file, len(WORDS))


@pytest.mark.parametrize("at", range(len(WORDS)))
def test_words_that_the_disk_changed_do_not_go_down(file, at):
    kept_sum("model", file, len(WORDS)).check()
    file.write_bytes(flipped(file.read_bytes(), at))
    with refused(r"0\.model\.words: its words are not those of the open sum: the disk changed"):
        kept_sum("model", file, len(WORDS)).check()


def test_one_bit_of_what_stands_beside_the_words_is_found(file):
    data = file.read_bytes()
    for at in range(len(WORDS), len(data)):
        file.write_bytes(flipped(data, at))
        with pytest.raises(LocalError, match=r"0\.model\.words: "):
            kept_sum("model", file, len(WORDS))


def test_words_that_are_cut_or_gone_are_named(file):
    found = kept_sum("model", file, len(WORDS))
    for data in (file.read_bytes()[: len(WORDS) - 1], b""):
        file.write_bytes(data)
        with pytest.raises(LocalError, match=r"0\.model\.words: "):
            kept_sum("model", file, len(WORDS))
        with pytest.raises(LocalError, match=r"0\.model\.words: "):
            found.check()
    file.unlink()
    with pytest.raises(LocalError, match=r"0\.model\.words: cannot read it"):
        found.check()


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


def test_whose_round_is_over_gets_no_words(file):
    found = kept_sum("model", file, len(WORDS))
    file.unlink()
    with pytest.raises(RefusedError, match="the round of this delivery is over") as caught:
        next(found.words("a"))
    assert (caught.value.peer, caught.value.code) == ("a", "ROUND_CLOSED")
