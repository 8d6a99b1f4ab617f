"""Records that a program holds: a data frame, columns by name, or an array."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..algorithms.data.new_records import NewRecords
from ..algorithms.data.rows import as_text
from ..algorithms.data.sources.formats.csv_file import Csv
from ..algorithms.data.sources.formats.table import Table
from ..algorithms.job.foreign_code import Allowed
from ..algorithms.models.build import input_shape
from ..errors import LocalError
from .answers_file import table_of
from .evaluating import ModelEvaluation, evaluate
from .trained import AnsweredRecords, TrainedModel, load

Frame: TypeAlias = Any  # of pandas, which need not be installed
AT_ONCE = 512  # rows


@dataclass(frozen=True, eq=False, repr=False)
class LoadedModel(TrainedModel):
    """A trained model for programs and notebooks: ``staddle.load_model``."""

    def predict(self, records: Frame | Mapping[str, Sequence[Any]] | Tensor | Path | str) -> Any:
        """The model's answers for records, as columns by name: arrays of numbers, lists of texts.

        ``records`` are a pandas data frame or columns by name, for a model of a table; an array or
        tensor [N, …] as the model takes it; or the path of a file or folder, as ``staddle model
        predict`` takes it. A data frame gets a data frame with its own index. A model that says a
        class for each position gives a list of arrays. LocalError for what is not of the model's
        contract.
        """
        if isinstance(records, Path | str):
            return self._told(self.answer(Path(records)))
        if isinstance(records, np.ndarray | Tensor):
            return self._told(self.answers_of(_of_array(self, records), "the array"))
        if isinstance(records, Mapping):
            return self._told(self.answers_of(_of_columns(self, records), "the columns"))
        if not hasattr(records, "columns"):
            kind = type(records).__name__
            raise LocalError(f"{kind}: give a data frame, columns by name, an array or a path")
        found = self._told(self.answers_of(_of_columns(self, records), "the data frame"))
        found.pop("record")
        # Made by the caller's own pandas, which need not be installed for anything else.
        return type(records)(found, index=records.index)

    def evaluate(self, data: Path | str) -> ModelEvaluation:
        """Figures, thresholds and calibration on a file or folder of labelled records.

        As ``staddle model evaluate`` has them: ``measured.said`` are figures by name, and
        ``measured.intervals`` their 95 % intervals. LocalError for what is not of the contract.
        """
        return evaluate(self, Path(data))

    def _told(self, pieces: Iterable[AnsweredRecords]) -> Any:
        if self.job.task.dense:
            return [own.numpy() for piece in pieces for own in _decided(piece)]
        found: dict[str, list[Any]] = {}
        for piece in pieces:
            for name, own in table_of(self, piece).items():
                found.setdefault(name, []).extend(own)
        # Names of records and classes are texts; all else are numbers.
        return {
            name: own if isinstance(own[0], str) else np.array(own) for name, own in found.items()
        }


def load_model(path: Path | str, packages: Allowed = ()) -> LoadedModel:
    """A trained model, verified: the folder that a silo keeps when a job ends.

    ``packages`` are installed ones of other projects whose code may run. None is for a model of
    one's own: it allows all of them, and whatever function of this machine a simulation named.
    LocalError where the files are not as they were signed, or this machine's code computes
    something else.
    """
    found = load(Path(path), packages)
    return LoadedModel(found.folder, found.job, found.module)


def _decided(piece: AnsweredRecords) -> Tensor:
    return piece.answers if piece.decisions is None else piece.decisions


def _of_array(model: TrainedModel, records: Any) -> Iterator[NewRecords]:
    shape = input_shape(model.job.model)
    try:
        x = torch.as_tensor(records, dtype=torch.float32)
    except TypeError as error:
        raise LocalError("the array holds what is no number; give a data frame") from error
    if tuple(x.shape[1:]) != shape:
        raise LocalError(
            f"the array is {list(x.shape)}, and the model takes [N, {', '.join(map(str, shape))}]"
        )
    for start in range(0, len(x), AT_ONCE):
        piece = x[start : start + AT_ONCE]
        yield NewRecords([*map(str, range(start, start + len(piece)))], piece)


def _of_columns(model: TrainedModel, records: Any) -> Iterator[NewRecords]:
    table = model.contract
    if not isinstance(table, Csv):
        raise LocalError("the model takes no table; give an array, or a path")
    names: list[Any] = [*table.features, *filter({*records}.__contains__, [table.id])]
    if absent := {*table.features} - {*records}:
        there = ", ".join(map(str, records))
        raise LocalError(f"the data frame: has no column {min(absent)!r}; the columns are {there}")
    try:
        lengths = sorted({len(records[name]) for name in names})
    except TypeError as error:
        raise LocalError(
            'a column is no list of values; give one per record, such as {"age": [63]}'
        ) from error
    if len(lengths) > 1:
        counts = f"from {lengths[0]} to {lengths[-1]}"
        raise LocalError(f"the columns have {counts} values; give one per record")
    # As a point writes numbers, whatever the silo's files do.
    plain = table.typed(Path("the data frame"))
    texts = [map(partial(_cell, plain), repeat(name), records[name]) for name in names]
    rows = map(dict, map(partial(zip, names), zip(*texts, strict=True)))
    yield from plain.of_cells(enumerate(rows), AT_ONCE)


def _cell(table: Table, name: str, value: Any) -> str:
    """What a file would have for a value."""
    if isinstance(value, date) and name in table.dates and value == value:  # noqa: PLR0124 - NaT
        return value.strftime(table.dates[name])
    if isinstance(value, np.generic):
        value = value.item()
    # pandas' marks of what is missing have these names.
    if type(value).__name__ in {"NAType", "NaTType"}:
        value = None
    return as_text(value) or table.marks(name)[0]
