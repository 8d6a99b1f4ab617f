"""Structs in Thrift's compact protocol, in which Parquet writes its metadata and headers of pages.

::

    15 04 25 0a 00     field 1 = 2, field 3 = 5, end

A byte has the step to a field's number and its type; whole numbers are varints in zigzag
(thrift-compact-protocol.md of Apache Thrift). pyarrow's own readers of single column chunks end the
process where these are damaged.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from ...errors import LocalError

DEEPEST = 12  # structs and lists in each other: those of Parquet have eight
BITS = {4: 16, 5: 32, 6: 64}  # of whole numbers, by type
LONG_LIST = 15  # in a list's first byte: its length follows

Fields: TypeAlias = dict[int, Any]  # by number: whole numbers, structs and lists of these


@dataclass(frozen=True, slots=True)
class Struct:
    """The fields of a struct; texts and truth values are left out."""

    path: Path
    fields: Fields

    def number(self, field: int) -> int:
        """A whole number from 0 on, 0 where it is missing; LocalError for something else."""
        found = self.fields.get(field, 0)
        if not isinstance(found, int) or found < 0:
            raise damaged(self.path, "has a size that is none in its headers")
        return found

    def struct(self, field: int) -> "Struct":
        """A struct, an empty one where it is missing; LocalError for something else."""
        found = self.fields.get(field, {})
        if not isinstance(found, dict):
            raise damaged(self.path, "has headers with fields of other types")
        return Struct(self.path, found)

    def structs(self, field: int) -> "list[Struct]":
        """A list of structs, an empty one where it is missing; LocalError for something else."""
        found = self.fields.get(field, [])
        if not isinstance(found, list) or not all(isinstance(own, dict) for own in found):
            raise damaged(self.path, "has headers with fields of other types")
        return [Struct(self.path, own) for own in found]


def read_struct(path: Path, file: BinaryIO) -> Struct:
    """The struct that begins here; the file stands behind it afterwards. LocalError for none."""
    return Struct(path, _CompactReader(path, file).fields(0))


def damaged(path: Path, why: str) -> LocalError:
    """What to say of a file that no program wrote so."""
    return LocalError(f"{path}: cannot read it as Parquet: it {why}; write it again")


class _CompactReader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file

    def fields(self, depth: int) -> Fields:
        found: Fields = {}
        number = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            before, number = number, number + step if step else self._whole(16)
            # Readers differ in what they make of a field that is there twice.
            if not before < number < 2**15:
                raise damaged(self._path, "has headers whose fields are out of order")
            # True and false are types.
            value = None if kind in {1, 2} else self._value(kind, depth + 1)
            if value is not None:
                found[number] = value
        return found

    def _value(self, kind: int, depth: int) -> Any:
        """A whole number, a struct or a list; None for what is passed over."""
        if depth > DEEPEST:
            raise damaged(self._path, "has headers within headers")
        match kind:
            case 1 | 2 | 3:  # truth values of a list, and bytes
                return self._byte() and None
            case 4 | 5 | 6:
                return self._whole(BITS[kind])
            case 7:  # a number of eight bytes
                self._pass(8)
            case 8:  # a text, such as the smallest value of a page
                self._pass(self._varint() & 0xFFFFFFFF)
            case 9 | 10:  # a list or a set
                return self._list(depth)
            case 12:
                return self.fields(depth)
            case _:
                raise damaged(self._path, "has headers with fields of other types")
        return None

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        count, kind = head >> 4, head & 15
        if count == LONG_LIST:
            count = self._varint()
        values = (self._value(kind, depth + 1) for _ in range(count))
        return [value for value in values if value is not None]

    def _whole(self, bits: int) -> int:
        value = self._varint() & (1 << bits) - 1
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

    def _pass(self, count: int) -> None:
        self._file.seek(count, os.SEEK_CUR)

    def _byte(self) -> int:
        found = self._file.read(1)
        if not found:
            raise damaged(self._path, "ends within its headers")
        return found[0]
