"""Answers of a model as a file: a CSV table, or of each position arrays in an .npz file.

::

    record,predicted,p(absent),p(present),outside
    412,present,0.2131,0.7869,
    413,absent,0.9402,0.0598,chol

``record`` is what the id's column has, the line of the file, or an image's path. ``outside`` names
features whose value is beyond the range that the job declared.
"""

import csv
import io
import secrets
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import LocalError, UnwritableError
from ..files.documents import unwritable
from .trained import AnsweredRecords, TrainedModel

DENSE, TABLE = ".npz", ".csv"


def write(path: Path, model: TrainedModel, pieces: Iterable[AnsweredRecords]) -> Iterator[int]:
    """Write the answers as they come; gives the number of records of each piece.

    The file is there once all are: LocalError for one of them leaves none behind. An existing file
    is replaced.
    """
    dense = model.job.task.dense
    wanted = DENSE if dense else TABLE
    if path.suffix.lower() != wanted:
        what = "a class for each position" if dense else "a line for each record"
        raise LocalError(f"{path}: the answers are {what}; name a file that ends in {wanted}")
    with _replacing(path) as file:
        yield from (_arrays if dense else _lines)(file, model, pieces)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path)
    except OSError as error:
        raise UnwritableError(f"{path}: cannot write it: {unwritable(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)


def columns(model: TrainedModel) -> tuple[str, ...]:
    """The names of a table's columns."""
    task, names = model.job.task, model.description.output_names
    decided: tuple[str, ...] = ()
    if task.has_classes:
        decided = ("predicted",)
    elif task.cut_offs(len(names)):
        decided = names
    outside = ("outside",) if model.job.features else ()
    return ("record", *decided, *model.answer_names, *outside)


def rows(model: TrainedModel, piece: AnsweredRecords) -> Iterator[tuple[str, ...]]:
    """The lines of a table."""
    names = model.description.output_names
    decided: Iterable[tuple[str, ...]] = repeat(())
    if piece.decisions is not None:
        found = piece.decisions.tolist()
        classes = model.job.task.has_classes
        decided = [(names[one],) if classes else tuple(map(str, one)) for one in found]
    outside: Iterable[tuple[str, ...]] = repeat(())
    if model.job.features:
        outside = [(text,) for text in piece.outside]
    answers = piece.answers.flatten(1).tolist()
    for name, own, values, beyond in zip(piece.names, decided, answers, outside, strict=False):
        yield (name, *own, *(f"{value:.6g}" for value in values), *beyond)


def _lines(file: BinaryIO, model: TrainedModel, pieces: Iterable[AnsweredRecords]) -> Iterator[int]:
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns(model))
    for piece in pieces:
        writer.writerows(rows(model, piece))
        yield len(piece.names)
    text.detach()


def _arrays(
    file: BinaryIO, model: TrainedModel, pieces: Iterable[AnsweredRecords]
) -> Iterator[int]:
    small = model.job.model.width <= np.iinfo(np.uint8).max + 1
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for piece in pieces:
            if piece.decisions is None:
                raise LocalError(f"the task {model.job.task.kind} decides nothing for a position")
            whole = piece.decisions.numpy().astype(np.uint8 if small else np.int64)
            for name, own in zip(piece.names, whole, strict=True):
                with archive.open(f"{name}.npy", "w") as member:
                    np.lib.format.write_array(member, own, allow_pickle=False)
            yield len(piece.names)
