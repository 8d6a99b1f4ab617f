"""The one writer of a ledger's folder (segments.py): the only writing of ``security``.

A crash may leave a last line without newline. It was promised to nobody: opening moves it to
``seg-….torn``, says so in a record, and signs a checkpoint that covers that record::

    {"dropped_bytes":117,"last_good_seq":41,"mono_us":83123,…,"type":"recovery","v":1}

Any other fault in the folder is refused, and so are fewer or other records than its checkpoint says
(head.py), and records behind it that were not written with the log key. A failed write or sync
closes the log for good: nothing may leave a silo that cannot be recorded.
"""

import datetime as dt
import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ...errors import LocalError, UnwritableError, reason
from ...files.documents import canonical_json, sync_directory, unwritable, write_atomic
from ...files.portable import sync_data
from .chain import FIRST_PREV, FRAME, MAX_LINE, Form, VerifiedLine, leaf_hash, nonce_of
from .consistency import Consistency
from .head import EVERY, Agreement, HeldHead, Signer, disagreement, stored_by
from .lock import hold
from .merkle import Hashes, Tree
from .note import Note
from .segments import CHECKPOINT, LOCK, MAX_SEGMENTS, Reading, segment, torn
from .tree_head import TreeHead

RECOVERY = "recovery"
SEGMENT_BYTES = 64 * 1024 * 1024  # a longer segment takes no more records


@dataclass(frozen=True, slots=True)
class Appended:
    """Where a record stands: its index and the hex of its leaf hash.

    Receipts name a record by both. Other records refer to it by ``seq`` only.
    """

    seq: int
    leaf: str


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """A record and the head of the log that ends with it, signed: who holds it can tell if the
    record is altered.
    """

    place: Appended
    checkpoint: Note

    @property
    def head(self) -> TreeHead:
        """The tree head that the checkpoint states."""
        return TreeHead.parse(self.checkpoint.text)


class AppendLog:
    """The one writer of a log; safe to share between threads.

    Open it with ``AppendLog.open``. ``append`` returns once the record is on the disk, or raises
    LocalError, and then every later call does.
    """

    def __init__(
        self, folder: Path, signer: Signer, lock: int, fence: Callable[[], object] = bool
    ) -> None:
        self._fence = fence
        self.folder = folder
        self.signer = signer
        self._key = signer.record_key()
        self._lock = lock
        self._mutex = threading.Lock()
        self._failed = ""
        # the last segment; its first record's day
        self._file, self._number, self._size, self._day = -1, 0, 0, ""
        self._head = FIRST_PREV
        self._tree = Tree()
        self._signed: tuple[int, Note] | None = None  # the checkpoint on the disk

    @classmethod
    def open(
        cls,
        folder: Path,
        signer: Signer,
        visit: Callable[[VerifiedLine], None] | None = None,
        form: Form | None = None,
        fence: Callable[[], object] = bool,
    ) -> Self:
        """Lock the log, check all of it, and repair a torn tail.

        An empty or new folder starts an empty log.

        ``visit`` sees every verified line in order, so that a view can rebuild its state.
        ``fence`` raises LocalError before each write of a process that may write no more.
        LocalError if another writer holds the log, if anything but its tail is broken, or if it is
        behind its checkpoint.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The lock comes before the first read: another writer's half-written line would look
            # like a torn tail, and be cut off.
            log = cls(folder, signer, hold(folder / LOCK), fence)
            try:
                log._recover(visit or _unseen, form)
            except BaseException:
                log._release()
                raise
        except OSError as error:
            raise LocalError(f"{folder}: cannot open it: {reason(error)}") from error
        return log

    @property
    def head(self) -> Appended | None:
        """The last record, None in an empty log."""
        return Appended(len(self._tree) - 1, self._head) if len(self._tree) else None

    def append(self, record: Mapping[str, Any], *, durable: bool = True) -> Appended:
        """Add a record of any ``type``.

        Without ``durable`` it reaches the disk with the next durable one.
        """
        with self._mutex:
            return self._append(record, durable=durable)

    def seal(self, record: Mapping[str, Any]) -> SignedRecord:
        """Add a durable record, and sign the head for others to hold.

        The checkpoint in the folder may be older.
        """
        with self._mutex:
            appended = self._append(record, durable=True)
            return SignedRecord(appended, self.signer.sign(len(self._tree), self._tree.root()))

    def growth(self, held: int, to: Note) -> Consistency:
        """Proof for who holds the head of ``held`` records, 0 for none, that the log only grew
        until ``to``.
        """
        with self._mutex:
            return Consistency(
                held, self._tree.consistency_proof(held, TreeHead.parse(to.text).size), to
            )

    def inclusion(self, seq: int, size: int) -> Hashes:
        """RFC 6962 section 2.1.1: that record ``seq`` is in the log of ``size`` records."""
        with self._mutex:
            return self._tree.inclusion_proof(seq, size)

    def root(self, size: int) -> bytes:
        """Root of the first ``size`` records.

        RFC 6962's Merkle tree hash, 32 bytes. LocalError for a size that the log never had.
        """
        with self._mutex:
            return self._tree.root(size)

    def disagreement(self, held: HeldHead) -> str:
        """Why this log is not the one that somebody's checkpoint was signed for.

        Empty if it is, or grew from it.
        """
        with self._mutex:
            return disagreement(self._tree, held)

    def checkpoint(self) -> Note:
        """Make all records durable, sign their head, store it and return it.

        Records are synced before the checkpoint is replaced. UnwritableError if the disk fails;
        then the log takes no more records until a restart.
        """
        with self._mutex:
            self._check_open()
            return self._checkpoint()

    def rekey(self, signer: Signer) -> Note:
        """Sign the head with the old key once more, then with this one, as all later heads.

        The last head by the old key covers all records under it, so whoever knows only that key
        can check up to there.
        """
        with self._mutex:
            self._check_open()
            self._checkpoint()
            self.signer, self._key, self._signed = signer, signer.record_key(), None
            return self._checkpoint()

    def close(self) -> None:
        """Make all records durable under a last checkpoint and let the lock go.

        A closed log takes nothing more.
        """
        with self._mutex:
            try:
                # A log that failed signs nothing: nobody knows which of its bytes reached the
                # disk.
                if self._lock >= 0 and not self._failed:
                    self._fence()
                    self._checkpoint()
            finally:
                self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, record: Mapping[str, Any], *, durable: bool) -> Appended:
        self._check_open()
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        line = self._framed(record, now)
        try:
            # ``<``: a clock that goes back begins no segment for each record.
            if self._size >= SEGMENT_BYTES or (self._size and self._day < now[:10]):
                self._rotate()
            self._write(line, durable=durable)
        except OSError as error:
            raise self._fail(unwritable(error)) from error
        # A segment's day is the day of its first record.
        self._day = self._day if self._size else now[:10]
        self._size += len(line)
        # Head and tree change only after the write, so a failed write changes neither.
        self._head = leaf_hash(line[:-1])
        self._tree.append(bytes.fromhex(self._head))
        appended = Appended(len(self._tree) - 1, self._head)
        # Records behind the checkpoint can be cut off unnoticed, so they stay few.
        if len(self._tree) % EVERY == 0:
            self._checkpoint()
        return appended

    def _check_open(self) -> None:
        if self._failed:
            raise UnwritableError(f"{self.folder}: takes no more records: {self._failed}")
        self._fence()

    def _fail(self, why: str) -> UnwritableError:
        # After a failed fsync the kernel may drop the pages and report success the next time, so a
        # second try proves nothing.
        self._failed = f"a write failed: {why}, then restart"
        return UnwritableError(f"{self.folder}: takes no more records: {self._failed}")

    def _release(self) -> None:
        self._failed = self._failed or "it is closed"
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1

    def _framed(self, record: Mapping[str, Any], now: str) -> bytes:
        # Only the log sets the frame: a record with a place or time of its own could pass for
        # another.
        if reserved := sorted(set(record) & set(FRAME)):
            raise LocalError(
                f"{self.folder}: a record must not bring {', '.join(reserved)}; the log adds them"
            )
        if not isinstance(record.get("type"), str):
            raise LocalError(
                f"{self.folder}: a record needs a type, this one has {record.get('type')!r}"
            )
        framed = {
            **record,
            "v": 1,
            "seq": len(self._tree),
            "prev": self._head,
            "time": now,
            # nanoseconds of 104 days are no integer of JSON
            "mono_us": time.monotonic_ns() // 1000,
        }
        line = canonical_json({**framed, "nonce": nonce_of(self._key, framed)}) + b"\n"
        if len(line) > MAX_LINE:
            raise LocalError(
                f"{self.folder}: a record of {len(line)} bytes is over {MAX_LINE}; split it"
            )
        return line

    def _write(self, line: bytes, *, durable: bool) -> None:
        # A line written behind the bytes of a process that ignores the lock would break the chain
        # for good.
        if os.fstat(self._file).st_size != self._size:
            raise OSError(errno.EIO, "somebody else changed its length")
        if os.write(self._file, line) != len(line):
            # The part that was written is a torn tail; the next ``open`` moves it aside.
            raise OSError(errno.ENOSPC, "only a part was written")
        # The length is synced with the data; nobody reads the file's times.
        if durable:
            sync_data(self._file)

    def _rotate(self) -> None:
        """Go on in a new segment; the old one is durable first, so that nothing is ever missing
        before what is there.

        A crash after this leaves an empty last segment, which the next writer continues.
        """
        if self._number >= MAX_SEGMENTS:
            raise OSError(errno.EFBIG, f"{MAX_SEGMENTS} segments are full")
        if self._file >= 0:
            sync_data(self._file)
        path = segment(self.folder, self._number + 1)
        # O_EXCL: a segment of this number that exists already is not ours.
        following = os.open(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        if self._file >= 0:
            os.close(self._file)
        self._file, self._number, self._size, self._day = following, self._number + 1, 0, ""
        # Records are durable only once the name of their file is, too.
        sync_directory(self.folder)

    def _checkpoint(self) -> Note:
        """Records first: a checkpoint on the disk of records that are not would look like a
        rollback.
        """
        size = len(self._tree)
        if self._signed and self._signed[0] == size:
            return self._signed[1]
        note = self.signer.sign(size, self._tree.root())
        try:
            if self._file >= 0:
                sync_data(self._file)
            write_atomic(self.folder / CHECKPOINT, bytes(note))
        except OSError as error:
            raise self._fail(unwritable(error)) from error
        except LocalError as error:
            raise self._fail(str(error)) from error
        self._signed = size, note
        return note

    def _recover(self, visit: Callable[[VerifiedLine], None], form: Form | None) -> None:
        """Check chain and checkpoint, then put a torn tail aside.

        The order survives a crash after each step: the tail is copied before it is cut, and what
        lies in the torn files beyond the recovery records was cut without one, so it is recorded
        now.
        """
        for left in self.folder.glob(f".{CHECKPOINT}.*.tmp"):  # of a writer that died
            left.unlink()
        # A writer that died may have renamed its checkpoint and not synced the folder: the names
        # that are read from here on are durable first.
        sync_directory(self.folder)

        # (1) The checkpoint on the disk is ours.
        before = stored_by(self.folder, self.signer.public)

        # (2) The records hold, and those behind it were written with our key. The walk continues
        # after a strange one, so that rolled-back records are reported first.
        signed = before.size if before else 0
        reading = Reading(self.folder, form)
        agreement = Agreement([HeldHead("the folder itself", before)] if before else [])
        # ``recorded`` counts the bytes that earlier recoveries recorded; torn files may hold more.
        recorded, strange = 0, ""
        for line in reading:
            agreement.append(line.hash)
            if line.seq >= signed and line.record["nonce"] != nonce_of(self._key, line.record):
                strange = (
                    strange
                    or f"seq {line.seq}, behind its checkpoint, was not written with this log key"
                )
            if line.record["type"] == RECOVERY and isinstance(
                line.record.get("dropped_bytes"), int
            ):
                recorded += line.record["dropped_bytes"]
            visit(line)

        # (3) They are those of the checkpoint.
        problems = list(agreement.problems())
        if strange:
            problems.append(strange)
        if before is None and (reading.count or reading.torn):
            problems = [
                (
                    f"it has {reading.count} records and no {CHECKPOINT}, which is signed before"
                    " the first"
                )
            ]
        if problems:
            raise LocalError(
                f"{self.folder}: was rolled back or altered: {problems[0]}; restore the newest copy"
                " of the whole folder, or keep this one as evidence, move it away and begin a"
                " new one"
            )
        # The tree that was compared with the checkpoint is kept, so the disk is read once.
        self._tree, self._head = agreement.tree, reading.head

        # Signed before the first record, so that records without a checkpoint are never new.
        if before is None:
            self._checkpoint()
        self._take_up(reading)

        # (4) What a crash tore off is said in a record, under a checkpoint.
        put_aside = sum(path.stat().st_size for path in self.folder.glob("seg-*.torn"))
        dropped = max(len(reading.torn), put_aside - recorded)
        if dropped > 0:
            record = {
                "type": RECOVERY,
                "dropped_bytes": dropped,
                "last_good_seq": reading.count - 1,
            }
            done = self.append(record)
            visit(VerifiedLine(done.seq, bytes.fromhex(done.leaf), record))
            self.checkpoint()

    def _take_up(self, reading: Reading) -> None:
        """Open the last segment for writing, or make the first.

        Its torn tail goes into a file of its own.
        """
        if reading.last is None:
            self._rotate()
            return
        self._file = os.open(reading.last, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._number, self._size, self._day = (
            int(reading.last.stem[4:]),
            reading.size,
            reading.began[:10],
        )
        if reading.torn:
            # Copied before it is cut: a crash in between leaves the tail in both places.
            _append_file(torn(reading.last), reading.torn)
            os.ftruncate(self._file, reading.size)
            sync_data(self._file)


def _unseen(line: VerifiedLine) -> None:
    pass


def _append_file(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)
