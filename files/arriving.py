"""A file that arrives in pieces, and whose size and SHA-256 are known before."""

import hashlib
from contextlib import suppress
from os import fsync
from pathlib import Path
from typing import BinaryIO

from ..errors import LocalError, UnwritableError
from .documents import sync_directory, unwritable

PIECE = 1 << 20  # bytes that are read at a time
LEAST_PIECE = 1 << 14  # bytes of all pieces but the last: each takes a write of its own


class ArrivingFile:
    """Bytes go to ``partial``, which becomes ``path`` once it is whole and its digest fits.

    What arrived stays in ``partial`` until then, and the next attempt resumes behind it. Errors of
    the disk are UnwritableError.
    """

    def __init__(self, path: Path, partial: Path, sha256: str, size: int) -> None:
        self.received = 0  # bytes
        self.resumed = False  # whether some of them arrived in an earlier attempt
        self._path, self._partial = path, partial
        self._sha256, self._size = sha256, size
        self._digest = hashlib.sha256()
        self._file: BinaryIO  # from ``open`` on

    def open(self) -> None:
        """Open the partial file; its bytes count as received."""
        try:
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("a+b", buffering=0)
            self._file.seek(0)
            while piece := self._file.read(PIECE):
                self._digest.update(piece)
                self.received += len(piece)
            self.resumed = self.received > 0
            # Somebody else wrote to it.
            if self.received > self._size:
                self._start_over()
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Close it; what arrived stays."""
        self._file.close()

    def write(self, piece: bytes) -> None:
        """Append bytes; LocalError where they are more than the file has, or few of many."""
        if not min(LEAST_PIECE, self.missing or 1) <= len(piece) <= self.missing:
            raise LocalError(
                f"a piece of {len(piece)} bytes after {self.received} of {self._size}; the sender"
                " has another file, or another release"
            )
        left = memoryview(piece)
        try:
            # An unbuffered file may take less than it is handed.
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise self._unwritable(error) from error
        self._digest.update(piece)
        self.received += len(piece)

    @property
    def missing(self) -> int:
        """Bytes that have not arrived."""
        return self._size - self.received

    def finish(self) -> str:
        """Give the whole file its name; durable when it returns.

        Returns why it is another file, empty if it is the right one; another one is dropped, and
        the next attempt starts over. LocalError for a file that is not whole.
        """
        if self.received < self._size:
            raise LocalError(f"ended after {self.received} of {self._size} bytes; send the rest")
        found = self._digest.hexdigest()
        try:
            if found == self._sha256:
                fsync(self._file.fileno())
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._partial.replace(self._path)
                sync_directory(self._path.parent)
                return ""
            self._start_over()
        except OSError as error:
            raise self._unwritable(error) from error
        return f"the file has SHA-256 {found}, not {self._sha256}; take the right file"

    def discard(self) -> None:
        """Remove what arrived; nothing where the file is whole."""
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def _start_over(self) -> None:
        self._file.truncate(0)
        self.received, self._digest = 0, hashlib.sha256()

    def _unwritable(self, error: OSError) -> UnwritableError:
        return UnwritableError(f"{self._partial}: cannot write it: {unwritable(error)}")
