"""A silo's part in the key that all silos of a job share and the coordinator lacks: security/group_key.py.

Two files in the job's folder, 0600, for this silo's eyes alone; both begin with the context of their epoch (job and
roster), 32 bytes, and go on in pieces of 32::

    group.secret    what it gave, and the ephemeral key under which that was sealed; gone once the key is made
    group.key       the key

``group.secret`` is durable before anything made of it leaves, so a process that starts anew gives the very same; the
key is durable before ``group.secret`` goes, so one of the two is always there. To erase is to remove the file: what the
disk keeps of it is the disk's affair.
"""

import asyncio
import os
from pathlib import Path
from typing import Protocol

from ..algorithms.job import Job
from ..errors import LocalError, UnwritableError
from ..files import read_bytes, sync_directory, unwritable, write_atomic
from ..security.group_key import Contribution, Epoch, Relayed, contribute, make_key
from ..security.identity import Keys
from ..security.roster import Roster
from ..security.sealing import SECRET_BYTES, Sealed
from ..security.signers import Signers
from .egress import UnreachableError

SECRET, KEY = "group.secret", "group.key"
PAUSE_SECONDS = 0.5  # before asking again: a coordinator does not set our pace
MOST_ASKED = 20  # times in a row that it lacks contributions; then the agent greets again, and is told what to do
PIECE = 32  # bytes


class Door(Protocol):
    """What the keys want of the gate."""

    async def contribute(self, job: Job, ctx: bytes, contribution: Contribution, pieces: tuple[Sealed, ...]) -> None:
        """Give this silo's contribution."""
        ...

    async def group_key(self, job: Job) -> tuple[Relayed, ...]:
        """What the others gave; nothing while some are missing."""
        ...


class GroupKeys:
    """The keys of one silo's jobs, under one roster."""

    def __init__(self, roster: Roster, keys: Keys, door: Door, jobs: Path) -> None:
        """``jobs`` is the folder of the jobs' folders."""
        self._silo = keys.entry.id
        self._roster = roster
        self._keys = keys
        self._door = door
        self._jobs = jobs

    def check_new(self, job: Job) -> None:
        """LocalError where this silo cannot give to the key of a job that it is about to accept."""
        epoch = self._epoch(job)
        epoch.others(self._silo)
        if (path := self._jobs / job.name / KEY).exists():
            raise LocalError(
                f"{path}: the key of a job of this name was made here, and what this silo gave to it is gone; the "
                "operator must sign it again under a new name"
            )
        self._kept_secret(job, epoch)

    async def contribute(self, job: Job) -> None:
        """Give this silo's part, before it accepts the job; the very same however often it gives it.

        Ed25519 and the seals are deterministic. The job's folder is there. RefusedError where the coordinator does not
        take it.
        """
        epoch = self._epoch(job)
        contribution, pieces = await asyncio.to_thread(self._contribution, job, epoch)
        await self._door.contribute(job, epoch.context(), contribution, pieces)

    async def key(self, job: Job) -> bytes:
        """The key, 32 bytes, from the folder, or made of what the coordinator brings, which is asked once.

        RefusedError says who brought or gave what is wrong. UnreachableError: some silos' parts are still missing.
        """
        epoch = self._epoch(job)
        kept = await asyncio.to_thread(self._kept_key, job, epoch)
        if kept is None:
            relayed = await self._all_relayed(job)
            kept = await asyncio.to_thread(self._made, job, epoch, relayed)
        return kept

    async def _all_relayed(self, job: Job) -> tuple[Relayed, ...]:
        for _ in range(MOST_ASKED):
            if relayed := await self._door.group_key(job):
                return relayed
            await asyncio.sleep(PAUSE_SECONDS)
        why = f"lacks what some silos gave to the key of job {job.name!r}; trying again"
        raise UnreachableError(self._roster.coordinator.id, why)

    def _epoch(self, job: Job) -> Epoch:
        return Epoch.of(self._roster, job.silos, job.digest)

    # Files, and what is made of them.

    def _contribution(self, job: Job, epoch: Epoch) -> tuple[Contribution, tuple[Sealed, ...]]:
        kept = self._kept_secret(job, epoch)
        if kept is None:
            kept = (os.urandom(SECRET_BYTES), os.urandom(SECRET_BYTES))
            write_atomic(self._jobs / job.name / SECRET, epoch.context() + b"".join(kept))
        return contribute(epoch, self._silo, *kept, self._keys.sign)

    def _made(self, job: Job, epoch: Epoch, relayed: tuple[Relayed, ...]) -> bytes:
        kept = self._kept_secret(job, epoch)
        if kept is None:
            raise LocalError(
                f"{self._jobs / job.name / SECRET}: gone, or of another roster, and with it this silo's part in the "
                "key of the job; restore it, or have the job signed under a new name"
            )
        secret, ephemeral = kept
        own, _ = contribute(epoch, self._silo, secret, ephemeral, self._keys.sign)
        seed, signers = self._keys.exchange.private_bytes_raw(), Signers.of(self._roster, job.silos)
        key = make_key(epoch, self._silo, seed, own, secret, relayed, signers)
        write_atomic(self._jobs / job.name / KEY, epoch.context() + key)
        self._erase_secret(job)
        return key

    def _kept_key(self, job: Job, epoch: Epoch) -> bytes | None:
        """The key that was made; LocalError where that was under another roster, or for another job of this name."""
        path = self._jobs / job.name / KEY
        if not path.exists():
            return None
        context, key = _pieces(path, 2)
        if context != epoch.context():
            raise LocalError(
                f"{path}: of another roster or job than {job.name!r} is now, so no other silo has this key; the "
                "operator must sign the job again under a new name"
            )
        self._erase_secret(job)  # where the process died between the two
        return key

    def _kept_secret(self, job: Job, epoch: Epoch) -> tuple[bytes, bytes] | None:
        """Secret and ephemeral key; None also for those of another epoch: no key of this one is made of them."""
        path = self._jobs / job.name / SECRET
        if not path.exists():
            return None
        context, secret, ephemeral = _pieces(path, 3)
        return (secret, ephemeral) if context == epoch.context() else None

    def _erase_secret(self, job: Job) -> None:
        path = self._jobs / job.name / SECRET
        if not path.exists():
            return
        try:
            path.unlink()
            sync_directory(path.parent)
        except OSError as error:
            raise UnwritableError(f"{path}: cannot remove it: {unwritable(error)}") from error


def _pieces(path: Path, number: int) -> tuple[bytes, ...]:
    """What a file holds; a LocalError tells its length alone."""
    kept = read_bytes(path)
    if len(kept) != number * PIECE:
        raise LocalError(f"{path}: {len(kept)} bytes, not {number * PIECE}; restore the silo's folder from a backup")
    return tuple(kept[at : at + PIECE] for at in range(0, len(kept), PIECE))
