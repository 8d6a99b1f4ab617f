"""A configuration file that a running daemon reads again once it has changed.

A file that is missing or invalid changes nothing: what was read last stays in use, and ``look``
says once what is wrong. Content counts only once it has stood still for ``SETTLE_SECONDS``: half
of a file that is being written may be valid, and may allow what the whole file forbids.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from ..errors import LocalError, StaddleError
from .documents import read_bytes

SETTLE_SECONDS = 1.0

T = TypeVar("T")


class WatchedFile(Generic[T]):
    """The parsed content of a file, and whether the file has another valid one by now.

    ``parse`` raises StaddleError for invalid content: a signature in it may be another member's.
    """

    def __init__(self, path: Path, content: bytes, value: T, parse: Callable[[bytes], T]) -> None:
        """``content`` is what was read from the file, and ``value`` what it says."""
        self._path = path
        self._parse = parse
        self._value = value
        self._next: T | None = None
        # what is read is content, or why there is none
        self._valid: bytes | str = content
        self._judged: bytes | str = content
        self._found: bytes | str = content
        self._since = 0.0

    @property
    def changed(self) -> bool:
        """Whether ``take`` returns something newer than at its last call."""
        return self._next is not None

    @property
    def settling(self) -> bool:
        """Whether the file, at the last look, had content that has not been judged yet."""
        return self._found not in (self._valid, self._judged)

    def take(self) -> T:
        """The newest valid content."""
        if self._next is not None:
            self._value, self._next = self._next, None
        return self._value

    def put(self, value: T) -> None:
        """Have ``take`` return this, which came by another way than the file."""
        self._next = value

    def look(self, now: float) -> str:
        """Read the file; returns why its content is not used, once for each new content.

        ``now`` is in seconds, by a clock that never goes back.
        """
        # Small files, so they are read each time: size and time of a file may stay the same when
        # its content changes.
        found = self._read()
        if found != self._found:
            self._found, self._since = found, now
        if not self.settling or now < self._since + SETTLE_SECONDS:
            return ""

        self._judged = found
        try:
            if isinstance(found, str):
                raise LocalError(found)
            value, self._valid = self._parse(found), found
            self._next = None if value == self._value else value
        except StaddleError as error:
            return str(error)
        return ""

    def _read(self) -> bytes | str:
        try:
            return read_bytes(self._path)
        except LocalError as error:
            return str(error)
