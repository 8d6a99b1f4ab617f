"""A Mix in protobuf: what silos sign of their uploads, and the rows and prekeys delivered to them.

``PaddedWordUpload`` is what a silo sends behind the bytes of an upload; ``Mixed`` is a row in a
delivery's manifest, of uploads or directed; ``DeliveredPrekey`` is in the manifest, too. Each is a
table (shape.py); signatures and proofs are for security/blind/ to check. Among n silos a
``PaddedWordUpload`` has at most 901 + 130 n bytes, a ``DeliveredPrekey`` 493 + 34 ceil(log2 n).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import ValidationError

from ...files.documents import MAX_SAFE_INTEGER
from ...security.blind.mix_context import Version
from ...security.blind.padded_mix import PaddedUpload
from ...security.blind.prekeys import Prekey, Word
from ...security.blind.sealing import Letter, SealedSecret, Sealing
from ...security.faults import Code
from ...security.identity.pairwise_keys import KEY_BYTES
from ...security.log.merkle import HASH_BYTES
from ...security.secagg.linear_tags import TAG_BYTES
from ...security.secagg.spec import MOST_SILOS
from .. import secure_pb2 as pb
from ..field_limits import FieldLimit, check_fields
from .group_key import LETTER, PIECES, SEALING
from .secagg_sent import JOB, JOB_DIGEST, MALFORMED, SESSION
from .shape import (
    MOST_HASHES,
    SIGNATURE_BYTES,
    Known,
    Sender,
    Shape,
    WireField,
    every,
    length_within,
    member,
    members,
    one,
    plain,
    sized,
    within,
)

MOST_TOLD = MOST_SILOS  # prekeys in one delivery
MOST_PART_NAME = 128
# Of a DeliveredPrekey, with a letter in it.
BOUND = FieldLimit(12, 2048, {8: FieldLimit(MOST_HASHES + 4, 512)})


class PartWord(NamedTuple):
    """The word on another silo's newest upload of a part.

    Only its form is checked here; security/blind/prekeys.py checks signatures and proof.
    """

    part: str
    word: Word


# In the order of the tables: once ``number`` is read, all four are known.
VERSION_FIELDS = ("silo", "round", "attempt", "number")


def _upload_number(why: str, path: str) -> WireField:
    """The last of the fields that make a ``Version``; ``why`` has it as ``found``."""

    def read(sent: Sender, found: int, known: Known) -> int:
        # ``Version`` itself holds the ranges of round, attempt and number.
        if not _is_version({**known, "number": found}):
            sent.refuse(why, known, found=found)
        return found

    return WireField(read, path=path)


def _is_version(fields: Known) -> bool:
    try:
        _version(fields)
    except ValidationError:
        return False
    return True


def _version(fields: Known) -> Version:
    return Version(**{name: fields[name] for name in VERSION_FIELDS})


PREKEY = Shape(  # stands in messages that name its silo
    Prekey,
    pb.Prekey,
    Code.KEYS,
    # 0 is the prekey in the contribution to the job's key (security/blind/prekeys.py).
    generation=within(
        1,
        MAX_SAFE_INTEGER,
        "the new prekey of {silo!r} is of generation {found}, of which there is none",
    ),
    key=sized(KEY_BYTES, "the new prekey of {silo!r}"),
    signature=sized(SIGNATURE_BYTES, "the signature over it"),
)


def _part_word(part: str, root: bytes, prekey: Prekey, letter: Letter, **upload: Any) -> PartWord:
    # Silo, round, attempt and number are fields of the message; here they make one ``Version``.
    return PartWord(part, Word(_version(upload), root, prekey, letter))


WORD = Shape(
    _part_word,
    pb.DeliveredPrekey,
    Code.KEYS,
    part=length_within(1, MOST_PART_NAME, "brings a prekey for no part"),
    silo=member("a prekey of", path="word.version.silo"),
    round=plain("word.version.round"),
    attempt=plain("word.version.attempt"),
    number=_upload_number(
        "a prekey for upload {found} of {silo!r}, which there cannot be", "word.version.number"
    ),
    root=sized(HASH_BYTES, "the root of what {silo!r} sealed", path="word.root"),
    prekey=one(PREKEY, path="word.prekey"),
    letter=one(LETTER, path="word.letter"),
)


def words_to_wire(words: Sequence[tuple[str, Word]]) -> list[pb.DeliveredPrekey]:
    """At the coordinator, by part.

    The caller sorts them by part and silo, the order that ``words_from_wire`` requires.
    """
    return [WORD.to_wire(PartWord(part, word)) for part, word in words]


def words_from_wire(
    peer: str, messages: Sequence[pb.DeliveredPrekey]
) -> tuple[tuple[str, Word], ...]:
    """At the silo: each silo's once per part; RefusedError blames ``peer``."""
    sent = Sender(peer, Code.KEYS)
    sent.few(messages, MOST_TOLD, "prekeys")
    # Counted before any is read: each costs a signature and a proof to check later.
    words = tuple(WORD.whole_from_wire(peer, message) for message in messages)
    # One per silo and part: only the newest upload of a part has a word.
    sent.ascending(((part, word.version.silo) for part, word in words), "prekeys", shown=200)
    return words


MOST_DOCUMENT = 1 << 20  # bytes of a row
MOST_FIELDS = 8  # of a message, its entries aside


@dataclass(frozen=True, slots=True)
class PaddedWord:
    """A silo's word on its upload of one part, with its sealed seed and a new prekey.

    ``pieces`` are the seed, sealed to each other silo of the job, by id.
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
    """One other silo's upload in a row, and the recipient's letter with its seed.

    ``padded_mix.check_sent`` checks both; the seed is opened only after the row is admitted.
    """

    upload: PaddedUpload
    letter: Letter


@dataclass(frozen=True, slots=True)
class Mixed:
    """A recipient's row of a part, without its words.

    Document and signature are those of security/blind/mix_row.py. ``tag`` is the weighted sum of
    the summands' tags. ``keep`` is 0, or the share of its own part that a recipient which was away
    keeps when this row is mixed in (``method.Post``); the rows of one part are in the order of
    their rounds.

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


def _upload(
    sha256: bytes, tag: bytes, sealing: Sealing, signature: bytes, **upload: Any
) -> PaddedUpload:
    # As in ``_part_word``: fields of the message make one ``Version``.
    return PaddedUpload(_version(upload), sha256, tag, sealing, signature)


UPLOAD = Shape(  # SHARES for its sealing
    _upload,
    pb.PaddedUpload,
    Code.UPLOAD,
    silo=member("an upload of", path="version.silo"),
    round=plain("version.round"),
    attempt=plain("version.attempt"),
    number=_upload_number(
        "upload {found} of {silo!r} has an invalid round, attempt or number", "version.number"
    ),
    sha256=sized(HASH_BYTES, "the digest of the upload of {silo!r}"),
    tag=sized(TAG_BYTES, "the tag of the upload of {silo!r}"),
    sealing=one(SEALING),
    signature=sized(SIGNATURE_BYTES, "the signature over the upload of {silo!r}"),
)
PADDED = Shape(
    PaddedWord,
    pb.PaddedWordUpload,
    MALFORMED,
    session=SESSION,
    job=JOB,
    job_digest=JOB_DIGEST,
    part=length_within(1, MOST_PART_NAME, "names no part"),
    # In its own name only: whoever an upload names is blamed for its faults.
    upload=one(UPLOAD, own="version.silo", why="gives an upload in the name of {named!r}"),
    pieces=PIECES,
    prekey=one(PREKEY),
)
SUMMAND = Shape(WireSummand, pb.RowSummand, Code.UPLOAD, upload=one(UPLOAD), letter=one(LETTER))
ROW = Shape(
    Mixed,
    pb.MixedRow,
    Code.SPEC,
    part=length_within(1, MOST_PART_NAME, "brings a row of no part"),
    document=length_within(
        0, MOST_DOCUMENT, "brings a row of {length} bytes, at most {high} it can have"
    ),
    # Form only; the recipient checks the share itself (silo/ingress/, ``Method.mail_fault``).
    keep=within(0, 1, "brings a row with keep = {found}, not one of 0 to 1"),
    survivors=members("a survivor of a row", "survivors of a row"),
    signature=sized(SIGNATURE_BYTES, "the signature over a row"),
    # Not sorted here: ``check_uploads`` wants them in the order of the document's shares.
    summands=every(SUMMAND, "uploads in a row"),
    tag=sized(TAG_BYTES, "the tag of a row"),
)


def upload_from_wire(peer: str, message: pb.PaddedUpload) -> PaddedUpload:
    """A silo's signed statement on its upload; RefusedError UPLOAD, or SHARES for its sealing."""
    return UPLOAD.from_wire(peer, message)


def padded_to_wire(padded: PaddedWord) -> pb.PaddedWordUpload:
    """At the silo."""
    made: pb.PaddedWordUpload = PADDED.to_wire(padded)
    return made


def read_padded(data: bytes, silos: int) -> pb.PaddedWordUpload:
    """Bytes as a message; DecodeError where there are none, or of more than so many silos.

    An honest message has one sealed piece per silo and a few fields more.
    """
    check_fields(data, silos + MOST_FIELDS, {})
    return pb.PaddedWordUpload.FromString(data)


def padded_from_wire(silo: str, message: pb.PaddedWordUpload) -> PaddedWord:
    """At the coordinator, from the silo whose session it is; RefusedError blames it.

    Code MANIFEST for session and job, UPLOAD, KEYS or SHARES for the rest; UPLOAD also for an
    upload in another silo's name.
    """
    return PADDED.whole_from_wire(silo, message, silo=silo)


def mixed_to_wire(mixed: Mixed) -> pb.MixedRow:
    """At the coordinator."""
    # One table serves both kinds: a directed row has survivors, every other row has summands.
    made: pb.MixedRow = ROW.to_wire(mixed)
    return made


def rows_from_wire(peer: str, messages: Sequence[pb.MixedRow], most: int) -> tuple[Mixed, ...]:
    """At the silo: no more than ``most`` rows, all that its round can bring.

    RefusedError blames ``peer``.
    """
    # Counted before any is read.
    Sender(peer, MALFORMED).few(messages, most, "rows of a Mix")
    return tuple(ROW.whole_from_wire(peer, message) for message in messages)
