"""A ledger's folder, and how to read one.

::

    ledger/                   0700
      seg-00000001.jsonl      0600  records, one canonical JSON line each (chain.py)
      seg-00000002.jsonl      0600  the chain and the tree run on
      seg-00000002.torn       0600  a line that a crash cut short, put aside when the log was opened
      checkpoint              0600  the signed head that was written last (head.py)
      LOCK                    0600  held by the one writer

Only the last segment may be empty or end in the middle of a line. Whoever has all of them verifies
with ``cat`` and a SHA-256; nothing else in the folder is needed to read.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ...errors import LocalError, reason
from .chain import MAX_LINE, Chain, Form, VerifiedLine

CHECKPOINT, LOCK = "checkpoint", "LOCK"
SINGLE = "egress.jsonl"  # what a ledger was before it had segments
_SEGMENT = re.compile(r"seg-([0-9]{8})\.jsonl")
_TORN = re.compile(r"seg-[0-9]{8}\.torn")
MAX_SEGMENTS = 99_999_999
BUFFER_BYTES = 1 << 20  # read at a time
EVIDENCE = (
    "keep the folder as evidence, and compare it with your backup and with the checkpoints that"
    " others hold"
)


def segment(folder: Path, number: int) -> Path:
    """The segment of this number, from 1.

    Leading zeros make the order of names the order of numbers.
    """
    return folder / f"seg-{number:08d}.jsonl"


def torn(path: Path) -> Path:
    """Where the torn tail of a segment goes."""
    return path.with_suffix(".torn")


def segments(folder: Path) -> list[Path]:
    """All segments in order, none in a new folder.

    LocalError if one is missing, or for what looks like another.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise LocalError(f"{folder}: cannot read it: {reason(error)}") from error
    if SINGLE in names:
        raise LocalError(
            f"{folder / SINGLE}: a ledger in one file, of a version before 0.1.0; move the folder"
            " away, keep it, and start the agent: it begins a new one"
        )

    # A renamed segment is refused rather than skipped: a skipped one would take its records along.
    found = []
    for name in names:
        match = _SEGMENT.fullmatch(name)
        if match:
            found.append(int(match[1]))
        elif name.startswith("seg-") and not _TORN.fullmatch(name):
            raise LocalError(f"{folder / name}: is not a segment of a ledger; {EVIDENCE}")

    # Rotation makes the old segment durable before the next one exists, so no crash leaves a gap.
    for number, present in enumerate(found, 1):
        if number != present:
            raise LocalError(
                f"{segment(folder, number)}: is missing, while {found[-1]} is there; {EVIDENCE}"
            )
    return [segment(folder, number) for number in found]


class Reading:
    """Iterates, once, over the verified lines of a ledger's folder: without a lock, while it may be
    written.

    Whole lines only, of the segments that were there when it began. Afterwards ``count`` and
    ``head`` are those of the chain, ``torn`` holds what follows the last newline, ``size`` the
    bytes before it in ``last``, the last segment, whose first record has the time ``began``.
    """

    def __init__(self, folder: Path, form: Form | None = None) -> None:
        self.torn = b""
        self.size = 0
        self.began = ""
        self.last: Path | None = None
        self._folder = folder
        self._chain = Chain(form)
        self._before = 0  # records in the segments before the last

    @property
    def count(self) -> int:
        """Records so far."""
        return self._chain.count

    @property
    def head(self) -> str:
        """Leaf hash of the last record, in hex."""
        return self._chain.head

    def __iter__(self) -> Iterator[VerifiedLine]:
        # Listed once: segments that are begun meanwhile are left to the next reading.
        paths = segments(self._folder)
        for path in paths:
            self.last, self.size, self.began, self._before = path, 0, "", self.count
            try:
                with path.open("rb", buffering=BUFFER_BYTES) as file:
                    yield from self._lines(file)
            except OSError as error:
                raise LocalError(f"{path}: cannot read it: {reason(error)}") from error
            if path != paths[-1] and (self.torn or not self.size):
                what = "ends in the middle of a line" if self.torn else "is empty"
                raise self._broken(f"{what}, and another segment follows")

    def _lines(self, file: BinaryIO) -> Iterator[VerifiedLine]:
        follow = self._chain.follow
        # Bounded, so that a damaged file without newlines does not fill the memory.
        while data := file.readline(MAX_LINE):
            if not data.endswith(b"\n"):
                if len(data) == MAX_LINE:
                    raise self._broken(f"is longer than {MAX_LINE} bytes")
                # A crash cuts a record or leaves zeros behind it; any other byte in a newline's
                # place is damage.
                if _is_whole(data[:-1]) and data[-1:] != b"\0":
                    raise self._broken(
                        f"ends with {data[-1:]!r} and not with a newline: the disk changed it"
                    )
                self.torn = data
                return
            try:
                line = follow(data[:-1])
            except LocalError as error:
                raise self._broken(str(error)) from error
            if not self.size:
                self.began = line.record["time"]
            self.size += len(data)
            yield line

    def _broken(self, why: str) -> LocalError:
        return LocalError(
            f"{self.last}: line {self.count - self._before + 1} (seq {self.count}, byte"
            f" {self.size}) {why}; {EVIDENCE}"
        )


def _is_whole(data: bytes) -> bool:
    """True if this is a whole record, a JSON object."""
    try:
        # RecursionError: damaged bytes may hold thousands of nested brackets.
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False
