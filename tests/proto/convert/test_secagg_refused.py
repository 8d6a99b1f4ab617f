"""Anything in place of a secure sum's message is refused, with sender and its step's code."""

from dataclasses import replace

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from support import secure_messages as s
from support.any_message import messages

from staddle.errors import RefusedError
from staddle.proto import secure_pb2 as pb
from staddle.proto.convert.secagg_messages import MOST_SPEC_BYTES
from staddle.proto.convert.secagg_received import (
    MOST_NOTES,
    MOST_SHOWN,
    secagg_delivery_from_wire,
    secagg_delivery_to_wire,
)
from staddle.proto.convert.secagg_sent import (
    poll_from_wire,
    poll_to_wire,
    secagg_upload_from_wire,
    secagg_upload_to_wire,
)
from staddle.proto.convert.shape import MOST_GROUPS
from staddle.security.secagg.evidence import Unopened
from staddle.security.secagg.spec import MOST_SILOS

ME = s.names(4)[0]
UNKNOWN = b"\xf8\x07\x01"  # field 127, the number 1
CODES = {  # anything else: MANIFEST
    part: code
    for code, parts in {
        "KEYS": "KeyBundle ReceivingKey UploadedKeys KeyDelivery DeliveredKeys",
        "SHARES": "Dealing Portion Dealt Delivery DeliveredShares SealedShare",
        "COMPLAINT": "Complaint",
        "MISDEALT": "Misdealing HolderShare",
        "UPLOAD": "Header",
        "SURVIVORS": "DeliveredSurvivors",
        "NOTES": "Survival DeliveredNotes",
        "REVEAL": "Revealed Reveal",
        "ABANDON": "Abandon SurvivorsShown",
        "SPEC": "SignedSpec",
        "SUM": "DeliveredResult",
    }.items()
    for part in parts.split()
}
FREE = {"round", "attempt", "had", "length"}  # any number may stand there
LISTS = {"proof": 10, "notes": MOST_NOTES, "shown": MOST_SHOWN}  # the rest: MOST_SILOS
READ = {
    pb.SecureUpload: lambda message: secagg_upload_from_wire(ME, message),
    pb.SecurePoll: lambda message: poll_from_wire(ME, message),
    pb.SecureDelivery: secagg_delivery_from_wire,
}


def whole():
    """One whole message of each kind, four silos in it, two groups tagged."""
    for kind, longest, to_wire in (
        ("given", lambda *args: s.longest_given(*args, products=80), secagg_upload_to_wire),
        ("told", lambda *args: s.longest_told(*args, document=b"{}", share=24, against=2, rounds=2),
            secagg_delivery_to_wire),
    ):  # fmt: skip
        for body, message in longest(4, 2).items():
            yield f"{kind} {body}", to_wire(message)
    yield "asked", poll_to_wire(s.ASKED)


def parts(message, path=()):
    """All messages in a message, with the way there."""
    yield path
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if field.is_repeated:
                for at in range(min(2, len(getattr(message, field.name)))):
                    yield from parts(getattr(message, field.name)[at], (*path, field.name, at))
            elif message.HasField(field.name):
                yield from parts(getattr(message, field.name), (*path, field.name))


def at(message, path):
    for step in path:
        message = message[step] if isinstance(step, int) else getattr(message, step)
    return message


def longer_by(name, times):
    """The last of a list so many times more."""
    return lambda part: getattr(part, name).extend([getattr(part, name)[-1]] * times)


def last_first(several):
    several.insert(0, several.pop())


def faults(part):
    """(field, what is wrong, how to make it so) for each field of a message."""
    for field in part.DESCRIPTOR.fields:
        name, value = field.name, getattr(part, field.name)
        if isinstance(part, pb.Misdealing) and name in ("holder", "key"):
            continue  # in the place of shares: below
        if field.is_repeated:
            most = LISTS.get(name, MOST_SILOS)
            yield name, "at most", longer_by(name, most)
            if name != "proof":
                yield name, "not ascending", longer_by(name, 1)
                yield name, "not ascending", lambda p, n=name: last_first(getattr(p, n))
            else:
                for wrong in (b"\0" * 31, b"\0" * 33):
                    yield name, "bytes", lambda p, w=wrong: p.proof.insert(1, w)
        elif field.type == FieldDescriptor.TYPE_STRING:
            for wrong in ("", "A", "a\n", "a" * 65, "é"):
                yield name, "not an id", lambda p, n=name, w=wrong: setattr(p, n, w)
        elif field.type == FieldDescriptor.TYPE_ENUM:
            for wrong in (0, 18, -1):
                yield name, "which there is not", lambda p, n=name, w=wrong: setattr(p, n, w)
        elif field.type == FieldDescriptor.TYPE_BYTES:
            longer = value + b"\0" * (MOST_SPEC_BYTES if name == "document" else 1)
            shorter = b"" if name in ("document", "session") else value[:-1]
            for wrong in [each for each in (longer, shorter) if each != value]:
                yield name, "bytes", lambda p, n=name, w=wrong: setattr(p, n, w)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            if part.HasField(name):
                yield name, "", lambda p, n=name: p.ClearField(n)
        else:
            assert name in FREE, name
    yield "field 127", "does not know", lambda p: p.MergeFromString(UNKNOWN)


def every_part():
    for kind, message in whole():
        for path in parts(message):
            yield pytest.param(message, path, id=".".join(map(str, (kind, *path))))


def refusals_of(message, path):
    """(field, what the text should say, error) of each fault of one part."""
    for field, why, make in faults(at(message, path)):
        changed = type(message)()
        changed.CopyFrom(message)
        make(at(changed, path))
        assert changed != message
        with pytest.raises(RefusedError) as caught:
            READ[type(message)](changed)
        yield field, why, caught.value


def code_of(message, path, field):
    part = at(message, path).DESCRIPTOR.name
    if field in ("field 127", "code"):
        return "MANIFEST"
    if part == "SignedSpec" and field in ("notes", "shown"):
        return "ABANDON"
    if (part, field) == ("SignedSpec", "proofs"):
        return "MISDEALT"
    if part in ("UploadedKeys", "Misdealing") and field in ("bundle", "dealing"):
        return {"bundle": "KEYS", "dealing": "SHARES"}[field]
    return CODES.get(part, "MANIFEST")


@pytest.mark.parametrize(("message", "path"), list(every_part()))
def test_each_field_is_refused_with_the_code_of_its_step(message, path):
    blamed = "coordinator" if isinstance(message, pb.SecureDelivery) else ME
    for field, why, error in refusals_of(message, path):
        assert (field, error.peer, error.code) == (field, blamed, code_of(message, path, field))
        assert why in error.why


@pytest.mark.parametrize(("change", "why"), [
    ({"key": b"k" * 31}, "31 bytes"), ({"key": b""}, "0 bytes"), ({"holder": ""}, "not an id"),
    ({"holder": "A"}, "not an id"), ({"kind": pb.SHARE_KIND_SELF}, "and with shares"),
    ({"shares": [pb.HolderShare()]}, "and with shares"),
])  # fmt: skip
def test_evidence_with_a_key_has_a_holder_and_no_shares(change, why):
    message = secagg_delivery_to_wire(s.longest_told(4, document=b"{}")["spec"])
    (proof,) = message.spec.proofs
    for field in ("kind", "shares"):
        proof.ClearField(field)
    proof.holder, proof.key = s.names(4)[1], b"k" * 32
    found = secagg_delivery_from_wire(message).body.proofs[0].fault
    assert found == Unopened(s.names(4)[1], b"k" * 32)
    fields = {each.name: getattr(proof, each.name) for each in proof.DESCRIPTOR.fields}
    proof.CopyFrom(pb.Misdealing(**{**fields, **change}))
    with pytest.raises(RefusedError, match=why) as caught:
        secagg_delivery_from_wire(message)
    assert (caught.value.peer, caught.value.code) == ("coordinator", "MISDEALT")


def test_every_message_is_taken_as_it_stands():
    for _, message in whole():
        assert READ[type(message)](message) is not None


@pytest.mark.parametrize(
    "body", ["keys", "shares", "complaint", "header", "survival", "reveal", "abandon"]
)
def test_a_silo_speaks_for_itself_alone(body):
    message = secagg_upload_to_wire(s.longest_given(4)[body])
    with pytest.raises(RefusedError, match=f"in the name of '{ME}'") as caught:
        secagg_upload_from_wire(s.names(4)[1], message)
    part = getattr(message, body).DESCRIPTOR.name
    assert (caught.value.peer, caught.value.code) == (s.names(4)[1], CODES[part])


def test_nothing_comes_without_an_attempt():
    nothing = secagg_delivery_to_wire(None)
    nothing.attempt.CopyFrom(secagg_delivery_to_wire(s.longest_told(4)["end"]).attempt)
    with pytest.raises(RefusedError, match="has no message of it") as caught:
        secagg_delivery_from_wire(nothing)
    assert (caught.value.peer, caught.value.code) == ("coordinator", "MANIFEST")


def test_more_tags_than_there_may_be_groups_are_refused():
    for body, code in (("survivors", "UPLOAD"), ("result", "SUM")):
        assert secagg_delivery_from_wire(
            secagg_delivery_to_wire(s.longest_told(2, MOST_GROUPS)[body])
        )
        with pytest.raises(RefusedError, match="tags of 32776 bytes") as caught:
            secagg_delivery_from_wire(
                secagg_delivery_to_wire(s.longest_told(2, MOST_GROUPS + 1)[body])
            )
        assert (caught.value.peer, caught.value.code) == ("coordinator", code)


def test_a_thousand_silos_are_taken_and_one_more_is_not():
    for body in ("keys", "shares", "survivors", "notes"):
        assert secagg_delivery_from_wire(secagg_delivery_to_wire(s.longest_told(MOST_SILOS)[body]))
        with pytest.raises(RefusedError, match=r"1001 .*, at most 1000"):
            secagg_delivery_from_wire(secagg_delivery_to_wire(s.longest_told(MOST_SILOS + 1)[body]))
    for body in ("shares", "reveal"):
        assert secagg_upload_from_wire(ME, secagg_upload_to_wire(s.longest_given(MOST_SILOS)[body]))
        with pytest.raises(RefusedError, match=r"1001 .*, at most 1000"):
            secagg_upload_from_wire(
                ME, secagg_upload_to_wire(s.longest_given(MOST_SILOS + 1)[body])
            )


# Any bytes, any message.

KINDS = sorted(READ, key=lambda kind: kind.__name__)
TO_WIRE = {
    pb.SecureUpload: secagg_upload_to_wire,
    pb.SecurePoll: poll_to_wire,
    pb.SecureDelivery: secagg_delivery_to_wire,
}


def taken_or_refused(kind, data):
    """DecodeError, RefusedError with code and sender, or a message of which nothing was lost."""
    try:
        message = kind.FromString(data)
        made, refused = READ[kind](message), None
    except DecodeError:
        return
    except RefusedError as error:
        refused = error
    if refused is None:
        assert TO_WIRE[kind](made) == message
        return
    assert refused.peer == ("coordinator" if kind is pb.SecureDelivery else ME)
    assert refused.code in {*CODES.values(), "MANIFEST"}
    assert len(refused.why) < 400


@settings(max_examples=300)
@given(st.sampled_from(KINDS), st.binary(max_size=200))
def test_any_bytes(kind, data):
    taken_or_refused(kind, data)


@settings(max_examples=300)
@given(st.sampled_from(KINDS).flatmap(messages))
def test_any_message(message):
    taken_or_refused(type(message), message.SerializeToString())


@settings(max_examples=500)
@given(st.data())
def test_a_message_with_some_bytes_changed(data):
    value = data.draw(s.givens | s.tolds | s.askeds)
    kind = {
        "SecaggUpload": pb.SecureUpload,
        "SecaggDelivery": pb.SecureDelivery,
        "SecaggPoll": pb.SecurePoll,
    }[type(value).__name__]
    sent = bytearray(TO_WIRE[kind](value).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(0, len(sent)))
        sent[where : where + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    taken_or_refused(kind, bytes(sent))


# Secrets.


def test_no_session_or_share_is_shown():
    value = replace(s.longest_given(4, products=80)["reveal"], session=b"the session of this silo")
    asked = replace(s.ASKED, session=b"the session of this silo")
    shown = repr(secagg_upload_from_wire(ME, secagg_upload_to_wire(value))) + repr(
        poll_from_wire(ME, poll_to_wire(asked))
    )
    secrets = [b"the session of this silo", b"\xfe" * 33, b"\xfd" * 32, b"\xfc" * 80]
    assert not [
        secret for secret in secrets if repr(secret)[2:40] in shown or secret.hex() in shown
    ]


def test_no_refusal_of_a_reveal_shows_a_share():
    message = secagg_upload_to_wire(s.longest_given(4, products=80)["reveal"])
    secrets = [s.SESSION, b"\xfe" * 33, b"\xfd" * 32, b"\xfc" * 80]
    for path in parts(message):
        texts = [str(error) for _, _, error in refusals_of(message, path)]
        assert not [
            x for x in secrets for text in texts if repr(x)[2:40] in text or x.hex()[:40] in text
        ]
