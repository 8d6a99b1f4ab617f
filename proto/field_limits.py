"""How many fields a message may have, counted in its bytes before protobuf makes anything of them.

An empty entry of a repeated field takes two bytes to send and about 80 to hold: 4 MiB of them are
170 MB. The walk goes field by field, into those fields that have bounds of their own. It refuses a
message at the first field that is one too many, or longer than in an honest message. So a hostile
message costs no more than an honest one of the same federation.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from google.protobuf.message import DecodeError

# Ten groups of seven bits hold protobuf's longest number, which has 64 bits.
MOST_VARINT = 10  # bytes
FIXED_BYTES = {1: 8, 5: 4}  # wire types of numbers of 64 and 32 bits
MOST_IN_ALL = 1 << 17  # fields of one message, with those in its fields


NONE: "Bounds" = MappingProxyType({})


class FieldLimit(NamedTuple):
    """Bounds of a field that is a message.

    Most fields in it, most bytes of one of them, and the bounds of those that are messages.
    """

    most: int
    longest: int
    inner: "Bounds" = NONE


Bounds: TypeAlias = Mapping[int, FieldLimit]  # number of a field that is a message


def check_fields(data: bytes, most: int, bounds: Bounds) -> None:
    """DecodeError for more than ``most`` fields, or for a field beyond its ``bounds``.

    ``most`` counts the fields of ``data`` itself, of which one without bounds may be as long as
    ``data``. Texts of the error have counts and lengths, never values.
    """
    _check(data, 0, len(data), FieldLimit(most, len(data), bounds), "", MOST_IN_ALL)


def _check(data: bytes, at: int, end: int, bound: FieldLimit, where: str, left: int) -> int:
    """Walk one message; returns how many fields the whole message may still have.

    Fields are counted in all messages together: bounds that nest would multiply.
    """
    for count, (number, start, stop) in enumerate(_fields(data, at, end)):
        # Checked before the walk enters the field, so that it ends at the bound.
        if count == bound.most or not left:
            raise DecodeError(f"more than {count} fields{where}")
        left -= 1
        # A number has no length to bound.
        if start is None:
            continue
        if number in bound.inner:
            left = _check(data, start, stop, bound.inner[number], f" in field {number}", left)
        elif stop - start > bound.longest:
            raise DecodeError(
                f"a field of {stop - start} bytes{where}, at most {bound.longest} it can have"
            )
    return left


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int | None, int]]:
    """Number of each field, where its bytes begin (None for a number), and where they end."""
    while at < end:
        tag, at = _varint(data, at, end)
        start = None
        match tag & 7:
            case 0:  # a number
                _, at = _varint(data, at, end)
            case 2:  # bytes, a text or a message
                length, start = _varint(data, at, end)
                at = start + length
            case 1 | 5 as fixed:
                at += FIXED_BYTES[fixed]
            # Groups, of which proto3 has none: their end is not known before they are read.
            case other:
                raise DecodeError(f"a field of wire type {other}")
        # With a length beyond its message, the walk would read the bytes that follow as its fields.
        if at > end:
            raise DecodeError("a field ends behind its message")
        # The low three bits are the wire type.
        yield tag >> 3, start, at


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number that begins here, and where it ends."""
    number = 0
    for index in range(at, min(at + MOST_VARINT, end)):
        # Groups of seven bits, the lowest first; the eighth says whether another follows.
        number |= (data[index] & 0x7F) << 7 * (index - at)
        if data[index] < 0x80:
            return number, index + 1
    raise DecodeError("a number without an end")
