from types import SimpleNamespace

import pytest

from staddle.errors import LocalError, PeerError
from staddle.files.documents import canonical_json, parse_json
from staddle.security.identity import domains
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.identity.signed_document import read_signed, sign_document, verify_document

JOB = {"method": "fedavg", "rounds": 20, "lr": "0.1", "silos": ["s"]}


@pytest.fixture(scope="module")
def fed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    keys = {}
    for member, role in [
        ("f", Role.FOUNDER), ("c", Role.COORDINATOR), ("op", Role.OPERATOR), ("s", Role.SILO),
    ]:  # fmt: skip
        create_keys(folder / member, member, role, "o")
        keys[member] = load_keys(folder / member)
    roster = rosters.new("lung", [keys["f"].entry], 1)
    for member in ("c", "op", "s"):
        roster = rosters.add(roster, keys[member].entry)
    return SimpleNamespace(keys=keys, roster=roster)


def check(fed, signed, role=Role.OPERATOR, domain=domains.JOB):
    return verify_document(signed, fed.roster, role, domain)


def test_signed_document_comes_back_through_bytes(fed):
    signed = sign_document(JOB, fed.roster, fed.keys["op"], domains.JOB)
    assert check(fed, parse_json(canonical_json(signed), "wire")) == JOB


def test_step_1_what_is_no_envelope(fed):
    signed = sign_document(JOB, fed.roster, fed.keys["op"], domains.JOB)
    for bad in [
        None, [], {}, {**signed, "extra": 1}, {**signed, "signature": "00"},
        {**signed, "document": []},
    ]:  # fmt: skip
        with pytest.raises(LocalError, match=r"^signed document: "):
            check(fed, bad)


def test_step_2_stranger_and_wrong_role(fed):
    signed = sign_document(JOB, fed.roster, fed.keys["s"], domains.JOB)
    with pytest.raises(PeerError, match=r"s: has role silo, and only a member of role operator"):
        check(fed, signed)
    with pytest.raises(PeerError, match="nobody: is not a member"):
        check(fed, {**signed, "signer": "nobody"})


def test_step_4_other_silos(fed):
    signed = sign_document(JOB, fed.roster, fed.keys["op"], domains.JOB)
    later = rosters.remove(fed.roster, "s")
    why = r"op: signed for a coordinator and silos that are not those of our roster, version 5: "
    with pytest.raises(PeerError, match=why):
        verify_document(signed, later, Role.OPERATOR, domains.JOB)
    # and the digest cannot be put right afterwards
    with pytest.raises(PeerError, match="does not fit"):
        verify_document(
            {**signed, "members": rosters.members_digest(later, JOB["silos"])},
            later,
            Role.OPERATOR,
            domains.JOB,
        )


def test_step_4_members_that_the_document_does_not_name_may_come_and_go(fed, tmp_path):
    signed = sign_document(JOB, fed.roster, fed.keys["op"], domains.JOB)
    entry = create_keys(tmp_path / "t", "t", Role.SILO, "o")
    later = rosters.add(fed.roster, entry)
    assert verify_document(signed, later, Role.OPERATOR, domains.JOB) == JOB
    # nor does a document that names nobody depend on silos
    for silos in ({}, {"silos": "s"}, {"silos": 5}, {"silos": [["s"], {"s": 1}]}):
        alone = sign_document({"rounds": 1, **silos}, fed.roster, fed.keys["op"], domains.JOB)
        verify_document(alone, rosters.remove(later, "s"), Role.OPERATOR, domains.JOB)


@pytest.mark.parametrize("member", ["c", "s"])
def test_step_4_a_member_with_new_keys_is_another(fed, tmp_path, member):
    signed = sign_document(JOB, fed.roster, fed.keys["op"], domains.JOB)
    entry = create_keys(tmp_path / member, member, fed.keys[member].entry.role, "o")
    later = rosters.add(fed.roster, entry, replace=True)
    with pytest.raises(PeerError, match="op: signed for a coordinator and silos that are not"):
        verify_document(signed, later, Role.OPERATOR, domains.JOB)


def test_step_3_any_change_and_any_other_purpose(fed):
    signed = sign_document(JOB, fed.roster, fed.keys["op"], domains.JOB)
    for document in ({**JOB, "rounds": 21}, {"method": "fedavg"}, {**JOB, "more": None}, {}):
        with pytest.raises(PeerError, match="op: its signature does not fit"):
            check(fed, {**signed, "document": document})
    with pytest.raises(PeerError, match="does not fit"):
        check(fed, signed, domain=domains.ROSTER)
    other = sign_document(JOB, fed.roster, fed.keys["s"], domains.JOB)
    # another member's signature under this one's name
    with pytest.raises(PeerError, match="does not fit"):
        check(fed, {**other, "signer": "op"})


def test_each_flipped_bit_is_refused(fed):
    data = canonical_json(sign_document(JOB, fed.roster, fed.keys["op"], domains.JOB))
    for at in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << (at % 8)
        with pytest.raises((LocalError, PeerError)):
            check(fed, parse_json(bytes(flipped), "wire"))


def test_hostile_nesting_is_a_local_error(fed):
    signed = sign_document(JOB, fed.roster, fed.keys["op"], domains.JOB)
    deep = parse_json(b"[" * 800 + b"]" * 800, "wire")
    for document in ({"a": deep}, {"a": 1.5}, {"é": 1}, {"a": "\ud800"}):
        with pytest.raises(LocalError):
            check(fed, {**signed, "document": document})


def test_signing_needs_keys_that_the_roster_knows(fed, tmp_path):
    create_keys(tmp_path / "op", "op", Role.OPERATOR, "o")
    with pytest.raises(LocalError, match="'op' with these keys is not in roster version 4"):
        sign_document(JOB, fed.roster, load_keys(tmp_path / "op"), domains.JOB)


def test_a_job_file_that_is_not_signed_is_said_not_to_be(tmp_path):
    (tmp_path / "job.toml").write_text("version = 1\n")
    with pytest.raises(LocalError, match=r"job\.toml: not a signed job, which staddle job sign"):
        read_signed(tmp_path / "job.toml")
