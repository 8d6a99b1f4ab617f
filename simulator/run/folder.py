"""A run's folder on disk, and how the run resumes after kill -9.

::

    <out>/<label>/seed-<seed>/run.json                  what run this is (manifest.py)
                              history.jsonl             what was measured, line by line (history.py)
                              snapshot.json, snapshot/  where it is (snapshot.py)
                              work.jsonl, seconds.csv   what rounds took (work_file.py)
                              silos.csv, models/, coordinator.safetensors    at the end (export.py)
                              LOCK                      held by the one process that runs it

The runner calls ``record`` with the measures of each round and, every few rounds and after the
last, ``save_snapshot``; then ``finish`` with the look after the last round. After a kill at any
point, the next process finds the last snapshot and the history up to it, trains and measures again
what came after, and ends with the same bytes. With more rounds a run resumes in the same way, also
after its end.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path

from ...algorithms.course import SiloState
from ...algorithms.engines.simulation import Snapshot
from ...algorithms.exchange.delivery import CoordinatorState
from ...algorithms.training.silo_round import Seen
from ...errors import LocalError, check_local
from ...files.documents import write_atomic
from ...security.log.lock import locked
from ..engines.device import Device
from ..experiment.plan import Population, Run, Schedule
from . import export, manifest
from .disk import BEGIN_ANEW, NOTHING, Prefix, writing
from .history import HistoryFile, Measured
from .manifest import RUN, RunManifest
from .scores import ALL
from .snapshot import INDEX, FinishedRun, Index, Snapshots, read_index
from .work_file import SECONDS, WORK, RoundWork, Stopwatch, WorkFile

HISTORY = "history.jsonl"
# No leading dot, which hides a folder, and no "/", which leaves it.
FOLDER_NAME = re.compile(r"[^./\0][^/\0]*")


def folder_of(out: Path, run: Run) -> Path:
    """The path of a run's folder; LocalError for a label that cannot name a folder."""
    if not FOLDER_NAME.fullmatch(run.label):
        raise LocalError(
            f"label {run.label!r} cannot name a folder; give one without / that begins with no dot"
        )
    return out / run.label / f"seed-{run.seed}"


@contextmanager
def opened(
    out: Path, run: Run, population: Population, schedule: Schedule, device: Device = "cpu"
) -> Iterator["RunFolder"]:
    """The run's folder, new or resumed, while the block runs.

    LocalError where another process has it, where it holds another run, or where it is not as it
    was written.
    """
    path = folder_of(out, run)
    with ExitStack() as stack:
        with writing(path, "cannot use it"):
            path.mkdir(parents=True, exist_ok=True)
            # two processes at one run would each cut off what the other adds to the history
            stack.enter_context(locked(path))
        # Under the lock, since it may remove files and cut the history.
        here = manifest.identity(run, population, schedule, device)
        folder = RunFolder(path, run, here, keeps_models=schedule.keep_models)
        stack.callback(folder.close)
        yield folder


class RunFolder:
    """A run on disk, between two of its rounds.

    One process at a time has it. If it is killed, the run resumes from the last snapshot.
    """

    def __init__(self, path: Path, run: Run, here: RunManifest, *, keeps_models: bool) -> None:
        self.path, self._run, self._identity = path, run, here
        self._keeps_models = keeps_models

        # first, since nothing is removed from a folder that holds something else
        there = _begin(path, run, here)
        _tidy(path)

        # Bound to run.json by its digest, so that files of two runs cannot be mixed.
        self._snapshots = Snapshots(path, _digest(there))
        index = self._snapshots.index
        self.finished, kept, work = _how_far(path, index)
        # A finished run is only read.
        if not self.finished:
            _check_made_alike(path, there, here)
        # Measures after the snapshot are cut off, and taken again.
        self._history = HistoryFile(path / HISTORY, kept)
        self._measures = list(self._history.measures)
        self._work = WorkFile(path / WORK, work)
        self._stopwatch = None
        if not self.finished:
            self._stopwatch = Stopwatch(path / SECONDS, 0 if index is None else index.round)

    def begun(self) -> Snapshot | None:
        """The snapshot from which the run resumes; None for a new run."""
        return self._snapshots.load()

    @property
    def history(self) -> tuple[Measured, ...]:
        """The measures so far, in the order in which they were taken."""
        return tuple(self._measures)

    @property
    def work(self) -> tuple[RoundWork, ...]:
        """What the rounds took that a process before this one kept."""
        return self._work.lines

    def has_look(self, rounds: int) -> bool:
        """True if all silos were evaluated after so many rounds."""
        return any(one.rounds == rounds and one.measure in ALL for one in self._measures)

    def record(self, measures: Iterable[Measured]) -> None:
        """Add to the history.

        After a crash, what was recorded after the last snapshot is measured again.
        """
        added = tuple(measures)
        self._history.append(added)
        self._measures += added

    def record_work(self, line: RoundWork, seconds: float) -> None:
        """Add what a round took; after a crash, as in ``record``."""
        self._work.append(line)
        if self._stopwatch is not None:
            self._stopwatch.add(line.round, seconds)

    def save_snapshot(self, snapshot: Snapshot) -> Mapping[str, Callable[[], SiloState]]:
        """Let the run resume from here; the snapshot is on the disk when this returns.

        The history is synced first: the snapshot has its length and digest. The result is as of
        ``Snapshots.write``.
        """
        return self._snapshots.write(snapshot, self._history.sync(), self._work.sync())

    def keep_models(self, states: Iterable[tuple[str, SiloState]]) -> None:
        """Write the models that some silos keep, before ``finish``; nothing where none are kept.

        Where none are kept, no state is asked for.
        """
        if self._keeps_models:
            export.write_models(self.path, states)

    def finish(
        self,
        last: Iterable[Measured],
        coordinator: CoordinatorState,
        seen: Mapping[str, Seen],
    ) -> tuple[Path, ...]:
        """Record the look after the last round, write the results, and end the run.

        Returns the files. ``seen`` are the counts on test records in that look. The snapshot after
        the last round, and all models, must be written already.
        """
        self.record(last)
        # The results come before the index that names them.
        results = (self.history, coordinator, seen, self._run.job.counting)
        made = export.write(self.path, self._identity.silos, *results)
        if self._keeps_models:
            made += tuple(export.model_file(self.path, silo) for silo in self._run.job.silos)
        names = tuple(path.relative_to(self.path).as_posix() for path in made)

        # last: a run that names its results as finished has all of them on the disk
        finished = FinishedRun(history=self._history.sync(), results=names, work=self._work.sync())
        self._snapshots.finish(finished, keep=self._keeps_models)
        self.finished = True
        return made

    def close(self) -> None:
        """Close the growing files; ``opened`` releases the lock."""
        self._history.close()
        self._work.close()


def _begin(path: Path, run: Run, here: RunManifest) -> RunManifest:
    """The manifest with which the run began; a run without a snapshot begins here.

    A run of fewer rounds is lengthened.

    LocalError where the folder holds another run, or something else.
    """
    there = None
    if (path / RUN).exists():
        there = manifest.read(path)
        # Check it before anything is removed or cut off.
        manifest.check_continues(path, there, run, here)
        # a run of another release that has no snapshot yet starts again
        if there == here:
            return there
        if (path / INDEX).exists():
            return _lengthened(path, there, here)
    else:
        _check_empty(path)
    write_atomic(path / RUN, here.to_bytes(), 0o644)
    return here


def _lengthened(path: Path, there: RunManifest, here: RunManifest) -> RunManifest:
    """The manifest of the run, with more rounds if there are more here.

    Whatever dies in between, the same command lengthens it again.
    """
    if there.rounds == here.rounds:
        return there
    _check_made_alike(path, there, here)
    longer, index = _digest(here), read_index(path)
    if index is not None and index.run != longer:
        snapshots = Snapshots(path, _digest(there))
        # Every byte is checked before a result goes: without the snapshot nothing could resume.
        snapshots.load()
        over = index.finished
        with writing(path, "cannot lengthen it"):
            # They are those after fewer rounds; a run that lacks one is not finished.
            for name in () if over is None else over.results:
                (path / name).unlink(missing_ok=True)
        snapshots.lengthen(longer)
    # Last: a snapshot of the longer run next to the shorter run's manifest is lengthened again.
    write_atomic(path / RUN, here.to_bytes(), 0o644)
    return here


def _digest(one: RunManifest) -> str:
    return sha256(one.to_bytes()).hexdigest()


def _check_made_alike(path: Path, there: RunManifest, here: RunManifest) -> None:
    # another device or release may round differently, and the results would not be the same bytes
    check_local(
        there.made_with == here.made_with,
        f"{path}: was begun {there.made_with}, here it would be {here.made_with}, which may"
        " round differently; resume it as it was begun, choose another --out, or remove it",
    )


def _check_empty(path: Path) -> None:
    """LocalError where a new run's folder holds more than a process that died may have left."""
    # A process that died at its first write leaves a .tmp file.
    names = {one.name for one in path.iterdir() if not one.name.endswith(".tmp")}

    # --out may be a folder of something else, by mistake
    foreign = sorted(names - {"LOCK"})
    if foreign:
        raise LocalError(
            f"{path}: has no {RUN}, but {foreign[0]!r}; choose another --out, or move that away"
        )


def _how_far(path: Path, index: Index | None) -> tuple[bool, Prefix, Prefix]:
    """Whether the run is finished, and how much of its history and its work counts."""
    if index is None:
        return False, NOTHING, NOTHING
    over = index.finished
    if over is None:
        return False, index.history, index.work

    # a person may have removed a result; finishing the run again writes it again
    missing = [name for name in over.results if not (path / name).exists()]
    if missing and not index.files:
        raise LocalError(
            f"{path}: has no {missing[0]}, and kept no snapshot to make it again (keep_models ="
            f" false); {BEGIN_ANEW}"
        )
    if missing:
        return False, index.history, index.work
    return True, over.history, over.work


def _tidy(path: Path) -> None:
    """Remove files that a process left half written when it died."""
    with writing(path, "cannot tidy it"):
        # ``write_atomic`` writes to such a name first.
        for left in path.rglob(".*.tmp"):
            left.unlink()
