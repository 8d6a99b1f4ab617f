"""A Mix in protobuf: what a silo signs of its one upload, and the rows that come down, of uploads
or directed.

``PaddedWordUpload`` is what a silo gives behind the bytes of an upload; ``Mixed`` is a row in a
delivery's manifest. They are written and refused as the messages of a secure sum are
(secagg_messages.py). A ``PaddedWordUpload`` among n silos has at most 901 + 130 n bytes. Prekeys as
they are handed down stand in mix.py.

Prekeys of a Mix in protobuf: beside the word on an upload, and as they are handed down with a
delivery.

They are written and refused as the messages of a secure sum are (secagg_messages.py); signatures
and proofs are for security/blind/prekeys.py to check. A ``DeliveredPrekey`` among n silos has at
most 493 + 34 ceil(log2 n) bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pydantic import ValidationError

from ...errors import RefusedError
from ...files.documents import MAX_SAFE_INTEGER
from ...security.blind.mix_context import Version
from ...security.blind.padded_mix import PaddedUpload
from ...security.blind.prekeys import Prekey, Word
from ...security.blind.sealing import Letter, SealedSecret
from ...security.faults import Code
from ...security.identity.pairwise_keys import KEY_BYTES
from ...security.log.merkle import HASH_BYTES
from ...security.secagg.linear_tags import TAG_BYTES
from ...security.secagg.spec import MOST_SILOS
from .. import secure_pb2 as pb
from ..field_limits import FieldLimit, check_fields
from .group_key import (
    letter_from_wire,
    letter_to_wire,
    pieces_from_wire,
    sealed_to_wire,
    sealing_from_wire,
    sealing_to_wire,
)
from .secagg_messages import MOST_HASHES, SIGNATURE_BYTES, Sender
from .secagg_sent import ENVELOPE, MOST_SESSION_BYTES

MOST_TOLD = MOST_SILOS  # in one delivery
MOST_PART_NAME = 128
# of a DeliveredPrekey, with a letter in it
BOUND = FieldLimit(12, 2048, {8: FieldLimit(MOST_HASHES + 4, 512)})


def prekey_to_wire(prekey: Prekey) -> pb.Prekey:
    """What a silo signs of it."""
    return pb.Prekey(generation=prekey.generation, key=prekey.key, signature=prekey.signature)


def prekey_from_wire(peer: str, silo: str, message: pb.Prekey) -> Prekey:
    """KEYS."""
    sent = Sender(peer, Code.KEYS)
    known = 0 < message.generation <= MAX_SAFE_INTEGER
    sent.check(
        known,
        f"the new prekey of {silo!r} is of generation {message.generation}, of which there is none",
    )
    key = sent.sized(message.key, KEY_BYTES, f"the new prekey of {silo!r}")
    return Prekey(
        message.generation,
        key,
        sent.sized(message.signature, SIGNATURE_BYTES, "the signature over it"),
    )


def words_to_wire(words: Sequence[tuple[str, Word]]) -> list[pb.DeliveredPrekey]:
    """At the coordinator, by part."""
    return [_word_to_wire(part, word) for part, word in words]


def _word_to_wire(part: str, word: Word) -> pb.DeliveredPrekey:
    version = word.version
    return pb.DeliveredPrekey(
        part=part,
        silo=version.silo,
        round=version.round,
        attempt=version.attempt,
        number=version.number,
        root=word.root,
        prekey=prekey_to_wire(word.prekey),
        letter=letter_to_wire(word.letter),
    )


def words_from_wire(
    peer: str, messages: Sequence[pb.DeliveredPrekey]
) -> tuple[tuple[str, Word], ...]:
    """At the silo: each silo's once a part; RefusedError blames ``peer``."""
    sent = Sender(peer, Code.KEYS)
    sent.few(messages, MOST_TOLD, "prekeys")
    words = tuple(_word_from_wire(peer, message) for message in messages)
    for one, other in pairwise((part, word.version.silo) for part, word in words):
        sent.check(
            one < other, f"prekeys of {one!r:.200} before {other!r:.200}: not ascending, each once"
        )
    return words


def _word_from_wire(peer: str, message: pb.DeliveredPrekey) -> tuple[str, Word]:
    sent = Sender(peer, Code.KEYS)
    sent.check(0 < len(message.part) <= MOST_PART_NAME, "brings a prekey beside no part")
    silo = sent.member(message.silo, "a prekey of")
    try:
        version = Version(
            silo=silo, round=message.round, attempt=message.attempt, number=message.number
        )
    except ValidationError:
        why = f"a prekey beside upload {message.number} of {silo!r}, which there cannot be"
        raise RefusedError(peer, Code.KEYS, why) from None
    root = sent.sized(message.root, HASH_BYTES, f"the root of what {silo!r} sealed")
    prekey = prekey_from_wire(peer, silo, message.prekey)
    word = Word(version, root, prekey, letter_from_wire(peer, message.letter))
    sent.check(
        message == _word_to_wire(message.part, word),
        "has fields that its protocol version does not know",
    )
    return message.part, word


MOST_DOCUMENT = 1 << 20  # bytes of a row
MOST_FIELDS = 8  # of a message, its entries aside


@dataclass(frozen=True, slots=True)
class PaddedWord:
    """A silo's word on its upload of one part, the seed sealed to each other silo of the job by id,
    a new prekey.
    """

    session: bytes = field(repr=False)
    job: str
    job_digest: bytes
    part: str
    upload: PaddedUpload
    pieces: tuple[SealedSecret, ...]
    prekey: Prekey


@dataclass(frozen=True, slots=True)
class WireSummand:
    """One other silo's upload in a row, and the recipient's letter with its seed."""

    upload: PaddedUpload
    letter: Letter


@dataclass(frozen=True, slots=True)
class Mixed:
    """A recipient's row of a part, but for its words: document and signature as
    security/blind/mix_row.py has them.

    ``tag`` is the weighted sum of the summands' tags. ``keep`` is 0, or what a recipient that was
    away keeps of its own when this row is mixed in (``method.Post``); the rows of one part are in
    the order of their rounds.

    A directed row has ``survivors`` in place of summands, and the document of its sum
    (security/blind/directed_mix.py).
    """

    part: str
    document: bytes
    signature: bytes
    summands: tuple[WireSummand, ...]
    tag: bytes
    keep: float = 0.0
    survivors: tuple[str, ...] = ()


def upload_to_wire(upload: PaddedUpload) -> pb.PaddedUpload:
    """What a silo signs of an upload."""
    version = upload.version
    return pb.PaddedUpload(
        silo=version.silo,
        round=version.round,
        attempt=version.attempt,
        number=version.number,
        sha256=upload.sha256,
        tag=upload.tag,
        sealing=sealing_to_wire(upload.sealing),
        signature=upload.signature,
    )


def upload_from_wire(peer: str, message: pb.PaddedUpload) -> PaddedUpload:
    """UPLOAD, or SHARES for its sealing."""
    sent = Sender(peer, Code.UPLOAD)
    silo = sent.member(message.silo, "an upload of")
    try:
        version = Version(
            silo=silo, round=message.round, attempt=message.attempt, number=message.number
        )
    except ValidationError:
        raise RefusedError(
            peer,
            Code.UPLOAD,
            f"upload {message.number} of {silo!r} has an invalid round, attempt or number",
        ) from None
    return PaddedUpload(
        version,
        sent.sized(message.sha256, HASH_BYTES, f"the digest of the upload of {silo!r}"),
        sent.sized(message.tag, TAG_BYTES, f"the tag of the upload of {silo!r}"),
        sealing_from_wire(peer, message.sealing),
        sent.sized(
            message.signature, SIGNATURE_BYTES, f"the signature over the upload of {silo!r}"
        ),
    )


def padded_to_wire(padded: PaddedWord) -> pb.PaddedWordUpload:
    """At the silo."""
    return pb.PaddedWordUpload(
        session=padded.session,
        job=padded.job,
        job_digest=padded.job_digest,
        part=padded.part,
        upload=upload_to_wire(padded.upload),
        pieces=[sealed_to_wire(piece) for piece in padded.pieces],
        prekey=prekey_to_wire(padded.prekey),
    )


def read_padded(data: bytes, silos: int) -> pb.PaddedWordUpload:
    """Bytes as a message; DecodeError where there are none, or of more than so many silos."""
    check_fields(data, silos + MOST_FIELDS, {})
    return pb.PaddedWordUpload.FromString(data)


def padded_from_wire(silo: str, message: pb.PaddedWordUpload) -> PaddedWord:
    """At the coordinator, from the silo whose session it is; RefusedError blames it."""
    sent = Sender(silo, ENVELOPE)
    # (1) It names a session, a job and a part.
    size = len(message.session)
    sent.check(
        0 < size <= MOST_SESSION_BYTES,
        f"a session of {size} bytes, 1 to {MOST_SESSION_BYTES} it can have",
    )
    job = sent.member(message.job, "the job")
    digest = sent.sized(message.job_digest, HASH_BYTES, "the digest of the job")
    sent.check(0 < len(message.part) <= MOST_PART_NAME, "names no part")
    # (2) What it holds is well formed, and in the silo's own name.
    upload = upload_from_wire(silo, message.upload)
    named = upload.version.silo
    Sender(silo, Code.UPLOAD).check(named == silo, f"gives an upload in the name of {named!r}")
    pieces, prekey = (
        pieces_from_wire(silo, message.pieces),
        prekey_from_wire(silo, named, message.prekey),
    )
    padded = PaddedWord(message.session, job, digest, message.part, upload, pieces, prekey)
    # (3) It holds nothing else.
    sent.check(
        message == padded_to_wire(padded), "has fields that its protocol version does not know"
    )
    return padded


def mixed_to_wire(mixed: Mixed) -> pb.MixedRow:
    """At the coordinator."""
    summands = [
        pb.RowSummand(upload=upload_to_wire(each.upload), letter=letter_to_wire(each.letter))
        for each in mixed.summands
    ]
    return pb.MixedRow(
        part=mixed.part,
        document=mixed.document,
        signature=mixed.signature,
        summands=summands,
        tag=mixed.tag,
        keep=mixed.keep,
        survivors=mixed.survivors,
    )


def rows_from_wire(peer: str, messages: Sequence[pb.MixedRow], most: int) -> tuple[Mixed, ...]:
    """At the silo: no more than ``most`` rows, all that its round can bring.

    RefusedError blames ``peer``.
    """
    Sender(peer, ENVELOPE).few(messages, most, "rows of a Mix")
    return tuple(_mixed_from_wire(peer, message) for message in messages)


def _mixed_from_wire(peer: str, message: pb.MixedRow) -> Mixed:
    sent = Sender(peer, Code.SPEC)
    sent.check(0 < len(message.part) <= MOST_PART_NAME, "brings a row of no part")
    size = len(message.document)
    sent.check(
        size <= MOST_DOCUMENT, f"brings a row of {size} bytes, at most {MOST_DOCUMENT} it can have"
    )
    keep = message.keep
    sent.check(
        math.isfinite(keep) and 0 <= keep <= 1,
        f"brings a row with keep = {keep}, not one of 0 to 1",
    )
    sent.few(message.summands, MOST_SILOS, "uploads in a row")
    sent.few(message.survivors, MOST_SILOS, "survivors of a row")
    mixed = Mixed(
        message.part,
        message.document,
        sent.sized(message.signature, SIGNATURE_BYTES, "the signature over a row"),
        tuple(_summand_from_wire(peer, each) for each in message.summands),
        sent.sized(message.tag, TAG_BYTES, "the tag of a row"),
        keep,
        tuple(sent.member(silo, "a survivor of a row") for silo in message.survivors),
    )
    sent.check(
        message == mixed_to_wire(mixed), "has fields that its protocol version does not know"
    )
    return mixed


def _summand_from_wire(peer: str, message: pb.RowSummand) -> WireSummand:
    return WireSummand(
        upload_from_wire(peer, message.upload), letter_from_wire(peer, message.letter)
    )
