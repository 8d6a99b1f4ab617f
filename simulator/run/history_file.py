"""A run's history on disk: a line a measure, only ever added to.

::

    {"rounds":3,"measure":"all/trained","silos":{"clinic-a":[55,71],"clinic-b":[40,68]}}

that is, right and all records by silo. A checkpoint says how many bytes belong to it (``Prefix``); what came after them
is measured again by who goes on from there.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from ...errors import LocalError, UnwritableError
from ...files.documents import Strict, sync_directory, unwritable
from .history import Measure, Measured

BEGIN_ANEW = "restore it from a backup, or remove the run's folder to begin it anew"


class Prefix(Strict):
    """The first bytes of a file, by their number and their SHA-256 in hex."""

    bytes: int
    sha256: str


NOTHING = Prefix(bytes=0, sha256=hashlib.sha256().hexdigest())

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    rounds: Positive
    measure: Measure
    silos: Annotated[dict[str, tuple[Count, Positive]], msgspec.Meta(min_length=1)]


_LINE = msgspec.json.Decoder(_Line)


class HistoryFile:
    """The one writer of a history; it goes on after ``kept``, and what the file has beyond that goes."""

    def __init__(self, path: Path, kept: Prefix) -> None:
        data = _checked(path, kept)
        self.measures = parse(data, str(path))  # those that are kept
        self._path, self._hash, self._size = path, hashlib.sha256(data), len(data)
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(self._descriptor, self._size)
                os.fsync(self._descriptor)
                sync_directory(path.parent)
            except OSError:
                self.close()
                raise
        except OSError as error:
            raise UnwritableError(f"{path}: cannot write it: {unwritable(error)}") from error

    def append(self, measures: Iterable[Measured]) -> None:
        """Add lines; they reach the disk with the next ``sync``."""
        data = b"".join(to_line(measured) for measured in measures)
        try:
            if data and os.write(self._descriptor, data) != len(data):
                raise OSError("only a part was written")
        except OSError as error:
            raise UnwritableError(f"{self._path}: cannot write it: {unwritable(error)}") from error
        self._hash.update(data)
        self._size += len(data)

    def sync(self) -> Prefix:
        """Make all lines durable; what a checkpoint says of them."""
        try:
            if os.fstat(self._descriptor).st_size != self._size:
                raise OSError("its length is not what was written")
            os.fsync(self._descriptor)
        except OSError as error:
            raise UnwritableError(f"{self._path}: cannot write it: {unwritable(error)}") from error
        return Prefix(bytes=self._size, sha256=self._hash.hexdigest())

    def close(self) -> None:
        """Nothing can be added any longer."""
        os.close(self._descriptor)


def check(path: Path, kept: Prefix) -> None:
    """LocalError unless a history begins as ``kept`` describes."""
    _checked(path, kept)


def read(path: Path, kept: Prefix | None = None) -> tuple[Measured, ...]:
    """The measures of a history that ``kept`` describes; without it, those of all whole lines."""
    data = _read(path) if kept is None else _checked(path, kept)
    return parse(data[: data.rfind(b"\n") + 1], str(path))


def to_line(measured: Measured) -> bytes:
    """A measure as its line."""
    silos = {silo: (measured.correct[silo], count) for silo, count in measured.records.items()}
    return msgspec.json.encode(_Line(measured.rounds, measured.measure, silos)) + b"\n"


def parse(data: bytes, origin: str) -> tuple[Measured, ...]:
    """Whole lines, each checked; ``origin`` names them in errors."""
    return tuple(_measured(line, f"{origin}, line {number}") for number, line in enumerate(data.splitlines(), 1))


def _measured(line: bytes, where: str) -> Measured:
    try:
        found = _LINE.decode(line)
    except ValueError as error:  # of msgspec, or no UTF-8
        raise LocalError(f"{where}: no measure of a run: {error}; {BEGIN_ANEW}") from error
    correct = {silo: right for silo, (right, _) in found.silos.items()}
    records = {silo: count for silo, (_, count) in found.silos.items()}
    if beyond := [silo for silo in records if correct[silo] > records[silo]]:
        raise LocalError(f"{where}: more records of silo {beyond[0]!r} are right than there are; {BEGIN_ANEW}")
    return Measured(found.rounds, found.measure, correct, records)


def _checked(path: Path, kept: Prefix) -> bytes:
    data = _read(path)[: kept.bytes] if kept.bytes else b""
    if kept != Prefix(bytes=len(data), sha256=hashlib.sha256(data).hexdigest()):
        raise LocalError(
            f"{path}: its first {kept.bytes} bytes are not those that its checkpoint was written with; {BEGIN_ANEW}"
        )
    return data


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {error.strerror or error}; {BEGIN_ANEW}") from error
