"""Errors of a run's files, with the path and what to do.

A run's files are this software's own: the fix for a damaged one is a backup, or to start again.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ...errors import LocalError, UnwritableError, check_local, reason
from ...files.documents import Strict, parse_canonical, read_bytes, sync_directory, unwritable
from ...files.portable import BINARY

BEGIN_ANEW = "restore it from a backup, or remove the run's folder to begin it from scratch"

ModelT = TypeVar("ModelT", bound=Strict)


@contextmanager
def writing(path: Path, failure: str = "cannot write it") -> Iterator[None]:
    """UnwritableError, with the path and the reason, where the block raises OSError.

    The command then stops: a run that cannot be saved must not continue.
    """
    try:
        yield
    except OSError as error:
        raise UnwritableError(f"{path}: {failure}: {unwritable(error)}") from error


def read_kept(path: Path) -> bytes:
    """The bytes of a file that a snapshot needs; LocalError where it cannot be read.

    The error says how to begin again.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}; {BEGIN_ANEW}") from error


def parse_kept(path: Path, model: type[ModelT]) -> ModelT:
    """The document in a run's file of canonical JSON; LocalError where it is not as written."""
    try:
        return parse_canonical(read_bytes(path), model, str(path))
    except LocalError as error:
        raise LocalError(f"{error}; {BEGIN_ANEW}") from error


class Prefix(Strict):
    """The first bytes of a file, by their number and their SHA-256 in hex.

    A snapshot records the part of a growing file that it covers.
    """

    bytes: int
    sha256: str


# What a file of a run holds before the first snapshot.
NOTHING = Prefix(bytes=0, sha256=hashlib.sha256().hexdigest())


class GrowingFile:
    """The one writer of a file whose lines are only ever added.

    It resumes after ``kept``, and cuts off what the file has beyond that. LocalError if the file
    does not begin so.
    """

    def __init__(self, path: Path, kept: Prefix) -> None:
        # Check first: lines that a snapshot covers are never cut off.
        data = kept_bytes(path, kept)
        self._path, self._hash, self._size = path, hashlib.sha256(data), len(data)

        # opened to append: no write can land on a line that a snapshot vouches for
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | BINARY
        with writing(path):
            self._descriptor = os.open(path, flags, 0o644)
            try:
                # What came after the snapshot will come again.
                os.ftruncate(self._descriptor, self._size)
                os.fsync(self._descriptor)
                sync_directory(path.parent)
            except OSError:
                self.close()
                raise

    def add(self, data: bytes) -> None:
        """Add whole lines; they reach the disk with the next ``sync``.

        UnwritableError if the disk fails.
        """
        with writing(self._path):
            # A single write: a partial one is an error.
            if data and os.write(self._descriptor, data) != len(data):
                raise OSError("only a part was written")
        # not before the write: a line that the disk rejected is in no snapshot
        self._hash.update(data)
        self._size += len(data)

    def sync(self) -> Prefix:
        """Make all lines durable; returns what a snapshot says of them.

        UnwritableError if the disk fails, or the file's length is not what was written.
        """
        with writing(self._path):
            # another process that wrote here would leave lines that the digest does not cover
            if os.fstat(self._descriptor).st_size != self._size:
                raise OSError("its length is not what was written")
            os.fsync(self._descriptor)
        return Prefix(bytes=self._size, sha256=self._hash.hexdigest())

    def close(self) -> None:
        """Nothing can be added any longer."""
        os.close(self._descriptor)


def kept_bytes(path: Path, kept: Prefix) -> bytes:
    """The bytes of a growing file that ``kept`` describes; LocalError unless it begins so.

    The rest of the file is not checked.
    """
    data = b""
    if kept.bytes:  # else the file may not be there yet
        # Bytes after it are in no snapshot, and may end in half a line.
        data = read_kept(path)[: kept.bytes]
    found = Prefix(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    check_local(
        kept == found,
        f"{path}: its first {kept.bytes} bytes are not those that its snapshot was written"
        f" with; {BEGIN_ANEW}",
    )
    return data
