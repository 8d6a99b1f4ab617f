"""What is kept of an upload that is accepted."""

from types import SimpleNamespace

from support.ledgers import KEY

from staddle.commands.federation import local_federation
from staddle.coordinator.rounds.machine import JobState
from staddle.coordinator.storage.database import Database, Submission
from staddle.coordinator.storage.receiving import Receiving, Taken
from staddle.coordinator.storage.silo_heads import Head
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys
from staddle.security.ledger.ingress_ledger import ReceivingLedger
from staddle.security.log import note as notes
from staddle.security.log.head import Signer
from staddle.security.log.tree_head import TreeHead


def test_the_head_of_our_own_ledger_is_kept_with_each_upload(tmp_path):
    """Else a ledger that is put back would not be missed."""
    local_federation.make(tmp_path / "federation", ["silo-a"])
    roster = rosters.load(tmp_path / "federation" / "roster.json")
    keys = load_keys(tmp_path / "federation" / "coordinator" / "keys")
    own, job = keys.entry, SimpleNamespace(name="j", digest="aa" * 32)
    note = Signer.of(roster.federation, "silo-a", KEY).sign(1, bytes(32))
    head = Head(note, TreeHead.parse(note.text))
    database = Database(tmp_path / "coordinator.sqlite")
    with ReceivingLedger.open(tmp_path / "ledger", own.id, roster.federation, keys.log) as ledger:
        receiving = Receiving(roster, keys, database, ledger)
        with database.transaction():
            database.add_job(b"{}", JobState("j", ("silo-a",), 2, 1), {})
        for round_ in (0, 1):
            given = Submission(round_, "silo-a", "file", 1, "ab" * 32, 0, "cd" * 32, bytes(64))
            with database.transaction():
                receiving.record(Taken(given, job, head, 0))
            kept = database.heads()[own.id]
            assert kept.log_key == own.log_key
            held = TreeHead.parse(notes.parse(kept.note).text)
            assert held.size == round_ + 1
    database.close()
    # the very head of what is on the disk
    ReceivingLedger.open(tmp_path / "ledger", own.id, roster.federation, keys.log, held).close()
