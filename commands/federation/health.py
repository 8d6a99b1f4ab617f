"""``staddle health``: whether a daemon is ready and its event loop turns, for probes of containers.

While it runs, the loop writes the time into ``<directory>/BEAT``, on the clock that counts from the
machine's start. It is quick: neither PyTorch nor the rest of the configuration is read.
"""

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from ...errors import LocalError
from ...files.documents import read_bytes
from ...files.toml_document import parse_document
from ...security.log.lock import held
from ..terminal import printer

BEAT = "BEAT"
BEAT_SECONDS = 5.0
LATE_SECONDS = 60.0  # a loop that has written nothing for so long hangs


def health(
    config: Annotated[Path, typer.Option(help="coordinator.toml or silo.toml.")],
) -> None:
    """Tell whether the daemon is ready and responds; exit code 1 if not.

    For probes of containers. A silo is ready whether its coordinator can be reached or not.
    """
    document = parse_document(read_bytes(config), str(config))
    directory = document.get("directory")
    if not isinstance(directory, str):
        raise LocalError(f"{config}: no directory; name the file that the daemon runs with")
    folder = config.parent / directory
    age = _age(folder)
    if age > LATE_SECONDS:
        raise LocalError(
            f"{folder}: the daemon has not responded for {age:.0f} s; restart it, keep its log"
        )
    printer.show(f"ready, {age:.0f} s ago")


def _age(directory: Path) -> float:
    """Seconds since the daemon of this folder last wrote its time; LocalError where none is ready.

    A daemon that died leaves the file: whoever starts another within a minute is told that it is
    ready while it still starts.
    """
    if not held(directory):
        raise LocalError(f"{directory}: no daemon runs with this folder; start it")
    try:
        return time.monotonic() - float((directory / BEAT).read_text("ascii"))
    except (FileNotFoundError, ValueError) as error:
        raise LocalError(
            f"{directory}: the daemon is not ready yet; it reads its ledger and its jobs first"
        ) from error


async def beat(directory: Path, ready: asyncio.Event) -> None:
    """Write the time again and again once the daemon is ready, until cancelled.

    Run it in the daemon's own loop. A disk that does not take it ends nothing.
    """
    path = directory / BEAT
    await ready.wait()
    try:
        while True:
            with contextlib.suppress(OSError):
                _write(path)
            await asyncio.sleep(BEAT_SECONDS)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _write(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        # Always as long, and not cut off before: a reader finds the old time or the new one.
        os.write(descriptor, f"{time.monotonic():020.3f}\n".encode())
    finally:
        os.close(descriptor)
