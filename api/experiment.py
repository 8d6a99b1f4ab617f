"""An experiment as an object: the file that ``staddle simulate`` runs, written and read.

What a program gives as values becomes files next to it: records ``records.npz``, index arrays
``partition.json``. A function that builds a model is named by its module (files/program_code.py).
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Dataset as TorchDataset

from ..algorithms.data.dataset import Dataset, save_npz
from ..algorithms.method import Method
from ..algorithms.partition import file as partition_files
from ..algorithms.partition.split import Sides, merged
from ..algorithms.tasks.classification import Classification
from ..algorithms.tasks.registry import TaskTable
from ..bundle.frames import LoadedModel, load_model
from ..commands.model.make import find_run, make_folder
from ..commands.simulate.simulate import RunOptions, prepare, raise_faults, report, train
from ..commands.terminal.printer import Screen
from ..commands.terminal.toml import to_toml
from ..errors import LocalError
from ..files.documents import Strict, read_bytes, validate, write_atomic
from ..files.program_code import MAIN, PYTHON, find_in, name_of
from ..files.toml_document import parse_document
from ..simulator.engines.choose import OnGpu
from ..simulator.experiment.experiment import ExperimentFile, read
from ..simulator.tracking.choose import check_installed, trackers
from .records import records_of
from .results import Results

Table: TypeAlias = Mapping[str, Any]
Indices: TypeAlias = NDArray[np.int64] | Sequence[int]
FILE, RECORDS, PARTITION, RESULTS = "experiment.toml", "records.npz", "partition.json", "results"
TRAINING = {"epochs": 1, "batch_size": 32, "lr": 0.05}


class Experiment:
    """Methods compared on the same silos, as docs/simulate.md explains them.

    ``data`` are records: a map-style torch ``Dataset`` of pairs, a pair of arrays x [N, …] and y
    [N, …], "digits", or a [data] table. ``partition`` is one of ``Dirichlet`` and the like, a
    [partition] table, the path of a partition's file, or per silo an index array [n] of whole
    numbers from 0 on, or a tuple of them: training and test, or training, validation and test.
    ``model`` is a name, a [model] table, or a function or class that makes an ``nn.Module``.
    ``methods`` are names, tables of [[methods]], or subclasses of ``Method``. ``sweep`` are values
    that each method tries, ``{"training.lr": [0.01, 0.05]}``. Further ``settings`` are keys of the
    file, such as ``task`` and ``participation``.

    All is written to ``folder``, which names the experiment. LocalError says what is wrong.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        data: "TorchDataset[Any] | Dataset | tuple[Any, Any] | Table | str",
        model: Callable[..., nn.Module] | Table | str,
        methods: Iterable[Table | str | type[Method]],
        partition: Table | Sequence[Any] | Path | str | None = None,
        seeds: int | Sequence[int] = 1,
        rounds: int = 10,
        training: Table | None = None,
        sweep: Table | None = None,
        **settings: Any,
    ) -> None:
        _check_no_text("methods", methods)
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        source, records = self._records(data)
        document = {
            "version": 1,
            "name": self.folder.resolve().name,
            "rounds": rounds,
            "seeds": [seeds] if isinstance(seeds, int) else list(seeds),
            "data": source,
            "model": _model(model, records),
            "training": {**TRAINING, **(training or {})},
            "methods": list(map(_method, methods)),
            **settings,
        }
        if sweep is not None:
            # What is no table is told with the file's other faults.
            document["sweep"] = dict(sweep) if isinstance(sweep, Mapping) else sweep
        if partition is not None:
            document["partition"] = self._partition(partition, records, document)
        # Wrong keys are told before anything is written.
        validate(document, ExperimentFile, str(self.file))
        write_atomic(self.file, to_toml(document).encode(), 0o644)

    @classmethod
    def read(cls, path: Path | str) -> "Experiment":
        """The experiment of a file that was written before, or by hand.

        LocalError names file, key, value and the fix.
        """
        path = Path(path)
        found = cls.__new__(cls)
        found.folder, found._own = path.parent, path.name  # noqa: SLF001 its own
        validate(parse_document(read_bytes(path), str(path)), ExperimentFile, str(path))
        return found

    _own = FILE

    @property
    def file(self) -> Path:
        """The file that ``staddle simulate`` runs."""
        return self.folder / self._own

    @property
    def results(self) -> Results:
        """What has come of it so far."""
        return Results(self.folder / RESULTS)

    def run(
        self,
        *,
        workers: int | None = None,
        device: str = "auto",
        settings: Sequence[str] = (),
        track: Sequence[str] = (),
    ) -> Results:
        """Run what is not finished, and show progress; after a stop or a kill, call it again.

        ``workers`` and ``device`` are as for ``staddle simulate``, ``settings`` as its ``--set``,
        and ``track`` as its ``--track``: "tensorboard", "mlflow", "wandb".
        LocalError where a run could not continue, CancelledError after Ctrl-C.
        """
        _check_no_text("settings", settings)
        _check_no_text("track", track)
        experiment = read(self.file, settings)
        # Other processes would run the whole program again to find its functions.
        own = f"{PYTHON}{MAIN}:"
        names = [experiment.file.model.name]
        for method in experiment.file.all_methods:
            names += [method.name, str(method.model.get("name", ""))]
        if any(name.startswith(own) for name in names):
            workers = 1
        apart = nullcontext() if workers == 1 else _without_main()
        asked = RunOptions(
            out=self.folder / RESULTS,
            methods=(),
            seeds=(),
            rounds=None,
            workers=workers,
            device=device,
            gpu=OnGpu(),
            track=trackers(track),
        )
        check_installed(asked.track)
        screen = Screen()
        with apart:
            prepared = prepare(screen, experiment, self.folder / RESULTS, asked)
            faults = train(screen, prepared, asked)
        report(prepared)
        raise_faults(faults, len(prepared.runs))
        return self.results

    def model(
        self, silo: str, *, method: str | None = None, seed: int | None = None
    ) -> LoadedModel:
        """The model of a silo after a finished run, measured on the silo's test records.

        Method and seed may be left out where there is one. Its folder is kept below ``folder``.
        """
        find_in(self.folder)
        run = find_run(self.folder / RESULTS, method, seed)
        # The digest is another once the run was lengthened, or has other settings.
        digest = sha256(run.identity.to_bytes()).hexdigest()[:8]
        out = self.folder / "models" / f"{run.label}-seed-{run.seed}-{silo}-{digest}"
        if not out.exists():
            out.parent.mkdir(exist_ok=True)
            make_folder(self.file, self.folder / RESULTS, silo, out, run.label, run.seed)
        return load_model(out, None)

    def __repr__(self) -> str:
        return f"Experiment({str(self.folder)!r})"

    def _records(self, data: Any) -> tuple[dict[str, Any], Dataset | None]:
        """The [data] table, and the records where they are in memory; they are then written."""
        if isinstance(data, Mapping):
            return dict(data), None
        records = records_of(data)
        if isinstance(data, str):
            return {"kind": "bundled", "name": data}, records
        save_npz(self.folder / RECORDS, records)
        return {"file": RECORDS}, records

    def _partition(self, given: Any, records: Dataset | None, document: Table) -> dict[str, Any]:
        if isinstance(given, Mapping):
            return dict(given)
        if isinstance(given, Path | str):
            # Where the program runs, and not in the experiment's folder.
            return {"file": str(Path(given).resolve())}
        if records is None:
            raise LocalError(
                "partition: index arrays are for records that the program has; write a partition"
                " file for others (docs/partitions.md)"
            )
        # [partition] and [split] together say where each record is; arrays say both at once.
        given = list(given)
        own = {key: document[key] for key in ("task",) if key in document}
        labels = validate(own, _Tasked, str(self.file)).task.strata(records.y).numpy()
        title = document["data"].get("file", document["data"].get("name"))
        how = {"kind": "given"}
        found = partition_files.partition_file(_sides(given), labels, title, None, how)
        partition_files.save(self.folder / PARTITION, found)
        return {"file": PARTITION}


class _Tasked(Strict):
    """The task of a file."""

    task: TaskTable = Classification()


def _check_no_text(name: str, given: object) -> None:
    """LocalError for a text, whose letters would pass for the entries of a list."""
    if isinstance(given, str):
        raise LocalError(f"{name} = {given!r}: give a list of texts, [{given!r}]")


def _table(given: Table | str) -> dict[str, Any]:
    return {"name": given} if isinstance(given, str) else dict(given)


def _method(given: Any) -> dict[str, Any]:
    """An entry of [[methods]]; a class is found by its place, and called by its own name."""
    if isinstance(given, type):
        return {"name": name_of(given), "label": given.name}  # type: ignore[attr-defined]
    return _table(given)


def _model(given: Any, records: Dataset | None) -> dict[str, Any]:
    """The [model] table; of records in memory it takes the shape, and the number of classes."""
    table = _table(given) if isinstance(given, Mapping | str) else {"name": name_of(given)}
    if records is None:
        return table
    # What the program says itself counts.
    known: dict[str, Any] = {"input": list(records.x.shape[1:])}
    if records.inputs:
        known = {}
    if not {"classes", "outputs"} & table.keys() and not records.y.is_floating_point():
        known["classes"] = int(records.y.max()) + 1
    return {**known, **table}


def _sides(given: Sequence[Any]) -> dict[str, Sides]:
    """The sides of each silo; a single array per silo is split 75 to 25."""
    forms = {len(own) if isinstance(own, tuple) else 1 for own in given}
    if not forms <= {1, 2, 3} or len(forms) > 1:
        raise LocalError(
            "partition: give each silo an array, or each a pair (training, test), or each a triple"
            " (training, validation, test)"
        )
    arrays = [list(map(_indices, own if isinstance(own, tuple) else (own,))) for own in given]
    named = {str(number): own for number, own in enumerate(arrays)}
    if forms == {1}:
        return merged({name: own[0] for name, own in named.items()}, "75/25", 0)
    none = np.empty(0, np.int64)
    sides = {}
    for name, own in named.items():
        train, *validation, test = own
        sides[name] = Sides(train, validation[0] if validation else none, test)
    return sides


def _indices(given: Indices) -> NDArray[np.int64]:
    found = np.sort(np.asarray(given))
    # An empty list has no dtype of its own.
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise LocalError(
            f"partition: an array of {found.dtype} {list(found.shape)}; give whole numbers [n], the"
            " places of a silo's records"
        )
    return found.astype(np.int64)


@contextmanager
def _without_main() -> Iterator[None]:
    """Other processes do not run the main program again, which would begin the experiment again."""
    main = sys.modules[MAIN]
    place, spec = vars(main).pop("__file__", None), main.__spec__
    main.__spec__ = None
    try:
        yield
    finally:
        main.__spec__ = spec
        # A notebook has none.
        if place is not None:
            main.__file__ = place
