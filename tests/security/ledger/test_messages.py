"""The one fold of a ledger: what its records say of messages and sessions, put together."""

import pytest
from support import ledgers as book

from staddle.security.ledger import messages
from staddle.security.ledger.records import PrivacyHead, ProtocolMessage, SumEnd
from staddle.security.log.segments import Reading

NEWER = "cd" * 32


@pytest.fixture
def folded(tmp_path):
    """Two rosters, a message of each fate, and sessions and protocol messages among them."""
    with book.open_ledger(tmp_path) as ledger:
        book.write_start(ledger, "staddle", book.HASH, book.HASH)
        first = book.write_control_open(ledger, "s1", book.PEER, 100, 1000).seq
        sent, failed, silent = book.send(ledger), book.intend(ledger), book.intend(ledger)
        book.write_digest(ledger, silent, book.DIGESTS, book.message_digest())
        book.protocol(ledger, "keys")
        book.write_control_close(ledger, first, 8, 512)
        book.write_start(ledger, "staddle", NEWER, book.HASH)
        running = book.write_control_open(ledger, "s2", book.PEER, 10, 100).seq
        book.protocol(ledger, "shares")
        later = book.send(ledger)
        book.write_outcome(ledger, failed, "failed", 3)
    seqs = {"sent": sent, "failed": failed, "silent": silent, "later": later}
    return messages.fold(tmp_path), seqs, (first, running)


def test_a_message_is_what_its_three_records_say(folded, tmp_path):
    found, seqs, _ = folded
    lines = {line.seq: line for line in Reading(tmp_path)}
    said = {
        name: (message.digested, message.status, message.receipt)
        for name, seq in seqs.items()
        for message in (found.messages[seq],)
    }
    assert said == {
        "sent": (True, "sent", "5c1f"), "failed": (False, "failed", None),
        "silent": (True, "no outcome", None), "later": (True, "sent", "5c1f"),
    }  # fmt: skip
    assert list(found.messages) == sorted(seqs.values())
    digest = found.messages[seqs["silent"]].digest
    assert (digest.leaf, digest.message) == (lines[digest.seq].leaf, book.message_digest())
    assert lines[digest.seq].record["ref"] == seqs["silent"]


def test_a_digest_is_under_the_roster_of_the_start_before_it(folded):
    found, seqs, _ = folded
    assert found.messages[seqs["sent"]].digest.roster == book.HASH
    assert found.messages[seqs["later"]].digest.roster == found.roster == NEWER


def test_what_is_small_comes_in_the_order_in_which_it_was_over(folded):
    found, _, (first, running) = folded
    seen = [(s.seq, s.totals.bytes, s.totals.assumed) for s in found.sessions.values()]
    assert seen == [(first, 512, 0), (running, 0, 100)]
    keys, shares = found.protocol
    assert [keys.record.kind, shares.record.kind] == ["keys", "shares"]
    assert found.ended == [keys, found.sessions[first], shares]


def test_records_of_a_type_with_their_lines(tmp_path):
    with book.open_ledger(tmp_path) as ledger:
        book.spend(ledger, 3, "0.5")
        book.protocol(ledger, "keys")
        book.end_sum(ledger)
        book.spend(ledger, 5, "1.5")
    heads = messages.of_type(tmp_path, PrivacyHead)
    assert [(line.seq, head.epsilon) for line, head in heads] == [(0, "0.5"), (3, "1.5")]
    sums = messages.of_type(tmp_path, ProtocolMessage, SumEnd)
    assert [line.seq for line, _ in sums] == [1, 2]
