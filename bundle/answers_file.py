"""Answers of a model as a file: a CSV table, or of each position arrays in an .npz file.

::

    record,predicted,p(absent),p(present),outside
    412,present,0.2131,0.7869,
    413,absent,0.9402,0.0598,chol

``record`` is what the id's column has, the line of the file, or an image's path. ``outside`` names
features whose value is beyond the range that the job declared. A text that a spreadsheet would
compute, such as =1+1, has ' before it.
"""

import csv
import io
import re
import secrets
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..algorithms.data.features import NUMBER
from ..errors import LocalError, UnwritableError
from ..files.documents import unwritable
from .trained import AnsweredRecords, TrainedModel

DENSE, TABLE = ".npz", ".csv"
RECORD, OUTSIDE = "record", "outside"  # columns that are not the model's
# What spreadsheets compute; a number is none, nor is a single sign.
FORMULA = re.compile(rf"(?!(?:{NUMBER.pattern})$)[=+@\t\r-].", re.DOTALL)
# Whoever unpacks the archive gets files below one folder.
MEMBER = re.compile(r"(?!/|(.*/)?\.\.(/|$))[^\\\x00-\x1f\ud800-\udfff]{1,1000}")


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


def table_of(model: TrainedModel, piece: AnsweredRecords) -> dict[str, Sequence[Any]]:
    """The columns of a table with a line per record, by name: texts, and numbers as they are."""
    task, names = model.job.task, model.description.output_names
    found: dict[str, Sequence[Any]] = {RECORD: piece.names}
    if piece.decisions is not None and task.has_classes:
        found["predicted"] = [names[one] for one in piece.decisions.tolist()]
    elif piece.decisions is not None:
        _add(found, names, piece.decisions.T.tolist())
    _add(found, model.answer_names, piece.answers.flatten(1).T.tolist())
    if model.job.features:
        found[OUTSIDE] = piece.outside
    return found


def _add(found: dict[str, Sequence[Any]], names: Iterable[str], columns: Iterable[Any]) -> None:
    """Columns under their names, or with _ behind them where a column has that name already."""
    for name, column in zip(names, columns, strict=True):
        # A label may be called like a column of ours.
        while name in found or name == OUTSIDE:
            name += "_"  # noqa: PLW2901
        found[name] = column


def _lines(file: BinaryIO, model: TrainedModel, pieces: Iterable[AnsweredRecords]) -> Iterator[int]:
    # A file's name may hold what UTF-8 does not.
    text = io.TextIOWrapper(file, "utf-8", "backslashreplace", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    tables = map(partial(table_of, model), pieces)
    for table in tables:
        if not file.tell():
            writer.writerow(map(_text, table))
        writer.writerows(map(_text, row) for row in zip(*table.values(), strict=True))
        yield len(table[RECORD])
    text.detach()


def _text(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return f"'{text}" if FORMULA.match(text) else text


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
                array = f"{name}.npy"
                if array in archive.NameToInfo or not MEMBER.fullmatch(name):
                    raise LocalError(
                        f"record {name[:100]!r}: cannot name an array of the file; give records"
                        " names that differ, without .. or a slash in front"
                    )
                with archive.open(array, "w") as member:
                    np.lib.format.write_array(member, own, allow_pickle=False)
            yield len(piece.names)
