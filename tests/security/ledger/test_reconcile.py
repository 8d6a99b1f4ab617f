"""A silo's ledger beside the coordinator's: agreement, crashes, and alterations."""

import re

import pytest
from support import ledgers as book
from support.ledgers import intend as intend_in

from staddle.errors import LocalError
from staddle.security.ledger import reconcile as reconciling
from staddle.security.ledger.ingress_ledger import ReceivingLedger
from staddle.security.ledger.reconcile import reconcile
from staddle.security.ledger.records import MessageDigest, Received
from staddle.security.log.head import Signer, stored
from staddle.security.log.tree_head import TreeHead

SIZE = book.message_digest().bytes


class World:
    """Both ledgers, with as many uploads and deliveries as are asked for."""

    def __init__(self, folder):
        self.ours, self.theirs = folder / "silo", folder / "coordinator"
        self.silo = book.open_ledger(self.ours)
        book.write_start(self.silo, "staddle", book.HASH, book.HASH)
        self.coordinator = ReceivingLedger.open(
            self.theirs, "coordinator", book.FEDERATION, book.OTHER_KEY
        )
        book.write_serving(self.coordinator, "coordinator", "staddle", book.HASH)

    def intend(self, round_):
        return intend_in(self.silo, round_number=round_)

    def digest(self, ref):
        return book.write_digest(self.silo, ref, book.DIGESTS, book.message_digest())

    def receive(self, round_, sealed, receipt="5c" * 64, **changes):
        fields = {
            "silo": "silo-a", "job": "j1", "job_digest": book.HASH, "round": round_,
            "message": book.message_digest(), "ledger_seq": sealed.place.seq,
            "ledger_leaf": sealed.place.leaf, "checkpoint": bytes(sealed.checkpoint).decode(),
            "receipt": receipt,
        }  # fmt: skip
        self.coordinator.seal(Received(**{**fields, **changes}))
        return receipt

    def upload(self, round_, **changes):
        ref = self.intend(round_)
        sealed = self.digest(ref)
        receipt = self.receive(round_, sealed, **changes)
        book.write_outcome(self.silo, ref, "sent", SIZE, receipt)
        return sealed

    def deliver(self, round_, delivered=True, noted=True):
        message = MessageDigest(bytes=round_ + 1, sha256=book.HASH)
        if delivered:
            book.write_delivered(self.coordinator, "silo-a", "j1", book.HASH, round_, message)
        if noted:
            about = {"job": "j1", "round_number": round_, "purpose": "delivery", "rpc": "/x"}
            book.write_ingress(self.silo, **about, sender=book.PEER, message=message)

    def found(self, roster=None, held=()):
        self.silo.checkpoint()
        return reconcile(self.ours, self.theirs, roster, held)


@pytest.fixture
def world(tmp_path):
    found = World(tmp_path)
    yield found
    found.silo.close()
    found.coordinator.close()


def test_ledgers_that_agree(world):
    for round_ in range(3):
        world.upload(round_)
        world.deliver(round_)
    found = world.found()
    assert (found.silo, found.coordinator) == ("silo-a", "coordinator")
    assert (found.uploads, found.bytes, found.deliveries) == (3, 3 * SIZE, 3)
    assert (found.gaps, found.differences) == ((), ())


def test_masked_uploads_are_compared_like_any(world):
    ref = book.intend_masked(world.silo)
    sealed = book.write_digest(world.silo, ref, (), book.message_digest(book.MASKED_BYTES))
    book.protocol(world.silo, "header")
    receipt = world.receive(3, sealed, message=book.message_digest(book.MASKED_BYTES))
    book.write_outcome(world.silo, ref, "sent", book.MASKED_BYTES, receipt)
    book.open_sum(world.silo)
    found = world.found()
    assert (found.uploads, found.bytes, found.gaps, found.differences) == (
        1, book.MASKED_BYTES, (), (),
    )  # fmt: skip
    ref = book.intend_masked(world.silo, round_number=4)
    world.receive(4, book.write_digest(world.silo, ref, (), book.message_digest(book.MASKED_BYTES)))
    (problem,) = world.found().differences
    assert f"the coordinator received {SIZE} bytes of job 'j1', round 4" in problem
    assert f"has there {book.MASKED_BYTES} bytes" in problem


def test_each_message_of_a_keyed_round_is_compared_by_itself(world):
    """Three of one round and job; what tells them apart is the place of their records."""
    sizes = {
        book.intend_padded: book.PADDED_BYTES,
        book.intend_rotated: book.ROTATED_BYTES,
        book.intend_masked: book.MASKED_BYTES,
    }
    refs = {intent: intent(world.silo) for intent in sizes}
    places = {
        intent: book.write_digest(world.silo, ref, (), book.message_digest(sizes[intent]))
        for intent, ref in refs.items()
    }
    book.protocol(world.silo, "padded")
    for intent in (book.intend_rotated, book.intend_padded):
        receipt = world.receive(3, places[intent], message=book.message_digest(sizes[intent]))
        book.write_outcome(world.silo, refs[intent], "sent", sizes[intent], receipt)
    book.write_outcome(world.silo, refs[book.intend_masked], "unknown", 0)
    book.intend_padded(world.silo, "f7" * 32, 1, round_number=4)
    found = world.found()
    seen = (found.uploads, found.bytes, found.differences)
    assert seen == (2, book.PADDED_BYTES + book.ROTATED_BYTES, ())
    assert [gap.split(": ", 1)[1] for gap in found.gaps] == [
        f"not received ({book.MASKED_BYTES} bytes of job 'j1', round 3, unknown)",
        "cut short, counts as left (job 'j1', round 4, padded part 'extractor')",
    ]
    # another message of this very round
    world.receive(3, places[book.intend_masked], message=book.message_digest(book.PADDED_BYTES))
    (problem,) = world.found().differences
    assert f"has there {book.MASKED_BYTES} bytes of job 'j1', round 3" in problem
    again = book.intend_rotated(world.silo, "f8" * 32, round_number=5)
    book.write_digest(world.silo, again, (), book.message_digest(book.ROTATED_BYTES))
    gaps = [gap.split(": ", 1)[1] for gap in world.found().gaps]
    about = f"{book.ROTATED_BYTES} bytes of job 'j1', round 5, rotated part 'heads'"
    assert f"not received ({about}, without outcome)" in gaps


def test_what_a_crash_or_a_lost_connection_leaves_is_a_gap(world):
    world.intend(0)  # cut short
    unsent = world.intend(1)
    world.digest(unsent)
    book.write_outcome(world.silo, unsent, "unknown", SIZE)  # refused, or cut before END
    lost = world.intend(2)
    world.receive(2, world.digest(lost))  # the receipt was lost
    world.deliver(3, noted=False)
    world.deliver(4, delivered=False)
    found = world.found()
    assert (found.differences, found.uploads) == ((), 1)
    assert sorted(gap.split(": ", 1)[1] for gap in found.gaps) == [
        "cut short, counts as left (job 'j1', round 0)",
        "delivered, and the silo has not noted it",
        "not received (184 bytes of job 'j1', round 1, unknown)",
        "noted by the silo, not by the coordinator",
        "received, and the silo has no receipt (184 bytes of job 'j1', round 2, without outcome)",
    ]


@pytest.mark.parametrize("changes", [
    {"round": 7}, {"job_digest": "cd" * 32},
    {"message": MessageDigest(bytes=SIZE, sha256="cd" * 32)},
    {"message": MessageDigest(bytes=SIZE - 1, sha256=book.HASH)}, {"ledger_leaf": "cd" * 32},
    {"ledger_seq": 1},
])  # fmt: skip
def test_what_was_received_and_the_silo_says_otherwise_is_a_difference(world, changes):
    world.upload(0, **changes)
    differences = "\n".join(world.found().differences)
    assert re.search("^.*the coordinator received (?!no)", differences, re.MULTILINE)
    assert "the silo has a receipt, and the coordinator received no such upload" in differences


def test_a_ledger_that_was_written_anew_after_it_gave_is_a_difference(world):
    world.upload(0)
    before = book.copied(world.ours)
    second = world.upload(1)
    world.silo.close()
    book.put_back(world.ours, before)
    world.silo = book.open_ledger(world.ours)
    world.deliver(5)
    (said,) = [each for each in world.found().differences if "round 1" in each]
    assert f"from record {second.place.seq} of the silo's ledger" in said
    assert "has no such record" in said


def test_another_head_than_the_silos_is_a_difference(world):
    signer = Signer.of(book.FEDERATION, "silo-a", book.KEY)
    sealed = world.upload(0)
    ref = world.intend(1)
    other = world.digest(ref)
    note = signer.sign(other.place.seq + 1, bytes(32))
    world.receive(1, other, checkpoint=bytes(note).decode())
    (said,) = world.found().differences
    assert said.startswith(f"record {other.place.seq}: the silo signed another head")
    assert sealed.place.seq < other.place.seq


@pytest.mark.parametrize("received", [True, False])
def test_a_receipt_that_the_coordinator_did_not_record_is_a_difference(world, received):
    ref = world.intend(0)
    sealed = world.digest(ref)
    if received:
        world.receive(0, sealed)
    book.write_outcome(world.silo, ref, "sent", SIZE, "77" * 64)
    recorded = "is not the one that the coordinator recorded"
    why = recorded if received else "the coordinator received no such upload"
    assert why in world.found().differences[0]


def test_a_refused_head_is_a_difference_unless_it_is_of_this_ledger(world):
    sealed = world.upload(0)
    book.write_refused(
        world.coordinator, "silo-a", sealed.checkpoint, "its proof was from another head"
    )
    found = world.found()
    assert found.differences == ()
    assert found.gaps == ("a head of this ledger was refused: its proof was from another head",)
    other = Signer.of(book.FEDERATION, "silo-a", book.KEY).sign(sealed.place.seq + 1, bytes(32))
    book.write_refused(world.coordinator, "silo-a", other, "it was rolled back")
    (said,) = world.found().differences
    assert "the silo signed a head that the coordinator refused" in said
    assert "it was rolled back" in said


def test_what_was_received_twice_from_one_record_is_a_difference(world):
    sealed = world.upload(0)
    world.receive(0, sealed)
    found = world.found()
    assert found.differences == (
        f"record {sealed.place.seq}: the coordinator's ledger has 2 times that it received it",
    )
    assert (found.uploads, found.bytes) == (1, SIZE)


def test_a_head_that_the_coordinator_lacks(world):
    """A tree head that the silo holds and the coordinator's ledger lacks is a difference."""
    world.upload(0)
    signer = Signer.of(book.FEDERATION, "coordinator", book.OTHER_KEY)
    other = world.theirs.with_name("other")
    log = ReceivingLedger.open(other, "coordinator", book.FEDERATION, book.OTHER_KEY)
    book.write_serving(log, "coordinator", "staddle", book.HASH)
    log.close()
    for note, why in (
        (stored(other), "records were rewritten: silo-a holds"),
        (signer.sign(99, bytes(32)), "records were cut off"),
    ):
        head = TreeHead.parse(note.text)
        (said,) = world.found(held=[head]).differences
        assert said.startswith(f"the coordinator's ledger: {why}")
    world.coordinator.close()
    assert world.found(held=[TreeHead.parse(stored(world.theirs).text)]).differences == ()


@pytest.mark.parametrize("first", [True, False], ids=["before the coordinator's is read", "after"])
def test_ledgers_that_grow_while_they_are_read_agree(world, monkeypatch, first):
    real = reconciling.CoordinatorSide

    def read(*arguments):
        if first:
            world.upload(1)
        found = real(*arguments)
        if not first:
            world.upload(1)
        return found

    world.upload(0)
    monkeypatch.setattr(reconciling, "CoordinatorSide", read)
    assert world.found().differences == ()


def test_what_the_coordinator_has_of_other_silos_is_not_compared(world):
    world.upload(0)
    sealed = world.upload(1)
    world.receive(9, sealed, silo="silo-b")
    book.write_delivered(world.coordinator, "silo-b", "j1", book.HASH, 3, book.message_digest())
    assert (world.found().differences, world.found().gaps) == ((), ())


def test_ledgers_of_others_are_refused(world, tmp_path):
    with pytest.raises(LocalError, match="is not a coordinator's ledger"):
        reconcile(world.ours, world.ours)
    with pytest.raises(LocalError, match="names no silo"):
        reconcile(world.theirs, world.theirs)
