"""The blind round that this silo is in, kept while its connection is lost and found again."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..algorithms.job import Job
from ..proto.blind import model_digest, round_frame, round_terms, sums_down, uploaded
from ..security import roster as rosters
from ..security.identity import Keys
from ..security.policy import Policy
from ..security.roster import Roster
from ..security.secagg_silo import Party
from ..security.signers import Signers
from .admission import Admitted, asked_of_rows
from .blind import BlindRound, Pads, no_pads
from .bundle import Bundle
from .delivery import Delivered
from .directed_rows import AnyRows, DirectedRows
from .egress import Gate, TurnedAwayError, UnreachableError
from .group_keys import GroupKeys
from .hidden_uploads import HiddenUploads
from .outcomes import Settled
from .rows import Own, Rows, expected_rows
from .secure_memory import MemoryFiles
from .sharing import Sharing
from .sums import Sums

Train = Callable[[Delivered], Coroutine[Any, Any, Bundle]]


@dataclass(frozen=True)
class Local:
    """What a round takes of this silo: its job's folder, its training, and the values that it mixes in itself."""

    folder: Path
    train: Train
    own: Own


class BlindRounds:
    """One at a time."""

    def __init__(self, roster: Roster, policy: Policy, gate: Gate, keys: Keys, group_keys: GroupKeys) -> None:
        """``keys`` are the silo's own."""
        self._silo = keys.entry.id
        self._roster = roster
        self._policy = policy
        self._gate = gate
        self._keys = keys
        self._group_keys = group_keys
        self._now: BlindRound | None = None
        self._accepted: dict[tuple[str, int], set[bytes]] = {}  # (job, round): contexts of uploads that are there

    def goes_on(self, job_digest: str, round_: int) -> bool:
        """Whether it is in this round already, with its training; what that leaves on disk says nothing then."""
        return self._now is not None and (self._now.job.digest, self._now.round) == (job_digest, round_)

    async def take_part(
        self, admitted: Admitted, round_: int, cohort: tuple[str, ...], local: Local, waiting: tuple[str, ...]
    ) -> None:
        """Until the round's sum is open. ``waiting`` are the codes of refusals after which it may still go on."""
        job = admitted.job
        if self._now is None or not self.goes_on(job.digest, round_):
            await self.leave()
            self._now = await self._enter(admitted, round_, cohort, local)
        goes_on = False
        try:
            await self._now.run()
        except UnreachableError:
            goes_on = True
            raise
        except TurnedAwayError as error:
            goes_on = error.code in waiting
            raise
        finally:
            if not goes_on:
                await self.leave()

    async def fetch(self, job: Job, round_: int, folder: Path, own: Own) -> Delivered:
        """What comes down for a round of a blind job, the final delivery too; sums are checked, and rows are opened."""
        sums = None
        rows: AnyRows | None = None
        if expected_rows(job, round_):
            sharing, asked = await self._sharing(job, folder), asked_of_rows(job, self._policy)
            directed = job.security.mix == "directed"
            rows = DirectedRows(sharing, round_, asked) if directed else Rows(sharing, round_, asked, own)
        if sums_down(job, round_):
            sums = Sums(await self._sharing(job, folder), round_)
        return await self._gate.fetch(job, round_, rows, sums)

    async def _enter(self, admitted: Admitted, round_: int, cohort: tuple[str, ...], local: Local) -> BlindRound:
        job = admitted.job
        before, key = None, b""
        pads: Pads = no_pads
        if job.keyed:
            sharing = await self._sharing(job, local.folder)
            key, pads = sharing.key, sharing.pads
            if uploaded(job.up(round_)):
                accepted = self._accepted_in(job.name, round_)
                before = HiddenUploads(self._gate, sharing, admitted.declared, round_, cohort, accepted)
        delivered = await self.fetch(job, round_, local.folder, local.own)
        model = model_digest(job, round_, delivered.items, delivered.digests, delivered.sums)
        frame = round_frame(job, round_, self._roster.federation, rosters.digest(self._roster), model)
        terms = round_terms(job, self._policy.terms)
        party = Party(self._silo, Signers.of(self._roster), terms, self._keys.sign, os.urandom)
        training = asyncio.create_task(local.train(delivered))
        keeper = MemoryFiles(local.folder, lambda: self._gate.entered(job))
        return BlindRound(self._gate, party, frame, keeper, job, admitted.declared, training, before, key, pads)

    async def _sharing(self, job: Job, folder: Path) -> Sharing:
        return Sharing.of(job, self._roster, self._keys, await self._group_keys.keys(job), folder)

    def settled(self, upload: Settled) -> None:
        """Take note of what became of an upload whose connection broke."""
        if upload.status != "sent" or not upload.ctx:
            return
        ctx, now = bytes.fromhex(upload.ctx), self._now
        self._accepted.setdefault((upload.job, upload.round), set()).add(ctx)
        if now and (upload.job, upload.round) == (now.job.name, now.round):
            now.accepted(ctx)

    def _accepted_in(self, job: str, round_: int) -> set[bytes]:
        """Contexts of the uploads of a round that the coordinator has, which may grow; other rounds are forgotten."""
        self._accepted = {(job, round_): self._accepted.get((job, round_), set())}
        return self._accepted[job, round_]

    async def leave(self) -> None:
        """Let the round go, and its training."""
        now, self._now = self._now, None
        if now is not None:
            await now.close()
