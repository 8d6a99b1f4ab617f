"""Structs in Thrift's compact protocol, in which Parquet writes its metadata and headers of pages.

::

    15 04 25 0a 00     field 1 = 2, field 3 = 5, end

A byte has the step to a field's number and its type; whole numbers are varints in zigzag
(thrift-compact-protocol.md of Apache Thrift). pyarrow's own readers of single column chunks end the
process where these are damaged.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from ...errors import LocalError

WHOLE, LONG, LIST, STRUCT = 5, 6, 9, 12  # types of fields: numbers of 32 and of 64 bits
DEEPEST = 12  # structs and lists in each other: those of Parquet have eight
LONG_LIST = 15  # in a list's first byte: its length follows
OTHERS = "has headers with fields of other types"

Field: TypeAlias = tuple[int, int]  # a number, and the type that is to stand there
Fields: TypeAlias = dict[int, tuple[int, Any]]  # by number: the type that stands there, the value


@dataclass(frozen=True, slots=True)
class Struct:
    """The fields of a struct; None for texts and truth values, which nobody needs here.

    Apache Thrift passes over a field whose type is not that of the format, as if it were not there.
    No program writes one, so it is refused.
    """

    path: Path
    fields: Fields

    def number(self, field: Field) -> int:
        """A whole number from 0 on, 0 where it is missing; LocalError for something else."""
        found: int = self._value(field, 0)
        if found >= 0:
            return found
        raise damaged(self.path, "has a size that is none in its headers")

    def struct(self, field: Field) -> "Struct":
        """A struct, an empty one where it is missing; LocalError for something else."""
        return Struct(self.path, self._value(field, {}))

    def structs(self, field: Field) -> "list[Struct]":
        """A list of structs, an empty one where it is missing; LocalError for something else."""
        found = self._value(field, [])
        if all(isinstance(own, dict) for own in found):
            return [Struct(self.path, own) for own in found]
        raise damaged(self.path, OTHERS)

    def _value(self, field: Field, missing: Any) -> Any:
        number, wanted = field
        kind, value = self.fields.get(number, (wanted, missing))
        if kind == wanted:
            return value
        raise damaged(self.path, OTHERS)


def read_struct(path: Path, file: BinaryIO) -> Struct:
    """The struct that begins here; the file stands behind it afterwards. LocalError for none."""
    return Struct(path, _CompactReader(path, file).fields())


def damaged(path: Path, why: str) -> LocalError:
    """What to say of a file that no program wrote so."""
    return LocalError(f"{path}: cannot read it as Parquet: it {why}; write it again")


class _CompactReader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._depth = 0
        # Those of each type of the protocol. True and false are types of their own.
        self._readers: dict[int, Callable[[], Any]] = {
            1: _nothing,
            2: _nothing,
            3: self._byte,
            4: partial(self._whole, 16),
            5: partial(self._whole, 32),
            6: partial(self._whole, 64),
            7: partial(self._pass, 8),
            8: self._text,
            9: self._list,
            10: self._list,
            12: self.fields,
        }

    def fields(self) -> Fields:
        found: Fields = {}
        number = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            before, number = number, number + (step or self._whole(16) - number)
            # Readers differ in what they make of a field that is there twice.
            if not before < number < 2**15:
                raise damaged(self._path, "has headers whose fields are out of order")
            found[number] = kind, self._value(self._readers.get(kind))
        return found

    def _value(self, reader: Callable[[], Any] | None) -> Any:
        self._depth += 1
        if reader is None or self._depth > DEEPEST:
            raise damaged(self._path, OTHERS)
        value = reader()
        self._depth -= 1
        return value

    def _list(self) -> list[Any]:
        head = self._byte()
        count, kind = head >> 4, head & 15
        if count == LONG_LIST:
            count = self._varint()
        # Truth values of a list take a byte each, as type 3 does.
        reader = self._readers.get(max(kind, 3))
        return [self._value(reader) for _ in range(count)]

    def _whole(self, bits: int) -> int:
        value = self._varint()
        # Readers differ in which bits of a longer one they take.
        if value >> bits:
            raise damaged(self._path, "has a number that is too long in its headers")
        return (value >> 1) ^ -(value & 1)

    def _varint(self) -> int:
        """Seven bits per byte, the lowest first; the highest bit says that another byte follows."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise damaged(self._path, "has a number without an end in its headers")

    def _text(self) -> None:
        """A text is passed over, such as the smallest value of a page."""
        self._pass(self._varint() & 0xFFFFFFFF)

    def _pass(self, count: int) -> None:
        self._file.seek(count, os.SEEK_CUR)

    def _byte(self) -> int:
        found = self._file.read(1)
        if not found:
            raise damaged(self._path, "ends within its headers")
        return found[0]


def _nothing() -> None:
    """Truth values are in the type itself."""
