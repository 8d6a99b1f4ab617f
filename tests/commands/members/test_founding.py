"""What a founder is asked before a member is removed, and who is invited at once."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from staddle.commands.federation import local_federation
from staddle.commands.main import app
from staddle.commands.members import founding
from staddle.errors import LocalError
from staddle.security.identity import invitation as invitations
from staddle.security.identity import roster as rosters

SILOS = ("north", "south")


@pytest.fixture
def remove(monkeypatch, tmp_path):
    """The command, where a coordinator says that a job runs; the rosters that were published."""
    federation = local_federation.make(tmp_path / "federation", SILOS)
    roster = rosters.load(federation.folder / "roster.json")
    found = SimpleNamespace(roster=roster, begun={"lung\x1b[2J": {SILOS[0]}, "heart": {SILOS[1]}})

    @contextmanager
    def connected(_):
        yield SimpleNamespace(waiting=lambda: found)

    published = []
    monkeypatch.setattr(founding.membership_client, "read", str)
    monkeypatch.setattr(founding.membership_client, "connected", connected)
    monkeypatch.setattr(founding, "_publish", lambda roster, *_: published.append(roster))

    def call(*arguments, typed=""):
        told = CliRunner().invoke(
            app, ["federation", "remove", *arguments, "--founder", "f"], input=typed
        )
        return told.exit_code, told.output, published

    return call


@pytest.fixture
def found(monkeypatch, tmp_path):
    """The command that founds a federation, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    named = ("--name", "lung", "--address", "a.example:1", "--organisation", "Ministry")
    return lambda *more: CliRunner().invoke(app, ["federation", "new", "lung", *named, *more])


def test_who_is_named_when_a_federation_is_founded_is_invited(found, tmp_path):
    told = found("--invite", "north", "--invite", "south")
    assert told.exit_code == 0, told.output
    for member in SILOS:
        path = tmp_path / f"{member}.invitation"
        invitation = invitations.Invitation.parse(path.read_bytes(), path)
        assert (invitation.ticket.member, invitation.roster.federation) == (member, "lung")
        assert f"staddle join {member}.invitation" in told.output
    assert "staddle invite" not in told.output
    assert "staddle coordinator run" in told.output
    # It has just made the newest roster, and the coordinator cannot run yet.
    assert "roster.json" not in told.output


def test_nothing_is_founded_where_an_invitation_could_not_be_written(found, tmp_path):
    (tmp_path / "south.invitation").write_text("of another federation")
    for ids in (("north", "south"), ("north", "north"), ("North",)):
        given = [part for member in ids for part in ("--invite", member)]
        assert isinstance(found(*given).exception, LocalError)
    assert [path.name for path in tmp_path.iterdir()] == ["south.invitation"]
    assert "staddle invite hospital-a hospital-b" in found().output


def test_a_silo_of_a_running_job_is_removed_only_on_purpose(remove):
    code, said, published = remove(SILOS[0], typed="n\n")
    assert (code, published) == (1, [])
    assert "end without it: lung" in said
    assert "\x1b" not in said
    assert "heart" not in said
    assert remove(SILOS[0], typed="y\n")[0] == 0
    code, said, published = remove(SILOS[1], "--now")
    assert (code, "ends" in said) == (0, False)
    assert [SILOS[0] in published[0], SILOS[1] in published[1]] == [False, False]


def test_nobody_asks_about_a_member_that_no_job_needs(remove):
    code, said, published = remove("operator")
    assert (code, said, len(published)) == (0, "", 1)
