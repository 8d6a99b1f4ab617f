"""The coordinator's database, ``coordinator.sqlite``: each transaction is on the disk when it ends.

It holds jobs with their state and their method's state, rounds with their members and metrics,
submissions with their receipts, the events of an open round's secure sum, evidence against dealers
in such sums, contributions to the keys that silos share, and which tensor file holds what. Tensor
files are written under names of their own before the transaction that names them, and removed after
the one that no longer does; so at whatever instant the process dies, rows and files agree. Rows
that a disk changed are found when the file is opened (table_seals.py).

One connection, used from the event loop's thread alone.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from ...algorithms.job.evaluated import evaluation_of
from ...errors import LocalError
from ...files import tensor_file
from ...files.documents import canonical_json, parse_canonical
from ...proto import secure_pb2 as pb
from ...proto.convert.secagg_messages import misdealing_from_wire, misdealing_to_wire
from ...security.blind.mix_row import RowMemory
from ...security.secagg.evidence import Misdealing
from ..rounds.machine import JobState
from . import table_seals
from .replay_log import SETTLED, ReplayEntry

FileKind: TypeAlias = Literal["result", "version", "mail", "words"]
FileKey: TypeAlias = tuple[FileKind, str, str]  # room, part, silo ("" for a result)
Files: TypeAlias = Mapping[FileKey, str]  # place → file name in the job's folder


def relayed(places: Iterable[FileKey]) -> tuple[str, ...]:
    """Parts whose sum is kept only as words that silos can open; sorted by name."""
    found = set(places)
    return tuple(
        sorted(
            part for room, part, _ in found if room == "words" and ("result", part, "") not in found
        )
    )


DATABASE = "coordinator.sqlite"  # in the coordinator's folder
VERSION = 5
SUBMISSIONS = """\
CREATE TABLE submissions (
  job TEXT NOT NULL REFERENCES jobs(name),
  round INTEGER NOT NULL,
  silo TEXT NOT NULL,
  part TEXT NOT NULL,                   -- of a blind job, where it crosses by itself, else ""
  file TEXT NOT NULL,
  size INTEGER NOT NULL,
  sha256 TEXT NOT NULL,
  ledger_seq INTEGER NOT NULL,          -- where the silo's ledger has it
  ledger_leaf TEXT NOT NULL,
  receipt BLOB NOT NULL,                -- our signature
  PRIMARY KEY (job, round, silo, part)
) STRICT"""
SCHEMA = f"""
{SUBMISSIONS};
CREATE TABLE jobs (
  name TEXT PRIMARY KEY,
  position INTEGER NOT NULL UNIQUE,     -- jobs run in this order
  signed BLOB NOT NULL,                 -- as the operator signed it
  state TEXT NOT NULL,                  -- JSON of JobState; submissions say what came since
  method BLOB NOT NULL                  -- safetensors of the method's coordinator state
) STRICT;
CREATE TABLE rounds (
  job TEXT NOT NULL REFERENCES jobs(name),
  round INTEGER NOT NULL,
  members TEXT NOT NULL,                -- JSON list: silos whose contributions counted
  metrics TEXT NOT NULL,                -- JSON object: sums over the members
  PRIMARY KEY (job, round)
) STRICT;
CREATE TABLE heads (
  silo TEXT PRIMARY KEY,
  log_key TEXT NOT NULL,                -- of the roster entry under which it was checked
  note BLOB NOT NULL                    -- the checkpoint of the silo's ledger, as it signed it
) STRICT;
CREATE TABLE files (
  job TEXT NOT NULL REFERENCES jobs(name),
  room TEXT NOT NULL,
  part TEXT NOT NULL,
  silo TEXT NOT NULL,
  file TEXT NOT NULL,
  PRIMARY KEY (job, room, part, silo)
) STRICT;
"""
SECURE = """
CREATE TABLE secure (                   -- events of an open round's secure sum
  job TEXT NOT NULL REFERENCES jobs(name),
  round INTEGER NOT NULL,
  number INTEGER NOT NULL,              -- rows are replayed in this order
  attempt INTEGER NOT NULL,
  kind TEXT NOT NULL,
  silo TEXT NOT NULL,                   -- who gave it, or ""
  body BLOB NOT NULL,
  PRIMARY KEY (job, round, number)
) STRICT
"""
HIDDEN = """
CREATE TABLE contributions (            -- of each silo to the key its job's silos share
  job TEXT NOT NULL REFERENCES jobs(name),
  silo TEXT NOT NULL,
  roster TEXT NOT NULL,                 -- digest of the members of the roster that it is for
  body BLOB NOT NULL,                   -- Contributed, without its session
  PRIMARY KEY (job, silo)
) STRICT;
CREATE TABLE hidden (                   -- padded and rotated uploads not yet mixed
  job TEXT NOT NULL REFERENCES jobs(name),
  round INTEGER NOT NULL,
  part TEXT NOT NULL,
  silo TEXT NOT NULL,
  context BLOB NOT NULL,
  file TEXT NOT NULL,
  size INTEGER NOT NULL,
  sha256 TEXT NOT NULL,
  signed BLOB NOT NULL,                 -- PaddedWordUpload; empty: unsigned, or rotated
  PRIMARY KEY (job, round, part, silo)
) STRICT;
CREATE TABLE mixed (                    -- of each recipient's rows: RowMemory
  job TEXT NOT NULL REFERENCES jobs(name),
  part TEXT NOT NULL,
  silo TEXT NOT NULL,
  memory TEXT NOT NULL,
  PRIMARY KEY (job, part, silo)
) STRICT;
"""
PROOFS = """
CREATE TABLE misdealings (              -- evidence against dealers: secagg/evidence.py
  job TEXT NOT NULL REFERENCES jobs(name),
  dealer TEXT NOT NULL,
  body BLOB NOT NULL,                   -- Misdealing of proto/secure.proto
  PRIMARY KEY (job, dealer)
) STRICT;
"""
# Versions without secure sums; without parts that cross by themselves; without evidence that is
# kept, and whose states have all that was given.
BEFORE_SECURE, BEFORE_HIDDEN, BEFORE_PROOFS = BEFORE = (2, 3, 4)
PARTS = (
    "ALTER TABLE submissions RENAME TO whole",
    SUBMISSIONS,
    (
        "INSERT INTO submissions SELECT job, round, silo, '', file, size, sha256, ledger_seq,"
        " ledger_leaf, receipt FROM whole"
    ),
    "DROP TABLE whole",
)
_STATE = TypeAdapter(JobState)


@dataclass(frozen=True)
class StoredHidden:
    """One padded or rotated upload of a blind job, which a file holds whole.

    ``context`` binds the upload to its round. ``sha256`` is of the whole file, of ``size`` bytes.
    """

    round: int
    part: str
    silo: str
    context: bytes
    file: str
    size: int
    sha256: bytes
    # PaddedWordUpload without its session, once the silo has signed it; of a rotated one never
    signed: bytes = b""


@dataclass(frozen=True)
class StoredJob:
    """One job as it stood when the last transaction ended.

    ``signed`` is the job file as the operator signed it. ``method`` is the state of the method's
    coordinator half, by name.
    """

    signed: bytes
    state: JobState
    method: dict[str, Tensor]
    files: Files
    hidden: tuple[StoredHidden, ...] = ()
    # (part, silo) → of its rows
    memories: Mapping[tuple[str, str], RowMemory] = field(default_factory=dict)
    # digests of the files of versions, by name
    given: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Submission:
    """One accepted upload.

    ``sha256`` and ``ledger_leaf`` in hex, ``size`` in bytes. ``receipt`` is only the signature.
    """

    round: int
    silo: str
    file: str
    size: int
    sha256: str
    ledger_seq: int
    ledger_leaf: str
    receipt: bytes
    part: str = ""  # of a blind job, where it crosses by itself


@dataclass(frozen=True)
class StoredContribution:
    """A silo's contribution to the key of a job: key_contributions.py."""

    members: str  # digest of the coordinator and silos that it is for, hex
    body: bytes


@dataclass(frozen=True)
class StoredHead:
    """The last checkpoint that is held of a silo's ledger.

    ``note`` is the signed note byte for byte.
    """

    log_key: str  # hex
    note: bytes


class Database:
    """The rows; ``transaction`` around what belongs together.

    Write only in a transaction. LocalError names the file if the disk or a row is at fault.
    """

    def __init__(
        self, path: Path, *, read_only: bool = False, fence: Callable[[], object] = bool
    ) -> None:
        """Open or create the file.

        LocalError where it is not ours, cannot be read, or was changed by the disk. ``read_only``
        neither creates nor changes anything, next to a running coordinator or without one.
        ``fence`` raises LocalError in each transaction of a process that may write no more.
        """
        self._fence = fence
        self._path = path
        try:
            opened = for_reading(path) if read_only else str(path)
            self._connection = sqlite3.connect(opened, isolation_level=None, uri=read_only)
            with self._explained():
                if read_only:
                    self._connection.execute("BEGIN")  # one state of the file in all that is read
                    self._check_version()
                    table_seals.check(self._connection, path)
                else:
                    self._prepare()
        except sqlite3.Error as error:
            raise LocalError(
                f"{path}: cannot open it: {error}; check the folder and its owner"
            ) from error

    def _prepare(self) -> None:
        run = self._connection.execute
        # Others read the file while the daemon writes (results.py), and a receipt that has left
        # must survive a loss of power.
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        # Off by default in SQLite; without it, rows could refer to jobs that do not exist.
        run("PRAGMA foreign_keys = ON")
        (found,) = run("PRAGMA user_version").fetchone()
        # A new file has version 0 and gets all tables, an older one those that it lacks.
        if found in BEFORE or not found:
            new = (
                (SCHEMA, 0),
                (SECURE, BEFORE_SECURE),
                (HIDDEN, BEFORE_HIDDEN),
                (PROOFS, BEFORE_PROOFS),
            )
            scripts = [script for script, last in new if found <= last]
            with self.transaction():
                # One at a time: ``executescript`` would first commit the transaction.
                for statement in ";\n".join(
                    (*scripts, *(PARTS if found in BEFORE[:2] else ()))
                ).split(";\n"):
                    run(statement)
                # Rows that an older release left are taken as they are.
                table_seals.begin(self._connection)
                run(f"PRAGMA user_version = {VERSION}")
        else:
            self._check_version()
            table_seals.check(self._connection, self._path)
        # After ``begin``, which has sealed the rows that were there before.
        table_seals.keep(self._connection)

    def _check_version(self) -> None:
        (found,) = self._connection.execute("PRAGMA user_version").fetchone()
        if found not in (*BEFORE, VERSION):  # to be read, older ones are the same
            raise LocalError(
                f"{self._path}: is of version {found}, this release reads {VERSION}; use the"
                " release that made it"
            )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all of the block's changes or none, on the disk when it ends.

        LocalError if the disk fails.

        Enter it only in the event loop. Transactions do not nest.
        """
        with self._explained():
            # Where another program holds the file this fails now, not in the middle.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._fence()
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite itself rolls back where the disk is full.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        # A UnicodeDecodeError: names in a damaged schema.
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise LocalError(
                f"{self._path}: {error}; make room on the disk, mount it writable, or restore the"
                " file, and start the coordinator again"
            ) from error

    def close(self) -> None:
        """Let the file go."""
        self._connection.close()

    # Jobs.

    def jobs(self) -> list[StoredJob]:
        """All jobs in their order; LocalError for a state that cannot be read."""
        with self._explained():
            rows = self._connection.execute(
                "SELECT name, signed, state, method FROM jobs ORDER BY position"
            ).fetchall()
            return [self._stored(*row) for row in rows]

    def states(self) -> list[JobState]:
        """The states of all jobs in their order; no method's tensors are read."""
        with self._explained():
            rows = self._connection.execute(
                "SELECT name, state FROM jobs ORDER BY position"
            ).fetchall()
            return [self._state(name, state) for name, state in rows]

    def _state(self, name: str, state: str) -> JobState:
        """The state as it was saved last, with the uploads of a plain round since.

        Each upload of such a round that was accepted has its row in ``submissions``, and counts; so
        the state, which is as long as the job has silos, is not written again for each of them.
        """
        try:
            read = _STATE.validate_json(state)
        except ValidationError as error:
            raise LocalError(
                f"{self._path}: the state of job {name!r} cannot be read; restore a backup"
            ) from error
        # Blind uploads count only with their sum, and between rounds there are none.
        if read.blind or not read.cohort:
            return read
        rows = self._connection.execute(
            "SELECT silo, sha256 FROM submissions WHERE job = ? AND round = ? ORDER BY rowid",
            (name, read.round),
        )
        return replace(read, given={**read.given, **dict(rows.fetchall())})

    def _stored(self, name: str, signed: bytes, state: str, method: bytes) -> StoredJob:
        read = self._state(name, state)
        # Plain jobs have none.
        hidden, memories = self._hidden(name) if read.blind else ((), {})
        origin = f"{self._path}: what the method of job {name!r} knows (jobs.method)"
        tensors, _ = tensor_file.from_bytes(method, origin)
        rows = self._connection.execute(
            "SELECT file, sha256 FROM submissions JOIN files USING (job, file) WHERE job = ? AND"
            " room = 'version'",
            (name,),
        )
        return StoredJob(
            signed, read, tensors, self.files(name), hidden, memories, dict(rows.fetchall())
        )

    def files(self, job: str) -> dict[FileKey, str]:
        """The files of a job by place, since its last folded round.

        File names are relative to the job's folder.
        """
        rows = self._connection.execute(
            "SELECT room, part, silo, file FROM files WHERE job = ?", (job,)
        )
        return {(room, part, silo): file for room, part, silo, file in rows}

    def add_job(self, signed: bytes, state: JobState, method: Mapping[str, Tensor]) -> None:
        """Append a job to the queue.

        Positions only grow, so jobs stay in the order in which they came.
        """
        self._connection.execute(
            "INSERT INTO jobs SELECT ?, coalesce(max(position), 0) + 1, ?, ?, ? FROM jobs",
            (state.job, signed, _dumped(state), tensor_file.to_bytes(method)),
        )

    def drop_job(self, name: str) -> None:
        """Remove a job that has no rows but its own, if there is one of this name.

        An error of SQLite, and so no change, where rounds, uploads or contributions are kept of it.
        """
        self._connection.execute("DELETE FROM jobs WHERE name = ?", (name,))

    def save_state(self, state: JobState) -> None:
        """Replace a job's state; an upload that changes only ``given`` needs ``add_submission``."""
        self._connection.execute(
            "UPDATE jobs SET state = ? WHERE name = ?", (_dumped(state), state.job)
        )

    # Rounds.

    def add_submission(self, job: str, given: Submission, *, again: bool = False) -> None:
        """Note an accepted upload with its receipt.

        ``again``: in the place of one of an earlier attempt.
        """
        fields = (given.round, given.silo, given.file, given.size, given.sha256)
        proof = (given.ledger_seq, given.ledger_leaf, given.receipt)
        how = "INSERT OR REPLACE" if again else "INSERT"
        row = (job, *fields[:2], given.part, *fields[2:], *proof)
        self._connection.execute(
            f"{how} INTO submissions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row
        )

    def drop_submissions(self, job: str, round_: int, silos: Iterable[str]) -> None:
        """Forget accepted uploads of a round: their silos are asked for them again.

        Their receipts go, too: a silo that asks must not learn that it has uploaded.
        """
        rows = [(job, round_, silo) for silo in silos]
        self._connection.executemany(
            "DELETE FROM submissions WHERE job = ? AND round = ? AND silo = ?", rows
        )

    def heads(self) -> dict[str, StoredHead]:
        """The head that is held of each silo's ledger.

        The coordinator's own head is among them, under its own id.
        """
        with self._explained():
            rows = self._connection.execute("SELECT silo, log_key, note FROM heads").fetchall()
        return {silo: StoredHead(log_key, note) for silo, log_key, note in rows}

    def save_head(self, silo: str, head: StoredHead) -> None:
        """Replace the head that is held of a silo's ledger.

        The caller has proven that it extends the old one, or the log key is new.
        """
        self._connection.execute(
            "INSERT OR REPLACE INTO heads VALUES (?, ?, ?)", (silo, head.log_key, head.note)
        )

    def submission(self, job: str, round_: int, silo: str, part: str = "") -> Submission | None:
        """A silo's accepted upload in a round, or of one part in a blind one; None for none.

        ``part`` is empty for the round's main upload.
        """
        with self._explained():
            row = self._connection.execute(
                "SELECT round, silo, file, size, sha256, ledger_seq, ledger_leaf, receipt, part"
                " FROM submissions WHERE job = ? AND round = ? AND silo = ? AND part = ?",
                (job, round_, silo, part),
            ).fetchone()
        return Submission(*row) if row else None

    # Secure sums.

    def add_secure(self, job: str, round_: int, row: ReplayEntry) -> None:
        """Append an event of a round's sum.

        Rows are numbered in order.
        """
        self._connection.execute(
            "INSERT INTO secure SELECT ?, ?, coalesce(max(number), -1) + 1, ?, ?, ?, ? FROM secure "
            "WHERE job = ? AND round = ?",
            (job, round_, row.attempt, row.kind, row.silo, row.body, job, round_),
        )

    def secure_rows(self, job: str, round_: int) -> list[ReplayEntry]:
        """The events of all attempts at a round's sum, in order."""
        with self._explained():
            rows = self._connection.execute(
                "SELECT attempt, kind, silo, body FROM secure WHERE job = ? AND round = ? ORDER BY"
                " number",
                (job, round_),
            ).fetchall()
        return [ReplayEntry(*row) for row in rows]

    def add_misdealing(self, job: str, evidence: Misdealing) -> None:
        """Keep evidence against a dealer for the life of the job; the first that was kept stays."""
        body = misdealing_to_wire(evidence).SerializeToString(deterministic=True)
        self._connection.execute(
            "INSERT OR IGNORE INTO misdealings VALUES (?, ?, ?)", (job, evidence.dealer, body)
        )

    def misdealings(self, job: str) -> tuple[Misdealing, ...]:
        """All evidence of a job, ascending by dealer, the order on the wire."""
        with self._explained():
            rows = self._connection.execute(
                "SELECT dealer, body FROM misdealings WHERE job = ? ORDER BY dealer", (job,)
            ).fetchall()
        return tuple(
            misdealing_from_wire(dealer, pb.Misdealing.FromString(body)) for dealer, body in rows
        )

    def drop_secure(self, job: str, kept: Iterable[int] = ()) -> None:
        """Forget the sum of a round that is over, and settled rounds that are not ``kept``."""
        rounds = list(kept)
        marks = ", ".join("?" * len(rounds))
        self._connection.execute(
            f"DELETE FROM secure WHERE job = ? AND NOT (kind = ? AND round IN ({marks}))",  # noqa: S608 marks alone
            (job, SETTLED, *rounds),
        )

    def settled_rows(self, job: str) -> list[tuple[int, ReplayEntry]]:
        """What silos that were away receive of earlier rounds, by round, ascending."""
        with self._explained():
            rows = self._connection.execute(
                "SELECT round, attempt, kind, silo, body FROM secure WHERE job = ? AND kind = ?"
                " ORDER BY round",
                (job, SETTLED),
            ).fetchall()
        return [(round_, ReplayEntry(*row)) for round_, *row in rows]

    # Uploads of a Mix and of a Gram.

    def _hidden(
        self, job: str
    ) -> tuple[tuple[StoredHidden, ...], dict[tuple[str, str], RowMemory]]:
        run = self._connection.execute
        rows = run(
            "SELECT round, part, silo, context, file, size, sha256, signed FROM hidden WHERE job ="
            " ? ORDER BY round, part, silo",
            (job,),
        )
        hidden = tuple(
            StoredHidden(round_, part, silo, context, file, size, bytes.fromhex(sha256), signed)
            for round_, part, silo, context, file, size, sha256, signed in rows
        )
        known = run("SELECT part, silo, memory FROM mixed WHERE job = ?", (job,))
        origin = f"{self._path}: table mixed"
        return hidden, {
            (part, silo): parse_canonical(m.encode(), RowMemory, origin) for part, silo, m in known
        }

    def add_hidden(self, job: str, upload: StoredHidden) -> None:
        """Note an upload that is here whole.

        Its file is durable already. Drop an earlier version of the same part first.
        """
        fields = (upload.round, upload.part, upload.silo, upload.context, upload.file, upload.size)
        row = (job, *fields, upload.sha256.hex(), upload.signed)
        self._connection.execute("INSERT INTO hidden VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

    def sign_hidden(self, job: str, round_: int, part: str, silo: str, signed: bytes) -> None:
        """Note a silo's word on its upload.

        ``signed`` is a ``PaddedWordUpload`` without its session.
        """
        place = (signed, job, round_, part, silo)
        self._connection.execute(
            "UPDATE hidden SET signed = ? WHERE job = ? AND round = ? AND part = ? AND silo = ?",
            place,
        )

    def signed(self, job: str, round_: int, part: str, silo: str) -> bytes:
        """A silo's word on its upload; LocalError where there is none."""
        with self._explained():
            row = self._connection.execute(
                "SELECT signed FROM hidden WHERE job = ? AND round = ? AND part = ? AND silo = ?",
                (job, round_, part, silo),
            ).fetchone()
        if row is None or not row[0]:
            why = (
                f"job {job!r} has no upload of part {part!r} that {silo!r} signed; restore a backup"
            )
            raise LocalError(f"{self._path}: {why}")
        return bytes(row[0])

    def drop_hidden(self, job: str, files: Iterable[str]) -> None:
        """Forget uploads, by the names of their files, which the caller removes."""
        self._connection.executemany(
            "DELETE FROM hidden WHERE job = ? AND file = ?", [(job, file) for file in files]
        )

    def expire_hidden(self, job: str) -> None:
        """Forget all uploads of a job that is over, versions and rows put aside among them."""
        self._connection.execute("DELETE FROM hidden WHERE job = ?", (job,))
        self._connection.execute(
            "DELETE FROM files WHERE job = ? AND room IN ('version', 'mail')", (job,)
        )

    def save_memories(self, job: str, memories: Mapping[tuple[str, str], RowMemory]) -> None:
        """Replace what is known of the rows of a part that recipients have had.

        Call it before a row leaves: after a crash, the memory must cover all that has left.
        """
        self._connection.executemany(
            "INSERT OR REPLACE INTO mixed VALUES (?, ?, ?, ?)",
            [(job, part, silo, _plain(memory)) for (part, silo), memory in memories.items()],
        )

    # The keys that silos share.

    def add_contribution(self, job: str, silo: str, members: str, body: bytes) -> None:
        """Note a silo's contribution to the key of a job; each contributes once.

        A second one is an error of SQLite: it would change a key that silos may already have.
        """
        self._connection.execute(
            "INSERT INTO contributions VALUES (?, ?, ?, ?)", (job, silo, members, body)
        )

    def contribution(self, job: str, silo: str) -> StoredContribution | None:
        """One silo's contribution to the key of a job; None before it came."""
        with self._explained():
            row = self._connection.execute(
                "SELECT roster, body FROM contributions WHERE job = ? AND silo = ?", (job, silo)
            ).fetchone()
        return StoredContribution(*row) if row else None

    def contributions(self, job: str) -> dict[str, StoredContribution]:
        """The contributions to the key of a job, by silo."""
        with self._explained():
            rows = self._connection.execute(
                "SELECT silo, roster, body FROM contributions WHERE job = ?", (job,)
            ).fetchall()
        return {silo: StoredContribution(members, body) for silo, members, body in rows}

    # What a fold gave.

    def close_round(
        self,
        job: str,
        round_: int,
        members: Sequence[str],
        metrics: Mapping[str, int],
        method: Mapping[str, Tensor],
        files: Mapping[FileKey, str | None],
    ) -> None:
        """Note the results of a round's fold, with the files that changed (None: gone).

        The files are durable already. The caller removes those that are gone after the transaction.
        """
        run = self._connection.execute
        run(
            "INSERT INTO rounds VALUES (?, ?, ?, ?)",
            (job, round_, json.dumps(members), json.dumps(dict(metrics))),
        )
        # In the round's transaction, so that the method's state always matches its files.
        run("UPDATE jobs SET method = ? WHERE name = ?", (tensor_file.to_bytes(method), job))
        # Files are there before these rows name them, and are removed only after the commit.
        for place, file in files.items():
            if file is None:
                run(
                    "DELETE FROM files WHERE job = ? AND room = ? AND part = ? AND silo = ?",
                    (job, *place),
                )
            else:
                run("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", (job, *place, file))

    def evaluation(self, job: str) -> dict[str, Any]:
        """What the job's sums are (algorithms/job/evaluated.py)."""
        return evaluation_in(self.signed_job(job))

    def signed_job(self, job: str) -> bytes:
        """The job as its operator signed it."""
        with self._explained():
            (signed,) = self._connection.execute(
                "SELECT signed FROM jobs WHERE name = ?", (job,)
            ).fetchone()
        return bytes(signed)

    def rounds(self, job: str, first: int = 0) -> list[tuple[int, list[str], dict[str, int]]]:
        """Number, members and metrics of the closed rounds from ``first`` on, ascending."""
        with self._explained():
            rows = self._connection.execute(
                "SELECT round, members, metrics FROM rounds WHERE job = ? AND round >= ?"
                " ORDER BY round",
                (job, first),
            ).fetchall()
        return [
            (round_, json.loads(members), json.loads(metrics)) for round_, members, metrics in rows
        ]


def evaluation_in(signed: bytes) -> dict[str, Any]:
    """What the sums of a job are that was signed and accepted (algorithms/job/evaluated.py)."""
    return evaluation_of(json.loads(signed).get("document", {}))


def for_reading(path: Path) -> str:
    """SQLite's URI of a file that is only read."""
    # Without a log next to it nobody writes the file, and reading it needs no files of SQLite's
    # own: the folder may be on a disk that is mounted read-only.
    log = path.with_name(f"{path.name}-wal")
    return f"{path.absolute().as_uri()}?{'mode=ro' if log.exists() else 'immutable=1'}"


def _plain(memory: RowMemory) -> str:
    return canonical_json(memory.model_dump(mode="json")).decode()


def _dumped(state: JobState) -> str:
    return _STATE.dump_json(state).decode()
