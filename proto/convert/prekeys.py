"""Prekeys of a Mix in protobuf: beside the word on an upload, and as they are handed down with a delivery.

They are written and refused as the messages of a secure sum are (secagg_messages.py); signatures and proofs are for
security/blind/prekeys.py to check. A ``PrekeyTold`` among n silos has at most 493 + 34 ceil(log2 n) bytes.
"""

from collections.abc import Sequence
from itertools import pairwise

from pydantic import ValidationError

from ...errors import RefusedError
from ...files.documents import MAX_SAFE_INTEGER
from ...security.blind.mix_context import Version
from ...security.blind.prekeys import Prekey, Word
from ...security.faults import Code
from ...security.identity.pairwise_keys import KEY_BYTES
from ...security.log.merkle import HASH_BYTES
from ...security.secagg.spec import MOST_SILOS
from .. import secure_pb2 as pb
from ..field_limits import Bound
from .sealing import letter_from_wire, letter_to_wire
from .secagg_messages import MOST_HASHES, SIGNATURE_BYTES, Sender

MOST_TOLD = MOST_SILOS  # in one delivery
MOST_PART_NAME = 128
BOUND = Bound(12, 2048, {8: Bound(MOST_HASHES + 4, 512)})  # of a PrekeyTold, with a letter in it


def prekey_to_wire(prekey: Prekey) -> pb.Prekey:
    """What a silo signs of it."""
    return pb.Prekey(generation=prekey.generation, key=prekey.key, signature=prekey.signature)


def prekey_from_wire(peer: str, silo: str, message: pb.Prekey) -> Prekey:
    """KEYS."""
    sent = Sender(peer, Code.KEYS)
    known = 0 < message.generation <= MAX_SAFE_INTEGER
    sent.check(known, f"the new prekey of {silo!r} is of generation {message.generation}, of which there is none")
    key = sent.sized(message.key, KEY_BYTES, f"the new prekey of {silo!r}")
    return Prekey(message.generation, key, sent.sized(message.signature, SIGNATURE_BYTES, "the signature over it"))


def words_to_wire(words: Sequence[tuple[str, Word]]) -> list[pb.PrekeyTold]:
    """At the coordinator, by part."""
    return [_word_to_wire(part, word) for part, word in words]


def _word_to_wire(part: str, word: Word) -> pb.PrekeyTold:
    version = word.version
    return pb.PrekeyTold(
        part=part,
        silo=version.silo,
        round=version.round,
        attempt=version.attempt,
        number=version.number,
        root=word.root,
        prekey=prekey_to_wire(word.prekey),
        letter=letter_to_wire(word.letter),
    )


def words_from_wire(peer: str, messages: Sequence[pb.PrekeyTold]) -> tuple[tuple[str, Word], ...]:
    """At the silo: each silo's once a part; RefusedError blames ``peer``."""
    sent = Sender(peer, Code.KEYS)
    sent.few(messages, MOST_TOLD, "prekeys")
    words = tuple(_word_from_wire(peer, message) for message in messages)
    for one, other in pairwise((part, word.version.silo) for part, word in words):
        sent.check(one < other, f"prekeys of {one!r:.200} before {other!r:.200}: not ascending, each once")
    return words


def _word_from_wire(peer: str, message: pb.PrekeyTold) -> tuple[str, Word]:
    sent = Sender(peer, Code.KEYS)
    sent.check(0 < len(message.part) <= MOST_PART_NAME, "brings a prekey beside no part")
    silo = sent.member(message.silo, "a prekey of")
    try:
        version = Version(silo=silo, round=message.round, attempt=message.attempt, number=message.number)
    except ValidationError:
        why = f"a prekey beside upload {message.number} of {silo!r}, which there cannot be"
        raise RefusedError(peer, Code.KEYS, why) from None
    root = sent.sized(message.root, HASH_BYTES, f"the root of what {silo!r} sealed")
    prekey = prekey_from_wire(peer, silo, message.prekey)
    word = Word(version, root, prekey, letter_from_wire(peer, message.letter))
    sent.check(message == _word_to_wire(message.part, word), "has fields that its protocol version does not know")
    return message.part, word
