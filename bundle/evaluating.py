"""How good a loaded model is on records of which somebody knows what is true."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..algorithms.data.dataset import Dataset
from ..algorithms.data.options import OneByOne
from ..algorithms.numerics.devices import exact
from ..algorithms.tasks.measures import CalibrationBin, calibration
from ..algorithms.tasks.registry import guard
from ..algorithms.tasks.table_counting import SCORES
from ..algorithms.training.loop import marked
from ..algorithms.training.record_checks import check_records
from .description import Figures, Threshold
from .measuring import compared, counting_of, figures_of, judged
from .trained import TrainedModel


@dataclass(frozen=True)
class ModelEvaluation:
    """Figures, what thresholds give, and calibration curves by class or label."""

    measured: Figures
    thresholds: tuple[Threshold, ...]
    curves: Mapping[str, tuple[CalibrationBin, ...]]


def evaluate(model: TrainedModel, data: Path) -> ModelEvaluation:
    """Measure a model on a file or folder of labelled records of its contract.

    LocalError where the records are not of the contract.
    """
    table = model.contract.at(data)
    # As many as there are: pictures are read when they are used.
    if isinstance(table, OneByOne):
        table = table.model_copy(update={"lazy": True})
    job = model.job
    records = table.load(job.model, job.features, wary=model.module.learned)
    check_records(job, records, str(data))
    with exact(), guard(job.task):
        return _measured(model, records)


def _measured(model: TrainedModel, records: Dataset) -> ModelEvaluation:
    job, module = model.job, model.module
    counting = counting_of(job.task, job.model.width, job.metrics, len(records))
    marks = marked(module.outputs, module.parts, records, counting)
    whole = {name: np.concatenate(pieces) for name, pieces in marks.items()}
    truth = records.y.numpy()
    tables = counting.count({name: [own] for name, own in whole.items()}, [truth]).tables
    return ModelEvaluation(
        figures_of(counting, whole, truth, records.groups),
        _thresholds(model, records),
        _curves(tables, model.description.output_names),
    )


def _thresholds(model: TrainedModel, records: Dataset) -> tuple[Threshold, ...]:
    known = {own.of: own for own in model.description.thresholds}
    if not known:
        return ()
    found = compared(model.module, model.job.task, records)
    return tuple(
        judged(name, known[name].value, known[name].chosen_on, found, place)
        for place, name in enumerate(model.threshold_names)
        if name in known
    )


def _curves(
    tables: Mapping[str, Any], names: tuple[str, ...]
) -> dict[str, tuple[CalibrationBin, ...]]:
    if SCORES not in tables:
        return {}
    scores = np.array(tables[SCORES])
    # Of two classes the second alone has a histogram.
    return dict(zip(names[-len(scores) :], map(calibration, scores), strict=True))
