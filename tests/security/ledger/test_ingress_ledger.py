"""The coordinator's ledger: durable, one chain over restarts, heads that silos hold."""

import pytest
from support import ledgers as book

from staddle.errors import LocalError, ProofError
from staddle.security.ledger import audit
from staddle.security.ledger.ingress_ledger import ReceivingLedger
from staddle.security.ledger.records import Received
from staddle.security.log import consistency
from staddle.security.log.consistency import Consistency
from staddle.security.log.head import Signer
from staddle.security.log.merkle import EMPTY_ROOT
from staddle.security.log.tree_head import TreeHead

RECEIVED = Received(
    silo="silo-a", job="j1", job_digest=book.HASH, round=3, message=book.message_digest(),
    ledger_seq=4,
    ledger_leaf=book.HASH, checkpoint=bytes(book.signer().sign(0, EMPTY_ROOT)).decode(),
    receipt="5c" * 64,
)  # fmt: skip
PUBLIC = Signer.of(book.FEDERATION, "coordinator", book.OTHER_KEY).public


def opened(folder, key=book.OTHER_KEY):
    return ReceivingLedger.open(folder, "coordinator", book.FEDERATION, key)


def test_records_of_two_lives_are_one_verified_ledger(tmp_path):
    for _ in range(2):
        with opened(tmp_path) as ledger:
            book.write_serving(ledger, "coordinator", "staddle", book.HASH)
            ledger.seal(RECEIVED)
            book.write_delivered(ledger, "silo-a", "j1", book.HASH, 3, book.message_digest())
            book.write_refused(ledger, "silo-a", book.signer().sign(0, EMPTY_ROOT), "w" * 5000)
            book.write_stop(ledger, "asked to stop")
    kinds = ["serving", "received", "delivered", "head.refused", "stop"]
    assert [record["type"] for record in book.stored(tmp_path)] == kinds * 2
    found = audit.verify(tmp_path, key=PUBLIC)
    assert found.ok, found.problems
    assert found.signed


def test_the_head_of_a_receipt_has_its_record_and_grows_from_what_is_held(tmp_path):
    held, heads = None, []
    with opened(tmp_path) as ledger:
        for number in range(5):
            sealed = ledger.seal(RECEIVED)
            proof = Consistency.parse(ledger.growth(held.size if held else 0, sealed.checkpoint))
            held = consistency.verify_from(held, proof, PUBLIC)
            assert held.size == number + 1 == sealed.place.seq + 1
            heads.append(held)
        beyond = Consistency.parse(ledger.growth(99, sealed.checkpoint))
    assert beyond.old_size == 0  # it never had so many: who holds that head sees it
    with pytest.raises(ProofError, match="from 0 records, the old checkpoint has 99"):
        consistency.verify_from(TreeHead(PUBLIC.name, 99, bytes(32)), beyond, PUBLIC)


def test_a_ledger_of_another_key_or_a_broken_one_is_refused(tmp_path):
    with opened(tmp_path) as ledger:
        ledger.seal(RECEIVED)
    with pytest.raises(LocalError, match="signed by none"):
        opened(tmp_path, book.KEY)
    path = next(tmp_path.glob("seg-*.jsonl"))
    path.write_bytes(path.read_bytes().replace(b'"round":3', b'"round":4'))
    with pytest.raises(LocalError):
        opened(tmp_path)
