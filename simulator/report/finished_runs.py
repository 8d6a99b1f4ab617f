"""Reads the runs of an output folder back, for summaries, pictures and people's own programs."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import Literal

from ...algorithms.catalog import method_class
from ...algorithms.course import SiloState
from ...algorithms.exchange.parts import Tensors
from ...algorithms.job.evaluated import form_of
from ...algorithms.tasks.counting import ScoreForm
from ...algorithms.training.silo_round import state_from_bytes
from ...errors import LocalError, reason
from ...files import tensor_file
from ...files.program_code import is_imported
from ..run import history as history_file
from ..run import manifest as identity
from ..run.disk import BEGIN_ANEW, kept_bytes
from ..run.export import COORDINATOR, MODELS, model_file
from ..run.folder import HISTORY
from ..run.history import Measured
from ..run.manifest import RUN, RunManifest, SiloRecords
from ..run.snapshot import read_index
from ..run.work_file import SECONDS, WORK, RoundWork, read_seconds, read_work


@dataclass(frozen=True)
class Recorded:
    """One run, finished or not; ``rounds`` are all that it trains.

    Only a finished run has models and a coordinator. ``seconds`` is how long processes worked on it
    up to its last snapshot; None before the first.
    """

    folder: Path
    label: str
    seed: int
    method: str
    rounds: int
    silos: tuple[SiloRecords, ...]
    history: tuple[Measured, ...]
    finished: bool
    identity: RunManifest
    seconds: float | None
    work: tuple[RoundWork, ...] = ()  # up to its last snapshot
    timed: Mapping[int, float] = field(default_factory=dict)  # seconds by round

    @property
    def title(self) -> str:
        """As ``Run.title``."""
        return f"{self.label}, seed {self.seed}"

    @property
    def product(self) -> Literal["delivered", "trained"]:
        """The kind of model that the method's silos keep in the end (``method.Method``).

        LocalError for a program's method that is not imported.
        """
        if not is_imported(self.method):
            raise LocalError(
                f"{self.folder}: ran method {self.method!r}, whose module is not imported, since"
                " looking at results runs nobody's code; if it is yours, import it first"
            )
        return method_class(self.method, str(self.folder)).product

    @property
    def form(self) -> ScoreForm:
        """By what the run's models are compared."""
        return form_of(self.identity.job)

    @property
    def kept_models(self) -> bool:
        """Whether its silos' models are there (``keep_models``)."""
        return (self.folder / MODELS).exists()

    def model(self, silo: str) -> SiloState:
        """The model that a silo keeps.

        LocalError if the run is not finished, or the disk changed the file.
        """
        path = model_file(self.folder, silo)
        if self.finished and not self.kept_models:
            raise LocalError(
                f"{self.folder}: kept no models; run it again in another --out, with"
                " simulation.keep_models = true"
            )
        return state_from_bytes(_read(path), str(path))

    def coordinator(self) -> Tensors:
        """The coordinator's state in the end; empty where the method has none.

        Tensors by name. LocalError before the run is finished.
        """
        # No file after the end: the method has no such state.
        path = self.folder / COORDINATOR
        if self.finished and not path.exists():
            return {}
        return tensor_file.from_bytes(_read(path), str(path))[0]


def load_runs(out: Path) -> tuple[Recorded, ...]:
    """All runs of an output folder, by label and seed.

    A run that another process works on is read as far as it has come.
    """
    runs = [_recorded(path.parent) for path in out.glob(f"*/seed-*/{RUN}")]
    return tuple(sorted(runs, key=lambda run: (run.label, run.seed)))


def finished_runs(out: Path) -> list[Recorded]:
    """The runs of an output folder that compare with each other, by label and seed."""
    return comparable(load_runs(out))


def comparable(runs: Iterable[Recorded]) -> list[Recorded]:
    """The runs that reached their last round.

    Where some seeds of a label were lengthened, the others do not compare with them until they are,
    too.
    """
    finished = list(filter(attrgetter("finished"), runs))
    longest: dict[str, int] = {}
    for run in finished:
        longest[run.label] = max(run.rounds, longest.get(run.label, 0))
    return list(filter(lambda run: run.rounds == longest[run.label], finished))


def by_label(runs: Iterable[Recorded], labels: Iterable[str] = ()) -> dict[str, list[Recorded]]:
    """The runs by label; those of ``labels`` come first, in this order."""
    groups: dict[str, list[Recorded]] = defaultdict(list)
    for run in runs:
        groups[run.label].append(run)
    order = dict.fromkeys([*labels, *groups])
    return {label: groups[label] for label in order if label in groups}


def _recorded(folder: Path) -> Recorded:
    """Read run.json first, then what has come of it; a new run has no snapshot and no history."""
    manifest, index = identity.read(folder), read_index(folder)
    path = folder / HISTORY
    kept, seconds, finished = None, None, False
    work: tuple[RoundWork, ...] = ()
    if index is not None:
        # a snapshot of another run would lend this one its history
        if sha256(manifest.to_bytes()).hexdigest() != index.run:
            raise LocalError(
                f"{folder / RUN}: is not what the snapshot next to it was written for; {BEGIN_ANEW}"
            )
        # The lines that a snapshot covers must be unchanged.
        kept_bytes(path, index.history)
        work = read_work(folder / WORK, index.work)
        seconds = index.milliseconds / 1000
        if index.finished is not None:
            kept, finished = index.finished.history, True
            work = read_work(folder / WORK, index.finished.work)

    # a run's history may be ahead of its snapshot: what is read is what was measured, and a
    # resumed run measures the same again
    history: tuple[Measured, ...] = ()
    if path.exists():
        history = history_file.read(path, kept)
    _check_shares(path, form_of(manifest.job), history)
    return Recorded(
        folder=folder,
        label=manifest.label,
        seed=manifest.seed,
        method=manifest.job["method"]["name"],
        rounds=manifest.job["rounds"],
        silos=manifest.silos,
        history=history,
        finished=finished,
        identity=manifest,
        seconds=seconds,
        work=work,
        timed=read_seconds(folder / SECONDS),
    )


def _check_shares(path: Path, form: ScoreForm, history: Sequence[Measured]) -> None:
    # history.jsonl is a text that anyone can edit, and a share above one would pass for a result
    for measured in history:
        values = (*measured.scores.values(), *measured.baselines.values())
        if form.share and not all(0 <= value <= 1 for value in values):
            raise LocalError(
                f"{path}: a {form.name} is not from 0 to 1 after round {measured.rounds};"
                f" {BEGIN_ANEW}"
            )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}; run the same again") from error
