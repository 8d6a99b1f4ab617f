"""The blind round that this silo is in, kept while its connection is lost and found again."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

from ..proto.blind import model_digest, round_frame, round_terms
from ..security import roster as rosters
from ..security.policy import Policy
from ..security.roster import Roster
from ..security.secagg_silo import Party
from ..security.signers import Sign, Signers
from .admission import Admitted
from .blind import BlindRound, Payload
from .delivery import Delivered
from .egress import Gate, TurnedAwayError, UnreachableError
from .outcomes import Settled
from .secure_memory import MemoryFiles

Train = Callable[[Delivered], Coroutine[Any, Any, Payload]]


class BlindRounds:
    """One at a time."""

    def __init__(self, silo: str, roster: Roster, policy: Policy, gate: Gate, sign: Sign) -> None:
        """``sign`` with the silo's protocol key."""
        self._silo = silo
        self._roster = roster
        self._policy = policy
        self._gate = gate
        self._sign = sign
        self._now: BlindRound | None = None

    def goes_on(self, job_digest: str, round_: int) -> bool:
        """Whether it is in this round already, with its training; what that leaves on disk says nothing then."""
        return self._now is not None and (self._now.job.digest, self._now.round) == (job_digest, round_)

    async def take_part(
        self, admitted: Admitted, round_: int, keeper: MemoryFiles, train: Train, waiting: tuple[str, ...]
    ) -> None:
        """Until the round's sum is open. ``waiting`` are the codes of refusals after which it may still go on."""
        job = admitted.job
        if self._now is None or not self.goes_on(job.digest, round_):
            await self.leave()
            self._now = await self._enter(admitted, round_, keeper, train)
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

    async def _enter(self, admitted: Admitted, round_: int, keeper: MemoryFiles, train: Train) -> BlindRound:
        job = admitted.job
        delivered = await self._gate.fetch(job, round_)
        model = model_digest(job, round_, delivered.items, delivered.digests)
        frame = round_frame(job, round_, self._roster.federation, rosters.digest(self._roster), model)
        terms = round_terms(job, self._policy.terms)
        party = Party(self._silo, Signers.of(self._roster), terms, self._sign, os.urandom)
        training = asyncio.create_task(train(delivered))
        return BlindRound(self._gate, party, frame, keeper, job, admitted.declared, training)

    def settled(self, upload: Settled) -> None:
        """Take note of what became of an upload whose connection broke."""
        now = self._now
        if now and upload.status == "sent" and (upload.job, upload.round) == (now.job.name, now.round):
            now.accepted()

    async def leave(self) -> None:
        """Let the round go, and its training."""
        now, self._now = self._now, None
        if now is not None:
            await now.close()
