import pytest

from staddle.errors import LocalError, PeerError
from staddle.files.watched_file import SETTLE_SECONDS, WatchedFile


def parse(data):
    if b"!" in data:
        raise LocalError(f"{data.decode()} has a typo")
    if b"?" in data:
        raise PeerError("founder", "its signature does not fit")
    return data.decode()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("one")
    return path


@pytest.fixture
def watched(path):
    return WatchedFile(path, b"one", "one", parse)


def settled(watched, now):
    """What two looks say that lie far enough apart."""
    return [watched.look(now), watched.look(now + SETTLE_SECONDS)]


def test_a_file_that_stays_as_it_is_has_not_changed(watched, path):
    path.touch()
    assert settled(watched, 5) == ["", ""]
    assert (watched.changed, watched.take()) == (False, "one")


def test_new_content_is_taken_once_it_stood_still_and_stays_pending_until_then(watched, path):
    assert not watched.settling
    path.write_text("two")
    assert watched.look(5) == ""
    assert (watched.changed, watched.settling) == (False, True)
    watched.look(5.9)
    assert (watched.changed, watched.settling) == (False, True)
    for now in (6, 7):
        watched.look(now)
        assert (watched.changed, watched.settling) == (True, False)
    assert watched.take() == "two"
    assert (watched.changed, watched.take()) == (False, "two")
    settled(watched, 9)
    assert not watched.changed


def test_half_of_a_file_that_is_being_written_is_never_taken(watched, path):
    """Valid as the half is, it may lack what forbids."""
    for now, text in enumerate(("t", "tw", "two")):
        path.write_text(text)
        watched.look(5 + now / 2)
        assert not watched.changed
    watched.look(7)
    assert watched.take() == "two"


def test_invalid_content_changes_nothing_and_is_told_once_for_each_content(watched, path):
    path.write_text("two!")
    assert settled(watched, 5) == ["", "two! has a typo"]
    assert settled(watched, 7) == ["", ""]
    path.write_text("three!")
    assert settled(watched, 9) == ["", "three! has a typo"]
    path.unlink()
    first, second = settled(watched, 11)
    assert (first, "policy.toml: cannot read it" in second) == ("", True)
    assert (watched.changed, watched.take()) == (False, "one")


def test_content_that_another_member_is_blamed_for_is_invalid_too(watched, path):
    path.write_text("two?")
    assert settled(watched, 5) == ["", "founder: its signature does not fit"]
    assert (watched.changed, watched.take()) == (False, "one")


def test_a_file_that_was_mended_as_it_was_is_not_read_again(watched, path):
    path.write_text("!")
    assert settled(watched, 5) == ["", "! has a typo"]
    path.write_text("one")
    assert settled(watched, 7) == ["", ""]
    assert not watched.changed
    path.write_text("two")
    settled(watched, 9)
    assert watched.take() == "two"


def test_a_change_that_was_not_taken_yet_gives_way_to_a_later_one(watched, path):
    path.write_text("two")
    settled(watched, 5)
    path.write_text("three")
    settled(watched, 7)
    assert watched.take() == "three"
    assert not watched.changed
