"""What invited strangers, and members whose certificates are old, hand in."""

import datetime as dt
import threading
from types import SimpleNamespace

import pytest

from staddle import log
from staddle.coordinator import enrolment
from staddle.coordinator.enrolment import Enrolments, Renewals
from staddle.errors import PeerError
from staddle.security.identity import certificate
from staddle.security.identity import invitation as invitations
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys, renew_keys
from staddle.security.identity.renewal import Renewal

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
NOW, LATER = 1_000, 2_000


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    roles = {"f": Role.FOUNDER, "c": Role.COORDINATOR, "s": Role.SILO}
    entries = {name: create_keys(folder / name, name, role, "o") for name, role in roles.items()}
    other = create_keys(folder / "other", "s", Role.SILO, "somebody else")
    roster = rosters.add(rosters.new("lung", [entries["f"]], 1), entries["c"])
    founder = load_keys(folder / "f")
    give = lambda token, expires=LATER: invitations.ticket(
        founder, "lung", "s", "silo", bytes([token]) * 32, expires
    )
    return SimpleNamespace(roster=roster, entry=entries["s"], other=other, ticket=give)


def names(enrolments):
    return [(each.entry.organisation, each.ticket.founder) for each in enrolments.waiting()]


def test_an_entry_waits_until_the_roster_has_it_also_over_a_restart(made, tmp_path):
    enrolments = Enrolments(tmp_path, made.roster)
    assert list(enrolments.waiting()) == []
    assert enrolments.take(made.ticket(1), made.entry, NOW) == "new"
    for again in (enrolments, Enrolments(tmp_path, made.roster)):
        assert again.take(made.ticket(1), made.entry, NOW) == "waiting"
        assert names(again) == [("o", "f")]
    (path,) = (tmp_path / "enrolments").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    later = Enrolments(tmp_path, rosters.add(made.roster, made.entry))
    # whoever lost the answer asks again, maybe long after the ticket has expired
    assert later.take(made.ticket(1), made.entry, LATER) == "member"
    assert list(later.waiting()) == []


def test_a_ticket_is_good_for_one_entry(made, tmp_path):
    enrolments = Enrolments(tmp_path, made.roster)
    enrolments.take(made.ticket(1), made.entry, NOW)
    for again in (enrolments, Enrolments(tmp_path, rosters.add(made.roster, made.entry))):
        with pytest.raises(PeerError, match="was used already, with other keys"):
            again.take(made.ticket(1), made.other, NOW)
    # another invitation of the same member: both wait, and the founder compares fingerprints
    assert enrolments.take(made.ticket(2), made.other, NOW) == "new"
    assert sorted(names(enrolments)) == [("o", "f"), ("somebody else", "f")]


def test_two_at_once_with_one_ticket(made, tmp_path):
    enrolments, found = Enrolments(tmp_path, made.roster), []
    together = threading.Barrier(2)

    def hand_in(entry):
        together.wait()
        try:
            found.append(enrolments.take(made.ticket(1), entry, NOW))
        except PeerError:
            found.append("used")

    threads = [threading.Thread(target=hand_in, args=(e,)) for e in (made.entry, made.other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["new", "used"]
    assert len(list((tmp_path / "enrolments").iterdir())) == 1


def test_nothing_is_kept_of_who_has_no_good_ticket(made, tmp_path):
    enrolments = Enrolments(tmp_path, made.roster)
    forged = made.ticket(1).model_copy(update={"signature": "00" * 64})
    for ticket, entry, now in (
        (forged, made.entry, NOW),
        (made.ticket(1), made.entry, LATER),
        (made.ticket(1), made.roster.coordinator, NOW),
        (made.ticket(1, expires=NOW + 92 * 86_400), made.entry, NOW),
    ):
        with pytest.raises(PeerError):
            enrolments.take(ticket, entry, now)
    assert not (tmp_path / "enrolments").exists()


def test_who_has_a_members_public_entry_alone_is_not_told_the_roster(made, tmp_path):
    enrolments = Enrolments(tmp_path, rosters.add(made.roster, made.entry))
    forged = made.ticket(1).model_copy(update={"signature": "00" * 64})
    with pytest.raises(PeerError, match="is not signed by a founder"):
        enrolments.take(forged, made.entry, NOW)
    assert enrolments.take(made.ticket(1), made.entry, NOW) == "member"


def test_what_was_handed_in_with_an_expired_ticket_goes(made, tmp_path):
    enrolments = Enrolments(tmp_path, made.roster)
    enrolments.forget(NOW)
    enrolments.take(made.ticket(1), made.entry, NOW)
    enrolments.take(made.ticket(2, expires=LATER + 1), made.other, NOW)
    enrolments.forget(LATER - 1)
    assert len(names(enrolments)) == 2
    enrolments.forget(LATER)
    assert names(enrolments) == [("somebody else", "f")]


def test_an_entry_that_the_disk_changed_keeps_no_coordinator_from_starting(made, tmp_path):
    enrolments = Enrolments(tmp_path, made.roster)
    enrolments.take(made.ticket(1), made.entry, NOW)
    (path,) = (tmp_path / "enrolments").iterdir()
    path.write_bytes(path.read_bytes().replace(b"silo", b"sila"))
    enrolments.forget(NOW)
    assert enrolments.take(made.ticket(1), made.entry, NOW) == "new"


def test_an_entry_that_the_disk_changed_is_named_and_hides_no_other(made, tmp_path):
    enrolments, told = Enrolments(tmp_path, made.roster), []
    enrolments.take(made.ticket(1), made.entry, NOW)
    (path,) = (tmp_path / "enrolments").iterdir()
    path.write_bytes(path.read_bytes().replace(b"silo", b"sila"))
    enrolments.take(made.ticket(2), made.other, NOW)
    with log.followed(lambda event, fields: told.append((event, str(fields["why"])))):
        assert names(enrolments) == [("somebody else", "f")]
    ((event, why),) = told
    assert (event, str(path) in why) == ("waiting.damaged", True)


def test_a_stolen_key_of_a_founder_fills_no_disk_and_its_entries_go_with_it(
    made, tmp_path, monkeypatch
):
    enrolments = Enrolments(tmp_path, made.roster)
    for number in (1, 2):
        enrolments.take(made.ticket(number), made.entry, NOW)
    size = sum(path.stat().st_size for path in (tmp_path / "enrolments").iterdir())
    monkeypatch.setattr(enrolment, "MOST_BYTES", size + 1000)
    with pytest.raises(PeerError, match=f"entries of {size:,} bytes were handed in already"):
        enrolments.take(made.ticket(3), made.entry, NOW)
    assert enrolments.take(made.ticket(1), made.entry, NOW) == "waiting"

    # the founder has new keys, and those who wait are invited again
    keys = create_keys(tmp_path / "new keys", "f", Role.FOUNDER, "o")
    later = Enrolments(tmp_path, rosters.add(made.roster, keys, replace=True))
    later.forget(NOW)
    assert names(later) == []
    assert list((tmp_path / "enrolments").iterdir()) == []


@pytest.fixture
def member(made, tmp_path, monkeypatch):
    """A member's roster, and what makes it another certificate so many days later."""
    monkeypatch.setattr(certificate, "utc_now", lambda: START)
    entry = create_keys(tmp_path / "keys", "s", Role.SILO, "o")

    def renewed(days):
        monkeypatch.setattr(certificate, "utc_now", lambda: START + dt.timedelta(days=days))
        return renew_keys(tmp_path / "keys").entry

    return rosters.add(made.roster, entry), renewed


def test_one_renewal_waits_for_each_member_also_over_a_restart(member, tmp_path):
    roster, renewed = member
    first, second = renewed(1), renewed(2)
    now = START + dt.timedelta(days=3)
    renewals = Renewals(tmp_path, roster)
    assert list(renewals.waiting()) == []
    assert renewals.take("s", Renewal.of(first), now)
    for again in (renewals, Renewals(tmp_path, roster)):
        assert not again.take("s", Renewal.of(first), now)
        again.forget(now)
        assert list(again.waiting()) == [("s", Renewal.of(first))]
    assert renewals.take("s", Renewal.of(second), now)
    assert list(renewals.waiting()) == [("s", Renewal.of(second))]
    # One that the disk changed hides no other, and its member hands it in again.
    (tmp_path / "renewals" / "a.json").write_bytes(b"{}")
    assert list(renewals.waiting()) == [("s", Renewal.of(second))]
    (tmp_path / "renewals" / "a.json").unlink()
    (path,) = (tmp_path / "renewals").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    # what the roster has waits no more, and is no news
    later = Renewals(tmp_path, rosters.renew(roster, {"s": second}))
    later.forget(now)
    assert list(later.waiting()) == []
    assert not later.take("s", Renewal.of(second), now)
    with pytest.raises(PeerError, match="not newer than the one in the roster"):
        later.take("s", Renewal.of(first), now)
    assert list(later.waiting()) == []


def test_a_renewal_that_the_disk_changed_goes_and_comes_again(member, tmp_path):
    roster, renewed = member
    entry, now = renewed(1), START + dt.timedelta(days=2)
    renewals = Renewals(tmp_path, roster)
    renewals.take("s", Renewal.of(entry), now)
    (tmp_path / "renewals" / "s.json").write_bytes(b"{")
    renewals.forget(now)
    assert list(renewals.waiting()) == []
    assert renewals.take("s", Renewal.of(entry), now)


def test_a_renewal_goes_with_its_member_or_its_end(member, tmp_path):
    roster, renewed = member
    entry = renewed(1)
    now = START + dt.timedelta(days=2)
    for present, when in ((rosters.remove(roster, "s"), now), (roster, now + certificate.LIFETIME)):
        Renewals(tmp_path, roster).take("s", Renewal.of(entry), now)
        Renewals(tmp_path, present).forget(when)
        assert list(Renewals(tmp_path, roster).waiting()) == []
