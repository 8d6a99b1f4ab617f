"""Frames of a tensor stream as bytes: chunks without protobuf's copies, all else by protobuf.

A chunk is ``Frame.chunk``, field 2 of the message (protobuf's encoding guide: length-delimited, tag
0x12): the tag, the length as a varint, the content, nothing behind it. It is written with one copy
and read with none, where protobuf makes two at either end. Any other encoding of a chunk is read
too, the slow way.

A manifest has one header per tensor, an END one digest; neither is decoded if it has more than
``MOST_TENSORS`` (field_limits.py).
"""

from collections.abc import Sequence
from typing import TypeAlias

from ..algorithms.exchange.parts import MOST_TENSORS
from ..security.secagg.spec import MOST_SILOS
from . import tensor_pb2 as pb
from .channel import MAX_MESSAGE_BYTES
from .convert.mix import BOUND as PREKEY
from .convert.mix import MOST_DOCUMENT, MOST_TOLD
from .convert.secagg_messages import MOST_PROOF_BYTES, MOST_SPEC_BYTES
from .convert.shape import MOST_HASHES
from .field_limits import FieldLimit, check_fields

MOST_FIELDS = 4  # of a frame, which has one
# Innermost message first; each bound is above what an honest message has.
LETTER = FieldLimit(MOST_HASHES + 4, 512)  # a sealed seed, and its proof
# of a Mix, with its uploads
ROW = FieldLimit(MOST_SILOS + 8, MOST_DOCUMENT, {4: FieldLimit(4, 4096, {2: LETTER})})
SUM = FieldLimit(MOST_SILOS + 8, MOST_SPEC_BYTES)
PROOF = FieldLimit(2 * MOST_SILOS + 8, MOST_PROOF_BYTES)
BOUNDS = {  # manifest, with a shape in each of its headers, rows, open sums, prekeys, proofs; END
    1: FieldLimit(
        MOST_TENSORS + MOST_TOLD + MOST_SILOS + 16, 4096, {10: ROW, 11: SUM, 12: PREKEY, 13: PROOF}
    ),
    3: FieldLimit(MOST_TENSORS + 128, MAX_MESSAGE_BYTES),
}
TAG = 0x12
LONGEST_VARINT = 5  # bytes of a length below 2^35


class ChunkFrame:
    """A chunk frame: as it crosses, and the content in it.

    ``encoded`` is the whole message Frame; ``content`` is a view of its end, not a copy.
    """

    __slots__ = ("content", "encoded")

    def __init__(self, encoded: bytes, start: int) -> None:
        """``start`` is where the content begins."""
        self.encoded = encoded
        self.content = memoryview(encoded)[start:]

    @classmethod
    def of(cls, pieces: Sequence[bytes | memoryview]) -> "ChunkFrame":
        """A chunk of these bytes, one after another; they are copied."""
        header = bytes((TAG, *_varint(sum(len(piece) for piece in pieces))))
        return cls(b"".join((header, *pieces)), len(header))


Frame: TypeAlias = pb.Frame | ChunkFrame  # a pb.Frame that was decoded here is never a chunk


def encode(frame: Frame) -> bytes:
    """The bytes of a message Frame.

    A chunk is encoded already, so its bytes are not copied.
    """
    return frame.encoded if isinstance(frame, ChunkFrame) else frame.SerializeToString()


def decode(data: bytes) -> Frame:
    """The frame in these bytes; DecodeError for bytes that are none, or are out of bounds.

    Bounds are checked before protobuf decodes anything, so a hostile frame costs no more memory
    than the largest honest one.
    """
    start = _content_start(data)
    if start is not None:
        return ChunkFrame(data, start)
    # Before protobuf makes anything of the bytes: a hostile frame may take forty times its size.
    check_fields(data, MOST_FIELDS, BOUNDS)
    frame = pb.Frame.FromString(data)
    if frame.WhichOneof("body") != "chunk":
        return frame
    # A chunk in another valid encoding is copied into ours, so callers see one kind of chunk.
    return ChunkFrame.of([frame.chunk])


def _varint(number: int) -> list[int]:
    # Seven bits in each byte, the lowest first; the eighth says that another follows.
    groups = []
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return [*groups, number]


def _content_start(data: bytes) -> int | None:
    """Where the content begins of a chunk that is the whole message; None for anything else."""
    if data[:1] != bytes((TAG,)):
        return None
    # A content that does not end with the message is left to protobuf, which judges the rest.
    length = 0
    for index, byte in enumerate(data[1 : 1 + LONGEST_VARINT]):
        length |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            start = index + 2
            return start if start + length == len(data) else None
    return None
