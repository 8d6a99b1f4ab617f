"""Rosters that a ledger keeps: an audit needs no file of them, by either verifier."""

from types import SimpleNamespace

import pytest
from support.ledgers import open_ledger, write_start
from support.lone_verifier import chained, digest, intent, leaf, outcome, start, store
from typer.testing import CliRunner

from staddle.commands.ledger import roster_files
from staddle.commands.main import app
from staddle.errors import LocalError
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.ledger import kept_rosters, messages, receipt_checks
from staddle.security.ledger.receipt import Receipt
from staddle.security.log.head import log_key
from staddle.security.log.merkle import Tree

SILO, SHA256 = "hospital-a", "cd" * 32
MEMBERS = {
    "f": Role.FOUNDER, "coordinator": Role.COORDINATOR, SILO: Role.SILO, "hospital-b": Role.SILO,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    for member, role in MEMBERS.items():
        create_keys(folder / member, member, role, "org")
    create_keys(folder / "forger", "f", Role.FOUNDER, "org")
    keys = {member: load_keys(folder / member) for member in (*MEMBERS, "forger")}
    roster = rosters.new("lung", [keys["f"].entry], 1)
    for member in ("coordinator", SILO, "hospital-b"):
        roster = rosters.add(roster, keys[member].entry)
    forged = rosters.add(roster, keys["forger"].entry, replace=True)
    return SimpleNamespace(
        keys=keys,
        old=rosters.sign(roster, keys["f"]),
        new=rosters.sign(rosters.remove(roster, "hospital-b"), keys["f"]),
        forged=rosters.sign(forged, keys["forger"]),
        founder=("--founder", keys["f"].entry.protocol_fingerprint),
    )


def held(roster):
    return kept_rosters.record_of(roster).model_dump(mode="json")


def lines(made, *kept, under=None):
    """A ledger with these rosters, and a message under the last one with its receipt."""
    under = under or kept[-1]
    peer = {"id": "coordinator", "spki": made.keys["coordinator"].entry.spki_sha256}
    opening = [start(roster=rosters.digest(under)), *map(held, kept)]
    message = {"bytes": 184, "sha256": SHA256}
    place = len(opening)
    found = chained([*opening, intent(recipient=peer), digest(place, message=message)])
    members = rosters.members_digest(under, (SILO,))
    root = Tree(leaf(line) for line in found).root().hex()
    receipt = Receipt(
        "lung", members, SILO, "ab" * 32, 3, 184, SHA256, place + 1, leaf(found[-1]).hex(), root
    )
    signature = receipt.sign(made.keys["coordinator"]).hex()
    return chained([outcome(place, receipt=signature)], found)


def test_both_verifiers_check_receipts_under_the_rosters_of_the_ledger(tool, made, tmp_path):
    folder = store(tmp_path / "ledger", [lines(made, made.old, made.new)])
    status, out = tool("receipts", folder, *made.founder)
    assert (status, "1 hold" in out) == (0, True), out
    found = roster_files.read(None, made.founder[1:], None, folder)
    assert found.each == (made.old, made.new)
    assert [line.partition(":")[0] for line in found.vouchers] == [
        f"roster version {each.version}" for each in found.each
    ]
    checked = receipt_checks.check(messages.lines(folder), found.each)
    assert (len(checked.good), checked.unchecked, checked.problems) == (1, 0, [])


def test_neither_takes_a_roster_that_the_founders_did_not_sign(tool, made, tmp_path):
    folder = store(tmp_path / "ledger", [lines(made, made.old, made.forged)])
    status, out = tool("receipts", folder, *made.founder)
    assert (status, "is under another roster" in out) == (1, True), out
    found = roster_files.read(None, made.founder[1:], None, folder)
    assert found.each == (made.old,)
    assert receipt_checks.check(messages.lines(folder), found.each).unchecked == 1
    # without a founder from elsewhere, nothing in the ledger vouches for itself
    status, out = tool("receipts", folder)
    assert status == 2
    assert roster_files.read(None, None, None, folder).each == ()
    only = store(tmp_path / "only", [lines(made, made.forged)])
    with pytest.raises(LocalError, match=r"no roster here is signed by .*: ask the founder"):
        roster_files.read(None, made.founder[1:], None, only)


SPOILT = {
    "another digest": lambda record: {**record, "roster": "00" * 32},
    "no roster": lambda record: {**record, "text": "{}"},
    "a changed member": lambda record: {
        **record, "text": record["text"].replace('"organisation":"org"', '"organisation":"orc"', 1),
    },
    "spaces": lambda record: {**record, "text": record["text"].replace(",", ", ", 1)},
}  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_both_find_a_record_that_holds_no_such_roster(tool, made, tmp_path, spoil):
    record = spoil(held(made.old))
    folder = store(tmp_path / "ledger", [chained([start(), record])])
    status, out = tool("receipts", folder, *made.founder)
    assert (status, "seq 1" in out) == (1, True), out
    result = CliRunner().invoke(app, ["ledger", "verify", str(folder)])
    assert result.exit_code == 1
    assert "seq 1" in result.output


def test_keys_come_from_the_newest_roster_of_a_ledger(tool, made, tmp_path):
    folder = store(tmp_path / "ledger", [lines(made, made.old, made.new)])
    status, found = tool.json("keys", folder, *made.founder)
    assert (status, found["digest"]) == (0, rosters.digest(made.new))
    assert found["keys"][SILO] == str(log_key("lung", SILO, made.keys[SILO].entry.log_key))
    again = store(tmp_path / "again", [lines(made, made.new, made.old)])
    _, found = tool.json("keys", again, *made.founder)
    assert found["digest"] == rosters.digest(made.new)
    empty = store(tmp_path / "empty", [chained([start()])])
    assert tool("keys", empty, *made.founder)[0] == 1


def test_a_roster_is_kept_once_and_a_very_large_one_is_not(made, tmp_path, monkeypatch):
    with open_ledger(tmp_path / "ledger") as ledger:
        write_start(ledger, "test", rosters.digest(made.old), "ab" * 32)
        for roster in (made.old, made.old, made.new, made.old):
            assert ledger.keep_roster(roster)
        monkeypatch.setattr(kept_rosters, "MOST_ROSTER", 100)
        assert not ledger.keep_roster(made.forged)
    with open_ledger(tmp_path / "ledger") as ledger:  # as it remembers after a restart
        monkeypatch.undo()
        assert ledger.keep_roster(made.new)
    assert kept_rosters.kept(tmp_path / "ledger") == (made.old, made.new)
    types = [line.record["type"] for line in messages.lines(tmp_path / "ledger")]
    assert types == ["start", "roster.change", "roster.change"]


def test_the_largest_roster_that_is_kept_fits_into_a_line(made):
    """Each quotation mark and backslash takes one character more in a record."""
    text = rosters.encoded(made.old)
    most = kept_rosters.MOST_ROSTER * (1 + (text.count(b'"') + text.count(b"\\")) / len(text))
    assert most < 1024 * 1024 - 1000


def test_the_size_of_a_kept_roster_is_that_of_its_bytes(made, monkeypatch):
    """Names may take four bytes per character, and lines are bounded in bytes."""
    entries = [
        each.model_copy(update={"organisation": "\U00020000" * 128}) for each in made.old.entries
    ]
    roster = made.old.model_copy(update={"entries": tuple(entries)})
    data = rosters.encoded(roster)
    monkeypatch.setattr(kept_rosters, "MOST_ROSTER", len(data) - 1)
    assert len(data.decode()) < len(data) - 1
    assert kept_rosters.record_of(roster) is None
    monkeypatch.setattr(kept_rosters, "MOST_ROSTER", len(data))
    assert kept_rosters.record_of(roster).text == data.decode()
