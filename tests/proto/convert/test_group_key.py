"""A job key's messages cross unchanged, in their sizes, and anything else is refused."""

from dataclasses import replace

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from support import secure_messages as w

from staddle.errors import RefusedError
from staddle.proto import secure_pb2 as pb
from staddle.proto.channel import MAX_MESSAGE_BYTES
from staddle.proto.convert import group_key as m
from staddle.proto.convert.shape import MOST_HASHES
from staddle.security.blind.group_key import KeyContribution, Relayed
from staddle.security.blind.sealing import SEALED_BYTES, Letter, SealedSecret, Sealing
from staddle.security.secagg.spec import MOST_SILOS
from staddle.silo.egress.session import MAX_CONTROL_BYTES

NS = (4, 10, 100, MOST_SILOS)
sealed = st.builds(SealedSecret, w.ids, st.binary(min_size=SEALED_BYTES, max_size=SEALED_BYTES))
contributions = st.builds(
    KeyContribution, st.builds(Sealing, w.ids, w.hashes, w.hashes, w.hashes), w.hashes, w.signatures
)
pieces = w.some(sealed, lambda piece: piece.recipient)
contributeds = st.builds(m.Contributed, w.sessions, w.ids, w.hashes, contributions, pieces)
relayeds = w.some(
    st.builds(Relayed, contributions, st.builds(Letter, sealed, w.proofs)),
    lambda each: each.contribution.sealing.sender,
)


def contribution(silo):
    return KeyContribution(Sealing(silo, w.HASH, w.HASH, w.HASH), w.HASH, w.SIGNATURE)


def longest_contributed(n):
    me, *others = w.names(n)
    pieces = tuple(SealedSecret(other, b"\xff" * SEALED_BYTES) for other in others)
    return m.Contributed(w.SESSION, "j" * 64, w.HASH, contribution(me), pieces)


def longest_told(n):
    me, *others = w.names(n)
    letter = Letter(SealedSecret(me, b"\xff" * SEALED_BYTES), (w.HASH,) * MOST_HASHES)
    return tuple(Relayed(contribution(other), letter) for other in others)


ASKED = m.KeyPoll(w.SESSION, "j" * 64, w.HASH)
ME = w.names(4)[0]


@settings(max_examples=200)
@given(contributeds)
def test_what_is_given_crosses_unchanged(value):
    silo = value.contribution.sealing.sender
    assert m.contributed_from_wire(silo, again(m.contributed_to_wire(value))) == value


@settings(max_examples=200)
@given(relayeds)
def test_what_is_told_crosses_unchanged(value):
    assert m.secagg_delivery_from_wire(again(m.secagg_delivery_to_wire(value))) == value


@given(st.builds(m.KeyPoll, w.sessions, w.ids, w.hashes))
def test_what_is_asked_crosses_unchanged(value):
    assert m.poll_from_wire("a", again(m.poll_to_wire(value))) == value


def again(message):
    return type(message).FromString(message.SerializeToString())


def test_the_sizes_are_those_of_the_docstring():
    told = " ".join(m.__doc__.split())
    given, other = (m.contributed_to_wire(longest_contributed(n)).ByteSize() for n in (1, 2))
    each, base = other - given, 2 * given - other
    one = m.secagg_delivery_to_wire(longest_told(2)).ByteSize()
    assert f"``Contributed`` has at most {base} + {each} n bytes" in told
    assert f"``KeyPoll`` {m.poll_to_wire(ASKED).ByteSize()}, fit for a control message" in told
    assert f"``KeyReply`` {one} (n - 1):" in told
    assert m.poll_to_wire(ASKED).ByteSize() <= MAX_CONTROL_BYTES
    for n in NS:
        given = m.contributed_to_wire(longest_contributed(n)).ByteSize()
        assert given <= base + each * n <= MAX_MESSAGE_BYTES
        reply = m.secagg_delivery_to_wire(longest_told(n)).ByteSize()
        assert reply <= one * (n - 1) <= MAX_MESSAGE_BYTES


def test_printing_shows_no_session():
    for value in (longest_contributed(4), ASKED):
        assert "the session" not in repr(replace(value, session=b"the session"))


def test_the_pieces_and_what_is_told_are_few_and_in_order():
    pieces = longest_contributed(3).pieces
    relayed = longest_told(4)
    for wrong, text in (
        (pieces[::-1], "not ascending"),
        ((*pieces, pieces[-1]), "not ascending"),
        (pieces * MOST_SILOS, "at most 1000 there can be"),
    ):
        with pytest.raises(RefusedError, match=text) as caught:
            m.contributed_from_wire(
                ME, m.contributed_to_wire(replace(longest_contributed(3), pieces=wrong))
            )
        assert (caught.value.peer, caught.value.code) == (ME, "SHARES")
    for wrong, text in (
        (relayed[::-1], "not ascending"),
        ((*relayed, relayed[-1]), "not ascending"),
        (relayed * 2, "6 contributions, at most 4 there can be"),
    ):
        with pytest.raises(RefusedError, match=text) as caught:
            m.secagg_delivery_from_wire(m.secagg_delivery_to_wire(wrong), 4)
        assert (caught.value.peer, caught.value.code) == ("coordinator", "KEYS")


def test_nobody_gives_in_the_name_of_another():
    with pytest.raises(RefusedError, match="in the name of") as caught:
        m.contributed_from_wire("somebody", m.contributed_to_wire(longest_contributed(3)))
    assert (caught.value.peer, caught.value.code) == ("somebody", "KEYS")


# Each field.

LENGTHS = (b"\0" * 31, b"\0" * 33, b"\0" * 47, b"\0" * 49, b"\0" * 63, b"\0" * 65)
CODES = {
    "Contribution": "KEYS", "Sealing": "SHARES", "Sealed": "SHARES", "Letter": "SHARES",
    "KeyReply": "KEYS",
}  # fmt: skip


def fields_of(message, path=()):
    """All fields but lists of messages, at any depth, with the way there."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, Message):
            yield from fields_of(value, (*path, field.name))
        elif field.is_repeated and field.name != "proof":
            yield from fields_of(value[0], (*path, field.name, 0))
        else:
            yield (*path, field.name)


def inside(message, path):
    for step in path:
        message = message[step] if isinstance(step, int) else getattr(message, step)
    return message


READ = {
    "given": (m.contributed_to_wire(longest_contributed(4)),
        lambda message: m.contributed_from_wire(ME, message)),
    "asked": (m.poll_to_wire(ASKED), lambda message: m.poll_from_wire(ME, message)),
    "told": (m.secagg_delivery_to_wire(longest_told(4)), m.secagg_delivery_from_wire),
}  # fmt: skip
EVERY = [
    pytest.param(kind, path, id=f"{kind} {path}")
    for kind, (whole, _) in READ.items()
    for path in fields_of(whole)
]


@pytest.mark.parametrize(("kind", "path"), EVERY)
def test_each_field_is_refused_with_the_code_of_its_step(kind, path):
    whole, read = READ[kind]
    part, name = inside(whole, path[:-1]), path[-1]
    value = getattr(part, name)
    if name == "proof":
        wrong = [[b"\0" * 31], [b"\0" * 33], [w.HASH] * (MOST_HASHES + 1)]
    elif isinstance(value, str):
        wrong = ["", "A", "a\n", "a" * 65, "é"]
    elif name == "generation":
        wrong = [2**53, 2**64 - 1]
    else:
        wrong = [
            b"",
            b"\0" * 65,
            *(each for each in LENGTHS if name != "session" and len(each) != len(value)),
        ]
    for each in wrong:
        changed = again(whole)
        place = inside(changed, path[:-1])
        place.ClearField(name)
        if name == "proof":
            place.proof.extend(each)
        else:
            setattr(place, name, each)
        with pytest.raises(RefusedError) as caught:
            read(changed)
        blamed = "coordinator" if kind == "told" else ME
        assert caught.value.peer == blamed
        assert caught.value.code == CODES.get(part.DESCRIPTOR.name, "MANIFEST")


@pytest.mark.parametrize("kind", READ)
def test_a_field_that_is_not_known_is_refused(kind):
    whole, read = READ[kind]
    read(whole)
    for path in {path[:-1] for path in fields_of(whole)}:
        changed = again(whole)
        inside(changed, path).MergeFromString(b"\xf8\x07\x01")
        with pytest.raises(RefusedError, match="does not know"):
            read(changed)


def test_a_message_without_its_contribution_is_refused():
    for changed, read in (
        (again(READ["given"][0]), READ["given"][1]),
        (again(READ["told"][0]), READ["told"][1]),
    ):
        part = changed if isinstance(changed, pb.Contributed) else changed.relayed[0]
        part.ClearField("contribution")
        with pytest.raises(RefusedError, match="is not an id of a member"):
            read(changed)
