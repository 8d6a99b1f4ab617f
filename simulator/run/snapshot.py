"""A simulation's state between two rounds, on disk; it is whole after kill -9 at any instruction.

::

    <folder>/snapshot.json                      index: the next round, how much of the history
                                                belongs to it, and files
    <folder>/snapshot/00000012.safetensors      states of silos, parts on the shelf, the
                                                coordinator's state (tensor_file.py)

A file is written once, under a number of its own, before the index that names it first; the index
is replaced as a whole; then goes what it no longer names. Only what changed since the last index is
written: what a simulation keeps is replaced, never altered, so what is the same object is the same.
A file of which more than half was replaced since is rewritten without that, so the files hold at
most twice what they must, and a snapshot costs as much as the round changed.

Where states take more than IN_MEMORY, the simulation lets go of those that are on the disk, and
reads them from these files when it needs them.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Annotated, Literal, TypeAlias, cast

from pydantic import Field

from ...algorithms.course import SiloState
from ...algorithms.engines.aggregation import Shelved
from ...algorithms.engines.simulation import IN_MEMORY, Snapshot
from ...algorithms.engines.states import Held
from ...algorithms.exchange.parts import Tensors
from ...algorithms.leaks.taint import taints_from_text, taints_to_text
from ...errors import LocalError, check_local
from ...files.documents import (
    Strict,
    canonical_json,
    write_atomic,
)
from .disk import BEGIN_ANEW, NOTHING, Prefix, parse_kept, read_kept, writing
from .tensor_file import Key, TensorEntry, pack, unpack, unpack_one

INDEX, FOLDER = "snapshot.json", "snapshot"
# a file takes no more entries than reach this: a multiple of it is in memory
PACK_BYTES = 64 * 1024 * 1024
OURS = re.compile(r"[0-9]{8,}\.safetensors")
# Of a folder that somebody gave, since results are removed when a run is lengthened.
RESULT = r"^(models/)?[^./\x00][^/\x00]*$"
ONE = ""  # the room of what is no silo's state


@dataclass(frozen=True, eq=False)
class StateOnDisk:
    """Reads a silo's state from a file of a snapshot."""

    path: Path
    silo: str

    def __call__(self) -> SiloState:
        """The state; LocalError where the file is damaged."""
        key = ("state", self.silo)
        return cast(SiloState, _source(key, unpack_one(self.path, key)))


Source: TypeAlias = SiloState | StateOnDisk | Tensors


class File(Strict):
    """A file of a snapshot, and what in it counts; the rest was replaced since.

    ``sha256`` is of the whole file, replaced entries included.
    """

    name: str
    bytes: int
    sha256: str
    holds: tuple[Key, ...]


class FinishedRun(Strict):
    """A run that is over: its whole history, and the files of its results.

    ``results`` are paths relative to the run's folder.
    """

    history: Prefix
    results: tuple[Annotated[str, Field(pattern=RESULT)], ...]
    work: Prefix = NOTHING


class Index(Strict):
    """The content of snapshot.json, next to its SHA-256; ``run`` is the SHA-256 of run.json.

    ``milliseconds`` is how long processes worked on the run by then; the time after a killed
    process's last snapshot is lost.
    """

    version: Literal[1] = 1
    run: str
    round: int
    milliseconds: Annotated[int, Field(ge=0)]
    trained: tuple[str, ...]
    history: Prefix
    work: Prefix = NOTHING
    files: tuple[File, ...]
    finished: FinishedRun | None = None


class _Sealed(Strict):
    index: Index
    sha256: str


@dataclass(frozen=True, eq=False)
class _Placed:
    """The file that holds an object."""

    source: Source
    weight: int
    file: str


@dataclass(frozen=True)
class _Written:
    bytes: int
    sha256: str
    weight: int  # of all that was written into it


class Snapshots:
    """The snapshots of one run, one replacing the other; one process writes them.

    The process must hold the run's lock. Files that an index names are never changed.
    """

    def __init__(self, folder: Path, run: str, clock: Callable[[], float] = monotonic) -> None:
        self._folder, self._path, self._run = folder / FOLDER, folder / INDEX, run
        self._clock, self._begun = clock, clock()
        self._index = read_index(folder)
        # Milliseconds of earlier processes, up to the last snapshot.
        self._earlier = 0
        if self._index is not None:
            self._earlier = self._index.milliseconds
            # a person may have copied one file of another folder and not the other
            check_local(
                self._index.run == run,
                f"{self._path}: is of another run than run.json next to it; {BEGIN_ANEW}",
            )
        self._placed: dict[Key, _Placed] = {}
        self._written: dict[str, _Written] = {}
        with writing(self._folder, "cannot make it"):
            self._folder.mkdir(exist_ok=True)
        # Removes files of a process that died before its index was written.
        self._sweep()

    @property
    def index(self) -> Index | None:
        """The index of the last snapshot, as on the disk; None before the first."""
        return self._index

    def load(self) -> Snapshot | None:
        """The last snapshot; None before the first.

        LocalError names the file that is not as it was written.
        """
        if self._index is None:
            return None
        rests = sum(file.bytes for file in self._index.files) > IN_MEMORY
        # Checks every byte: a run resumes from exactly what was written, or not at all.
        for file in self._index.files:
            path = self._folder / file.name
            entries = unpack(_intact(path, file), str(path))
            weights = _weights(entries)
            weight = sum(weights.values())
            self._written[file.name] = _Written(file.bytes, file.sha256, weight)
            # a file holds what was replaced since, too; the index says what of it counts
            for key in file.holds:
                source = _source(key, entries[key])
                if rests and key[0] == "state":
                    source = StateOnDisk(path, key[1])
                self._placed[key] = _Placed(source, weights[key], file.name)
        return _snapshot(self._index, self._placed)

    def write(
        self, snapshot: Snapshot, history: Prefix, work: Prefix = NOTHING
    ) -> Mapping[str, StateOnDisk]:
        """Replace the snapshot; ``history`` and ``work`` are durable already.

        A process that resumes the run with the same code finds it whole. Returns where to read the
        states of silos, if they take too much memory; those of earlier snapshots are gone.

        UnwritableError if the disk fails; the earlier snapshot then stays valid.
        """
        # a snapshot costs as much as the round changed: what an earlier file holds is not written
        # again
        sources = _sources(snapshot)
        placed = self._still_placed(sources)
        # Work on copies, so that a failed write leaves this object unchanged.
        written = dict(self._written)
        fresh = dict(sources)
        for key in placed:
            del fresh[key]

        # numbers continue after every file there is, named or not: a write that failed may have
        # left one, and no file is written twice
        used = [int(path.stem) for path in self._ours()]
        numbers = count(1 + max(used, default=-1))
        for entries in _batches(fresh):
            name = f"{next(numbers):08d}.safetensors"
            data = pack(entries)
            write_atomic(self._folder / name, data)
            weights = _weights(entries)
            digest = hashlib.sha256(data).hexdigest()
            written[name] = _Written(len(data), digest, sum(weights.values()))
            for key, weight in weights.items():
                placed[key] = _Placed(fresh[key], weight, name)

        # the index names the new files only now, when all of them are on the disk
        live = _live(placed.values())
        for name in written.keys() - live.keys():
            del written[name]
        self._replace(
            Index(
                run=self._run,
                round=snapshot.round,
                milliseconds=self._milliseconds,
                trained=tuple(sorted(snapshot.trained)),
                history=history,
                work=work,
                files=tuple(_files(placed, written)),
            )
        )
        # Only now, since the index is on the disk.
        self._placed, self._written = placed, written
        self._sweep()
        return self._resting()

    def _resting(self) -> Mapping[str, StateOnDisk]:
        states = {key[1]: one for key, one in self._placed.items() if key[0] == "state"}
        if sum(one.weight for one in states.values()) <= IN_MEMORY:
            return {}
        found: dict[str, StateOnDisk] = {}
        for silo, one in states.items():
            found[silo] = StateOnDisk(self._folder / one.file, silo)
            # From now on this is what the state is.
            self._placed["state", silo] = replace(one, source=found[silo])
        return found

    def _still_placed(self, sources: Mapping[Key, Source]) -> dict[Key, _Placed]:
        """The objects that need no writing: unchanged, in a file that is at least half of use."""
        # identity, not equality: states are replaced and never altered, and comparing them would
        # cost as much as writing them
        same = {key: old for key, old in self._placed.items() if sources.get(key) is old.source}

        # a file that is less than half of use is rewritten, so the files hold twice at most
        live = _live(same.values())

        def in_use(placed: _Placed) -> bool:
            whole = self._written[placed.file].weight
            return 2 * live[placed.file] >= whole

        return {key: placed for key, placed in same.items() if in_use(placed)}

    def finish(self, finished: FinishedRun, *, keep: bool = True) -> None:
        """Mark the run as finished, once its results are on the disk.

        Without ``keep`` the snapshot's files go, and the run cannot be lengthened.
        """
        if self._index is None:
            raise LocalError(
                f"{self._path}: a run ends with a snapshot after its last round; this is a bug in"
                " Staddle"
            )
        changed: dict[str, object] = {"finished": finished, "milliseconds": self._milliseconds}
        if not keep:
            changed["files"] = ()
        self._replace(self._index.model_copy(update=changed))
        self._sweep()

    def lengthen(self, run: str) -> None:
        """Make the snapshot that of a longer run, by the SHA-256 of its run.json."""
        if self._index is not None:
            self._run = run
            self._replace(self._index.model_copy(update={"run": run, "finished": None}))

    @property
    def _milliseconds(self) -> int:
        return self._earlier + round(1000 * (self._clock() - self._begun))

    def _replace(self, index: Index) -> None:
        document = index.model_dump()
        # With a digest of its own: a changed number would resume another state.
        sealed = {"index": document, "sha256": hashlib.sha256(canonical_json(document)).hexdigest()}
        write_atomic(self._path, canonical_json(sealed) + b"\n")
        self._index = index

    def _ours(self) -> list[Path]:
        """Files of snapshots, whether the index names them or not.

        A write that failed may have replaced the index.
        """
        return [path for path in self._folder.iterdir() if OURS.fullmatch(path.name)]

    def _sweep(self) -> None:
        """Remove the files that the index does not name.

        They were replaced, or a process wrote them and died before the index.
        """
        named: set[str] = set()
        if self._index is not None:
            named.update(file.name for file in self._index.files)
        with writing(self._folder, "cannot tidy it"):
            for path in self._ours():
                if path.name not in named:
                    path.unlink()


def read_index(folder: Path) -> Index | None:
    """The index of a run's last snapshot; None before the first.

    LocalError where it is not as it was written.

    Files that it names are not checked.
    """
    path = folder / INDEX
    if not path.exists():
        return None
    sealed = parse_kept(path, _Sealed)
    check_local(
        hashlib.sha256(canonical_json(sealed.index.model_dump())).hexdigest() == sealed.sha256,
        f"{path}: is not as it was written; {BEGIN_ANEW}",
    )
    return sealed.index


def _intact(path: Path, file: File) -> bytes:
    data = read_kept(path)
    size, digest = len(data), hashlib.sha256(data).hexdigest()
    check_local(
        (size, digest) == (file.bytes, file.sha256),
        f"{path}: is not as it was written ({size} of {file.bytes} bytes); {BEGIN_ANEW}",
    )
    return data


def _sources(snapshot: Snapshot) -> dict[Key, Source]:
    """All that a snapshot holds, each under a key."""
    shelved = snapshot.shelved
    found: dict[Key, Source] = {}
    for silo, state in snapshot.held.items():
        # A key says what an entry is, and whose; the index lists keys.
        found["state", silo] = cast(SiloState | StateOnDisk, state)
    found[("coordinator",)] = snapshot.coordinator
    for part, tensors in shelved.published.items():
        found["published", part] = tensors
    for addressed, tensors in shelved.versions.items():
        found["version", *addressed] = tensors
    for addressed, tensors in shelved.mail.items():
        found["mail", *addressed] = tensors
    return found


def _snapshot(index: Index, placed: Mapping[Key, _Placed]) -> Snapshot:
    states: dict[str, Held] = {}
    coordinator: Tensors = {}
    published: dict[str, Tensors] = {}
    versions: dict[tuple[str, str], Tensors] = {}
    mail: dict[tuple[str, str], Tensors] = {}

    # the index and its files are intact by their digests, so any other key is not in them
    for key, one in placed.items():
        match key, one.source:
            case ("state", silo), SiloState() | StateOnDisk() as state:
                states[silo] = state
            case ("coordinator",), Mapping() as tensors:
                coordinator = tensors
            case ("published", part), Mapping() as tensors:
                published[part] = tensors
            case ("version", part, silo), Mapping() as tensors:
                versions[part, silo] = tensors
            case ("mail", part, silo), Mapping() as tensors:
                mail[part, silo] = tensors
    shelved = Shelved(published, versions, mail)
    return Snapshot(
        index.round,
        states,
        frozenset(index.trained),
        coordinator,
        shelved,
    )


def _entry(source: Source) -> TensorEntry:
    if isinstance(source, StateOnDisk):
        source = source()
    if not isinstance(source, SiloState):
        return TensorEntry({ONE: source})
    rooms = {}
    for part, tensors in source.parts.items():
        rooms[f"part/{part}"] = tensors
    rooms["extra"] = source.extra
    return TensorEntry(rooms, taints_to_text(source.taints))


def _source(key: Key, entry: TensorEntry) -> Source:
    # All others have a single room of tensors by name.
    if key[0] != "state":
        return entry.rooms[ONE]
    rooms = dict(entry.rooms)
    extra = rooms.pop("extra")
    parts = {room.removeprefix("part/"): tensors for room, tensors in rooms.items()}
    return SiloState(parts, extra, taints_from_text(entry.note))


def _weights(entries: Mapping[Key, TensorEntry]) -> dict[Key, int]:
    """Bytes of each entry, at least 1."""
    # At least 1, so that an entry without tensors keeps its file in use.
    return {key: max(entry.nbytes, 1) for key, entry in entries.items()}


def _live(placed: Iterable[_Placed]) -> Counter[str]:
    """The weight of each file's objects that still count."""
    live: Counter[str] = Counter()
    for one in placed:
        live[one.file] += one.weight
    return live


def _files(placed: Mapping[Key, _Placed], written: Mapping[str, _Written]) -> Iterator[File]:
    """The index's entry for each file."""
    holds: dict[str, list[Key]] = {name: [] for name in written}
    for key, one in placed.items():
        holds[one.file].append(key)
    for name, file in written.items():
        yield File(name=name, bytes=file.bytes, sha256=file.sha256, holds=tuple(holds[name]))


def _batches(fresh: Mapping[Key, Source]) -> Iterator[dict[Key, TensorEntry]]:
    """The entries to write, file by file."""
    batch: dict[Key, TensorEntry] = {}
    size = 0
    for key, source in fresh.items():
        batch[key] = _entry(source)
        size += batch[key].nbytes
        # packing takes the batch's bytes again: a whole population at once may not fit in memory
        if size >= PACK_BYTES:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch
