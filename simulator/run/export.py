"""What a run gave, for people and other programs; every file is written as a whole.

::

    rounds.csv                 rounds, measure, silos, records, macro, micro, spread, least, most: a
                               line a measure
    silos.csv                  silo, training, measure, correct, records, accuracy: of the look
                               after the last round
    models/<silo>.safetensors  the model that the silo keeps, as ``part/<part>/<tensor>`` and
                               ``extra/<tensor>``
    coordinator.safetensors    what the method's coordinator half knew in the end, where it has such
                               a thing

The names of measures are those of history.py. A model's file is what a silo of a federation keeps
as model.safetensors, and the coordinator's what ``staddle job results`` gives as
result.safetensors.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ...algorithms.course import SiloState
from ...algorithms.delivery import CoordinatorState
from ...algorithms.engines.aggregation import SILOS as AXIS
from ...algorithms.training.silo_round import state_to_bytes
from ...errors import UnwritableError
from ...files import tensor_file
from ...files.documents import unwritable, write_atomic
from .history import Measured
from .manifest import SiloRecords

ROUNDS, SILOS, MODELS, COORDINATOR = "rounds.csv", "silos.csv", "models", "coordinator.safetensors"
LOOKS = ("all/", "validation/")  # measures of every silo


def write(
    folder: Path,
    silos: Sequence[SiloRecords],
    history: Sequence[Measured],
    models: Mapping[str, SiloState],
    coordinator: CoordinatorState,
) -> tuple[Path, ...]:
    """Write all into a run's folder; the files. Existing ones of the same name are replaced."""
    files = {ROUNDS: rounds_csv(history).encode(), SILOS: silos_csv(silos, history).encode()}
    if coordinator:
        own = {name: tensor.detach().clone().contiguous() for name, tensor in coordinator.items()}
        files[COORDINATOR] = tensor_file.to_bytes(
            own, {AXIS: json.dumps([silo.name for silo in silos])}
        )
    try:
        (folder / MODELS).mkdir(exist_ok=True)
    except OSError as error:
        raise UnwritableError(f"{folder / MODELS}: cannot make it: {unwritable(error)}") from error
    for name, data in files.items():
        write_atomic(folder / name, data, 0o644)
    for silo, state in models.items():
        write_atomic(model_file(folder, silo), state_to_bytes(state), 0o644)
    return (*(folder / name for name in files), *(model_file(folder, silo) for silo in models))


def rounds_csv(history: Iterable[Measured]) -> str:
    """A line a measure, in the order in which they were taken."""
    return _csv(
        ("rounds", "measure", "silos", "records", "macro", "micro", "spread", "least", "most"),
        (
            (
                one.rounds,
                one.measure,
                len(one.records),
                sum(one.records.values()),
                one.macro,
                one.micro,
                one.spread,
                float(one.accuracies.min()),
                float(one.accuracies.max()),
            )
            for one in history
        ),
    )


def silos_csv(silos: Iterable[SiloRecords], history: Sequence[Measured]) -> str:
    """A line a silo and measure of the last look."""
    looks = [one for one in history if one.measure.startswith(LOOKS)]
    last = [one for one in looks if one.rounds == looks[-1].rounds]
    return _csv(
        ("silo", "training", "measure", "correct", "records", "accuracy"),
        (
            (
                silo.name,
                silo.train,
                one.measure,
                one.correct[silo.name],
                one.records[silo.name],
                one.correct[silo.name] / one.records[silo.name],
            )
            for silo in silos
            for one in last
        ),
    )


def model_file(folder: Path, silo: str) -> Path:
    """Where the model lies that a silo keeps."""
    return folder / MODELS / f"{silo}.safetensors"


def _csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
