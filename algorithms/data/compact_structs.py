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

DEEPEST = 12  # structs and lists in each other: those of Parquet have eight
LONG_LIST = 15  # in a list's first byte: its length follows
OTHERS = "has headers with fields of other types"

Fields: TypeAlias = dict[int, Any]  # by number: whole numbers, structs and lists of these


@dataclass(frozen=True, slots=True)
class Struct:
    """The fields of a struct; None for texts and truth values, which nobody needs here."""

    path: Path
    fields: Fields

    def number(self, field: int) -> int:
        """A whole number from 0 on, 0 where it is missing; LocalError for something else."""
        found = self.fields.get(field, 0)
        if isinstance(found, int) and found >= 0:
            return found
        raise damaged(self.path, "has a size that is none in its headers")

    def struct(self, field: int) -> "Struct":
        """A struct, an empty one where it is missing; LocalError for something else."""
        return self._struct(self.fields.get(field, {}))

    def structs(self, field: int) -> "list[Struct]":
        """A list of structs, an empty one where it is missing; LocalError for something else."""
        found = self.fields.get(field, [])
        if isinstance(found, list):
            return list(map(self._struct, found))
        raise damaged(self.path, OTHERS)

    def _struct(self, found: Any) -> "Struct":
        if isinstance(found, dict):
            return Struct(self.path, found)
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
            found[number] = self._value(self._readers.get(kind))
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
