"""Who waits to be admitted, and what ends the wait."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from staddle.commands.members import join, membership_client
from staddle.errors import LocalError, PeerError, RefusedError
from staddle.security.identity.invitation import Invitation

KEYS = SimpleNamespace(entry=None)
BUSY = RefusedError("coordinator", "LIMIT", "too many calls")
AWAY = PeerError("coordinator", "no answer")


@pytest.fixture
def answers(monkeypatch):
    """What the command learns of these answers of a coordinator."""

    def of(*given):
        left = iter(given)

        def enrol(*_):
            found = next(left)
            if isinstance(found, PeerError):
                raise found
            return found

        monkeypatch.setattr(join, "ASK_SECONDS", 0)
        monkeypatch.setattr(membership_client, "guest", lambda *_: nullcontext())
        monkeypatch.setattr(membership_client, "enrol", enrol)
        return join._answers(None, KEYS, "")

    return of


def test_strangers_at_the_coordinators_limit_do_not_end_a_wait(answers, capsys):
    found = answers(None, BUSY, AWAY, "roster")
    assert [next(found), next(found)] == [None, "roster"]
    said = capsys.readouterr()
    assert "too many calls" in said.err
    assert said.out.count("Waits until the founder admits you") == 1


def test_a_file_that_is_no_invitation_is_said_to_be_none(tmp_path):
    file = tmp_path / "data.csv"
    with pytest.raises(LocalError, match=r"data\.csv: not an invitation; give the file that the"):
        Invitation.parse(b"age,sex\n", file)


@pytest.mark.parametrize("code", ["IDENTITY", "MANIFEST"])
def test_an_entry_that_is_refused_ends_it(answers, code):
    found = answers(None, RefusedError("coordinator", code, "used already"))
    next(found)
    with pytest.raises(RefusedError, match="used already"):
        next(found)
