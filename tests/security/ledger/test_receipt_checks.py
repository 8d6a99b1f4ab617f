"""The coordinator's receipts in the writer's own ledger (more wrong: test_verify_roster.py)."""

import pytest
from support.ledgers import FEDERATION, HASH, open_ledger, write_outcome, write_start
from support.report_ledgers import contribute

from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.ledger import messages, receipt_checks
from staddle.security.ledger.receipt import Receipt
from staddle.security.ledger.records import Peer

MEMBERS = {
    "f": Role.FOUNDER, "coordinator": Role.COORDINATOR, "silo-a": Role.SILO, "silo-b": Role.SILO,
}  # fmt: skip


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    for member, role in MEMBERS.items():
        create_keys(folder / member, member, role, "Org")
    return {member: load_keys(folder / member) for member in MEMBERS}


@pytest.fixture
def world(keys, tmp_path):
    """A ledger that begins under a roster, and what is given under it with its receipts."""

    class World:
        def __init__(self):
            self.old = rosters.new(FEDERATION, [keys["f"].entry], 1)
            for member in ("coordinator", "silo-a", "silo-b"):
                self.old = rosters.add(self.old, keys[member].entry)
            self.new = rosters.remove(self.old, "silo-b")
            self.peer = Peer(id="coordinator", spki=keys["coordinator"].entry.spki_sha256)
            self.folder = tmp_path / "ledger"
            self.ledger = open_ledger(self.folder)

        def start(self, roster):
            self.roster = roster
            write_start(self.ledger, "staddle", rosters.digest(roster), HASH)

        def contribute(self, number, signer="coordinator", status="sent", **changes):
            """One message and its receipt with these fields changed; its seq."""
            ref = contribute(self.ledger, round_number=number, status="silent", recipient=self.peer)
            (message,) = (each for each in self.ledger.unsettled if each.seq == ref)
            fields = {
                "federation": FEDERATION,
                "members": rosters.members_digest(self.roster, ("silo-a",)), "silo": "silo-a",
                "job": HASH, "round": number, "size": message.digest.message.bytes,
                "sha256": message.digest.message.sha256, "ledger_seq": message.place.seq,
                "ledger_leaf": message.place.leaf,
                "ledger_root": self.ledger.root(message.place.seq + 1).hex(), **changes,
            }  # fmt: skip
            receipt = Receipt(**fields).sign(keys[signer]).hex()
            write_outcome(self.ledger, ref, status, message.intent.message.bytes, receipt)
            return ref

        def check(self, *given):
            self.ledger.close()
            return receipt_checks.check(messages.lines(self.folder), given)

    made = World()
    yield made
    made.ledger.close()


def test_each_receipt_is_checked_under_the_roster_of_its_time(world):
    world.start(world.old)
    first = world.contribute(0)
    world.start(world.new)
    second = world.contribute(1, status="unknown")
    contribute(world.ledger, round_number=2, receipt=None)
    contribute(world.ledger, round_number=3, status="failed")
    contribute(world.ledger, round_number=4, status="cut")
    found = world.check(world.new, world.old)
    assert (found.good, found.without, found.unchecked) == ({first, second}, 1, 0)
    assert found.problems == []
    assert found.summary == "2 receipts hold; 1 messages that were sent have none"
    found = world.check(world.new)
    assert (found.good, found.without, found.unchecked, found.problems) == ({second}, 1, 1, [])
    assert found.summary.endswith("have none; 1 are under rosters that were not given")
    assert world.check().unchecked == 2


def test_a_receipt_for_another_message_or_by_another_is_a_problem(world):
    world.start(world.old)
    good = world.contribute(0)
    world.contribute(1, signer="silo-b")
    world.contribute(2, round=1)
    world.contribute(3, ledger_seq=2)
    world.contribute(4, members=rosters.members_digest(world.old, ("silo-b",)))
    found = world.check(world.old)
    assert found.good == {good}
    assert found.problems == [
        f"the receipt at seq {seq} is not what 'coordinator' signs for the digest at seq {seq - 1}"
        for seq in (6, 9, 12, 15)
    ]


def test_a_receipt_of_who_is_not_the_coordinator_or_for_what_was_cut_is_a_problem(world):
    world.start(world.old)
    world.peer = Peer(id="coordinator", spki=HASH)
    world.contribute(0)
    world.peer = Peer(id="silo-b", spki=HASH)
    world.contribute(1)
    ref = contribute(world.ledger, round_number=2, status="cut")
    write_outcome(world.ledger, ref, "unknown", 0, "00" * 64)
    first, second, third = world.check(world.old).problems
    said = "at seq 3 is for a message to 'coordinator', who is not the coordinator with its TLS key"
    assert said in first
    assert "at seq 6 is for a message to 'silo-b'" in second
    assert "at seq 8 is for a message without digest" in third
