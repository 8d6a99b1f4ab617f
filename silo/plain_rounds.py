"""Rounds whose uploads leave in the clear: fetch, train, upload.

The counterpart of silo/blind/rounds.py.
"""

import asyncio

from ..security.blind.plan import RoundPlan
from .blind.rounds import OwnValues, Train
from .egress.gate import Gate
from .ingress.delivery import ReceivedDelivery
from .parts.contributions import Contributions
from .parts.declared import Declared

PAUSE_SECONDS = 0.5  # rate limit: a coordinator must not be able to make us spin


class PlainRounds:
    """The plain rounds of this silo; nothing of a round is in memory between two calls."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def goes_on(self, job_digest: str, round_: int) -> bool:
        """Always false: what a lost connection leaves of a round is on disk."""
        return False

    async def take_part(
        self,
        declared: Declared,
        plan: RoundPlan,
        cohort: tuple[str, ...],
        local: OwnValues,
        kept: Contributions | None,
        train: Train,
    ) -> None:
        """Upload the ``kept`` contributions, or newly trained ones.

        It returns once the coordinator has all of them.
        """
        if kept is None:
            kept = await train(await self.fetch(plan, local))
        else:
            await asyncio.sleep(PAUSE_SECONDS)  # the round is asked for again
        await self._gate.upload_plain(declared, plan.round, kept, cohort)

    async def fetch(self, plan: RoundPlan, local: OwnValues) -> ReceivedDelivery:
        """Download the delivery for a round, the final one too.

        ``local`` is for blind rounds.
        """
        return await self._gate.session.fetch(plan)
