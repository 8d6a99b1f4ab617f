"""One process a state folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import LocalError


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``<folder>/LOCK`` while the block runs; LocalError if another process holds it."""
    descriptor = os.open(folder / "LOCK", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LocalError(f"{folder}: another process runs with this folder; stop it first") from error
        yield
    finally:
        os.close(descriptor)
