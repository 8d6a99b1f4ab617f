"""A copy of a coordinator's state, made while it runs, and its way back.

::

    <backup>/                    0700
      backup.json                what the others are, signed by the coordinator: written last
      coordinator.sqlite         one state of the database
      jobs/<job>/…               the tensor files of that state
      weights/ enrolments/ renewals/
      ledger/                    at least the records that the database knows of

The database is copied first, then the tensor files, the ledger's checkpoint, its segments. A
receipt leaves after its record is in the ledger and its rows in the database, and the ledger only
grows; so the ledger has every record of which the database has rows, as after a crash between the
two. Tensor files go only after a commit that no longer names them: if the database has changed
before all files were linked, or opened where they cannot be linked, all is begun again.

Private keys, roster and configuration are not in it: it is not for them that it is made each night,
and whoever has the keys is the coordinator. A restored coordinator is an older one. What silos
signed since stays in their ledgers and memories, by which they refuse to give it again.
"""

import errno
import hashlib
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import pydantic

from ... import log
from ...algorithms.models.pretrained import WEIGHTS_FOLDER
from ...errors import LocalError, reason
from ...files.documents import (
    Strict,
    canonical_json,
    parse_canonical,
    read_bytes,
    sync_directory,
    unwritable,
    write_new,
)
from ...security import preflight
from ...security.identity.certificate import utc_now
from ...security.identity.domains import BACKUP
from ...security.identity.keys import Hex32, Hex64, Id, Keys
from ...security.identity.roster import Roster
from ...security.ledger.audit import LEDGER
from ...security.ledger.ingress_ledger import ReceivingLedger
from ...security.ledger.records import StopRecord
from ...security.log import note as notes
from ...security.log.lock import locked
from ...security.log.note import Note
from ...security.log.segments import CHECKPOINT, segments
from . import table_seals
from .database import DATABASE, Database, for_reading
from .store import check_folder

MANIFEST, RESTORING = "backup.json", ".restoring"
JOBS = "jobs"
FOLDERS = (JOBS, WEIGHTS_FOLDER, "enrolments", "renewals", LEDGER)
PARTS = (*FOLDERS, DATABASE)  # of a coordinator's folder; the others are of its process alone
# A file that cannot be linked is copied: another disk, one without links, or another owner.
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES)
MOST_SECONDS = 600.0  # for one moment in which the database stands still
MANIFEST_BYTES = 1 << 28  # of a million files

Count = Annotated[int, pydantic.Field(strict=True, ge=0)]


class BackedUpFile(Strict):
    """One file of a backup, by its path in the folder."""

    path: str
    size: Count
    sha256: Hex32


class Manifest(Strict):
    """``backup.json``: whose state it is, of when, and every file of it.

    ``records`` of the ledger are in it, under ``roster``, a version of it. ``signature`` is the
    coordinator's over all else, so that nobody can change a backup who keeps it.
    """

    version: Literal[1] = 1
    federation: Id
    coordinator: Id
    software: str
    made: str
    roster: Count
    records: Count
    files: tuple[BackedUpFile, ...]
    signature: Hex64 = "0" * 128

    def signed_bytes(self) -> bytes:
        """The bytes that are signed: canonical JSON of all fields but the signature."""
        return canonical_json(self.model_dump(mode="json", exclude={"signature"}))


@dataclass(frozen=True)
class Owner:
    """Whose state is backed up: the coordinator's folder, its keys and its roster."""

    directory: Path
    keys: Keys
    roster: Roster


# Making one.


def make(folder: Path, owner: Owner) -> Manifest:
    """Back up into a new folder, while the coordinator runs or not; what was written.

    LocalError where it is there already, or something cannot be read or written; nothing of it
    stays then.
    """
    if not (owner.directory / DATABASE).exists():
        raise LocalError(f"{owner.directory / DATABASE}: no such file; no coordinator has run here")
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise LocalError(
            f"{folder}: cannot make it: {reason(error)}; a backup needs a new folder"
        ) from error
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, folder)
        try:
            _copy(folder, owner.directory)
            made = _described(folder, owner)
        except OSError as error:
            raise LocalError(f"{folder}: cannot back up to it: {unwritable(error)}") from error
        write_new(folder / MANIFEST, canonical_json(made.model_dump(mode="json")) + b"\n")
        # What cannot be restored is no backup.
        verified(folder, owner)
        undo.pop_all()
    return made


def _copy(folder: Path, directory: Path) -> None:
    """All but the manifest, in the order that the module's docstring gives."""
    until = time.monotonic() + MOST_SECONDS
    while not _copied_at_rest(folder, directory):
        if time.monotonic() > until:
            raise LocalError(
                f"{directory / DATABASE}: changed all the time; make the backup on a disk to which"
                " files can be linked, or while no round is open"
            )
    for name in FOLDERS[1:-1]:
        for path in sorted((directory / name).glob("[!.]*")):
            _finish(_take(path, _place(folder, directory, path)), folder / name / path.name)
    # The checkpoint before the records, which only grow.
    ledger = directory / LEDGER
    _write(folder / LEDGER / CHECKPOINT, read_bytes(ledger / CHECKPOINT))
    *whole, last = segments(ledger)
    for path in (*whole, *sorted(ledger.glob("seg-*.torn"))):
        _finish(_take(path, _place(folder, directory, path)), folder / LEDGER / path.name)
    # The daemon may be in the middle of a line.
    lines = last.read_bytes()
    _write(folder / LEDGER / last.name, lines[: lines.rfind(b"\n") + 1])


def _copied_at_rest(folder: Path, directory: Path) -> bool:
    """Database and tensor files; False if the database changed meanwhile, and nothing is left."""
    target = folder / DATABASE
    opened: dict[Path, BinaryIO] = {}
    try:
        with closing(_reading(directory / DATABASE)) as source, closing(_copy_at(target)) as copy:
            source.backup(copy)
            before = table_seals.stored(copy)
            jobs = [name for (name,) in copy.execute("SELECT name FROM jobs")]
        opened = _taken(folder, directory, jobs)
        # Another connection: the first sees no change that a daemon makes which was started since.
        with closing(_reading(directory / DATABASE)) as after:
            quiet = table_seals.stored(after) == before
        if quiet:
            for path, file in opened.items():
                _finish(file, path)
            return True
    except sqlite3.Error as error:
        raise LocalError(f"{directory / DATABASE}: cannot back it up: {error}") from error
    finally:
        for file in opened.values():
            file.close()
    target.unlink()
    shutil.rmtree(folder / JOBS, ignore_errors=True)
    return False


def _reading(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(for_reading(path), uri=True, isolation_level=None)


def _copy_at(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None)


def _taken(folder: Path, directory: Path, jobs: list[str]) -> dict[Path, BinaryIO]:
    """Link the files of these jobs; those that cannot be linked are open, by where they go."""
    opened = {}
    for job in jobs:
        # Names with a dot in front are of files that are still written.
        for path in sorted((directory / JOBS / job).glob("[!.]*")):
            target = _place(folder, directory, path)
            # One that goes meanwhile is rubbish, or the database changes.
            with suppress(FileNotFoundError):
                if (file := _take(path, target)) is not None:
                    opened[target] = file
    return opened


def _place(folder: Path, directory: Path, path: Path) -> Path:
    target = folder / path.relative_to(directory)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return target


def _take(path: Path, target: Path) -> BinaryIO | None:
    """Link a file that never changes under its name; open where it cannot be linked."""
    try:
        os.link(path, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        return path.open("rb")
    return None


def _finish(file: BinaryIO | None, target: Path) -> None:
    """Copy what could not be linked."""
    if file is not None:
        with file, target.open("xb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
            os.fsync(copy.fileno())


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_new(path, data)


def _described(folder: Path, owner: Owner) -> Manifest:
    files = tuple(
        BackedUpFile(path=path, size=size, sha256=digest) for path, size, digest in _found(folder)
    )
    made = Manifest(
        federation=owner.roster.federation,
        coordinator=owner.keys.entry.id,
        software=f"staddle {version('staddle')}",
        made=utc_now().strftime("%Y-%m-%dT%H:%M:%SZ"),
        roster=owner.roster.version,
        records=_records(folder),
        files=files,
    )
    signature = owner.keys.sign(BACKUP, made.signed_bytes()).hex()
    return made.model_copy(update={"signature": signature})


def _records(folder: Path) -> int:
    """Whole records of its ledger."""
    return sum(path.read_bytes().count(b"\n") for path in segments(folder / LEDGER))


def _found(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Path, size and digest of each file of a backup but its manifest."""
    for path in sorted(folder.rglob("*")):
        # A link could lead out of the backup.
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise LocalError(f"{path}: is no file of a backup; take it out")
        if path.is_file() and path != folder / MANIFEST:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            yield path.relative_to(folder).as_posix(), path.stat().st_size, digest


# Checking and restoring one.


def verified(folder: Path, owner: Owner) -> Manifest:
    """The manifest of a backup that can be restored; the checks run in order.

    LocalError says what is wrong with it.
    """
    path = folder / MANIFEST
    made = parse_canonical(read_bytes(path, MANIFEST_BYTES), Manifest, str(path))
    # (1) This coordinator made it, and nobody changed what it says.
    entry, roster = owner.keys.entry, owner.roster
    whose, ours = (made.federation, made.coordinator), (roster.federation, entry.id)
    if whose != ours or not entry.has_signed(
        BACKUP, made.signed_bytes(), bytes.fromhex(made.signature)
    ):
        raise LocalError(
            f"{path}: coordinator {entry.id!r} of {roster.federation!r} did not sign it with these"
            " keys; name its own configuration, with the keys that it had then"
        )
    # (2) An older roster would let in who was removed since.
    if roster.version < made.roster:
        raise LocalError(
            f"{path}: was made under roster version {made.roster}, and this configuration has"
            f" version {roster.version}; get the newest from a founder or a silo"
        )
    # (3) Its files are those that were written.
    _check_files(folder, made)
    # (4) Database and tensor files belong together, and no table was changed.
    known = _check_database(folder, owner)
    # (5) The ledger holds, under this log key, and has all that the database knows.
    preflight.ledger(folder, roster.federation, owner.keys.folder, known)
    return made


def _check_files(folder: Path, made: Manifest) -> None:
    stated = {(each.path, each.size, each.sha256) for each in made.files}
    if differing := sorted({path for path, *_ in stated ^ {*_found(folder)}}):
        raise LocalError(
            f"{folder / differing[0]}: is not what was backed up: changed, gone or added since; use"
            " another backup"
        )


def _check_database(folder: Path, owner: Owner) -> Note | None:
    """The head of the ledger that it knows, if it is of the present log key."""
    path, entry = folder / DATABASE, owner.keys.entry
    with closing(Database(path, read_only=True)) as database:
        for state in database.states():
            own = folder / JOBS / state.job
            check_folder(own, state.round)
            there = {path.name for path in own.glob("*")}
            if missing := {*database.files(state.job).values()} - there:
                raise LocalError(f"{own / min(missing)}: is missing; use another backup")
        head = database.heads().get(entry.id)
    return notes.parse(head.note) if head and head.log_key == entry.log_key else None


def restore(folder: Path, owner: Owner) -> Manifest:
    """Put a backup in the place of a state that is not there, and say so in its ledger.

    LocalError where there is one, or the backup is not whole; nothing has changed then. After a
    crash in the middle no coordinator starts, and the same command starts again.
    """
    owner.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    staging = owner.directory / RESTORING
    with locked(owner.directory):
        _make_way(owner.directory, staging)
        try:
            shutil.copytree(folder, staging, symlinks=True, copy_function=shutil.copyfile)
            # Whatever modes the backup has had on its way.
            for path, *_ in os.walk(staging):
                Path(path).chmod(0o700)
            os.sync()
        except OSError as error:
            raise LocalError(f"{staging}: cannot copy to it: {unwritable(error)}") from error
        # The copy is checked, and not the backup: a disk that fails may change either.
        try:
            made = verified(staging, owner)
        except LocalError:
            shutil.rmtree(staging)
            raise
        _say_so(staging, owner, made)
        for name in filter(lambda name: (staging / name).exists(), PARTS):
            (staging / name).rename(owner.directory / name)
        sync_directory(owner.directory)
        # Its going is the end of the restore (``occupied``).
        shutil.rmtree(staging)
        sync_directory(owner.directory)
    log.event("restored", made=made.made, records=made.records)
    return made


@contextmanager
def occupied(directory: Path) -> Iterator[None]:
    """Lock a coordinator's folder while the block runs.

    LocalError if another process has it, or a restore ended in the middle.
    """
    with locked(directory):
        if (directory / RESTORING).exists():
            raise LocalError(
                f"{directory / RESTORING}: a restore has not ended; run staddle coordinator"
                " restore again"
            )
        yield


def _make_way(directory: Path, staging: Path) -> None:
    """Take away what a restore left that did not end; LocalError for a state of its own."""
    there = [directory / name for name in PARTS if (directory / name).exists()]
    if there and not staging.exists():
        raise LocalError(
            f"{there[0]}: this folder has a state already; move the whole folder away first, and"
            " keep it: it may be newer than the backup"
        )
    for path in (*filter(Path.is_dir, there), *filter(Path.exists, (staging,))):
        shutil.rmtree(path)
    (directory / DATABASE).unlink(missing_ok=True)


def _say_so(folder: Path, owner: Owner, made: Manifest) -> None:
    """Record the restore: silos see that records are gone, and auditors that it was told."""
    with ReceivingLedger.open(
        folder / LEDGER, owner.keys.entry.id, owner.roster.federation, owner.keys.log
    ) as ledger:
        ledger.append(StopRecord(reason=f"restored from the backup of {made.made}"))
