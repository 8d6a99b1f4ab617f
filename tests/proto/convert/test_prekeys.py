import pytest
from support.secure_messages import HASH, SIGNATURE

from staddle.errors import RefusedError
from staddle.proto import secure_pb2 as pb
from staddle.proto.convert.mix import MOST_TOLD, words_from_wire, words_to_wire
from staddle.security.blind.mix_context import Version
from staddle.security.blind.prekeys import Prekey, Word
from staddle.security.blind.sealing import Letter, SealedSecret

PEER = "coordinator"


def word(silo):
    version = Version(silo=silo, round=3, attempt=0, number=7)
    letter = Letter(SealedSecret("me", b"s" * 48, 4), (HASH, HASH))
    return Word(version, HASH, Prekey(8, b"k" * 32, SIGNATURE), letter)


WORDS = (("extractor", word("a")), ("extractor", word("b")), ("other", word("a")))


def read(messages):
    return words_from_wire(PEER, messages)


def test_words_come_back():
    messages = words_to_wire(WORDS)
    found = read([pb.DeliveredPrekey.FromString(each.SerializeToString()) for each in messages])
    assert found == WORDS
    assert read([]) == ()


CHANGES = {
    "no part": (lambda m: m.ClearField("part"), "KEYS"),
    "a long part": (lambda m: setattr(m, "part", "p" * 129), "KEYS"),
    "no silo": (lambda m: setattr(m, "silo", "A"), "KEYS"),
    "a number beyond 2^53": (lambda m: setattr(m, "number", 2**53), "KEYS"),
    "a short root": (lambda m: setattr(m, "root", bytes(31)), "KEYS"),
    "generation 0": (lambda m: setattr(m.prekey, "generation", 0), "KEYS"),
    "a generation beyond 2^53": (lambda m: setattr(m.prekey, "generation", 2**53), "KEYS"),
    "a short key": (lambda m: setattr(m.prekey, "key", bytes(31)), "KEYS"),
    "a long signature": (lambda m: setattr(m.prekey, "signature", bytes(65)), "KEYS"),
    "no prekey": (lambda m: m.ClearField("prekey"), "KEYS"),
    "no letter": (lambda m: m.ClearField("letter"), "SHARES"),
    "a letter to a generation beyond 2^53": (
        lambda m: setattr(m.letter.sealed, "generation", 2**53),
        "SHARES",
    ),
    "a field that is not known": (lambda m: m.MergeFromString(b"\xf8\x07\x01"), "KEYS"),
    "one in the prekey": (lambda m: m.prekey.MergeFromString(b"\xf8\x07\x01"), "KEYS"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_malformed_is_refused(change):
    spoil, code = change
    messages = words_to_wire(WORDS)
    spoil(messages[1])
    with pytest.raises(RefusedError) as caught:
        read(messages)
    assert (caught.value.peer, caught.value.code) == (PEER, code)


def test_each_comes_once_and_in_order_and_not_too_many():
    for wrong in ([WORDS[0], WORDS[0]], [WORDS[1], WORDS[0]], [WORDS[2], WORDS[0]]):
        with pytest.raises(RefusedError, match="not ascending, each once"):
            read(words_to_wire(wrong))
    with pytest.raises(RefusedError, match="1001 prekeys, at most 1000"):
        read(words_to_wire(WORDS[:1]) * (MOST_TOLD + 1))
