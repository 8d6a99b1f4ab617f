import json
import re
from functools import partial
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from staddle.errors import LocalError, PeerError
from staddle.files.documents import canonical_json, validate
from staddle.security import preflight
from staddle.security.identity import roster as rosters
from staddle.security.identity.certificate import self_signed
from staddle.security.identity.domains import ENTRY
from staddle.security.identity.keys import Role, RosterEntry, create_keys, entry_bytes, load_keys
from staddle.security.identity.roster import Pins, Roster
from staddle.security.identity.roster_in_use import RosterInUse

MEMBERS = {
    "coordinator": Role.COORDINATOR, "f1": Role.FOUNDER, "f2": Role.FOUNDER, "f3": Role.FOUNDER,
    "operator-1": Role.OPERATOR, "silo-a": Role.SILO, "silo-b": Role.SILO,
}  # fmt: skip


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    for member, role in MEMBERS.items():
        create_keys(folder / member, member, role, "org of " + member)
    return {member: load_keys(folder / member) for member in MEMBERS}


@pytest.fixture(scope="module")
def made(keys):
    """A roster of all members, signed by f1 and f2 of three founders, and the pins that fit it."""
    founders = [keys[f].entry for f in ("f3", "f1", "f2")]
    roster = rosters.new("lung", founders, 2)
    for member in ("silo-b", "coordinator", "silo-a", "operator-1"):
        roster = rosters.add(roster, keys[member].entry)
    unsigned = roster
    for founder in ("f1", "f2"):
        roster = rosters.sign(roster, keys[founder])
    pins = Pins(
        federation="lung", threshold=2, founders=tuple(f.protocol_fingerprint for f in founders)
    )
    return SimpleNamespace(roster=roster, unsigned=unsigned, pins=pins)


def test_signed_roster_verifies_after_a_round_trip_through_a_file(made, tmp_path):
    rosters.save(made.roster, tmp_path / "r.json")
    loaded = rosters.load(tmp_path / "r.json")
    rosters.verify(loaded, made.pins)
    assert loaded == made.roster
    assert rosters.digest(loaded) == rosters.digest(made.unsigned)


def test_lookups(made, keys):
    roster = made.roster
    assert [entry.id for entry in roster.silos] == ["silo-a", "silo-b"]
    assert roster.coordinator == roster["coordinator"] == keys["coordinator"].entry
    assert roster.by_spki(keys["silo-a"].entry.spki_sha256).id == "silo-a"
    assert "silo-a" in roster
    assert "silo-c" not in roster
    assert roster.bundle().count("BEGIN CERTIFICATE") == len(MEMBERS)
    with pytest.raises(PeerError, match="silo-c: is not a member"):
        roster["silo-c"]
    with pytest.raises(PeerError, match=r"TLS key 00.*belongs to no member"):
        roster.by_spki("00" * 32)


def test_order_of_adding_does_not_change_the_digest(keys):
    def build(order):
        roster = rosters.new("x", [keys["f1"].entry], 1)
        for member in order:
            roster = rosters.add(roster, keys[member].entry)
        return rosters.digest(roster)

    assert build(["silo-a", "coordinator"]) == build(["coordinator", "silo-a"])


def test_changes_make_a_new_version_without_signatures(made, keys, tmp_path):
    removed = rosters.remove(made.roster, "silo-a")
    assert (removed.version, dict(removed.signatures)) == (made.roster.version + 1, {})
    assert "silo-a" not in removed
    with pytest.raises(LocalError, match="'silo-x' is not in the roster; its members: coordinator"):
        rosters.remove(made.roster, "silo-x")
    create_keys(tmp_path / "again", "silo-a", Role.SILO, "new keys")
    entry = load_keys(tmp_path / "again").entry
    with pytest.raises(LocalError, match="is in the roster already"):
        rosters.add(made.roster, entry)
    replaced = rosters.add(made.roster, entry, replace=True)
    assert replaced["silo-a"] == entry
    assert not replaced.signatures


def test_structure_is_checked(made, keys, tmp_path):
    with pytest.raises(LocalError, match="'silo-a' has role silo, not founder"):
        rosters.new("x", [keys["silo-a"].entry], 1)
    with pytest.raises(LocalError, match="threshold 2 is more than the 1 founders"):
        rosters.new("x", [keys["f1"].entry], 2)
    for threshold in (0, -1):
        with pytest.raises(LocalError, match=r"threshold = "):
            rosters.new("x", [keys["f1"].entry], threshold)
    with pytest.raises(LocalError, match="threshold 1 is more than the 0 founders"):
        rosters.new("x", [], 1)
    with pytest.raises(LocalError, match="threshold 2 is more"):
        rosters.remove(rosters.remove(made.roster, "f1"), "f2")
    create_keys(tmp_path / "c2", "c2", Role.COORDINATOR, "o")
    with pytest.raises(LocalError, match="more than one coordinator: c2, coordinator"):
        rosters.add(made.roster, load_keys(tmp_path / "c2").entry)
    twice = made.unsigned.model_dump(mode="json")
    twice["entries"].insert(0, twice["entries"][0])
    with pytest.raises(LocalError, match="2 entries have the same id 'coordinator'"):
        validate(twice, Roster, "r")
    unsorted = made.unsigned.model_dump(mode="json")
    unsorted["entries"].reverse()
    with pytest.raises(LocalError, match="not sorted"):
        validate(unsorted, Roster, "r")


def test_one_key_cannot_be_two_members(made, keys, tmp_path):
    # A founder with two entries over one protocol key would count twice towards the threshold.
    create_keys(tmp_path / "f9", "f9", Role.FOUNDER, "o")
    own = load_keys(tmp_path / "f9").entry.model_dump(mode="json")
    for name in ("protocol_key", "log_key", "exchange_key"):
        borrowed = {**own, name: getattr(keys["f1"].entry, name)}
        signer = keys["f1"] if name == "protocol_key" else load_keys(tmp_path / "f9")
        borrowed["signature"] = signer.sign(ENTRY, entry_bytes(borrowed)).hex()
        twin = validate(borrowed, RosterEntry, "entry")
        with pytest.raises(LocalError, match=f"2 entries have the same {name}"):
            rosters.add(made.unsigned, twin)
    name = "spki_sha256"  # a certificate for another id over the same TLS key
    pem = self_signed("f9", load_pem_private_key(keys["f1"].tls_key, None))
    borrowed = {**own, "certificate": pem, name: keys["f1"].entry.spki_sha256}
    borrowed["signature"] = load_keys(tmp_path / "f9").sign(ENTRY, entry_bytes(borrowed)).hex()
    with pytest.raises(LocalError, match=f"2 entries have the same {name}"):
        rosters.add(made.unsigned, validate(borrowed, RosterEntry, "entry"))


def test_an_entry_changed_in_memory_is_checked_again(made, keys):
    why = r"entries.4: certificate is not for the one name 'f9.staddle', with or without tag$"
    with pytest.raises(LocalError, match=why):
        rosters.add(made.unsigned, keys["f1"].entry.model_copy(update={"id": "f9"}))


def test_only_a_founder_of_a_complete_roster_signs(made, keys, tmp_path):
    with pytest.raises(LocalError, match="'silo-a' with these keys is not a founder"):
        rosters.sign(made.roster, keys["silo-a"])
    create_keys(tmp_path / "f1", "f1", Role.FOUNDER, "another f1")
    with pytest.raises(LocalError, match="'f1' with these keys is not a founder"):
        rosters.sign(made.roster, load_keys(tmp_path / "f1"))
    with pytest.raises(LocalError, match="has no coordinator; add its entry"):
        rosters.sign(rosters.new("x", [keys["f1"].entry], 1), keys["f1"])


@pytest.mark.parametrize(
    ("pinned", "why"),
    [
        ({"federation": "heart"}, "of federation 'lung', but federation = 'heart' in .trust. of"),
        ({"minimum_version": 6}, "5 is older than minimum_version = 6 in .* if it is mistyped"),
        ({"threshold": 1}, "says threshold 2, but threshold = 1 in .* by telephone"),
    ],
    ids=["step 1", "step 2", "step 3"],
)
def test_a_roster_that_is_not_the_pinned_one_is_refused(made, pinned, why):
    with pytest.raises(LocalError, match=why):
        rosters.verify(made.roster, made.pins.model_copy(update=pinned))


def test_step_4_no_coordinator(made):
    with pytest.raises(LocalError, match="no coordinator"):
        rosters.verify(rosters.remove(made.roster, "coordinator"), made.pins)


def test_step_5_a_signature_that_does_not_fit(made, keys):
    # Signatures of the version before, and those of a member who is no founder, or is nobody.
    old = {"signatures": made.roster.signatures}
    changed = rosters.remove(made.roster, "silo-b").model_copy(update=old)
    with pytest.raises(PeerError, match="f1: its signature does not fit roster version 6"):
        rosters.verify(changed, made.pins)
    by_silo = keys["silo-a"].sign(rosters.ROSTER, rosters.signed_bytes(made.roster)).hex()
    for signer in ("silo-a", "nobody"):
        signatures = {**made.roster.signatures, signer: by_silo}
        more = made.roster.model_copy(update={"signatures": signatures})
        with pytest.raises(PeerError, match=f"^{signer}: "):
            rosters.verify(more, made.pins)


def test_step_6_too_few_signatures_say_who_and_who_not(made, keys):
    one = rosters.sign(made.unsigned, keys["f2"])
    with pytest.raises(LocalError, match="signed: f2; missing: f1, f3; have a missing"):
        rosters.verify(one, made.pins)
    with pytest.raises(LocalError, match="signed: nobody; missing: f1, f2, f3"):
        rosters.verify(made.unsigned, made.pins)


def test_step_6_signatures_by_founders_that_we_do_not_pin_do_not_count(made, tmp_path):
    # A whole swapped federation: the same names, thresholds and ids, all signatures right, but
    # other keys.
    fake = {}
    for member, role in MEMBERS.items():
        create_keys(tmp_path / member, member, role, "org of " + member)
        fake[member] = load_keys(tmp_path / member)
    roster = rosters.new("lung", [fake[f].entry for f in ("f1", "f2", "f3")], 2)
    for member in ("coordinator", "silo-a", "silo-b", "operator-1"):
        roster = rosters.add(roster, fake[member].entry)
    for founder in ("f1", "f2", "f3"):
        roster = rosters.sign(roster, fake[founder])
    why = "no pinned founder is left in it; signed, but not pinned: f1, f2, f3"
    with pytest.raises(LocalError, match=f"if it is right, this roster is not theirs, .* {why}"):
        rosters.verify(roster, made.pins)


def mistyped(fingerprint):
    """Another fingerprint of the same form."""
    return fingerprint[:-1] + ("A" if fingerprint[-1] != "A" else "B")


def test_a_mistyped_pin_is_named_with_its_place_and_what_the_roster_has(made, keys):
    """A tampered roster is one explanation, and not the likely one: both values are shown."""
    f1, f2, f3 = fingerprints(keys, "f1", "f2", "f3")
    pins = made.pins.model_copy(update={"founders": (f1, mistyped(f2), f3)})
    with pytest.raises(LocalError) as caught:
        rosters.verify(made.roster, pins)
    said = str(caught.value)
    assert said.startswith(f"a pin does not fit: {mistyped(f2)} in [trust] of the configuration is")
    assert f"in which f1 has {f1}, f2 has {f2}, f3 has {f3}. Ask the founders" in said
    assert "signed: f1; missing: f3; signed, but not pinned: f2" in said
    assert "staddle roster sign" not in said
    with pytest.raises(
        LocalError, match=r"SHA256:\S+ on the command line is the protocol key of no"
    ):
        rosters.verify(made.roster, pins, "on the command line")
    with pytest.raises(LocalError, match=f"3 must; a pin does not fit: {re.escape(mistyped(f2))}"):
        rosters.verify_by(rosters.sign(made.roster, keys["f3"]), [f1, f3, mistyped(f2)])


def test_too_few_pins_are_not_blamed_on_a_founder(made, keys):
    pins = made.pins.model_copy(update={"founders": tuple(fingerprints(keys, "f1"))})
    with pytest.raises(LocalError, match=r"signed, but not pinned: f2; add founders in .trust. of"):
        rosters.verify(made.roster, pins)


def test_a_mistyped_pin_that_is_not_needed_now_is_named_by_check(made, keys, tmp_path):
    """Its founder may have to sign the next roster."""
    place = tmp_path / "roster.json"
    rosters.save(made.roster, place)
    f1, f2, f3 = fingerprints(keys, "f1", "f2", "f3")
    for third, said in ((f3, "it fits the pins"), (mistyped(f3), "a pin does not fit: SHA256:")):
        pins = made.pins.model_copy(update={"founders": (f1, f2, third)})
        assert said in preflight.roster(partial(RosterInUse, place, place, pins, tmp_path), pins)[1]


@pytest.mark.parametrize("text", ["SHA256:" + "a" * 42, "SHA256:" + "a" * 44, "f" * 64, ""])
def test_a_pin_that_is_no_fingerprint_says_what_one_is(text):
    document = {"federation": "lung", "threshold": 1, "founders": [text]}
    with pytest.raises(LocalError, match=r"founders\.0 = .*not a fingerprint: .* in place of 50"):
        validate(document, Pins, "silo.toml")


def fingerprints(keys, *ids):
    return [keys[id_].entry.protocol_fingerprint for id_ in ids]


def test_without_pins_founders_must_sign(made, keys):
    """Without pins all named founders must have signed, or as many as the file says."""
    for named, least in ((("f1", "f2"), 0), (("f2", "f1"), 2), (("f1", "f2", "f3"), 2)):
        rosters.verify_by(made.roster, fingerprints(keys, *named), least)
    assert rosters.signers(made.roster, fingerprints(keys, "f3", "f2")) == ("f2",)
    for named, least, said in (
        (("f1", "f2", "f3"), 0,
            "signed by f1, f2 of the 3 founders named here, 3 must; .* --threshold"),
        (("f1",), 0, "asks for the signatures of 2 founders; name as many with --founder, not 1"),
        (("f1", "f1"), 1, "name as many with --founder, not 1"),
        (("f1", "f3"), 1, "needs signatures by 2 pinned founders; signed: f1; missing: f3"),
    ):  # fmt: skip
        with pytest.raises(LocalError, match=said):
            rosters.verify_by(made.roster, fingerprints(keys, *named), least)
    with pytest.raises(LocalError, match=r"founders\.1 = 'f2'"):
        rosters.verify_by(made.roster, [*fingerprints(keys, "f1"), "f2"])
    why = r"a pin does not fit: SHA256:\S+ and x after --founder is the protocol key of no founder"
    with pytest.raises(LocalError, match=why):
        rosters.verify_by(made.roster, [keys["f1"].entry.tls_fingerprint, "x"])


def test_without_founders_the_file_counts(made, keys):
    """Where no founder is named, the file must have the signatures that it asks for."""
    rosters.verify_by(made.roster)
    assert rosters.signers(made.roster, ()) == ()
    with pytest.raises(LocalError, match="needs signatures by 2 pinned founders; signed: f2"):
        rosters.verify_by(rosters.sign(made.unsigned, keys["f2"]))
    for changes in ({"version": 9}, {"federation": "heart"}):
        with pytest.raises(PeerError, match="f1: its signature does not fit"):
            rosters.verify_by(made.roster.model_copy(update=changes))


def test_each_flipped_bit_of_a_roster_file_is_refused(made):
    data = canonical_json(made.roster.model_dump(mode="json"))
    for at in range(0, len(data), 37):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        with pytest.raises((LocalError, PeerError)):
            rosters.verify(rosters.parse(bytes(flipped), "r"), made.pins)


def test_hand_edited_roster_is_refused(made, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(made.roster.model_dump(mode="json"), indent=2))
    with pytest.raises(LocalError, match="not canonical"):
        rosters.load(path)
