"""The tables of messages: every kind of field, and a table that does not fit its schema."""

from dataclasses import dataclass

import pytest
from support.refusals import blamed

from staddle.errors import LocalError
from staddle.proto import secure_pb2 as pb
from staddle.proto.convert import shape as t
from staddle.security.faults import Code
from staddle.security.secagg.silo_events import SendSurvival


@dataclass(frozen=True)
class Note:
    silo: str
    signature: bytes


@dataclass(frozen=True)
class Notes:
    survivals: tuple[Note, ...]


FIELDS = {"silo": t.member("a note of"), "signature": t.sized(4, "the note of {silo!r}")}
NOTE = t.Shape(Note, pb.Survival, Code.NOTES, **FIELDS)
NOTES = t.Shape(Notes, pb.DeliveredNotes, Code.SUM, survivals=t.each(NOTE, "silo", "notes", most=2))
SENT = t.Sender("peer", "CODE")


def note(silo="a", signature=b"1234"):
    return pb.Survival(silo=silo, signature=signature)


def test_a_message_is_read_and_written_as_its_table_says():
    message = pb.DeliveredNotes(survivals=[note("a"), note("b")])
    value = Notes((Note("a", b"1234"), Note("b", b"1234")))
    assert NOTES.from_wire("peer", message) == value
    assert NOTES.to_wire(value) == message


@pytest.mark.parametrize(("messages", "fault"), [
    ([note("A")], ("NOTES", "a note of 'A' is not an id of a member")),
    ([note("a", b"1")], ("NOTES", "the note of 'a' has 1 bytes, not 4")),
    ([note("a"), note("a")], ("SUM", "notes of 'a' before 'a': not ascending, each once")),
    ([note("a"), note("b"), note("c")], ("SUM", "3 notes, at most 2 there can be")),
])  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_code_of_its_own_table(messages, fault):
    message = pb.DeliveredNotes(survivals=messages)
    assert blamed(NOTES.from_wire, "peer", message) == ("peer", *fault)


def test_a_long_id_is_cut_in_the_text():
    assert blamed(NOTE.from_wire, "peer", note("a" * 99))[2].count("a") < 80


def test_a_set_may_have_a_code_of_its_own():
    field = t.each(NOTE, "silo", "notes", code="OWN")
    assert blamed(field.read, SENT, [note("b"), note("a")], {})[1] == "OWN"


def test_a_text_may_hold_braces():
    assert blamed(NOTE.from_wire, "peer", note("{silo}"))[2].startswith("a note of '{silo}'")


def test_a_table_has_exactly_the_fields_of_its_schema():
    with pytest.raises(LocalError, match="Survival: its table and its schema differ in signature"):
        t.Shape(Note, pb.Survival, Code.NOTES, silo=t.member("a note of"))
    with pytest.raises(LocalError, match="Survival: its table and its schema differ in round"):
        t.Shape(Note, pb.Survival, Code.NOTES, **FIELDS, round=t.plain())


def test_a_whole_message_has_no_field_that_the_table_lacks():
    message = pb.Survival.FromString(note().SerializeToString() + b"\x78\x01")  # field 15
    assert NOTE.from_wire("peer", message) == Note("a", b"1234")
    why = "has fields that its protocol version does not know"
    assert blamed(NOTE.whole_from_wire, "peer", message) == ("peer", "NOTES", why)


def test_a_silo_speaks_for_itself():
    field = t.one(NOTE, own="silo")
    assert field.read(t.Sender("a", "CODE"), note("a"), {}) == Note("a", b"1234")
    why = "gives a message in the name of 'a'"
    assert blamed(field.read, SENT, note("a"), {}) == ("peer", "NOTES", why)


@pytest.mark.parametrize(("field", "good", "bad", "why"), [
    (t.members("a silo", "silos"), ["a", "b"], ["a", ""], "a silo '' is not an id of a member"),
    (t.members("a silo", "silos"), [], ["a"] * 1001, "1001 silos, at most 1000 there can be"),
    (t.within(1, 9, "is {found}"), 9, 10, "is 10"),
    (t.within(0, 1, "is {found}"), 0.5, float("nan"), "is nan"),
    (t.length_within(1, 2, "{length}, {low} to {high}"), b"12", b"", "0, 1 to 2"),
    (t.tags("it"), bytes(16), bytes(7), "it has tags of 7 bytes, not 8 for each of 0 to 4096"),
    (t.numbers(16, "it"), bytes(16), bytes(24), "it has 24 bytes, not 8 per number"),
    (t.proof("a hash"), [bytes(32)], [bytes(31)], "a hash has 31 bytes, not 32"),
    (t.proof("a hash"), [], [bytes(32)] * 11, "11 hashes of a proof, at most 10 there can be"),
    (t.every(NOTE, "notes"), [note("b")], [note("")], "a note of '' is not an id of a member"),
])  # fmt: skip
def test_a_field_takes_what_fits_and_refuses_all_else(field, good, bad, why):
    assert field.read(SENT, good, {}) is not None
    assert blamed(field.read, SENT, bad, {})[2] == why


def test_a_coded_field_has_a_value_of_ours_by_its_number():
    field = t.coded({b"self": 1, b"pair": 2}, "kind {found}")
    assert field.read(SENT, field.write(b"pair"), {}) == b"pair"
    assert blamed(field.read, SENT, 3, {})[2] == "kind 3"


def test_a_body_is_found_by_the_type_of_its_value():
    body = t.OneOf("holds nothing", survival=(Note, t.one(NOTE)))
    message = pb.SecureUpload(**body.to_wire(Note("a", b"1234")))
    assert message.survival == note()
    assert body.from_wire(SENT, message) == Note("a", b"1234")
    wrapped = t.OneOf("holds nothing", survival=(SendSurvival, t.one(NOTE, path="survival")))
    assert wrapped.to_wire(SendSurvival(Note("a", b"1234"))) == body.to_wire(Note("a", b"1234"))
    assert wrapped.from_wire(SENT, message) == SendSurvival(Note("a", b"1234"))
    for other in (pb.SecureUpload(), pb.SecureUpload(end=pb.SecureEnd())):
        assert blamed(body.from_wire, SENT, other) == ("peer", "CODE", "holds nothing")
