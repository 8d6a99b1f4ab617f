"""The coordinator's tensors on its disk: uploads, published results, mail.

::

    spool/<silo>.part                  a stream that is still arriving: removed when it is refused,
                                       kept when its connection was lost
    jobs/<job>/<round>.<silo>.upload   a checked upload: stays while it is the last version of a
                                       Mix, else it goes after the fold
      <round>.<silo>.masked            the masked words of a secure sum: they go after the fold
      <round>.@sum.safetensors         the open sum of a round without words that silos receive:
                                       it goes after the fold
      <round>.<silo>.<part>.padded     the words of a blind Mix: they stay while they are the last
                                       version, or a row put aside needs them, until the job ends
      <round>.<silo>.<part>.rotated    the vectors of a blind Gram: they go after the fold
      <round>.<part>.safetensors       what a round published
      <round>.<part>.words             the words of a published sum that silos receive
      <round>.<part>.<silo>.safetensors  what a round put aside for a silo that was away
      <round>.<part>.<silo>.rows       the same in a blind job: rows without their words
      <round>.<part>.<silo>.words      the words of one silo's row, while it waits for that silo
      result.safetensors               what the method's coordinator half knows in the end

The database (database.py) says which files count. All others are rubbish, left by a fold or an
upload that did not come to its end, and are removed; so a database that does not know of whole
rounds is refused before.

Files appear under their name complete: written aside, fsynced, renamed. Tensors of uploads are
mapped, not read, so a fold holds one tensor of one silo at a time. A published part may not be
named like a silo's upload: the suffix differs.
"""

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

from safetensors import SafetensorError
from torch import Tensor

from ...algorithms.engines.aggregation import SILOS
from ...algorithms.exchange.delivery import CoordinatorState, Post
from ...algorithms.exchange.parts import Item, Part, Read, upload_items
from ...errors import LocalError, RefusedError
from ...files import tensor_file
from ...files.documents import remove, sync_directory, unwritable
from ...proto.wire import tensor_bytes
from .database import FileKey, Files
from .spool import MARGIN_BYTES, SpooledUpload

# Uploads that are hashed in parallel: SHA-256 releases the interpreter's lock.
READERS = 4
RESULT = "result.safetensors"
ROWS, WORDS = ".rows", ".words"
# of all files; the first four are uploads, which ``commit`` removes after the round that read them
SUFFIXES = (".upload", ".masked", ".padded", ".rotated", ROWS, WORDS, ".safetensors")


class DamagedError(LocalError):
    """The disk changed what these silos uploaded in the open round; they may upload it again.

    Only for plain rounds, before their fold.
    """

    def __init__(self, why: str, silos: tuple[str, ...]) -> None:
        super().__init__(why)
        self.silos = silos


def check_folder(folder: Path, round_: int) -> None:
    """LocalError where a job's folder holds tensors of rounds after ``round_``, its open one.

    ``round_`` is -1 for a job that the database does not have.
    """
    # No crash leaves such files: the database is missing or older, and they are the only copy of
    # these rounds.
    for path in sorted(folder.glob("*")):
        if path.suffix in SUFFIXES and _number(path) > round_:
            known = f"the job stands in round {round_}" if round_ >= 0 else "there is no such job"
            raise LocalError(
                f"{folder}: holds {path.name}, but by coordinator.sqlite {known}: it is missing, or"
                " older than this folder; bring coordinator.sqlite back, or move the folder away"
            )


class JobStore:
    """One job's tensor files: written once under a name of their own, never changed.

    The places of the last committed round (database.py) say which of them count; the others are
    rubbish, left by a fold that did not come to its end, or still read by somebody: they go with
    the round after.

    ``commit`` and ``clean`` run in the event loop, deliveries and folds in threads: a lock guards
    the values that they share.
    """

    def __init__(
        self,
        folder: Path,
        items: Callable[[int], Sequence[Item]],
        files: Files,
        given: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``items`` are the tensors that a silo uploads in a round, in wire order.

        ``given`` are the digests of versions, by file.
        """
        self._folder = folder
        self._items = items
        self._files = dict(files)
        self._given = dict(given)
        self._sound: set[str] = set()  # files that were found unchanged since the last commit
        # words that the fold of the open round read, and found unchanged
        self._folded: set[str] = set()
        self._mixed: Collection[str] = ()  # padded words that rows are of which were put aside
        self._rubbish: set[str] = set()  # no longer referred to since the last commit
        self._loading = threading.Lock()
        # published values, once a silo has asked; shared by all
        self._loaded: dict[str, dict[str, Tensor]] = {}
        # theirs, where they were published by this process
        self._digests: dict[str, dict[str, bytes]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LocalError(f"{folder}: cannot make it: {unwritable(error)}") from error

    def check_space(self, silo: str, size: int) -> None:
        """RefusedError STORAGE where an upload of this size would fill the disk.

        ``size`` in bytes; ``MARGIN_BYTES`` must stay free.
        """
        # The database and the ledger must be written, whatever silos upload.
        free = shutil.disk_usage(self._folder).free
        if free < size + MARGIN_BYTES:
            raise RefusedError(
                silo, "STORAGE", f"the coordinator has {free} bytes free, the upload needs {size}"
            )

    # Uploads of the open round.

    def keep(self, silo: str, round_: int, spooled: Path, *, masked: bool = False) -> str:
        """Give a checked upload its name, which is returned.

        The name is durable when it returns; the bytes were before (spool.py).
        """
        return self.keep_as((masked_words if masked else _upload)(round_, silo), spooled)

    def keep_as(self, name: str, spooled: Path) -> str:
        """Give a complete file this name, durably."""
        # A name that is not on the disk could be lost after a row of the database names it.
        spooled.replace(self._folder / name)
        sync_directory(self._folder)
        return name

    def check_uploads(self, given: Mapping[str, str], round_: int) -> None:
        """DamagedError for uploads of a round that are not what silos uploaded.

        ``given`` are digests by silo.
        """
        # Uploads may have been on the disk for a whole round.
        uploads = self._uploads(given, round_)
        with ThreadPoolExecutor(READERS) as pool:
            found = dict(
                zip(uploads, pool.map(SpooledUpload.digest, uploads.values()), strict=True)
            )
        if changed := tuple(silo for silo, digest in given.items() if digest != found[silo]):
            files = ", ".join(_upload(round_, silo) for silo in changed)
            raise DamagedError(f"{self._folder}: the disk changed {files}", changed)
        # If the upload becomes a version of a Mix, later checks need its digest.
        self._given |= {_upload(round_, silo): digest for silo, digest in given.items()}

    def check_files(self, digests: Mapping[str, str]) -> None:
        """LocalError where files are not as silos uploaded them, by their SHA-256 in hex.

        Each file is read once per round.
        """
        for name, digest in digests.items():
            self.check_once(
                name, partial(self._check, name, digest, partial(_sha256, self._folder / name))
            )

    def check_once(self, name: str, check: Callable[[], None]) -> None:
        """Run a check of a file unless it was found unchanged since the last commit.

        Each commit resets this, so that a disk that fails later is noticed in the next round.
        """
        if name not in self._sound:
            check()
            self._sound.add(name)

    def found_sound(self, name: str) -> None:
        """Note that a fold read these words unchanged: the next round need not hash them."""
        self._folded.add(name)

    def _check(self, name: str, digest: str, found: Callable[[], str]) -> None:
        if digest != found():
            raise LocalError(_changed(self._folder, name))

    def reader(self, members: Sequence[str], round_: int) -> Callable[[str, str, str], Tensor]:
        """``read(part, silo, name)`` over the uploads of these silos.

        Each tensor is mapped when it is read.
        """
        uploads = self._uploads(members, round_)
        return lambda part, silo, name: uploads[silo].read(part, name)

    def _uploads(self, silos: Iterable[str], round_: int) -> dict[str, SpooledUpload]:
        items = self._items(round_)
        return {silo: SpooledUpload(self._folder / _upload(round_, silo), items) for silo in silos}

    def rotated(
        self, members: Sequence[str], round_: int, parts: Sequence[Part]
    ) -> Callable[[str, str, str], Tensor]:
        """``read(part, silo, name)`` over the rotated vectors of these silos."""
        uploads = {
            (part.name, silo): SpooledUpload(
                self._folder / rotated_vectors(round_, silo, part.name), upload_items([part])
            )
            for part in parts
            for silo in members
        }
        return lambda part, silo, name: uploads[part, silo].read(part, name)

    def path(self, name: str) -> Path:
        """The path of a file of this job, which need not exist."""
        return self._folder / name

    def masked(self, round_: int, silo: str) -> Path:
        """Where the masked words of a silo lie."""
        return self._folder / masked_words(round_, silo)

    def discard(self, round_: int, silo: str) -> None:
        """Remove the masked words of a silo, if they are there."""
        remove(self.masked(round_, silo))

    def sum_file(self, round_: int) -> Path:
        """Where the open sum of a round lies."""
        return self._folder / opened_sum(round_)

    # What the last committed round left: the reading half of an archive.

    def latest(self, part: str) -> dict[str, Tensor] | None:
        """The published value of a part, or None; the same tensors for everybody who asks.

        None, too, of a part that silos get in words.
        """
        # Silos get the words of the sum, which they can check by tags, not the result of the fold.
        if self.words(part) is not None:
            return None
        # Deliveries to several silos run in threads: a value is read from the disk but once.
        with self._loading:
            name = self._files.get(("result", part, ""))
            if part not in self._loaded and name is not None:
                self._loaded[part], _ = tensor_file.read(self._folder / name)
            return self._loaded.get(part)

    def words(self, part: str) -> Path | None:
        """The file with the words of a part's published value; None without one."""
        name = self._files.get(("words", part, ""))
        return None if name is None else self._folder / name

    def digests(
        self, delivered: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[tuple[str, str], bytes]:
        """SHA-256 by (part, name) of the delivered tensors whose digest is known.

        They are published values, the very tensors that ``latest`` returned.
        """
        with self._loading:
            return {
                (part, name): self._digests[part][name]
                for part, tensors in delivered.items()
                if part in self._digests and part in self._loaded
                for name, tensor in tensors.items()
                if tensor is self._loaded[part].get(name)
            }

    def forget_loaded(self) -> None:
        """Let the memory of published values go.

        Deliveries in progress keep theirs; the next one reads them again.
        """
        with self._loading:
            self._loaded.clear()

    def has(self, part: str, silo: str) -> bool:
        """True if a silo has uploaded a version, in a round that was committed."""
        return ("version", part, silo) in self._files

    def version(self, part: str, silo: str, name: str) -> Tensor:
        """One tensor of a silo's version.

        The others are not read, but for a check of all of it once a round.
        """
        file = self._files["version", part, silo]
        upload = SpooledUpload(self._folder / file, self._items(int(file.partition(".")[0])))
        self.check_once(file, partial(self._check, file, self._given.get(file, ""), upload.digest))
        return upload.read(part, name)

    def file(self, part: str, silo: str) -> str | None:
        """Name of the file of a silo's version; None without one."""
        return self._files.get(("version", part, silo))

    def mail(self, part: str, silo: str) -> dict[str, Tensor] | None:
        """The tensors put aside for a silo, with ``@keep``; None for nothing, or blind rows."""
        name = self._files.get(("mail", part, silo), ROWS)
        return None if name.endswith(ROWS) else tensor_file.read(self._folder / name)[0]

    def put_aside(self, part: str, silo: str) -> bytes | None:
        """The blind rows put aside for a silo, as a fold wrote them; None for none."""
        name = self._files.get(("mail", part, silo), "")
        return (self._folder / name).read_bytes() if name.endswith(ROWS) else None

    def mailed(self, silo: str | None = None) -> list[FileKey]:
        """Places with something put aside for a silo, or for any, blind rows included."""
        return [place for place in self._files if place[0] == "mail" and silo in (None, place[2])]

    # A fold, and its commit.

    def folding(
        self,
        round_: int,
        rows: Callable[[Post, bool], bytes | None] | None = None,
        words: Collection[str] = (),
    ) -> "Folding":
        """An archive whose changes lie next to what is committed.

        ``words``: parts of which the sum has words. ``rows``, of a job whose versions are padded
        words: what is put aside for a post, behind what waits already unless that is cleared; None
        where nothing is.
        """
        return Folding(self, round_, rows, words)

    def keep_result(self, state: CoordinatorState, silos: Sequence[str]) -> None:
        """Keep what the method's coordinator half knows, and whose rows they are.

        No file where it knows nothing.
        """
        if state:
            # The format takes no tensors that share memory.
            own = {name: tensor.clone() for name, tensor in state.items()}
            self.write(RESULT, own, {SILOS: json.dumps(list(silos))})

    def keep_counts(self, round_: int, tables: Mapping[str, Tensor]) -> None:
        """Keep a round's sums of tables of test counts, where the job has such.

        Folding the round again replaces the file.
        """
        if tables:
            # The format takes no tensors that share memory.
            own = {name: table.clone() for name, table in tables.items()}
            self.write(counts_file(round_), own)

    def counts(self, round_: int) -> dict[str, Tensor]:
        """What ``keep_counts`` kept of a round; empty where it kept nothing."""
        return read_counts(self._folder, round_)

    def after(self, changes: Mapping[FileKey, str | None]) -> dict[FileKey, str]:
        """The files by place, as they will be once these changes are committed."""
        changed = {**self._files, **changes}
        return {place: name for place, name in changed.items() if name is not None}

    def commit(
        self,
        round_: int,
        changes: Mapping[FileKey, str | None],
        digests: Mapping[str, dict[str, bytes]],
        mixed: Collection[str] = (),
    ) -> None:
        """Turn to the files of a round that the database has committed.

        ``mixed`` are the padded words of rows put aside. Files that nothing refers to go.
        """
        with self._loading:
            # Under the lock, so that no delivery loads an old value afterwards.
            self._loaded.clear()
            self._digests |= digests
            # Deliveries in progress may still read the old files.
            before = {*self._files.values(), *self._mixed}
            self._files, self._mixed = self.after(changes), mixed
            # Every file is looked at once per round; the fold itself has read some of them.
            self._sound, self._folded = self._folded, set()
            self._given = {
                name: digest for name, digest in self._given.items() if name in self._files.values()
            }
            wanted = {*self._files.values(), *mixed}

        # Uploads of this round go now, since only the fold read them. Other files stay for a round
        # more: a silo may still read them.
        kinds = (*(f"{round_}.*{kind}" for kind in (*SUFFIXES[:4], WORDS)), opened_sum(round_))
        uploads = {path.name for kind in kinds for path in self._folder.glob(kind)} - wanted
        for name in self._rubbish | uploads:
            remove(self._folder / name)
        self._rubbish = before - wanted

    def discard_hidden(self, round_: int) -> None:
        """Remove the padded words and rotated vectors of a round that was not folded.

        Call it after the database has dropped them.
        """
        for kind in ("padded", "rotated"):
            for path in self._folder.glob(f"{round_}.*.{kind}"):
                remove(path)

    def expire(self) -> None:
        """Remove versions and mail of a job that is over, after the database has dropped them."""
        self._files = {
            place: name
            for place, name in self._files.items()
            if place[0] not in ("version", "mail")
        }
        # Words of directed rows are among them.
        over = [self._folder / name for name in (*self._mixed, *self._rubbish)]
        for kind in (".padded", ".rotated", ROWS):
            over += self._folder.glob(f"*{kind}")
        for path in over:
            remove(path)
        self._mixed, self._rubbish = (), set()
        sync_directory(self._folder)

    def clean(self, uploads: Collection[str], mixed: Collection[str] = ()) -> None:
        """Remove every file that nothing refers to.

        ``uploads`` are those of the open round, ``mixed`` the padded words of rows put aside.

        Call it before the job resumes, while nobody reads. Files of other kinds stay.
        """
        self._mixed = mixed
        # The database does not list the result, which stays.
        wanted = {RESULT, *self._files.values(), *uploads, *mixed}
        for path in self._folder.iterdir():
            if path.name not in wanted and path.suffix in (*SUFFIXES, ".tmp"):
                remove(path)

    def write_aside(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a file of rows or words and make it durable.

        OSError where the disk does not take it.
        """
        # Under a temporary name first, so that a crash leaves no partial file under its real name.
        temporary, descriptor = self._temporary(name)
        with os.fdopen(descriptor, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        self.keep_as(name, temporary)

    def write(
        self, name: str, tensors: Mapping[str, Tensor], header: dict[str, str] | None = None
    ) -> None:
        """Write a file and make it durable; OSError where the disk does not take it.

        ``header`` becomes the file's metadata. The name appears only once the file is complete.
        """
        temporary, descriptor = self._temporary(name)
        os.close(descriptor)
        try:
            tensor_file.write(temporary, {k: v.contiguous() for k, v in tensors.items()}, header)
        # Safetensors' own error for a full disk, which the fold waits for as an OSError.
        except SafetensorError as error:
            raise OSError(errno.EIO, f"cannot write {temporary.name}: {error}") from error
        self.keep_as(name, temporary)

    def _temporary(self, name: str) -> tuple[Path, int]:
        """A new file that only we can read, open, next to where it will lie."""
        temporary = self._folder / f".{name}.tmp"
        # A crash may have left one, which O_EXCL would not accept.
        temporary.unlink(missing_ok=True)
        return temporary, os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


class Folding:
    """The archive that a fold reads and changes; ``changes`` is what there is to commit.

    It reads what is committed, so folding a round again after a crash or a full disk gives the
    same.

    It is used in the thread of the folds.
    """

    def __init__(
        self,
        store: JobStore,
        round_: int,
        rows: Callable[[Post, bool], bytes | None] | None = None,
        words: Collection[str] = (),
    ) -> None:
        self.changes: dict[FileKey, str | None] = {
            ("words", part, ""): summed_words(round_, part) for part in words
        }
        self.digests: dict[str, dict[str, bytes]] = {}  # of what was published
        self._store = store
        self._round = round_
        self._rows = rows

    def latest(self, part: str) -> dict[str, Tensor] | None:
        """The published value before this round."""
        return self._store.latest(part)

    def publish(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace the published value of a part; the disk writes while its tensors are hashed.

        The file is durable when it returns, but does not count before the commit.
        """
        # Each silo that receives the value then finds its digest known.
        with ThreadPoolExecutor(1) as hasher:
            hashing = hasher.submit(_digests, tensors)
            self._write(("result", part, ""), f"{self._round}.{part}.safetensors", tensors)
            self.digests[part] = hashing.result()

    def store(self, part: Part, silo: str, read: Read) -> None:
        """Let a silo's upload of this round be its version of a Mix part."""
        # The file stays as it is, so nothing is read or copied.
        name = (
            padded_words(self._round, silo, part.name) if self._rows else _upload(self._round, silo)
        )
        self.changes["version", part.name, silo] = name

    def has(self, part: str, silo: str) -> bool:
        """True if a silo had uploaded a version before this round."""
        return self._store.has(part, silo)

    def version(self, part: str, silo: str, name: str) -> Tensor:
        """One tensor of a silo's version before this round."""
        return self._store.version(part, silo, name)

    def mail(self, part: str, silo: str) -> dict[str, Tensor] | None:
        """The tensors put aside for a silo before this round."""
        return self._store.mail(part, silo)

    def put_mail(self, post: Post, tensors: Mapping[str, Tensor] | None) -> bool:
        """Replace what is put aside for a silo; False where there is no row for it."""
        place: FileKey = ("mail", post.part, post.silo)
        name = f"{self._round}.{post.part}.{post.silo}"
        if tensors is not None:
            self._write(place, f"{name}.safetensors", tensors)
            return True
        # A place among the changes was cleared by this fold, so its old rows are not kept.
        rows = None if self._rows is None else self._rows(post, place in self.changes)
        if rows is not None:
            self._store.write_aside(f"{name}{ROWS}", (rows,))
            self.changes[place] = f"{name}{ROWS}"
        return rows is not None

    def clear_mail(self, silo: str) -> None:
        """Drop all that is put aside for a silo; its files go after the commit."""
        self.changes |= dict.fromkeys(self._store.mailed(silo))

    def _write(self, place: FileKey, name: str, tensors: Mapping[str, Tensor]) -> None:
        self._store.write(name, tensors)
        self.changes[place] = name


def _changed(folder: Path, file: str) -> str:
    return f"{folder}: the disk changed {file}; have the job signed again under a new name"


def _sha256(path: Path) -> str:
    """Digest of a file, in hex; empty where it is gone."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: sha256(tensor_bytes(tensor)).digest() for name, tensor in tensors.items()}


def _number(path: Path) -> int:
    """The round of a tensor file; 0 for the result, which is of the last one."""
    number = path.name.partition(".")[0]
    return int(number) if number.isascii() and number.isdecimal() else 0


def masked_words(round_: int, silo: str) -> str:
    """Name of the file of a silo's masked words."""
    return f"{round_}.{silo}.masked"


def padded_words(round_: int, silo: str, part: str) -> str:
    """Name of the file of a silo's padded words of a part."""
    return f"{round_}.{silo}.{part}.padded"


def rotated_vectors(round_: int, silo: str, part: str) -> str:
    """Name of the file of a silo's rotated vectors of a part."""
    return f"{round_}.{silo}.{part}.rotated"


def opened_sum(round_: int) -> str:
    """Name of the file of a round's open sum; no part is named so."""
    return f"{round_}.@sum.safetensors"


def summed_words(round_: int, part: str) -> str:
    """Name of the file of a published sum's words; a silo's upload has another suffix."""
    return f"{round_}.{part}.words"


def counts_file(round_: int) -> str:
    """The file of a round's sums of tables of test counts; it stays until the job is removed."""
    return f"{round_}.counts"


def read_counts(folder: Path, round_: int) -> dict[str, Tensor]:
    """The sums of tables of a round of the job with this folder; empty where it has none.

    LocalError if the disk changed them.
    """
    path = folder / counts_file(round_)
    return tensor_file.read(path)[0] if path.exists() else {}


def _upload(round_: int, silo: str) -> str:
    return f"{round_}.{silo}.upload"
