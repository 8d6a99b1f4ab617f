"""Tickets, and what strangers may send with them."""

import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staddle.errors import LocalError, PeerError
from staddle.files.documents import canonical_json
from staddle.security.identity import invitation as invitations
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys

NOW, LATER = 1_000, 2_000


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    roles = {"f": Role.FOUNDER, "c": Role.COORDINATOR, "op": Role.OPERATOR, "s": Role.SILO}
    entries = {name: create_keys(folder / name, name, role, "o") for name, role in roles.items()}
    roster = rosters.new("lung", [entries["f"]], 1)
    for name in ("c", "op"):
        roster = rosters.add(roster, entries[name])
    keys = {name: load_keys(folder / name) for name in roles}
    return SimpleNamespace(roster=roster, entries=entries, keys=keys)


def ticket(made, by="f", **changes):
    fields = {"federation": "lung", "member": "s", "role": "silo", "token": bytes(32)}
    return invitations.ticket(made.keys[by], **{**fields, "expires": LATER, **changes})


def test_a_ticket_is_good_for_its_entry_until_it_expires(made):
    own = ticket(made)
    own.check(made.roster, NOW)
    own.check_entry(made.entries["s"])
    with pytest.raises(PeerError, match="s: its invitation has expired"):
        own.check(made.roster, LATER)


def test_founders_alone_sign_tickets(made):
    for by in ("op", "c"):
        with pytest.raises(PeerError, match="not signed by a founder of 'lung'"):
            ticket(made, by=by).check(made.roster, NOW)
    # a founder whom the roster does not have
    with pytest.raises(PeerError, match="s: is not a member"):
        ticket(made, by="s").check(made.roster, NOW)
    with pytest.raises(PeerError, match="not signed by a founder"):
        ticket(made, federation="liver").check(made.roster, NOW)


CHANGES = {
    "member": "t", "role": "operator", "token": "11" * 32, "expires": LATER + 1,
    "federation": "liver", "signature": "00" * 64,
}  # fmt: skip


@pytest.mark.parametrize("field", CHANGES)
def test_no_field_of_a_ticket_can_be_changed(made, field):
    changed = ticket(made).model_copy(update={field: CHANGES[field]})
    with pytest.raises(PeerError, match="not signed by a founder"):
        changed.check(made.roster, NOW)


def test_the_entry_has_the_name_and_role_of_the_ticket(made, tmp_path):
    other = create_keys(tmp_path / "s", "s", Role.OPERATOR, "o")
    for entry in (made.entries["op"], other, made.entries["f"]):
        with pytest.raises(PeerError, match="was invited as silo 's', and the entry is of"):
            ticket(made).check_entry(entry)


def test_an_invitation_survives_its_file_and_names_whom_to_pin(made, tmp_path):
    pins = rosters.Pins(
        federation="lung", threshold=1, founders=(made.entries["f"].protocol_fingerprint,)
    )
    whole = invitations.Invitation(
        version=1, coordinator="c.example:7443", trust=pins, roster=made.roster, ticket=ticket(made)
    )
    path = tmp_path / "s.invitation"
    path.write_bytes(whole.encoded())
    assert invitations.Invitation.parse(path.read_bytes(), path) == whole
    assert len(whole.encoded()) < 10_000
    for spoilt in (whole.encoded()[:-9], whole.encoded() + b" ", b"{}", b"\xff"):
        with pytest.raises(LocalError, match="invitation"):
            invitations.Invitation.parse(spoilt, path)
    for address in ("c.example", "c :1", 'c:1"#', "c:1\\", "c:1\n"):
        odd = whole.model_copy(update={"coordinator": address}).encoded()
        with pytest.raises(LocalError, match="not host:port"):
            invitations.Invitation.parse(odd, path)


def test_founders_and_coordinators_are_not_invited(made):
    for role in ("founder", "coordinator", "guest"):
        with pytest.raises(LocalError, match="role"):
            ticket(made, role=role)


def test_two_tickets_for_one_member_have_two_names(made):
    assert ticket(made).name != ticket(made, token=os.urandom(32)).name


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused_as_ours(data):
    for read in (invitations.read_ticket, invitations.read_entry):
        with pytest.raises(LocalError):
            read(data)


def test_what_a_stranger_sends_is_bounded_before_it_is_parsed(made):
    large = canonical_json({"a": "x" * invitations.MOST_BYTES})
    for read in (invitations.read_ticket, invitations.read_entry):
        with pytest.raises(LocalError, match=f"more than {invitations.MOST_BYTES}"):
            read(large)
    whole = canonical_json(made.entries["s"].model_dump(mode="json"))
    assert invitations.read_entry(whole) == made.entries["s"]
    assert invitations.read_ticket(canonical_json(ticket(made).model_dump())) == ticket(made)
