"""A renewal changes one certificate of the taker's own roster, and nothing else."""

import datetime as dt

import pytest

from staddle.errors import PeerError
from staddle.security.identity import certificate
from staddle.security.identity import keys as k
from staddle.security.identity.certificate import BACKDATED, LIFETIME, renewal_due, utc_now
from staddle.security.identity.renewal import MOST_BYTES, Renewal, own_renewal

YEAR = dt.timedelta(days=365)


@pytest.fixture
def clock(monkeypatch):
    """Sets how far ahead the clock is that certificates are made by."""
    now = utc_now()
    shift = [dt.timedelta()]
    monkeypatch.setattr(certificate, "utc_now", lambda: now + shift[0])

    def ahead(span):
        shift[0] = span
        return now + span

    return ahead


def made(folder, member="hospital-a"):
    return k.create_keys(folder, member, k.Role.SILO, "General Hospital")


def test_it_is_due_once_two_thirds_of_the_life_are_over(tmp_path, clock):
    now = clock(dt.timedelta())
    pem = made(tmp_path / "a").certificate
    assert not renewal_due(pem, now + LIFETIME * 0.66)
    assert renewal_due(pem, now + LIFETIME * 0.67)


def test_it_is_made_once_and_makes_the_same_entry_but_for_the_certificate(tmp_path, clock):
    now = clock(dt.timedelta())
    present, folder = made(tmp_path / "a"), tmp_path / "a"
    assert own_renewal(folder, present, now) is None
    assert len(k.held_keys(folder)) == 1
    now = clock(1.5 * YEAR)
    renewal = own_renewal(folder, present, now)
    assert own_renewal(folder, present, now) == renewal  # as after a restart
    first, second = k.held_keys(folder)
    assert renewal.renewed(present, now) == second.entry
    assert k.load_keys(folder, [second.entry]).tls_key == second.tls_key != first.tls_key
    # in force: nothing to hand in until it is old, too
    assert own_renewal(folder, second.entry, now) is None
    assert own_renewal(folder, second.entry, now + 1.5 * YEAR) is not None
    # one that waited for too long is renewed itself
    assert len(k.held_keys(folder)) == 3


def test_a_daemon_renews_though_its_keys_are_read_only(tmp_path, clock):
    present, folder, state = made(tmp_path / "a"), tmp_path / "a", tmp_path / "state"
    state.mkdir()
    now = clock(1.5 * YEAR)
    renewal = own_renewal(folder, present, now, state)
    assert own_renewal(folder, present, now, state) == renewal  # as after a restart
    assert len(k.held_keys(folder)) == 1
    (second,) = k.held_keys(folder, state)[1:]
    assert renewal.renewed(present, now) == second.entry


def test_the_longest_id_has_room(tmp_path):
    folder = tmp_path / "a"
    made(folder, "a" * 64)
    for _ in range(5):
        pem = k.renew_keys(folder).entry.certificate
        assert len(pem) <= MOST_BYTES - 60


def test_nobody_else_can_make_one_and_it_is_good_for_its_member_alone(tmp_path, clock):
    clock(dt.timedelta())
    present, other = made(tmp_path / "a"), made(tmp_path / "b", "hospital-b")
    thief = k.create_keys(tmp_path / "t", "hospital-a", k.Role.SILO, "General Hospital")
    now = clock(YEAR)
    own = Renewal.of(k.renew_keys(tmp_path / "a").entry)
    stolen = Renewal.of(k.renew_keys(tmp_path / "t").entry)
    assert own.renewed(present, now).certificate == own.certificate
    with pytest.raises(PeerError, match="signature of entry 'hospital-a' does not fit"):
        stolen.renewed(present, now)
    assert stolen.renewed(thief, now).protocol_key == thief.protocol_key
    mixed = own.model_copy(update={"certificate": stolen.certificate})
    with pytest.raises(PeerError, match="does not fit"):
        mixed.renewed(present, now)
    with pytest.raises(PeerError, match="its renewal: certificate is not for the one name"):
        own.renewed(other, now)
    # signed by the member, but for another organisation or role than its roster entry has
    clock(dt.timedelta())
    moved = k.create_keys(tmp_path / "m", "hospital-a", k.Role.FOUNDER, "General Hospital")
    clock(YEAR)
    with pytest.raises(PeerError, match="does not fit"):
        Renewal.of(k.renew_keys(tmp_path / "m").entry).renewed(
            moved.model_copy(update={"role": k.Role.SILO}), now
        )


def test_an_older_one_an_ended_one_or_one_for_ever_is_refused(tmp_path, clock, monkeypatch):
    clock(dt.timedelta())
    first, folder = made(tmp_path / "a"), tmp_path / "a"
    clock(YEAR)
    second = k.renew_keys(folder).entry
    now = clock(2 * YEAR)
    third = k.renew_keys(folder).entry
    assert Renewal.of(third).renewed(second, now) == third
    for old in (first, second, third):
        with pytest.raises(PeerError, match="not newer than the one in the roster"):
            Renewal.of(old).renewed(third, now)
    with pytest.raises(PeerError, match=r"certificate is good from .* and this clock says"):
        Renewal.of(third).renewed(second, now - BACKDATED - dt.timedelta(seconds=2))
    with pytest.raises(PeerError, match=r"certificate is good from .* and this clock says"):
        Renewal.of(third).renewed(second, now + LIFETIME + dt.timedelta(seconds=2))
    monkeypatch.setattr(certificate, "LIFETIME", dt.timedelta(days=3653))
    now = clock(2.5 * YEAR)
    ever = k.renew_keys(folder).entry
    monkeypatch.setattr(certificate, "LIFETIME", LIFETIME)
    with pytest.raises(PeerError, match="good for more than 731 days"):
        Renewal.of(ever).renewed(third, now)
