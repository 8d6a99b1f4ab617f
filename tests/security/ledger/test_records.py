"""Which records wait for the next one, and what a record's own constructors normalise."""

from dataclasses import replace
from typing import get_args

import pytest
from support import ledgers as book

from staddle.errors import LocalError
from staddle.security.ledger import records as r
from staddle.security.ledger.fast_decoder import Record
from staddle.security.ledger.ingress_ledger import ReceivingLedger
from staddle.security.log.append_log import AppendLog
from staddle.security.log.tree_head import TreeHead

HEAD = TreeHead("staddle.example/lung/silo-a/egress", 3, bytes(range(32)))


def test_three_types_of_record_wait_for_the_next_one_and_no_other():
    waiting = {model for model in get_args(Record) if not r.is_durable(model.model_construct())}
    assert waiting == {r.OutcomeRecord, r.WitnessRecord, r.DeliveredRecord}


@pytest.fixture
def synced(monkeypatch):
    """Type and durability of each record that is written."""
    found, write = [], AppendLog._append

    def spy(log, record, *, durable):
        found.append((record["type"], durable))
        return write(log, record, durable=durable)

    monkeypatch.setattr(AppendLog, "_append", spy)
    return found


def test_both_ledgers_write_by_that_table(tmp_path, synced):
    with book.open_ledger(tmp_path / "silo") as ledger:
        book.write_start(ledger, "staddle", book.HASH, book.HASH)
        book.write_outcome(ledger, book.intend(ledger), "failed", 0)
        book.write_witness(ledger, "silo-b", TreeHead(HEAD.origin, 1, HEAD.root))
    with ReceivingLedger.open(tmp_path / "ours", "c", "lung", book.KEY) as ledger:
        book.write_serving(ledger, "c", "staddle", book.HASH)
        book.write_delivered(ledger, "silo-a", "j1", book.HASH, 3, book.message_digest())
    assert synced == [
        ("start", True), ("egress.intent", True), ("egress.outcome", False), ("witness", False),
        ("serving", True), ("delivered", False),
    ]  # fmt: skip


def test_a_record_of_another_silo_is_refused_and_nothing_is_written(tmp_path):
    with book.open_ledger(tmp_path) as ledger:
        before = book.copied(tmp_path)
        with pytest.raises(LocalError, match="the record is of silo 'silo-b', this is 'silo-a'"):
            ledger.append(
                r.Start(silo="silo-b", software="staddle", roster=book.HASH, policy=book.HASH)
            )
        assert book.copied(tmp_path) == before
    assert book.stored(tmp_path) == []


@pytest.mark.parametrize(
    ("own", "kept"),
    [((), ()), (("b", "a"), ()), (("a",), ("a",)), (("c", "a"), ("c", "a"))],
    ids=["none", "those of the message", "fewer", "others"],
)
def test_a_tensor_names_readers_where_they_are_not_those_of_its_message(own, kept):
    release = replace(book.RELEASES[0], readers=own, taint="noised")
    found = r.Tensor.of(release, ["a", "b"])
    assert (found.readers, found.bytes, found.shape, found.taint) == (kept, 160, (10, 4), "noised")


def test_what_paid_for_a_message_is_named_once_and_in_order():
    releases = [
        replace(book.RELEASES[0], ledger_ids=(9, 2)),
        replace(book.RELEASES[1], ledger_ids=(9, 5)),
    ]
    assert r.Paid.of("cxr", releases) == r.Paid(dataset="cxr", ids=(2, 5, 9))
    assert r.Paid.of("cxr", book.RELEASES) is None


def test_what_paid_says_whose_noise_it_is_and_in_older_records_it_was_the_silos_own():
    releases = [replace(book.RELEASES[0], ledger_ids=(2,))]
    shared = r.Paid.of("cxr", releases, "shared")
    assert shared == r.Paid(dataset="cxr", ids=(2,), noise="shared")
    older = r.Paid.model_validate_json('{"dataset":"cxr","ids":[2]}')
    assert older == r.Paid.of("cxr", releases) != shared
    assert older.noise == "local"


def test_heads_of_a_log_are_recorded_by_size_and_root():
    spent = r.PrivacyHead.of("cxr", HEAD, epsilon="1", delta="0.1", limit="8")
    held = r.WitnessRecord.of("silo-b", HEAD)
    assert (spent.dataset, spent.size, spent.root) == ("cxr", 3, HEAD.root.hex())
    assert (held.by, held.size, held.root) == ("silo-b", 3, HEAD.root.hex())


def test_evidence_keeps_the_checkpoint_whole_and_as_much_of_the_reason_as_fits():
    note = book.signer().sign(3, HEAD.root)
    refused = r.HeadRefused.of("silo-a", note, "w" * 5000)
    assert (refused.checkpoint.encode(), refused.why) == (bytes(note), "w" * 1000)


@pytest.mark.parametrize(("old", "new"), [("private", "exact"), ("dp", "noised")])
def test_words_of_early_releases_are_read_and_not_written(old, new):
    fields = {"part": "m", "kind": "metric", "name": "w", "dtype": "float32", "shape": ()}
    tensor = r.Tensor(**fields, bytes=4, taint=old)
    assert tensor.taint == new
    assert tensor.model_dump(mode="json")["taint"] == new
    with pytest.raises(ValueError, match="taint"):
        r.Tensor(**fields, bytes=4, taint=f"{old}s")
