"""The file of weights that a job begins with, as it comes from the coordinator.

The signed job has its SHA-256 and size. What arrives before the connection is lost stays, and the
next download resumes behind it.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from ...algorithms.models.pretrained import StartWeights
from ...errors import LocalError, RefusedError, UnwritableError
from ...files.arriving import ArrivingFile
from ...security.preflight import LEAST_FREE

# the pieces of the file from a byte on
Download = Callable[[int], AsyncIterator[bytes]]


async def take(weights: StartWeights, path: Path, download: Download, coordinator: str) -> None:
    """Download the file to ``path``; it is whole when this returns.

    RefusedError DELIVERY for another file than the signed job's, DATA without room for it,
    UnwritableError where the disk does not take it.
    """
    arriving = ArrivingFile(path, path.with_name(f"{path.name}.part"), *weights.expected)
    await asyncio.to_thread(arriving.open)
    # A size that the signed job claims must not fill the disk of a silo.
    if shutil.disk_usage(path.parent).free < arriving.missing + LEAST_FREE:
        arriving.close()
        arriving.discard()
        why = f"{path.parent}: no room for the job's file of weights, {weights.size} bytes"
        raise RefusedError(coordinator, "DATA", why)
    try:
        why = await _rest(arriving, download)
        # A crash may have spoilt what arrived before it; now all of it is sent again.
        if why and arriving.resumed:
            why = await _rest(arriving, download)
    except UnwritableError:
        raise
    except LocalError as error:
        why = str(error)
    finally:
        arriving.close()
    if why:
        arriving.discard()
        raise RefusedError(coordinator, "DELIVERY", f"the job's file of weights: {why}")


async def _rest(arriving: ArrivingFile, download: Download) -> str:
    """Download what is missing; why it is another file, or empty."""
    # All of it may be here, if this silo was killed before it had its name.
    if arriving.missing:
        async for piece in download(arriving.received):
            await asyncio.to_thread(arriving.write, piece)
    return await asyncio.to_thread(arriving.finish)
