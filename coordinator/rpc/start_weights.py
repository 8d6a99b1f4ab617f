"""The file of weights that a job begins with, at the coordinator: from its operator to the disk."""

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import closing
from pathlib import Path

from ...algorithms.job.job import Job
from ...algorithms.models.pretrained import WEIGHTS_FOLDER
from ...errors import LocalError, RefusedError, UnwritableError
from ...files.arriving import ArrivingFile
from ...proto import operations_pb2 as pb
from ...proto.channel import transfer_seconds
from ..storage.spool import MARGIN_BYTES


def missing_file(job: Job) -> str:
    """Why the file that a job begins with has to be sent; empty if it is here, or there is none."""
    weights, path = job.model.weights, job.weights_file
    if weights is None or path is None or weights.is_at(path):
        return ""
    return (
        f"job {job.name!r} begins with a file of weights that is not here: submit it with --weights"
        f" FILE, or put the file into the coordinator's folder, as {WEIGHTS_FOLDER}/{path.name}"
    )


def check_start_file(job: Job) -> None:
    """LocalError unless the file that a job begins with is here and fits its model."""
    if why := missing_file(job):
        raise LocalError(why)
    job.start_values()


async def receive(
    operator: str, job: Job, directory: Path, frames: AsyncIterator[pb.WeightedJob]
) -> None:
    """Take the file that follows a signed job; it is durable when this returns.

    RefusedError STORAGE, LENGTH, DIGEST or LIMIT says why not; nothing stays of it then.
    ``directory`` is the coordinator's.
    """
    weights, path = job.model.weights, job.weights_file
    if weights is None or path is None:
        why = f"job {job.name!r} names no file of weights; submit it without one"
        raise RefusedError(operator, "JOB_INVALID", why)
    # A name of its own: a thread may still be at work on what an earlier call has left.
    partial = directory / "spool" / f"weights-{secrets.token_hex(8)}"
    arriving = ArrivingFile(path, partial, *weights.expected)
    try:
        async with asyncio.timeout(transfer_seconds(weights.expected[1])):
            why = await _arrived(operator, arriving, directory, frames)
    except TimeoutError:
        slow = "the file was sent slower than its size allows"
        raise RefusedError(operator, "LIMIT", slow) from None
    except UnwritableError as error:
        raise RefusedError(operator, "STORAGE", without(directory, error)) from error
    except LocalError as error:
        raise RefusedError(operator, "LENGTH", f"the file of weights: {error}") from error
    finally:
        arriving.discard()
    if why:
        raise RefusedError(operator, "DIGEST", why)


async def _arrived(
    operator: str, arriving: ArrivingFile, directory: Path, frames: AsyncIterator[pb.WeightedJob]
) -> str:
    """Why the file that arrives is another one; empty if it is the right one."""
    await asyncio.to_thread(arriving.open)
    with closing(arriving):
        _check_disk(operator, arriving, directory)
        async for frame in frames:
            await asyncio.to_thread(arriving.write, frame.weights)
            _check_disk(operator, arriving, directory)
        return await asyncio.to_thread(arriving.finish)


def _check_disk(operator: str, arriving: ArrivingFile, directory: Path) -> None:
    # Again and again, since others fill the disk meanwhile.
    if shutil.disk_usage(directory).free < arriving.missing + MARGIN_BYTES:
        why = f"no room for {arriving.missing} bytes of a file of weights; free some disk"
        raise RefusedError(operator, "STORAGE", why)


def drop(job: Job, others: Iterable[Job]) -> None:
    """Remove the file of a job that was refused, unless another job begins with it."""
    path = job.weights_file
    if path is not None and path not in {other.weights_file for other in others}:
        path.unlink(missing_ok=True)


def without(directory: Path, error: LocalError) -> str:
    """An error's text without the coordinator's folder, which is nobody else's business."""
    return str(error).replace(f"{directory}/", "")
