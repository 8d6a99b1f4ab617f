"""What a run leaves on disk, and how it goes on after kill -9.

::

    <out>/<label>/seed-<seed>/run.json                  what run this is (manifest.py)
                              history.jsonl             what was measured, line by line (history.py)
                              checkpoint.json, checkpoint/    where it is (snapshot.py)
                              rounds.csv, silos.csv, models/, coordinator.safetensors    at the end
        (export.py)
                              LOCK                      held by the one process that runs it

Who runs it calls, round after round, ``record`` with what was measured and, every few rounds and
after the last, ``checkpoint``; then ``finish`` with the look after the last round. Killed anywhere,
the next process finds the last checkpoint and the history up to it, measures and trains again what
came after, and ends in the same bytes.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from ...algorithms.course import SiloState
from ...algorithms.delivery import CoordinatorState
from ...algorithms.engines.simulation import Snapshot
from ...errors import LocalError, UnwritableError
from ...files.documents import unwritable, write_atomic
from ...security.log.lock import locked
from ..engines.device import Device
from ..experiment.plan import Population, Run, Schedule
from . import export, manifest
from .history import NOTHING, HistoryFile, Measured
from .manifest import RUN, RunManifest
from .snapshot import FinishedRun, Snapshots

HISTORY = "history.jsonl"


def folder_of(out: Path, run: Run) -> Path:
    """Where a run lies; LocalError for a label that is no name of a folder."""
    if not run.label or run.label.startswith(".") or "/" in run.label or "\0" in run.label:
        raise LocalError(
            f"label {run.label!r} cannot name a folder; give one without / that begins with no dot"
        )
    return out / run.label / f"seed-{run.seed}"


@contextmanager
def opened(
    out: Path, run: Run, population: Population, schedule: Schedule, device: Device = "cpu"
) -> Iterator["RunFolder"]:
    """The run's folder, made or gone on with, while the block runs.

    LocalError where another process has it, where it is of another run, or where it is not as it
    was written.
    """
    path = folder_of(out, run)
    with ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path))
        except OSError as error:
            raise UnwritableError(f"{path}: cannot use it: {unwritable(error)}") from error
        folder = RunFolder(path, run, manifest.identity(run, population, schedule, device))
        stack.callback(folder.close)
        yield folder


class RunFolder:
    """A run on disk, between two of its rounds."""

    def __init__(self, path: Path, run: Run, here: RunManifest) -> None:
        self.path, self._run, self._identity = path, run, here
        there = _identity_there(path)
        if there is not None:
            manifest.check_same(path, there, here)
        if there is None or (there != here and not (path / "checkpoint.json").exists()):
            write_atomic(path / RUN, here.to_bytes(), 0o644)
            there = here
        _tidy(path)
        self._checkpoint = Snapshots(path, sha256(there.to_bytes()).hexdigest())
        index = self._checkpoint.index
        over = index.finished if index else None
        self.finished = over is not None and all((path / name).exists() for name in over.results)
        if not self.finished and there.made_with != here.made_with:
            raise LocalError(
                f"{path}: was begun {there.made_with}, here it would be {here.made_with}, which may"
                " round otherwise; go on as it was begun, choose another --out, or remove it"
            )
        kept = over.history if over and self.finished else index.history if index else NOTHING
        self._history = HistoryFile(path / HISTORY, kept)
        self._measures = list(self._history.measures)

    def begun(self) -> Snapshot | None:
        """Where the run goes on from, its silos in job order; None for a new one."""
        found = self._checkpoint.load()
        if found is None:
            return None
        return replace(found, states={silo: found.states[silo] for silo in self._run.job.silos})

    @property
    def history(self) -> tuple[Measured, ...]:
        """What was measured so far."""
        return tuple(self._measures)

    def record(self, measures: Iterable[Measured]) -> None:
        """Add to the history; what is recorded after the last checkpoint is measured again after a
        crash.
        """
        added = tuple(measures)
        self._history.append(added)
        self._measures += added

    def checkpoint(self, snapshot: Snapshot) -> None:
        """Let the run go on from here; it is on the disk when this returns."""
        self._checkpoint.write(snapshot, self._history.sync())

    def finish(
        self,
        last: Iterable[Measured],
        states: Mapping[str, SiloState],
        coordinator: CoordinatorState,
    ) -> tuple[Path, ...]:
        """Record the look after the last round, write the results, and let the run be over.

        The files.

        ``states`` are the models that the silos keep. The checkpoint after the last round is
        written already.
        """
        self.record(last)
        models = {silo: states[silo] for silo in self._run.job.silos}
        made = export.write(self.path, self._identity.silos, self.history, models, coordinator)
        names = tuple(path.relative_to(self.path).as_posix() for path in made)
        self._checkpoint.finish(FinishedRun(history=self._history.sync(), results=names))
        self.finished = True
        return made

    def close(self) -> None:
        """Write nothing more."""
        self._history.close()


def _identity_there(path: Path) -> RunManifest | None:
    """Of the run whose folder this is; None where it is new.

    LocalError where it holds something else.
    """
    if (path / RUN).exists():
        return manifest.read(path)
    foreign = sorted(
        one.name for one in path.iterdir() if one.name != "LOCK" and not one.name.endswith(".tmp")
    )
    if foreign:
        raise LocalError(
            f"{path}: has no {RUN}, but {foreign[0]!r}; choose another --out, or move that away"
        )
    return None


def _tidy(path: Path) -> None:
    """Remove what a process that died left half written."""
    try:
        for left in path.rglob(".*.tmp"):
            left.unlink()
    except OSError as error:
        raise UnwritableError(f"{path}: cannot tidy it: {unwritable(error)}") from error
