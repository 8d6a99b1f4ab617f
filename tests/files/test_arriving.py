"""A file that arrives in pieces: whole or not at all, whatever breaks on the way."""

import hashlib
from contextlib import closing

import pytest
from support.refusals import refused

from staddle.errors import UnwritableError
from staddle.files.arriving import ArrivingFile

DATA = bytes(range(256)) * 1000
PART = 100_000  # bytes of a piece; all but the last have 16 KiB
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def arrive(tmp_path):
    """One attempt: the pieces, then ``finish``; what that says."""

    def call(*pieces, whole=True, digest=DIGEST):
        arriving = ArrivingFile(
            tmp_path / "in" / "w", tmp_path / "spool" / "w.part", digest, len(DATA)
        )
        arriving.open()
        with closing(arriving):
            call.begun = arriving.received, arriving.resumed
            for piece in pieces:
                arriving.write(piece)
            return arriving.finish() if whole else arriving.received

    call.path, call.partial = tmp_path / "in" / "w", tmp_path / "spool" / "w.part"
    return call


def test_a_whole_file_gets_its_name(arrive):
    assert arrive(DATA[:PART], DATA[PART:]) == ""
    assert arrive.begun == (0, False)
    assert arrive.path.read_bytes() == DATA
    assert not arrive.partial.exists()


def test_the_next_attempt_resumes_behind_what_arrived(arrive):
    assert arrive(DATA[:PART], whole=False) == PART
    assert not arrive.path.exists()
    assert arrive(DATA[PART:]) == ""
    assert arrive.begun == (PART, True)
    assert arrive.path.read_bytes() == DATA


def test_all_of_it_may_be_there_already(arrive):
    arrive(DATA, whole=False)
    assert arrive() == ""
    assert arrive.path.read_bytes() == DATA


def test_a_file_that_is_not_whole_is_told_and_kept(arrive):
    with refused("ended after 100000 of 256000 bytes; send the rest"):
        arrive(DATA[:PART])
    assert arrive.partial.read_bytes() == DATA[:PART]


@pytest.mark.parametrize("piece", [b"", DATA[: 2**14 - 1], DATA + b"x"])
def test_no_piece_is_small_or_beyond_the_end(arrive, piece):
    with refused(f"a piece of {len(piece)} bytes after 0 of 256000; the sender has another file"):
        arrive(piece)
    assert arrive.partial.stat().st_size == 0
    assert not arrive.path.exists()


def test_another_file_is_dropped_and_the_next_attempt_starts_over(arrive):
    said = arrive(DATA[:-1] + b"x")
    assert said.startswith("the file has SHA-256 ")
    assert said.endswith(f", not {DIGEST}; take the right file")
    assert not arrive.path.exists()
    assert arrive(DATA) == ""
    assert arrive.begun == (0, False)


def test_a_partial_file_that_is_longer_than_the_file_counts_for_nothing(arrive):
    arrive.partial.parent.mkdir()
    arrive.partial.write_bytes(DATA + b"x")
    assert arrive(DATA) == ""


def test_in_one_attempt_a_wrong_file_can_be_sent_again(tmp_path):
    arriving = ArrivingFile(tmp_path / "w", tmp_path / "w.part", DIGEST, len(DATA))
    (tmp_path / "w.part").write_bytes(b"\0" * PART)  # as a crash may leave it
    arriving.open()
    with closing(arriving):
        arriving.write(DATA[PART:])
        assert arriving.finish()
        assert (arriving.received, arriving.resumed) == (0, True)
        arriving.write(DATA)
        assert arriving.finish() == ""
    assert (tmp_path / "w").read_bytes() == DATA


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    arriving = ArrivingFile(tmp_path / "w", tmp_path / "file" / "w.part", DIGEST, 1)
    with pytest.raises(UnwritableError, match=r"w\.part: cannot write it: (Not a dir|File exists)"):
        arriving.open()


def test_what_is_discarded_is_gone(arrive, tmp_path):
    arrive(DATA[:PART], whole=False)
    ArrivingFile(arrive.path, arrive.partial, DIGEST, len(DATA)).discard()
    assert not arrive.partial.exists()


def test_the_last_piece_may_be_small(arrive):
    assert arrive(DATA[:-1], DATA[-1:]) == ""
    with refused("a piece of 1 bytes after 256000 of 256000"):
        arrive(DATA, b"x")
