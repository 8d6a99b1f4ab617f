"""How many fields a message may have, counted in its bytes before protobuf makes anything of them.

An empty entry of a repeated field takes two bytes to send and about 80 to hold: 4 MiB of them are 170 MB. A message is
walked one level deep, a field a step; what has more fields than an honest message can have, or longer ones, is refused
at the first of them. So a hostile message costs no more than an honest one of the same federation.
"""

from collections.abc import Iterator, Mapping

from google.protobuf.message import DecodeError

MOST_VARINT = 10  # bytes
Bounds = Mapping[int, tuple[int, int]]  # number of a field that is a message → most fields in it, most bytes of one


def check_fields(data: bytes, most: int, bounds: Bounds) -> None:
    """DecodeError for more than ``most`` fields, or where a message in one of them goes beyond its bounds."""
    for count, (number, start, end) in enumerate(_fields(data, 0, len(data))):
        if count == most:
            raise DecodeError(f"more than {most} fields")
        if number in bounds and start is not None:
            _check_body(data, start, end, number, *bounds[number])


def _check_body(data: bytes, start: int, end: int, number: int, most: int, longest: int) -> None:
    for count, (_, begin, stop) in enumerate(_fields(data, start, end)):
        if count == most:
            raise DecodeError(f"more than {most} fields in field {number}")
        if begin is not None and stop - begin > longest:
            raise DecodeError(f"a field of {stop - begin} bytes in field {number}, at most {longest} it can have")


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int | None, int]]:
    """Number of each field, where its bytes begin (None for a number), and where they end."""
    while at < end:
        tag, at = _varint(data, at, end)
        start = None
        match tag & 7:
            case 0:  # a number
                _, at = _varint(data, at, end)
            case 1:  # 64 bits
                at += 8
            case 5:  # 32 bits
                at += 4
            case 2:  # bytes, a text or a message
                length, start = _varint(data, at, end)
                at = start + length
            case other:  # groups, of which proto3 has none
                raise DecodeError(f"a field of wire type {other}")
        if at > end:
            raise DecodeError("a field ends behind its message")
        yield tag >> 3, start, at


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number that begins here, and where it ends."""
    number = 0
    for place in range(at, min(at + MOST_VARINT, end)):
        number |= (data[place] & 0x7F) << 7 * (place - at)
        if data[place] < 0x80:
            return number, place + 1
    raise DecodeError("a number without an end")
