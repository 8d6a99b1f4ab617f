"""Keys and receipts: rosters and receipts of the package, through the one file."""

import json
from itertools import pairwise

import pytest
from support.lone_verifier import chained, digest, intent, leaf, outcome, start, store

from staddle.commands.ledger import roster_files
from staddle.errors import LocalError
from staddle.files.documents import canonical_json
from staddle.security.identity import roster as rosters
from staddle.security.identity.domains import ENTRY, ROSTER
from staddle.security.identity.keys import Role, create_keys, entry_bytes, load_keys
from staddle.security.identity.roster import Pins
from staddle.security.ledger import messages, receipt_checks
from staddle.security.ledger.receipt import Receipt
from staddle.security.log.head import log_key
from staddle.security.log.merkle import Tree

MEMBERS = {"coordinator": Role.COORDINATOR, **dict.fromkeys(("f1", "f2", "f3"), Role.FOUNDER)}
MEMBERS |= {"hospital-a": Role.SILO, "hospital-b": Role.SILO, "operator-1": Role.OPERATOR}
JOB, SHA256 = "ab" * 32, "cd" * 32


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    for member, role in MEMBERS.items():
        create_keys(folder / member, member, role, "org of " + member)
    return {member: load_keys(folder / member) for member in MEMBERS}


@pytest.fixture(scope="module")
def roster(keys):
    """Signed by f1 and f2 of three founders; two must."""
    made = rosters.new("lung", [keys[founder].entry for founder in ("f1", "f2", "f3")], 2)
    for member in ("coordinator", "hospital-a", "hospital-b", "operator-1"):
        made = rosters.add(made, keys[member].entry)
    for founder in ("f1", "f2"):
        made = rosters.sign(made, keys[founder])
    return made


@pytest.fixture
def path(roster, tmp_path):
    rosters.save(roster, tmp_path / "roster.json")
    return tmp_path / "roster.json"


def founders(keys, *members):
    return [part for m in members for part in ("--founder", keys[m].entry.protocol_fingerprint)]


def test_keys_of_a_roster(tool, keys, roster, path):
    status, found = tool.json("keys", path, *founders(keys, "f1", "f2"))
    assert (status, found["holds"], found["digest"]) == (0, True, rosters.digest(roster))
    assert found["keys"].keys() == {"coordinator", "hospital-a", "hospital-b"}
    for silo in ("hospital-a", "hospital-b"):
        assert found["keys"][silo] == str(log_key("lung", silo, keys[silo].entry.log_key))
    assert found["keys"]["coordinator"].startswith("staddle.example/lung/coordinator+")
    _, out = tool("keys", path, *founders(keys, "f1", "f2"))
    assert f"hospital-a  {found['keys']['hospital-a']}\n" in out


def test_without_a_founder_it_says_that_nothing_vouches(tool, path):
    status, out = tool("keys", path)
    assert status == 0
    assert "2 PASS  founders: NOTHING VOUCHES FOR IT: no --founder was named" in out
    assert "nor that any founder knows of them" in out


def test_enough_of_the_founders_that_are_named_must_have_signed(tool, keys, roster, path):
    for named, least, status in (
        (["f1", "f2"], 0, 0),
        (["f1", "f2", "f3"], 0, 1),
        (["f1", "f2", "f3"], 2, 0),
        (["f1", "f2", "f3"], 1, 0),
        (["f1", "f2", "f3"], 3, 1),
        (["f1"], 0, 1),
        (["f1", "f3"], 1, 1),
        (["operator-1"], 0, 1),
    ):
        found, _ = tool("keys", path, *founders(keys, *named), "--threshold", least)
        assert found == status, (named, least)
        if least == 2:
            pinned = tuple(keys[member].entry.protocol_fingerprint for member in named)
            rosters.verify(roster, Pins(federation="lung", threshold=2, founders=pinned))
    status, out = tool("keys", path, "--founder", "SHA256:x")
    assert status == 1
    assert "If it is mistyped, correct it; if not, this roster is not theirs. In it f1 has " in out
    assert keys["f1"].entry.protocol_fingerprint in out


def changed_entry(document, keys, member, **fields):
    """An entry with other fields, signed anew by its own key."""
    for at, entry in enumerate(document["entries"]):
        if entry["id"] == member:
            signature = keys[member].sign(ENTRY, entry_bytes({**entry, **fields})).hex()
            document["entries"][at] = {**entry, **fields, "signature": signature}
    return document


def test_a_changed_roster_is_refused(tool, keys, roster, path):
    whole = path.read_bytes()
    document = json.loads(whole)

    def refused(data):
        path.write_bytes(data if isinstance(data, bytes) else canonical_json(data))
        status, out = tool("keys", path, *founders(keys, "f1", "f2"))
        return status == 1 and "FAIL" in out

    def resigned(fields):
        """What founders might sign by mistake: one entry with other fields."""
        new = changed_entry(json.loads(whole), keys, "hospital-a", **fields)
        del new["signatures"]
        payload = canonical_json(new)
        return {**new, "signatures": {f: keys[f].sign(ROSTER, payload).hex() for f in ("f1", "f2")}}

    entries, signatures = document["entries"], document["signatures"]
    assert not refused(whole)
    assert not refused(whole[:-1])
    assert refused(whole + b"\n")
    assert refused(b" " + whole)
    assert refused(json.dumps(document).encode())
    for at in range(0, len(whole) - 1, 11):
        changed = bytearray(whole)
        changed[at] ^= 1
        assert refused(bytes(changed)), at
    assert refused(whole.replace(b'"version":5', b'"version":5.0'))
    changes = {"version": 9}, {"version": 0}, {"threshold": 1}, {"federation": "other"}, {"more": 1}
    for change in changes:
        assert refused({**document, **change}), change
    assert refused({**document, "entries": entries[::-1]})
    assert refused({**document, "entries": entries[1:]})
    assert refused({**document, "entries": [*entries, entries[-1]]})
    assert refused({**document, "signatures": {}})
    for more in ({"f3": "00" * 64}, *({who: signatures["f1"]} for who in ("hospital-a", "nobody"))):
        assert refused({**document, "signatures": {**signatures, **more}}), more
    other_key = {"log_key": keys["hospital-b"].entry.log_key}
    for fields in ({"role": "coordinator"}, other_key, {"organisation": "x" * 129}):
        assert refused(changed_entry(json.loads(whole), keys, "hospital-a", **fields))
    assert refused(changed_entry(json.loads(whole), keys, "coordinator", role="silo"))
    assert refused(resigned({"log_key": keys["hospital-a"].entry.protocol_key}))
    assert not refused(resigned({"organisation": 'Ho\u00f4pital "A"\\'}))


@pytest.fixture
def world(tool, keys, roster, path, tmp_path):
    """A ledger with a receipt, and whether the receipt holds after a change."""

    class World:
        def __init__(self):
            self.peer = {"id": "coordinator", "spki": keys["coordinator"].entry.spki_sha256}
            self.signer = keys["coordinator"]

        def lines(self, at=roster, receipt=None, recipient=None, ended=None, **fields):
            opening = [start(roster=rosters.digest(at)), intent(recipient=recipient or self.peer)]
            message = {"bytes": 184, "sha256": SHA256}
            lines = chained([*opening, digest(1, message=message)])
            members = rosters.members_digest(at, ("hospital-a",))
            signed = {"federation": "lung", "members": members, "silo": "hospital-a"}
            signed |= {"job": JOB, "round": 3, "size": 184, "sha256": SHA256, "ledger_seq": 2}
            signed |= {"ledger_leaf": leaf(lines[2]).hex()}
            signed |= {"ledger_root": Tree(leaf(line) for line in lines).root().hex(), **fields}
            receipt = receipt or Receipt(**signed).sign(self.signer).hex()
            return chained([ended or outcome(1, receipt=receipt)], lines)

        def holds(self, lines, *more):
            folder = store(tmp_path / "ledger", [lines])
            status, self.out = tool("receipts", folder, "--roster", path, *more)
            assert status in (0, 1)
            assert (status == 0) == self.package_says(folder, ["--roster", path, *more])
            return status == 0

        def package_says(self, folder, options):
            """The same by the package, which tells receipts of another roster apart from wrong
            ones.
            """
            given = lambda name: [b for a, b in pairwise(options) if a == name]
            try:
                read = roster_files.read(given("--roster"), given("--founder"), None)
                found = receipt_checks.check(messages.lines(folder), read.each)
            except LocalError:
                return False
            return not found.problems and not found.unchecked

    return World()


def test_a_receipt_holds(tool, world, keys):
    assert world.holds(world.lines(), *founders(keys, "f1", "f2")), world.out
    assert "5 PASS  receipts: 1 hold; 0 messages that were sent have none" in world.out
    shown = (
        "signed that it received 1 messages of this silo with just these bytes, and so fixed the"
    )
    assert f"{shown} records up to seq 2" in world.out
    assert not world.holds(world.lines(), *founders(keys, "f3"))


OTHERS = {"federation": "other", "silo": "hospital-b", "round": 4, "size": 183, "ledger_seq": 1}
OTHERS |= dict.fromkeys(("members", "job", "sha256", "ledger_leaf", "ledger_root"), "00" * 32)


@pytest.mark.parametrize(("name", "value"), OTHERS.items())
def test_a_receipt_for_anything_else_is_found(world, name, value):
    assert not world.holds(world.lines(**{name: value}))
    told = "the receipt of seq 3 is not what the coordinator signs for the digest at seq 2"
    assert f"5 FAIL  receipts: {told}" in world.out


def test_receipts_of_others_or_misspelt_are_found(world, keys):
    good = json.loads(world.lines()[3])["receipt"]
    for receipt in (good.upper(), good[:-2], good + "00", "zz" * 64, f"{good}\n"):
        assert not world.holds(world.lines(receipt=receipt)), receipt
    world.signer = keys["hospital-a"]
    assert not world.holds(world.lines())
    world.signer = keys["coordinator"]
    assert not world.holds(world.lines(recipient={"id": "coordinator", "spki": "00" * 32}))
    assert not world.holds(world.lines(recipient={**world.peer, "id": "hospital-b"}))


def test_every_bit_of_a_receipt_counts(world):
    good = json.loads(world.lines()[3])["receipt"]
    for at in range(len(good)):
        flipped = good[:at] + f"{int(good[at], 16) ^ 1:x}" + good[at + 1 :]
        assert not world.holds(world.lines(receipt=flipped)), at


def test_a_receipt_needs_a_digest_and_a_message_needs_no_receipt(world):
    receipt = json.loads(world.lines()[3])["receipt"]
    failed = outcome(1, status="failed", receipt=receipt)
    assert not world.holds(chained([start(), intent(recipient=world.peer), failed]))
    assert world.holds(world.lines(ended=outcome(1))), world.out
    assert "0 hold; 1 messages that were sent have none" in world.out
    assert world.holds(world.lines(ended=outcome(1, status="unknown")))
    assert "0 hold; 0 messages that were sent have none" in world.out


def test_a_receipt_is_checked_under_the_roster_of_its_time(world, keys, roster, tmp_path):
    newer = rosters.sign(rosters.sign(rosters.remove(roster, "hospital-b"), keys["f1"]), keys["f3"])
    rosters.save(newer, tmp_path / "newer.json")
    assert not world.holds(world.lines(at=newer))
    assert "is under another roster" in world.out
    assert world.holds(world.lines(at=newer), "--roster", tmp_path / "newer.json")
    assert world.holds(world.lines(), "--roster", tmp_path / "newer.json")


def test_a_broken_ledger_has_no_receipts(world):
    lines = world.lines()
    assert not world.holds(lines[1:])
    assert not world.holds([lines[0], lines[1], lines[3]])
    assert not world.holds(chained([outcome(1)], lines))
