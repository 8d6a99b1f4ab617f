"""Who serves from a state folder: one process at a time, under a number that only grows.

``<directory>/lease.json``, written by whoever takes the folder over; its time of change is renewed
every two seconds while it serves::

    {"generation":1796011200123,"holder":"5c1f…","machine":"9f86…"}

Two processes on one machine are kept apart by the lock of the folder, which the kernel releases
when the first one dies. A lock may not reach another machine. So there a lease counts as expired
once the file has not changed for ``LEASE_SECONDS``, by the clock of whoever watches it; no two
clocks are compared. A coordinator that stops in order leaves ``machine`` empty, and nobody waits.

Whoever was taken over from, and does not know it yet, is refused by its own storage: each
transaction and each record of the ledger compares the file first. Whoever takes over makes a
transaction after it wrote the file, so none of the other one is open then. Silos refuse a lower
generation than one they have met (silo/egress/witness.py), which holds where two copies of a folder
were served. Neither needs trust: two coordinators at once get no more out of a silo than one.
"""

import asyncio
import os
import secrets
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import pydantic

from ... import log
from ...errors import LocalError, reason
from ...files.documents import Strict, canonical_json, parse_canonical, read_bytes, write_atomic
from ...security.identity.certificate import utc_now
from ...security.log.lock import held
from .backup import occupied

FILE = "lease.json"
RENEW_SECONDS = 2.0
LEASE_SECONDS = 10.0
LOOK_SECONDS = 0.25  # between two looks of a standby
BOOT = Path("/proc/sys/kernel/random/boot_id")


class LeaseRecord(Strict):
    """``lease.json``: ``holder`` is drawn for each process, ``machine`` changes with each boot."""

    generation: Annotated[int, pydantic.Field(strict=True, ge=0)] = 0
    holder: str = ""
    machine: str = ""

    def encoded(self) -> bytes:
        """The file's bytes."""
        return canonical_json(self.model_dump())


class Lease:
    """A folder that this process serves from, until another one takes it over."""

    def __init__(self, path: Path, record: LeaseRecord) -> None:
        self.generation = record.generation
        self._path = path
        self._record = record

    def check(self) -> None:
        """LocalError once another process has taken the folder over, or the file is gone."""
        found = read_bytes(self._path)
        if found != self._record.encoded():
            raise LocalError(
                f"{self._path}: another coordinator has taken this folder over; this one stops, and"
                " writes nothing more"
            )

    async def renew(self) -> None:
        """Show for ever that this process is alive; LocalError as for ``check``."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            self.check()
            try:
                os.utime(self._path)
            except OSError as error:
                raise LocalError(f"{self._path}: cannot renew it: {reason(error)}") from error

    def release(self) -> None:
        """Let the next coordinator begin at once, on whichever machine."""
        # One that cannot be released expires.
        with suppress(LocalError):
            self.check()
            write_atomic(self._path, self._record.model_copy(update={"machine": ""}).encoded())


@contextmanager
def leased(directory: Path) -> Iterator[Lease]:
    """Take a folder over while the block runs: locked, and under a higher generation.

    LocalError where another process of this machine has it. Call ``vacant`` before.
    """
    with occupied(directory):
        # Higher than that of a copy which was served since: a restored folder does not know it.
        generation = max(_stored(directory).generation + 1, int(utc_now().timestamp() * 1000))
        record = LeaseRecord(
            generation=generation, holder=secrets.token_hex(16), machine=_machine()
        )
        lease = Lease(directory / FILE, record)
        write_atomic(directory / FILE, record.encoded())
        log.event("lease.taken", generation=generation)
        try:
            yield lease
        finally:
            lease.release()


async def vacant(directory: Path, stopped: asyncio.Future[str], *, standby: bool = False) -> None:
    """Wait until nobody serves from this folder any more, or until ``stopped``.

    Without ``standby`` only for a lease of another machine to expire; LocalError if it is renewed.
    """
    seen, since = _sign_of_life(directory), time.monotonic()
    if seen is not None:
        log.event("lease.waits", standby=standby)
    # Where the lock is held, taking it says so.
    while seen is not None and not stopped.done() and (standby or not held(directory)):
        await asyncio.wait({stopped}, timeout=LOOK_SECONDS)
        found = _sign_of_life(directory)
        if found != seen:
            if found is not None and not standby:
                raise LocalError(
                    f"{directory / FILE}: a coordinator on another machine serves from this folder;"
                    " stop it first, or wait for its end with --standby"
                )
            seen, since = found, time.monotonic()
        elif time.monotonic() - since >= LEASE_SECONDS:
            return


def _sign_of_life(directory: Path) -> object:
    """What changes while another process serves from this folder; None if none does."""
    # The lock stands until its process ends, however long that hangs.
    if held(directory):
        return time.monotonic()
    record = _stored(directory)
    if record.machine in ("", _machine()):
        return None
    return record, (directory / FILE).stat().st_mtime_ns


def _stored(directory: Path) -> LeaseRecord:
    path = directory / FILE
    if not path.exists():
        return LeaseRecord()
    return parse_canonical(read_bytes(path), LeaseRecord, str(path))


def _machine() -> str:
    """A name of this machine since its last boot: locks from before that are gone."""
    return BOOT.read_text().strip() if BOOT.exists() else f"{uuid.getnode():012x}"
