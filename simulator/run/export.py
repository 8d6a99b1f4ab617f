"""A run's results, for people and other programs; every file is written as a whole.

::

    silos.csv                  silo, training, measure, records, the task's score, balanced,
                               constant: of the look after the last round
    models/<silo>.safetensors  the model that the silo keeps, as ``part/<part>/<tensor>`` and
                               ``extra/<tensor>``
    measures.json              what test counts say after the last round, of all records and silo by
                               silo, such as class by class, and with the job's [metrics] AUROC
    coordinator.safetensors    what the method's coordinator half knew in the end, where it has such
                               a thing

The names of measures are those of history.py. A model's file is what a silo of a federation keeps
as model.safetensors; the coordinator's file is what ``staddle job results`` writes as
result.safetensors.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ...algorithms.course import SiloState
from ...algorithms.engines.aggregation import SILOS as AXIS
from ...algorithms.exchange.delivery import CoordinatorState
from ...algorithms.tasks.counting import MODELS as MODEL_STATES
from ...algorithms.tasks.counting import Counting, Tally
from ...algorithms.tasks.table_counting import CONFUSION
from ...algorithms.training.silo_round import Seen, state_to_bytes
from ...files import tensor_file
from ...files.documents import write_all, write_atomic
from .disk import writing
from .history import Measured
from .manifest import SiloRecords

SILOS, MODELS, COORDINATOR = "silos.csv", "models", "coordinator.safetensors"
MEASURES = "measures.json"
# Measures of all silos; those of a cohort cannot be compared between rounds.
LOOKS = ("all/", "validation/")


def write(
    folder: Path,
    silos: Sequence[SiloRecords],
    history: Sequence[Measured],
    coordinator: CoordinatorState,
    seen: Mapping[str, Seen],
    counting: Counting,
) -> tuple[Path, ...]:
    """Write all but models into a run's folder, in place of files of the same name; the files.

    The files are durable when it returns. UnwritableError if the disk fails.
    """
    files = {SILOS: silos_csv(silos, history, counting.score.key).encode()}
    files[MEASURES] = (json.dumps(measures(seen, counting), indent=1) + "\n").encode()
    # No file for a method without such a state.
    if coordinator:
        # safetensors does not accept tensors that share memory.
        own = {name: tensor.detach().clone().contiguous() for name, tensor in coordinator.items()}
        axis = json.dumps([silo.name for silo in silos])
        files[COORDINATOR] = tensor_file.to_bytes(own, {AXIS: axis})

    # the snapshot that names these files comes after them: a run is finished only with all its
    # results
    written = []
    for name, data in files.items():
        written.append(folder / name)
        write_atomic(written[-1], data, 0o644)
    return tuple(written)


def write_models(folder: Path, states: Iterable[tuple[str, SiloState]]) -> None:
    """Write the models that these silos keep, in place of older ones; one is in memory at a time.

    They are durable when it returns. UnwritableError if the disk fails.
    """
    with writing(folder / MODELS, "cannot make it"):
        (folder / MODELS).mkdir(exist_ok=True)
    write_all((model_file(folder, silo), state_to_bytes(state)) for silo, state in states)


def measures(seen: Mapping[str, Seen], counting: Counting) -> dict[str, Any]:
    """What the test counts of all silos say, together and silo by silo, as plain values.

    Of each silo's model as delivered, and as trained last.
    """
    found: dict[str, Any] = {}
    for model in MODEL_STATES:
        tallies = {silo: getattr(own, model) for silo, own in seen.items()}
        own = {silo: _said(tally) for silo, tally in tallies.items()}
        found[model] = {"all": _said(counting.pooled(list(tallies.values()))), "silos": own}
    return found


def _said(tally: Tally) -> dict[str, Any]:
    # Of a table its measures say enough, but for a matrix.
    tables = {name: table for name, table in tally.tables.items() if name == CONFUSION}
    return {**tally.said(), **tables}


def silos_csv(silos: Iterable[SiloRecords], history: Sequence[Measured], score: str) -> str:
    """A line per silo and measure of the last look; the column ``score`` has the task's.

    ``training`` is the number of a silo's training records.
    """
    looks = [one for one in history if one.measure.startswith(LOOKS)]

    # methods are compared after the last round, not at the best one, which test records would have
    # chosen
    last = [one for one in looks if one.rounds == looks[-1].rounds]
    rows = []
    for silo, one in product(silos, last):
        own = (one.records, one.scores, one.recalls, one.baselines)
        rows.append((silo.name, silo.train, one.measure, *(by[silo.name] for by in own)))
    columns = ("silo", "training", "measure", "records", score, "balanced", "constant")
    return _csv(columns, rows)


def model_file(folder: Path, silo: str) -> Path:
    """The path of the model that a silo keeps.

    It is there once the run is finished.
    """
    return folder / MODELS / f"{silo}.safetensors"


def _csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
