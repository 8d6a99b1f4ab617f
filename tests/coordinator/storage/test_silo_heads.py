"""The head at an upload's end: it grew from the held one, and ends with the upload's record."""

import pytest
from support.ledgers import KEY, OTHER_KEY

from staddle.coordinator.storage.database import StoredHead
from staddle.coordinator.storage.silo_heads import SiloHeads
from staddle.errors import RefusedError
from staddle.proto import tensor_pb2 as tensor
from staddle.security.ledger.ingress_ledger import ReceivingLedger
from staddle.security.log import note as notes
from staddle.security.log.consistency import Consistency
from staddle.security.log.head import Signer
from staddle.security.log.merkle import Tree, leaf_hash
from staddle.security.log.tree_head import TreeHead


class Entry:
    def __init__(self, key):
        self.log_key = key.public_key().public_bytes_raw().hex()


class Roster(dict):
    federation = "lung"


class Log:
    """A silo's ledger as far as its hashes go."""

    def __init__(self, records=0, word=b"record"):
        self.tree, self.word = Tree(), word
        self.grow(records)

    def grow(self, records):
        for number in range(len(self.tree), len(self.tree) + records):
            self.tree.append(leaf_hash(b"%s %d" % (self.word, number)))
        return self

    def end(self, held, *, size=None, key=KEY, silo="silo-a", **changes):
        size = size or len(self.tree)
        note = Signer.of("lung", silo, key).sign(size, self.tree.root(size))
        proof = Consistency(held, self.tree.consistency_proof(min(held, size), size), note)
        seq = size - 1
        fields = {
            "ledger_seq": seq,
            "ledger_leaf": self.leaf(seq),
            "head": bytes(proof),
            "inclusion": self.tree.inclusion_proof(seq, size),
        }
        return tensor.End(**{**fields, **changes})

    def leaf(self, seq):
        return leaf_hash(b"%s %d" % (self.word, seq))


@pytest.fixture
def heads():
    evidence = []
    found = SiloHeads(Roster({"silo-a": Entry(KEY)}), {}, evidence.append)
    found.evidence = evidence
    return found


def take(heads, end):
    head = heads.check("silo-a", end)
    heads.hold("silo-a", heads.stored("silo-a", head))
    return head


def refused(heads, end, why):
    with pytest.raises(RefusedError, match=why) as caught:
        heads.check("silo-a", end)
    assert (caught.value.code, caught.value.peer) == ("LEDGER", "silo-a")


def test_heads_that_grow_are_taken_one_after_another(heads):
    log = Log(5)
    assert heads.note("silo-a") == b""
    assert take(heads, log.end(0)).checkpoint.size == 5
    log.grow(1)
    take(heads, log.end(5))
    log.grow(70)
    take(heads, log.end(6))
    held = TreeHead.parse(notes.parse(heads.note("silo-a")).text)
    assert (held.size, held.root) == (76, log.tree.root())
    assert heads.evidence == []
    assert heads.others("silo-b", ("silo-a", "silo-b", "silo-c")) == [heads.note("silo-a")]
    assert heads.others("silo-a", ("silo-a", "silo-b")) == []


@pytest.mark.parametrize(
    ("end", "why"),
    [
        # fewer records than before
        (lambda _: Log(4).end(4), "cannot extend one of 6|from 4 records"),
        (lambda _: Log(9, b"other").end(6), "leads to"),  # others
        # as if anew
        (lambda _: Log(9, b"other").end(0), "from 0 records, the old checkpoint has 6"),
        (lambda log: log.end(6), "did not grow"),
    ],
    ids=["cut", "rewritten", "anew", "the same"],
)
def test_a_head_that_does_not_extend_the_one_held_is_refused_and_kept_as_evidence(heads, end, why):
    log = Log(6)
    take(heads, log.end(0))
    held = heads.note("silo-a")
    refused(heads, end(log), why)
    (kept,) = heads.evidence
    assert kept.silo == "silo-a"
    note = notes.parse(kept.checkpoint.encode())
    assert note.signatures[0].name == "staddle.example/lung/silo-a/egress"
    assert "does not extend the one held here" in kept.why
    assert heads.note("silo-a") == held


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head": b""}, "cannot be read"),
        ({"head": b"x" * 400_000}, "cannot be read"),
        ({"ledger_leaf": bytes(32)}, "leads to"),
        ({"ledger_seq": 3}, "inclusion|leads to|too"),
        ({"inclusion": []}, "too short"),
        ({"inclusion": [b"short"]}, "32 bytes"),
    ],
    ids=["no head", "a long head", "another leaf", "another place", "no proof", "no hash"],
)
def test_a_head_whose_proofs_do_not_hold_is_refused(heads, changes, why):
    refused(heads, Log(9).end(0, **changes), why)


@pytest.mark.parametrize("lines", [("x" * 200,), ("x" * 5000,)], ids=["short", "long"])
def test_a_head_with_more_lines_than_a_log_writes_is_refused_however_long(heads, tmp_path, lines):
    """By the ledger that keeps the evidence, too."""
    log = Log(6)
    take(heads, log.end(0))
    with ReceivingLedger.open(tmp_path, "coordinator", "lung", OTHER_KEY) as ledger:
        kept = SiloHeads(heads._roster, dict(heads._held), ledger.append)
        end = log.grow(1).end(6)
        proof = Consistency.parse(end.head)
        text = TreeHead("staddle.example/lung/silo-a/egress", 7, log.tree.root(), lines).text
        signed = notes.Note(text, (notes.sign(text, "staddle.example/lung/silo-a/egress", KEY),))
        end.head = bytes(Consistency(6, proof.hashes, signed))
        refused(kept, end, "or not bare|more than 4096")


def test_a_head_of_another_key_or_silo_is_refused_and_is_evidence_of_nothing(heads):
    take(heads, Log(3).end(0))
    refused(heads, Log(9).end(3, key=OTHER_KEY), "signed by none")
    refused(heads, Log(9).end(3, silo="silo-b"), "signed by none")
    assert heads.evidence == []


def test_a_head_with_more_records_than_the_upload_is_refused(heads):
    log = Log(9)
    end = log.end(0)
    end.ledger_seq, end.ledger_leaf = 7, log.leaf(7)
    end.inclusion[:] = log.tree.inclusion_proof(7, 9)
    refused(heads, end, "checkpoint of 9 records for a record 7")


def test_a_ledger_begins_anew_only_under_a_new_key(heads):
    take(heads, Log(6).end(0))
    anew = SiloHeads(Roster({"silo-a": Entry(OTHER_KEY)}), dict(heads._held), lambda *_: None)
    take(anew, Log(2, b"other").end(0, key=OTHER_KEY))
    refused(
        anew, Log(3, b"third").end(0, key=OTHER_KEY), "from 0 records, the old checkpoint has 2"
    )


def test_a_ledger_that_goes_on_under_a_new_key_must_extend_what_is_held(heads):
    log = Log(6)
    take(heads, log.end(0))
    rotated = SiloHeads(Roster({"silo-a": Entry(OTHER_KEY)}), dict(heads._held), lambda *_: None)
    refused(rotated, Log(9, b"other").end(6, key=OTHER_KEY), "leads to")
    take(rotated, log.grow(3).end(6, key=OTHER_KEY))


def test_what_is_stored_names_the_key_of_the_roster(heads):
    head = heads.check("silo-a", Log(2).end(0))
    assert heads.stored("silo-a", head) == StoredHead(Entry(KEY).log_key, bytes(head.note))
