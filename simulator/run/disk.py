"""Errors of a run's files, with the path and what to do.

A run's files are this software's own: the fix for a damaged one is a backup, or to start again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ...errors import LocalError, UnwritableError, reason
from ...files.documents import Strict, parse_canonical, read_bytes, unwritable

BEGIN_ANEW = "restore it from a backup, or remove the run's folder to begin it from scratch"

ModelT = TypeVar("ModelT", bound=Strict)


@contextmanager
def writing(path: Path, failure: str = "cannot write it") -> Iterator[None]:
    """UnwritableError, with the path and the reason, where the block raises OSError.

    The command then stops: a run that cannot be saved must not continue.
    """
    try:
        yield
    except OSError as error:
        raise UnwritableError(f"{path}: {failure}: {unwritable(error)}") from error


def read_kept(path: Path) -> bytes:
    """The bytes of a file that a snapshot needs; LocalError where it cannot be read.

    The error says how to begin again.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}; {BEGIN_ANEW}") from error


def parse_kept(path: Path, model: type[ModelT]) -> ModelT:
    """The document in a run's file of canonical JSON; LocalError where it is not as written."""
    try:
        return parse_canonical(read_bytes(path), model, str(path))
    except LocalError as error:
        raise LocalError(f"{error}; {BEGIN_ANEW}") from error
