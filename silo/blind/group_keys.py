"""A silo's part in the key that all silos of a job share and the coordinator lacks.

The protocol is in security/blind/group_key.py.

Files in the job's folder, 0600, for this silo's eyes alone; the first three begin with the context
of their epoch (job and members), 32 bytes, the first two continue in pieces of 32, and all three
end with their digest (files/checked_file.py)::

    group.secret    what it gave, the ephemeral key under which that was sealed, and the private
                    half of its first prekey; gone once the key is made
    group.key       the key, what it is made of (``parts_of``), and the first prekeys of the job's
                    other silos, in order of ids
    group.prekeys   the private halves of its prekeys, the first and later ones:
                    silo/ingress/keyed_job.py, as prekeys.json
    group.ended     empty: the job has ended here, and the others are gone for good

``group.secret`` is durable before anything made of it leaves, so a process that restarts gives
the very same; the prekeys are durable before the key is, and this before ``group.secret`` goes, so
one of the two is there until the job ends. All go, durably, before the silo confirms the end. To
erase is to remove the file: what the disk keeps of it is the disk's affair.
"""

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ...algorithms.job.job import Job
from ...errors import LocalError, UnwritableError
from ...files import checked_file
from ...files.documents import remove, sync_directory, unwritable, write_atomic
from ...security.blind.group_key import (
    Epoch,
    JobKeys,
    KeyContribution,
    Relayed,
    contribute,
    make_key,
    parts_of,
)
from ...security.blind.prekeys import Known
from ...security.blind.sealing import SECRET_BYTES, SealedSecret
from ...security.identity.keys import Keys
from ...security.identity.pairwise_keys import KEY_BYTES
from ...security.identity.roster import Roster
from ...security.identity.signers import Signers
from ..egress.session import UnreachableError
from ..ingress.keyed_job import KNOWN, OWN, PrekeyFiles

SECRET, KEY, ENDED = "group.secret", "group.key", "group.ended"
ERASED = (OWN, KEY, SECRET, KNOWN)  # when the job ends
# before asking again: a coordinator must not be able to make us spin
PAUSE_SECONDS = 0.5
# times in a row that it lacks contributions; then the agent greets again, and is told what to do
MOST_ASKED = 20
PIECE = 32  # bytes


@dataclass(frozen=True, slots=True)
class _Secrets:
    secret: bytes = field(repr=False)
    ephemeral: bytes = field(repr=False)
    prekey: bytes = field(repr=False)


class KeyGate(Protocol):
    """The protocol messages that the keys need."""

    async def contribute(
        self, job: Job, ctx: bytes, contribution: KeyContribution, pieces: tuple[SealedSecret, ...]
    ) -> None:
        """Upload this silo's contribution."""
        ...

    async def group_key(self, job: Job) -> tuple[Relayed, ...]:
        """Fetch the other silos' contributions; empty while some are missing."""
        ...


class GroupKeys:
    """The keys of one silo's jobs, among the members of a roster.

    A key that was made when one of the job's silos had other keys is refused.
    """

    def __init__(self, roster: Roster, keys: Keys, gate: KeyGate, jobs: Path) -> None:
        """``jobs`` is the folder of the jobs' folders."""
        self._silo = keys.entry.id
        self._roster = roster
        self._keys = keys
        self._gate = gate
        self._jobs = jobs
        self._asking = asyncio.Lock()  # the coordinator answers one such call of a silo at a time

    def check_new(self, job: Job) -> None:
        """LocalError where this silo cannot contribute to the key of a job offered to it."""
        # Once the key is made, the secret behind our contribution is erased, so nobody can make the
        # same key with us again.
        epoch = self._epoch(job)
        epoch.others(self._silo)
        if self.ended(job.name):
            raise LocalError(
                f"{self._jobs / job.name}: a job of this name has ended here, and this silo's"
                " share of its key is gone; the operator must sign the job under a new name"
            )
        if (path := self._jobs / job.name / KEY).exists():
            raise LocalError(
                f"{path}: a job of this name has its key already, and this silo's share of it is"
                " gone; the operator must sign the job under a new name"
            )
        # Detects a damaged file before the job is accepted.
        self._kept_secret(job, epoch)

    async def contribute(self, job: Job) -> None:
        """Upload this silo's contribution to the key, before it accepts the job.

        It is the very same however often it is uploaded: Ed25519 and the seals are deterministic.
        The job's folder exists. RefusedError where the coordinator does not take it.
        """
        epoch = self._epoch(job)
        contribution, pieces = await asyncio.to_thread(self._contribution, job, epoch)
        await self._gate.contribute(job, epoch.context(), contribution, pieces)

    async def keys(self, job: Job) -> JobKeys:
        """The keys from the folder, or made of what the coordinator brings.

        RefusedError says who brought or contributed what is wrong. UnreachableError where some
        silos' contributions are still missing.
        """
        epoch = self._epoch(job)
        kept = await asyncio.to_thread(self._kept_keys, job, epoch)
        if kept is None:
            relayed = await self._all_relayed(job)
            kept = await asyncio.to_thread(self._made, job, epoch, relayed)
        return kept

    def ended(self, job: str) -> bool:
        """True if a job has ended and its keys were erased, also before a restart."""
        return (self._jobs / job / ENDED).exists()

    def end(self, job: str) -> None:
        """Erase a job's keys, durably: it has ended here, and nothing of it is opened any more.

        UnwritableError where the disk does not do it. A job without keys is left as it is.
        """
        folder = self._jobs / job
        if any((folder / name).exists() for name in ERASED):
            # The note comes first: keys that are half erased must not pass for keys to be made.
            write_atomic(folder / ENDED, b"")
            for name in ERASED:
                self._erase(folder / name)

    async def _all_relayed(self, job: Job) -> tuple[Relayed, ...]:
        for _ in range(MOST_ASKED):
            async with self._asking:
                relayed = await self._gate.group_key(job)
            if relayed:
                return relayed
            await asyncio.sleep(PAUSE_SECONDS)
        why = f"lacks some silos' shares of the key of job {job.name!r}; trying again"
        raise UnreachableError(self._roster.coordinator.id, why)

    def _epoch(self, job: Job) -> Epoch:
        return Epoch.of(self._roster, job.silos, job.digest)

    # Files, and what is made of them.

    def _contribution(
        self, job: Job, epoch: Epoch
    ) -> tuple[KeyContribution, tuple[SealedSecret, ...]]:
        kept = self._kept_secret(job, epoch)
        if kept is None:
            kept = _Secrets(os.urandom(SECRET_BYTES), os.urandom(KEY_BYTES), os.urandom(KEY_BYTES))
            # Durable before anything made from it leaves: a second draw would make a different
            # contribution.
            pieces = (epoch.context(), kept.secret, kept.ephemeral, kept.prekey)
            checked_file.write_bytes(self._jobs / job.name / SECRET, b"".join(pieces))
        return self._given(epoch, kept)

    def _given(
        self, epoch: Epoch, kept: _Secrets
    ) -> tuple[KeyContribution, tuple[SealedSecret, ...]]:
        return contribute(
            epoch, self._silo, kept.secret, kept.ephemeral, kept.prekey, self._keys.sign
        )

    def _made(self, job: Job, epoch: Epoch, relayed: tuple[Relayed, ...]) -> JobKeys:
        kept = self._kept_secret(job, epoch)
        if kept is None:
            raise LocalError(
                f"{self._jobs / job.name / SECRET}: missing, or of silos with other keys: it"
                " held this silo's share of the job's key; restore it, or have the job signed under"
                " a new name"
            )
        own, _ = self._given(epoch, kept)
        seed, signers = self._keys.exchange.private_bytes_raw(), Signers.of(self._roster, job.silos)
        key = make_key(epoch, self._silo, seed, own, kept.secret, relayed, signers)
        parts = parts_of((own, *(each.contribution for each in relayed)))
        prekeys = {each.contribution.sealing.sender: each.contribution.prekey for each in relayed}
        # Sorted, as ``_kept_keys`` reads them back.
        others = {silo: prekeys[silo] for silo in sorted(prekeys)}

        # The secret goes last: a process that dies before makes the very same key again.
        folder = self._jobs / job.name
        PrekeyFiles(folder, epoch.context()).begin(kept.prekey, Known.first(others))
        checked_file.write_bytes(
            folder / KEY, b"".join((epoch.context(), key, parts, *others.values()))
        )
        self._erase(folder / SECRET)
        return JobKeys(key, parts, others)

    def _kept_keys(self, job: Job, epoch: Epoch) -> JobKeys | None:
        """The keys that were made; LocalError for those of other members or of a namesake."""
        path = self._jobs / job.name / KEY
        if self.ended(job.name):
            raise LocalError(
                f"{path}: erased, since job {job.name!r} has ended here; the operator must sign it"
                " under a new name"
            )
        if not path.exists():
            return None

        # Under another roster the others made another key, or none.
        others = sorted(epoch.others(self._silo))
        context, key, parts, *prekeys = _pieces(path, 3 + len(others))
        if context != epoch.context():
            raise LocalError(
                f"{path}: of another job than {job.name!r}, or of silos with other keys, so no"
                " other silo has this key; the operator must sign the job again under a new name"
            )
        self._erase(self._jobs / job.name / SECRET)  # where the process died between the two
        return JobKeys(key, parts, dict(zip(others, prekeys, strict=True)))

    def _kept_secret(self, job: Job, epoch: Epoch) -> _Secrets | None:
        """The secrets that were contributed in this epoch.

        None also for those of another epoch: no key of this one is made of them.
        """
        path = self._jobs / job.name / SECRET
        if not path.exists():
            return None
        context, *secrets = _pieces(path, 4)
        return _Secrets(*secrets) if context == epoch.context() else None

    def _erase(self, path: Path) -> None:
        if not path.exists():
            return
        remove(path)
        try:
            # Without this, a power failure could bring the file back.
            sync_directory(path.parent)
        except OSError as error:
            raise UnwritableError(f"{path}: cannot remove it: {unwritable(error)}") from error


def _pieces(path: Path, number: int) -> tuple[bytes, ...]:
    """The pieces of a file; a LocalError shows its length alone, for they are secrets."""
    kept = checked_file.read_bytes(path)
    if len(kept) != number * PIECE:
        raise LocalError(
            f"{path}: {len(kept)} bytes, not {number * PIECE}; restore the silo's folder from a"
            " backup"
        )
    return tuple(kept[at : at + PIECE] for at in range(0, len(kept), PIECE))
