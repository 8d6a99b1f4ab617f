"""A hash chain of canonical JSON lines, and how to read one.

One record a line; each names the hash of the line before::

    {"mono_ns":83123,"nonce":"5f0c…","prev":"0000…","seq":0,"time":"2026-11-20T21:30:05.123456Z","type":"start","v":1}
    {"mono_ns":91007,"nonce":"c2aa…","prev":"e3b0…","seq":1,"time":"2026-11-20T21:30:05.131340Z","type":"stop","v":1}

The hash of a line is RFC 6962's leaf hash, SHA-256(0x00 || line without its newline), over the stored bytes;
``seq`` is the leaf's index. The nonce keeps a published leaf hash from being guessed.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import LocalError
from ..files import canonical_json, parse_json
from . import merkle

MAX_LINE = 1024 * 1024  # bytes, newline included
FIRST_PREV = "0" * 64
FRAME = {  # what the log itself adds to a record, and how it is written
    "v": "1",
    "seq": "[0-9]+",
    "prev": '"[0-9a-f]{64}"',
    "nonce": '"[0-9a-f]{32}"',
    "time": r'"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"',
    "mono_ns": "[0-9]+",
}
_FRAME = re.compile(rf"\[{', '.join(FRAME.values())}\]")  # all of it at once, since a ledger has many lines


@dataclass(frozen=True, slots=True)
class Line:
    """One verified record as it was read."""

    seq: int
    leaf: str
    record: dict[str, Any]


def leaf_hash(line: bytes) -> str:
    """Hex of the RFC 6962 leaf hash of a line without its newline."""
    return merkle.leaf_hash(line).hex()


class Reading:
    """Iterates, once, over the verified lines of a log: without a lock, while it may be written.

    Whole lines only: afterwards ``torn`` holds what follows the last newline, ``size`` the offset where it starts.
    """

    def __init__(self, path: Path) -> None:
        self.torn = b""
        self.size = 0
        self.count = 0
        self.head = FIRST_PREV
        self._path = path

    def __iter__(self) -> Iterator[Line]:
        try:
            with self._path.open("rb") as file:
                yield from self._lines(file)
        except OSError as error:
            raise LocalError(f"{self._path}: cannot read it: {error.strerror or error}") from error

    def _lines(self, file: BinaryIO) -> Iterator[Line]:
        while line := file.readline(MAX_LINE + 1):
            if not line.endswith(b"\n"):
                if len(line) > MAX_LINE:
                    raise self._broken(f"is longer than {MAX_LINE} bytes")
                self.torn = line
                return
            verified = self._verified(line[:-1])
            self.size += len(line)
            self.count += 1
            self.head = verified.leaf
            yield verified

    def _verified(self, line: bytes) -> Line:
        """Check one line against the chain; LocalError names line and byte."""
        # (1) It is JSON, an object, and in the one canonical spelling.
        try:
            record = parse_json(line, "line")
            canonical = canonical_json(record) == line
        except LocalError as error:
            raise self._broken(str(error)) from error
        if not isinstance(record, dict) or not canonical or not isinstance(record.get("type"), str):
            raise self._broken("is no canonical JSON object with a type")
        # (2) It has all fields of the frame, well-formed.
        if not _FRAME.fullmatch(json.dumps([record.get(name) for name in FRAME])):
            raise self._broken(f"lacks a well-formed frame of {', '.join(FRAME)}")
        # (3) It stands in its place.
        if record["seq"] != self.count:
            raise self._broken(f"has seq {record['seq']}, not {self.count}")
        # (4) It follows the line before.
        if record["prev"] != self.head:
            raise self._broken("does not follow the line before: one of the two was changed, removed or inserted")
        return Line(self.count, leaf_hash(line), record)

    def _broken(self, why: str) -> LocalError:
        return LocalError(
            f"{self._path}: line {self.count + 1} (seq {self.count}, byte {self.size}) {why}; "
            "keep the file as evidence, and compare it with your backup and with the coordinator's receipts"
        )
